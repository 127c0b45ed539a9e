"""A worker's heartbeat: one whose loop stands still is told from one that works.

All deadlines of reads are kept by the worker's loop, so somebody else has to notice when that stands
still. The loop writes a byte a second into a pipe; the keeper listens.
"""

from __future__ import annotations

import contextlib
import os

import anyio

from dsec.base.clock import Clock

BEAT_EVERY_S = 1.0
START_S = 120.0
"""Until the first beat: Python starts and loads what it needs, on however busy a machine."""
_LEAST_S, _MOST_S = 10.0, 60.0
_COUNTED_S = 2 * BEAT_EVERY_S
_READ_BYTES = 4096


def longest_silence_s(longest_read_s: float) -> float:
    """When a worker that has begun to beat is given up.

    Readers are promised an answer within `longest_read_s` of a worker that works. As long again for
    one that does not keeps what `FillerConfig` says of the worst case. Ten seconds at least, because
    to replace a worker that is only slow costs readers of fanotify an EIO; a minute at most, because
    how slow a store may be says nothing of a loop.
    """
    return min(max(_LEAST_S, longest_read_s), _MOST_S)


class Pulse:
    """What the keeper hears of one worker."""

    def __init__(self, longest_silence_s: float, clock: Clock) -> None:
        """Make the pipe.

        Args:
            longest_silence_s: after the first beat; see `longest_silence_s`.
            clock: measures silence.
        """
        self._pipe, self.beating = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self._longest_silence_s = longest_silence_s
        self._limit_s = max(START_S, longest_silence_s)
        self._clock = clock
        self._silent_s = 0.0
        self._looked_at = clock.monotonic()

    def is_lost(self) -> bool:
        """Whether the worker has been silent for too long; to be asked about every second.

        A look counts for two seconds at most: where it came later, this process had no turn either,
        because the machine was busy or stood still.
        """
        now = self._clock.monotonic()
        since_s, self._looked_at = now - self._looked_at, now
        if self._has_beaten():
            self._silent_s, self._limit_s = 0.0, self._longest_silence_s
        else:
            self._silent_s += min(since_s, _COUNTED_S)
        return self._silent_s > self._limit_s

    def given(self) -> None:
        """The worker has its end, `beating`, of the pipe."""
        os.close(self.beating)

    def close(self) -> None:
        """Listen no more."""
        os.close(self._pipe)

    def _has_beaten(self) -> bool:
        beaten = False
        with contextlib.suppress(BlockingIOError):  # no more for now
            while os.read(self._pipe, _READ_BYTES):
                beaten = True
        return beaten


async def beat(descriptor: int | None) -> None:
    """Say once a second that this loop goes round, for as long as it does; runs in a task.

    Args:
        descriptor: the worker's end of the pipe; None if the keeper is of an earlier version.
    """
    while descriptor is not None:
        with contextlib.suppress(OSError):  # full, or the keeper is gone: then so are we
            os.write(descriptor, b".")
        await anyio.sleep(BEAT_EVERY_S)
