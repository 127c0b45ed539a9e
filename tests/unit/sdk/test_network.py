"""The two networks behind the seam, each by its library: what the layers above count on."""

from __future__ import annotations

import socket
import ssl
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from shutil import which
from subprocess import run
from typing import Any

import anyio
import pytest

from dsec import DSecClient, InvalidRequest, Unavailable, Unsupported
from dsec.sdk import ConnectionFailed, Request, _aiohttp, _urllib3, sync
from dsec.sdk._http import parse_address
from dsec.wire.sandbox import FileInfo
from tests.unit.sdk.fake import SANDBOX, FakePlatform, Reply, json
from tests.unit.sdk.served import UPGRADE, Scripted, served

OK = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n[]"
GET = Request("GET", "/v1/nodes")


class Network:
    """Both transports by one interface: the synchronous one in a thread."""

    def __init__(self, kind: str, url: str, tls: ssl.SSLContext | None = None) -> None:
        module: Any = _aiohttp if kind == "aiohttp" else _urllib3
        self._transport = module.HttpTransport(parse_address(url), tls)
        self._threads = kind != "aiohttp"

    async def do(self, function: Callable[..., Any], *args: Any) -> Any:
        if self._threads:
            return await anyio.to_thread.run_sync(function, *args, abandon_on_cancel=True)
        made: Awaitable[Any] = function(*args)
        return await made

    def body(self, chunks: Iterator[bytes]) -> Any:
        async def asynchronous() -> AsyncIterator[bytes]:
            for data in chunks:
                yield data

        return chunks if self._threads else asynchronous()

    async def send(self, request: Request, body: Any = None, timeout: float = 10) -> Any:
        return await self.do(self._transport.send, request, body, timeout)

    async def whole(self, request: Request, body: Any = None) -> bytes:
        response = await self.send(request, body)
        data = b""
        while more := await self.do(response.receive, 10.0):
            data += more
        return data

    async def websocket(self) -> Any:
        return await self.do(self._transport.websocket, GET, 10.0)

    async def close(self) -> None:
        await self.do(self._transport.close if self._threads else self._transport.aclose)


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(params=["aiohttp", "urllib3"])
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
async def network(kind: str, platform: FakePlatform) -> AsyncIterator[Network]:
    with served(platform) as url:
        made = Network(kind, url)
        yield made
        await made.close()


@pytest.mark.parametrize("method", ["GET", "PUT", "DELETE", "POST"])
async def test_what_cannot_be_sent_twice_is_sent_once(kind: str, method: str) -> None:
    with Scripted([OK], [b""], [OK]) as server:
        network = Network(kind, server.url)
        assert await network.whole(GET) == b"[]"
        with pytest.raises(ConnectionFailed) as caught:
            await network.send(Request(method, "/x", repeatable=False))
        assert caught.value.sent
        await network.close()
    assert len(server.requests) == 2


@pytest.mark.parametrize("method", ["GET", "PUT", "DELETE", "POST"])
async def test_a_kept_connection_that_was_closed_is_replaced_at_once(
    kind: str, method: str
) -> None:
    with Scripted([OK, b""], [OK]) as server:
        network = Network(kind, server.url)
        assert await network.whole(GET) == b"[]"
        assert await network.whole(Request(method, "/x")) == b"[]"
        await network.close()
    assert len(server.requests) == 3


async def test_paths_go_over_as_they_are(network: Network, platform: FakePlatform) -> None:
    path = "/v1/a%2Fb%20%C3%A9%FF%25/%7E/../%2E%2E/d;e=f"
    await network.whole(Request("GET", path, {"path": b"/\xff %+&#", "n": 1}))
    assert platform.seen[-1].raw_path == path.encode()
    assert platform.seen[-1].raw_query == b"path=/%FF%20%25%2B%26%23&n=1"


async def test_what_is_said_of_encodings_and_cookies(
    network: Network, platform: FakePlatform
) -> None:
    odd = {"set-cookie": "a=b", "content-encoding": "gzip", "location": "/elsewhere"}
    platform.on("GET", "/v1/nodes", Reply(302, [b"not gzip"], odd))
    for _ in range(2):
        assert await network.whole(GET) == b"not gzip"
    headers = platform.seen[-1].headers
    assert headers["accept-encoding"] == "identity"
    assert "cookie" not in headers


