"""An edge in another process: the same answers as in this one, over real sockets."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import anyio
import httpx
import pytest
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send
from websockets.asyncio.client import connect
from websockets.exceptions import ConnectionClosed, InvalidStatus

from dsec.base.clock import SystemClock
from dsec.control.remote import EdgeLink
from dsec.kit.http import RequestContext
from dsec.main.apiserver import reach
from dsec.main.edge import Locked
from dsec.main.listen import bind_tcp, bind_unix, serve, url_of
from dsec.main.settings import EdgeAddress
from tests.system.fake_edge import FakeEdge
from tests.system.plane import Plane, bearer, control_plane

pytestmark = pytest.mark.anyio
SPEC = {"image": "debian"}
TOKEN = "t" * 32
EMPTY_TAR = bytes(10240)


@pytest.fixture(params=["unix", "tcp"])
def way(request: pytest.FixtureRequest) -> str:
    return str(request.param)


class Lock:
    """The edge's lock, which can be changed."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        self.token(TOKEN)

    def token(self, token: str) -> None:
        self._locked = Locked(self._app, token)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._locked(scope, receive, send)


class Remote:
    """A fake edge behind a socket, and the plane that reaches it through that."""

    def __init__(
        self, edge: FakeEdge, plane: Plane, url: str, stop_edge: anyio.Event, lock: Lock
    ) -> None:
        self.lock = lock
        self.edge = edge
        self.plane = plane
        self.url = url
        self.stop_edge = stop_edge

    async def sandbox(self, key: str = "") -> str:
        headers = bearer(key or self.plane.keys.owner)
        made = await self.plane.client.post("/v1/sandboxes", json=SPEC, headers=headers)
        assert made.status_code == 201, made.text
        return f"/v1/sandboxes/{made.json()['id']}"


@asynccontextmanager
async def remote(way: str, folder: Path) -> AsyncIterator[Remote]:
    edge = FakeEdge()
    stop_edge, stop_server = anyio.Event(), anyio.Event()
    secret = folder / "secret"
    secret.write_text(TOKEN)
    secret.chmod(0o600)
    lock = Lock(edge.app)
    app: ASGIApp
    if way == "unix":
        listener = bind_unix(folder / "e.sock")
        address, app = EdgeAddress(unix_socket=str(folder / "e.sock")), edge.app
    else:
        listener = bind_tcp("127.0.0.1", 0)
        address = EdgeAddress(url=url_of(listener), token_file=str(secret))
        app = RequestContext(lock, SystemClock())
    front = bind_tcp("127.0.0.1", 0)
    url = url_of(front)
    async with anyio.create_task_group() as group:
        group.start_soon(serve, app, listener, stop_edge)
        async with reach([address]) as links, control_plane([edge], links) as plane:
            group.start_soon(serve, plane.server.app, front, stop_server)
            async with httpx.AsyncClient(
                base_url=url, headers=bearer(plane.keys.owner), timeout=10
            ) as client:
                plane.client = client
                yield Remote(edge, plane, url, stop_edge, lock)
            stop_server.set()
            stop_edge.set()


async def test_the_edges_api(way: str, tmp_path: Path) -> None:
    async with remote(way, tmp_path) as far:
        client = far.plane.client
        s = await far.sandbox()
        assert (await client.get(s)).json()["state"] == "running"
        assert len((await client.get("/v1/sandboxes")).json()["sandboxes"]) == 1
        assert [n["id"] for n in (await client.get("/v1/nodes")).json()] == ["n001"]
        assert [i["name"] for i in (await client.get("/v1/images")).json()] == ["debian"]
        pulled = await client.post("/v1/images/pull", json={"reference": "alpine"})
        assert '"ready"' in pulled.text.splitlines()[-1]
        missing = await client.post("/v1/images/pull", json={"reference": "missing"})
        assert missing.status_code == 404
        broken = await client.post("/v1/images/pull", json={"reference": "broken"})
        assert '"code":"not_found"' in broken.text.splitlines()[-1]
        sent = await client.post("/v1/images/import?name=a%20b", content=b"x" * 1_000_000)
        assert '"size_bytes":1000000' in sent.text
        assert '"name":"a b"' in sent.text
        assert (await client.delete("/v1/images?name=nope")).status_code == 404
        assert (await client.delete(s)).json()["state"] == "stopped"


