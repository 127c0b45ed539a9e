"""An edge in another process: its API and its pass-through over HTTP, by TCP or a Unix socket.

The transport is used without a client around it: headers must arrive as they were sent, and bytes
must not be decoded on the way.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from http import HTTPStatus
from typing import TypeVar
from urllib.parse import quote, urlencode

import httpx
import msgspec

from dsec.base.errors import DsecError, Unavailable, error_from
from dsec.kit.generators import closing
from dsec.wire.edge_v1 import (
    ASKED,
    PLAIN,
    CreateOnEdge,
    ImageEvent,
    LayerEvent,
    ListFilter,
    PauseOrder,
    SentTrajectory,
    StopOrder,
)
from dsec.wire.public_v1 import (
    BuildImage,
    CollectReport,
    EnvironmentRef,
    ErrorAnswer,
    ImageProgress,
    ImageReady,
    ImageView,
    LayerKind,
    LayerReady,
    LayerView,
    LintReport,
    LintRequest,
    NodeView,
    PullImage,
    StoreView,
    TraceView,
)
from dsec.wire.sandbox import DiffEntry, Heartbeat, SandboxView, SnapshotView, StreamError

T = TypeVar("T")
E = TypeVar("E", bound=msgspec.Struct)
Query = Mapping[str, str | Sequence[str]]

CONNECT_TIMEOUT_S = 1.0
READ_TIMEOUT_S = 60.0
"""Between two pieces of an answer. Edges send something every 15 s while they are busy, so a longer
silence is a dead node or a broken path to it."""
IDLE_CONNECTION_S = 30.0
"""Less than the edge's own limit, so that it is never the edge that closes first."""


class EdgeLink:
    """Connections to one edge."""

    def __init__(self, url: str, unix_socket: str = "", token: str = "") -> None:
        """Describe the way to an edge; nothing is opened yet.

        Args:
            url: `http://host:port`; with a Unix socket only a name for it.
            unix_socket: path of the socket, or empty for TCP.
            token: what the edge wants to see in `Authorization`, or empty.
        """
        self.url = httpx.URL(url)
        self.unix_socket = unix_socket
        self.token = token
        self._transport = httpx.AsyncHTTPTransport(
            uds=unix_socket or None,
            limits=httpx.Limits(
                max_connections=None,
                max_keepalive_connections=128,
                keepalive_expiry=IDLE_CONNECTION_S,
            ),
        )

    @property
    def address(self) -> str:
        """The way in words."""
        return self.unix_socket or str(self.url)

    def own_headers(self) -> list[tuple[bytes, bytes]]:
        """Headers every request to this edge carries."""
        host = [(b"host", self.url.netloc)]
        return [*host, (b"authorization", f"Bearer {self.token}".encode())] if self.token else host

    async def open(
        self,
        method: str,
        raw_path: bytes,
        headers: list[tuple[bytes, bytes]],
        content: bytes | AsyncIterator[bytes] | None,
    ) -> httpx.Response:
        """Send a request; the answer's body is still to be read, and to be closed.

        Args:
            method: as it goes out.
            raw_path: path and query, sent byte for byte.
            headers: besides our own.
            content: the body.

        Raises:
            Unavailable: no answer; `details["sent"]` is False if the edge cannot have seen it.
        """
        request = httpx.Request(
            method,
            self.url,
            headers=[*self.own_headers(), *headers],
            content=content,
            extensions={
                # Not as the URL's path: httpx would resolve dots and encode it anew, and the edge
                # would serve another path than the one that was judged.
                "target": raw_path,
                "timeout": {
                    "connect": CONNECT_TIMEOUT_S,
                    "pool": CONNECT_TIMEOUT_S,
                    "read": READ_TIMEOUT_S,
                    "write": READ_TIMEOUT_S,
                },
            },
        )
        try:
            return await self._transport.handle_async_request(request)
        except (httpx.ConnectError, httpx.ConnectTimeout) as exc:
            raise Unavailable(f"the edge at {self.address} is away", sent=False) from exc
        except httpx.TransportError as exc:
            raise self.broken(exc) from exc

    def broken(self, exc: Exception) -> Unavailable:
        """The error for a connection that broke after something was sent."""
        return Unavailable(f"the edge at {self.address} broke off: {type(exc).__name__}")

    async def close(self) -> None:
        """Close all connections."""
        await self._transport.aclose()


