"""Packs of a Git repository: which commits and tags they hold. Index version 2; deltas resolved.

Everything in a pack may be a lie: offsets are checked, chains of deltas are bounded, and what is
inflated counts against a budget that the whole run shares.
"""

from __future__ import annotations

import struct
import zlib
from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass

from dsec.images.lint.environment import Environment
from dsec.images.overlaid import Entry

MAX_OBJECT_BYTES = 1 << 20
"""Of a commit or a tag, and of what it is a delta against."""
MAX_OBJECTS = 2_000_000
_MAX_INFLATED_BYTES = 1 << 30
_MAX_CHAIN = 4096
_WINDOW = 1 << 18
_HEADER_BYTES = 64
_MAGIC = b"\xfftOc\x00\x00\x00\x02"
_OFS_DELTA, _REF_DELTA = 6, 7
_KINDS = {1: b"commit", 2: b"tree", 3: b"blob", 4: b"tag"}
WANTED = (b"commit", b"tag")


class Unreadable(Exception):
    """It is damaged, or of a kind not known here; the message says which."""


class Inflater:
    """Inflates within bounds."""

    def __init__(self, max_bytes: int = _MAX_INFLATED_BYTES) -> None:
        self._left = max_bytes

    def inflate(self, data: bytes, size: int) -> bytes:
        """Exactly `size` bytes from a zlib stream.

        Raises:
            Unreadable: it is damaged, shorter, or there was too much of it altogether.
        """
        if size > MAX_OBJECT_BYTES:
            raise Unreadable(f"an object of {size} bytes is too large")
        self._left -= size
        if self._left < 0:
            raise Unreadable("its objects are too large altogether")
        try:
            plain = zlib.decompressobj().decompress(data, size) if size else b""
        except zlib.error as error:
            raise Unreadable(f"an object is damaged: {error}") from error
        if len(plain) != size:
            raise Unreadable("an object is cut short")
        return plain

    def peek(self, data: bytes, size: int) -> bytes:
        """The first `size` bytes of what a zlib stream holds, or all if there is less.

        Raises:
            Unreadable: it is damaged.
        """
        try:
            return zlib.decompressobj().decompress(data, size)
        except zlib.error as error:
            raise Unreadable(f"an object is damaged: {error}") from error


def read_index(data: bytes, hash_bytes: int) -> dict[bytes, int]:
    """A pack's index: object ids with their offsets.

    Raises:
        Unreadable: it is not an index of version 2, or damaged.
    """
    if not data.startswith(_MAGIC):
        raise Unreadable("its index is not of version 2")
    names_at = len(_MAGIC) + 1024
    if len(data) < names_at:
        raise Unreadable("its index is cut short")
    (count,) = struct.unpack_from(">I", data, names_at - 4)
    offsets_at = names_at + count * (hash_bytes + 4)
    large_at = offsets_at + count * 4
    if count > MAX_OBJECTS or len(data) < large_at:
        raise Unreadable(f"its index of {count} objects is cut short, or too large")
    offsets = struct.unpack_from(f">{count}I", data, offsets_at)
    ids = (data[at : at + hash_bytes] for at in range(names_at, offsets_at, hash_bytes))
    return {
        name: _large(data, large_at, offset) if offset >> 31 else offset
        for name, offset in zip(ids, offsets, strict=False)
    }


def _large(data: bytes, large_at: int, offset: int) -> int:
    at = large_at + (offset & 0x7FFFFFFF) * 8
    if at + 8 > len(data):
        raise Unreadable("its index is cut short")
    return int(struct.unpack_from(">Q", data, at)[0])


@dataclass(frozen=True, slots=True)
class _Header:
    kind: int
    size: int
    """Of the object inflated, or of the delta."""
    base: int | None
    """Offset of what it is a delta against."""
    data_at: int


