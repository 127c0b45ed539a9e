"""Which slot is whose, with a maker that makes nothing."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from ipaddress import IPv4Network

import anyio
import anyio.lowlevel
import pytest
from msgspec import Struct

from dsec.base.errors import CapacityUnavailable, Conflict, Unavailable, Unsupported
from dsec.edge.network.pools import Pools
from dsec.edge.network.slots import Slot, SlotLimits, Slots

pytestmark = pytest.mark.anyio


class Facts(Struct):
    pools: Pools


class Router:
    def __init__(self) -> None:
        self.ensured = self.retired = 0
        self.failure: Exception | None = None

    async def ensure(self) -> Facts:
        self.ensured += 1
        await anyio.lowlevel.checkpoint()
        if self.failure:
            raise self.failure
        return Facts(Pools(four=IPv4Network("100.96.0.0/24"), six=None))

    async def retire(self) -> None:
        self.retired += 1


class Maker:
    """Knows what there would be; works only while its gate is open."""

    def __init__(self) -> None:
        self.there: set[int] = set()
        self.broken: set[int] = set()
        self.made = 0
        self.batches: list[int] = []
        self.failures: list[Exception] = []
        self.resisting = 0
        self.gate = threading.Event()
        self.gate.set()
        self._lock = threading.Lock()

    def make(self, number: int) -> Slot:
        self.gate.wait()
        with self._lock:
            assert number not in self.there
            self.there.add(number)
            self.made += 1
            if self.failures:
                raise self.failures.pop()
        return slot(number)

    def remove(self, numbers: Sequence[int]) -> list[int]:
        self.gate.wait()
        with self._lock:
            self.batches.append(len(numbers))
            left = list(numbers[: self.resisting])
            self.there -= set(numbers) - set(left)
        return left

    def existing(self) -> set[int]:
        return set(self.there)

    def whole(self) -> set[int]:
        return self.there - self.broken


def slot(number: int) -> Slot:
    return Slot(
        number=number,
        namespace=f"/run/{number}",
        address4="",
        address6="",
        gateway4="",
        gateway6="",
        pins="",
    )


@pytest.fixture
def router() -> Router:
    return Router()


@pytest.fixture
def maker() -> Maker:
    return Maker()


def slots_of(router: Router, maker: Maker, ready: int = 3, most: int = 8) -> Slots[Facts]:
    return Slots(router, lambda _: maker, SlotLimits(ready=ready, most=most))


async def test_where_nobody_wants_a_network_nothing_is_made(router: Router, maker: Maker) -> None:
    async with slots_of(router, maker).running() as slots:
        await slots.settled()
    assert (router.ensured, router.retired, maker.made) == (0, 0, 0)


async def test_the_first_makes_the_router_and_those_after_find_slots_ready(
    router: Router, maker: Maker
) -> None:
    async with slots_of(router, maker).running() as slots:
        first = await slots.take("one")
        await slots.settled()
        assert (slots.ready, slots.taken, maker.made) == (3, 1, 4)
        maker.gate.clear()
        second = await slots.take("two")
        assert first.number != second.number
        assert router.ensured == 1
        maker.gate.set()
        await slots.settled()
        assert slots.ready == 3


async def test_many_at_once_each_have_their_own(router: Router, maker: Maker) -> None:
    had: list[int] = []

    async def take(slots: Slots[Facts], name: str) -> None:
        had.append((await slots.take(name)).number)

    async with slots_of(router, maker, most=30).running() as slots:
        async with anyio.create_task_group() as tasks:
            for index in range(20):
                tasks.start_soon(take, slots, str(index))
        assert len(set(had)) == 20
        await slots.settled()
        assert slots.ready == 3
    assert router.ensured == 1


async def test_a_slot_given_back_is_removed_and_another_is_made(
    router: Router, maker: Maker
) -> None:
    async with slots_of(router, maker, ready=1, most=2).running() as slots:
        one = await slots.take("one")
        await slots.settled()
        await slots.take("two")
        await slots.settled()
        assert slots.ready == 0, "there may be no more"
        await slots.give_back(one)
        await slots.give_back(one)
        await slots.settled()
        assert one.number not in maker.there
        assert (slots.ready, slots.taken) == (1, 1)
        await slots.take("three")


async def test_no_more_than_may_be(router: Router, maker: Maker) -> None:
    async with slots_of(router, maker, most=2).running() as slots:
        await slots.take("one")
        await slots.take("two")
        with pytest.raises(CapacityUnavailable):
            await slots.take("three")
        assert len(maker.there) == 2


async def test_no_network_on_this_node(router: Router, maker: Maker) -> None:
    async with slots_of(router, maker, ready=0).running() as slots:
        with pytest.raises(Unsupported):
            await slots.take("one")
    assert router.ensured == 0


async def test_a_failure_is_told_to_who_waits_and_what_was_made_is_removed(
    router: Router, maker: Maker
) -> None:
    maker.failures = [OSError(28, "no space")] * 4
    async with slots_of(router, maker).running() as slots:
        with pytest.raises(Unavailable, match="no space"):
            await slots.take("one")
        await slots.settled()
        assert maker.there == set()
        assert maker.made == 4, "tried again only when wanted again"
        await slots.take("two")
        await slots.settled()
        assert slots.ready == 3


async def test_a_router_that_cannot_be_had_may_be_there_later(router: Router, maker: Maker) -> None:
    router.failure = Conflict("another edge")
    async with slots_of(router, maker).running() as slots:
        with pytest.raises(Conflict):
            await slots.take("one")
        router.failure = None
        await slots.take("one")


async def test_who_goes_while_waiting_leaves_the_slot_to_others(
    router: Router, maker: Maker
) -> None:
    async with slots_of(router, maker, ready=1, most=2).running() as slots:
        maker.gate.clear()
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(slots.take, "one")
            await anyio.wait_all_tasks_blocked()
            tasks.cancel_scope.cancel()
        maker.gate.set()
        await slots.settled()
        assert slots.taken == 0
        assert slots.ready == len(maker.there) > 0


async def test_many_are_removed_at_once(router: Router, maker: Maker) -> None:
    async with slots_of(router, maker, most=30).running() as slots:
        had = [await slots.take(str(index)) for index in range(20)]
        await slots.settled()
        maker.gate.clear()
        for each in had:
            await slots.give_back(each)
        maker.gate.set()
        await slots.settled()
    assert max(maker.batches) > 1
    assert sum(maker.batches) == 23


async def test_what_resists_is_not_used_again_and_tried_again(router: Router, maker: Maker) -> None:
    async with slots_of(router, maker).running() as slots:
        one, two = await slots.take("one"), await slots.take("two")
        maker.resisting = 1
        await slots.give_back(one)
        await slots.settled()
        assert one.number in maker.there
        maker.resisting = 0
        await slots.give_back(two)
        await slots.settled()
        assert not {one.number, two.number} & maker.there


async def test_at_the_end_nothing_is_left(router: Router, maker: Maker) -> None:
    async with slots_of(router, maker).running() as slots:
        await slots.give_back(await slots.take("one"))
    assert maker.there == set()
    assert router.retired == 1


async def test_at_the_end_what_sandboxes_have_stays(router: Router, maker: Maker) -> None:
    async with slots_of(router, maker).running() as slots:
        one = await slots.take("one")
    assert maker.there == {one.number}
    assert router.retired == 0


async def test_a_new_edge_keeps_what_sandboxes_have(router: Router, maker: Maker) -> None:
    maker.there = {1, 2, 3, 4}
    maker.broken = {2}
    async with slots_of(router, maker).running() as slots:
        lost = await slots.adopt({"one": slot(1), "two": slot(2), "gone": slot(9)})
        assert sorted(lost) == ["gone", "two"]
        assert maker.there & {1, 2, 3, 4} == {1, 2}
        assert slots.taken == 3
        await slots.give_back(slot(2))
        await slots.settled()
        assert 2 not in maker.there
        assert (await slots.take("three")).number not in (1, 9)
    assert router.retired == 0


async def test_a_new_edge_without_sandboxes_has_nothing(router: Router, maker: Maker) -> None:
    async with slots_of(router, maker).running() as slots:
        assert await slots.adopt({}) == []
    assert (router.ensured, router.retired) == (0, 1)


async def test_an_edge_cancelled_while_slots_are_made_leaves_none(
    router: Router, maker: Maker
) -> None:
    maker.gate.clear()
    with anyio.CancelScope() as scope:
        async with slots_of(router, maker).running() as slots:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(slots.take, "one")
                await anyio.wait_all_tasks_blocked()
                maker.gate.set()
                scope.cancel()
    assert maker.there == set()
