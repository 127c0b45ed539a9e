"""What names have, remembered for all sandboxes: the cache before `upstream`."""

from __future__ import annotations

from collections import OrderedDict

from dsec.base.clock import Clock
from dsec.edge.network.warden.settings import Limits
from dsec.edge.network.warden.upstream import AddressType, Ask, Found, UpstreamFailed
from dsec.kit.flights import Flights

_FAILURE_S = 5.0
"""A name nobody could answer is not asked again at once."""

_Key = tuple[str, AddressType]


class Lookups:
    """Asks once for many; the least used leaves first."""

    def __init__(self, ask: Ask, limits: Limits, clock: Clock) -> None:
        """Remember nothing yet.

        Args:
            ask: the way to the node's resolvers.
            limits: how much to remember, and for how long.
            clock: for how long.
        """
        self._ask = ask
        self._limits = limits
        self._clock = clock
        self._known: OrderedDict[_Key, tuple[Found | None, float]] = OrderedDict()
        self._flights = Flights()

    def known(self, name: str, kind: AddressType) -> Found | None:
        """What is remembered of a name, its time run down.

        Raises:
            UpstreamFailed: it was asked for a moment ago, in vain.
        """
        entry = self._known.get((name, kind))
        left = entry[1] - self._clock.monotonic() if entry is not None else 0.0
        if entry is None or left <= 0:
            return None
        self._known.move_to_end((name, kind))
        if entry[0] is None:
            raise UpstreamFailed("no resolver answered")
        found = entry[0]
        ttl_s = max(left, self._limits.ttl_min_s)
        return Found(exists=found.exists, addresses=found.addresses, ttl_s=ttl_s)

    async def find(self, name: str, kind: AddressType) -> Found:
        """What a name has; its time is within the limits.

        Raises:
            UpstreamFailed: nobody answers.
        """
        if (found := self.known(name, kind)) is not None:
            return found
        async with self._flights.alone((name, kind)):
            if (found := self.known(name, kind)) is not None:
                return found
            return await self._fetch(name, kind)

    async def _fetch(self, name: str, kind: AddressType) -> Found:
        try:
            found = await self._ask(name, kind)
        except UpstreamFailed:
            self._remember((name, kind), None, _FAILURE_S)
            raise
        ttl_s = min(max(found.ttl_s, self._limits.ttl_min_s), self._limits.ttl_max_s)
        found = Found(exists=found.exists, addresses=found.addresses, ttl_s=ttl_s)
        self._remember((name, kind), found, ttl_s)
        return found

    def _remember(self, key: _Key, found: Found | None, ttl_s: float) -> None:
        self._known[key] = found, self._clock.monotonic() + ttl_s
        self._known.move_to_end(key)
        while len(self._known) > self._limits.cache_entries:
            self._known.popitem(last=False)
