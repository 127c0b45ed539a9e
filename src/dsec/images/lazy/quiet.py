"""A log for what may happen thousands of times a second: one line in a while."""

from __future__ import annotations

import logging

from dsec.base.clock import Clock, SystemClock

_EVERY_S = 5.0


class QuietLog:
    """Writes a line, then for some seconds only counts."""

    def __init__(self, logger: logging.Logger, clock: Clock | None = None) -> None:
        """Write to this log."""
        self._logger = logger
        self._clock = clock or SystemClock()
        self._next = 0.0
        self._unsaid = 0

    def warning(self, message: str, *arguments: object) -> None:
        """Something failed that is not our fault."""
        if self._may_write():
            self._logger.warning(message, *arguments, extra=self._extra())

    def exception(self, message: str, *arguments: object) -> None:
        """Something failed that should not; call it where the exception is handled."""
        if self._may_write():
            self._logger.error(message, *arguments, exc_info=True, extra=self._extra())  # noqa: LOG014

    def _may_write(self) -> bool:
        now = self._clock.monotonic()
        if now < self._next:
            self._unsaid += 1
            return False
        self._next = now + _EVERY_S
        return True

    def _extra(self) -> dict[str, object]:
        unsaid, self._unsaid = self._unsaid, 0
        return {"not_said": unsaid}
