"""How long, and how often, a call is tried again."""

from __future__ import annotations

import random
from collections.abc import Callable

from dsec.base.errors import DeadlineExceeded, DsecError, LimitError

FIRST_PAUSE_S = 0.1
LONGEST_PAUSE_S = 5.0
HEARD_WITHIN_S = 45.0
"""The server sends something at least every 15 s; silence of three times that is a dead connection."""


class Patience:
    """One call's budget: a deadline, and how long the platform may stay unreachable meanwhile."""

    def __init__(
        self, monotonic: Callable[[], float], unreachable_s: float, timeout: float | None
    ) -> None:
        self._monotonic = monotonic
        self._unreachable_s = unreachable_s
        self._deadline = None if timeout is None else monotonic() + timeout
        self._timeout = timeout
        self._failing_since: float | None = None
        self._last: DsecError | None = None
        self._pause_s = FIRST_PAUSE_S

    def wait_s(self, most: float = HEARD_WITHIN_S) -> float:
        """How long the next wait for the server may take.

        Raises:
            DeadlineExceeded: no time is left.
        """
        if self._deadline is None:
            return most
        left = self._deadline - self._monotonic()
        if left <= 0:
            raise self._too_late()
        return min(most, left)

    def _too_late(self) -> DsecError:
        if isinstance(self._last, LimitError):
            return self._last  # the answer was "not now", to the end: nothing was done
        why = f" (last: {self._last.message})" if self._last else ""
        return DeadlineExceeded(
            f"no answer within {self._timeout:g} s; it may or may not have happened{why}",
            timeout_s=self._timeout,
        )

    def succeeded(self) -> None:
        """The platform was heard: the next failure starts a new count."""
        self._failing_since = None
        self._last = None
        self._pause_s = FIRST_PAUSE_S

    def pause_s(self, error: DsecError, retry_after: float | None = None) -> float:
        """Note a failure that may pass; how long to pause before the next attempt.

        Raises:
            DsecError: `error`, when patience is over, so that what is wrong is what is reported.
        """
        now = self._monotonic()
        self._last = error
        if self._failing_since is None:
            self._failing_since = now
        pause = retry_after if retry_after is not None else self._pause_s
        # Full jitter on the upper half: callers that failed together do not come back together.
        pause *= random.uniform(0.75, 1.5)  # noqa: S311 - no secret
        self._pause_s = min(self._pause_s * 2, LONGEST_PAUSE_S)
        gives_up_at = self._failing_since + self._unreachable_s
        if self._deadline is not None:
            gives_up_at = min(gives_up_at, self._deadline)
        if now >= gives_up_at or self._unreachable_s <= 0:
            raise error
        return min(pause, max(gives_up_at - now, 0.01))
