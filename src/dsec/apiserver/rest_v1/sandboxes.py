"""Routes about sandboxes that are not about one of them: create, create many, list."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta, Struct, field
from starlette.requests import Request
from starlette.responses import Response

from dsec.apiserver.gateway import caller_of
from dsec.apiserver.rest_v1.bodies import MAX_SPEC_BYTES
from dsec.apiserver.rest_v1.silence import silent_header
from dsec.base.errors import InvalidRequest
from dsec.base.states import SandboxState
from dsec.control.edges import Edges
from dsec.control.listing import Wanted, list_sandboxes
from dsec.control.sandboxes import Sandboxes
from dsec.kit.http import Ndjson, Route, json_response, key_of, read_body, read_query
from dsec.kit.table import NDJSON, row
from dsec.wire.phases import Name
from dsec.wire.public_v1 import BatchItem, CreateBatch, CreateSandbox, SandboxList
from dsec.wire.sandbox import Heartbeat, SandboxView, StreamError


class ListQuery(Struct, kw_only=True, forbid_unknown_fields=True):
    """Which sandboxes to list. `label` (`k=v`) and `state` may be repeated."""

    label: str | list[str] = field(default_factory=list)
    state: str | list[str] = field(default_factory=list)
    job: Name | None = None
    limit: Annotated[int, Meta(ge=1, le=1000)] = 100
    next: str = ""

    def wanted(self) -> Wanted:
        """The same as the use case takes it.

        Raises:
            InvalidRequest: a label has no `=` or no name, or there is no such state.
        """
        return Wanted(
            labels=_labels(_many(self.label)),
            states=_states(_many(self.state)),
            job=self.job or "",
            limit=self.limit,
            after=self.next,
        )


class SandboxesRest:
    """Handlers and their table."""

    def __init__(self, sandboxes: Sandboxes, edges: Edges) -> None:
        self._sandboxes = sandboxes
        self._edges = edges

    async def create_sandbox(self, request: Request) -> Response:
        """Create a sandbox and wait until it runs."""
        spec = await read_body(request, CreateSandbox, MAX_SPEC_BYTES)
        view = await self._sandboxes.create(caller_of(request), spec, key_of(request))
        return json_response(view, 201)

    async def create_sandboxes(self, request: Request) -> Ndjson:
        """Create many alike; each is reported when it is ready."""
        batch = await read_body(request, CreateBatch, MAX_SPEC_BYTES)
        return Ndjson(self._sandboxes.create_batch(caller_of(request), batch, key_of(request)))

    async def list_sandboxes(self, request: Request) -> Response:
        """List sandboxes, newest first."""
        wanted = read_query(request, ListQuery).wanted()
        page = await list_sandboxes(self._edges, caller_of(request), wanted)
        return json_response(page.listed, headers=silent_header(page.silent))

    def routes(self) -> list[Route]:
        """The table."""
        path = "/v1/sandboxes"
        progress = (BatchItem, Heartbeat, StreamError)
        return [
            row("POST", path, self.create_sandbox, CreateSandbox, None, SandboxView, 201),
            row(
                "POST",
                f"{path}:batch",
                self.create_sandboxes,
                CreateBatch,
                answer=progress,
                media_type=NDJSON,
            ),
            row("GET", path, self.list_sandboxes, None, ListQuery, SandboxList),
        ]


def _many(value: str | list[str]) -> list[str]:
    return [value] if isinstance(value, str) else value


def _labels(pairs: list[str]) -> dict[str, str]:
    labels: dict[str, str] = {}
    for pair in pairs:
        name, equals, value = pair.partition("=")
        if not equals or not name:
            raise InvalidRequest(f"label {pair!r} is not of the form k=v", place="label")
        if name in labels:
            raise InvalidRequest(f"label {name!r} is given twice", place="label")
        labels[name] = value
    return labels


def _states(names: list[str]) -> list[SandboxState]:
    try:
        return [SandboxState(name) for name in names]
    except ValueError as exc:
        known = ", ".join(SandboxState)
        raise InvalidRequest(f"{exc}; states are {known}") from None
