"""Where every request comes in: who asks, may they, and where does it go."""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Collection

from starlette.requests import Request
from starlette.types import ASGIApp, Receive, Scope, Send

from dsec.apiserver.auth import Authenticator
from dsec.base.errors import NotFound
from dsec.base.ids import SandboxId, sandbox_id
from dsec.control.access import Caller
from dsec.control.edges import Edges
from dsec.control.ownership import Ownership
from dsec.control.trajectories import Trajectories
from dsec.iam.permissions import Permission
from dsec.wire.edge_v1 import PRINCIPAL_HEADER, PROJECT_HEADER

PREFIX = "/v1/sandboxes/"
_CALLER = "dsec.caller"
_READ_ONLY = frozenset({"", "usage", "processes", "network"})
_DROPPED = re.compile(rb"authorization|x-api-key|x-dsec-.*|forwarded|x-forwarded-.*")
"""Headers that stop here: keys are none of the edge's business, and `X-Dsec-*` is what the
platform says to itself."""
_PATH = re.compile(rb"(?:/[A-Za-z0-9._~:@!$&'()*+,;=%-]+)+")
"""RFC 3986, 3.3, without empty segments."""


class Gateway:
    """Authenticates, then serves here or passes on to the sandbox's edge (ASGI)."""

    def __init__(
        self,
        here: ASGIApp,
        authenticator: Authenticator,
        ownership: Ownership,
        edges: Edges,
        public: Collection[str],
        check_fork: Callable[[Caller, SandboxId], Awaitable[None]],
    ) -> None:
        self._here = here
        self._authenticator = authenticator
        self._ownership = ownership
        self._trajectories = Trajectories(edges, ownership)
        self._edges = edges
        self._public = frozenset(public)
        self._check_fork = check_fork

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one connection.

        Raises:
            Unauthenticated, PermissionDenied, NotFound, Conflict, Unavailable: before anything is
                answered.
        """
        if scope["type"] == "lifespan" or scope["path"] in self._public:
            await self._here(scope, receive, send)
            return
        caller = await self._authenticator.caller(scope["headers"])
        path: str = scope["path"]
        if path.startswith(PREFIX) and len(path) > len(PREFIX):
            await self._pass_through(caller, path[len(PREFIX) :], scope, receive, send)
            return
        scope[_CALLER] = caller
        await self._here(scope, receive, send)

    async def _pass_through(
        self, caller: Caller, rest: str, scope: Scope, receive: Receive, send: Send
    ) -> None:
        _require_plain(scope)
        name, _, operation = rest.partition("/")
        sandbox = sandbox_id(name)
        permission = permission_for(scope.get("method", "GET"), operation)
        headers = [h for h in scope["headers"] if not _DROPPED.fullmatch(h[0])]
        headers.append((PRINCIPAL_HEADER.encode(), caller.principal.id.encode()))
        if operation == "trajectory" and scope.get("method") == "GET":
            edge, project = await self._trajectories.teller(caller, permission, sandbox)
            headers.append((PROJECT_HEADER.encode(), project.encode()))
        else:
            await self._ownership.require(caller, permission, sandbox)
            edge = self._edges.of(sandbox)
        if operation == "fork":  # it makes sandboxes, besides
            await self._check_fork(caller, sandbox)
        await edge.forward({**scope, "headers": headers}, receive, send)


def _require_plain(scope: Scope) -> None:
    """Refuse a path that somebody on the way may read as another one.

    What is judged here is sent on as it came. Many a library takes `MINE/../THEIRS` for `THEIRS`,
    encoded or not; none of our routes has such a name in it.

    Raises:
        NotFound: a segment is empty, `.` or `..`, or has characters no path has.
    """
    path: str = scope["path"]
    raw: bytes = scope["raw_path"]
    segments = {*path.split("/")[1:], *raw.decode("latin-1").split("/")[1:]}
    if not _PATH.fullmatch(raw) or segments & {"", ".", ".."}:
        raise NotFound("no such route", kind="route")


def permission_for(method: str, operation: str) -> Permission:
    """The right that an operation on a sandbox needs; `operation` is its path below the id."""
    if method == "GET" and operation in _READ_ONLY:
        return Permission.SANDBOX_READ
    if method == "DELETE" and not operation:
        return Permission.SANDBOX_STOP
    return Permission.SANDBOX_OPERATE


def caller_of(request: Request) -> Caller:
    """Who sent a request the gateway let in."""
    caller = request.scope[_CALLER]
    assert isinstance(caller, Caller)  # noqa: S101 - set above, for every route that is not public
    return caller
