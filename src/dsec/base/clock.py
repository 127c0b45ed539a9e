"""The clock as a value, so that an hour's lifetime is tested in milliseconds."""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    """Two readings: wall time for people, monotonic time for durations."""

    def now(self) -> float:
        """Seconds since the epoch."""
        ...

    def monotonic(self) -> float:
        """Seconds since some fixed moment; never goes back."""
        ...


class SystemClock:
    """The host's clocks."""

    def now(self) -> float:
        """Seconds since the epoch."""
        return time.time()

    def monotonic(self) -> float:
        """CLOCK_MONOTONIC in seconds."""
        return time.monotonic()
