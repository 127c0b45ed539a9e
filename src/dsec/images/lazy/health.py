"""Whether a device's data can be had: a breaker for the store, chunks that came wrong, a full cache.

While the breaker is open misses fail at once, but for one attempt every `retry_after_s`. A chunk
that does not match its digest fails alone, so that it does not take its device with it. A full cache
fails those alone who cannot do without it (the front fanotify).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

from dsec.base.clock import Clock
from dsec.base.errors import DataUnavailable, StorageFull
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
            tell: hears when it begins to fail, for another reason, and when it works again.
        """
        self._digest = digest
        self._clock = clock
        self._retry_after_s = retry_after_s
        self._tell = tell
        self._suspect: int | None = None
        self._retry_at = 0.0
        self._full: StorageFull | None = None
        self._told = ""
        """The code of why it fails, as it was told last; empty = it works."""
        self._store_error = ""
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
        return self.broken or bool(self.bad) or self.full

    @property
    def full(self) -> bool:
        """The cache could not take what somebody needs in it."""
        return self._full is not None

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
            raise DataUnavailable(self._store_error, digest=self._digest)
        if self.broken:
            self._retry_at = math.inf  # until this one attempt has ended

    def failed(self, chunk: int, error: DataUnavailable) -> None:
        """The store did not give a chunk."""
        if not self.broken:
            self._suspect = chunk
        self._retry_at = self._clock.monotonic() + self._retry_after_s
        self._store_error = error.message
        self._note(error)

    def came_wrong(self, chunk: int, error: DataUnavailable) -> None:
        """What the store gave does not match the chunk's digest."""
        self.bad[chunk] = self._clock.monotonic() + self._retry_after_s
        self._store_error = error.message
        self._note(error)

    def no_room(self, error: StorageFull) -> None:
        """The store gave a chunk, and the cache cannot take it."""
        self._full = error
        self._note(error)

    def room(self) -> None:
        """The cache can take it now."""
        self._full = None
        self._tell_change()

    def worked(self, chunks: Iterable[int]) -> None:
        """The store answered, and these chunks were right."""
        if not self.failing:
            return
        self._suspect = None
        for chunk in chunks:
            self.bad.pop(chunk, None)
        self._tell_change()

    def closed(self) -> None:
        """Nobody reads it any more: what fails then fails nobody."""
        self._suspect, self._full = None, None
        self.bad.clear()
        self._tell_change()

    def event(self) -> DataEvent:
        """How it stands."""
        code, message = self._reason()
        at = self._clock.now()
        if not code:
            return DataEvent(digest=self._digest, failing=False, at=at)
        return DataEvent(digest=self._digest, failing=True, code=code, message=message, at=at)

    def _reason(self) -> tuple[str, str]:
        if self._full is not None and not self.broken:  # what is not given needs no room
            return self._full.code, self._full.message
        return (DataUnavailable.code, self._store_error) if self.failing else ("", "")

    def _note(self, error: DataUnavailable | StorageFull) -> None:
        self.errors += 1
        self.last_error = error.message
        self.last_error_at = self._clock.now()
        self._tell_change()

    def _tell_change(self) -> None:
        code, _ = self._reason()
        if code != self._told:
            self._told = code
            self._tell(self.event())
