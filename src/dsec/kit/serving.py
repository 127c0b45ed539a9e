"""Serving an ASGI application on a socket of ours until told to stop; says nothing on its own.

To load a server takes as long as all else of a small process's start: import this late there.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from collections.abc import Generator
from pathlib import Path
from typing import Literal

import anyio
import uvicorn
from starlette.types import ASGIApp
from typing_extensions import override

WEBSOCKET_BYTES = 16 << 20
"""Of one message."""


def private_socket(path: Path, backlog: int) -> socket.socket:
    """Listen on a Unix socket that only our own user can open. One there is taken for a dead one's.

    Raises:
        OSError: it cannot be made.
    """
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    path.unlink(missing_ok=True)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    before = os.umask(0o177)
    try:
        listener.bind(str(path))
        listener.listen(backlog)
        listener.setblocking(False)
    except OSError:
        listener.close()
        raise
    finally:
        os.umask(before)
    return listener


def server_config(
    app: ASGIApp,
    http: type[asyncio.Protocol] | Literal["httptools"],
    *,
    websockets: bool,
    grace_s: int,
    keep_alive_s: int = 5,
) -> uvicorn.Config:
    """How to serve.

    Args:
        app: what answers.
        http: what speaks HTTP.
        websockets: whether to speak WebSocket too.
        grace_s: requests in flight get this long when the server stops; then they are cut.
        keep_alive_s: an idle connection is closed after this.
    """
    return uvicorn.Config(
        app,
        loop="none",
        http=http,
        ws="websockets-sansio" if websockets else "none",
        ws_max_size=WEBSOCKET_BYTES,
        ws_per_message_deflate=False,
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,
        timeout_keep_alive=keep_alive_s,
        timeout_graceful_shutdown=grace_s,
    )


class _Server(uvicorn.Server):
    @override
    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None]:
        """Signals are the business of who serves."""
        yield


async def serve_until(config: uvicorn.Config, listener: socket.socket, stop: anyio.Event) -> None:
    """Serve until told to stop; then let requests in flight end, for a while."""
    server = _Server(config)

    async def watch() -> None:
        await stop.wait()
        server.should_exit = True

    async with anyio.create_task_group() as group:
        group.start_soon(watch)
        await server.serve([listener])
        group.cancel_scope.cancel()
