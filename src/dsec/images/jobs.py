"""Imports under way: each the work of one task, watched by any number of callers.

Two callers who want the same thing share one job. A job whose last watcher has left is cancelled.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Hashable
from typing import Any, Generic, TypeVar

import anyio
from anyio.abc import TaskGroup

from dsec.base.errors import DsecError, InternalError
from dsec.kit.generators import closing
from dsec.wire.public_v1 import ImageProgress, ImageReady, ImageView

log = logging.getLogger(__name__)

ImageEvent = ImageProgress | ImageReady
T = TypeVar("T")
E = TypeVar("E")


class Job(Generic[T]):
    """One import of a T. Its progress is a state, not a queue: a slow watcher misses steps in between."""

    def __init__(self) -> None:
        self.scope = anyio.CancelScope()
        self.watchers = 0
        self._changed = anyio.Event()
        self._progress: ImageProgress | None = None
        self._outcome: T | DsecError | None = None

    @property
    def ended(self) -> bool:
        """Whether it has an outcome."""
        return self._outcome is not None

    def report(self, step: str, done: int = 0, total: int = 0) -> None:
        """Say how far it is. Call from the event loop."""
        self._progress = ImageProgress(step=step, done=done, total=total)
        self._tell()

    def end(self, outcome: T | DsecError) -> None:
        """Say what came of it."""
        self._outcome = outcome
        self._tell()

    def _tell(self) -> None:
        self._changed.set()
        self._changed = anyio.Event()

    async def events(self, ready: Callable[[T], E]) -> AsyncGenerator[ImageProgress | E, None]:
        """Progress as it changes, then what `ready` makes of the outcome.

        Raises:
            DsecError: what the import failed of.
        """
        shown: ImageProgress | None = None
        while self._outcome is None:
            changed = self._changed
            if self._progress is not None and self._progress is not shown:
                shown = self._progress
                yield shown
                continue
            await changed.wait()
        if isinstance(self._outcome, DsecError):
            raise self._outcome
        yield ready(self._outcome)


class Jobs:
    """The imports under way, by what they make. Lives in a task group of its owner."""

    def __init__(self, tasks: TaskGroup) -> None:
        self._tasks = tasks
        self._running: dict[Hashable, Job[Any]] = {}

    def running(self, key: Hashable) -> bool:
        """Whether such work is under way, for others to join."""
        return key in self._running

    async def watch(
        self, key: Hashable, work: Callable[[Job[T]], Awaitable[T]], ready: Callable[[T], E]
    ) -> AsyncGenerator[ImageProgress | E, None]:
        """Start the work, or join the same work under way, and watch it.

        Raises:
            DsecError: what the work failed of.
        """
        job: Job[T] | None = self._running.get(key)
        if job is None:
            job = self._running[key] = Job()
            self._tasks.start_soon(self._run, key, job, work)
        job.watchers += 1
        try:
            async with contextlib.aclosing(job.events(ready)) as events:
                async for event in events:
                    yield event
        finally:
            job.watchers -= 1
            if job.watchers == 0 and not job.ended:
                self._forget(key, job)
                job.scope.cancel()

    def _forget(self, key: Hashable, job: Job[Any]) -> None:
        if self._running.get(key) is job:
            del self._running[key]

    async def _run(
        self, key: Hashable, job: Job[T], work: Callable[[Job[T]], Awaitable[T]]
    ) -> None:
        try:
            with job.scope:
                job.end(await work(job))
        except DsecError as error:
            job.end(error)
        except Exception as error:
            log.exception("an import failed")
            job.end(InternalError(f"the import failed: {error}"))
        finally:
            self._forget(key, job)
            if not job.ended:
                job.end(InternalError("the import was cancelled"))


async def finish(events: AsyncIterator[ImageEvent]) -> ImageView:
    """Watch an import to its end and take the image; cancelled, it gives the import up.

    Raises:
        DsecError: what the import failed of.
        InternalError: it ended without an image.
    """
    image: ImageView | None = None
    async with closing(events) as watched:
        async for event in watched:
            if isinstance(event, ImageReady):
                image = event.image
    if image is None:
        raise InternalError("the import ended without an image")
    return image
