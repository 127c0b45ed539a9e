"""How long a lease that seems to have lapsed must be waited for.

A holder who cannot reach anybody cannot renew. So nothing lapses in the first moments after nobody
listened: after a start, after a stall of this process, after the host slept or its clock was set.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

from dsec.base.clock import Clock
from dsec.store.records import Lease

logger = logging.getLogger("dsec.control")

PATIENCE_S = 30.0
"""At most; a lease that is renewed more often than that is waited for as long as it lasts."""
STALL_S = 2.0
JUMP_S = 2.0


class Patience:
    """Knows since when holders could have renewed."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self.begin()

    def begin(self) -> None:
        """Nobody listened until now."""
        self._since = self._clock.monotonic()
        self._offset = self._clock.now() - self._since

    def look(self) -> None:
        """Notice whether the clock was set forward, or the host slept."""
        drift = self._clock.now() - self._clock.monotonic() - self._offset
        if abs(drift) > JUMP_S:
            logger.warning("the clock was set", extra={"by_s": round(drift, 3)})
            self.begin()

    @contextmanager
    def sleeping(self, seconds: float) -> Iterator[None]:
        """Notice whether a sleep of at most so long took longer, since nothing ran meanwhile."""
        began = self._clock.monotonic()
        yield
        if self._clock.monotonic() - began > seconds + STALL_S:
            self.begin()

    def left(self, lease: Lease) -> float:
        """Seconds that must still pass before it may be said to have lapsed; 0 = none."""
        listened = self._clock.monotonic() - self._since
        return max(0.0, min(lease.ttl_s, PATIENCE_S) - listened)
