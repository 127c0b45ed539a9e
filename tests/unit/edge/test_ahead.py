from __future__ import annotations

from collections.abc import AsyncIterator

import anyio
import pytest

from dsec.edge import ahead
from dsec.edge.ahead import MAX_ITEMS, reading_ahead, swallow


class Left(Exception):
    pass


async def numbers(count: int, *, leave: bool = False) -> AsyncIterator[int]:
    for number in range(count):
        yield number
    if leave:
        raise Left


async def test_all_comes_in_order() -> None:
    async with reading_ahead(numbers(50)) as items:
        assert [item async for item in items] == list(range(50))


async def test_a_source_that_fails_ends_a_user_who_is_held_up() -> None:
    async def held_up() -> None:
        async with reading_ahead(numbers(1, leave=True)) as items:
            async for _ in items:
                await anyio.sleep_forever()

    with anyio.fail_after(5), pytest.raises(Left):
        await held_up()


async def test_a_source_that_fails_never_looks_like_one_that_ended() -> None:
    ended = False

    async def use() -> None:
        nonlocal ended
        async with reading_ahead(numbers(3, leave=True)) as items:
            async for _ in items:
                pass
            ended = True

    with pytest.raises(Left):
        await use()
    assert not ended


async def test_it_reads_no_further_than_it_may() -> None:
    taken = 0

    async def endless() -> AsyncIterator[int]:
        nonlocal taken
        while True:
            taken += 1
            yield taken

    async with reading_ahead(endless()) as items:
        await anext(items)
        await anyio.wait_all_tasks_blocked()
        assert taken == MAX_ITEMS + 2


async def test_what_the_user_raises_comes_out_as_it_is() -> None:
    async def use() -> None:
        async with reading_ahead(numbers(50)) as items:
            async for item in items:
                _ = 1 / item

    with pytest.raises(ZeroDivisionError):
        await use()


async def test_what_is_on_its_way_is_swallowed_and_a_pause_ends_it() -> None:
    taken = 0

    async def sender() -> AsyncIterator[bytes]:
        nonlocal taken
        for _ in range(20):
            taken += 1
            yield bytes(1000)
        await anyio.sleep_forever()

    with anyio.fail_after(5):
        async with reading_ahead(sender()) as items:
            await swallow(items)
    assert taken == 20


async def test_a_sender_without_end_is_not_swallowed_for_ever(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(ahead, "SWALLOW_BYTES", 100_000)

    async def sender() -> AsyncIterator[bytes]:
        while True:
            yield bytes(1000)

    with anyio.fail_after(5):
        async with reading_ahead(sender()) as items:
            await swallow(items)
