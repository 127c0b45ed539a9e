"""What one sandbox, its aether or the host's shortage of a moment do must never end the edge."""

from __future__ import annotations

import contextlib
from typing import Any

import anyio
import msgspec
import pytest

from dsec.base.errors import CapacityUnavailable, InternalError
from dsec.base.states import SandboxState, StopReason
from dsec.edge.admission import AdmissionLimits
from dsec.edge.calls import Collected
from dsec.edge.channel import AetherChannel
from dsec.edge.lifecycle import owner as owners
from dsec.edge.lifecycle.journal import Journal
from dsec.edge.service import EdgeService
from dsec.edge.sim import SimBackend
from tests.unit.edge.node import Node, request

STRANGE = [
    RuntimeError("a bug"),
    OSError(24, "Too many open files"),
    msgspec.ValidationError("Expected `int`, got `str`"),
    InternalError("odd"),
    TimeoutError(),
]


async def still_serves(edge: EdgeService) -> None:
    asked = request()
    assert (await edge.create(asked)).state is SandboxState.RUNNING
    await edge.stop(asked.id)


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(owners, "REACH_PAUSE_S", 0.01)


def break_backend(
    monkeypatch: pytest.MonkeyPatch, method: str, sandbox: str, failure: Exception, times: int
) -> None:
    """So many calls for one sandbox fail."""
    real = getattr(SimBackend, method)
    left = times

    async def broken(self: SimBackend, record: Any) -> Any:
        nonlocal left
        if record.id == sandbox and left > 0:
            left -= 1
            raise failure
        return await real(self, record)

    monkeypatch.setattr(SimBackend, method, broken)


@pytest.mark.parametrize("failure", STRANGE, ids=repr)
@pytest.mark.parametrize("method", ["launch", "connect", "kill", "clean", "usage"])
async def test_whatever_a_backend_raises(
    node: Node, monkeypatch: pytest.MonkeyPatch, quick: None, method: str, failure: Exception
) -> None:
    asked = request()
    break_backend(monkeypatch, method, asked.id, failure, times=1000)
    async with node.host.running(), node.edge() as edge:
        with anyio.fail_after(20), contextlib.suppress(Exception):
            await edge.create(asked)
        with anyio.fail_after(20), contextlib.suppress(Exception):
            await edge.usage(asked.id)
        with anyio.fail_after(20), contextlib.suppress(Exception):
            await edge.stop(asked.id)
        await still_serves(edge)


@pytest.mark.parametrize("failure", STRANGE, ids=repr)
async def test_whatever_happens_when_it_is_reached_again(
    node: Node, monkeypatch: pytest.MonkeyPatch, quick: None, failure: Exception
) -> None:
    async with node.host.running(), node.edge() as edge:
        asked = request()
        await edge.create(asked)
        owner = await edge.owner(asked.id)
        break_backend(monkeypatch, "connect", asked.id, failure, times=1000)
        node.host.drop_channel(asked.id)
        with anyio.fail_after(20):
            await owner.over.wait()
        assert (await edge.get(asked.id)).stop_reason is StopReason.DIED
        await still_serves(edge)


@pytest.mark.parametrize("failure", STRANGE, ids=repr)
async def test_whatever_happens_when_it_is_adopted(
    node: Node, monkeypatch: pytest.MonkeyPatch, quick: None, failure: Exception
) -> None:
    asked = request()
    async with node.host.running():
        async with node.edge() as edge:
            await edge.create(asked)
        break_backend(monkeypatch, "connect", asked.id, failure, times=1000)
        async with node.edge() as edge:
            assert (await edge.get(asked.id)).stop_reason is StopReason.NODE_LOST
            await still_serves(edge)


async def test_what_the_host_lacks_for_a_moment_ends_no_sandbox(
    node: Node, monkeypatch: pytest.MonkeyPatch, quick: None
) -> None:
    asked, full = request(), OSError(24, "Too many open files")
    async with node.host.running():
        async with node.edge() as edge:
            await edge.create(asked)
            before = (await edge.owner(asked.id)).channel
            break_backend(monkeypatch, "connect", asked.id, full, times=3)
            node.host.drop_channel(asked.id)
            await _until(lambda: edge._live[asked.id].channel is not before)
        break_backend(monkeypatch, "connect", asked.id, full, times=3)
        async with node.edge() as edge:
            assert (await edge.get(asked.id)).state is SandboxState.RUNNING


