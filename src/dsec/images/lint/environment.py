"""An environment as rules see it: names, attributes, and bounded reads of content."""

from __future__ import annotations

import stat
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from dsec.images.erofs.tree import Inode
from dsec.images.lint.indexes import Indexes
from dsec.images.overlaid import Entry, Hidden, Part, overlay
from dsec.images.records import ImageConfig

MAX_TEXT_BYTES = 1 << 20
"""Of a file, the most that is searched as text."""
_MAX_LINKS = 40
_MAX_BUDGET_BYTES = 2 << 30
_TRUSTED_ROOTS = (b"/usr/", b"/etc/", b"/var/lib/", b"/boot/")

Read = Callable[[int, Inode, int, int], bytes]
"""(part, inode, offset, length) -> the bytes of a regular file, cut at its end.

May raise DataUnavailable or OSError, which end the linter: what cannot be read is not clean.
"""


class BudgetSpent(Exception):
    """More content was asked for than one run may read."""


@dataclass(frozen=True, slots=True)
class Surroundings:
    """What the linter is told beside the environment."""

    indexes: Indexes = field(default_factory=Indexes)
    """Hosts that packages should come from."""
    now_s: float = 0.0
    """Seconds since the epoch; 0 = ages are not judged."""
    answers: tuple[str, ...] = ()
    """Texts that must not be found."""
    layers: int = 0
    """Of the image and what lies over it, before any were merged; 0 = as many as parts."""


class Environment:
    """Parts laid over each other. What was read is counted against a budget."""

    def __init__(
        self,
        parts: Sequence[Part],
        config: ImageConfig,
        read: Read,
        around: Surroundings | None = None,
        budget_bytes: int = _MAX_BUDGET_BYTES,
    ) -> None:
        self.parts = tuple(parts)
        self.config = config
        self.around = around or Surroundings()
        seen = overlay(self.parts)
        self.entries: dict[bytes, Entry] = seen.entries
        """By absolute path, parents before children, names in byte order."""
        self.hidden: list[Hidden] = seen.hidden
        self._read = read
        self._left_bytes = budget_bytes

    def label(self, part: int) -> str:
        """Whose a part is."""
        return self.parts[part].label

    def files(self) -> Iterator[Entry]:
        """Regular files, each name of a hard link."""
        return (entry for entry in self.entries.values() if stat.S_ISREG(entry.inode.mode))

    def children(self, directory: Entry) -> Iterator[Entry]:
        """What is directly in a directory, in no order."""
        prefix = directory.path.rstrip(b"/") + b"/"
        names = {name for s in directory.under for name in s.inode.children}
        names.update(directory.inode.children)
        for name in names:
            if (entry := self.entries.get(prefix + name)) is not None:
                yield entry

    def below(self, directory: Entry) -> Iterator[Entry]:
        """All under a directory, parents before children."""
        pending = [directory]
        while pending:
            for entry in self.children(pending.pop()):
                yield entry
                if entry.inode.is_dir:
                    pending.append(entry)

    def find(self, path: bytes) -> Entry | None:
        """What is at an absolute path, symbolic links followed; None if there is nothing."""
        done, left, links = b"/", path.split(b"/")[::-1], 0
        while left:
            name = left.pop()
            if name in (b"", b"."):
                continue
            if name == b"..":
                done = done.rpartition(b"/")[0] or b"/"
                continue
            entry = self.entries.get(done.rstrip(b"/") + b"/" + name)
            if entry is None:
                return None
            if not stat.S_ISLNK(entry.inode.mode):
                done = entry.path
                continue
            links += 1
            if links > _MAX_LINKS:
                return None
            if entry.inode.target.startswith(b"/"):
                done = b"/"
            left.extend(entry.inode.target.split(b"/")[::-1])
        return self.entries.get(done)

    def file(self, path: bytes) -> Entry | None:
        """The regular file at a path, links followed."""
        entry = self.find(path)
        return entry if entry is not None and stat.S_ISREG(entry.inode.mode) else None

    def content(self, entry: Entry, length: int = MAX_TEXT_BYTES, offset: int = 0) -> bytes:
        """Bytes of a regular file.

        Raises:
            BudgetSpent: all that one run may read was read.
        """
        length = max(0, min(length, entry.inode.size - offset))
        if length == 0 or not stat.S_ISREG(entry.inode.mode):
            return b""
        if length > self._left_bytes:
            raise BudgetSpent
        self._left_bytes -= length
        return self._read(entry.part, entry.inode, offset, length)

    def text(self, path: bytes, length: int = MAX_TEXT_BYTES) -> str | None:
        """The beginning of the regular file at a path, or None if there is none."""
        entry = self.file(path)
        return None if entry is None else self.content(entry, length).decode("utf-8", "replace")

    @cached_property
    def packaged(self) -> frozenset[bytes]:
        """Paths that the distribution's packages own, in system directories.

        An image can claim here what it likes; so what it claims elsewhere does not count.
        """
        lists = self.find(b"/var/lib/dpkg/info")
        found: set[bytes] = set()
        for entry in self.children(lists) if lists is not None else ():
            if entry.name.endswith(b".list"):
                found.update(self._real(p) for p in self.content(entry).split(b"\n"))
        return frozenset(path for path in found if _is_system(path))

    def _real(self, path: bytes) -> bytes:
        """A path of a package's list with `/bin`, `/lib`, ... as they are since these are links."""
        first, slash, rest = path[1:].partition(b"/")
        link = self.entries.get(b"/" + first)
        if slash and link is not None and stat.S_ISLNK(link.inode.mode):
            return b"/" + link.inode.target.strip(b"/") + b"/" + rest
        return path


def _is_system(path: bytes) -> bool:
    return path.startswith(_TRUSTED_ROOTS) and not path.startswith(b"/usr/local/")
