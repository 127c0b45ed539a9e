"""From a name to something that runs or can be opened, as a simulated process would find it."""

from __future__ import annotations

import errno
import os
from collections.abc import Mapping

from dsec.edge.sim.errors import AetherError, file_error, not_found
from dsec.edge.sim.filesystem import Device, Directory, FileSystem, RegularFile
from dsec.edge.sim.processes import Process, Program, Surroundings
from dsec.edge.sim.streams import (
    DeviceSink,
    FileSink,
    FileSource,
    NullSource,
    Sink,
    Source,
    ZeroSource,
)

DEFAULT_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


def find_program(
    fs: FileSystem,
    programs: Mapping[str, Program],
    name: str,
    around: Surroundings,
) -> Program:
    """What runs when `name` is executed.

    Raises:
        AetherError: `not_found` (kind `executable`), or `permission_denied`.
    """
    raw = os.fsencode(name)
    if "/" in name:
        return _executable(fs, programs, raw, around)
    denied: AetherError | None = None
    for directory in around.env.get("PATH", DEFAULT_PATH).split(":"):
        try:
            return _executable(fs, programs, os.fsencode(directory) + b"/" + raw, around)
        except AetherError as error:
            denied = error if error.code == "permission_denied" else denied
    raise denied or not_found("executable", f"{name}: no such program on PATH")


def _executable(
    fs: FileSystem, programs: Mapping[str, Program], path: bytes, around: Surroundings
) -> Program:
    try:
        node, _ = fs.find(path, who=around.who, cwd=around.cwd)
    except AetherError as error:
        if error.code == "not_found":
            raise not_found("executable", f"{os.fsdecode(path)}: no such program") from None
        raise
    fs.check(node, around.who, 1, path)
    if not isinstance(node, RegularFile):
        raise file_error(errno.EACCES, path)
    if node.program:
        return programs[node.program]
    if node.data.startswith(b"#!"):
        return _script(programs["sh"], path)
    raise AetherError(
        "invalid_request",
        f"{os.fsdecode(path)}: the simulation runs only its own vocabulary and scripts",
        path=path,
        errno=errno.ENOEXEC,
    )


def _script(shell: Program, path: bytes) -> Program:
    async def run(process: Process) -> int:
        process.argv = ["sh", os.fsdecode(path), *process.argv[1:]]
        return await shell(process)

    return run


def open_source(fs: FileSystem, name: str, around: Surroundings) -> Source:
    """Open a file for reading.

    Raises:
        AetherError: as open(2) would fail.
    """
    path = os.fsencode(name)
    node, _ = fs.find(path, who=around.who, cwd=around.cwd)
    fs.check(node, around.who, 4, path)
    if isinstance(node, RegularFile):
        return FileSource(node)
    if isinstance(node, Device):
        return ZeroSource() if node.name in ("zero", "full") else NullSource()
    raise file_error(errno.EISDIR if isinstance(node, Directory) else errno.EINVAL, path)


def open_sink(fs: FileSystem, name: str, around: Surroundings, op: str) -> Sink:
    """Open a file for `>` or `>>`.

    Raises:
        AetherError: as open(2) would fail.
    """
    node, place = fs.open_file(os.fsencode(name), around.who, cwd=around.cwd, truncate=op == ">")
    return DeviceSink(node) if isinstance(node, Device) else FileSink(fs, node, place)