@pytest.mark.parametrize("answer", [[{"command_id": 1}], {"a": 1}, "text", None])
async def test_an_odd_answer_to_the_idle_clock(
    node: Node, monkeypatch: pytest.MonkeyPatch, answer: object
) -> None:
    async with node.host.running(), node.edge() as edge:
        asked = request(ttl_running_stop=1.0)
        await edge.create(asked)
        looks = 0

        async def collect(*_: object) -> Collected:
            nonlocal looks
            looks += 1
            return Collected(msgspec.msgpack.encode(answer), {}, [])

        with monkeypatch.context() as patch:
            patch.setattr(AetherChannel, "collect", collect)
            edge._live[asked.id].idle_since -= 1000
            edge._expiry._ttl.watch(asked.id, 0.0)
            await _until(lambda: bool(looks))
        await anyio.wait_all_tasks_blocked()
        await still_serves(edge)


async def test_a_hello_nobody_understands_leaves_no_connection(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[AetherChannel] = []

    async def start(self: AetherChannel, *_: object) -> None:
        made.append(self)
        raise msgspec.ValidationError("odd")

    async with node.host.running(), node.edge() as edge:
        with monkeypatch.context() as patch:
            patch.setattr(AetherChannel, "start", start)
            with contextlib.suppress(Exception):
                await edge.create(request())
        assert [channel.closed for channel in made] == [True]
        await still_serves(edge)


async def test_a_connection_that_breaks_for_ever_ends_its_sandbox(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(owners, "MAX_REVIVALS", 3)
    async with node.host.running(), node.edge() as edge:
        asked = request()
        await edge.create(asked)
        owner = await edge.owner(asked.id)
        for _ in range(4):
            before = owner.channel
            node.host.drop_channel(asked.id)
            await _until(lambda seen=before: owner.channel is not seen or owner.over.is_set())
        view = await edge.get(asked.id)
        assert (view.stop_reason, view.stop_detail) == (
            StopReason.DIED,
            "its connection broke 4 times",
        )
        await still_serves(edge)


async def test_a_stop_that_fails_while_it_waits_for_its_turn_leaves_the_edge_up(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    limits = AdmissionLimits(memory_floor_bytes=0, max_launching=1)
    async with node.host.running(), node.edge(limits=limits) as edge:
        go, second = node.faults.hold("clone"), request()
        async with anyio.create_task_group() as group:
            group.start_soon(edge.create, request())
            await anyio.wait_all_tasks_blocked()
            group.start_soon(edge.create, second)
            await anyio.wait_all_tasks_blocked()
            with monkeypatch.context() as patch:
                break_backend(patch, "kill", second.id, RuntimeError("no"), times=1)
                with pytest.raises(InternalError):
                    await edge.stop(second.id)
            go.set()
        await still_serves(edge)
        await edge.stop(second.id)


async def test_one_stopped_while_it_waits_gives_its_ids_back_once(node: Node) -> None:
    limits = AdmissionLimits(memory_floor_bytes=0, max_launching=1)
    async with node.host.running(), node.edge(limits=limits) as edge:
        node.faults.hold("clone")
        async with anyio.create_task_group() as group:

            async def create(asked: Any) -> None:
                with contextlib.suppress(Exception):
                    await edge.create(asked)

            group.start_soon(create, request())
            await anyio.wait_all_tasks_blocked()
            waiting = request()
            group.start_soon(create, waiting)
            await anyio.wait_all_tasks_blocked()
            owner = edge._live[waiting.id]
            await edge.stop(waiting.id)
            group.start_soon(create, request())  # gets the ids that became free
            await anyio.wait_all_tasks_blocked()
            edge._give_up(owner, CapacityUnavailable("its turn did not come"))
            edge._over(owner)
            group.start_soon(create, request())
            await anyio.wait_all_tasks_blocked()
            bases = [live.record.uid_base for live in edge._live.values()]
            assert len(bases) == len(set(bases)) == 3
            assert owner.failure is None
            group.cancel_scope.cancel()


async def test_ids_of_what_could_not_be_undone_are_taken(node: Node) -> None:
    half, fresh = request(), request()
    async with node.host.running():
        node.faults.hold("mounts")
        async with node.edge() as edge, anyio.create_task_group() as group:
            group.start_soon(edge.create, half)
            await anyio.wait_all_tasks_blocked()
            base = edge._live[half.id].record.uid_base
            group.cancel_scope.cancel()
        node.faults.gates.clear()
        node.faults.fail_cleans = 1
        async with node.edge() as edge:
            assert half.id in [story.id for story in Journal(node.root / "state").stories()]
            await edge.create(fresh)
            assert (await edge.owner(fresh.id)).record.uid_base != base


async def test_a_bug_in_the_sweep_keeps_no_edge_from_starting(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def strays(*_: object) -> list[str]:
        raise RuntimeError("a bug")

    monkeypatch.setattr(SimBackend, "strays", strays)
    async with node.host.running(), node.edge() as edge:
        await still_serves(edge)


async def _until(holds: Any) -> None:
    with anyio.fail_after(10):
        while not holds():  # noqa: ASYNC110 - nothing tells of it
            await anyio.sleep(0.01)