async def test_layers_environments_and_the_store(way: str, tmp_path: Path) -> None:
    async with remote(way, tmp_path) as far:
        client = far.plane.client
        query = {"kind": "toolkit", "name": "a b:1", "description": "é & more"}
        sent = await client.post("/v1/layers/publish", params=query, content=EMPTY_TAR)
        assert '"ready"' in sent.text.splitlines()[-1], sent.text
        other = await client.post(
            "/v1/layers/publish", params=query, content=EMPTY_TAR + bytes(512)
        )
        assert '"code":"conflict"' in other.text.splitlines()[-1]
        (listed,) = (await client.get("/v1/layers")).json()
        assert (listed["name"], listed["description"]) == ("a b:1", "é & more")
        assert (await client.get("/v1/layers?kind=toolkit")).json() == [listed]
        assert (await client.get("/v1/layers?kind=workspace")).json() == []
        assert (await client.get("/v1/layers?kind=odd")).status_code == 400
        shown = await client.get("/v1/layers/show", params={"kind": "toolkit", "name": "a b"})
        assert shown.json() == listed
        made = await client.post("/v1/sandboxes", json={**SPEC, "toolkits": ["a b"]})
        assert made.json()["toolkits"] == ["a b:1"]
        pushed = await client.post("/v1/images/push?name=debian")
        assert '"ready"' in pushed.text.splitlines()[-1]
        assert (await client.post("/v1/images/push?name=nope")).status_code == 404
        asked = {"image": "debian", "toolkits": ["a b:1"], "answers": ["42"]}
        report = (await client.post("/v1/environments/lint", json=asked)).json()
        assert [finding["rule"] for finding in report["findings"]] == ["answer"]
        far.edge.record("debian", "t", 5.0)
        traced = {"image": "debian", "toolkit": ["a b:1", "a b"], "trace": "t"}
        view = (await client.get("/v1/environments/trace", params=traced)).json()
        assert view["environment"]["toolkits"] == ["a b:1", "a b"]
        assert (await client.get("/v1/environments/trace?image=debian")).status_code == 404
        assert [s["node"] for s in (await client.get("/v1/store")).json()] == ["n001"]
        looked = (await client.post("/v1/store/collect?dry_run=true")).json()
        assert (looked["dry_run"], looked["bytes"]) == (True, 12)
        assert (await client.post("/v1/store/collect")).json()["bytes"] == 12
        assert far.edge.collections == [True, False]
        named = {"kind": "toolkit", "name": "a b:1"}
        assert (await client.delete("/v1/layers", params=named)).status_code == 409
        await client.delete(f"/v1/sandboxes/{made.json()['id']}")
        assert (await client.delete("/v1/layers", params=named)).status_code == 204
        assert (await client.delete("/v1/layers", params=named)).status_code == 404


async def test_errors_keep_their_kind(way: str, tmp_path: Path) -> None:
    async with remote(way, tmp_path) as far:
        far.edge.full()
        refused = await far.plane.client.post("/v1/sandboxes", json=SPEC)
        assert refused.json()["error"]["code"] == "capacity_unavailable"
        far.edge.refusal = None
        unknown = await far.plane.client.post("/v1/sandboxes", json={"image": "nope"})
        assert unknown.json()["error"]["details"] == {"kind": "image"}


async def test_bodies_go_through_untouched(way: str, tmp_path: Path) -> None:
    async def chunks() -> AsyncIterator[bytes]:
        for number in range(50):
            yield bytes([number]) * 20_000

    async with remote(way, tmp_path) as far:
        s = await far.sandbox()
        whole = b"".join([chunk async for chunk in chunks()])
        streamed = await far.plane.client.put(f"{s}/files", content=chunks())
        assert streamed.content == whole
        sized = await far.plane.client.put(f"{s}/files", content=whole)
        assert sized.content == whole
        empty = await far.plane.client.put(f"{s}/files", content=b"")
        assert empty.content == b""


ELSEWHERE = [
    "/v1/sandboxes/{mine}/../{theirs}",
    "/v1/sandboxes/{mine}/%2e%2e/{theirs}",
    "/v1/sandboxes/{mine}/.%2E/{theirs}",
    "/v1/sandboxes/{mine}%2f..%2f{theirs}",
    "/v1/sandboxes/{mine}/../../../edge/v1/node",
    "/v1/sandboxes/{mine}/../../../edge/v1/sandboxes/{theirs}",
    "/v1/sandboxes/{mine}/./headers",
    "/v1/sandboxes/{mine}//headers",
    "/v1/sandboxes/{mine}/headers/",
    "/v1/sandboxes/{mine}/ports/\\..",
]


