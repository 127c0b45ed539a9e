"""`dsec.kit.http`: streams that stay alive, clients that leave, errors at every moment."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import Any

import anyio
import httpx
import msgspec
import pytest
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from dsec.base.clock import SystemClock
from dsec.base.errors import Conflict, InvalidRequest, NotFound
from dsec.kit.http import (
    LateJson,
    Ndjson,
    RequestContext,
    Route,
    json_response,
    make_app,
    path_bytes,
    read_body,
    read_query,
)

pytestmark = pytest.mark.anyio
Serve = Callable[[Request], Awaitable[Any]]
BEAT = 0.01


class Client:
    """Speaks ASGI itself, so that it can leave in the middle."""

    def __init__(self, handler: Serve) -> None:
        route = Route(method="GET", path="/", handler=handler, summary="")
        self._app = make_app([route], SystemClock())
        self.gone = anyio.Event()
        self.status = 0
        self.body = b""
        self.grown = anyio.Condition()
        self.whole = False

    async def _receive(self) -> dict[str, Any]:
        await self.gone.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: Any) -> None:
        async with self.grown:
            if message["type"] == "http.response.start":
                self.status = message["status"]
            else:
                self.body += message.get("body", b"")
                self.whole = not message.get("more_body", False)
            self.grown.notify_all()

    async def until(self, seen: bytes) -> None:
        async with self.grown:
            while seen not in self.body:
                await self.grown.wait()

    async def get(self) -> None:
        scope = {
            "type": "http",
            "method": "GET",
            "path": "/",
            "query_string": b"",
            "headers": [],
        }
        with anyio.fail_after(5):
            await self._app(scope, self._receive, self._send)


async def ending(error: Exception | None) -> AsyncGenerator[object, None]:
    nothing: tuple[object, ...] = ()
    for event in nothing:
        yield event
    if error is not None:
        raise error


def lines(client: Client) -> list[dict[str, Any]]:
    return [msgspec.json.decode(line) for line in client.body.splitlines()]


async def test_a_quiet_stream_has_a_heartbeat() -> None:
    go_on = anyio.Event()

    async def serve(_request: Request) -> Ndjson:
        async def events() -> AsyncGenerator[object, None]:
            yield {"n": 1}
            await go_on.wait()
            yield {"n": 2}

        return Ndjson(events(), BEAT)

    client = Client(serve)
    async with anyio.create_task_group() as group:
        group.start_soon(client.get)
        await client.until(b'{"type":"heartbeat"}\n' * 2)
        go_on.set()
    assert lines(client)[0] == {"n": 1}
    assert lines(client)[-1] == {"n": 2}
    assert client.whole


async def test_a_stream_silent_from_the_start_has_one_too() -> None:
    go_on = anyio.Event()

    async def serve(_request: Request) -> Ndjson:
        async def events() -> AsyncGenerator[object, None]:
            await go_on.wait()
            async for event in ending(NotFound("too late for a status", kind="command")):
                yield event

        return Ndjson(events(), BEAT)

    client = Client(serve)
    async with anyio.create_task_group() as group:
        group.start_soon(client.get)
        await client.until(b"heartbeat")
        assert client.status == 200
        go_on.set()
    assert lines(client)[-1]["code"] == "not_found"
    assert lines(client)[-1]["http_status"] == 404


async def test_a_stream_that_fails_at_once_has_a_status() -> None:
    async def serve(_request: Request) -> Ndjson:
        return Ndjson(ending(Conflict("busy")), BEAT)

    client = Client(serve)
    await client.get()
    assert client.status == 409
    assert lines(client)[0]["error"]["code"] == "conflict"


async def test_a_stream_that_fails_later_says_so_in_its_last_line() -> None:
    async def serve(_request: Request) -> Ndjson:
        async def events() -> AsyncGenerator[object, None]:
            yield {"n": 1}
            raise RuntimeError("a bug")

        return Ndjson(events())

    client = Client(serve)
    await client.get()
    assert client.status == 200
    assert lines(client)[-1]["type"] == "error"
    assert lines(client)[-1]["code"] == "internal_error"
    assert "a bug" not in client.body.decode()


async def test_an_empty_stream_is_an_empty_answer() -> None:
    async def serve(_request: Request) -> Ndjson:
        return Ndjson(ending(None))

    client = Client(serve)
    await client.get()
    assert (client.status, client.body, client.whole) == (200, b"", True)


@pytest.mark.parametrize("first", [True, False])
async def test_a_client_that_leaves_cancels_a_stream(*, first: bool) -> None:
    ended = anyio.Event()
    waiting = anyio.Event()

    async def serve(_request: Request) -> Ndjson:
        async def events() -> AsyncGenerator[object, None]:
            try:
                if first:
                    yield {"n": 1}
                waiting.set()
                await anyio.sleep_forever()
            finally:
                ended.set()

        return Ndjson(events())

    client = Client(serve)
    async with anyio.create_task_group() as group:
        group.start_soon(client.get)
        await waiting.wait()
        client.gone.set()
    assert ended.is_set()
    assert not client.whole


async def test_a_late_answer_is_kept_alive_by_newlines() -> None:
    go_on = anyio.Event()

    async def work() -> object:
        await go_on.wait()
        return {"exit_code": 0}

    async def serve(_request: Request) -> LateJson:
        return LateJson(work, 201, BEAT)

    client = Client(serve)
    async with anyio.create_task_group() as group:
        group.start_soon(client.get)
        await client.until(b"\n\n")
        go_on.set()
    assert client.status == 201
    assert client.body.startswith(b"\n\n")
    assert msgspec.json.decode(client.body) == {"exit_code": 0}
    assert client.whole


async def test_a_late_failure_is_a_body_under_the_status_sent() -> None:
    go_on = anyio.Event()

    async def work() -> object:
        await go_on.wait()
        raise NotFound("gone", kind="command")

    async def serve(_request: Request) -> LateJson:
        return LateJson(work, 200, BEAT)

    client = Client(serve)
    async with anyio.create_task_group() as group:
        group.start_soon(client.get)
        await client.until(b"\n")
        go_on.set()
    assert client.status == 200
    assert msgspec.json.decode(client.body)["error"]["code"] == "not_found"


async def test_an_early_failure_has_its_own_status() -> None:
    async def work() -> object:
        raise NotFound("gone", kind="command")

    async def serve(_request: Request) -> LateJson:
        return LateJson(work)

    client = Client(serve)
    await client.get()
    assert client.status == 404


@pytest.mark.parametrize("begun", [True, False])
async def test_a_client_that_leaves_cancels_late_work(*, begun: bool) -> None:
    ended = anyio.Event()
    working = anyio.Event()

    async def work() -> object:
        try:
            working.set()
            await anyio.sleep_forever()
        finally:
            ended.set()
        return None

    async def serve(_request: Request) -> LateJson:
        return LateJson(work, 200, BEAT if begun else 60)

    client = Client(serve)
    async with anyio.create_task_group() as group:
        group.start_soon(client.get)
        await working.wait()
        if begun:
            await client.until(b"\n")
        client.gone.set()
    assert ended.is_set()
    assert not client.whole


async def test_a_body_that_breaks_is_not_ended_cleanly() -> None:
    async def serve(_request: Request) -> Response:
        async def body() -> AsyncGenerator[bytes, None]:
            yield b"half"
            raise OSError("disk")

        return StreamingResponse(body())

    client = Client(serve)
    with pytest.raises(OSError, match="disk"):
        await client.get()
    assert (client.body, client.whole) == (b"half", False)


async def test_a_bug_is_an_incident_that_names_nothing() -> None:
    async def serve(_request: Request) -> Response:
        raise RuntimeError("secret")

    client = Client(serve)
    await client.get()
    error = lines(client)[0]["error"]
    assert client.status == 500
    assert error["details"]["incident"] in error["message"]
    assert b"secret" not in client.body


async def test_an_answer_we_cannot_read_is_not_the_clients_mistake() -> None:
    async def serve(_request: Request) -> Response:
        return json_response(msgspec.json.decode(b"{}", type=int))

    client = Client(serve)
    await client.get()
    assert lines(client)[0]["error"]["code"] == "internal_error"


@pytest.mark.parametrize("body", [b"{", b'{"path": 1}', b'{"path": "\xff"}', b"[" * 100_000])
async def test_a_body_that_is_not_valid_is(body: bytes) -> None:
    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": body}

    with pytest.raises(InvalidRequest):
        await read_body(Request({"type": "http", "headers": []}, receive), OnPath)


@pytest.mark.parametrize(
    ("body", "place", "says"),
    [
        (b'{"path": 1}', "path", "expected a text, got a whole number"),
        (b'{"path": "", "depth": []}', "depth", "expected a whole number, got a list"),
        (b'{"path": "", "x": 1}', None, "unknown field `x`"),
        (b"{", None, "the request is not valid: input data was truncated"),
    ],
)
async def test_what_is_wrong_is_said_in_words(body: bytes, place: str | None, says: str) -> None:
    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": body}

    with pytest.raises(InvalidRequest) as wrong:
        await read_body(Request({"type": "http", "headers": []}, receive), OnPath)
    assert wrong.value.details.get("place") == place
    assert says in wrong.value.message


@pytest.mark.parametrize("path", ["/things/a\n", "/things/a/"])
async def test_a_route_matches_the_whole_path(path: str) -> None:
    async def serve(_request: Request) -> Response:
        return json_response({})

    route = Route(method="GET", path="/things/{id}/x", handler=serve, summary="")
    plain = Route(method="GET", path="/things/a", handler=serve, summary="")
    transport = httpx.ASGITransport(make_app([route, plain], SystemClock()))
    async with httpx.AsyncClient(transport=transport, base_url="http://x") as client:
        assert (await client.get(path.replace("\n", "/x%0A"))).status_code == 404


async def test_a_message_with_a_strange_name_reaches_the_client() -> None:
    async def serve(_request: Request) -> Response:
        raise NotFound("no file '/\udcff'", kind="path", path="/\udcff")

    client = Client(serve)
    await client.get()
    assert client.status == 404
    assert lines(client)[0]["error"]["details"]["path"] == "/\\udcff"


async def test_one_request_has_one_id_and_one_line(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "dsec.http")

    async def serve(_request: Request) -> Response:
        return json_response({})

    inner = make_app([Route(method="GET", path="/", handler=serve, summary="")], SystemClock())
    transport = httpx.ASGITransport(RequestContext(inner, SystemClock()))
    async with httpx.AsyncClient(transport=transport, base_url="http://x") as client:
        answer = await client.get("/", headers={"X-Request-Id": "mine"})
    assert answer.headers.get_list("x-request-id") == ["mine"]
    assert [r.message for r in caplog.records].count("request completed") == 1


class OnPath(msgspec.Struct, forbid_unknown_fields=True):
    path: str
    depth: int = 1
    to: str = ""
    user: str = ""
    parents: bool = False


@pytest.mark.parametrize(
    ("query", "found"),
    [
        (b"path=%2Fa%20b", OnPath(path="/a b")),
        (b"path=%FF", OnPath(path="\udcff")),
        (b"path=/&to=%FE%FF", OnPath(path="/", to="\udcfe\udcff")),
        (b"path=null&depth=3&parents=true", OnPath(path="null", depth=3, parents=True)),
        (b"path=1&parents=1", OnPath(path="1", parents=True)),
        (b"path=", OnPath(path="")),
        (b"path=a%26b%3Dc", OnPath(path="a&b=c")),
    ],
)
def test_queries(query: bytes, found: OnPath) -> None:
    request = Request({"type": "http", "query_string": query, "headers": []})
    assert read_query(request, OnPath) == found


@pytest.mark.parametrize(
    "query", [b"user=%FF", b"depth=%FF", b"user=%ED%A0%80", b"\xff=1", b"to=x"]
)
def test_queries_that_are_no_text(query: bytes) -> None:
    request = Request({"type": "http", "query_string": query, "headers": []})
    with pytest.raises(InvalidRequest):
        read_query(request, OnPath)


def test_paths_are_bytes() -> None:
    assert path_bytes("/\udcff\u00e9") == b"/\xff\xc3\xa9"
    for bad in ("", "a\0b"):
        with pytest.raises(InvalidRequest):
            path_bytes(bad)
