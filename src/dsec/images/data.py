"""The node's data: what layers point into, whole on this disk or known by its table alone.

Threads may call anything here at once.
"""

from __future__ import annotations

import contextlib
import uuid
from collections.abc import Callable, Collection, Iterable
from pathlib import Path

from dsec.base.errors import InternalError, NotFound
from dsec.images import disk
from dsec.images.pins import Pins
from dsec.images.records import DataRecord, Packed, check_digest, decode, encode

_RAW, _RECORD = "raw", "data.json"


class DataStore:
    """`<root>/data/<hex>/{data.json, raw and/or table-<of which>}`."""

    def __init__(self, root: Path) -> None:
        self.pins = Pins("data")
        self._root = root.absolute() / "data"
        self._scratch = root.absolute() / "tmp"

    def open(self) -> None:
        """Make the directory, and drop what may not have outlived a crash of the host."""
        self._root.mkdir(parents=True, exist_ok=True)
        disk.drop_unsynced(self._root)

    def _directory(self, digest: str) -> Path:
        return self._root / check_digest(digest).removeprefix("sha256:")

    def has(self, digest: str) -> bool:
        """Whether it is known here, whole or not."""
        return (self._directory(digest) / _RECORD).exists()

    def get(self, digest: str) -> DataRecord:
        """Its record.

        Raises:
            NotFound: (kind data) there is none.
            InternalError: the record is damaged.
        """
        file = self._directory(digest) / _RECORD
        try:
            return decode(file.read_bytes(), DataRecord, str(file))
        except FileNotFoundError:
            raise NotFound(f"no data {digest}", kind="data") from None

    def raw(self, digest: str) -> Path | None:
        """The whole data, if it is on this disk."""
        path = self._directory(digest) / _RAW
        return path if path.exists() else None

    def table(self, digest: str) -> Path | None:
        """The table of its chunks in the store, if it is known."""
        with contextlib.suppress(NotFound):
            if packed := self.get(digest).packed:
                path = self._directory(digest) / _table_name(packed)
                return path if path.exists() else None
        return None

    def has_all(self, digests: Iterable[str]) -> bool:
        """Whether all of them are known here."""
        return all(self.has(digest) for digest in digests)

    def digests(self) -> list[str]:
        """All data known here."""
        return [f"sha256:{entry.name}" for entry in sorted(self._root.iterdir())]

    def put_raw(self, record: DataRecord, file: Path, *, sync: bool = True) -> None:
        """Take over a finished file under the store's `tmp`; data known as a table becomes whole.

        What is whole here already stays, since it may be mounted, and the new file is dropped.

        Args:
            record: of the data.
            file: the data.
            sync: see `disk.install`; what is here already is then synced too.

        Raises:
            StorageFull: no room; nothing partial is left.
        """
        file.chmod(0o400)
        if sync:
            disk.fsync_path(file)
        with disk.full_disk_named(self._root), self.pins.lock:
            if self.raw(record.digest):
                file.unlink()
                if sync:
                    disk.ensure_synced(self._directory(record.digest))
            elif self.has(record.digest):
                disk.keep(self._directory(record.digest), {_RAW: file})
            else:
                texts = {_RECORD: encode(record)}
                directory = self._directory(record.digest)
                disk.install(directory, {_RAW: file}, texts, self._scratch, sync=sync)

    def put_table(self, record: DataRecord, table: Path) -> None:
        """Note where data lies in the store, taking over the table, a file under `tmp`.

        Not synced if the data is not here whole: the store has it, too.

        Raises:
            StorageFull: no room; nothing partial is left.
        """
        if record.packed is None:
            raise InternalError(f"a table of data {record.digest} that is not packed")
        name, directory = _table_name(record.packed), self._directory(record.digest)
        with disk.full_disk_named(self._root), self.pins.lock:
            if not self.has(record.digest):
                texts = {_RECORD: encode(record)}
                disk.install(directory, {name: table}, texts, self._scratch, sync=False)
                return
            disk.fsync_path(table)
            table.replace(directory / name)  # named after its content: the record says which
            disk.write_atomically(directory / _RECORD, encode(record), self._scratch)

    def collect(self, needed: Callable[[], Collection[str]]) -> list[str]:
        """Remove data no layer needs and nobody pinned.

        Args:
            needed: reads what layers need; called after looking at the pins, so that a layer made
                meanwhile is either seen by it or was pinned since.

        Returns:
            The digests removed.
        """
        doomed: dict[str, Path] = {}
        with self.pins.watching() as touched:
            candidates = [digest for digest in self.digests() if not self.pins.by(digest)]
            kept = needed()
            with self.pins.lock:
                for digest in candidates:
                    if digest not in kept and digest not in touched:
                        doomed[digest] = self._scratch / f"gone-{uuid.uuid4().hex}"
                        self._directory(digest).replace(doomed[digest])
        for path in doomed.values():
            disk.remove_tree(path)
        return list(doomed)


def _table_name(packed: Packed) -> str:
    return f"table-{check_digest(packed.table.digest)[7:23]}"
