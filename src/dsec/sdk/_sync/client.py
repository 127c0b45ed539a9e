# Generated from ../_async by tools/unasync.py; do not edit.
"""The client: where sandboxes, nodes and images are asked for."""

from __future__ import annotations

import builtins
import secrets
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Self

import msgspec
from typing_extensions import override

from dsec.base.errors import DsecError, InternalError, Unsupported
from dsec.sdk._answers import error_of, stream_error
from dsec.sdk._config import find_credentials
from dsec.sdk._http import ConnectionFailed, Request, parse_address
from dsec.sdk._patience import Patience
from dsec.sdk._sync.call import Caller, EventStream, Lines
from dsec.sdk._sync.environments import Environments
from dsec.sdk._sync.images import Images
from dsec.sdk._sync.layers import Layers
from dsec.sdk._sync.sandbox import Sandbox, segment
from dsec.sdk._sync.store import SharedStore
from dsec.sdk._sync.transport import Transport, network
from dsec.sdk.models import DSecContainerRunArgs, sandbox_spec
from dsec.wire.public_v1 import BatchItem, CreateBatch, NodeView, SandboxList, Version
from dsec.wire.sandbox import SandboxView, StreamError

API = "v1"
CREATE_TIMEOUT_S = 120.0
UNREACHABLE_S = 60.0
OPEN_UNREACHABLE_S = 5.0
PAGE = 500
_BATCH_LINE: msgspec.json.Decoder[BatchItem] = msgspec.json.Decoder(BatchItem)
_OTHER_LINE: msgspec.json.Decoder[StreamError] = msgspec.json.Decoder(StreamError)


class DSecClient:
    """A connection to the platform.

    Args:
        api_url: else DSEC_API_URL, else what `dsec up` wrote down, else http://127.0.0.1:7420.
        api_key: else DSEC_API_KEY, else what `dsec up` wrote down for that address.
        unreachable_s: how long a call goes on trying while nothing answers.
        transport: another way to the API than a network; for tests.
    """

    def __init__(
        self,
        api_url: str | None = None,
        api_key: str | None = None,
        *,
        unreachable_s: float = UNREACHABLE_S,
        transport: Transport | None = None,
    ) -> None:
        self._credentials = find_credentials(api_url, api_key)
        address = parse_address(self._credentials.api_url)
        self._transport = transport or network(address)
        self._unreachable_s = unreachable_s
        self._caller = Caller(
            self._transport, self._credentials.api_key, str(address), unreachable_s
        )
        self.images = Images(self._caller)
        self.layers = Layers(self._caller)
        self.environments = Environments(self._caller)
        self.store = SharedStore(self._caller)

    @override
    def __repr__(self) -> str:
        return f"<DSecClient {self._credentials.api_url}>"

    @property
    def api_url(self) -> str:
        """Where the API is."""
        return self._credentials.api_url

    def open(self, *, unreachable_s: float = OPEN_UNREACHABLE_S) -> Self:
        """See that the platform is there and speaks our version of the API.

        Args:
            unreachable_s: how long to go on trying while nothing answers.

        Raises:
            Unavailable: nothing answers there.
            Unsupported: it speaks another version; or this is not asyncio.
        """
        try:
            self._greet(unreachable_s)
        except BaseException:
            self.close()  # nobody leaves an `with` that was not entered
            raise
        return self

    def _greet(self, unreachable_s: float) -> None:
        version = self.version(unreachable_s=unreachable_s)
        if version.api != API:
            raise Unsupported(
                f"{self.api_url} speaks API {version.api}, this SDK speaks {API}",
                server_version=version.version,
            )

    def version(self, *, unreachable_s: float = OPEN_UNREACHABLE_S) -> Version:
        """The server's version; needs no key."""
        patience = self._caller.patience(
            unreachable_s=min(unreachable_s, self._unreachable_s)
        )
        return self._caller.call(
            self._caller.request("GET", "/v1/version"), Version, patience
        )

    def close(self) -> None:
        """Close every connection. Sandboxes go on."""
        self._caller.close()

    def __enter__(self) -> Self:
        return self.open()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        exc: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def run_container(
        self,
        args: DSecContainerRunArgs,
        timeout: float = CREATE_TIMEOUT_S,
        *,
        idempotency_key: str | None = None,
    ) -> Sandbox:
        """Start a sandbox; returns when it takes commands.

        Args:
            args: what it is to be.
            timeout: seconds; waiting for room on a full platform counts.
            idempotency_key: a repeated call with the same key gets the same sandbox.

        Raises:
            InvalidRequest: a value of `args` is wrong.
            NotFound: no such image.
            CapacityUnavailable: no node could take it in time; nothing was started.
            StartFailed: it never ran; `details` say why.
            DeadlineExceeded: not within `timeout`; if it does start, nobody will use it, and it
                stops by its idle time.
        """
        # Capacity and quota may free up until the deadline; unreachable is unreachable.
        patience = self._caller.patience(timeout, max(timeout, self._unreachable_s))
        request = self._caller.request(
            "POST",
            "/v1/sandboxes",
            body=sandbox_spec(args),
            key=idempotency_key or secrets.token_hex(16),
        )
        view = self._caller.call(request, SandboxView, patience)
        return Sandbox(self._caller, view)

    def run_containers(
        self,
        args: DSecContainerRunArgs,
        count: int,
        timeout: float = 600.0,
        *,
        idempotency_key: str | None = None,
    ) -> Batch:
        """Start many alike. Iterate over the answer: each as it is ready, or why it is not.

        Args:
            args: what each is to be.
            count: how many, up to 10,000.
            timeout: seconds for all of them.
            idempotency_key: a repeated call with the same key gets the same sandboxes.
        """
        request = self._caller.request(
            "POST",
            "/v1/sandboxes:batch",
            body=CreateBatch(spec=sandbox_spec(args), count=count),
            key=idempotency_key or secrets.token_hex(16),
        )
        return Batch(self._caller, request, count, self._caller.patience(timeout))

    def get(self, sandbox_id: str) -> Sandbox:
        """A handle on a sandbox.

        Raises:
            NotFound: there is none of that id, or it is somebody else's.
        """
        request = self._caller.request("GET", f"/v1/sandboxes/{segment(sandbox_id)}")
        return Sandbox(self._caller, self._caller.call(request, SandboxView))

    def list(
        self,
        labels: Mapping[str, str] | None = None,
        states: Sequence[str] | None = None,
        limit: int | None = None,
    ) -> builtins.list[SandboxView]:
        """Your sandboxes, newest first.

        Args:
            labels: only those with all of these.
            states: only those in one of these, e.g. ["running"].
            limit: no more than these many; None: all.
        """
        found: builtins.list[SandboxView] = []
        after = ""
        while limit is None or len(found) < limit:
            page = self._caller.call(
                self._caller.request(
                    "GET",
                    "/v1/sandboxes",
                    {
                        "label": [
                            f"{key}={value}" for key, value in (labels or {}).items()
                        ],
                        "state": [str(state) for state in states or []],
                        "limit": PAGE
                        if limit is None
                        else min(PAGE, limit - len(found)),
                        "next": after or None,
                    },
                ),
                SandboxList,
            )
            found += page.sandboxes
            after = page.next
            if not after:
                break
        return found

    def nodes(self) -> builtins.list[NodeView]:
        """The nodes: what each can do and how full it is."""
        return self._caller.call(
            self._caller.request("GET", "/v1/nodes"), builtins.list[NodeView]
        )


