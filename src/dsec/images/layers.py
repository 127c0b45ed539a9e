"""The store of layers: EROFS images by digest, each mounted at most once on a host.

Two mounts of one image would be two superblocks, and then nothing in the page cache is shared: so
sandboxes share one mount per layer. A mount outlives the process and is adopted by the next one.
Pins say who needs a layer (a sandbox, an import under way); they live in memory and are told
again at start-up by those who know.

Threads may call anything here at once.
"""

from __future__ import annotations

import contextlib
import threading
import uuid
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

from dsec.base.errors import Conflict, InternalError, NotFound
from dsec.images import disk
from dsec.images.records import LayerRecord, check_digest, decode_layer, encode
from dsec.linux import mounts

_IMAGE, _RECORD = "image.erofs", "layer.json"


class LayerStore:
    """`<root>/layers/<hex>/{image.erofs,layer.json}`, mounted at `<run_dir>/layers/<hex>`."""

    def __init__(self, root: Path, run_dir: Path) -> None:
        self._root = root.absolute() / "layers"
        self._scratch = root.absolute() / "tmp"
        self._mounts = run_dir.absolute() / "layers"
        self._lock = threading.Lock()
        self._busy: defaultdict[str, threading.Lock] = defaultdict(threading.Lock)
        self._pins: defaultdict[str, set[str]] = defaultdict(set)
        self._mounted: set[str] = set()

    def open(self) -> None:
        """Make the directories and adopt mounts an earlier process left.

        Raises:
            OSError: naming the directory.
        """
        for directory in (self._root, self._scratch, self._mounts):
            directory.mkdir(parents=True, exist_ok=True)
        self._mounts = self._mounts.resolve()  # as mountinfo has it
        for mount in mounts.mounts_under(self._mounts):
            target = Path(mount.target)
            if mount.fstype == "erofs" and target.parent == self._mounts:
                self._mounted.add(f"sha256:{target.name}")

    def image_path(self, digest: str) -> Path:
        """Where the layer's EROFS image is, or would be."""
        return self._directory(digest) / _IMAGE

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
        file = self._directory(digest) / _RECORD
        try:
            return decode_layer(file.read_bytes(), str(file))
        except FileNotFoundError:
            raise NotFound(f"no layer {digest}", kind="layer") from None

    def digests(self) -> list[str]:
        """All layers."""
        return [f"sha256:{entry.name}" for entry in sorted(self._root.iterdir())]

    def records(self) -> list[LayerRecord]:
        """All layers, by digest.

        Raises:
            InternalError: a record is damaged.
        """
        return [self.get(digest) for digest in self.digests()]

    def put(self, record: LayerRecord, image: Path) -> LayerRecord:
        """Take over a finished EROFS image, a file under the store's `tmp`.

        A layer that is here already stays as it is and the new one is dropped.

        Returns:
            The record of the layer that is here now.

        Raises:
            StorageFull: no room; nothing partial is left.
        """
        final = self._directory(record.digest)
        with disk.full_disk_named(self._root), self._alone(record.digest):
            if self.has(record.digest):
                image.unlink(missing_ok=True)
                return self.get(record.digest)
            self._move_in(record, image, final)
        return record

    def _move_in(self, record: LayerRecord, image: Path, final: Path) -> None:
        staging = self._scratch / f"put-{final.name}"
        disk.remove_tree(staging)
        staging.mkdir(mode=0o700)
        try:
            image.replace(staging / _IMAGE)
            (staging / _IMAGE).chmod(0o400)
            (staging / _RECORD).write_bytes(encode(record))
            for path in (staging / _IMAGE, staging / _RECORD, staging):
                disk.fsync_path(path)
            staging.replace(final)
        except BaseException:
            disk.remove_tree(staging)
            raise
        disk.fsync_path(self._root)

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
            self._check_unpinned(digest)
            self._mounted.discard(digest)

    def _check_unpinned(self, digest: str) -> None:
        if owners := self._pins.get(digest):
            raise Conflict(f"layer {digest} is used by {', '.join(sorted(owners)[:5])}")

    def _take_out(self, digest: str, used: Callable[[str], bool]) -> Path:
        """Rename into `tmp`: a crash in between leaves rubbish there, never half a layer.

        Under the lock of the pins: whoever pins next finds the layer gone and makes it anew.
        """
        doomed = self._scratch / f"gone-{uuid.uuid4().hex}"
        with self._lock:
            self._check_unpinned(digest)
            if used(digest):
                raise Conflict(f"layer {digest} belongs to an image")
            self._directory(digest).replace(doomed)
        return doomed

    def pin(self, digests: Iterable[str], owner: str) -> None:
        """Say that `owner` needs these layers (here already or about to be)."""
        with self._lock:
            for digest in digests:
                self._pins[digest].add(owner)

    def unpin(self, owner: str) -> None:
        """Say that `owner` needs none any more."""
        with self._lock:
            for digest in [d for d, owners in self._pins.items() if owner in owners]:
                self._pins[digest].discard(owner)
                if not self._pins[digest]:
                    del self._pins[digest]

    def pinned_by(self, digest: str) -> frozenset[str]:
        """Who needs the layer."""
        with self._lock:
            return frozenset(self._pins.get(digest, ()))

    def pins_of(self, owner: str) -> frozenset[str]:
        """What `owner` needs."""
        with self._lock:
            return frozenset(d for d, owners in self._pins.items() if owner in owners)

    def mounted(self, digest: str) -> Path | None:
        """The layer's mount, if it is mounted. Touches no disk.

        What this store knows is checked: somebody else on the host may have unmounted it.
        """
        with self._lock:
            known = digest in self._mounted
        path = self.mount_point(digest)
        return path if known and _is_mount_point(path) else None

    def mount(self, digest: str) -> Path:
        """Mount a layer, or find it mounted.

        Raises:
            NotFound: no such layer.
            OSError: the kernel refused; it names the call and the path.
        """
        with self._alone(digest):
            target = self.mount_point(digest)
            if digest not in self._mounted or not target.is_mount():
                self._mount_at(digest, target)
            return target

    def _mount_at(self, digest: str, target: Path) -> None:
        image = self.image_path(digest)
        if not image.exists():
            raise NotFound(f"no layer {digest}", kind="layer")
        target.mkdir(mode=0o755, parents=True, exist_ok=True)
        found = mounts.mount_at(target)
        if found is None:
            mounts.mount_erofs(image, target)
        elif found.fstype != "erofs":
            raise InternalError(
                f"a {found.fstype} is mounted over layer {digest}", path=str(target)
            )
        with self._lock:
            self._mounted.add(digest)

    def mount_all(self, digests: Sequence[str]) -> list[Path]:
        """Mount several; the result keeps their order.

        Raises:
            NotFound: one is not here.
            OSError: the kernel refused one.
        """
        return [self.mount(digest) for digest in digests]

    def unmount_unused(self) -> list[str]:
        """Unmount every layer without a pin; one that is busy is left for the next time.

        Returns:
            The digests unmounted.
        """
        done = []
        for digest in self.mounted_digests():
            with self._alone(digest), contextlib.suppress(Conflict):
                self._claim(digest)
                self._unmount(digest)
                done.append(digest)
        return done

    def mounted_digests(self) -> list[str]:
        """The layers mounted now, by digest."""
        with self._lock:
            return sorted(self._mounted)

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
