from __future__ import annotations

from collections.abc import AsyncIterator

import anyio
import pytest

from dsec.base.errors import (
    DeadlineExceeded,
    DsecError,
    InternalError,
    NotFound,
    PayloadTooLarge,
    RateLimited,
    SandboxGone,
    StorageFull,
    Unavailable,
)
from dsec.edge.channel import (
    CHUNK_BYTES,
    MAX_STREAM_ID,
    MAX_STREAMS,
    AetherChannel,
    Data,
    End,
    gone,
)
from dsec.wire.frames import INITIAL_CREDIT, Kind
from tests.unit.edge.peer import HELLO, Peer, pipes, talking


async def test_hello_comes_first_and_is_checked() -> None:
    async with talking() as (channel, _):
        assert channel.hello.version == "t"


async def test_another_protocol_is_refused() -> None:
    ours, theirs = pipes()
    peer, channel = Peer(theirs), AetherChannel()
    failures: list[BaseException] = []

    async def start(group: anyio.abc.TaskGroup) -> None:
        try:
            await channel.start(ours, group)
        except InternalError as exc:
            failures.append(exc)
            group.cancel_scope.cancel()

    async with anyio.create_task_group() as group:
        group.start_soon(start, group)
        await peer.answer({**HELLO, "protocol": 9})
    assert failures
    await ours.aclose()
    await theirs.aclose()


async def test_calls_are_answered_in_any_order() -> None:
    async with talking() as (channel, peer), anyio.create_task_group() as group:
        got: dict[str, object] = {}

        async def ask(name: str) -> None:
            got[name] = await channel.call("view", {"command_id": name})

        group.start_soon(ask, "a")
        group.start_soon(ask, "b")
        first, second = await peer.opened(), await peer.opened()
        await peer.say(Kind.RESULT, second[0], second[1]["command_id"])
        await peer.say(Kind.RESULT, first[0], first[1]["command_id"])
        while len(got) < 2:
            await anyio.lowlevel.checkpoint()
        assert got == {"a": "a", "b": "b"}
        assert not channel.busy


@pytest.mark.parametrize(
    ("payload", "cls", "details"),
    [
        ({"code": "not_found", "message": "no", "kind": "cwd"}, NotFound, {"kind": "cwd"}),
        ({"code": "storage_full", "message": "f", "path": b"/\xff", "errno": 28}, StorageFull, {}),
        ({"code": "cancelled", "message": "x"}, Unavailable, {}),
        ({"code": "from_the_future", "message": "x"}, InternalError, {}),
    ],
)
async def test_errors_become_those_of_the_table(
    payload: dict[str, object], cls: type[DsecError], details: dict[str, object]
) -> None:
    async with talking() as (channel, peer), anyio.create_task_group() as group:
        caught: list[DsecError] = []

        async def ask() -> None:
            try:
                await channel.call("stat", {"path": b"/"})
            except DsecError as exc:
                caught.append(exc)

        group.start_soon(ask)
        stream, _ = await peer.opened()
        await peer.say(Kind.ERROR, stream, payload)
        while not caught:
            await anyio.lowlevel.checkpoint()
        assert type(caught[0]) is cls
        assert details.items() <= caught[0].details.items()


async def test_a_cancelled_call_is_cancelled_there_and_its_answer_dropped() -> None:
    async with talking() as (channel, peer):
        with anyio.move_on_after(0.01):
            await channel.call("run", {})
        stream, _ = await peer.opened()
        assert (await peer.frame()).kind is Kind.CANCEL
        await peer.say(Kind.RESULT, stream, 1)
        async with anyio.create_task_group() as group:
            group.start_soon(channel.call, "list")
            await peer.answer([])


async def test_a_stream_brings_events_data_and_its_result() -> None:
    async with talking() as (channel, peer), channel.open("read", {"path": b"/a"}) as stream:
        number, _ = await peer.opened()
        await peer.say(Kind.EVENT, number, {"size_bytes": 3})
        await peer.say(Kind.DATA, number, b"abc")
        await peer.say(Kind.END, number, b"")
        await peer.say(Kind.RESULT, number, {"bytes": 3})
        assert [item async for item in stream] == [{"size_bytes": 3}, Data(0, b"abc"), End(0)]
        assert stream.result == {"bytes": 3}


async def test_sending_waits_for_credit() -> None:
    async with talking() as (channel, peer), channel.open("write") as stream:
        number, _ = await peer.opened()
        sent = anyio.Event()

        async def send() -> None:
            await stream.send(bytes(INITIAL_CREDIT + 10))
            sent.set()

        async with anyio.create_task_group() as group:
            group.start_soon(send)
            taken = 0
            while taken < INITIAL_CREDIT:
                taken += len((await peer.frame()).payload)
            await anyio.wait_all_tasks_blocked()
            assert not sent.is_set()
            await peer.say(Kind.CREDIT, number, (10).to_bytes(4, "big"))
            assert len((await peer.frame()).payload) == 10
            await sent.wait()


