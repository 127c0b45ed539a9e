"""The process that fetches: `python -m dsec.images.lazy.worker CONFIG`, started by the keeper.

It may be killed at any moment: what is open is written down, what is cached is marked only when it
is there, and the keeper starts it again. Status 0 = it was told to shut down, and so is the keeper.
"""

from __future__ import annotations

import dataclasses
import logging
import os
import signal
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path

import anyio
import msgspec

from dsec.base.clock import Clock, SystemClock
from dsec.images.lazy.config import FillerConfig, load_config
from dsec.images.lazy.filler import open_filler
from dsec.images.lazy.fronts import open_front
from dsec.images.lazy.handed import Handed
from dsec.images.lazy.interface import Front
from dsec.images.lazy.pulse import beat
from dsec.images.store.interface import BlobStore
from dsec.images.store.opening import open_store
from dsec.images.store.options import StoreOptions
from dsec.kit import log
from dsec.kit.blocking import in_thread

logger = logging.getLogger("dsec.filler")

TERMINATED = 128 + signal.SIGTERM
"""Exit status after SIGTERM: the keeper goes on."""
_CONNECT_TIMEOUT_S = 3.0
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
        serve_edge = await in_thread("disk", _load_server)
        logger.info("filler serves", extra={"socket": str(config.socket), "front": front.name})
        await serve_edge(filler, config.socket, clock, shut_down, stop)
    return asked


def _load_server() -> Callable[..., Awaitable[None]]:
    """After the kernel is served: who reads has waited for all that is loaded before."""
    from dsec.images.lazy.listening import serve_edge

    return serve_edge


async def _until_signal(stop: anyio.Event) -> None:
    with anyio.open_signal_receiver(signal.SIGTERM, signal.SIGINT) as signals:
        async for _ in signals:
            stop.set()
            return


async def _main(config: FillerConfig, front: Front, pulse: int | None) -> bool:
    stop, store = anyio.Event(), store_of(config)
    try:
        async with anyio.create_task_group() as group:
            group.start_soon(beat, pulse)
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
    pulse = Handed.decode(os.environ).pulse
    with open_front(config) as front:
        asked = anyio.run(_main, config, front, pulse, backend_options={"use_uvloop": True})
    return 0 if asked else TERMINATED


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