async def test_large_bodies(network: Network, platform: FakePlatform) -> None:
    platform.on("PUT", "/v1/x", json([]))
    whole = bytes(range(256)) * 12_000
    await network.whole(Request("PUT", "/v1/x", body=whole))
    assert platform.seen[-1].body == whole
    body = network.body(iter([whole, b"", whole]))
    await network.whole(Request("PUT", "/v1/x", streamed=True), body)
    assert platform.seen[-1].body == whole * 2


@pytest.mark.parametrize("error", [ValueError("mine"), OSError("my disk"), Unavailable("mine")])
async def test_a_body_that_fails_fails_as_itself(
    network: Network, platform: FakePlatform, error: Exception
) -> None:
    platform.on("PUT", "/v1/x", json([]))

    def chunks() -> Iterator[bytes]:
        yield b"a"
        raise error

    with pytest.raises(type(error)) as caught:
        await network.send(Request("PUT", "/v1/x", streamed=True), network.body(chunks()))
    assert caught.value is error
    assert all(not seen.body for seen in platform.seen)


async def test_a_body_that_fails_after_an_early_answer(platform: FakePlatform) -> None:
    platform.on("PUT", "/v1/x", Reply(200, [b"\n"], unread=True, hang=True))
    answered = anyio.Event()

    async def chunks() -> AsyncIterator[bytes]:
        yield b"a"
        await answered.wait()
        raise ValueError("mine")

    with served(platform) as url:
        network = Network("aiohttp", url)
        async with anyio.create_task_group() as group:
            group.start_soon(_later, answered)
            with pytest.raises(ValueError, match="mine"):
                await network.send(Request("PUT", "/v1/x", streamed=True), chunks())
        await network.close()


async def _later(event: anyio.Event) -> None:
    await anyio.sleep(0.2)
    event.set()


async def test_an_answer_that_begins_early(platform: FakePlatform) -> None:
    platform.on("PUT", "/v1/x", Reply(200, [b"\n", b"[]"], unread=True))
    with served(platform) as url:
        network = Network("aiohttp", url)

        async def chunks() -> AsyncIterator[bytes]:
            for _ in range(200):
                yield bytes(256 << 10)

        with anyio.fail_after(10):
            request = Request("PUT", "/v1/x", streamed=True)
            try:
                assert await network.whole(request, chunks()) == b"\n[]"
            except ConnectionFailed as exc:  # its connection was closed on the rest of the body
                assert exc.sent
        await network.close()


async def test_a_body_is_drawn_no_faster_than_it_is_taken(kind: str) -> None:
    drawn = 0

    def chunks() -> Iterator[bytes]:
        nonlocal drawn
        while True:
            drawn += 1
            yield bytes(256 << 10)

    with socket.create_server(("127.0.0.1", 0)) as listener:
        network = Network(kind, f"http://127.0.0.1:{listener.getsockname()[1]}")
        request = Request("PUT", "/x", streamed=True)
        with pytest.raises(ConnectionFailed):
            await network.send(request, network.body(chunks()), timeout=0.5)
        assert 0 < drawn < 200
        await network.close()


async def test_silence(network: Network, platform: FakePlatform) -> None:
    platform.on("GET", "/v1/nodes", Reply(200, [b"\n"], hang=True))
    response = await network.send(GET)
    assert await network.do(response.receive, 10.0) == b"\n"
    for said in ("nothing heard", "given up"):
        with pytest.raises(ConnectionFailed, match=said):
            await network.do(response.receive, 0.1)
    assert len(platform.seen) == 1


