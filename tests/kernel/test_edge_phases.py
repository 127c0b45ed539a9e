"""Phases of a sandbox with a network: real filter, real processes, edges that are killed."""

from __future__ import annotations

from typing import Any

import pytest

from tests.kernel.networks import WORLD
from tests.kernel.test_edge import Edge
from tests.kernel.test_edge_network import (
    GREETING,
    Greeter,
    aether,
    anyio_backend,
    beyond,
    edge,
    greeted,
    greeter,
    sh,
    store,
)

__all__ = ["aether", "anyio_backend", "beyond", "edge", "greeter", "store"]
pytestmark = [pytest.mark.needs_root, pytest.mark.anyio, pytest.mark.adversarial]


async def enter(edge: Edge, sandbox: str, name: str) -> None:
    answer = await edge.http.post(f"/v1/sandboxes/{sandbox}/phase", json={"name": name})
    assert answer.status_code == 200, answer.text
    assert answer.json()["phase"] == name


async def processes(edge: Edge, sandbox: str) -> list[list[str]]:
    answer = await edge.http.get(f"/v1/sandboxes/{sandbox}/processes")
    return [entry["argv"] for entry in answer.json() if entry["pid"] != 1]


def phases(greeter: Greeter, **agent: Any) -> list[dict[str, Any]]:
    allowed = {f"tcp://{WORLD}:{greeter.port}": True}
    return [
        {"name": "setup", "network_rules": allowed},
        {"name": "agent", "network_rules": {}, **agent},
    ]


CONNECT = (
    "busybox mkfifo /tmp/in; (busybox sleep 1000 >/tmp/in & busybox nc {} {} </tmp/in >/tmp/out & "
    "echo $! >/tmp/nc) >/dev/null 2>&1"
)
HEARD = "until busybox grep -q hello /tmp/out; do busybox usleep 50000; done"
CUT = "echo x > /tmp/in; while kill -0 $(busybox cat /tmp/nc); do busybox usleep 50000; done"


async def test_what_narrows_cuts_what_is_open(edge: Edge, greeter: Greeter) -> None:
    sandbox = await edge.create(phases=phases(greeter))
    assert await greeted(edge, sandbox, greeter)
    await sh(edge, sandbox, CONNECT.format(greeter.address, greeter.port))
    assert (await sh(edge, sandbox, HEARD))[0] == 0
    before = await processes(edge, sandbox)
    assert before
    await enter(edge, sandbox, "agent")
    assert not await greeted(edge, sandbox, greeter)
    assert ["busybox", "sleep", "1000"] in await processes(edge, sandbox)
    assert "No such process" in (await sh(edge, sandbox, CUT))[1]
    assert await sh(edge, sandbox, "busybox cat /tmp/out") == (0, GREETING.decode())
    await enter(edge, sandbox, "setup")
    assert await greeted(edge, sandbox, greeter)


async def test_nobody_keeps_a_connection_over_the_end_of_a_phase(
    edge: Edge, greeter: Greeter
) -> None:
    sandbox = await edge.create(phases=phases(greeter, secrets={"TOKEN": "t"}))
    await sh(edge, sandbox, CONNECT.format(greeter.address, greeter.port))
    assert (await sh(edge, sandbox, HEARD))[0] == 0
    await enter(edge, sandbox, "agent")
    assert await processes(edge, sandbox) == []
    assert await sh(edge, sandbox, "echo $TOKEN") == (0, "t\n")
    assert not await greeted(edge, sandbox, greeter)
