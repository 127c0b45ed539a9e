"""How much of the edge's memory answers may take that have to be whole before they are sent.

A command's output comes as one JSON answer and may have 128 MiB; a few such at once are fine, as many
as a caller likes are not. The bound is the process's, whoever asks.
"""

from __future__ import annotations

from dsec.base.errors import RateLimited

MAX_BYTES = 512 << 20
"""As aether sends them; an answer costs some three times as much while it is turned into JSON."""


class Budget:
    """What may be held at once."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.used = 0


EDGE = Budget(MAX_BYTES)


class Charge:
    """What one answer holds. Release it when the answer has gone out; harmless twice."""

    __slots__ = ("_budget", "_size")

    def __init__(self, budget: Budget = EDGE) -> None:
        self._budget = budget
        self._size = 0

    def take(self, size: int) -> None:
        """Hold so many bytes more.

        Raises:
            RateLimited: too much is being held already.
        """
        if self._budget.used + size > self._budget.limit:
            raise RateLimited(
                "too many large answers are on their way; ask for less output, or again",
                retry_after_s=1,
            )
        self._budget.used += size
        self._size += size

    def release(self) -> None:
        """Give all of it back."""
        self._budget.used -= self._size
        self._size = 0
