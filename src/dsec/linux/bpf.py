"""eBPF by libbpf: objects, maps, pins, ring buffers. Knows no program.

libbpf is opened when it is first needed. A descriptor that is returned is the caller's to close.
"""

from __future__ import annotations

import ctypes
import errno
import functools
import os
import struct
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Self

HASH, ARRAY, PERCPU_ARRAY, LPM_TRIE, RINGBUF = 1, 2, 6, 11, 27
"""Types of maps."""
NO_PREALLOC = 1
"""Flag of a map that takes memory for what is in it alone."""
_LIBRARY = "libbpf.so.1"
_LINES, _LINE_BYTES = 10, 1 << 20
"""What is kept of what libbpf says; one of its lines may be the verifier's whole log."""
_TOLD = 2000
"""Characters of a line: the verifier's reason is at the end."""
_DEBUG = 2
_BATCH = 4096


class Shape(NamedTuple):
    """What a map is."""

    kind: int
    key_bytes: int
    value_bytes: int
    entries: int
    flags: int = 0


# Options of libbpf begin with their size; what is behind that stays zero.
_BATCH_OPTIONS = struct.pack("@NQQ", 24, 0, 0)
_CREATE_OPTIONS = struct.Struct("@N5II")
"""Size, four numbers of BTF and an inner map, flags."""

_Print = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_int, ctypes.c_char_p, ctypes.c_void_p)
_Sample = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
_said = threading.local()
_libc = ctypes.CDLL(None)
_libc.vsnprintf.argtypes = [
    ctypes.c_char_p, ctypes.c_size_t, ctypes.c_char_p, ctypes.c_void_p,
]  # fmt: skip


def _listen(level: int, template: bytes, arguments: int) -> int:
    """Keep what libbpf says, for an error: it would go to standard error."""
    lines = getattr(_said, "lines", None)
    if lines is not None and level != _DEBUG:
        line = ctypes.create_string_buffer(_LINE_BYTES)
        _libc.vsnprintf(line, _LINE_BYTES, template, arguments)
        lines.append(line.value.decode("utf-8", "replace").strip()[-_TOLD:])
        del lines[:-_LINES]
    return 0


_LISTEN = _Print(_listen)
"""Must live as long as libbpf."""
_P, _I, _U32, _N, _S = (
    ctypes.c_void_p, ctypes.c_int, ctypes.c_uint32, ctypes.c_size_t, ctypes.c_char_p,
)  # fmt: skip
_CALLS: dict[str, tuple[Any, list[Any]]] = {
    "bpf_object__open_mem": (_P, [_S, _N, _P]),
    "bpf_object__load": (_I, [_P]),
    "bpf_object__close": (None, [_P]),
    "bpf_object__find_map_by_name": (_P, [_P, _S]),
    "bpf_object__find_program_by_name": (_P, [_P, _S]),
    "bpf_map__set_pin_path": (_I, [_P, _S]),
    "bpf_map__set_initial_value": (_I, [_P, _S, _N]),
    "bpf_map__fd": (_I, [_P]),
    "bpf_program__fd": (_I, [_P]),
    "bpf_map_create": (_I, [_I, _S, _U32, _U32, _U32, _P]),
    "bpf_map_update_elem": (_I, [_I, _S, _S, ctypes.c_uint64]),
    "bpf_map_update_batch": (_I, [_I, _S, _S, _P, _P]),
    "bpf_map_lookup_elem": (_I, [_I, _S, _S]),
    "bpf_map_lookup_batch": (_I, [_I, _P, _P, _S, _S, _P, _P]),
    "bpf_map_delete_batch": (_I, [_I, _S, _P, _P]),
    "bpf_obj_get": (_I, [_S]),
    "bpf_obj_pin": (_I, [_I, _S]),
    "libbpf_num_possible_cpus": (_I, []),
    "libbpf_set_print": (_P, [_Print]),
    "ring_buffer__new": (_P, [_I, _Sample, _P, _P]),
    "ring_buffer__free": (None, [_P]),
    "ring_buffer__epoll_fd": (_I, [_P]),
    "ring_buffer__consume": (_I, [_P]),
}


@functools.cache
def _library() -> ctypes.CDLL:
    library = ctypes.CDLL(_LIBRARY, use_errno=True)
    for name, (result, arguments) in _CALLS.items():
        function = getattr(library, name)
        function.restype, function.argtypes = result, arguments
    library.libbpf_set_print(_LISTEN)
    return library


