"""`dsec edge`: an edge alone, for an apiserver in another process or on another host."""

from __future__ import annotations

import ipaddress
import secrets
import socket

import anyio
from starlette.types import ASGIApp, Receive, Scope, Send

from dsec.base.errors import InvalidRequest, Unauthenticated
from dsec.kit.http import RequestContext
from dsec.main import state_dir
from dsec.main.all_in_one import Announce
from dsec.main.edge_parts import open_edge, stop_all
from dsec.main.listen import bind_tcp, bind_unix, serve, until_signal
from dsec.main.parts import CLOCK, lone_errors, read_secret
from dsec.main.settings import Settings


def run(settings: Settings, announce: Announce) -> None:
    """Serve until SIGTERM or SIGINT.

    Raises:
        Conflict: the port is taken, or another process uses the state directory.
        InvalidRequest: the address cannot be used, or is open to others without a secret.
    """
    token = read_secret(settings.edge_token_file)
    with (
        state_dir.hold(settings.state, settings.run) as held,
        _listen(settings, token) as listener,
        lone_errors(),
    ):
        held.announce(settings.edge_listen)
        arguments = (settings, listener, token, announce)
        anyio.run(_main, *arguments, backend_options={"use_uvloop": True})


def _listen(settings: Settings, token: str) -> socket.socket:
    where = settings.edge_listen or str(settings.run / "edge.sock")
    if "/" in where:
        return bind_unix(settings.run / where)
    host, _, port = where.rpartition(":")
    if not (port.isascii() and port.isdecimal()):
        raise InvalidRequest(f"{where!r} is neither a path nor host:port")
    # Whoever reaches an edge owns every sandbox on it.
    if not token:
        raise InvalidRequest("over TCP an edge needs a secret: --token-file")
    return bind_tcp(host.strip("[]") or str(ipaddress.IPv4Address("127.0.0.1")), int(port))


async def _main(
    settings: Settings, listener: socket.socket, token: str, announce: Announce
) -> None:
    stop = anyio.Event()
    async with open_edge(settings, CLOCK) as node, anyio.create_task_group() as group:
        group.start_soon(until_signal, stop)
        app = RequestContext(Locked(node.app, token), CLOCK) if token else node.app
        announce(f"DSec edge at {listener.getsockname()}")
        await serve(app, listener, stop)
        if settings.stop_sandboxes:
            await stop_all(node.api)
        group.cancel_scope.cancel()


class Locked:
    """Lets in only who knows the secret (ASGI middleware)."""

    def __init__(self, app: ASGIApp, token: str) -> None:
        self._app = app
        self._expected = f"Bearer {token}".encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one connection. Raises Unauthenticated."""
        given = next((v for name, v in scope["headers"] if name == b"authorization"), b"")
        if not secrets.compare_digest(given, self._expected):
            raise Unauthenticated("this edge serves its apiserver only")
        await self._app(scope, receive, send)
