"""What a client without a key can make a server keep has bounds."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import anyio
import anyio.abc
import httpx
import pytest
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from dsec.base.clock import SystemClock
from dsec.base.errors import InvalidRequest
from dsec.edge.streams import RawStream
from dsec.kit.http import make_app
from dsec.kit.table import row
from dsec.main import protocol
from dsec.main.listen import bind_tcp, serve, url_of

pytestmark = pytest.mark.anyio
HEAD = b"GET / HTTP/1.1\r\nHost: x\r\n"


async def app(scope: Scope, receive: Receive, send: Send) -> None:
    size = 0
    while True:
        message = await receive()
        size += len(message.get("body", b""))
        if not message.get("more_body"):
            break
    await Response(str(size))(scope, receive, send)


@asynccontextmanager
async def server(app: ASGIApp = app) -> AsyncIterator[str]:
    stop = anyio.Event()
    async with anyio.create_task_group() as group:
        listener = bind_tcp("127.0.0.1", 0)
        group.start_soon(serve, app, listener, stop)
        yield url_of(listener)
        stop.set()


async def connected(url: str) -> anyio.abc.SocketStream:
    at = httpx.URL(url)
    return await anyio.connect_tcp(at.host, at.port or 0)


async def answer_to(url: str, *pieces: bytes) -> bytes:
    """What a connection gives until it is closed."""
    got = b""
    async with await connected(url) as stream:
        with anyio.fail_after(10):
            try:
                for piece in pieces:
                    await stream.send(piece)
                while True:
                    got += await stream.receive()
            except (anyio.EndOfStream, anyio.BrokenResourceError):
                return got


@pytest.mark.parametrize(
    "pieces",
    [
        [HEAD + b"X: " + b"a" * 100_000 + b"\r\n\r\n"],
        [HEAD + b"".join(b"X-%d: y\r\n" % n for n in range(20_000)) + b"\r\n"],
        [b"GET /" + b"a" * 100_000 + b" HTTP/1.1\r\nHost: x\r\n\r\n"],
        [HEAD + b"X: ", *[b"a" * 50_000] * 200],
        [b"GET / HTTP/1.1\r\nHost: x\r\n\r\n" + HEAD + b"X: ", *[b"a" * 50_000] * 200],
    ],
)
async def test_a_head_has_a_limit(pieces: list[bytes]) -> None:
    async with server() as url:
        got = await answer_to(url, *pieces)
        assert got == b"" or b" 431 " in got  # unread bytes may reset the connection first
        assert (await answer_to(url, HEAD + b"Connection: close\r\n\r\n")).startswith(
            b"HTTP/1.1 200"
        )


async def test_large_bodies_and_ordinary_heads_are_not_concerned() -> None:
    async with server() as url, httpx.AsyncClient(base_url=url) as client:
        for size in (0, 3_000_000, 10):
            sent = await client.post("/", content=b"x" * size, headers={"X": "a" * 60_000})
            assert sent.text == str(size)


@pytest.mark.parametrize("sent", [[], [b"a part"]], ids=["nothing", "a part"])
async def test_what_breaks_off_leaves_a_line_and_no_traceback(
    sent: list[bytes], caplog: pytest.LogCaptureFixture
) -> None:
    @asynccontextmanager
    async def source() -> AsyncIterator[tuple[dict[str, str], AsyncIterator[bytes]]]:
        async def chunks() -> AsyncIterator[bytes]:
            for chunk in sent:
                yield chunk
            raise InvalidRequest("tar_out /proc/self: Invalid argument")

        yield {}, chunks()

    async def read(_request: Request) -> RawStream:
        return RawStream(source)

    table = [row("GET", "/", read, None, None, bytes)]
    async with server(make_app(table, SystemClock())) as url:
        got = await answer_to(url, HEAD + b"X-Request-Id: mine\r\nConnection: close\r\n\r\n")
    head, _, body = got.partition(b"\r\n\r\n")
    status, said = (b"400", b"Invalid argument") if not sent else (b"200", b"a part")
    assert (head.split()[1], said in body) == (status, True)
    assert not body.endswith(b"0\r\n\r\n")
    lines = [(r.levelname, r.getMessage()) for r in caplog.records if r.levelno > logging.INFO]
    assert lines == ([("WARNING", "an answer broke off")] if sent else [])
    assert not any(record.exc_info for record in caplog.records)


async def test_a_head_has_a_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(protocol, "HEAD_TIMEOUT_S", 0.05)
    async with server() as url:
        assert await answer_to(url) == b""
        assert await answer_to(url, HEAD) == b""
        whole = b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 1\r\nConnection: close\r\n\r\n"
        async with await connected(url) as stream:
            await stream.send(whole)
            await anyio.sleep(0.2)  # the deadline is the head's alone
            await stream.send(b"x")
            assert (await stream.receive()).startswith(b"HTTP/1.1 200")
