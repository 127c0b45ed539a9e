"""Whether a device's data can be had: a breaker for the store, and chunks that came wrong.

While the breaker is open misses fail at once, but for one attempt every `retry_after_s`. A chunk
that does not match its digest fails alone, so that it does not take its device with it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

from dsec.base.clock import Clock
from dsec.base.errors import DataUnavailable
from dsec.wire.filler import DataEvent


class Health:
    """Of one device."""

    def __init__(
        self, digest: str, clock: Clock, retry_after_s: float, tell: Callable[[DataEvent], None]
    ) -> None:
        """Begin well.

        Args:
            digest: of the device.
            clock: measures `retry_after_s`.
            retry_after_s: how long misses fail at once after a failure.
            tell: hears when it begins to fail and when it works again.
        """
        self._digest = digest
        self._clock = clock
        self._retry_after_s = retry_after_s
        self._tell = tell
        self._suspect: int | None = None
        self._retry_at = 0.0
        self.bad: dict[int, float] = {}
        """Chunks that came wrong, and until when they are not asked for again."""
        self.errors = 0
        self.last_error = ""
        self.last_error_at = 0.0

    @property
    def broken(self) -> bool:
        """The store did not answer when it was last asked."""
        return self._suspect is not None

    @property
    def failing(self) -> bool:
        """Something of the device cannot be read."""
        return self.broken or bool(self.bad)

    @property
    def suspect(self) -> int | None:
        """A chunk that failed: when all such can be had, the device works."""
        return next(iter(self.bad), None) if self._suspect is None else self._suspect

    def admit(self, chunks: Iterable[int]) -> None:
        """Let a reader's miss go to the store; while the breaker is open, one at a time.

        Raises:
            DataUnavailable: not now; the last error says why.
        """
        now = self._clock.monotonic()
        bad = [chunk for chunk in chunks if chunk in self.bad] if self.bad else []
        if (self.broken and now < self._retry_at) or any(now < self.bad[c] for c in bad):
            raise DataUnavailable(self.last_error, digest=self._digest)
        if self.broken:
            self._retry_at = math.inf  # until this one attempt has ended

    def failed(self, chunk: int, error: DataUnavailable) -> None:
        """The store did not give a chunk."""
        was_failing = self.failing
        if not self.broken:
            self._suspect = chunk
        self._retry_at = self._clock.monotonic() + self._retry_after_s
        self._note(error, was_failing=was_failing)

    def came_wrong(self, chunk: int, error: DataUnavailable) -> None:
        """What the store gave does not match the chunk's digest."""
        was_failing = self.failing
        self.bad[chunk] = self._clock.monotonic() + self._retry_after_s
        self._note(error, was_failing=was_failing)

    def worked(self, chunks: Iterable[int]) -> None:
        """The store answered, and these chunks were right."""
        if not self.failing:
            return
        self._suspect = None
        for chunk in chunks:
            self.bad.pop(chunk, None)
        event = self.event()
        if not event.failing:
            self._tell(event)

    def event(self) -> DataEvent:
        """How it stands."""
        message = self.last_error if self.failing else ""
        return DataEvent(
            digest=self._digest, failing=self.failing, message=message, at=self._clock.now()
        )

    def _note(self, error: DataUnavailable, *, was_failing: bool) -> None:
        self.errors += 1
        self.last_error = error.message
        self.last_error_at = self._clock.now()
        if not was_failing:
            self._tell(self.event())
