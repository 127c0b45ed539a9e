"""The router: one network namespace per edge that all slots hang on, and its uplink to the host.

    <run>/net/router        the namespace
    <run>/net/slots/<N>     namespaces of slots
    <run>/net/bpf/          a file system for eBPF: `node/` shared maps, `<N>/` those of a slot

Thousands of slots cost the host one device and one or two routes. Nothing is made before the first
sandbox wants a network. What is there is adopted, also half-made: every step looks first. What the
router is has no file of its own; it is read from the kernel, which is where it lives and ends.
"""

from __future__ import annotations

import anyio

from dsec.edge.network.routing import Facts, RouterConfig, ensure_router, retire_router
from dsec.kit.blocking import in_thread

__all__ = ["Facts", "Router", "RouterConfig"]


class Router:
    """The router of one edge. Made when it is first needed, kept over restarts of the edge."""

    def __init__(self, config: RouterConfig) -> None:
        self.config = config
        self._facts: Facts | None = None
        self._lock = anyio.Lock()

    @property
    def facts(self) -> Facts | None:
        """None = nobody has needed it yet."""
        return self._facts

    async def ensure(self) -> Facts:
        """Have it there, whole; the first time in this process everything is looked at.

        Raises:
            Conflict: another edge has this node's name, or the host uses the pool otherwise.
            Unsupported: the host cannot do it; the message says what is missing.
            Unavailable: the kernel refused a step; it may be tried again.
        """
        async with self._lock:
            facts = self._facts
            if facts is None:
                facts = await in_thread("network", ensure_router, self.config)
                self._facts = facts
            return facts

    async def retire(self) -> None:
        """Remove all there is, the slots' namespaces included. No sandbox may be left.

        Raises:
            OSError: something resists; what was removed is, and it may be tried again.
        """
        async with self._lock:
            self._facts = None
            await in_thread("network", retire_router, self.config)
