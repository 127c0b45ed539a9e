"""The process that fetches: `python -m dsec.images.lazy.worker CONFIG`, started by the keeper.

It may be killed at any moment: what is open is written down, what is cached is marked only when it
is there, and the keeper starts it again. Status 0 = it was told to shut down, and so is the keeper.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import signal
import socket
import sys
from collections.abc import Generator
from pathlib import Path

import anyio
import msgspec
import uvicorn
from starlette.types import ASGIApp
from typing_extensions import override

from dsec.base.clock import Clock, SystemClock
from dsec.images.lazy.config import FillerConfig, load_config
from dsec.images.lazy.filler import open_filler
from dsec.images.lazy.fronts import open_front
from dsec.images.lazy.interface import Front
from dsec.images.lazy.service import make_filler_app
from dsec.images.store.interface import BlobStore
from dsec.images.store.opening import open_store
from dsec.images.store.options import StoreOptions
from dsec.kit import log

logger = logging.getLogger("dsec.filler")

TERMINATED = 128 + signal.SIGTERM
"""Exit status after SIGTERM: the keeper goes on."""
_CONNECT_TIMEOUT_S = 3.0
_BACKLOG = 1024
_GRACE_S = 2


def store_of(config: FillerConfig) -> BlobStore:
    """The store of these settings: it tries once, because the fetching tries again itself.

    Raises:
        InvalidRequest: the URL is none that is accepted.
        msgspec.ValidationError: an option is unknown or wrong.
    """
    options = StoreOptions(
        timeout_s=config.attempt_timeout_s,
        connect_timeout_s=min(_CONNECT_TIMEOUT_S, config.attempt_timeout_s),
        attempts=1,
        pause_s=config.pause_s,
    )
    given = {**dataclasses.asdict(options), **config.store_options}
    return open_store(config.store, msgspec.convert(given, StoreOptions, strict=False))


async def work(
    config: FillerConfig, front: Front, store: BlobStore, clock: Clock, stop: anyio.Event
) -> bool:
    """Serve the kernel and the edge until stopped; whether it was asked to shut down.

    Args:
        config: the settings.
        front: nothing of it is served yet.
        store: where data comes from.
        clock: for all times.
        stop: set by SIGTERM.
    """
    asked = False

    def shut_down() -> None:
        nonlocal asked
        asked = True
        stop.set()

    async with open_filler(config, store, front, clock) as filler, front.serving():
        app = make_filler_app(filler, shut_down, clock)
        with _listening(config.socket) as listener:
            logger.info("filler serves", extra={"socket": str(config.socket), "front": front.name})
            await _serve(app, listener, stop)
    return asked


class _Server(uvicorn.Server):
    @override
    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None]:
        """Signals are the business of `_until_signal`."""
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


async def _until_signal(stop: anyio.Event) -> None:
    with anyio.open_signal_receiver(signal.SIGTERM, signal.SIGINT) as signals:
        async for _ in signals:
            stop.set()
            return


async def _main(config: FillerConfig, front: Front) -> bool:
    stop, store = anyio.Event(), store_of(config)
    try:
        async with anyio.create_task_group() as group:
            group.start_soon(_until_signal, stop)
            asked = await work(config, front, store, SystemClock(), stop)
            group.cancel_scope.cancel()
    finally:
        with anyio.CancelScope(shield=True), anyio.move_on_after(_GRACE_S):
            await store.aclose()
    return asked


def main(file: Path) -> int:
    """The process; its exit status."""
    log.configure()
    logging.getLogger("uvicorn").setLevel(logging.WARNING)
    logging.getLogger("dsec.http").setLevel(logging.WARNING)
    config = load_config(file)
    with open_front(config) as front:
        asked = anyio.run(_main, config, front, backend_options={"use_uvloop": True})
    return 0 if asked else TERMINATED


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