class Pack:
    """One pack with its index."""

    def __init__(
        self, env: Environment, pack: Entry, index: dict[bytes, int], inflater: Inflater
    ) -> None:
        self._env = env
        self._pack = pack
        self._index = index
        self._hash_bytes = len(next(iter(index), b""))
        self._inflater = inflater
        self._offsets = sorted(set(index.values()))
        self._kinds: dict[int, int] = {}
        self._window = (0, b"")

    def wanted(self) -> Iterator[tuple[bytes, bytes, bytes]]:
        """Every commit and tag: id, kind, content.

        Raises:
            Unreadable: the pack is damaged.
        """
        for name, offset in sorted(self._index.items(), key=lambda item: item[1]):
            kind = _KINDS.get(self._kind(offset), b"")
            if kind in WANTED:
                yield name, kind, self._resolved(offset)

    def _kind(self, offset: int) -> int:
        """The kind of an object, that of its last base if it is a delta."""
        chain: list[int] = []
        while (kind := self._kinds.get(offset)) is None:
            header = self._header(offset)
            chain.append(offset)
            if header.base is None:
                kind = header.kind
                break
            if len(chain) > _MAX_CHAIN:
                raise Unreadable("a chain of deltas is too long")
            offset = header.base
        self._kinds.update(dict.fromkeys(chain, kind))
        return kind

    def _resolved(self, offset: int) -> bytes:
        chain = [self._header(offset)]
        while (base := chain[-1].base) is not None:
            if len(chain) > _MAX_CHAIN:
                raise Unreadable("a chain of deltas is too long")
            chain.append(self._header(base))
        content = self._inflated(chain.pop())
        for delta in reversed(chain):
            content = apply_delta(content, self._inflated(delta))
        return content

    def _inflated(self, header: _Header) -> bytes:
        """What an object holds; it is stored before the next one begins."""
        after = bisect_right(self._offsets, header.data_at)
        end = self._offsets[after] if after < len(self._offsets) else self._pack.inode.size
        stored = min(end - header.data_at, MAX_OBJECT_BYTES + (MAX_OBJECT_BYTES >> 4))
        return self._inflater.inflate(self._bytes(header.data_at, stored), header.size)

    def _header(self, offset: int) -> _Header:
        raw = self._bytes(offset, _HEADER_BYTES)
        try:
            kind, size, at = _kind_and_size(raw)
            if kind == _OFS_DELTA:
                back, at = _distance(raw, at)
                return _Header(kind, size, self._earlier(offset, back), offset + at)
        except IndexError:
            raise Unreadable("an object's header is cut short") from None
        if kind == _REF_DELTA:
            name = raw[at : at + self._hash_bytes]
            return _Header(kind, size, self._named(name), offset + at + self._hash_bytes)
        if kind not in _KINDS:
            raise Unreadable(f"an object is of kind {kind}")
        return _Header(kind, size, None, offset + at)

    def _earlier(self, offset: int, back: int) -> int:
        if not 0 < back < offset:
            raise Unreadable("a delta's base lies outside")
        return offset - back

    def _named(self, name: bytes) -> int:
        try:
            return self._index[name]
        except KeyError:
            raise Unreadable("a delta's base is missing") from None

    def _bytes(self, offset: int, length: int) -> bytes:
        """A run of the pack, by way of a window that moves forward with the offsets."""
        start, data = self._window
        if not start <= offset <= offset + length <= start + len(data):
            start, data = offset, self._env.content(self._pack, max(_WINDOW, length), offset)
            self._window = (start, data)
        return data[offset - start : offset - start + length]


def _kind_and_size(raw: bytes) -> tuple[int, int, int]:
    byte, at = raw[0], 1
    kind, size, shift = byte >> 4 & 7, byte & 15, 4
    while byte & 0x80:
        byte, at = raw[at], at + 1
        size |= (byte & 0x7F) << shift
        shift += 7
    return kind, size, at


def _distance(raw: bytes, at: int) -> tuple[int, int]:
    byte, at = raw[at], at + 1
    back = byte & 0x7F
    while byte & 0x80:
        byte, at = raw[at], at + 1
        back = (back + 1 << 7) | byte & 0x7F
    return back, at


def apply_delta(base: bytes, delta: bytes) -> bytes:
    """What a delta makes of its base.

    Raises:
        Unreadable: the delta is damaged, or makes too much.
    """
    try:
        return _apply(base, delta)
    except IndexError:
        raise Unreadable("a delta is cut short") from None


def _apply(base: bytes, delta: bytes) -> bytes:
    base_size, at = _varint(delta, 0)
    size, at = _varint(delta, at)
    if base_size != len(base) or size > MAX_OBJECT_BYTES:
        raise Unreadable("a delta does not fit its base, or makes too much")
    made = bytearray()
    while at < len(delta) and len(made) <= size:
        code, at = delta[at], at + 1
        if code & 0x80:
            start, length, at = _copied(delta, at, code)
            made += base[start : start + length]
        else:
            made += delta[at : at + code]
            at += code
    if len(made) != size:
        raise Unreadable("a delta makes something of another size")
    return bytes(made)


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte, at = data[at], at + 1
        value |= (byte & 0x7F) << shift
        shift += 7
        if not byte & 0x80:
            return value, at


def _copied(delta: bytes, at: int, code: int) -> tuple[int, int, int]:
    fields = [0] * 7
    for bit in range(7):
        if code >> bit & 1:
            fields[bit], at = delta[at], at + 1
    start = int.from_bytes(bytes(fields[:4]), "little")
    length = int.from_bytes(bytes(fields[4:]), "little")
    return start, length or 0x10000, at
