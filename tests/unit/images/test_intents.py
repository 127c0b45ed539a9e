"""Publishing and collecting exclude each other."""

from __future__ import annotations

from typing import Any

import anyio
import pytest
import trio.testing

from dsec.base.errors import Conflict, Unavailable
from dsec.images.collecting import collect
from dsec.images.intents import INTENT_LASTS_S, Intent, intending, publishing
from dsec.images.records import encode
from tests.unit.images.fake_store import AnyClock, FakeStore

pytestmark = pytest.mark.anyio
CLOCK = AnyClock()


@pytest.fixture
def anyio_backend() -> Any:
    return "trio", {"clock": trio.testing.MockClock(autojump_threshold=0)}


async def refused(store: FakeStore) -> bool:
    try:
        await collect(store, CLOCK, dry_run=True)
    except Conflict:
        return True
    return False


async def test_who_publishes_is_not_disturbed_however_long_it_takes() -> None:
    store = FakeStore()
    async with publishing(store, CLOCK):
        for _ in range(5):
            await anyio.sleep(INTENT_LASTS_S)
            assert await refused(store)
    assert not await refused(store)
    assert store.names("intent") == []


async def test_nobody_publishes_during_a_collection() -> None:
    store = FakeStore()
    async with intending(store, "collect", CLOCK) as others:
        assert others == []
        with pytest.raises(Unavailable, match="being collected"):
            async with publishing(store, CLOCK):
                pytest.fail("it did")
    async with publishing(store, CLOCK), publishing(store, CLOCK):
        pass  # publishers do not mind each other


async def test_the_intent_of_who_died_is_soon_over() -> None:
    store = FakeStore()
    store.documents["intent", "collect-x"] = encode(Intent(what="collect", at=CLOCK.now()))
    with pytest.raises(Unavailable):
        async with publishing(store, CLOCK):
            pass
    await anyio.sleep(INTENT_LASTS_S + 1)
    async with publishing(store, CLOCK):
        pass
    assert store.names("intent") == []


@pytest.mark.parametrize("how", ["fail", "hang"])
async def test_work_ends_before_its_intent_does(how: str) -> None:
    store = FakeStore()
    began = anyio.current_time()

    async def work() -> None:
        async with publishing(store, CLOCK):
            (store.fail if how == "fail" else store.hang)()
            await anyio.sleep_forever()

    with pytest.raises(Unavailable, match="not safe"):
        await work()
    assert anyio.current_time() - began < INTENT_LASTS_S


async def test_one_renewal_that_fails_is_no_harm() -> None:
    store = FakeStore()
    failed: list[str] = []

    async def fail_once(call: str, about: str) -> None:
        if call == "put_document" and len(failed) % 2 == 0:
            failed.append(about)
            raise Unavailable("gone")
        failed.append("")

    async with publishing(store, CLOCK):
        store.before = fail_once
        await anyio.sleep(10 * INTENT_LASTS_S)
    assert failed[0]


async def test_what_the_work_raises_comes_out_as_it_is() -> None:
    store = FakeStore()
    with pytest.raises(ZeroDivisionError):
        async with publishing(store, CLOCK):
            _ = 1 // 0
    assert store.names("intent") == []


async def test_cancelled_work_takes_its_intent_back() -> None:
    store = FakeStore()
    with anyio.move_on_after(1) as scope:
        async with publishing(store, CLOCK):
            await anyio.sleep_forever()
    assert scope.cancelled_caught
    assert store.names("intent") == []


async def test_a_store_without_deletion_is_published_to_again_and_again() -> None:
    store = FakeStore(deletes=False)
    for _ in range(3):
        async with publishing(store, CLOCK):
            await anyio.sleep(INTENT_LASTS_S)
    assert len(store.names("intent")) == 3


async def test_an_intent_nobody_can_read_stops_collectors_only() -> None:
    store = FakeStore()
    store.documents["intent", "odd"] = b"{"
    assert await refused(store)
    async with publishing(store, CLOCK):
        pass
