"""Turns at the store: so many requests at once, demand before prefetch, fair between devices."""

from __future__ import annotations

from collections import deque
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import anyio


@dataclass(slots=True, eq=False)
class Turn:
    """One request that waits for its turn, or has it."""

    device: str
    urgent: bool
    """Somebody waits for it."""
    granted: anyio.Event = field(default_factory=anyio.Event)
    lined_up: bool = False
    """It waits, or has its slot."""


class _Line:
    """Those who wait, by device; devices take turns."""

    def __init__(self) -> None:
        self._waiting: dict[str, deque[Turn]] = {}

    def __bool__(self) -> bool:
        return bool(self._waiting)

    def __iter__(self) -> Iterator[Turn]:
        return (turn for turns in self._waiting.values() for turn in turns)

    def add(self, turn: Turn) -> None:
        self._waiting.setdefault(turn.device, deque()).append(turn)

    def remove(self, turn: Turn) -> bool:
        """Whether it waited here."""
        turns = self._waiting.get(turn.device, deque())
        if turn not in turns:
            return False
        turns.remove(turn)
        if not turns:
            del self._waiting[turn.device]
        return True

    def pop(self) -> Turn:
        device, turns = next(iter(self._waiting.items()))
        del self._waiting[device]
        turn = turns.popleft()
        if turns:
            self._waiting[device] = turns  # at the end of the line of devices
        return turn


class Slots:
    """A quarter of them (one at least, if there are two) is kept for what somebody waits for."""

    def __init__(self, count: int) -> None:
        self._free = count
        self._kept = 0 if count == 1 else max(1, count // 4)
        self._urgent = _Line()
        self._patient = _Line()

    def line_up(self, turn: Turn) -> None:
        """Have a place in the line already before `turn`; `leave` gives it up."""
        turn.granted = anyio.Event()
        turn.lined_up = True
        (self._urgent if turn.urgent else self._patient).add(turn)
        self._grant()

    @asynccontextmanager
    async def turn(self, turn: Turn) -> AsyncIterator[None]:
        """Wait for a slot and hold it while the context lasts; a turn may be taken again."""
        if not turn.lined_up:
            self.line_up(turn)
        try:
            await turn.granted.wait()
            yield
        finally:
            self.leave(turn)

    def promote(self, turn: Turn) -> None:
        """Somebody waits for it now."""
        turn.urgent = True
        if self._patient.remove(turn):
            self._urgent.add(turn)
            self._grant()

    def leave(self, turn: Turn) -> None:
        """Give up the slot, or the place in the line; harmless if there is neither."""
        if not turn.lined_up:
            return
        turn.lined_up = False
        if turn.granted.is_set():
            self._free += 1
            self._grant()
        elif not self._urgent.remove(turn):
            self._patient.remove(turn)

    def _grant(self) -> None:
        while self._free and self._urgent:
            self._give(self._urgent.pop())
        while self._free > self._kept and self._patient:
            self._give(self._patient.pop())

    def _give(self, turn: Turn) -> None:
        self._free -= 1
        turn.granted.set()
