"""What an edge must find again after it was killed: one directory per sandbox.

    <state>/sandboxes/<id>/record.json   the facts, written once, whole or not at all
    <state>/sandboxes/<id>/journal       one line per step: begun, done or undone, and which
    <state>/sandboxes/<id>/changed.json  what has come in place of a part of the record, if any
    <state>/ended/<id>.json              how it ended, kept for a while
    <state>/trajectories/<id>            what had happened in it, kept as long
    <state>/trash/                       directories given up, removed when there is time

A line is written before the step it announces. Nothing is synced: a killed edge leaves the page
cache behind, and a host that went down has lost its sandboxes anyway.

Every write goes through `_wrote`, where tests kill the edge. All of it blocks: call it in threads.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Literal

import msgspec

from dsec.base.states import StopReason
from dsec.edge import lives, shipping
from dsec.edge.histories import TRAJECTORY, copy_history
from dsec.edge.lifecycle.machine import Action
from dsec.edge.record import Changed, SandboxRecord, read_record
from dsec.images import disk
from dsec.wire.sandbox import Pause, SandboxView

logger = logging.getLogger("dsec.edge.journal")

Mark = Literal["begun", "done", "undone"]

_MARKS: tuple[Mark, ...] = ("begun", "done", "undone")
RECORD = "record.json"
CHANGED = "changed.json"
LIMITS = "limits.json"
"""What that was called while limits and class alone could change."""
JOURNAL = "journal"
PRIVATE = 0o700
DETAIL_LENGTH = 2000
"""Of what is beyond, nothing is kept."""


class Story(msgspec.Struct, kw_only=True):
    """What the directory of one sandbox tells after a crash."""

    id: str
    record: SandboxRecord | None
    """None: killed before the record was whole, so nothing of it was made."""
    changed: Changed | None = None
    """What the record has in place of a part of its own, if that was changed."""
    steps: list[tuple[Mark, str, str]]

    @property
    def stopping(self) -> StopReason | None:
        """Why it was being removed, if it was."""
        if self._removal is None:
            return None
        reason = self._removal.partition(" ")[0]
        known = reason in StopReason.__members__.values()
        return StopReason(reason) if known else StopReason.REQUESTED

    @property
    def stop_detail(self) -> str:
        """The same in words, as far as there was more to say."""
        return (self._removal or "").partition(" ")[2]

    @property
    def _removal(self) -> str | None:
        begun = (d for mark, what, d in self.steps if (mark, what) == ("begun", Action.KILL))
        return next(begun, None)

    @property
    def launched(self) -> bool:
        """Whether it was whole and running when last heard of."""
        return ("done", Action.CONNECT, "") in self.steps

    @property
    def pause(self) -> Pause | None:
        """What its pause had given back, if it was paused when last heard of."""
        mark, what, detail = self._last_of_pausing
        if (mark, what) not in (("done", Action.PAUSE), ("undone", Action.RESUME)):
            return None
        try:
            return msgspec.json.decode(detail, type=Pause)
        except msgspec.MsgspecError:
            return Pause(at=0.0)

    @property
    def unsettled(self) -> bool:
        """Whether it was being paused, resumed or held still: it may stand frozen, to nobody's use."""
        return self._last_of_pausing[0] == "begun"

    @property
    def _last_of_pausing(self) -> tuple[Mark, str, str]:
        about = (Action.PAUSE, Action.RESUME, Action.STILL)
        steps = (step for step in reversed(self.steps) if step[1] in about)
        return next(steps, ("done", Action.RESUME, ""))


