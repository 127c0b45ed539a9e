"""An edge of simulated sandboxes with a store, to be killed: `trajectory_edge.py HOME NODE STORE`."""

from __future__ import annotations

import sys
from pathlib import Path

import anyio

from dsec.base.clock import SystemClock
from dsec.edge.admission import AdmissionLimits
from dsec.edge.config import EdgeConfig
from dsec.edge.server import make_edge_app
from dsec.edge.service import EdgeService
from dsec.edge.sim import SimBackend
from dsec.images.store.opening import open_store
from dsec.kit import log
from dsec.main.listen import bind_unix, serve
from dsec.main.simulation import SimImages


async def main(home: Path, node: str, url: str) -> None:
    clock = SystemClock()
    store = open_store(url)
    config = EdgeConfig(
        node=node,
        state=home / "state",
        run=home / "run",
        limits=AdmissionLimits(memory_floor_bytes=0),
        store=store,
    )
    listener = bind_unix(home / "edge.sock")
    async with EdgeService(config, [SimBackend(clock)], SimImages(clock), clock).running() as edge:
        await serve(make_edge_app(edge, clock), listener, anyio.Event())


if __name__ == "__main__":
    log.configure("WARNING")
    anyio.run(main, Path(sys.argv[1]), sys.argv[2], sys.argv[3])
