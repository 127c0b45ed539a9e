"""Calling off work in a thread whose end somebody waits for: it stops at its next step."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator


class Recall:
    """Of one piece of work. Called from any thread, once or more often; it stays called."""

    __slots__ = ("_called", "_end", "_lock")

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._called = False
        self._end: Callable[[], object] | None = None

    @property
    def called(self) -> bool:
        """Whether the work shall stop; asked between its steps."""
        return self._called

    def call(self) -> None:
        """Have it stop; what it waits for in a step of `ending` ends."""
        with self._lock:
            self._called = True
            if self._end is not None:
                self._end()

    @contextlib.contextmanager
    def ending(self, end: Callable[[], object]) -> Iterator[None]:
        """A step that takes long: `end`, quick and harmless twice, ends it, also if called before.

        After the step `end` is not called any more.
        """
        with self._lock:
            self._end = end
            if self._called:
                end()
        try:
            yield
        finally:
            with self._lock:
                self._end = None