class HttpEdge:
    """An edge's API (`dsec.wire.edge_v1.EdgeApi`) over HTTP."""

    def __init__(self, link: EdgeLink) -> None:
        self._link = link

    async def describe(self) -> NodeView:
        """How the node is. Raises Unavailable."""
        return await self._call("GET", "node", NodeView)

    async def create(self, request: CreateOnEdge) -> SandboxView:
        """Create a sandbox and wait until it runs; raises as `EdgeApi.create`."""
        return await self._call("POST", "sandboxes", SandboxView, request)

    async def get(self, sandbox: str) -> SandboxView:
        """Look at one. Raises NotFound."""
        return await self._call("GET", f"sandboxes/{quote(sandbox, safe='')}", SandboxView)

    async def list_sandboxes(self, matching: ListFilter) -> list[SandboxView]:
        """Look at all that match, newest first."""
        return await self._call("POST", "sandboxes:list", list[SandboxView], matching)

    async def stop(self, sandbox: str, order: StopOrder = ASKED) -> SandboxView:
        """Stop it and wait until nothing of it is left. Raises NotFound."""
        path, query = f"sandboxes/{quote(sandbox, safe='')}", msgspec.to_builtins(order)
        return await self._call("DELETE", path, SandboxView, query=query)

    async def pause(self, sandbox: str, order: PauseOrder = PLAIN) -> SandboxView:
        """Freeze it and take back its memory. Raises NotFound, SandboxGone."""
        path, query = f"sandboxes/{quote(sandbox, safe='')}/pause", msgspec.to_builtins(order)
        return await self._call("POST", path, SandboxView, query=query)

    async def resume(self, sandbox: str) -> SandboxView:
        """Have it go on. Raises NotFound, SandboxGone, CapacityUnavailable."""
        path = f"sandboxes/{quote(sandbox, safe='')}/resume"
        return await self._call("POST", path, SandboxView)

    async def images(self) -> list[ImageView]:
        """Images on this node."""
        return await self._call("GET", "images", list[ImageView])

    async def remove_image(self, name: str) -> None:
        """Forget an image. Raises NotFound, Conflict."""
        await self._call("DELETE", "images", object, query={"name": name})

    def pull_image(self, request: PullImage) -> AsyncIterator[ImageEvent]:
        """Import from a registry; progress, then `ImageReady`."""
        return self._stream(_IMAGE, "images/pull", msgspec.json.encode(request))

    def build_image(self, request: BuildImage) -> AsyncIterator[ImageEvent]:
        """Build a distribution image; progress, then `ImageReady`."""
        return self._stream(_IMAGE, "images/build", msgspec.json.encode(request))

    def import_image(self, name: str, archive: AsyncIterator[bytes]) -> AsyncIterator[ImageEvent]:
        """Import an archive as it streams in."""
        return self._stream(_IMAGE, "images/import", archive, {"name": name})

    def push_image(self, name: str) -> AsyncIterator[ImageEvent]:
        """Put an image into the shared store. Raises NotFound, Unsupported."""
        return self._stream(_IMAGE, "images/push", b"", {"name": name})

    async def layers(self, kind: LayerKind | None = None) -> list[LayerView]:
        """Workspaces and toolkits that can be had there."""
        query = {"kind": kind} if kind else None
        return await self._call("GET", "layers", list[LayerView], query=query)

    async def layer(self, kind: LayerKind, name: str) -> LayerView:
        """One of them. Raises NotFound."""
        return await self._call("GET", "layers/show", LayerView, query=_layer(kind, name))

    async def remove_layer(self, kind: LayerKind, name: str) -> None:
        """Forget a version. Raises NotFound, Conflict."""
        await self._call("DELETE", "layers", object, query=_layer(kind, name))

    def publish_layer(
        self, kind: LayerKind, name: str, description: str, archive: AsyncIterator[bytes]
    ) -> AsyncIterator[LayerEvent]:
        """Publish a version from a tar as it streams in. Raises Conflict."""
        query = {**_layer(kind, name), "description": description}
        return self._stream(_LAYER, "layers/publish", archive, query)

    async def lint(self, request: LintRequest) -> LintReport:
        """Look an environment over. Raises NotFound."""
        return await self._call("POST", "environments/lint", LintReport, request)

    async def trace(self, environment: EnvironmentRef, trace: str) -> TraceView:
        """What a run read of an environment. Raises NotFound."""
        query: dict[str, str | Sequence[str]] = {"image": environment.image, "trace": trace}
        if environment.workspace:
            query["workspace"] = environment.workspace
        query["toolkit"] = environment.toolkits
        return await self._call("GET", "environments/trace", TraceView, query=query)

    async def store(self) -> StoreView:
        """The shared store and that node's part of it."""
        return await self._call("GET", "store", StoreView)

    async def collect_store(self, *, dry_run: bool) -> CollectReport:
        """Remove from the store what nothing refers to. Raises Unsupported."""
        query = {"dry_run": "true" if dry_run else "false"}
        return await self._call("POST", "store/collect", CollectReport, query=query)

    async def sent_trajectory(self, sandbox: str) -> SentTrajectory:
        """Of one that is over, as the store has it. Raises NotFound, DataUnavailable."""
        return await self._call("GET", f"trajectories/{quote(sandbox, safe='')}", SentTrajectory)

    async def snapshots(self, project: str) -> list[SnapshotView]:
        """Snapshots of a project that can be had there."""
        query = {"project": project}
        return await self._call("GET", "snapshots", list[SnapshotView], query=query)

    async def remove_snapshot(self, project: str, name: str) -> None:
        """Forget a snapshot. Raises NotFound, Conflict."""
        await self._call("DELETE", "snapshots", object, query=_snapshot(project, name))

    async def snapshot_diff(self, project: str, name: str) -> list[DiffEntry]:
        """What a snapshot has changed. Raises NotFound."""
        query = _snapshot(project, name)
        return await self._call("GET", "snapshots/diff", list[DiffEntry], query=query)

    async def _call(
        self,
        method: str,
        path: str,
        shape: type[T],
        body: msgspec.Struct | None = None,
        query: Query | None = None,
    ) -> T:
        content = None if body is None else msgspec.json.encode(body)
        response = await self._link.open(method, _raw_path(path, query), [], content)
        try:
            answer = (await response.aread()).lstrip()
        except httpx.TransportError as exc:
            raise self._link.broken(exc) from exc
        finally:
            await response.aclose()
        # An answer that took long may be an error under a status sent before (spec/rest.md).
        if response.status_code >= 300 or answer.startswith(b'{"error":'):
            raise _error_in(response.status_code, answer)
        try:
            return msgspec.json.decode(answer or b"null", type=shape)
        except msgspec.MsgspecError as exc:
            raise self._odd(exc) from exc

    async def _stream(
        self,
        decoder: msgspec.json.Decoder[E | Heartbeat | StreamError],
        path: str,
        content: bytes | AsyncIterator[bytes],
        query: Query | None = None,
    ) -> AsyncIterator[E]:
        response = await self._link.open("POST", _raw_path(path, query), [], content)
        try:
            if response.status_code >= 300:
                raise _error_in(response.status_code, await response.aread())
            async with closing(response.aiter_lines()) as lines:
                async for line in lines:
                    if (event := _event(decoder.decode(line))) is None:
                        continue
                    yield event
                    if isinstance(event, (ImageReady, LayerReady)):
                        return
        except httpx.TransportError as exc:
            raise self._link.broken(exc) from exc
        except msgspec.MsgspecError as exc:
            raise self._odd(exc) from exc
        finally:
            await response.aclose()
        raise Unavailable(f"the edge at {self._link.address} broke off in the middle")

    def _odd(self, exc: msgspec.MsgspecError) -> Unavailable:
        return Unavailable(f"the edge at {self._link.address} answers in another shape: {exc}")