async def raw_status(far: Remote, method: str, path: str, key: str, *headers: str) -> int:
    """What a client gets that sends a path as it stands."""
    at = httpx.URL(far.url)
    lines = [f"{method} {path} HTTP/1.1", "Host: x", f"Authorization: Bearer {key}", *headers]
    async with await anyio.connect_tcp(at.host, at.port or 0) as stream:
        await stream.send("\r\n".join([*lines, "", ""]).encode())
        return int((await stream.receive()).split(b" ", 2)[1])


@pytest.mark.parametrize("path", ELSEWHERE)
async def test_no_path_leads_from_ones_own_sandbox_elsewhere(path: str, tmp_path: Path) -> None:
    upgrade = [
        "Upgrade: websocket",
        "Connection: Upgrade",
        "Sec-WebSocket-Version: 13",
        "Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==",
    ]
    async with remote("unix", tmp_path) as far:
        team = far.plane.keys.team
        theirs, mine = await far.sandbox(), await far.sandbox(team)
        target = path.format(mine=mine.rsplit("/", 1)[1], theirs=theirs.rsplit("/", 1)[1])
        for method in ("GET", "DELETE"):
            assert await raw_status(far, method, target, team, "Connection: close") == 404
        assert await raw_status(far, "GET", target, team, *upgrade) == 404
        assert (await far.plane.client.get(theirs)).json()["state"] == "running"


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("GET", "/v1/sandboxes?label=%FF=x"),
        ("GET", "/v1/sandboxes?limit=%FF"),
        ("DELETE", "/v1/images?name=%FF"),
        ("POST", "/v1/images/import?name=%ED%A0%80"),
    ],
)
async def test_what_is_no_text_is_the_callers_fault(method: str, path: str, tmp_path: Path) -> None:
    async with remote("unix", tmp_path) as far:
        answer = await far.plane.client.request(method, path)
    assert answer.status_code == 400, answer.text


@pytest.mark.parametrize("target", ["/a/../b", "/%2e%2E/b", "//b/.", "/b?x=%zz&y=/../'"])
async def test_a_path_is_sent_byte_for_byte(target: str, tmp_path: Path) -> None:
    async def tell(scope: Scope, receive: Receive, send: Send) -> None:
        got = scope["raw_path"] + (b"?" + scope["query_string"] if scope["query_string"] else b"")
        await Response(got)(scope, receive, send)

    stop = anyio.Event()
    async with anyio.create_task_group() as group:
        group.start_soon(serve, tell, bind_unix(tmp_path / "e.sock"), stop)
        link = EdgeLink("http://edge", str(tmp_path / "e.sock"))
        answer = await link.open("GET", target.encode(), [], None)
        assert await answer.aread() == target.encode()
        await link.close()
        stop.set()


async def test_headers_go_through_but_for_ours(way: str, tmp_path: Path) -> None:
    async with remote(way, tmp_path) as far:
        s = await far.sandbox()
        answer = await far.plane.client.get(
            f"{s}/headers?path=%2Fa%20b&x=%FF",
            headers={"X-Request-Id": "mine", "X-Dsec-Project": "other", "X-Mine": "1"},
        )
    seen = answer.json()
    assert seen["query"] == "path=%2Fa%20b&x=%FF"
    assert seen["x-request-id"] == "mine"
    assert seen["x-mine"] == "1"
    assert "x-dsec-project" not in seen
    assert seen.get("authorization") == (f"Bearer {TOKEN}" if way == "tcp" else None)
    assert answer.headers.get_list("x-request-id") == ["mine"]


async def test_a_stream_arrives_as_it_is_made(way: str, tmp_path: Path) -> None:
    async with remote(way, tmp_path) as far:
        s = await far.sandbox()
        far.edge.gate = anyio.Event()
        async with far.plane.client.stream("POST", f"{s}/commands/stream", json={}) as answer:
            lines = answer.aiter_lines()
            assert await anext(lines) == '{"type":"started"}'
            assert await anext(lines) == '{"type":"heartbeat"}'
            far.edge.gate.set()
            assert '{"type":"exited"}' in [line async for line in lines]


