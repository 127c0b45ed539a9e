"""The filters of slots in terms of rules: how one is loaded, and what it is told."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path

from dsec.edge.network.grammar import Network
from dsec.edge.network.router import Facts
from dsec.edge.network.spans import Spans
from dsec.edge.network.warden.messages import HeldName
from dsec.linux import network_filter
from dsec.linux.network_filter import IPPROTO, PortSpan, Programs, SlotSettings


class Loader:
    """Loads filters of one router, as `making.Load`; what no slot reaches is told before the first."""

    def __init__(self, program: Path, facts: Facts) -> None:
        """Of a compiled program, for a router that is there."""
        self._program = program
        self._facts = facts
        self._told = False
        self._lock = threading.Lock()

    def __call__(
        self, settings: SlotSettings, pins: Path, shared: Path
    ) -> AbstractContextManager[Programs]:
        """See `making.Load`. Blocks; from any thread."""
        self.prepare(shared)
        return network_filter.load(self._program, settings, pins, shared)

    def prepare(self, shared: Path) -> None:
        """Tell what no slot reaches, once in this process: the node's addresses may be new ones.

        Raises:
            OSError: the kernel refused.
        """
        with self._lock:
            if not self._told:
                network_filter.set_never(shared, self._facts.never)
                self._told = True


def apply(pins: str, allowed: Mapping[Network, Spans], held: Sequence[HeldName]) -> None:
    """Give a slot its policy: networks, and addresses that names gave and still may.

    Raises:
        OSError: the slot is gone, or the kernel refused; the policy before holds.
    """
    networks = {network: _spans(spans) for network, spans in allowed.items()}
    kept = {each.address: each.spans for each in held}
    network_filter.apply(pins, networks, lambda address, _: kept.get(address, ()))


def _spans(spans: Spans) -> list[PortSpan]:
    return [PortSpan(IPPROTO[each.protocol], each.low, each.high) for each in spans]
