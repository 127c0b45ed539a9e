"""Every commit and tag of a Git repository, loose or packed."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field

from dsec.images.lint.environment import Environment
from dsec.images.lint.git.packs import (
    MAX_OBJECT_BYTES,
    WANTED,
    Inflater,
    Pack,
    Unreadable,
    read_index,
)
from dsec.images.overlaid import Entry

_MAX_INDEX_BYTES = 128 << 20
_SNIFF_BYTES = 512
_HEADER_BYTES = 32
_HEADER = re.compile(rb"(commit|tree|blob|tag) (\d{1,19})\0")
_HEX = re.compile(rb"[0-9a-f]+")
_COMMITTED = re.compile(rb"^committer .*> (\d{1,12}) [+-]\d{4}$", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Commit:
    """What is wanted of a commit."""

    parents: tuple[str, ...]
    committed_s: int
    """Seconds since the epoch, as the committer said."""
    subject: str


@dataclass(slots=True)
class Objects:
    """What was found, by id in hex digits."""

    commits: dict[str, Commit] = field(default_factory=dict)
    tags: dict[str, str] = field(default_factory=dict)
    """Annotated tags and what they name."""
    unread: list[tuple[Entry, str]] = field(default_factory=list)
    """Files that could not be understood, and why."""


def read_objects(env: Environment, directories: list[Entry], hash_bytes: int) -> Objects:
    """Read the commits and tags of `objects` directories.

    Args:
        env: where they are.
        directories: the repository's own and its alternates.
        hash_bytes: length of an object's id: 20, or 32 for SHA-256.
    """
    found, inflater = Objects(), Inflater()
    for directory in directories:
        for entry in env.children(directory):
            if entry.name == b"pack":
                _read_packs(env, entry, hash_bytes, found, inflater)
            elif len(entry.name) == 2 and _HEX.fullmatch(entry.name):
                _read_loose(env, entry, hash_bytes, found, inflater)
    return found


def _read_loose(
    env: Environment, fan: Entry, hash_bytes: int, found: Objects, inflater: Inflater
) -> None:
    for entry in env.children(fan):
        name = fan.name + entry.name
        if len(name) != hash_bytes * 2 or not _HEX.fullmatch(name):
            continue
        try:
            _take_loose(env, entry, name.decode(), found, inflater)
        except Unreadable as error:
            found.unread.append((entry, str(error)))


def _take_loose(
    env: Environment, entry: Entry, name: str, found: Objects, inflater: Inflater
) -> None:
    head = inflater.peek(env.content(entry, _SNIFF_BYTES), _HEADER_BYTES)
    header = _HEADER.match(head)
    if header is None:
        raise Unreadable("a loose object has no header")
    if header[1] in WANTED:
        size = header.end() + int(header[2])
        whole = inflater.inflate(env.content(entry, MAX_OBJECT_BYTES), size)
        _take(found, name, header[1], whole[header.end() :])


def _read_packs(
    env: Environment, directory: Entry, hash_bytes: int, found: Objects, inflater: Inflater
) -> None:
    for pack in env.children(directory):
        if not pack.name.endswith(b".pack"):
            continue
        try:
            index = _index_of(env, pack, hash_bytes)
            for name, kind, content in Pack(env, pack, index, inflater).wanted():
                _take(found, name.hex(), kind, content)
        except Unreadable as error:
            found.unread.append((pack, str(error)))


def _index_of(env: Environment, pack: Entry, hash_bytes: int) -> dict[bytes, int]:
    entry = env.file(pack.path.removesuffix(b".pack") + b".idx")
    if entry is None:
        raise Unreadable("it has no index, which `git index-pack` would make again")
    return read_index(env.content(entry, _MAX_INDEX_BYTES), hash_bytes)


def _take(found: Objects, name: str, kind: bytes, content: bytes) -> None:
    head, _, message = content.partition(b"\n\n")
    if kind == b"tag":
        found.tags[name] = next(_values(head, b"object "), "")
        return
    time = _COMMITTED.search(head)
    subject = message.split(b"\n", 1)[0][:80].decode("utf-8", "replace")
    parents = tuple(_values(head, b"parent "))
    found.commits[name] = Commit(parents, int(time[1]) if time else 0, subject)


def _values(head: bytes, field_name: bytes) -> Iterator[str]:
    for line in head.split(b"\n"):
        if line.startswith(field_name):
            yield line.removeprefix(field_name).decode("ascii", "replace")
