"""Git repositories in an environment: where they are, and what their refs and logs name."""

from __future__ import annotations

import re
import stat
from collections.abc import Iterator
from dataclasses import dataclass

from dsec.images.lint.environment import Environment
from dsec.images.lint.git.objects import Objects, read_objects
from dsec.images.overlaid import Entry

_MAX_REFS_BYTES = 64 << 20
_ID = re.compile(rb"\b([0-9a-f]{64}|[0-9a-f]{40})\b")
_PACKED = re.compile(rb"^(\^?)([0-9a-f]{64}|[0-9a-f]{40})(?: (\S+))?", re.MULTILINE)
_SHA256 = re.compile(r"^[ \t]*objectformat[ \t]*=[ \t]*sha256[ \t]*$", re.MULTILINE | re.IGNORECASE)
_REMOTE = re.compile(
    r'^[ \t]*\[[ \t]*remote[ \t]+"((?:[^"\\]|\\.){1,200})"\s*\]', re.MULTILINE | re.IGNORECASE
)
_MAX_SYMREFS = 5
_MAX_TAGS = 10


@dataclass(frozen=True, slots=True)
class Named:
    """A commit or tag that something of a repository names."""

    entry: Entry
    """The file that does."""
    name: str
    """The ref, or the file's name below the repository."""
    target: str
    """Its id."""


class Repository:
    """One repository."""

    def __init__(self, env: Environment, directory: Entry) -> None:
        self._env = env
        self._path = directory.path.rstrip(b"/")
        self.directory = directory
        config = env.text(self._path + b"/config") or ""
        self.remotes: list[str] = _REMOTE.findall(config)
        self.reftable = env.find(self._path + b"/reftable") is not None
        """Refs are kept in a form that is not read here."""
        self._hash_bytes = 32 if _SHA256.search(config) else 20

    def objects(self) -> Objects:
        """All its commits and tags, those it borrows included."""
        directories = [self._path + b"/objects", *self._alternates()]
        found = (self._env.find(path) for path in directories)
        present = {entry.path: entry for entry in found if entry is not None}
        return read_objects(self._env, list(present.values()), self._hash_bytes)

    def _alternates(self) -> Iterator[bytes]:
        text = self._env.text(self._path + b"/objects/info/alternates") or ""
        for line in text.splitlines()[:20]:
            path = line.strip().encode("utf-8", "replace")
            yield path if path.startswith(b"/") else self._path + b"/objects/" + path

    def head(self) -> str:
        """The id of the commit checked out; empty if there is none yet."""
        packed = {named.name: named.target for named in self._packed()}
        name = "HEAD"
        for _ in range(_MAX_SYMREFS):
            content = self._env.text(self._path + b"/" + name.encode("utf-8", "replace"), 4096)
            if content is None:
                return packed.get(name, "")
            if not content.startswith("ref:"):
                return content.strip()
            name = content.removeprefix("ref:").strip()
        return ""

    def named(self) -> Iterator[Named]:
        """Whatever its files name: refs, logs, the heads that commands leave, other work trees."""
        yield from self._packed()
        for entry in self._ref_files():
            content = self._env.content(entry, _MAX_REFS_BYTES)
            name = entry.path[len(self._path) + 1 :].decode("utf-8", "replace")
            for target in {match.decode() for match in _ID.findall(content)}:
                if target.strip("0"):
                    yield Named(entry, name, target)

    def _ref_files(self) -> Iterator[Entry]:
        for entry in self._env.children(self.directory):
            if entry.name in (b"refs", b"logs", b"worktrees"):
                yield from (e for e in self._env.below(entry) if _is_ref(e))
            elif entry.name.endswith(b"_HEAD") or entry.name == b"HEAD":
                yield entry

    def _packed(self) -> Iterator[Named]:
        entry = self._env.file(self._path + b"/packed-refs")
        if entry is None:
            return
        name = b""
        for peeled, target, ref in _PACKED.findall(self._env.content(entry, _MAX_REFS_BYTES)):
            name = name if peeled else ref
            yield Named(entry, name.decode("utf-8", "replace"), target.decode())


def _is_ref(entry: Entry) -> bool:
    """Whether a file below `refs`, `logs` or `worktrees` can name commits."""
    if not stat.S_ISREG(entry.inode.mode):
        return False
    return b"/worktrees/" not in entry.path or entry.name.endswith(b"HEAD")


def repositories(env: Environment) -> Iterator[Repository]:
    """Every repository, bare ones and those of submodules included."""
    for path, entry in env.entries.items():
        if entry.name != b"HEAD" or not path.endswith(b"/HEAD"):
            continue
        directory = env.entries[path[: -len(b"/HEAD")] or b"/"]
        if _is_repository(env, directory.path.rstrip(b"/")):
            yield Repository(env, directory)


def _is_repository(env: Environment, path: bytes) -> bool:
    objects = env.find(path + b"/objects")
    has_refs = env.find(path + b"/refs") or env.find(path + b"/packed-refs")
    return objects is not None and objects.inode.is_dir and has_refs is not None


def ancestors(objects: Objects, head: str) -> set[str]:
    """The commits that belong to the history of one, itself included."""
    seen: set[str] = set()
    pending = [head]
    while pending:
        commit = pending.pop()
        if commit not in seen and commit in objects.commits:
            seen.add(commit)
            pending.extend(objects.commits[commit].parents)
    return seen


def peeled(objects: Objects, target: str) -> str:
    """What a chain of annotated tags names in the end."""
    for _ in range(_MAX_TAGS):
        if target not in objects.tags:
            break
        target = objects.tags[target]
    return target
