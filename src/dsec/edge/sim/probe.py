"""`/probe VERB ...`: the test payload, as native/probe is in a real sandbox."""

from __future__ import annotations

import os
import signal
from dataclasses import replace

import anyio
import anyio.abc
import msgspec

from dsec.edge.sim.pipes import Changed, MemoryStream
from dsec.edge.sim.processes import Process, Program
from dsec.edge.sim.terminal import Terminal

MIB = 1 << 20
BLOCK = 65536


async def main(process: Process) -> int:
    """Run the verb."""
    verb = VERBS.get(process.argv[1] if len(process.argv) > 1 else "")
    if verb is None:
        await process.err(f"probe: no such verb: {process.argv[1:2]}\n")
        return 64
    return await verb(process)


def _args(process: Process) -> list[str]:
    return process.argv[2:]


async def _echo(process: Process) -> int:
    await process.out(" ".join(_args(process)) + "\n")
    return 0


async def _cat(process: Process) -> int:
    while data := await process.read():
        await process.out(data)
    return 0


async def _exit(process: Process) -> int:
    return int(_args(process)[0]) & 255


async def _sleep(process: Process) -> int:
    await anyio.sleep(float(_args(process)[0]))
    return 0


async def _flood(process: Process) -> int:
    size = int(_args(process)[0])
    write = process.err if _args(process)[1:] == ["stderr"] else process.out
    block = bytes(range(97, 123)) * (BLOCK // 26 + 1)
    at = 0
    while at < size:
        shift = at % 26
        piece = block[shift : shift + min(BLOCK, size - at)]
        await write(piece)
        at += len(piece)
    return 0


async def _both(process: Process) -> int:
    await process.out("out\n")
    await process.err("err\n")
    return 0


async def _env(process: Process) -> int:
    env = process.around.env
    if not _args(process):
        await process.out("".join(f"{name}={value}\n" for name, value in env.items()))
        return 0
    name = _args(process)[0]
    if name not in env:
        return 1
    await process.out(env[name] + "\n")
    return 0


async def _cwd(process: Process) -> int:
    await process.out(process.around.cwd + b"\n")
    return 0


async def _id(process: Process) -> int:
    who = process.around.who
    groups = sorted(who.groups | {who.gid})
    said = msgspec.json.encode({"uid": who.uid, "gid": who.gid, "groups": groups})
    await process.out(said + b"\n")
    return 0


async def _tree(process: Process) -> int:
    await process.out(f"{process.pid}\n")
    depth = int(_args(process)[0])
    if depth > 0:
        _child(process, _tree, ["/probe", "tree", str(depth - 1)])
    else:
        _child(process, _daemon, ["/probe", "tree", "daemon"], orphan=True)
    await anyio.sleep_forever()
    return 0


async def _daemon(process: Process) -> int:
    await process.out(f"{process.pid}\n")
    await anyio.sleep_forever()
    return 0


def _child(process: Process, program: Program, argv: list[str], *, orphan: bool = False) -> Process:
    around = replace(process.around, env=dict(process.around.env))
    return process.table.spawn(
        program, argv, around, parent=process, new_group=orphan, orphan=orphan
    )


async def _ignore_term(process: Process) -> int:
    process.ignored |= {signal.SIGTERM, signal.SIGINT, signal.SIGHUP}
    await process.out("ready\n")
    await anyio.sleep_forever()
    return 0


async def _tty(process: Process) -> int:
    stdin = process.around.stdin
    if not isinstance(stdin, Terminal):
        await process.out("not a tty\n")
        return 0
    resized = Changed()
    process.handlers[signal.SIGWINCH] = resized.notify
    await process.out(f"tty {stdin.size.rows} {stdin.size.cols}\n")
    if _args(process) == ["watch"]:
        await resized.wait()
        await process.out(f"tty {stdin.size.rows} {stdin.size.cols}\n")
    return 0


async def _bytes(process: Process) -> int:
    await process.out(bytes(range(256)))
    return 0


async def _alloc(process: Process) -> int:
    size = int(_args(process)[0])
    for _ in range(size):
        process.table.allocate(process, MIB)
        await anyio.lowlevel.checkpoint()
    await process.out(f"{size}\n")
    return 0


async def _spin(process: Process) -> int:
    await anyio.sleep(float(_args(process)[0]))
    return 0


async def _listen(process: Process) -> int:
    accepted = process.table.ports.listen(process.pid, int(_args(process)[0]))
    await process.out("ready\n")
    async with anyio.create_task_group() as group:
        async for connection in accepted:
            group.start_soon(_serve_echo, connection)
    return 0


async def _serve_echo(connection: MemoryStream) -> None:
    try:
        async for data in connection:
            await connection.send(data)
        await connection.send_eof()
    except anyio.BrokenResourceError:
        pass
    finally:
        connection.abort()


async def _print_args(process: Process) -> int:
    parts = [os.fsencode(arg) for arg in _args(process)]
    await process.out(b"".join(b"%d:%s\n" % (len(part), part) for part in parts))
    return 0


async def _report(process: Process) -> int:
    who = process.around.who
    report = {
        "simulated": True,
        "pid": process.pid,
        "ppid": process.ppid,
        "uid": who.uid,
        "gid": who.gid,
        "cwd": os.fsdecode(process.around.cwd),
    }
    await process.out(msgspec.json.encode(report) + b"\n")
    return 0


async def _forkbomb(process: Process) -> int:
    made = 0
    try:
        for _ in range(int(_args(process)[0])):
            _child(process, _daemon_quietly, ["/probe", "forkbomb"])
            made += 1
    except OSError as error:
        await process.out(f"stopped at {made}: {error.strerror}\n")
        return 0
    await process.out(f"made {made}\n")
    return 0


async def _daemon_quietly(process: Process) -> int:  # noqa: ARG001 - a Program
    await anyio.sleep_forever()
    return 0


VERBS: dict[str, Program] = {
    "echo": _echo,
    "cat": _cat,
    "exit": _exit,
    "sleep": _sleep,
    "flood": _flood,
    "both": _both,
    "env": _env,
    "cwd": _cwd,
    "id": _id,
    "tree": _tree,
    "ignore-term": _ignore_term,
    "tty": _tty,
    "bytes": _bytes,
    "alloc": _alloc,
    "spin": _spin,
    "listen": _listen,
    "args": _print_args,
    "report": _report,
    "forkbomb": _forkbomb,
}
