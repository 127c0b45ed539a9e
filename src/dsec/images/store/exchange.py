"""HTTP with one repository of a registry: connections, authorization, attempts, bounded answers."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from http import HTTPStatus
from urllib.parse import urlsplit

import aiohttp
import msgspec
from multidict import CIMultiDict, CIMultiDictProxy
from yarl import URL

from dsec.base.clock import Clock
from dsec.base.errors import DsecError, NotFound, Unavailable
from dsec.images.store.authority import Action, Authority, TokenRequest
from dsec.images.store.credentials import Credentials, find_credentials
from dsec.images.store.deadlines import persevere, within
from dsec.images.store.options import StoreOptions
from dsec.images.store.refusals import refused
from dsec.kit.blocking import in_thread

_ACTIONS: Mapping[str, Action] = {"GET": "pull", "HEAD": "pull", "DELETE": "delete"}
_READ_AT_ONCE = 1 << 18
_SENT_AT_ONCE = 1 << 18
_SAID_BYTES = 4096
"""Of an answer that is an error."""
_TOKEN_BYTES = 1 << 20
_KEEP_ALIVE_S = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """A request that may be repeated."""

    method: str
    url: URL
    headers: Mapping[str, str] | None = None
    body: bytes | None = None
    limit_bytes: int = 0
    """Of a good answer; one that is longer is a failure."""
    good: frozenset[int] = frozenset({200})
    """Statuses that are returned; 404 is NotFound unless it is one of them."""


@dataclass(frozen=True, slots=True)
class Answer:
    """A good answer, read to its end."""

    status: int
    headers: CIMultiDictProxy[str] | CIMultiDict[str]
    body: bytes
    url: URL
    """Of the last request, if there were redirects."""

    def resolve(self, location: str) -> URL:
        """A link in the answer as a URL. Its query, already quoted, stays as it is."""
        return self.url.join(URL(location, encoded=True))


class Exchange:
    """Requests to one repository. Connections are kept and used again."""

    def __init__(self, base: str, repository: str, options: StoreOptions, clock: Clock) -> None:
        self.root = URL(f"{base}/v2/{repository}")
        self._origin = self.root.origin()
        self._name = f"{base}/{repository}"
        self._options = options
        self._repository = repository
        self._authority = Authority(self.root, self._fetch_token, clock)
        self._credentials: Credentials | None = None
        self._session: aiohttp.ClientSession | None = None

    async def ask(self, ask: Ask) -> Answer:
        """Send a request until it has an answer, or the attempts are used up.

        Raises:
            NotFound, PermissionDenied, StorageFull, InvalidRequest, Unavailable: see `refused`.
        """
        return await persevere(self._options, self._name, lambda: self.attempt(ask))

    async def ask_once(self, ask: Ask, timeout_s: float) -> Answer:
        """Send a request that must not be repeated as it is.

        Raises:
            NotFound, PermissionDenied, StorageFull, InvalidRequest, Unavailable: see `refused`.
        """
        return await within(timeout_s, self._name, lambda: self.attempt(ask))

    async def aclose(self) -> None:
        """Close the connections."""
        if self._session is not None:
            await self._session.close()

    async def attempt(self, ask: Ask) -> Answer:
        """Send a request once, without a time limit.

        Raises:
            NotFound, PermissionDenied, StorageFull, InvalidRequest, Unavailable: see `refused`.
        """
        action = _ACTIONS.get(ask.method, "push")
        sent = self._authority.header(action)
        answer, challenge = await self._send(ask, sent)
        if answer is None:
            credentials = await self._login()
            if await self._authority.learn(action, sent, challenge, credentials):
                answer, _ = await self._send(ask, self._authority.header(action))
        if answer is None:
            raise refused(HTTPStatus.UNAUTHORIZED, self._what(ask), "")
        return answer

    async def _send(self, ask: Ask, authorization: str) -> tuple[Answer | None, str]:
        """One round; no answer and the challenge if the registry wants authorization."""
        headers = dict(ask.headers or {})
        body: bytes | AsyncIterator[bytes] | None = ask.body
        if ask.body and len(ask.body) > _SENT_AT_ONCE:
            headers["Content-Length"] = str(len(ask.body))
            body = _slices(ask.body)
        if authorization and ask.url.origin() == self._origin:
            headers["Authorization"] = authorization
        try:
            # A redirect is followed by the library, without Authorization if to another host.
            async with self._opened().request(
                ask.method, ask.url, headers=headers, data=body
            ) as response:
                if response.status in ask.good:
                    body = await _read(response, ask.limit_bytes)
                    return Answer(response.status, response.headers, body, response.url), ""
                challenge = response.headers.get("WWW-Authenticate", "")
                if response.status == HTTPStatus.UNAUTHORIZED and not response.history:
                    return None, challenge
                raise await self._refusal(ask, response)
        except (aiohttp.ClientError, OSError) as error:
            raise Unavailable(f"{self._what(ask)}: {type(error).__name__}") from error

    async def _refusal(self, ask: Ask, response: aiohttp.ClientResponse) -> DsecError:
        said = (await response.content.read(_SAID_BYTES)).decode("utf-8", "replace")
        if response.status == HTTPStatus.NOT_FOUND:
            return NotFound(f"{self._what(ask)}: not there")
        return refused(response.status, self._what(ask), said)

    def _what(self, ask: Ask) -> str:
        # Without the query: an upload's URL carries its state there, a signed one its signature.
        return f"{ask.method} {ask.url.origin()}{ask.url.path}"

    async def _login(self) -> Credentials:
        if self._credentials is None:
            host = urlsplit(str(self.root)).netloc
            self._credentials = await in_thread("disk", find_credentials, host, self._repository)
        return self._credentials

    async def _fetch_token(self, request: TokenRequest) -> bytes:
        headers = {"Authorization": request.authorization} if request.authorization else {}
        method = "GET" if request.form is None else "POST"
        what = f"asking {request.url.origin()} for a token"
        try:
            async with self._opened().request(
                method, request.url, headers=headers, data=request.form
            ) as response:
                if response.status != HTTPStatus.OK:
                    raise refused(response.status, what, "")
                return await _read(response, _TOKEN_BYTES)
        except (aiohttp.ClientError, OSError) as error:
            raise Unavailable(f"{what}: {type(error).__name__}") from error

    def _opened(self) -> aiohttp.ClientSession:
        if self._session is None:
            self._session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(
                    limit=self._options.connections, keepalive_timeout=_KEEP_ALIVE_S
                ),
                # The whole is bounded where it is called.
                timeout=aiohttp.ClientTimeout(
                    total=None, sock_connect=self._options.connect_timeout_s
                ),
                cookie_jar=aiohttp.DummyCookieJar(),
                json_serialize=lambda value: msgspec.json.encode(value).decode(),
                auto_decompress=False,
                read_bufsize=_READ_AT_ONCE,
            )
        return self._session


async def _slices(body: bytes) -> AsyncIterator[bytes]:
    """A large body in pieces, so that other requests get their turn."""
    for start in range(0, len(body), _SENT_AT_ONCE):
        yield body[start : start + _SENT_AT_ONCE]


async def _read(response: aiohttp.ClientResponse, limit_bytes: int) -> bytes:
    """The body of an answer, unless it is longer than it may be.

    Raises:
        Unavailable: it is.
    """
    if response.method == "HEAD":
        return b""
    if (length := response.content_length) is not None and length <= limit_bytes:
        return await response.read()  # HTTP itself ends it there
    parts: list[bytes] = []
    while part := await response.content.readany():
        parts.append(part)
        limit_bytes -= len(part)
        if limit_bytes < 0:
            response.close()
            raise Unavailable(f"{response.url.origin()} sent more than was asked for")
    return b"".join(parts)
