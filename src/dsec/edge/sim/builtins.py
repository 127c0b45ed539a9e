"""What the tiny shell does itself, and `sh` as a program."""

from __future__ import annotations

import errno
import os
import signal
from collections.abc import Mapping

from dsec.edge.sim.errors import AetherError, file_error
from dsec.edge.sim.filesystem import Directory
from dsec.edge.sim.lookup import open_source
from dsec.edge.sim.processes import Process, Program
from dsec.edge.sim.shell import Builtin, Shell, ShellExit


async def _cd(shell: Shell, words: list[str]) -> int:
    target = words[1] if len(words) > 1 else shell.around.env.get("HOME", "/")
    path = os.fsencode(target)
    try:
        node, place = shell.process.table.fs.find(path, who=shell.around.who, cwd=shell.around.cwd)
        if not isinstance(node, Directory):
            raise file_error(errno.ENOTDIR, path)
        shell.process.table.fs.check(node, shell.around.who, 1, path)
    except AetherError as error:
        await shell.process.err(f"sh: cd: {error.message}\n")
        return 1
    shell.around.cwd = place.path
    return 0


async def _export(shell: Shell, words: list[str]) -> int:
    for word in words[1:]:
        name, given, value = word.partition("=")
        shell.around.env[name] = value if given else shell.variables.pop(name, "")
    return 0


async def _unset(shell: Shell, words: list[str]) -> int:
    for name in words[1:]:
        shell.around.env.pop(name, None)
        shell.variables.pop(name, None)
    return 0


async def _exit(shell: Shell, words: list[str]) -> int:
    raise ShellExit(int(words[1]) & 255 if len(words) > 1 else shell.status)


async def _wait_builtin(shell: Shell, words: list[str]) -> int:
    living = shell.process.table.living
    if len(words) > 1:
        last = shell.last_background
        target = living.get(int(words[1])) or (last if last and str(last.pid) == words[1] else None)
        if target is None:
            return 127
        await target.ended.wait()
        return target.status
    for child in [p for p in living.values() if p.ppid == shell.process.pid]:
        await child.ended.wait()
    return 0


async def _kill(shell: Shell, words: list[str]) -> int:
    number = signal.SIGTERM
    rest = words[1:]
    if rest and rest[0].startswith("-"):
        number = signal_number(rest.pop(0)[1:])
    for text in rest:
        target = shell.process.table.living.get(int(text))
        if target is None:
            await shell.process.err(f"sh: kill: ({text}) - No such process\n")
            return 1
        target.signal(number)
    return 0


async def _colon(shell: Shell, words: list[str]) -> int:  # noqa: ARG001 - a Builtin
    return 0


def signal_number(text: str) -> signal.Signals:
    """Read `9`, `KILL` or `SIGKILL`."""
    if text.isdigit():
        return signal.Signals(int(text))
    return signal.Signals["SIG" + text.upper().removeprefix("SIG")]


BUILTINS: dict[str, Builtin] = {
    "cd": _cd,
    "export": _export,
    "unset": _unset,
    "exit": _exit,
    "wait": _wait_builtin,
    "kill": _kill,
    ":": _colon,
}


async def sh(process: Process, programs: Mapping[str, Program]) -> int:
    """`sh -c TEXT [NAME ARGS]`, `sh FILE`, or a program on standard input, line by line."""
    argv = process.argv
    shell = Shell(process, programs, BUILTINS, arguments=argv[:1])
    try:
        if len(argv) > 2 and argv[1] == "-c":
            shell.arguments = argv[3:] or argv[:1]
            return await shell.run_text(argv[2])
        if len(argv) > 1 and not argv[1].startswith("-"):
            shell.arguments = argv[1:]
            return await shell.run_text(await _slurp(process, argv[1]))
        return await _from_input(shell)
    except ShellExit as leave:
        return leave.status


async def _slurp(process: Process, name: str) -> str:
    source = open_source(process.table.fs, name, process.around)
    parts: list[bytes] = []
    while data := await source.read():
        parts.append(data)
    return os.fsdecode(b"".join(parts))


async def _from_input(shell: Shell) -> int:
    prompt = "$ " if shell.around.stdin.is_tty else ""
    pending = b""
    while True:
        if prompt:
            await shell.process.err(prompt)
        while b"\n" not in pending:
            data = await shell.process.read()
            if not data:
                return await shell.run_text(os.fsdecode(pending))
            pending += data
        line, pending = pending.split(b"\n", 1)
        await shell.run_text(os.fsdecode(line))