def _failed(number: int, call: str, what: object) -> OSError:
    return OSError(number, f"{call}: {os.strerror(number)}", str(what))


def _call(name: str, what: object, *arguments: object) -> int:
    result: int = getattr(_library(), name)(*arguments)
    if result < 0:
        raise _failed(-result, name, what)
    return result


def _pointer(name: str, what: object, *arguments: object) -> int:
    result: int | None = getattr(_library(), name)(*arguments)
    if not result:
        raise _failed(ctypes.get_errno() or errno.EINVAL, name, what)
    return result


def possible_processors() -> int:
    """Of how many processors a map that has a value for each has one."""
    return _call("libbpf_num_possible_cpus", "processors")


# Objects.


class BpfObject:
    """Programs and maps of an object file, in the kernel when `load` returns; ends with `with`."""

    def __init__(self, data: bytes, name: str = "object") -> None:
        """Read it.

        Raises:
            OSError: it is none, or libbpf is missing.
        """
        self._name = name
        self._data = data  # libbpf reads in it until it is closed
        self._said: list[str] = []
        self._object = self._hearing(
            lambda: _pointer("bpf_object__open_mem", name, data, len(data), None)
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        _library().bpf_object__close(self._object)

    def set_constants(self, section: str, value: bytes) -> None:
        """Say what a section of constants holds, all of it, before `load`."""
        what = f"{self._name} {section}"
        _call("bpf_map__set_initial_value", what, self._map(section), value, len(value))

    def pin_map(self, name: str, path: Path) -> None:
        """Have `load` take the map that is pinned at a path, or make it and pin it there."""
        _call("bpf_map__set_pin_path", path, self._map(name), os.fsencode(path))

    def load(self) -> None:
        """Give all of it to the kernel.

        Raises:
            OSError: it does not take it; the message has what libbpf and the verifier said last.
        """
        self._hearing(lambda: _call("bpf_object__load", self._name, self._object))

    def program(self, name: str) -> int:
        """Descriptor of a program; the object's, closed with it."""
        found = _pointer("bpf_object__find_program_by_name", name, self._object, name.encode())
        return _call("bpf_program__fd", name, found)

    def _map(self, name: str) -> int:
        return _pointer("bpf_object__find_map_by_name", name, self._object, name.encode())

    def _hearing(self, work: Callable[[], int]) -> int:
        lines: list[str] = []
        _said.lines = lines
        try:
            return work()
        except OSError as exc:
            said = "; ".join(lines)
            raise OSError(exc.errno, f"{exc.strerror}: {said}", exc.filename) from exc
        finally:
            _said.lines = None


# Pins.


def open_pinned(path: Path) -> int:
    """Descriptor of what is pinned at a path.

    Raises:
        OSError: nothing is.
    """
    return _call("bpf_obj_get", path, os.fsencode(path))


def pin(descriptor: int, path: Path) -> None:
    """Keep a program or map at a path of a BPF file system.

    Raises:
        FileExistsError: something is there.
    """
    _call("bpf_obj_pin", path, descriptor, os.fsencode(path))


# Maps.


class Map:
    """A map by its descriptor, which it closes with `with`. Keys and values are packed."""

    def __init__(self, descriptor: int, shape: Shape) -> None:
        self.descriptor = descriptor
        self._shape = shape

    @classmethod
    def create(cls, name: str, shape: Shape) -> Self:
        """Make one. Raises OSError."""
        options = _CREATE_OPTIONS.pack(_CREATE_OPTIONS.size, 0, 0, 0, 0, 0, shape.flags)
        sizes = shape.key_bytes, shape.value_bytes, shape.entries
        arguments = (shape.kind, name.encode(), *sizes, options)
        return cls(_call("bpf_map_create", name, *arguments), shape)

    @classmethod
    def pinned(cls, path: Path, shape: Shape) -> Self:
        """The one at a path. Raises OSError."""
        return cls(open_pinned(path), shape)

    @classmethod
    def ensure(cls, path: Path, shape: Shape) -> Self:
        """The one at a path, made if nobody has yet, also if several try at once. Raises OSError."""
        try:
            return cls.pinned(path, shape)
        except FileNotFoundError:
            made = cls.create(path.name, shape)
        try:
            pin(made.descriptor, path)
        except BaseException as exc:
            os.close(made.descriptor)
            if not isinstance(exc, FileExistsError):
                raise
            return cls.pinned(path, shape)
        return made

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self.descriptor)

    def put(self, key: bytes, value: bytes) -> None:
        """Set one value. Raises OSError; E2BIG (or ENOSPC): the map is full."""
        self._check(key, value)
        _call("bpf_map_update_elem", "map", self.descriptor, key, value, 0)

    def put_all(self, entries: Mapping[bytes, bytes]) -> None:
        """Set many values by one call, one after the other. Raises OSError; then some may be set."""
        for key, value in entries.items():
            self._check(key, value)
        if not entries:
            return
        count = ctypes.c_uint32(len(entries))
        keys, values = b"".join(entries), b"".join(entries.values())
        arguments = keys, values, ctypes.byref(count), _BATCH_OPTIONS
        _call("bpf_map_update_batch", "map", self.descriptor, *arguments)

    def get(self, key: bytes, copies: int = 1) -> bytes | None:
        """One value; None = there is none.

        Args:
            key: packed.
            copies: of a map with a value for each processor: `possible_processors()`; all are returned.
        """
        value = ctypes.create_string_buffer(_aligned(self._shape.value_bytes, copies))
        try:
            _call("bpf_map_lookup_elem", "map", self.descriptor, key, value)
        except FileNotFoundError:
            return None
        return value.raw

    def remove_all(self, keys: Sequence[bytes]) -> None:
        """Remove values by one call. Raises OSError: one is not there; then some are gone."""
        if not keys:
            return
        count = ctypes.c_uint32(len(keys))
        arguments = b"".join(keys), ctypes.byref(count), _BATCH_OPTIONS
        _call("bpf_map_delete_batch", "map", self.descriptor, *arguments)

    def entries(self) -> dict[bytes, bytes]:
        """All there is. What others change meanwhile may be in it or not. Raises OSError."""
        found: dict[bytes, bytes] = {}
        cursor = ctypes.create_string_buffer(max(self._shape.key_bytes, 8))
        begin = None
        while True:
            some, more = self._some(begin, cursor)
            found.update(some)
            if not more:
                return found
            begin = cursor

    def _some(self, begin: Any, cursor: Any) -> tuple[list[tuple[bytes, bytes]], bool]:
        key_bytes, value_bytes = self._shape.key_bytes, self._shape.value_bytes
        room = min(self._shape.entries, _BATCH)
        keys = ctypes.create_string_buffer(room * key_bytes)
        values = ctypes.create_string_buffer(room * value_bytes)
        count = ctypes.c_uint32(room)
        arguments = keys, values, ctypes.byref(count), _BATCH_OPTIONS
        more = True
        try:
            _call("bpf_map_lookup_batch", "map", self.descriptor, begin, cursor, *arguments)
        except FileNotFoundError:  # these were the last
            more = False
        pairs = zip(
            _cut(keys.raw, key_bytes, count.value),
            _cut(values.raw, value_bytes, count.value),
            strict=True,
        )
        return list(pairs), more

    def _check(self, key: bytes, value: bytes) -> None:
        """The kernel would read beyond what is too short."""
        if (len(key), len(value)) != (self._shape.key_bytes, self._shape.value_bytes):
            raise ValueError(f"{len(key)} and {len(value)} bytes for a map of {self._shape}")


