"""Where a worker listens for the edge.

A module of its own: to load a server takes as long as all else of a worker's start, and those who
read need not wait for that.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import anyio

from dsec.base.clock import Clock
from dsec.images.lazy.filler import Filler
from dsec.images.lazy.service import make_filler_app
from dsec.kit.serving import private_socket, serve_until, server_config

_BACKLOG = 1024
_GRACE_S = 2


async def serve_edge(
    filler: Filler, path: Path, clock: Clock, shut_down: Callable[[], None], stop: anyio.Event
) -> None:
    """Answer the edge until stopped.

    Args:
        filler: what it asks for.
        path: the socket, for root only.
        clock: measures requests.
        shut_down: called when the edge wants an end.
        stop: ends it.
    """
    app = make_filler_app(filler, shut_down, clock)
    config = server_config(app, "httptools", websockets=False, grace_s=_GRACE_S)
    with private_socket(path, _BACKLOG) as listener:
        await serve_until(config, listener, stop)
