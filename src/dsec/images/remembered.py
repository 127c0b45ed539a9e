"""Answers remembered for a moment, and asked for by one for all who wait."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Collection, Hashable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

import anyio

from dsec.base.clock import Clock
from dsec.base.errors import DsecError, NotFound

logger = logging.getLogger("dsec.images.remembered")

FRESH_S = 10.0
PATIENCE_S = 2.0
"""For whoever is asked, where there is an older answer."""
K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


@dataclass(slots=True)
class _Answer(Generic[V]):
    value: V
    until: float
    """By the monotonic clock; then it is asked for again."""


@dataclass(slots=True)
class _Asking:
    """Somebody asks."""

    ended: anyio.Event = field(default_factory=anyio.Event)
    failure: DsecError | None = None


class Remembered(Generic[K, V]):
    """Answers by key. One that cannot be had anew goes on to count; one that is gone does not."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._answers: dict[K, _Answer[V]] = {}
        self._asking: dict[K, _Asking] = {}

    async def get(self, key: K, ask: Callable[[], Awaitable[V]]) -> V:
        """The answer, at most ten seconds old unless nobody gives a newer one.

        Raises:
            NotFound: there is none any more.
            DsecError: what `ask` raised, if there never was an answer.
        """
        while True:
            answer = self._answers.get(key)
            if answer is not None and self._clock.monotonic() < answer.until:
                return answer.value
            asking = self._asking.get(key)
            if asking is None:
                return await self._lead(key, ask)
            await asking.ended.wait()
            if asking.failure is not None:
                raise asking.failure
            # Answered; or who asked was cancelled, and it is for another to ask.

    async def _lead(self, key: K, ask: Callable[[], Awaitable[V]]) -> V:
        asking = self._asking[key] = _Asking()
        try:
            return await self._ask(key, ask)
        except DsecError as error:
            asking.failure = error
            raise
        finally:
            del self._asking[key]
            asking.ended.set()

    async def _ask(self, key: K, ask: Callable[[], Awaitable[V]]) -> V:
        known = self._answers.get(key)
        try:
            with anyio.fail_after(PATIENCE_S if known else None):
                value = await ask()
        except NotFound:
            self._answers.pop(key, None)
            raise
        except (DsecError, TimeoutError) as error:
            if known is None:
                raise
            logger.info("an older answer is used", extra={"of": str(key), "why": str(error)})
            value = known.value
        self._answers[key] = _Answer(value, self._clock.monotonic() + FRESH_S)
        return value

    def last(self, key: K) -> V | None:
        """The last answer, however old."""
        answer = self._answers.get(key)
        return None if answer is None else answer.value

    def values(self) -> list[V]:
        """All last answers."""
        return [answer.value for answer in self._answers.values()]

    def age(self, key: K) -> None:
        """Ask the next time."""
        if answer := self._answers.get(key):
            answer.until = 0.0

    def drop(self, keys: Collection[K]) -> None:
        """Forget these answers."""
        for key in keys:
            self._answers.pop(key, None)

    def known(self) -> list[K]:
        """What there are answers for."""
        return list(self._answers)