@pytest.mark.parametrize("what", ["commands/stream", "commands/run"])
async def test_a_client_that_leaves_is_noticed_at_the_edge(
    way: str, what: str, tmp_path: Path
) -> None:
    async with remote(way, tmp_path) as far:
        s = await far.sandbox()
        far.edge.gate = anyio.Event()
        async with far.plane.client.stream("POST", f"{s}/{what}", json={}) as answer:
            await anext(answer.aiter_raw())
        with anyio.fail_after(5):
            await far.edge.cancelled.wait()


async def test_a_body_that_breaks_is_seen_to_break(way: str, tmp_path: Path) -> None:
    async with remote(way, tmp_path) as far:
        s = await far.sandbox()
        with pytest.raises(httpx.RemoteProtocolError):
            await far.plane.client.get(f"{s}/breaks")


async def test_websockets(way: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async with remote(way, tmp_path) as far:
        s = await far.sandbox()
        url = far.url.replace("http", "ws", 1) + s
        headers = bearer(far.plane.keys.owner)
        lie = {"X-Dsec-Principal": "somebody else"}
        async with connect(f"{url}/ports/8000", additional_headers=headers | lie) as socket:
            assert far.edge.port_callers == ["owner"]
            big = bytes(range(256)) * 4000
            await socket.send(big)
            assert await socket.recv() == big[::-1]
            await socket.send(b"")
            with pytest.raises(ConnectionClosed):
                await socket.recv()
            assert socket.close_code == 1000
        with pytest.raises(InvalidStatus) as refused:
            await connect(f"{url}/ports/1", additional_headers=headers)
        assert refused.value.response.status_code == 404
        with pytest.raises(InvalidStatus) as unknown:
            await connect(f"{url}/ports/8000")
        assert unknown.value.response.status_code == 401
    assert [r.message for r in caplog.records if r.levelname == "ERROR"] == []


async def test_an_edge_that_went_away_is_noticed_at_once(way: str, tmp_path: Path) -> None:
    async with remote(way, tmp_path) as far:
        s = await far.sandbox()
        far.stop_edge.set()
        with anyio.fail_after(5):
            while True:
                answer = await far.plane.client.get(f"{s}/headers")
                if answer.status_code != 200:
                    break
            assert answer.json()["error"]["code"] == "unavailable"
            socket = connect(
                far.url.replace("http", "ws", 1) + f"{s}/ports/1",
                additional_headers=bearer(far.plane.keys.owner),
            )
            with pytest.raises(InvalidStatus) as refused:
                await socket
            assert refused.value.response.status_code == 503
            nodes = (await far.plane.client.get("/v1/nodes")).json()
            assert nodes[0]["healthy"] is False
            made = await far.plane.client.post("/v1/sandboxes", json=SPEC)
            assert made.json()["error"]["code"] == "unavailable"


async def test_an_edge_that_refuses_us_is_no_fault_of_the_callers_key(tmp_path: Path) -> None:
    async with remote("tcp", tmp_path) as far:
        s = await far.sandbox()
        far.lock.token("another")
        socket = connect(
            far.url.replace("http", "ws", 1) + f"{s}/ports/8000",
            additional_headers=bearer(far.plane.keys.owner),
        )
        with pytest.raises(InvalidStatus) as refused:
            await socket
        assert refused.value.response.status_code == 503
        for path in (s, f"{s}/headers", "/v1/sandboxes", "/v1/images"):
            answer = await far.plane.client.get(path)
            assert (path, answer.status_code) == (path, 503)
        made = await far.plane.client.post("/v1/sandboxes", json=SPEC)
        assert made.status_code == 503


async def test_an_edge_over_tcp_wants_its_secret(tmp_path: Path) -> None:
    async with remote("tcp", tmp_path) as far:
        del far
        edge = Locked(FakeEdge().app, TOKEN)
        app = RequestContext(edge, SystemClock())
        async with httpx.AsyncClient(
            transport=httpx.ASGITransport(app), base_url="http://edge"
        ) as client:
            assert (await client.get("/edge/v1/node")).status_code == 401
            wrong = await client.get("/edge/v1/node", headers=bearer("x"))
            assert wrong.status_code == 401
            right = await client.get("/edge/v1/node", headers=bearer(TOKEN))
            assert right.status_code == 200
