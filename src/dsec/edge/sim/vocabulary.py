"""What a simulated sandbox can execute: a few plain programs and the probe, one function each."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial

import anyio

from dsec.edge.sim import probe
from dsec.edge.sim.builtins import sh
from dsec.edge.sim.errors import AetherError
from dsec.edge.sim.lookup import find_program, open_source
from dsec.edge.sim.processes import Process, Program
from dsec.edge.sim.streams import Source


async def echo(process: Process) -> int:
    """`echo [-n] [-e] ARGS`."""
    args = process.argv[1:]
    newline = "\n"
    while args and args[0] in ("-n", "-e", "-ne", "-en"):
        flag = args.pop(0)
        if "n" in flag:
            newline = ""
        if "e" in flag:
            args = [_unescape(arg) for arg in args]
    await process.out(" ".join(args) + newline)
    return 0


async def cat(process: Process) -> int:
    """`cat [FILES]`."""
    status = 0
    for name in process.argv[1:] or ["-"]:
        try:
            source = _operand(process, name)
        except AetherError as error:
            await process.err(f"cat: {error.message}\n")
            status = 1
            continue
        while data := await source.read():
            await process.out(data)
    return status


async def true(process: Process) -> int:  # noqa: ARG001 - a Program
    """Succeed."""
    return 0


async def false(process: Process) -> int:  # noqa: ARG001 - a Program
    """Fail."""
    return 1


async def sleep(process: Process) -> int:
    """`sleep SECONDS`."""
    await anyio.sleep(_number(process, float, 1))
    return 0


async def pwd(process: Process) -> int:
    """Print the working directory."""
    await process.out(process.around.cwd + b"\n")
    return 0


async def env(process: Process) -> int:
    """`env [NAME=VALUE ...] [PROGRAM ARGS]`."""
    rest = process.argv[1:]
    while rest and "=" in rest[0]:
        name, _, value = rest.pop(0).partition("=")
        process.around.env[name] = value
    if not rest:
        await process.out("".join(f"{k}={v}\n" for k, v in process.around.env.items()))
        return 0
    try:
        program = find_program(process.table.fs, PROGRAMS, rest[0], process.around)
    except AetherError as error:
        await process.err(f"env: {error.message}\n")
        return 127 if error.code == "not_found" else 126
    process.argv = rest
    return await program(process)


async def printf(process: Process) -> int:
    r"""`printf FORMAT ARGS` with %s, %d, %% and the usual escapes."""
    shape, args = _unescape(process.argv[1]), process.argv[2:]
    while True:
        text, args = _format(shape, args)
        await process.out(text)
        if not args or "%" not in shape:
            return 0


async def id_(process: Process) -> int:
    """`id [-u|-g|-un]`."""
    who = process.around.who
    accounts = process.table.fs.accounts()
    flag = process.argv[1] if len(process.argv) > 1 else ""
    short = {"-u": str(who.uid), "-g": str(who.gid), "-un": accounts.user_name(who.uid)}
    if flag in short:
        await process.out(short[flag] + "\n")
        return 0
    groups = ",".join(
        f"{gid}({accounts.group_name(gid)})" for gid in sorted(who.groups | {who.gid})
    )
    await process.out(
        f"uid={who.uid}({accounts.user_name(who.uid)}) "
        f"gid={who.gid}({accounts.group_name(who.gid)}) groups={groups}\n"
    )
    return 0


async def head(process: Process) -> int:
    """`head [-n N | -c N] [FILE]`."""
    args = process.argv[1:]
    lines, size = 10, -1
    if args and args[0] in ("-n", "-c"):
        count = int(args[1])
        lines, size = (count, -1) if args[0] == "-n" else (-1, count)
        args = args[2:]
    elif args and args[0].startswith("-"):
        lines = int(args.pop(0)[1:])
    source = _operand(process, args[0] if args else "-")
    while lines != 0 and size != 0 and (data := await source.read()):
        if size > 0:
            data = data[:size]
            size -= len(data)
        else:
            pieces = data.split(b"\n")
            whole = min(lines, len(pieces) - 1)
            lines -= whole
            data = data if lines else b"\n".join(pieces[:whole]) + b"\n"
        await process.out(data)
    return 0


async def seq(process: Process) -> int:
    """`seq [FIRST] LAST`."""
    numbers = [int(arg) for arg in process.argv[1:]]
    first, last = (1, numbers[0]) if len(numbers) == 1 else (numbers[0], numbers[-1])
    for start in range(first, last + 1, 5000):
        await process.out("".join(f"{n}\n" for n in range(start, min(start + 5000, last + 1))))
    return 0


async def yes(process: Process) -> int:
    """`yes [WORD]`, until nobody reads."""
    block = os.fsencode(" ".join(process.argv[1:]) or "y") + b"\n"
    block *= max(65536 // len(block), 1)
    while True:
        await process.out(block)


def _operand(process: Process, name: str) -> Source:
    if name == "-":
        return process.around.stdin
    return open_source(process.table.fs, name, process.around)


def _number(process: Process, kind: Callable[[str], float], index: int) -> float:
    try:
        return kind(process.argv[index])
    except (IndexError, ValueError):
        raise AetherError("invalid_request", f"{process.argv[0]}: a number is missing") from None


def _unescape(text: str) -> str:
    pairs = {"\\n": "\n", "\\t": "\t", "\\r": "\r", "\\0": "\0", "\\a": "\a", "\\\\": "\\"}
    parts: list[str] = []
    at = 0
    while at < len(text):
        pair = text[at : at + 2]
        parts.append(pairs.get(pair, text[at]))
        at += 2 if pair in pairs else 1
    return "".join(parts)


def _format(shape: str, args: list[str]) -> tuple[str, list[str]]:
    rest = list(args)
    parts: list[str] = []
    pieces = shape.replace("%%", "\0").split("%")
    parts.append(pieces[0])
    parts += [(rest.pop(0) if rest else "") + piece[1:] for piece in pieces[1:]]
    return "".join(parts).replace("\0", "%"), rest


PROGRAMS: dict[str, Program] = {
    "echo": echo,
    "cat": cat,
    "true": true,
    "false": false,
    "sleep": sleep,
    "pwd": pwd,
    "env": env,
    "printf": printf,
    "id": id_,
    "head": head,
    "seq": seq,
    "yes": yes,
    "probe": probe.main,
}
PROGRAMS["sh"] = partial(sh, programs=PROGRAMS)
"""By name; `skeleton.py` puts each on the file system."""
