"""The parts of the registry's protocol that Debian's server does not show: tokens, redirects, pages."""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import anyio
import pytest
from aiohttp import web
from yarl import URL

from dsec.base.errors import PermissionDenied, Unavailable, Unsupported
from dsec.images.store import artifacts
from dsec.images.store.authority import Challenge, parse_challenge, token_request
from dsec.images.store.credentials import Credentials
from dsec.images.store.interface import BlobRef
from dsec.images.store.options import StoreOptions
from dsec.images.store.registry import RegistryStore

pytestmark = [pytest.mark.anyio]

DATA = bytes(range(256))
DIGEST = f"sha256:{hashlib.sha256(DATA).hexdigest()}"
OPTIONS = StoreOptions(timeout_s=20, pause_s=0.001)
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


class JumpingClock:
    def __init__(self) -> None:
        self.time = 0.0

    def now(self) -> float:
        return self.time

    def monotonic(self) -> float:
        return self.time


@asynccontextmanager
async def listening(handler: Handler) -> AsyncIterator[str]:
    """A server on loopback; yields host:port."""
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", handler)
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        yield "{}:{}".format(*runner.addresses[0][:2])
    finally:
        await runner.cleanup()


@dataclass
class Registry:
    """Says what it is told to, and what it was asked."""

    clock: JumpingClock = field(default_factory=JumpingClock)
    address: str = ""
    challenge: str = ""
    accepted: set[str] = field(default_factory=set)
    """Values of Authorization; empty = all."""
    redirect: str = ""
    ranges: bool = True
    asked: list[web.Request] = field(default_factory=list)
    tokens: int = 0
    token_status: int = 200
    token_asked: list[tuple[web.Request, dict[str, str]]] = field(default_factory=list)
    pages: list[tuple[list[str], str]] = field(default_factory=list)

    async def handle(self, request: web.Request) -> web.StreamResponse:
        if request.path == "/token":
            return await self._token(request)
        self.asked.append(request)
        sent = request.headers.get("Authorization", "")
        if self.challenge and sent not in self.accepted:
            return web.Response(status=401, headers={"WWW-Authenticate": self.challenge})
        if self.redirect:
            return web.Response(status=307, headers={"Location": self.redirect})
        return self._answer(request)

    def _answer(self, request: web.Request) -> web.Response:
        if request.path.endswith("/tags/list"):
            tags, following = self.pages[int(request.query.get("page", "0"))]
            link = {"Link": f'<{following}>; rel="next"'} if following else {}
            return web.json_response({"name": "x", "tags": tags}, headers=link)
        if request.method == "DELETE":
            return web.Response(status=405)
        if "/manifests/" in request.path:
            name = request.path.rpartition("/")[2]
            body = artifacts.manifest("image", f"name of {name}", BlobRef(DIGEST, len(DATA)), [])
            return web.Response(body=body, content_type=artifacts.MANIFEST_TYPE)
        return blob(request, ranges=self.ranges)

    async def _token(self, request: web.Request) -> web.Response:
        self.tokens += 1
        form = {key: str(value) for key, value in (await request.post()).items()}
        self.token_asked.append((request, form))
        if self.token_status != 200:
            return web.Response(status=self.token_status)
        value = f"token-{self.tokens}"
        self.accepted = {f"Bearer {value}"}
        return web.json_response({"token": value, "expires_in": 300})

    def bearer(self) -> None:
        self.challenge = (
            f'Bearer realm="http://{self.address}/token",service="registry",'
            'scope="repository:team/envs:pull"'
        )


def blob(request: web.Request, *, ranges: bool = True) -> web.Response:
    if not ranges or "Range" not in request.headers:
        return web.Response(body=DATA)
    start, end = request.headers["Range"].removeprefix("bytes=").split("-")
    part = DATA[int(start) : int(end) + 1]
    where = {"Content-Range": f"bytes {start}-{end}/{len(DATA)}"}
    return web.Response(status=206, body=part, headers=where)


@pytest.fixture
async def registry() -> AsyncIterator[Registry]:
    made = Registry()
    async with listening(made.handle) as made.address:
        yield made


