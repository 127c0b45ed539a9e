"""Placement: what is filtered, what is preferred, what is said when nothing is left."""

from __future__ import annotations

import random
from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from dsec.base.ids import NodeId
from dsec.placement.choose import Refusal, choose, load_of
from dsec.placement.overlay import Overlay
from dsec.wire.public_v1 import NodeView
from dsec.wire.sandbox import SandboxSpec

SPEC = SandboxSpec(image="debian")


def node(name: str, running: int = 0, cpus: int = 1, *, healthy: bool = True) -> NodeView:
    return NodeView(
        id=name,
        version="0",
        backends=["container"],
        running=running,
        cpus=cpus,
        healthy=healthy,
    )


def chosen(fleet: list[NodeView], overlay: Overlay | None = None, seed: int = 0) -> str | Refusal:
    return choose(fleet, SPEC, overlay or Overlay(), random.Random(seed))


def test_the_least_loaded_of_two() -> None:
    fleet = [node("n001", running=5), node("n002", running=4)]
    assert all(chosen(fleet, seed=seed) == "n002" for seed in range(50))


def test_load_is_per_core() -> None:
    fleet = [node("n001", running=10, cpus=10), node("n002", running=2, cpus=1)]
    assert all(chosen(fleet, seed=seed) == "n001" for seed in range(50))


def test_own_placements_count_until_the_view_shows_them() -> None:
    overlay = Overlay()
    first = NodeId("n001")
    for moment in (1.0, 2.0, 3.0):
        overlay.placed(first, moment)
    assert chosen([node("n001"), node("n002", running=1)], overlay) == "n002"
    overlay.seen(first, 2.0)
    assert overlay.count(first) == 1
    assert load_of(node("n001"), overlay) == 1.0
    overlay.seen(first, 3.0)
    assert chosen([node("n001"), node("n002", running=1)], overlay) == "n001"


def test_a_burst_spreads() -> None:
    overlay, rng = Overlay(), random.Random(1)
    fleet = [node(f"n00{number}") for number in range(8)]
    where: Counter[str] = Counter()
    for moment in range(800):
        picked = choose(fleet, SPEC, overlay, rng)
        assert not isinstance(picked, Refusal)
        overlay.placed(picked, float(moment))
        where[picked] += 1
    assert max(where.values()) - min(where.values()) <= 10


def test_the_sick_and_the_tried_are_left_out() -> None:
    fleet = [node("n001", healthy=False), node("n002"), node("n003")]
    picked = choose(fleet, SPEC, Overlay(), random.Random(0), {NodeId("n002")})
    assert picked == "n003"


def test_refusals_say_why() -> None:
    nothing = chosen([])
    assert isinstance(nothing, Refusal)
    assert (nothing.kind, nothing.explain()) == ("away", "no node is known")
    sick = chosen([node("n001", healthy=False)])
    assert isinstance(sick, Refusal)
    assert sick.kind == "away"
    assert sick.explain() == "n001: not reachable or not healthy"
    spec = SandboxSpec(image="debian", backend="microvm")
    lacking = choose([node("n001")], spec, Overlay(), random.Random(0))
    assert isinstance(lacking, Refusal)
    assert lacking.kind == "unsupported"
    all_tried = choose([node("n001")], SPEC, Overlay(), random.Random(0), {NodeId("n001")})
    assert isinstance(all_tried, Refusal)
    assert all_tried.kind == "tried"


def test_a_backend_only_a_sick_node_has_may_come_back() -> None:
    fleet = [node("n001", healthy=False), NodeView(id="n002", version="0", backends=["sim"])]
    refused = chosen(fleet)
    assert isinstance(refused, Refusal)
    assert refused.kind == "away"


@given(
    st.lists(
        st.tuples(st.booleans(), st.integers(0, 50), st.integers(0, 64)), min_size=1, max_size=20
    ),
    st.integers(),
)
def test_only_fit_nodes_are_chosen(drawn: list[tuple[bool, int, int]], seed: int) -> None:
    fleet = [
        node(f"{number:04}", running, cpus, healthy=healthy)
        for number, (healthy, running, cpus) in enumerate(drawn)
    ]
    picked = chosen(fleet, seed=seed)
    fit = {view.id for view in fleet if view.healthy}
    assert isinstance(picked, Refusal) if not fit else picked in fit
