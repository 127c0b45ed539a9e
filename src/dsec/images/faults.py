"""What keeps sandboxes from working as they should: data the store does not give."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Iterable

import anyio

from dsec.base.clock import Clock
from dsec.base.errors import DsecError
from dsec.images.lazy.node import NodeFiller
from dsec.wire.filler import DataEvent
from dsec.wire.sandbox import Fault

logger = logging.getLogger("dsec.images.faults")

PAUSE_S = 1.0
"""Between two tries to hear a filler that does not answer: its worker is being started again."""


class Faults:
    """The data devices that fail now, as the filler tells."""

    def __init__(self, filler: NodeFiller | None, clock: Clock) -> None:
        self._filler = filler
        self._clock = clock
        self._failing: dict[str, DataEvent] = {}
        self._ended_at: dict[str, float] = {}
        """When what failed once worked again, by the wall clock."""

    async def watch(self, lost: Callable[[], Awaitable[None]]) -> None:
        """Listen for as long as the node runs, and have a filler that is gone started again.

        Args:
            lost: called when the filler is another one than before.
        """
        while self._filler is not None:
            await self._filler.wait_started()
            try:
                if await self._filler.revive():
                    await lost()
                async for event in (await self._filler.client()).events():
                    self._note(event)
            except (DsecError, OSError) as error:
                logger.warning("the filler is silent", extra={"why": str(error)})
            now = self._clock.now()
            self._ended_at.update(dict.fromkeys(self._failing, now))
            self._failing.clear()  # a new stream begins with all that fail
            await anyio.sleep(PAUSE_S)

    def _note(self, event: DataEvent) -> None:
        if event.failing:
            logger.warning("data fails", extra={"digest": event.digest, "why": event.message})
            self._failing[event.digest] = event
        elif self._failing.pop(event.digest, None):
            self._ended_at[event.digest] = self._clock.now()
            logger.info("data is back", extra={"digest": event.digest})

    @property
    def never(self) -> bool:
        """Whether nothing has failed since the start."""
        return not self._failing and not self._ended_at

    @property
    def none(self) -> bool:
        """Whether nothing fails."""
        return not self._failing

    def any_since(self, devices: Iterable[str], since: float) -> bool:
        """Whether one of some devices fails, or did at some time since then (wall clock)."""
        return any(d in self._failing or self._ended_at.get(d, 0.0) >= since for d in devices)

    def among(self, devices: Iterable[str]) -> list[Fault]:
        """Faults of some devices."""
        found = (self._failing.get(device) for device in devices)
        return [
            Fault(code=event.code, message=event.message, since=event.at)
            for event in found
            if event is not None
        ]
