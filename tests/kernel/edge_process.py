"""An edge as a process of its own, to be killed by tests: `python edge_process.py HOME AETHER`."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import anyio
import uvicorn
from typing_extensions import override

from dsec.base.clock import SystemClock
from dsec.edge.admission import AdmissionLimits
from dsec.edge.backends.container import ContainerBackend, ContainerConfig
from dsec.edge.config import EdgeConfig
from dsec.edge.network.networks import NetworkConfig
from dsec.edge.network.router import RouterConfig
from dsec.edge.network.services import Services
from dsec.edge.network.slots import SlotLimits
from dsec.edge.server import make_edge_app
from dsec.edge.service import EdgeService
from dsec.images.service import ImageService
from dsec.kit import log


async def main(home: Path, node: str, aether: Path) -> None:
    clock = SystemClock()
    async with ImageService(home / "images", home / "layers") as images:
        where = ContainerConfig(
            node=node, state=home / "state", aether=aether, network=network(home, node)
        )
        config = EdgeConfig(
            node=node,
            state=home / "state",
            run=home / "run",
            limits=AdmissionLimits(memory_floor_bytes=0),
        )
        backend = ContainerBackend(where, images.environments, clock)
        async with EdgeService(config, [backend], images, clock).running() as edge:
            config_of_server = uvicorn.Config(
                make_edge_app(edge, clock),
                uds=str(home / "edge.sock"),
                lifespan="off",
                log_config=None,
            )
            async with anyio.create_task_group() as group:
                server = Server(config_of_server)
                group.start_soon(server.serve)
                with anyio.open_signal_receiver(signal.SIGTERM) as signals:
                    async for _ in signals:
                        break
                server.should_exit = True


def network(home: Path, node: str) -> NetworkConfig:
    """Made when a test's sandbox first wants one; names are asked of DSEC_TEST_RESOLVER."""
    built = Path(__file__).parents[2] / "native/target/bpf"
    resolver = os.environ.get("DSEC_TEST_RESOLVER")
    return NetworkConfig(
        router=RouterConfig(node=node, run=home / "run"),
        state=home / "state" / "networks",
        program=Path(os.environ.get("DSEC_BPF", built)) / "filter_tc.bpf.o",
        services=Services.of({}),
        limits=SlotLimits(ready=2),
        resolvers=(resolver,) if resolver else (),
    )


class Server(uvicorn.Server):
    """Leaves signals to us: uvicorn would end the process before the edge has let go."""

    @override
    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


if __name__ == "__main__":
    log.configure("WARNING")
    os.umask(0o077)
    anyio.run(main, Path(sys.argv[1]), sys.argv[2], Path(sys.argv[3]))
