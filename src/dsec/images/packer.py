"""One difference packed: an upper directory into a metadata image and a data file. Blocks.

    <out>/meta.erofs    as of any layer
    <out>/data          the contents of its files, in the order of their names, unless there are none

The same content gives the same bytes, however it was read: if the readings left something behind,
or in another order, the data is written once more when the sandbox runs again.
"""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

from msgspec.structs import replace

from dsec.base.errors import InternalError
from dsec.images.convert import DATA, Converted, write_layer
from dsec.images.disk import full_disk_named
from dsec.images.erofs.data import DataWriter, Zeros
from dsec.images.erofs.tree import BLOCK, HOLE, Device, Extent, Inode, Tree
from dsec.images.oci.layer import Limits
from dsec.images.residue import Sieve
from dsec.images.upper import Reading, Upper

_STAGED = "staged"
_PIECE = 1 << 20
_AGAIN_BYTES = 8 << 20
"""A reading of more took so long that another one, before the sandbox stands still, is worth it."""
_MAX_LOOKS = 3


@dataclass(frozen=True, slots=True)
class Packed:
    """A difference, ready to be put into the store of layers."""

    converted: Converted
    left_out: int
    """Entries of the directory that are not in it."""


class Packer:
    """Packs one upper directory: `look`, `take`, `finish`. A context manager."""

    def __init__(self, out: Path, directory: Path, sieve: Sieve, limits: Limits) -> None:
        """Open the directory.

        Args:
            out: an empty directory for the result.
            directory: the upper directory.
            sieve: what is left out.
            limits: how much it may hold.

        Raises:
            OSError: it cannot be opened.
        """
        self._out = out
        self._staged = DataWriter(out / _STAGED)
        self._upper = Upper(directory, sieve, limits, self._staged)
        self._taken: Reading | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        with self._staged, self._upper:
            pass

    def allow(self, limits: Limits) -> None:
        """Let it hold more, or less, than was said."""
        self._upper.limits = limits

    def look(self) -> None:
        """Read what is there, while the sandbox runs.

        Raises:
            InvalidRequest, PayloadTooLarge, StorageFull, OSError: as `Upper.read`.
        """
        with full_disk_named(self._out):
            for _ in range(_MAX_LOOKS):
                if self._upper.read(still=False).read_bytes < _AGAIN_BYTES:
                    return

    def take(self) -> None:
        """Read what is new, while it stands still. Raises as `look`."""
        with full_disk_named(self._out):
            self._taken = self._upper.read(still=True)

    def finish(self) -> Packed:
        """Make the layer; the sandbox may run.

        Raises:
            InvalidRequest: EROFS cannot hold it.
            StorageFull: no room.
        """
        if self._taken is None:
            raise InternalError("a difference is finished that was not taken")
        with full_disk_named(self._out):
            tree = self._taken.tree
            own = self._settle(tree)
            tree.devices = [own] if own is not None else []
            converted = write_layer(self._out, tree, own)
        converted = replace(converted, diff_id=converted.meta.digest)
        return Packed(converted, self._taken.left_out)

    def _settle(self, tree: Tree) -> Device | None:
        """Have the data as one reading alone would have left it."""
        staged = self._out / _STAGED
        own = self._staged.finish()
        if _is_settled(tree, own):
            staged.rename(self._out / DATA)
            return own
        with DataWriter(self._out / DATA) as data:
            with contextlib.closing(_Staged(staged)) as source:
                for inode in files_of(tree):
                    inode.extents = data.append(source.pieces(inode), inode.size)
            own = data.finish()
        staged.unlink()
        return own


def files_of(tree: Tree) -> Iterator[Inode]:
    """Regular files with content, each once, as they are met by whoever scans the directory."""
    met: set[Inode] = set()
    pending = [tree.root]
    while pending:
        below: list[Inode] = []
        for _, inode in sorted(pending.pop().children.items()):
            if inode.is_dir:
                below.append(inode)
            elif stat.S_ISREG(inode.mode) and inode.size and inode not in met:
                met.add(inode)
                yield inode
        pending.extend(reversed(below))


def _is_settled(tree: Tree, own: Device | None) -> bool:
    """Whether the data holds the tree's files in their order and nothing else."""
    end = 0
    for inode in files_of(tree):
        for extent in inode.extents:
            if extent.device == HOLE or extent.block + extent.blocks <= end:
                continue
            if extent.block != end:
                return False
            end += extent.blocks
    return end * BLOCK == (own.size_bytes if own is not None else 0)


class _Staged:
    """The data as it was read."""

    def __init__(self, path: Path) -> None:
        self._file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)

    def close(self) -> None:
        """Close it."""
        os.close(self._file)

    def pieces(self, inode: Inode) -> Iterator[bytes | Zeros]:
        """A file's content."""
        left = inode.size
        for extent in inode.extents:
            length = min(left, extent.blocks * BLOCK)
            yield from self._extent(extent, length)
            left -= length

    def _extent(self, extent: Extent, length: int) -> Iterator[bytes | Zeros]:
        if extent.device == HOLE:
            yield Zeros(length)
            return
        start = extent.block * BLOCK
        for at in range(start, start + length, _PIECE):
            yield os.pread(self._file, min(_PIECE, start + length - at), at)
