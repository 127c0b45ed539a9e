"""Publishing and collecting exclude each other, over all nodes.

Each puts an intent of its own into the store before it looks for the other's, so of two that begin
together at least one sees the other. An intent counts for two minutes and is renewed by its owner
meanwhile: one whose owner died is soon over, and long work is protected for as long as it lasts.
That wants nodes whose clocks are less than a minute apart.
"""

from __future__ import annotations

import contextlib
import logging
import uuid
from collections.abc import AsyncIterator
from typing import Literal

import anyio
from msgspec import Struct

from dsec.base.clock import Clock, SystemClock
from dsec.base.errors import DataUnavailable, DsecError, InternalError, NotFound, Unavailable
from dsec.images.records import decode, encode
from dsec.images.store.interface import BlobStore

logger = logging.getLogger("dsec.images.intents")

INTENT_LASTS_S = 120.0
RENEW_S = 30.0
RENEW_DEADLINE_S = 20.0
"""Of one renewal: two that fail are over well before the intent is."""
_TAKE_BACK_S = 5.0
What = Literal["publish", "collect"]


class Intent(Struct, kw_only=True):
    """Somebody is about to do something to the store."""

    what: What
    at: float
    """When it was last renewed; seconds since the epoch, by its owner's clock."""


@contextlib.asynccontextmanager
async def publishing(store: BlobStore, clock: Clock | None = None) -> AsyncIterator[None]:
    """Keep collectors out meanwhile.

    Raises:
        Unavailable: the store is being collected, try again later; or it did not answer for so
            long that collectors are not kept out any more, and the body was cancelled.
    """
    async with intending(store, "publish", clock or SystemClock()) as others:
        if any(other.what == "collect" for other in others):
            raise Unavailable(f"{store.url} is being collected; publish again in a moment")
        yield


@contextlib.asynccontextmanager
async def intending(store: BlobStore, what: What, clock: Clock) -> AsyncIterator[list[Intent]]:
    """Say what is about to be done, and go on saying so; yields what others are about to do.

    Raises:
        Unavailable: two renewals failed, and the body was cancelled.
    """
    mine = _Mine(store, what, clock)
    await mine.put()
    try:
        others = await _others(store, mine.name, clock)
        async with mine.renewed():
            yield others
    finally:
        await mine.take_back()


class _Mine:
    """An intent of this process."""

    def __init__(self, store: BlobStore, what: What, clock: Clock) -> None:
        self.name = f"{what}-{uuid.uuid4().hex}"
        self._store = store
        self._what: What = what
        self._clock = clock

    async def put(self) -> None:
        """Write it, or write it anew."""
        body = encode(Intent(what=self._what, at=self._clock.now()))
        await self._store.put_document("intent", self.name, body, [])

    @contextlib.asynccontextmanager
    async def renewed(self) -> AsyncIterator[None]:
        """Renew it meanwhile; the body is cancelled when that fails.

        Raises:
            Unavailable: it failed.
            Exception: the body's, in no group.
        """
        failed: Exception | None = None
        async with anyio.create_task_group() as group:
            group.start_soon(self._renew, group.cancel_scope)
            try:
                yield
            except Exception as error:  # noqa: BLE001 - raised below, out of the group
                failed = error
            finally:
                ended = not group.cancel_scope.cancel_called
                group.cancel_scope.cancel()
        if failed is not None:
            raise failed
        if not ended:
            raise Unavailable(f"{self._store.url} does not answer; what was done there is not safe")

    async def _renew(self, work: anyio.CancelScope) -> None:
        failures = 0
        while failures < 2:
            await anyio.sleep(RENEW_S)
            failures = 0 if await self._renewed_once() else failures + 1
        work.cancel()

    async def _renewed_once(self) -> bool:
        try:
            with anyio.fail_after(RENEW_DEADLINE_S):
                await self.put()
        except (DsecError, TimeoutError) as error:
            logger.warning("an intent was not renewed", extra={"why": str(error)})
            return False
        return True

    async def take_back(self) -> None:
        """Delete it. If that fails it counts for a while, no harm otherwise."""
        with (
            anyio.move_on_after(_TAKE_BACK_S, shield=True),
            contextlib.suppress(DsecError),
        ):
            await self._store.delete_document("intent", self.name)


async def _others(store: BlobStore, mine: str, clock: Clock) -> list[Intent]:
    found = []
    async for name in store.list_documents("intent"):
        intent = await _read(store, name, clock) if name != mine else None
        if intent is None:
            continue
        if clock.now() - intent.at < INTENT_LASTS_S:
            found.append(intent)
        else:
            with contextlib.suppress(DsecError):  # it counts no more, there or not
                await store.delete_document("intent", name)
    return found


async def _read(store: BlobStore, name: str, clock: Clock) -> Intent | None:
    """An intent; one that cannot be read is taken for a publisher's, so that nothing is removed."""
    try:
        body = await store.get_document("intent", name)
        return decode(body, Intent, f"intent {name} in {store.url}")
    except NotFound:
        return None
    except (DataUnavailable, InternalError) as error:
        logger.warning("an intent cannot be read", extra={"why": error.message})
        return Intent(what="publish", at=clock.now())
