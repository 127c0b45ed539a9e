"""Own placements not yet in the fleet view, so that a burst does not all land on one node."""

from __future__ import annotations

from collections import defaultdict, deque

from dsec.base.ids import NodeId


class Overlay:
    """Placements by node with the moment each was made; a fresh view of a node replaces them."""

    def __init__(self) -> None:
        self._placed: dict[NodeId, deque[float]] = defaultdict(deque)

    def placed(self, node: NodeId, at: float) -> None:
        """Count a placement made at a moment, in monotonic seconds."""
        self._placed[node].append(at)

    def seen(self, node: NodeId, at: float) -> None:
        """Forget the placements a view taken at a moment already shows."""
        placed = self._placed[node]
        while placed and placed[0] <= at:
            placed.popleft()

    def count(self, node: NodeId) -> int:
        """Placements on a node that its view does not show yet."""
        return len(self._placed[node]) if node in self._placed else 0
