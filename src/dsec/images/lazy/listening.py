"""Where a worker listens for the edge.

A module of its own: to load a server takes as long as all else of a worker's start, and those who
read need not wait for that.
"""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Callable, Generator
from pathlib import Path

import anyio
import uvicorn
from starlette.types import ASGIApp
from typing_extensions import override

from dsec.base.clock import Clock
from dsec.images.lazy.filler import Filler
from dsec.images.lazy.service import make_filler_app

_BACKLOG = 1024
_GRACE_S = 2


async def serve_edge(
    filler: Filler, path: Path, clock: Clock, shut_down: Callable[[], None], stop: anyio.Event
) -> None:
    """Answer the edge until stopped.

    Args:
        filler: what it asks for.
        path: the socket.
        clock: measures requests.
        shut_down: called when the edge wants an end.
        stop: ends it.
    """
    app = make_filler_app(filler, shut_down, clock)
    with _listening(path) as listener:
        await _serve(app, listener, stop)


class _Server(uvicorn.Server):
    @override
    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None]:
        """Signals are the business of the worker."""
        yield


@contextlib.contextmanager
def _listening(path: Path) -> Generator[socket.socket]:
    """The socket, for root only. One that is there already is a dead worker's."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    path.unlink(missing_ok=True)
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        before = os.umask(0o177)
        try:
            listener.bind(str(path))
        finally:
            os.umask(before)
        listener.listen(_BACKLOG)
        listener.setblocking(False)
        yield listener


async def _serve(app: ASGIApp, listener: socket.socket, stop: anyio.Event) -> None:
    server = _Server(
        uvicorn.Config(
            app,
            loop="none",
            http="httptools",
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            timeout_graceful_shutdown=_GRACE_S,
        )
    )

    async def watch() -> None:
        await stop.wait()
        server.should_exit = True

    async with anyio.create_task_group() as group:
        group.start_soon(watch)
        await server.serve([listener])
        group.cancel_scope.cancel()