class Journal:
    """The journals of a node."""

    def __init__(self, state: Path, after_write: Callable[[int], None] | None = None) -> None:
        self.sandboxes = state / "sandboxes"
        self.ended = state / "ended"
        self.trajectories = state / "trajectories"
        self.trash = state / "trash"
        self._after_write = after_write
        self._writes = 0

    def prepare(self) -> None:
        """Make the directories."""
        for directory in (self.sandboxes, self.ended, self.trajectories, self.trash):
            directory.mkdir(mode=PRIVATE, parents=True, exist_ok=True)

    def directory(self, sandbox: str) -> Path:
        """Where all of one sandbox is."""
        return self.sandboxes / sandbox

    def create(self, record: SandboxRecord) -> None:
        """Write the facts down and announce the launch.

        Raises:
            FileExistsError: there is such a sandbox. FileNotFoundError: its history is gone.
        """
        record.path.mkdir(mode=PRIVATE)
        self._wrote()
        if record.inherited:
            copy_history(Path(record.history), record.inherited, record.path / TRAJECTORY)
            self._wrote()
        self._write_whole(record.path / RECORD, msgspec.json.encode(record))
        lives.begin(record)
        self.mark(record.id, "begun", Action.LAUNCH)

    def change(self, sandbox: str, changed: Changed) -> None:
        """Write down what has come in place of a part of the record.

        Raises:
            FileNotFoundError: it is over. OSError: the node's disk is full.
        """
        self._write_whole(self.directory(sandbox) / CHANGED, msgspec.json.encode(changed))

    def changed(self, sandbox: str) -> Changed | None:
        """What was last written in place of a part of its record."""
        return _read_changed(self.directory(sandbox))

    def launched(self, record: SandboxRecord, now: float) -> None:
        """Write that it runs."""
        self.mark(record.id, "done", Action.CONNECT)
        lives.made(record, now)

    def mark(self, sandbox: str, mark: Mark, what: str, detail: str = "") -> None:
        """Append one line."""
        self.mark_all(sandbox, [(mark, what, detail)])

    def mark_all(self, sandbox: str, lines: list[tuple[Mark, str, str]]) -> None:
        """Append several lines in one write. A sandbox already given up has no journal."""
        text = "".join(
            f"{mark} {what} {_one_line(detail)}".rstrip() + "\n" for mark, what, detail in lines
        )
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC
        try:
            file = os.open(self.directory(sandbox) / JOURNAL, flags, 0o600)
        except FileNotFoundError:
            return
        try:
            os.write(file, text.encode())
        finally:
            os.close(file)
        self._wrote()

    def forget(self, view: SandboxView) -> None:
        """Write down how it ended, then give up its directory. Idempotent."""
        try:
            self._write_whole(self.ended / f"{view.id}.json", msgspec.json.encode(view))
        except OSError:  # a full disk: losing the memory of it is better than keeping it
            logger.exception("an ending could not be written", extra={"sandbox_id": view.id})
        lives.end(self.directory(view.id) / TRAJECTORY, self.trajectories / view.id, view)
        self._wrote()
        self.discard(view.id)

    def discard(self, sandbox: str) -> None:
        """Move a sandbox's directory to the trash. Idempotent."""
        directory = self.directory(sandbox)
        if directory.exists():
            directory.rename(self._free_name(sandbox))
            self._wrote()

    def unreadable(self, sandbox: str) -> bool:
        """Whether there is a record that makes no sense."""
        return (self.directory(sandbox) / RECORD).exists()

    def empty_trash(self) -> None:
        """Remove what was given up; may take long. What cannot be removed stays for the next time."""
        for entry in list(self.trash.iterdir()):
            try:
                disk.remove_tree(entry)
            except OSError:
                logger.exception("what a sandbox left cannot be removed")

    def stories(self) -> list[Story]:
        """Everything that is there, as it was left."""
        return [self._story(path) for path in sorted(self.sandboxes.iterdir())]

    def endings(self) -> list[SandboxView]:
        """The ended ones still remembered, oldest first."""
        views = []
        for path in self.ended.glob("*.json"):
            try:
                views.append(msgspec.json.decode(path.read_bytes(), type=SandboxView))
            except (msgspec.MsgspecError, FileNotFoundError):
                path.unlink(missing_ok=True)
        return sorted(views, key=lambda view: view.ended_at or 0.0)

    def sweep_trajectories(self) -> None:
        """Remove those of sandboxes whose endings are forgotten, and what a crash left of others."""
        for path in [*self.trajectories.iterdir()]:
            name = path.name.removesuffix(shipping.SENT)
            if name.startswith(".") or not (self.ended / f"{name}.json").exists():
                path.unlink(missing_ok=True)

    def unremember(self, sandboxes: list[str]) -> None:
        """Drop the memory of ended ones."""
        for sandbox in sandboxes:
            shipping.forget(self.trajectories, sandbox)
            (self.ended / f"{sandbox}.json").unlink(missing_ok=True)

    def _story(self, directory: Path) -> Story:
        record = None
        with contextlib.suppress(FileNotFoundError, NotADirectoryError, msgspec.MsgspecError):
            record = read_record((directory / RECORD).read_bytes())
        changed = _read_changed(directory)
        if record is not None and changed is not None:
            record = changed.over(record)
        try:
            lines = (directory / JOURNAL).read_text().splitlines()
        except (FileNotFoundError, NotADirectoryError):
            lines = []
        return Story(
            id=directory.name,
            record=record,
            changed=changed,
            steps=[s for line in lines if (s := _parse(line))],
        )

    def _write_whole(self, path: Path, data: bytes) -> None:
        scratch = path.with_name(f".{path.name}.new")
        scratch.write_bytes(data)
        self._wrote()
        scratch.rename(path)
        self._wrote()

    def _free_name(self, sandbox: str) -> Path:
        for number in range(1_000_000):
            path = self.trash / f"{sandbox}.{number}"
            if not path.exists():
                return path
        raise FileExistsError(self.trash)

    def _wrote(self) -> None:
        self._writes += 1
        if self._after_write is not None:
            self._after_write(self._writes)


def _read_changed(directory: Path) -> Changed | None:
    for name in (CHANGED, LIMITS):
        with contextlib.suppress(FileNotFoundError, NotADirectoryError, msgspec.MsgspecError):
            return msgspec.json.decode((directory / name).read_bytes(), type=Changed)
    return None


def _one_line(text: str) -> str:
    return " ".join(text.split())[:DETAIL_LENGTH]


def _parse(line: str) -> tuple[Mark, str, str] | None:
    mark, _, rest = line.partition(" ")
    what, _, detail = rest.partition(" ")
    known: Mark | None = next((m for m in _MARKS if m == mark), None)
    return (known, what, detail) if known and what else None  # None: cut off by a crash
