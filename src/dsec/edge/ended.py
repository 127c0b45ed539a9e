"""Sandboxes that are over, remembered for a while so that their fate can be told."""

from __future__ import annotations

from collections import OrderedDict

from dsec.base.clock import Clock
from dsec.wire.sandbox import SandboxView

MAX_COUNT = 10_000
MAX_AGE_S = 86400.0
BATCH = 256


class Ended:
    """The memory; the files are the journal's."""

    def __init__(
        self, clock: Clock, max_count: int = MAX_COUNT, max_age_s: float = MAX_AGE_S
    ) -> None:
        self._clock = clock
        self._max_count = max_count
        self._max_age_s = max_age_s
        self._views: OrderedDict[str, SandboxView] = OrderedDict()

    def add(self, view: SandboxView) -> None:
        """Remember one."""
        self._views[view.id] = view

    def get(self, sandbox: str) -> SandboxView | None:
        """One, if it is remembered."""
        return self._views.get(sandbox)

    def project_of(self, sandbox: str) -> str | None:
        """Whose it was, if it is remembered."""
        view = self._views.get(sandbox)
        return view.project if view else None

    def all(self) -> list[SandboxView]:
        """All, oldest first."""
        return list(self._views.values())

    def overdue(self) -> list[str]:
        """Forget those beyond count or age; a batch at a time, so that files go in batches too."""
        too_many = len(self._views) - self._max_count
        oldest = next(iter(self._views.values()), None)
        old = oldest is not None and self._too_old(oldest)
        if too_many < BATCH and not old:
            return []
        gone = [
            view.id
            for number, view in enumerate(self._views.values())
            if number < too_many or self._too_old(view)
        ]
        for sandbox in gone:
            del self._views[sandbox]
        return gone

    def _too_old(self, view: SandboxView) -> bool:
        return (view.ended_at or 0.0) < self._clock.now() - self._max_age_s
