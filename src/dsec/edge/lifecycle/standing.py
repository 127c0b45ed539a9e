"""How long a sandbox may be held still or emptied, and who ends that early."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Iterator

import anyio

from dsec.base.errors import Conflict
from dsec.base.states import StopReason
from dsec.edge.channel import gone
from dsec.kit.recall import Recall

DEADLINE_S = 10.0


class Standing:
    """Of one sandbox; one thing at a time holds it still, in its turn."""

    __slots__ = ("_calls", "_held", "_recall", "_scope", "_stops")

    def __init__(self) -> None:
        self._recall: Recall | None = None
        self._scope: anyio.CancelScope | None = None
        self._calls = self._stops = 0
        self._held = False

    @contextlib.contextmanager
    def given_up(self) -> Iterator[None]:
        """Somebody wants to stop it: what holds it still ends, or does not begin."""
        self._stops += 1
        if self._scope is not None:
            self._scope.cancel()
        try:
            with self._called():
                yield
        finally:
            self._stops -= 1

    @contextlib.asynccontextmanager
    async def resting(self, turn: anyio.Lock, *, held: bool) -> AsyncIterator[None]:
        """Take the turn to have it stand still; held, who merely wants to use it calls nothing off."""
        async with turn:
            self._held = held
            try:
                yield
            finally:
                self._held = False

    @contextlib.asynccontextmanager
    async def wanted(self, turn: anyio.Lock, *, explicitly: bool) -> AsyncIterator[None]:
        """Take the turn to have it run: what is done only until somebody wants it ends."""
        calls = explicitly or not self._held
        with self._called() if calls else contextlib.nullcontext():
            await turn.acquire()
        try:
            yield
        finally:
            turn.release()

    @contextlib.contextmanager
    def _called(self) -> Iterator[None]:
        self._calls += 1
        if self._recall is not None:
            self._recall.call()
        try:
            yield
        finally:
            self._calls -= 1

    @contextlib.contextmanager
    def unwanted(self) -> Iterator[Recall]:
        """What is done inside is called off when somebody wants it to run or to end."""
        self._recall = recall = Recall()
        if self._calls:
            recall.call()
        try:
            yield recall
        finally:
            self._recall = None

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
