"""Ready network namespaces, taken by sandboxes and given back; what survives a crash of the edge.

A slot takes some milliseconds to make and tens to remove, so both are done apart from sandboxes:
`take` hands out one that is ready, `give_back` only says that it may go. Namespaces are never used
for a second sandbox. Nothing is journaled here: a sandbox's record holds its slot, and what no record
holds is removed at the next start.
"""

from __future__ import annotations

import logging
import secrets
from collections import deque
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Generic, Protocol, Self, TypeVar

import anyio
from anyio.abc import TaskGroup
from msgspec import Struct

from dsec.base.errors import CapacityUnavailable, DsecError, Unavailable, Unsupported
from dsec.edge.network.pools import Numbers, Pools
from dsec.kit.blocking import in_thread

logger = logging.getLogger("dsec.edge.network.slots")

F = TypeVar("F", bound="HasPools", covariant=True)

REMOVED_AT_ONCE = 64
"""Slots whose devices go in one step."""


class Slot(Struct, frozen=True, kw_only=True):
    """One ready network namespace. In a sandbox's journal: all that is needed to find it again."""

    number: int
    """Of the node's; the addresses follow from it."""
    namespace: str
    """Path a launcher can open and enter."""
    address4: str
    address6: str
    gateway4: str
    """Default route and resolver, for /etc/resolv.conf."""
    gateway6: str
    pins: str
    """Directory with the pinned maps of its filter."""


class SlotLimits(Struct, frozen=True, kw_only=True):
    """How many slots."""

    ready: int = 16
    """Kept made for the next sandboxes; 0 = no sandbox of this node has a network."""
    most: int = 4096
    """Of all together: ready, taken, being made and being removed."""


class Maker(Protocol):
    """Does the work on the kernel, in threads; see `making.SlotMaker`."""

    def make(self, number: int) -> Slot:
        """Make a slot; if that fails, what there is of it must be removed."""
        ...

    def remove(self, numbers: Sequence[int]) -> list[int]:
        """Remove slots, whatever there is of them; those that resist."""
        ...

    def existing(self) -> set[int]:
        """Slots of which there is anything."""
        ...

    def whole(self) -> set[int]:
        """Slots that can be used."""
        ...


class HasPools(Protocol):
    """What of the router's facts matters here."""

    @property
    def pools(self) -> Pools:
        """Where addresses are from."""
        ...


class Uplinked(Protocol[F]):
    """What slots hang on; see `router.Router`."""

    async def ensure(self) -> F:
        """Have it there."""
        ...

    async def retire(self) -> None:
        """Remove it, and all slots."""
        ...


class _Waiting:
    """Who waits for a slot."""

    def __init__(self) -> None:
        self.over = anyio.Event()
        self.slot: Slot | None = None
        self.failure: Exception | None = None


