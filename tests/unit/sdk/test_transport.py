"""HTTP/1.1 and WebSockets on real sockets, asynchronous and synchronous."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import anyio
import anyio.to_thread
import pytest

from dsec import DSecClient, NotFound, PayloadTooLarge, SandboxGone, Unavailable
from dsec.base.ids import SandboxId, child_id
from dsec.sdk import sync
from dsec.wire.public_v1 import BatchItem
from dsec.wire.sandbox import Exited, FileInfo, Output, StreamError
from tests.unit.sdk.fake import (
    SANDBOX,
    FakePlatform,
    Reply,
    Seen,
    command,
    error,
    json,
    lines,
    result,
    sandbox,
)
from tests.unit.sdk.served import Scripted, served

OK = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n[]"


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture
def url(platform: FakePlatform) -> Iterator[str]:
    with served(platform) as address:
        yield address


@pytest.fixture
def blocking(url: str) -> Iterator[sync.DSecClient]:
    with sync.DSecClient(url, unreachable_s=1) as client:
        yield client


async def test_connections_are_used_again(platform: FakePlatform, url: str) -> None:
    platform.on("GET", "/v1/nodes", json([]))
    async with DSecClient(url) as client:
        for _ in range(5):
            assert await client.nodes() == []
        assert len({seen.client for seen in platform.seen}) == 1
        async with anyio.create_task_group() as group:
            for _ in range(50):
                group.start_soon(client.nodes)
        before = {seen.client for seen in platform.seen}
        assert await client.nodes() == []
        assert {seen.client for seen in platform.seen} == before


@pytest.mark.parametrize(
    "first",
    [
        [OK],  # and closes the kept connection
        [OK, b""],  # closes it when the second request has come
        [OK, b"HTTP/1.1 200 OK\r\nContent-Length: 20\r\n\r\n["],
        [OK, b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n1\r\n[\r\n"],
        [OK, b"garbage\r\n\r\n"],
        [OK, b"HTTP/1.1 503 x\r\nContent-Length: 0\r\nRetry-After: 0\r\n\r\n", OK],
    ],
)
async def test_a_connection_that_fails_is_replaced(first: list[bytes]) -> None:
    with Scripted(first, [OK], [OK]) as server:
        client = DSecClient(server.url, unreachable_s=1)
        assert await client.nodes() == []
        assert await client.nodes() == []
        await client.close()
        assert server.connections <= 2


async def test_odd_but_valid_answers() -> None:
    scripts = [
        [b"HTTP/1.1 103 Early Hints\r\nLink: x\r\n\r\n" + OK],
        [b"HTTP/1.0 200 OK\r\n\r\n[]"],  # its end is the connection's
        [b"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: 2\r\n\r\n[]"],
    ]
    with Scripted(*scripts) as server:
        for _ in range(3):
            client = DSecClient(server.url, unreachable_s=0)
            assert await client.nodes() == []
            await client.close()
        assert b"\r\nHost: 127.0.0.1:" in server.requests[0]


async def test_nothing_there() -> None:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        url = f"http://127.0.0.1:{probe.getsockname()[1]}"
    with pytest.raises(Unavailable, match="dsec up"):
        await DSecClient(url, unreachable_s=0.01).open()


async def test_a_refusal_before_the_body_is_read_is_heard(
    platform: FakePlatform, url: str, tmp_path: Path
) -> None:
    refusal = error(PayloadTooLarge("too large"))
    refusal.unread = True
    platform.sandbox("PUT", "/files", refusal)
    big = tmp_path / "big"
    big.write_bytes(bytes(20 << 20))
    async with DSecClient(url, unreachable_s=0.2) as client:
        box = await client.get(SANDBOX)
        with pytest.raises((PayloadTooLarge, Unavailable)):
            await box.files.write("/big", big)


async def test_cancelling_closes_what_was_being_read(platform: FakePlatform, url: str) -> None:
    platform.sandbox("POST", "/commands", json(command(running=True), 201))
    platform.sandbox("GET", "/commands/cmd1/events", Reply(200, [b"\n"], hang=True))
    platform.sandbox("GET", "/files", Reply(200, [b"ab"], hang=True))
    async with DSecClient(url) as client:
        box = await client.get(SANDBOX)
        started = await box.start(["x"])
        with anyio.move_on_after(0.1):
            async for _ in started.events():
                pass
        stream = box.files.stream("/a")
        assert await anext(stream) == b"ab"
        with anyio.move_on_after(0.1):
            await anext(stream)
        platform.sandbox("GET", "/files", Reply(200, [b"c"]))
        assert [data async for data in stream] == [b"c"]
        assert platform.calls("GET", "/files")[-1].query["offset"] == "2"


async def test_forwarding_to_a_port_nobody_listens_on(platform: FakePlatform, url: str) -> None:
    platform.closed_ports = True
    async with DSecClient(url) as client:
        box = await client.get(SANDBOX)
        with pytest.raises(NotFound, match="refused"):
            await box.connect_port(9)
        async with box.forward(9) as (host, port):
            for _ in range(2):
                async with await anyio.connect_tcp(host, port) as tcp:
                    with pytest.raises((anyio.EndOfStream, anyio.BrokenResourceError)):
                        await tcp.receive()


async def test_ports_and_forwarding(url: str) -> None:
    async with DSecClient(url) as client:
        box = await client.get(SANDBOX)
        stream = await box.connect_port(8000)
        payload = bytes(range(256)) * 2000

        async def send() -> None:
            await stream.send(payload)
            await stream.send_eof()

        got = b""
        async with anyio.create_task_group() as group:
            group.start_soon(send)
            while data := await stream.receive():
                got += data
        await stream.aclose()
        assert got == payload
        async with box.forward(8000) as (host, port):
            tcp = await anyio.connect_tcp(host, port)
            await tcp.send(b"hello")
            assert await tcp.receive() == b"hello"
            await tcp.send_eof()
            with pytest.raises(anyio.EndOfStream):
                await tcp.receive()
            await tcp.aclose()


def test_the_blocking_client_does_the_same(
    platform: FakePlatform, blocking: sync.DSecClient, tmp_path: Path
) -> None:
    platform.on("POST", "/v1/sandboxes", error(Unavailable("x")), json(sandbox(), 201))
    platform.sandbox("POST", "/commands/run", Reply(200, [b"\n", *json(result(b"hi")).chunks]))
    platform.sandbox("POST", "/commands", json(command(running=True), 201))
    platform.sandbox(
        "GET",
        "/commands/cmd1/events",
        lines(Output(stream="stdout", offset=0, data=b"ab"), broken=True),
        lines(Output(stream="stdout", offset=2, data=b"c"), Exited(command=command(exit_code=0))),
    )
    platform.sandbox("GET", "/files", Reply(200, [b"a"], broken=True), Reply(200, [b"bc"]))
    platform.sandbox("PUT", "/files", json(FileInfo(path="/a", kind="file")))
    platform.sandbox("GET", "/files/stat", error(NotFound("no")))
    with blocking.run_container(sync.DSecContainerRunArgs("debian"), timeout=5) as box:
        assert box.run_shell("echo hi").stdout == "hi"
        events = list(box.start(["x"]).events())
        assert [e.data for e in events if isinstance(e, Output)] == [b"ab", b"c"]
        assert box.files.read("/a") == b"abc"
        assert box.files.write("/a", iter([b"a", b"b"])).path == "/a"
        assert not box.files.exists("/nowhere")
    assert platform.calls("DELETE", SANDBOX)


def test_blocking_trees(platform: FakePlatform, blocking: sync.DSecClient, tmp_path: Path) -> None:
    sent: list[bytes] = []

    def keep(seen: Seen) -> Reply:
        sent.append(seen.body)
        return json({"entries": 1})

    (tmp_path / "a").mkdir()
    (tmp_path / "a/f").write_text("text")
    platform.sandbox("PUT", "/tree", keep)
    box = blocking.get(SANDBOX)
    assert box.files.upload_tree(tmp_path / "a", "/w") == 1
    platform.sandbox("GET", "/tree", Reply(200, sent))
    assert box.files.download_tree("/w", tmp_path / "b").entries == 1
    assert (tmp_path / "b/f").read_text() == "text"


def test_blocking_ports(blocking: sync.DSecClient) -> None:
    box = blocking.get(SANDBOX)
    stream = box.connect_port(8000)
    stream.send(b"ping")
    assert stream.receive() == b"ping"
    stream.send_eof()
    assert stream.receive() == b""
    stream.close()
    with box.forward(8000) as address:
        with socket.create_connection(address, timeout=5) as tcp:
            payload = b"x" * 300_000
            sender = threading.Thread(target=tcp.sendall, args=(payload,))
            sender.start()
            got = b""
            while len(got) < len(payload):
                got += tcp.recv(65536)
            sender.join()
            tcp.shutdown(socket.SHUT_WR)
            assert tcp.recv(1) == b""


def test_a_blocking_fork_that_fails_stops_the_children_together(
    platform: FakePlatform, blocking: sync.DSecClient
) -> None:
    both = threading.Barrier(2, timeout=20)

    async def stop(_seen: Seen) -> Reply:
        await anyio.to_thread.run_sync(both.wait)
        return error(Unavailable("it does not answer"))

    def fork(seen: Seen) -> Reply:
        key = seen.json()["key"]
        for index in range(2):
            child = child_id(SandboxId(SANDBOX), key, index)
            platform.on("DELETE", f"/v1/sandboxes/{child}", stop, json(sandbox(child)))
        gone = StreamError(code="sandbox_gone", message="over", http_status=410)
        return lines(BatchItem(index=0, sandbox=sandbox("sbx0")), gone)

    platform.sandbox("POST", "/fork", fork)
    with pytest.raises(SandboxGone, match="over"):
        blocking.get(SANDBOX).fork(2)
    assert len({seen.path for seen in platform.calls("DELETE", "")}) == 2