class Batch(EventStream[Sandbox | DsecError]):
    """The sandboxes of a batch, in order of completion.

    A connection that breaks is made again: the same key gets the same sandboxes, and those given
    out already are left out.
    """

    def __init__(
        self, caller: Caller, request: Request, count: int, patience: Patience
    ) -> None:
        self._caller = caller
        self._request = request
        self._count = count
        self._patience = patience
        self._lines: Lines | None = None
        self._seen: set[int] = set()

    @override
    def __next__(self) -> Sandbox | DsecError:
        """The next sandbox, or why one of them could not be started."""
        while len(self._seen) < self._count:
            try:
                line = self._line()
            except ConnectionFailed as exc:
                self.close()
                self._caller.lost(exc, self._request, self._patience)
                continue
            item = self._take(line)
            if item is not None and item.index not in self._seen:
                self._seen.add(item.index)
                return self._outcome(item)
        self.close()
        raise StopIteration

    def _line(self) -> bytes:
        if self._lines is None:
            response = self._caller.open(self._request, self._patience)
            self._lines = Lines(response, self._patience)
        line = self._lines.next()
        if not line:
            raise ConnectionFailed("the stream ended before the batch did", sent=True)
        return line

    def _take(self, line: bytes) -> BatchItem | None:
        try:
            return _BATCH_LINE.decode(line)
        except msgspec.ValidationError:
            pass
        try:
            event = _OTHER_LINE.decode(line)
        except msgspec.ValidationError:
            return None  # a heartbeat
        if event.http_status == 503:
            raise ConnectionFailed(event.message, sent=True)
        raise stream_error(event)

    def _outcome(self, item: BatchItem) -> Sandbox | DsecError:
        if item.sandbox is not None:
            return Sandbox(self._caller, item.sandbox)
        if item.error is None:
            return InternalError(
                "the server said neither sandbox nor error", index=item.index
            )
        error = error_of(item.error, 500)
        error.details["index"] = item.index
        return error

    @override
    def close(self) -> None:
        """Stop listening; sandboxes being started go on."""
        lines, self._lines = self._lines, None
        if lines is not None:
            lines.close()
