"""How long a sandbox may be held still for somebody, and who ends that early."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import anyio

from dsec.base.errors import Conflict
from dsec.base.states import StopReason
from dsec.edge.channel import gone

DEADLINE_S = 10.0


class Standing:
    """Of one sandbox; one thing at a time holds it still, in its turn."""

    __slots__ = ("_scope", "_stops")

    def __init__(self) -> None:
        self._scope: anyio.CancelScope | None = None
        self._stops = 0

    @contextlib.contextmanager
    def given_up(self) -> Iterator[None]:
        """Somebody wants to stop it: what holds it still ends, or does not begin."""
        self._stops += 1
        if self._scope is not None:
            self._scope.cancel()
        try:
            yield
        finally:
            self._stops -= 1

    @contextlib.contextmanager
    def briefly(self, sandbox: str) -> Iterator[None]:
        """Bound what goes on inside while it stands still.

        Raises:
            SandboxGone: it is about to be stopped. Conflict: it took too long.
        """
        with anyio.CancelScope(deadline=anyio.current_time() + DEADLINE_S) as scope:
            self._scope = scope
            if self._stops:
                scope.cancel()
            try:
                yield
            finally:
                self._scope = None
        if scope.cancelled_caught:
            raise self._why(sandbox)

    def _why(self, sandbox: str) -> Exception:
        if self._stops:
            return gone(sandbox, StopReason.REQUESTED, "it is being stopped")
        return Conflict(
            f"{sandbox} changes too fast: what it had changed since it was looked at could not be "
            f"read in {DEADLINE_S:.0f} s of standing still. Try again when it writes less",
            kind="busy",
        )