@pytest.fixture
async def store(
    registry: Registry, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[RegistryStore]:
    log_in(tmp_path, monkeypatch, registry.address, {"username": "user", "password": "hunter2"})
    opened = RegistryStore(
        "oci+http", f"http://{registry.address}", "team/envs", OPTIONS, registry.clock
    )
    yield opened
    await opened.aclose()


def log_in(
    place: Path, monkeypatch: pytest.MonkeyPatch, address: str, entry: dict[str, str]
) -> None:
    (place / "config.json").write_text(json.dumps({"auths": {address: entry}}))
    monkeypatch.setenv("REGISTRY_AUTH_FILE", str(place / "config.json"))


async def read(store: RegistryStore) -> None:
    assert await store.read_blob(DIGEST, 16, 32) == DATA[16:48]


async def test_an_open_registry_is_sent_no_credentials(
    registry: Registry, store: RegistryStore
) -> None:
    await read(store)
    assert "Authorization" not in registry.asked[0].headers


async def test_basic(registry: Registry, store: RegistryStore) -> None:
    expected = "Basic " + base64.b64encode(b"user:hunter2").decode()
    registry.challenge, registry.accepted = 'Basic realm="x"', {expected}
    await read(store)
    await read(store)
    sent = [request.headers.get("Authorization") for request in registry.asked]
    assert sent == [None, expected, expected]


async def test_a_token_is_asked_for_once(registry: Registry, store: RegistryStore) -> None:
    registry.bearer()
    async with anyio.create_task_group() as tasks:
        for _ in range(20):
            tasks.start_soon(read, store)
    assert registry.tokens == 1
    request, _ = registry.token_asked[0]
    assert request.query["scope"] == "repository:team/envs:pull"
    assert request.query["service"] == "registry"
    assert request.headers["Authorization"].startswith("Basic ")


async def test_a_token_that_is_over_is_replaced(registry: Registry, store: RegistryStore) -> None:
    registry.bearer()
    await read(store)
    registry.clock.time += 200
    await read(store)
    assert registry.tokens == 1
    registry.clock.time += 200
    await read(store)
    assert registry.tokens == 2


async def test_a_token_the_registry_forgot_is_replaced(
    registry: Registry, store: RegistryStore
) -> None:
    registry.bearer()
    await read(store)
    registry.accepted = set()
    await read(store)
    assert registry.tokens == 2


async def test_an_identity_token_is_exchanged(
    registry: Registry, store: RegistryStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log_in(tmp_path, monkeypatch, registry.address, {"identitytoken": "long-lived"})
    registry.bearer()
    await read(store)
    request, form = registry.token_asked[0]
    assert request.method == "POST"
    assert form["grant_type"] == "refresh_token"
    assert form["refresh_token"] == "long-lived"
    assert "long-lived" not in str(request.url)


@pytest.mark.parametrize("status", [401, 403])
async def test_a_token_server_that_refuses(
    registry: Registry, store: RegistryStore, status: int
) -> None:
    registry.bearer()
    registry.token_status = status
    with pytest.raises(PermissionDenied) as caught:
        await read(store)
    assert "hunter2" not in caught.value.message


@pytest.mark.parametrize("challenge", ["", "Negotiate", 'Basic realm="x"'])
async def test_a_registry_that_is_not_satisfied(
    registry: Registry, store: RegistryStore, challenge: str
) -> None:
    registry.challenge = challenge or "Unknown"
    with pytest.raises(PermissionDenied):
        await read(store)
    assert len(registry.asked) <= 2


async def test_a_redirect_to_another_host_is_followed_without_authorization(
    registry: Registry, store: RegistryStore
) -> None:
    there: list[web.Request] = []

    async def storage(request: web.Request) -> web.StreamResponse:
        there.append(request)
        return blob(request)

    registry.bearer()
    async with listening(storage) as elsewhere:
        registry.redirect = f"http://{elsewhere}/signed?signature=abc"
        await read(store)
    assert there[0].headers["Range"] == "bytes=16-47"
    assert "Authorization" not in there[0].headers
    assert registry.asked[-1].headers["Authorization"].startswith("Bearer ")


async def test_a_redirected_refusal_gets_no_credentials_and_tells_no_signature(
    registry: Registry, store: RegistryStore
) -> None:
    async def storage(request: web.Request) -> web.StreamResponse:
        return web.Response(status=401, headers={"WWW-Authenticate": 'Basic realm="x"'})

    async with AsyncExitStack() as stack:
        elsewhere = await stack.enter_async_context(listening(storage))
        registry.redirect = f"http://{elsewhere}/signed?signature=abc"
        with pytest.raises(PermissionDenied) as caught:
            await read(store)
    assert "abc" not in caught.value.message


async def test_a_registry_without_ranges(registry: Registry, store: RegistryStore) -> None:
    registry.ranges = False
    with pytest.raises(Unavailable):
        await read(store)


async def test_pages_of_tags(registry: Registry, store: RegistryStore) -> None:
    tags = [artifacts.tag_of("image", str(number)) for number in range(45)]
    registry.pages = [
        (tags[:20], "/v2/team/envs/tags/list?page=1"),
        ([*tags[20:40], "latest", artifacts.tag_of("layer", "x")], "list?page=2"),
        (tags[40:], ""),
    ]
    found = [name async for name in store.list_documents("image")]
    assert sorted(found) == sorted(f"name of {tag}" for tag in tags)


async def test_a_list_of_tags_without_an_end(
    registry: Registry, store: RegistryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dsec.images.store.registry._MAX_PAGES", 3)
    registry.pages = [([artifacts.tag_of("image", "x")], "/v2/team/envs/tags/list?page=0")]
    with pytest.raises(Unavailable, match="without an end"):
        [name async for name in store.list_documents("image")]
    assert sum(each.path.endswith("/tags/list") for each in registry.asked) == 3


async def test_a_registry_that_deletes_nothing(registry: Registry, store: RegistryStore) -> None:
    with pytest.raises(Unsupported):
        await store.delete_document("image", "x")


def test_challenges() -> None:
    found = parse_challenge('Bearer realm="https://a/t?x=1,2", service = "s",scope="r:a:pull,push"')
    assert found.scheme == "bearer"
    assert found.parameters == {
        "realm": "https://a/t?x=1,2",
        "service": "s",
        "scope": "r:a:pull,push",
    }
    assert parse_challenge('Negotiate, Basic realm="x"').scheme == "basic"
    assert parse_challenge("").scheme == ""


def test_a_password_is_not_sent_in_the_clear_for_a_registry_that_is_encrypted() -> None:
    challenge = Challenge("bearer", {"realm": "http://other/token"})
    with pytest.raises(PermissionDenied):
        token_request(challenge, Credentials("u", "p"), URL("https://registry/v2/a"))
    asked = token_request(challenge, Credentials("u", "p"), URL("http://registry/v2/a"))
    assert asked.authorization.startswith("Basic ")