async def test_no_head(kind: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        network = Network(kind, f"http://127.0.0.1:{listener.getsockname()[1]}")
        with pytest.raises(ConnectionFailed, match="nothing heard") as caught:
            await network.send(GET, timeout=0.2)
        assert caught.value.sent
        await network.close()


async def test_ipv6(kind: str) -> None:
    with Scripted([OK], host="::1") as server:
        network = Network(kind, f"{server.url}/base")
        assert await network.whole(GET) == b"[]"
        await network.close()
        head = server.requests[0]
        assert head.startswith(b"GET /base/v1/nodes HTTP/1.1\r\n")
        assert f"Host: {server.url.removeprefix('http://')}\r\n".encode() in head


async def test_a_client_can_be_used_after_it_was_closed(network: Network) -> None:
    await network.close()
    assert b"not_found" in await network.whole(Request("GET", "/x"))


async def test_a_websocket_that_breaks_off_has_not_ended(kind: str) -> None:
    with Scripted([UPGRADE], [UPGRADE + b"\x88\x02\x03\xf3"], [UPGRADE + b"\x88\x00"]) as server:
        network = Network(kind, server.url)
        for _ in range(2):  # no goodbye; close code 1011
            stream = await network.websocket()
            with pytest.raises(Unavailable, match="broke off"):
                await network.do(stream.receive)
            await network.do(stream.aclose if kind == "aiohttp" else stream.close)
        stream = await network.websocket()
        assert await network.do(stream.receive) == b""
        await network.do(stream.aclose if kind == "aiohttp" else stream.close)
        await network.close()


async def test_an_idle_websocket_is_asked_whether_it_lives(
    network: Network, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    monkeypatch.setattr("dsec.sdk._aiohttp.HEARD_WITHIN_S", 0.1)
    monkeypatch.setattr("dsec.sdk._urllib3.HEARD_WITHIN_S", 0.1)
    stream = await network.websocket()
    heard: list[bytes] = []

    async def listen() -> None:
        heard.append(await network.do(stream.receive))

    async with anyio.create_task_group() as group:
        group.start_soon(listen)
        await anyio.sleep(0.4)
        assert not heard
        await network.do(stream.send, b"still there")
    assert heard == [b"still there"]
    await network.do(stream.aclose if kind == "aiohttp" else stream.close)


async def test_a_dead_websocket_is_given_up(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dsec.sdk._aiohttp.HEARD_WITHIN_S", 0.1)
    monkeypatch.setattr("dsec.sdk._urllib3.HEARD_WITHIN_S", 0.1)
    with Scripted([UPGRADE, b"", b"", b"", b"", b""]) as server:
        network = Network(kind, server.url)
        stream = await network.websocket()
        with pytest.raises(Unavailable, match="nothing heard"):
            await network.do(stream.receive)
        await network.do(stream.aclose if kind == "aiohttp" else stream.close)
        await network.close()


def _certificate(where: Path) -> tuple[Path, Path]:
    key, cert = where / "key", where / "cert"
    options = (
        "-x509 -newkey rsa:2048 -nodes -days 2 -subj /CN=x -addext subjectAltName=IP:127.0.0.1"
    )
    command = ["openssl", "req", *options.split(), "-keyout", str(key), "-out", str(cert)]
    run(command, check=True, capture_output=True)
    return key, cert


@pytest.mark.skipif(which("openssl") is None, reason="needs openssl to make a certificate")
async def test_tls(kind: str, tmp_path: Path) -> None:
    key, cert = _certificate(tmp_path)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(cert, key)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        url = f"https://127.0.0.1:{listener.getsockname()[1]}"

        def serve() -> None:
            for _ in range(2):
                raw, _ = listener.accept()
                with raw:
                    try:
                        with context.wrap_socket(raw, server_side=True) as client:
                            client.recv(1 << 16)
                            client.sendall(OK)
                    except OSError:
                        pass

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        distrustful = Network(kind, url)
        with pytest.raises(ConnectionFailed, match="certificate"):
            await distrustful.whole(Request("GET", "/x", repeatable=False))
        await distrustful.close()
        trusting = Network(kind, url, ssl.create_default_context(cafile=cert))
        assert await trusting.whole(GET) == b"[]"
        await trusting.close()
        thread.join(5)


async def test_header_fields_are_one_line(platform: FakePlatform, kind: str) -> None:
    with served(platform) as url:
        if kind == "aiohttp":
            with pytest.raises(InvalidRequest, match="cannot be sent"):
                await DSecClient(url, api_key="a\nb").open()
            return
        with pytest.raises(InvalidRequest, match="cannot be sent"):
            sync.DSecClient(url, api_key="a\nb").open()


async def test_whole_files(platform: FakePlatform) -> None:
    data = bytes(3 << 20)
    platform.sandbox("PUT", "/files", json(FileInfo(path="/a", kind="file")))
    with served(platform) as url:
        async with DSecClient(url) as client:
            await (await client.get(SANDBOX)).files.write("/a", data)
    assert platform.calls("PUT", "/files")[0].body == data


def test_the_network_needs_asyncio() -> None:
    async def main() -> None:
        with pytest.raises(Unsupported, match="needs asyncio"):
            await DSecClient("http://127.0.0.1:1").open()

    anyio.run(main, backend="trio")
