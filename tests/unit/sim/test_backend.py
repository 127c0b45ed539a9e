"""The seam: launch, connect, kill, clean, and what can be made to fail."""

from __future__ import annotations

import anyio
import pytest

from dsec.base.errors import SandboxGone, StartFailed, Unavailable
from dsec.edge.backends.interface import Backend
from dsec.edge.sim import LAUNCH_STEPS, Faults, SimBackend, SimHost
from dsec.wire.sandbox import SandboxSpec
from tests.unit.sim.client import Client, connected, joined, record, simulated


def test_is_a_backend() -> None:
    backend: Backend = SimBackend()
    assert backend.name == "sim"
    assert "simulated" in backend.capabilities()[0].detail


def test_warns_of_a_network_it_does_not_have() -> None:
    spec = SandboxSpec(image="x", backend="sim", network_rules={"pypi": True, "npm": False})
    SimBackend().refuse(spec)
    assert "simulated" in SimBackend().warnings(spec)[0]
    assert "pypi" in SimBackend().warnings(spec)[1]
    assert "npm" not in SimBackend().warnings(spec)[1]


async def test_hello_says_it_is_simulated() -> None:
    async with connected() as client:
        hello = await client.call("hello", protocol=1)
        assert hello["version"] == "simulated"
        assert hello["protocol"] == 1


@pytest.mark.parametrize("step", LAUNCH_STEPS)
async def test_a_failed_launch_leaves_nothing(step: str) -> None:
    backend = SimBackend(faults=Faults(fail_launch_at=step))
    async with backend.running():
        with pytest.raises(StartFailed) as caught:
            await backend.launch(record())
        assert caught.value.details["step"] == step
        assert not backend.host.sandboxes
        await backend.launch(record())


async def test_kill_and_clean_are_idempotent_and_end_the_channel() -> None:
    async with simulated() as (backend, rec), anyio.create_task_group() as group:
        client = Client(await backend.connect(rec))
        group.start_soon(client.read)
        for _ in range(2):
            await backend.kill(rec)
        await client.closed.wait()
        with pytest.raises(SandboxGone):
            await backend.connect(rec)
        for _ in range(2):
            await backend.clean(rec)
        assert not backend.host.sandboxes


async def test_the_newest_connection_wins() -> None:
    async with simulated() as (backend, rec), anyio.create_task_group() as group:
        old = Client(await backend.connect(rec))
        group.start_soon(old.read)
        new = Client(await backend.connect(rec))
        group.start_soon(new.read)
        await old.closed.wait()
        assert (await new.run("echo", "hi"))["exit_code"] == 0
        group.cancel_scope.cancel()


async def test_a_host_outlives_its_backend() -> None:
    host = SimHost()
    async with host.running():
        async with simulated(host=host) as (_, rec):
            pass
        again = SimBackend(host=host)
        async with again.running(), anyio.create_task_group() as group:
            client = Client(await again.connect(rec))
            group.start_soon(client.read)
            assert (await client.run("true"))["exit_code"] == 0
            group.cancel_scope.cancel()
        assert await again.strays(frozenset()) == [f"simulated sandbox {rec.id}"]


async def test_connect_can_fail_and_be_delayed() -> None:
    faults = Faults(fail_connects=1, connect_delay_s=0.01)
    async with simulated(faults=faults) as (backend, rec):
        with pytest.raises(Unavailable):
            await backend.connect(rec)
        await (await backend.connect(rec)).aclose()


async def test_a_held_launch_waits_for_its_gate() -> None:
    faults = Faults()
    gate = faults.hold("mounts")
    backend = SimBackend(faults=faults)
    async with backend.running(), anyio.create_task_group() as group:
        group.start_soon(backend.launch, record())
        await anyio.wait_all_tasks_blocked()
        assert not backend.host.sandboxes
        gate.set()
        await anyio.wait_all_tasks_blocked()
        assert backend.host.sandboxes


async def test_a_dropped_channel_leaves_commands_running() -> None:
    async with simulated() as (backend, rec), anyio.create_task_group() as group:
        client = Client(await backend.connect(rec))
        group.start_soon(client.read)
        await client.call("start", command_id="a", shell="sleep 0.05; echo done")
        backend.host.drop_channel(rec.id)
        await client.closed.wait()
        again = Client(await backend.connect(rec))
        group.start_soon(again.read)
        result = await again.call("wait", command_id="a")
        assert joined(result, "stdout") == b"done\n"
        group.cancel_scope.cancel()


async def test_a_death_is_told_by_its_epitaph() -> None:
    async with simulated() as (backend, rec), anyio.create_task_group() as group:
        client = Client(await backend.connect(rec))
        group.start_soon(client.read)
        backend.host.kill(rec.id, "killed by signal 9")
        await client.closed.wait()
        assert backend.epitaph(rec.id) == "killed by signal 9"


async def test_output_too_large_for_a_frame_goes_ahead_as_data() -> None:
    async with connected() as client:
        call = await client.open(
            "run", command_id="a", argv=["/probe", "flood", "3000000"], output_limit_bytes=4 << 20
        )
        result = await call.result()
        assert len(call.received[1]) == 3000000
        assert result["stdout"]["head_bytes"] + result["stdout"]["tail_bytes"] == 3000000
        assert result["stdout"]["dropped_bytes"] == 0


async def test_a_long_list_goes_ahead_as_events() -> None:
    async with connected() as client:
        for n in range(300):
            await client.call("start", command_id=f"c{n}", argv=["true"])
            await client.call("wait", command_id=f"c{n}")
        call = await client.open("list")
        rest = await call.result()
        ids = [view["command_id"] for event in call.events for view in event["more"]]
        assert ids + [view["command_id"] for view in rest] == [f"c{n}" for n in range(300)]
