"""Listening sockets, and serving on one until told to stop."""

from __future__ import annotations

import errno
import logging
import signal
import socket
from pathlib import Path

import anyio
from starlette.types import ASGIApp

from dsec.base.errors import Conflict, DsecError, InvalidRequest
from dsec.kit.serving import private_socket, serve_until, server_config
from dsec.main.protocol import BoundedProtocol

BACKLOG = 4096
KEEP_ALIVE_S = 75
"""Longer than clients keep an idle connection, so that it is never the server that closes first."""
GRACE_S = 5
"""Requests in flight get this long when the server stops; then their connections are cut."""


def bind_tcp(host: str, port: int) -> socket.socket:
    """Take a port, before anything else is started.

    Raises:
        Conflict: it is taken.
        InvalidRequest: there is no such address here, or we may not use the port.
    """
    try:
        family, kind, proto, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.socket(family, kind, proto)
    except OSError as exc:
        raise InvalidRequest(f"cannot listen on {host}:{port}: {exc}") from exc
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(BACKLOG)
        listener.setblocking(False)
    except OSError as exc:
        listener.close()
        if exc.errno == errno.EADDRINUSE:
            raise Conflict(f"{host}:{port} is taken; choose another with --port") from exc
        raise InvalidRequest(f"cannot listen on {host}:{port}: {exc.strerror}") from exc
    return listener


def bind_unix(path: Path) -> socket.socket:
    """Take a Unix socket that only our own user can open.

    Call it while holding the state directory: a socket found there is a dead server's.

    Raises:
        InvalidRequest: it cannot be made.
    """
    try:
        return private_socket(path, BACKLOG)
    except OSError as exc:
        raise InvalidRequest(f"cannot listen on {path}: {exc.strerror or exc}") from exc


def url_of(listener: socket.socket) -> str:
    """The address of a TCP listener for a client on this host."""
    host, port = listener.getsockname()[:2]
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)  # noqa: S104 - compared, not bound
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def _matters(record: logging.LogRecord) -> bool:
    """Not what uvicorn says of a WebSocket that got an ordinary answer: that is a refusal.

    Nor an error of ours in the middle of an answer, with its traceback: what is in a sandbox can
    bring it about, and it has been logged (`RequestContext`).
    """
    if record.exc_info and isinstance(record.exc_info[1], DsecError):
        return False
    return "without completing handshake" not in str(record.msg)


async def serve(app: ASGIApp, listener: socket.socket, stop: anyio.Event) -> None:
    """Serve until told to stop; then let requests in flight end, for a while."""
    logging.getLogger("uvicorn").setLevel(logging.WARNING)
    logging.getLogger("uvicorn.error").addFilter(_matters)
    config = server_config(
        app, BoundedProtocol, websockets=True, grace_s=GRACE_S, keep_alive_s=KEEP_ALIVE_S
    )
    await serve_until(config, listener, stop)


async def until_signal(stop: anyio.Event) -> None:
    """Set an event at the first SIGTERM or SIGINT; a second one ends the process as usual."""
    with anyio.open_signal_receiver(signal.SIGTERM, signal.SIGINT) as signals:
        async for _ in signals:
            stop.set()
            return