async def test_credit_is_given_as_data_is_taken() -> None:
    async with talking() as (channel, peer), channel.open("read") as stream:
        number, _ = await peer.opened()
        for _ in range(4):
            await peer.say(Kind.DATA, number, bytes(INITIAL_CREDIT // 4))
        await anyio.wait_all_tasks_blocked()
        await anext(stream)
        granted = await peer.frame()
        assert granted.kind is Kind.CREDIT
        assert int.from_bytes(granted.payload, "big") == INITIAL_CREDIT // 4


async def test_a_peer_that_ignores_credit_loses_the_connection() -> None:
    async with talking() as (channel, peer), channel.open("read") as stream:
        number, _ = await peer.opened()
        for _ in range(5):
            await peer.say(Kind.DATA, number, bytes(INITIAL_CREDIT // 4))
        await anyio.wait_all_tasks_blocked()
        with pytest.raises(Unavailable):
            await stream.finish()
        assert channel.closed


async def test_garbage_ends_the_connection() -> None:
    async with talking() as (channel, peer), channel.open("read") as stream:
        await peer.stream.send(b"HTTP/1.1 400 Bad Request\r\n\r\n")
        with pytest.raises(Unavailable, match="broke"):
            await stream.finish()
        assert channel.closed


async def test_all_streams_hear_why_a_connection_ended() -> None:
    heard: list[AetherChannel] = []
    ours, theirs = pipes()
    peer, channel = Peer(theirs), AetherChannel(heard.append)
    async with anyio.create_task_group() as group:
        group.start_soon(channel.start, ours, group)
        await peer.answer(HELLO)
        await anyio.wait_all_tasks_blocked()
        stream = channel.open("watch")
        await peer.opened()
        await theirs.aclose()
        await anyio.wait_all_tasks_blocked()
        assert heard == [channel]
        channel.close(gone("sbx", "died"))
        with pytest.raises(SandboxGone, match="died"):
            await anext(stream)
        with pytest.raises(SandboxGone):
            await channel.call("list")
        group.cancel_scope.cancel()


async def test_ping_is_answered() -> None:
    async with talking() as (_, peer):
        await peer.say(Kind.PING, 0, b"12345678")
        pong = await peer.frame()
        assert (pong.kind, pong.payload) == (Kind.PONG, b"12345678")


async def test_a_result_too_large_for_a_frame_comes_in_pieces() -> None:
    async with talking() as (channel, peer), anyio.create_task_group() as group:
        got = []

        async def ask() -> None:
            got.append(await channel.collect("run"))

        group.start_soon(ask)
        number, _ = await peer.opened()
        for _ in range(20):
            await peer.say(Kind.DATA, number, b"x" * 65536, 1)
            assert (await peer.frame()).kind is Kind.CREDIT
        await peer.say(Kind.EVENT, number, {"more": [1]})
        await peer.say(Kind.RESULT, number, [2])
        await anyio.wait_all_tasks_blocked()
        assert len(got[0].data[1]) == 20 * 65536
        assert len(got[0].more) == 1


async def test_streams_are_counted() -> None:
    async with talking() as (channel, _):
        streams = [channel.open("watch") for _ in range(MAX_STREAMS)]
        with pytest.raises(RateLimited):
            channel.open("watch")
        streams[0].cancel()
        channel.open("watch")


async def test_arguments_too_large_for_a_frame_are_refused() -> None:
    async with talking() as (channel, _):
        with pytest.raises(PayloadTooLarge):
            await channel.call("run", {"env": {"A": "x" * (1 << 20)}})
        assert not channel.busy


@pytest.mark.parametrize(
    ("kind", "body"),
    [
        (Kind.ERROR, b"\x93"),
        (Kind.RESULT, b"\xc1"),
        (Kind.EVENT, b"\xc1"),
        (Kind.PING, bytes(17)),
        (Kind.EVENT, b"\x91" * 100_000),
    ],
)
async def test_a_frame_that_makes_no_sense_leaves_nobody_waiting(kind: Kind, body: bytes) -> None:
    async with talking() as (channel, peer):
        stream = channel.open("watch")
        number, _ = await peer.opened()
        await peer.say(kind, number, body)
        with anyio.fail_after(5), pytest.raises(Unavailable, match="the channel broke"):
            await stream.finish()
        with pytest.raises(Unavailable):
            await channel.call("list")


async def test_an_error_that_makes_no_sense_ends_the_call() -> None:
    async with talking() as (channel, peer), anyio.create_task_group() as group:
        caught: list[DsecError] = []

        async def ask() -> None:
            try:
                await channel.call("list")
            except Unavailable as exc:
                caught.append(exc)

        group.start_soon(ask)
        number, _ = await peer.opened()
        await peer.say(Kind.ERROR, number, b"\x93")
        await anyio.wait_all_tasks_blocked()
        assert caught


async def test_no_stream_is_opened_beyond_the_last_id() -> None:
    async with talking() as (channel, _):
        channel._next = MAX_STREAM_ID
        with anyio.fail_after(5), pytest.raises(Unavailable, match="stream ids"):
            await channel.call("list")


async def test_what_nobody_takes_is_given_up() -> None:
    async with talking() as (channel, peer):
        stream = channel.open("write")
        await peer.opened()
        await stream.send(bytes(INITIAL_CREDIT), stall_s=0.01)
        with anyio.fail_after(5), pytest.raises(DeadlineExceeded, match="nothing was taken"):
            await stream.send(b"x", stall_s=0.01)


async def test_a_sender_who_leaves_ends_the_sending_though_nothing_is_taken() -> None:
    async def leaves() -> AsyncIterator[bytes]:
        yield bytes(2 * INITIAL_CREDIT)
        raise ConnectionAbortedError

    async with talking() as (channel, peer):
        stream = channel.open("write")
        await peer.opened()
        with anyio.fail_after(5), pytest.raises(ConnectionAbortedError):
            await stream.send_all(leaves())
        for _ in range(INITIAL_CREDIT // CHUNK_BYTES):
            assert (await peer.frame()).kind is Kind.DATA
        stream.cancel()
        assert (await peer.frame()).kind is Kind.CANCEL  # and never END
