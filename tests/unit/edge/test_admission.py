from __future__ import annotations

from dataclasses import replace

import pytest

from dsec.base.errors import CapacityUnavailable, DsecError, InvalidRequest
from dsec.edge.admission import AdmissionLimits, NodeFacts, decide
from dsec.wire.sandbox import Limits

GIB = 1 << 30
FACTS = NodeFacts(
    live=10,
    waiting=0,
    memory_total_bytes=8 * GIB,
    memory_available_bytes=4 * GIB,
    cpus=2,
    uid_runs_free=100,
)
LIMITS = AdmissionLimits(max_sandboxes=11, memory_floor_bytes=GIB, max_launching=2, max_waiting=3)


def test_what_fits_is_taken() -> None:
    decide(FACTS, LIMITS, Limits(memory_mb=8192, cpu_cores=2))


def test_more_cores_than_the_node_has_are_a_ceiling_like_any_other() -> None:
    decide(FACTS, LIMITS, Limits(cpu_cores=64))


@pytest.mark.parametrize(
    ("facts", "asked", "refusal", "says"),
    [
        (replace(FACTS, live=11), Limits(), CapacityUnavailable, "11"),
        (replace(FACTS, waiting=3), Limits(), CapacityUnavailable, "3 creations wait"),
        (replace(FACTS, uid_runs_free=0), Limits(), CapacityUnavailable, "user ids"),
        (replace(FACTS, memory_available_bytes=GIB), Limits(), CapacityUnavailable, "1.0 GiB"),
        (FACTS, Limits(memory_mb=8193), InvalidRequest, "8193 and the node has 8192"),
    ],
)
def test_a_refusal_carries_its_numbers(
    facts: NodeFacts, asked: Limits, refusal: type[DsecError], says: str
) -> None:
    with pytest.raises(refusal, match=says):
        decide(facts, LIMITS, asked)


def test_what_never_fits_is_not_called_a_lack_of_capacity() -> None:
    with pytest.raises(InvalidRequest):
        decide(replace(FACTS, live=99), LIMITS, Limits(memory_mb=1 << 20))
