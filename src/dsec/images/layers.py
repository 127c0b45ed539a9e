"""The store of layers: EROFS metadata by digest, each mounted at most once on a host.

File data is apart (`data.py`) and may be elsewhere: what is here makes a layer mountable and its
names and attributes readable, whatever has been fetched.

Two mounts of one image would be two superblocks, and then nothing in the page cache is shared: so
sandboxes share one mount per layer. A mount outlives the process and is adopted by the next one.

Threads may call anything here at once.
"""

from __future__ import annotations

import contextlib
import threading
import uuid
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path

from dsec.base.errors import Conflict, InternalError, NotFound
from dsec.images import disk
from dsec.images.pins import Pins
from dsec.images.records import LayerRecord, check_digest, decode, encode
from dsec.linux import mounts

_META, _RECORD = "meta.erofs", "layer.json"


class LayerStore:
    """`<root>/layers/<hex>/{meta.erofs,layer.json}`, mounted at `<run_dir>/layers/<hex>`."""

    def __init__(self, root: Path, run_dir: Path) -> None:
        self._root = root.absolute() / "layers"
        self._scratch = root.absolute() / "tmp"
        self._mounts = run_dir.absolute() / "layers"
        self.pins = Pins("layer")
        self._lock = self.pins.lock
        self._busy: defaultdict[str, threading.Lock] = defaultdict(threading.Lock)
        self._mounted: set[str] = set()
        self._records: dict[str, LayerRecord] = {}
        """Read once: a layer never changes."""

    def open(self) -> None:
        """Make the directories and adopt mounts an earlier process left.

        Raises:
            OSError: naming the directory.
        """
        for directory in (self._root, self._scratch, self._mounts):
            directory.mkdir(parents=True, exist_ok=True)
        disk.drop_unsynced(self._root)
        self._mounts = self._mounts.resolve()  # as mountinfo has it
        for mount in mounts.mounts_under(self._mounts):
            target = Path(mount.target)
            if mount.fstype == "erofs" and target.parent == self._mounts:
                self._mounted.add(f"sha256:{target.name}")

    @property
    def root(self) -> Path:
        """Where the layers are kept."""
        return self._root

    def meta(self, digest: str) -> Path:
        """Where the layer's metadata is, or would be."""
        return self._directory(digest) / _META

    def mount_point(self, digest: str) -> Path:
        """Where the layer is, or would be, mounted."""
        return self._mounts / check_digest(digest).removeprefix("sha256:")

    def _directory(self, digest: str) -> Path:
        return self._root / check_digest(digest).removeprefix("sha256:")

    def has(self, digest: str) -> bool:
        """Whether the layer is here."""
        return (self._directory(digest) / _RECORD).exists()

    def get(self, digest: str) -> LayerRecord:
        """The layer's record.

        Raises:
            NotFound: no such layer.
            InternalError: its record is damaged.
        """
        if known := self._records.get(digest):
            return known
        file = self._directory(digest) / _RECORD
        try:
            record = decode(file.read_bytes(), LayerRecord, str(file))
        except FileNotFoundError:
            raise NotFound(f"no layer {digest}", kind="layer") from None
        self._records[digest] = record
        return record

    def digests(self) -> list[str]:
        """All layers."""
        return [f"sha256:{entry.name}" for entry in sorted(self._root.iterdir())]

    def records(self) -> list[LayerRecord]:
        """All layers, by digest; what is removed meanwhile is left out.

        Raises:
            InternalError: a record is damaged.
        """
        found = []
        for digest in self.digests():
            with contextlib.suppress(NotFound):
                found.append(self.get(digest))
        return found

    def put(self, record: LayerRecord, meta: Path, *, sync: bool = True) -> LayerRecord:
        """Take over a finished metadata image, a file under the store's `tmp`.

        A layer that is here already stays and the new one is dropped.

        Args:
            record: of the layer.
            meta: its metadata.
            sync: see `disk.install`; one that is here already is then synced too.

        Returns:
            The record of the layer that is here now.

        Raises:
            StorageFull: no room; nothing partial is left.
        """
        final = self._directory(record.digest)
        with disk.full_disk_named(self._root), self._alone(record.digest):
            if self.has(record.digest):
                meta.unlink(missing_ok=True)
                if sync:
                    disk.ensure_synced(final)
                return self.get(record.digest)
            meta.chmod(0o400)
            texts = {_RECORD: encode(record)}
            disk.install(final, {_META: meta}, texts, self._scratch, sync=sync)
        return record

    def remove(self, digest: str, used: Callable[[str], bool] = lambda _: False) -> None:
        """Remove a layer nobody needs, unmounting it first.

        Args:
            digest: the layer.
            used: whether an image has it; asked when no new pin can come in between.

        Raises:
            Conflict: it is pinned, an image has it, or something has files of it open.
            NotFound: no such layer.
        """
        with self._alone(digest):
            if not self.has(digest):
                raise NotFound(f"no layer {digest}", kind="layer")
            if used(digest):
                raise Conflict(f"layer {digest} belongs to an image")
            self._claim(digest)
            self._unmount(digest)
            disk.remove_tree(self._take_out(digest, used))

    def _claim(self, digest: str) -> None:
        """From here on a new user of the layer has to wait for this thread."""
        with self._lock:
            self.pins.check_none(digest)
            self._mounted.discard(digest)

    def _take_out(self, digest: str, used: Callable[[str], bool]) -> Path:
        """Rename into `tmp`: a crash in between leaves rubbish there, never half a layer.

        Under the lock of the pins: whoever pins next finds the layer gone and makes it anew.
        """
        doomed = self._scratch / f"gone-{uuid.uuid4().hex}"
        with self._lock:
            self.pins.check_none(digest)
            if used(digest):
                raise Conflict(f"layer {digest} belongs to an image")
            self._directory(digest).replace(doomed)
            self._records.pop(digest, None)
        return doomed

    def mounted(self, digest: str) -> Path | None:
        """The layer's mount, if it is mounted. Touches no disk.

        What this store knows is checked: somebody else on the host may have unmounted it.
        """
        with self._lock:
            known = digest in self._mounted
        path = self.mount_point(digest)
        return path if known and _is_mount_point(path) else None

    def mount(self, digest: str, devices: Sequence[Path]) -> Path:
        """Mount a layer, or find it mounted.

        Args:
            digest: the layer.
            devices: its data, in the order of its record.

        Raises:
            NotFound: no such layer.
            OSError: the kernel refused; it names the call and the path.
        """
        with self._alone(digest):
            target = self.mount_point(digest)
            if digest not in self._mounted or not target.is_mount():
                self._mount_at(digest, target, devices)
            return target

    def _mount_at(self, digest: str, target: Path, devices: Sequence[Path]) -> None:
        target.mkdir(mode=0o755, parents=True, exist_ok=True)
        found = mounts.mount_at(target)
        if found is None:
            self.mount_copy(digest, target, devices)
        elif found.fstype != "erofs":
            raise InternalError(
                f"a {found.fstype} is mounted over layer {digest}", path=str(target)
            )
        with self._lock:
            self._mounted.add(digest)

    def mount_copy(self, digest: str, target: Path, devices: Sequence[Path]) -> None:
        """Mount a layer once more at a place of the caller's, who unmounts it.

        Nothing in the page cache is shared with other mounts: every read reaches the devices.

        Raises:
            NotFound: no such layer.
            OSError: the kernel refused.
        """
        meta = self.meta(digest)
        if not meta.exists():
            raise NotFound(f"no layer {digest}", kind="layer")
        if len(devices) != len(self.get(digest).devices):
            raise InternalError(f"layer {digest} was given {len(devices)} devices")
        mounts.mount_erofs(meta, target, devices)

    def unmount_unused(self, among: Collection[str] | None = None) -> list[str]:
        """Unmount every layer without a pin; one that is busy is left for the next time.

        Args:
            among: only these; None = all.

        Returns:
            The digests unmounted.
        """
        done = []
        mounted = self.mounted_digests()
        for digest in mounted if among is None else [d for d in mounted if d in among]:
            with self._alone(digest), contextlib.suppress(Conflict):
                self._claim(digest)
                self._unmount(digest)
                done.append(digest)
        return done

    def mounted_digests(self) -> list[str]:
        """The layers mounted now, by digest."""
        with self._lock:
            return sorted(self._mounted)

    def abandon(self, digest: str) -> None:
        """Take a dead mount out of the way, whoever still stands on it.

        Raises:
            OSError: the kernel refused.
        """
        with self._alone(digest):
            target = self.mount_point(digest)
            while mounts.is_mounted(target):
                mounts.umount(target, detach=True)
            with self._lock:
                self._mounted.discard(digest)

    def _unmount(self, digest: str) -> None:
        target = self.mount_point(digest)
        try:
            while mounts.is_mounted(target):
                mounts.umount(target)
        except OSError as error:
            with self._lock:
                self._mounted.add(digest)
            raise Conflict(f"layer {digest} is in use: {error}", path=str(target)) from error
        with contextlib.suppress(FileNotFoundError):
            target.rmdir()

    @contextlib.contextmanager
    def _alone(self, digest: str) -> Iterator[None]:
        """One thread at a time works on a digest."""
        with self._lock:
            busy = self._busy[digest]
        with busy:
            yield


def _is_mount_point(path: Path) -> bool:
    """Whether another file system begins there; two looks at what the kernel has in memory."""
    try:
        return path.stat().st_dev != path.parent.stat().st_dev
    except OSError:
        return False
