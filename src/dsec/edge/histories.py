"""What had happened in a sandbox before a snapshot of it: the beginning of its trajectory, kept.

    <state>/histories/<project>/<name>/<sandbox>.<step>

A sandbox restored from the snapshot begins with these entries as its own. They are on the node that
packed it; elsewhere a restored sandbox begins with none. What they may take of the disk is bounded,
and a snapshot whose history has no room is refused: without, it would restore as another sandbox
than was packed. Blocks: call it in threads.
"""

from __future__ import annotations

import contextlib
import logging
import shutil
import threading
from collections import Counter
from collections.abc import Awaitable, Callable
from pathlib import Path
from urllib.parse import quote, unquote

from dsec.base.errors import NotFound, StorageFull
from dsec.edge.images import SnapshotFacts
from dsec.kit.blocking import in_thread
from dsec.trajectory.inherit import inherit
from dsec.wire.sandbox import SnapshotView

logger = logging.getLogger("dsec.edge.histories")

MAX_COPIES_BYTES = 8 << 30
"""Of trajectories, for all the children of one fork."""
MAX_BYTES = 16 << 30
"""Of all histories on a node."""
MAX_PROJECT_BYTES = MAX_BYTES // 2
"""Of those of one project, so that it leaves room for the others."""
TRAJECTORY = "trajectory"
"""Of a sandbox, in its own directory."""


class Taken:
    """Bytes that are taken, by project. For any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._bytes: Counter[str] = Counter()

    def add(self, project: str, size: int) -> None:
        """There are as many more, or fewer."""
        with self._lock:
            self._bytes[project] += size
            if not self._bytes[project]:
                del self._bytes[project]

    def claim(self, project: str, size: int) -> None:
        """Take some.

        Raises:
            StorageFull: that would be too many.
        """
        with self._lock:
            self._check(self._bytes[project] + size, MAX_PROJECT_BYTES, f"of project {project}")
            self._check(self._bytes.total() + size, MAX_BYTES, "of all projects")
            self._bytes[project] += size

    @staticmethod
    def _check(needed: int, room: int, whose: str) -> None:
        if needed > room:
            raise StorageFull(
                f"what had happened before the snapshots {whose} would take {needed >> 20} MiB on "
                f"this node, and {room >> 20} MiB may be: remove snapshots that are not needed",
                needed_bytes=needed,
            )


class Histories:
    """The histories of a node's snapshots."""

    def __init__(self, state: Path) -> None:
        self._root = state / "histories"
        self._taken = Taken()

    def prepare(self) -> None:
        """Make the directory, drop what a crash left half written, and see how much there is."""
        self._root.mkdir(mode=0o700, exist_ok=True)
        for scratch in self._root.glob(".*"):
            scratch.unlink(missing_ok=True)
        self._taken = Taken()
        for file in self._root.glob("[!.]*/*/*"):
            self._taken.add(unquote(file.parents[1].name), file.stat().st_size)

    def scratch(self, name: str) -> Path:
        """Where the history of a fork under way is; no snapshot's."""
        return self._root / f".{name}"

    def keep(self, trajectory: Path, project: str, name: str, sandbox: str, step: int) -> bool:
        """Keep the first entries of a sandbox's trajectory for a snapshot; False: they were there.

        Raises:
            OSError: it cannot be written. FileNotFoundError: the trajectory is not there any more.
            StorageFull: histories would take more than they may.
        """
        target = self._directory(project, name) / f"{sandbox}.{step}"
        if target.exists():
            return False  # the same step of the same sandbox: the same entries
        unfinished = self.scratch(f"{sandbox}.{step}")
        try:
            copy_history(trajectory, step, unfinished)
            if step:
                self._put(unfinished, project, target)
        finally:
            unfinished.unlink(missing_ok=True)
        return True

    def _put(self, unfinished: Path, project: str, target: Path) -> None:
        size = unfinished.stat().st_size
        self._taken.claim(project, size)
        try:
            target.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            unfinished.replace(target)
        except OSError:
            self._taken.add(project, -size)
            raise

    def _remove(self, project: str, file: Path) -> None:
        with contextlib.suppress(FileNotFoundError):
            size = file.stat().st_size
            file.unlink()
            self._taken.add(project, -size)

    def drop(self, facts: SnapshotFacts) -> None:
        """Remove what was kept for a snapshot that was not made after all."""
        directory = self._directory(facts.project, facts.name)
        self._remove(facts.project, directory / f"{facts.sandbox}.{facts.step}")
        self._tidy(directory)

    def find(self, snapshot: SnapshotView) -> Path | None:
        """The history of a snapshot, if it was packed here."""
        path = self._directory(snapshot.project, snapshot.name) / _file(snapshot)
        return path if path.exists() else None

    def forget(self, project: str, name: str, but: SnapshotView | None = None) -> None:
        """Remove what is kept under a name, except for the snapshot that has it now."""
        directory = self._directory(project, name)
        for file in [*directory.iterdir()] if directory.exists() else []:
            if but is None or file.name != _file(but):
                self._remove(project, file)
        self._tidy(directory)

    @staticmethod
    def _tidy(directory: Path) -> None:
        with contextlib.suppress(OSError):
            directory.rmdir()
            directory.parent.rmdir()

    def names(self) -> list[tuple[str, str]]:
        """Project and name of all snapshots there is something of."""
        return [
            (unquote(directory.parent.name), unquote(directory.name))
            for directory in sorted(self._root.glob("[!.]*/*"))
        ]

    def _directory(self, project: str, name: str) -> Path:
        return self._root / _quoted(project) / _quoted(name)


def copy_history(trajectory: Path, step: int, target: Path) -> None:
    """Begin a trajectory with the first entries of another; none at all make no file. Blocking.

    Raises:
        FileNotFoundError: it has not that many. OSError: it cannot be written.
    """
    if step and inherit(trajectory, step, target) < step:
        target.unlink(missing_ok=True)
        raise FileNotFoundError(f"{trajectory} has no {step} entries")


def check_room(history: Path, copies: int) -> None:
    """See that the node has room for every child to begin with a history of its own.

    Raises:
        StorageFull: together they would take more than half of what is free, or `MAX_COPIES_BYTES`.
    """
    if not history.exists():
        return
    needed = history.stat().st_size * copies
    room = min(shutil.disk_usage(history.parent).free // 2, MAX_COPIES_BYTES)
    if needed > room:
        raise StorageFull(
            f"{copies} children would begin with {needed >> 20} MiB of trajectories, and "
            f"{room >> 20} MiB may be: make fewer at once, or fork a sandbox with a shorter one",
            needed_bytes=needed,
        )


def _quoted(text: str) -> str:
    return quote(text, safe="").replace(".", "%2E")  # no way up, and nothing hidden


def _file(snapshot: SnapshotView) -> str:
    return f"{snapshot.sandbox}.{snapshot.step}"


async def sweep_histories(
    histories: Histories, find: Callable[[str, str], Awaitable[SnapshotView]]
) -> None:
    """Remove what belongs to no snapshot: a crash came between the two, or another way removed it."""
    for project, name in await in_thread("disk", histories.names):
        try:
            known: SnapshotView | None = await find(project, name)
        except NotFound:
            known = None
        await in_thread("disk", histories.forget, project, name, known)