class Slots(Generic[F]):
    """The slots of one edge."""

    def __init__(
        self, router: Uplinked[F], maker: Callable[[F], Maker], limits: SlotLimits | None = None
    ) -> None:
        """Nothing is made yet.

        Args:
            router: what they hang on; made when the first is taken.
            maker: makes them, once the router's facts are known.
            limits: how many.
        """
        self._router = router
        self._maker_of = maker
        self._limits = limits or SlotLimits()
        self._tasks: TaskGroup | None = None
        self._beginning = anyio.Lock()
        self._maker: Maker | None = None
        self._numbers = Numbers(0)
        self._ready: deque[Slot] = deque()
        self._taken: dict[int, str] = {}
        self._waiting: deque[_Waiting] = deque()
        self._making = 0
        self._doomed: deque[int] = deque()
        self._stuck: list[int] = []
        self._removing = anyio.Lock()
        self._settled = anyio.Event()
        self._making_fails = False
        self._ending = False

    @property
    def ready(self) -> int:
        """How many can be taken without waiting."""
        return len(self._ready)

    @property
    def taken(self) -> int:
        """How many sandboxes have."""
        return len(self._taken)

    @asynccontextmanager
    async def running(self) -> AsyncIterator[Self]:
        """Make and remove slots in the background.

        Afterwards those that nobody took are gone; without sandboxes that have one the router too.
        """
        async with anyio.create_task_group() as self._tasks:
            try:
                yield self
            finally:
                with anyio.CancelScope(shield=True):
                    await self._end()
                self._tasks.cancel_scope.cancel()

    async def adopt(self, in_use: Mapping[str, Slot]) -> list[str]:
        """At the start: keep what sandboxes have, remove all else.

        Args:
            in_use: sandbox -> the slot in its record.

        Returns:
            Sandboxes whose slot is not whole: their network is lost. They give it back as others do.

        Raises:
            Conflict, Unsupported: the router cannot be had again (`Router.ensure`).
        """
        if not in_use:
            await self._router.retire()
            return []
        maker = await self._begin({slot.number: sandbox for sandbox, slot in in_use.items()})
        existing = await in_thread("network", maker.existing)
        self._doomed.extend(sorted(existing - self._taken.keys()))
        await self._remove_doomed()
        whole = await in_thread("network", maker.whole)
        return [sandbox for sandbox, slot in in_use.items() if slot.number not in whole]

    async def take(self, sandbox: str) -> Slot:
        """A slot for a sandbox: at once if one is ready, else as soon as one is made.

        Raises:
            Unsupported: this node gives no network.
            CapacityUnavailable: all slots it may have are in use.
            Unavailable: making one failed.
            Conflict: the router cannot be made (`Router.ensure`).
        """
        if self._limits.ready <= 0:
            raise Unsupported("this node gives sandboxes no network: it keeps no slots")
        if self._maker is None:
            await self._begin({})
        self._making_fails = False
        slot = self._ready.popleft() if self._ready else await self._wait()
        self._taken[slot.number] = sandbox
        self._refill()
        return slot

    async def give_back(self, slot: Slot) -> None:
        """A sandbox is over: its slot goes, soon. Giving back again is no error."""
        if self._taken.pop(slot.number, None) is not None:
            self._doom(slot.number)

    async def settled(self) -> None:
        """Wait until nothing is being made or removed."""
        while self._making or self._doomed or self._removing.locked():
            await self._settled.wait()

    async def _begin(self, taken: Mapping[int, str]) -> Maker:
        """Have a router and somebody who makes slots of it.

        Args:
            taken: slots of an earlier run of the edge.
        """
        async with self._beginning:
            if self._maker is None:
                facts = await self._router.ensure()
                capacity = facts.pools.capacity
                self._numbers = Numbers(capacity, secrets.randbelow(capacity))
                for number in taken:
                    self._numbers.claim(number)
                self._taken |= taken
                self._maker = self._maker_of(facts)
            return self._maker

    async def _wait(self) -> Slot:
        if self._making <= len(self._waiting) and self._room <= 0:
            raise CapacityUnavailable(
                f"all {self._limits.most} sandboxes with a network that this node may have are there"
            )
        waiting = _Waiting()
        self._waiting.append(waiting)
        self._refill()
        try:
            await waiting.over.wait()
        except BaseException:
            self._give_up(waiting)
            raise
        if waiting.slot is None:
            raise _as_unavailable(waiting.failure) from waiting.failure
        return waiting.slot

    def _give_up(self, waiting: _Waiting) -> None:
        """Who waited does not want it any more: it is clean, so the next one has it."""
        if waiting.slot is not None:
            self._hand_out(waiting.slot)
        elif waiting in self._waiting:
            self._waiting.remove(waiting)

    @property
    def _room(self) -> int:
        return self._limits.most - len(self._numbers)

    def _refill(self) -> None:
        """Begin to make what is missing; not again by itself what has just failed."""
        if self._making_fails or self._ending:
            return
        wanted = self._limits.ready + len(self._waiting) - len(self._ready) - self._making
        for _ in range(min(wanted, self._room)):
            try:
                number = self._numbers.take()
            except IndexError:
                return
            self._making += 1
            self._group.start_soon(self._make, number)

    async def _make(self, number: int) -> None:
        try:
            with anyio.CancelScope(shield=True):
                slot = await in_thread("network", self._having_begun().make, number)
        except Exception as exc:  # noqa: BLE001 - told to whoever waits; the slot is removed
            self._making -= 1
            self._making_fails = True
            logger.warning("a network slot could not be made: %s", exc)
            self._tell(exc)
            self._doom(number)
        else:
            self._making -= 1
            self._hand_out(slot)
        self._stir()

    def _hand_out(self, slot: Slot) -> None:
        if self._waiting:
            waiting = self._waiting.popleft()
            waiting.slot = slot
            waiting.over.set()
        else:
            self._ready.append(slot)

    def _tell(self, failure: Exception) -> None:
        """The longest waiting, if anybody, gets none."""
        if self._waiting:
            waiting = self._waiting.popleft()
            waiting.failure = failure
            waiting.over.set()

    def _doom(self, number: int) -> None:
        self._doomed.append(number)
        if len(self._doomed) == 1:
            self._group.start_soon(self._remove_doomed)

    async def _remove_doomed(self) -> None:
        """Remove all that may go, many at a time; what resists is tried again with the next."""
        with anyio.CancelScope(shield=True):
            async with self._removing:
                self._doomed.extend(self._stuck)
                self._stuck.clear()
                while self._doomed:
                    await self._remove_some()
        self._refill()
        self._stir()

    async def _remove_some(self) -> None:
        batch = list(self._doomed)[:REMOVED_AT_ONCE]
        try:
            left = set(await in_thread("network", self._having_begun().remove, batch))
        except Exception as exc:  # noqa: BLE001 - a kernel that refuses must not end the edge
            logger.warning("network slots could not be removed: %s", exc)
            left = set(batch)
        for number in batch:
            self._doomed.popleft()
            if number in left:
                self._stuck.append(number)
            else:
                self._numbers.give_back(number)

    async def _end(self) -> None:
        self._ending = True
        while self._waiting:  # nobody ought to
            self._tell(Unavailable("this edge is ending"))
        while self._making:
            await self._settled.wait()
        if self._maker is None:
            return
        self._doomed.extend(slot.number for slot in self._ready)
        self._ready.clear()
        await self._remove_doomed()
        if not self._taken:
            self._maker = None
            await self._router.retire()

    @property
    def _group(self) -> TaskGroup:
        if self._tasks is None:
            raise RuntimeError("slots are made and removed only while they are `running`")
        return self._tasks

    def _stir(self) -> None:
        self._settled.set()
        self._settled = anyio.Event()

    def _having_begun(self) -> Maker:
        if self._maker is None:
            raise RuntimeError("no slot was ever taken or adopted")
        return self._maker


def _as_unavailable(failure: Exception | None) -> DsecError:
    if isinstance(failure, DsecError):
        return failure
    return Unavailable(f"the network of the sandbox could not be made: {failure}")
