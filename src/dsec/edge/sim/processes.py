"""The sandbox's process table: coroutines with ids, parents, groups, signals and descriptors."""

from __future__ import annotations

import errno
import logging
import os
import signal
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

import anyio
import anyio.abc
import anyio.lowlevel

from dsec.base.errors import Conflict
from dsec.edge.sim.errors import AetherError
from dsec.edge.sim.filesystem import FileSystem
from dsec.edge.sim.pipes import BrokenPipe, Changed
from dsec.edge.sim.ports import Ports
from dsec.edge.sim.streams import RingSink, Sink, Source
from dsec.edge.sim.users import Who

logger = logging.getLogger("dsec.edge.sim")

INIT = 1
IGNORED_BY_DEFAULT = frozenset(
    {0, signal.SIGCHLD, signal.SIGWINCH, signal.SIGCONT, signal.SIGURG}
    | {signal.SIGSTOP, signal.SIGTSTP, signal.SIGTTIN, signal.SIGTTOU}  # nothing is ever stopped
)
RSS_BYTES = 64 * 1024


class Tree:
    """All processes a command has started, however they hid: its cgroup."""

    def __init__(self) -> None:
        self.processes: set[Process] = set()
        self.oom_killed = False
        self._changed = Changed()

    def kill(self) -> None:
        """End them all."""
        for process in list(self.processes):
            process.signal(signal.SIGKILL)

    def left(self, process: Process) -> None:
        """One has ended."""
        self.processes.discard(process)
        self._changed.notify()

    async def wait_empty(self, beside: Process | None = None) -> None:
        """Wait until none is left, or only one that is not meant."""
        while self.processes - {beside}:
            await self._changed.wait()


@dataclass(kw_only=True)
class Surroundings:
    """What a process begins with, and what its children begin with."""

    who: Who
    env: dict[str, str]
    cwd: bytes
    stdin: Source
    stdout: Sink
    stderr: Sink
    tree: Tree


@dataclass(eq=False, kw_only=True)
class Process:
    """One simulated process."""

    pid: int
    ppid: int
    pgid: int
    argv: list[str]
    around: Surroundings
    table: ProcessTable
    ignored: set[int] = field(default_factory=set)
    handlers: dict[int, Callable[[], None]] = field(default_factory=dict)
    memory_bytes: int = RSS_BYTES
    scope: anyio.CancelScope = field(default_factory=anyio.CancelScope)
    ended: anyio.Event = field(default_factory=anyio.Event)
    death: int = 0
    """The signal that ended it."""
    status: int = 0
    """Its exit status, 128 + signal if one ended it."""

    def signal(self, number: int) -> None:
        """Deliver a signal."""
        if number == signal.SIGKILL:
            self._die(number)
        elif handler := self.handlers.get(number):
            handler()
        elif number not in self.ignored and number not in IGNORED_BY_DEFAULT:
            self._die(number)

    def _die(self, number: int) -> None:
        self.death = self.death or number
        self.scope.cancel()

    async def out(self, text: str | bytes) -> None:
        """Write to standard output."""
        await self.around.stdout.write(_raw(text))

    async def err(self, text: str | bytes) -> None:
        """Write to standard error."""
        await self.around.stderr.write(_raw(text))

    async def read(self, most: int = 65536) -> bytes:
        """Read from standard input."""
        return await self.around.stdin.read(most)


Program = Callable[[Process], Awaitable[int]]


class ProcessTable:
    """Who lives in the sandbox."""

    def __init__(
        self, group: anyio.abc.TaskGroup, fs: FileSystem, *, pids: int, memory_bytes: int
    ) -> None:
        self._group = group
        self.fs = fs
        self.ports = Ports()
        self.living: dict[int, Process] = {}
        self.oom_kills = 0
        self.memory_peak_bytes = 0
        self.memory_limit_bytes = memory_bytes
        self._pids = pids
        self._next_pid = 2

    def spawn(
        self,
        program: Program,
        argv: list[str],
        around: Surroundings,
        *,
        parent: Process | None = None,
        new_group: bool = False,
        orphan: bool = False,
    ) -> Process:
        """Start a process.

        Args:
            program: what it does.
            argv: as it sees it.
            around: its identity, directory, environment and descriptors; not shared afterwards.
            parent: who forks; None = aether.
            new_group: whether it leads a process group of its own (setsid).
            orphan: whether it has been left to process 1 (a double fork).

        Raises:
            OSError: EAGAIN, the pids limit is reached.
        """
        if len(self.living) + 1 >= self._pids:
            raise OSError(errno.EAGAIN, os.strerror(errno.EAGAIN))
        pid, self._next_pid = self._next_pid, self._next_pid + 1
        process = Process(
            pid=pid,
            ppid=INIT if parent is None or orphan else parent.pid,
            pgid=pid if parent is None or new_group else parent.pgid,
            argv=argv,
            around=around,
            table=self,
            ignored=set(parent.ignored) if parent else set(),
        )
        self.living[pid] = process
        around.tree.processes.add(process)
        around.stdout.hold()
        around.stderr.hold()
        self._group.start_soon(self._live, process, program)
        return process

    async def _live(self, process: Process, program: Program) -> None:
        try:
            with process.scope:
                await anyio.lowlevel.checkpoint()
                process.status = await program(process)
        except BrokenPipe:
            process.death = signal.SIGPIPE
        except AetherError as error:
            process.status = 1
            if isinstance(process.around.stderr, RingSink):
                await process.err(f"{process.argv[0]}: {error.message}\n")
        except Exception:  # a program gone wrong ends only itself, as in any system
            logger.exception("simulated program failed", extra={"argv": process.argv[:3]})
            process.status = 134
        finally:
            self._reap(process)

    def _reap(self, process: Process) -> None:
        if process.death:
            process.status = 128 + process.death
        del self.living[process.pid]
        self.ports.drop_all(process.pid)
        for child in self.living.values():
            if child.ppid == process.pid:
                child.ppid = INIT
        process.ended.set()
        process.around.stdout.release()
        process.around.stderr.release()
        process.around.tree.left(process)

    def kill_all(self, number: int = signal.SIGKILL) -> None:
        """Deliver a signal to everyone."""
        for process in list(self.living.values()):
            process.signal(number)

    def allocate(self, process: Process, size_bytes: int) -> None:
        """Let a process use memory; over the limit it is killed as the kernel would."""
        process.memory_bytes += size_bytes
        used = self.memory_bytes()
        self.memory_peak_bytes = max(self.memory_peak_bytes, min(used, self.memory_limit_bytes))
        if used > self.memory_limit_bytes:
            self.oom_kills += 1
            process.around.tree.oom_killed = True
            process.signal(signal.SIGKILL)

    def bound(self, pids: int, memory_bytes: int) -> None:
        """Have other limits. Raises Conflict: more memory is used than that; nothing has changed."""
        if (used := self.memory_bytes()) > memory_bytes:
            asked_mb, used_mb = memory_bytes >> 20, -(-used >> 20)
            raise Conflict(
                f"memory_mb: {asked_mb} would be less than the {used_mb} MiB that it uses",
                asked_mb=asked_mb,
                used_mb=used_mb,
            )
        self._pids, self.memory_limit_bytes = pids, memory_bytes

    def memory_bytes(self) -> int:
        """What all use together, process 1 included."""
        return RSS_BYTES + sum(p.memory_bytes for p in self.living.values())


def _raw(text: str | bytes) -> bytes:
    return os.fsencode(text) if isinstance(text, str) else text
