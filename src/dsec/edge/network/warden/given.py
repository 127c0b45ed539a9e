"""The addresses one sandbox was given for names: what it may connect to, and for how long."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator

from dsec.edge.network.policy import Span
from dsec.edge.network.warden.messages import HeldName
from dsec.edge.network.warden.reach import Address, port_spans

SLACK_S = 60.0
"""A client may connect a little later than its answer's time says."""
_MAX_ADDRESSES = 32
"""Per name; a name that changes its addresses all the time keeps its latest."""


class Given:
    """Names to addresses to when they end (monotonic seconds); the oldest names leave first."""

    __slots__ = ("_limit", "_names")

    def __init__(self, limit: int) -> None:
        """Begin empty.

        Args:
            limit: how many names to remember.
        """
        self._limit = limit
        self._names: OrderedDict[str, OrderedDict[Address, float]] = OrderedDict()

    def add(self, name: str, addresses: Iterable[Address], until: float) -> None:
        """Remember an answer."""
        known = self._names.setdefault(name, OrderedDict())
        self._names.move_to_end(name)
        for address in addresses:
            known[address] = max(until, known.pop(address, 0.0))
        while len(known) > _MAX_ADDRESSES:
            known.popitem(last=False)
        while len(self._names) > self._limit:
            self._names.popitem(last=False)

    def has(self, name: str, address: Address, now: float) -> bool:
        """Whether an address was given for a name, and still is."""
        known = self._names.get(name)
        return known is not None and known.get(address, 0.0) > now

    def names_of(self, address: Address, now: float) -> list[str]:
        """The names an address was given for."""
        return [name for name, known in self._names.items() if known.get(address, 0.0) > now]

    def keep(self, allowed: Callable[[str], bool]) -> None:
        """Forget the names that are not allowed any more."""
        for name in [name for name in self._names if not allowed(name)]:
            del self._names[name]

    def held(
        self,
        spans_of: Callable[[str], tuple[Span, ...]],
        now: float,
        only: frozenset[Address] | None = None,
    ) -> tuple[HeldName, ...]:
        """Addresses with all ports of all their names together, as the kernel is told.

        An address is one entry for the kernel: the last answer alone would take away what an
        earlier one gave.

        Args:
            spans_of: the ports of a name.
            now: what has ended is left out.
            only: these addresses; all if not given.
        """
        found: dict[Address, tuple[set[Span], float]] = {}
        for name, address, until in self._living(now):
            if only is None or address in only:
                spans, latest = found.get(address, (set(), 0.0))
                found[address] = (spans | set(spans_of(name)), max(latest, until))
        return tuple(
            HeldName(address=address.packed, spans=port_spans(spans), ttl_s=until - now)
            for address, (spans, until) in found.items()
            if spans
        )

    def _living(self, now: float) -> Iterator[tuple[str, Address, float]]:
        for name, known in self._names.items():
            for address, until in known.items():
                if until > now:
                    yield name, address, until