def _aligned(value_bytes: int, copies: int) -> int:
    return value_bytes if copies == 1 else (value_bytes + 7) // 8 * 8 * copies


def _cut(data: bytes, size: int, count: int) -> Sequence[bytes]:
    return [data[at : at + size] for at in range(0, size * count, size)]


# Ring buffers.


class Ring:
    """The reading end of a ring buffer; there may be one. Not to be used by two threads at once."""

    def __init__(self, descriptor: int) -> None:
        """Begin to read; the descriptor may be closed then. Raises OSError."""
        self._read: list[bytes] = []
        self._take = _Sample(self._took)
        self._ring = _pointer("ring_buffer__new", "ring", descriptor, self._take, None, None)

    def fileno(self) -> int:
        """Readable when there is something; the ring's."""
        return _call("ring_buffer__epoll_fd", "ring", self._ring)

    def read(self) -> list[bytes]:
        """All records there are. Does not block. Raises OSError."""
        _call("ring_buffer__consume", "ring", self._ring)
        records, self._read = self._read, []
        return records

    def close(self) -> None:
        """End reading."""
        if self._ring:
            _library().ring_buffer__free(self._ring)
            self._ring = 0

    def _took(self, _context: int | None, data: int, size: int) -> int:
        self._read.append(ctypes.string_at(data, size))
        return 0
