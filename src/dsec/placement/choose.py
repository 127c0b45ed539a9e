"""Filter, then rank: sample k of the eligible nodes, take the least loaded."""

from __future__ import annotations

import random
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Literal

from dsec.base.ids import NodeId
from dsec.placement.overlay import Overlay
from dsec.wire.public_v1 import NodeView
from dsec.wire.sandbox import SandboxSpec

SAMPLE = 2
"""Two random choices already keep the fullest node close to the mean; more choices herd."""


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why no node will do. `unsupported` will not pass by waiting."""

    kind: Literal["away", "unsupported", "tried"]
    reasons: dict[NodeId, str]

    def explain(self) -> str:
        """All reasons in a line."""
        if not self.reasons:
            return "no node is known"
        return "; ".join(f"{node}: {why}" for node, why in sorted(self.reasons.items()))


def choose(
    fleet: Sequence[NodeView],
    spec: SandboxSpec,
    overlay: Overlay,
    rng: random.Random,
    tried: Collection[NodeId] = (),
) -> NodeId | Refusal:
    """Pick a node for a sandbox.

    Args:
        fleet: the latest view of every node.
        spec: what is to be placed.
        overlay: own placements the views do not show yet.
        rng: draws the sample.
        tried: nodes that refused this sandbox already.
    """
    reasons = {NodeId(node.id): _unfit(node, spec, tried) for node in fleet}
    fit = [node for node in fleet if not reasons[NodeId(node.id)]]
    if not fit:
        return Refusal(_kind(fleet, spec, tried), reasons)
    drawn = rng.sample(fit, min(SAMPLE, len(fit)))
    best = min(drawn, key=lambda node: load_of(node, overlay))
    return NodeId(best.id)


def load_of(node: NodeView, overlay: Overlay) -> float:
    """Sandboxes per core, those on their way included."""
    on_it = node.running + node.creating + overlay.count(NodeId(node.id))
    return on_it / max(1, node.cpus)


def _unfit(node: NodeView, spec: SandboxSpec, tried: Collection[NodeId]) -> str:
    """Why a node is out of the question; empty if it is not."""
    if not node.healthy:
        return "not reachable or not healthy"
    if spec.backend not in node.backends:
        return f"has no {spec.backend} backend"
    if NodeId(node.id) in tried:
        return "refused"
    return ""


def _kind(
    fleet: Sequence[NodeView], spec: SandboxSpec, tried: Collection[NodeId]
) -> Literal["away", "unsupported", "tried"]:
    if tried:
        return "tried"
    healthy = [node for node in fleet if node.healthy]
    if healthy and not any(spec.backend in node.backends for node in fleet):
        return "unsupported"
    return "away"
