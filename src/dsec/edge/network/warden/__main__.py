"""`python -m dsec.edge.network.warden --control FD`, started by `client`."""

from __future__ import annotations

import argparse
import socket
import sys
from collections.abc import Sequence

import anyio
from anyio.abc import SocketStream
from typing_extensions import override

from dsec.base.clock import SystemClock
from dsec.base.errors import Unavailable
from dsec.edge.network.warden.control import Warden
from dsec.edge.network.warden.guests import KernelNames
from dsec.edge.network.warden.messages import HeldName
from dsec.kit import log
from dsec.kit.blocking import in_thread
from dsec.linux import network_filter


class FilterNames(KernelNames):
    """The maps of `dsec.linux.network_filter`."""

    @override
    async def add(self, pins: str, held: Sequence[HeldName]) -> None:
        await in_thread("names", _add, pins, held)


def _add(pins: str, held: Sequence[HeldName]) -> None:
    for each in held:
        network_filter.name_add(pins, each.address, each.spans, each.ttl_s)


async def _main(control: socket.socket) -> None:
    async with await SocketStream.from_socket(control) as stream:
        await Warden(stream, FilterNames(), SystemClock()).run()


def main(argv: Sequence[str]) -> int:
    """The process; its exit status."""
    parser = argparse.ArgumentParser(prog="dsec.edge.network.warden")
    parser.add_argument("--control", type=int, required=True, help="descriptor of a socket pair")
    control = socket.socket(fileno=parser.parse_args(argv).control)
    log.configure()
    control.setblocking(False)
    try:
        anyio.run(_main, control, backend_options={"use_uvloop": True})
    except Unavailable as exc:
        sys.stderr.write(f"{exc}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
