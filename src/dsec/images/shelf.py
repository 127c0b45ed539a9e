"""Records by name: one small file each, all of them in memory."""

from __future__ import annotations

import difflib
import threading
from pathlib import Path
from typing import Generic, Protocol, TypeVar

from dsec.base.errors import NotFound
from dsec.images import disk
from dsec.images.names import ImageName, file_name, image_name, is_snapshot, name_of_file
from dsec.images.records import decode, encode


class Named(Protocol):
    """A record with a name."""

    @property
    def name(self) -> str:
        """The name, its version written out."""
        ...

    @property
    def created_at(self) -> float:
        """Seconds since the epoch."""
        ...


R = TypeVar("R", bound=Named)


class Shelf(Generic[R]):
    """`<directory>/<quoted name>.json`."""

    def __init__(self, directory: Path, scratch: Path, noun: str, type_: type[R]) -> None:
        """Name the place; nothing is read before `open`.

        Args:
            directory: of the records.
            scratch: on the same file system, for files being written.
            noun: what a record is, for messages and as the kind of `NotFound`.
            type_: the records' type.
        """
        self._directory = directory
        self._scratch = scratch
        self._noun = noun
        self._type = type_
        self._writing = threading.Lock()
        """Held over disk writes; readers on the event loop need no lock to look into a dict."""
        self._records: dict[ImageName, R] = {}

    def open(self) -> None:
        """Read all records.

        Raises:
            InternalError: one is damaged; it names the file.
            InvalidRequest: a file there is no record.
        """
        self._directory.mkdir(parents=True, exist_ok=True)
        for file in sorted(self._directory.glob("*.json")):
            self._records[name_of_file(file.name)] = decode(
                file.read_bytes(), self._type, str(file)
            )

    def put(self, record: R) -> None:
        """Write a record, replacing one of the same name.

        Raises:
            StorageFull: no room; the old record stays.
        """
        name = image_name(record.name)
        with disk.full_disk_named(self._directory), self._writing:
            disk.write_atomically(self._directory / file_name(name), encode(record), self._scratch)
            self._records[name] = record

    def remove(self, text: str) -> R:
        """Forget a name.

        Raises:
            NotFound: there is none.
        """
        with self._writing:
            record = self.get(text)
            name = image_name(record.name)
            (self._directory / file_name(name)).unlink(missing_ok=True)
            del self._records[name]
            disk.fsync_path(self._directory)
        return record

    def find(self, text: str) -> R | None:
        """The record of a name; without a tag, `latest`. Raises InvalidRequest."""
        return self._records.get(image_name(text))

    def newest(self, path: str) -> R | None:
        """Of all versions of `path`, the one published last."""
        versions = [r for n, r in self._records.copy().items() if n.rpartition(":")[0] == path]
        return max(versions, key=lambda record: record.created_at, default=None)

    def get(self, text: str) -> R:
        """The record of a name; without a tag, `latest`.

        Raises:
            InvalidRequest: it is no name.
            NotFound: there is none; the message lists near names.
        """
        record = self.find(text)
        if record is None:
            raise self.missing(text)
        return record

    def missing(self, text: str) -> NotFound:
        """The error for a name that is not here."""
        name = image_name(text)
        return NotFound(
            f"no {self._noun} {name!r} on this node. {self._hint(name)}",
            kind=self._noun,
            name=name,
        )

    def _hint(self, name: ImageName) -> str:
        # Of snapshots nothing is told: they are their projects'.
        known = sorted(name for name in self._records if not is_snapshot(name))
        if not known:
            return "There are none yet: build, pull, import or publish one first"
        near = difflib.get_close_matches(name, known, n=3, cutoff=0.5)
        if near:
            return f"Did you mean {' or '.join(near)}?"
        more = f" and {len(known) - 5} more" if len(known) > 5 else ""
        return f"There are {', '.join(known[:5])}{more}"

    def records(self) -> list[R]:
        """All of them, by name."""
        return [record for _, record in sorted(self._records.copy().items())]