_IMAGE = msgspec.json.Decoder(ImageProgress | ImageReady | Heartbeat | StreamError)
_LAYER = msgspec.json.Decoder(ImageProgress | LayerReady | Heartbeat | StreamError)


def _event(said: E | Heartbeat | StreamError) -> E | None:
    """What a line says; None for a heartbeat. Raises the error it may hold."""
    if isinstance(said, StreamError):
        raise error_from(said.code, said.message, said.details, said.http_status)
    return None if isinstance(said, Heartbeat) else said


def _layer(kind: LayerKind, name: str) -> dict[str, str]:
    return {"kind": kind, "name": name}


def _snapshot(project: str, name: str) -> dict[str, str]:
    return {"project": project, "name": name}


def _raw_path(path: str, query: Query | None) -> bytes:
    return f"/edge/v1/{path}{'?' + urlencode(query, doseq=True) if query else ''}".encode()


def _error_in(status: int, body: bytes) -> DsecError:
    try:
        error = msgspec.json.decode(body, type=ErrorAnswer).error
    except msgspec.MsgspecError:
        return Unavailable(f"the edge answered {status} and no error of ours")
    if status == HTTPStatus.UNAUTHORIZED:
        return refused_us()
    return error_from(error.code, error.message, error.details, status)


def refused_us() -> Unavailable:
    """The error for an edge that does not know our secret: no fault of the caller's key."""
    return Unavailable("the edge does not accept this server's secret (token_file)", sent=False)
