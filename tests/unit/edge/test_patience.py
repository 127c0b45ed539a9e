from __future__ import annotations

import anyio
import pytest

from dsec.base.errors import DeadlineExceeded
from dsec.edge.patience import Patience


@pytest.fixture
def anyio_backend() -> object:
    import trio.testing

    return "trio", {"clock": trio.testing.MockClock(autojump_threshold=0)}


async def test_what_takes_longer_is_given_up() -> None:
    patience = Patience()
    with pytest.raises(DeadlineExceeded, match="it took over 5 s"):
        with patience.within(5, "it"):
            await anyio.sleep(6)


async def test_time_that_is_held_does_not_count() -> None:
    patience = Patience()
    begun = anyio.current_time()
    with pytest.raises(DeadlineExceeded):  # noqa: PT012
        with patience.within(5, "it"):
            await anyio.sleep(4)
            for _ in range(2):
                patience.hold()
            await anyio.sleep(3600)
            for _ in range(2):
                patience.release()
            await anyio.sleep(3600)
    assert anyio.current_time() - begun == pytest.approx(3605)


async def test_what_begins_while_it_is_held_has_all_its_time() -> None:
    patience = Patience()
    patience.hold()
    begun = anyio.current_time()
    with pytest.raises(DeadlineExceeded):  # noqa: PT012
        with patience.within(5, "it"):
            await anyio.sleep(100)
            patience.release()
            await anyio.sleep(100)
    assert anyio.current_time() - begun == pytest.approx(105)


async def test_somebody_elses_cancellation_is_not_a_deadline() -> None:
    patience = Patience()
    with anyio.move_on_after(1) as outer, patience.within(5, "it"):
        await anyio.sleep(10)
    assert outer.cancelled_caught
    with patience.within(5, "it"):
        await anyio.sleep(1)
