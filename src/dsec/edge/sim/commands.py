"""Commands of a simulated sandbox: start, limits, output, end; and what is remembered of them."""

from __future__ import annotations

import os
import shlex
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import anyio
import anyio.abc

from dsec.edge.sim.errors import AetherError, invalid, not_found
from dsec.edge.sim.filesystem import Directory
from dsec.edge.sim.lookup import DEFAULT_PATH, find_program
from dsec.edge.sim.pipes import BrokenPipe, BytePipe, Changed
from dsec.edge.sim.processes import Process, ProcessTable, Program, Surroundings, Tree
from dsec.edge.sim.rings import Ring
from dsec.edge.sim.streams import NullSource, PipeSource, RingSink, Source, TerminalSink
from dsec.edge.sim.terminal import Terminal
from dsec.edge.sim.users import Who
from dsec.wire.sandbox import CommandSpec, CommandView

DRAIN_S = 0.25
"""How long a background child that keeps the output open may delay a command's end."""
KEPT_RECORDS = 16_384
KEPT_OUTPUT_BYTES = 16 << 20


@dataclass(frozen=True, kw_only=True)
class Rules:
    """What the sandbox gives every command."""

    env: Mapping[str, str]
    workdir: str
    user: str
    default_timeout_s: float = 3600.0
    max_timeout_s: float = 86400.0
    output_limit_bytes: int = 1 << 20
    max_running: int = 256


class Command:
    """One run. Whoever executes it calls `begin` and `finish`."""

    def __init__(self, spec: CommandSpec, rules: Rules, now: float) -> None:
        self.spec = spec
        self.id = spec.command_id or ""
        limit = spec.output_limit_bytes
        limit = rules.output_limit_bytes if limit is None else limit
        self.changed = Changed()
        """Output of either stream, or the end."""
        self.stdout = Ring(limit, self.changed)
        self.stderr = Ring(limit, self.changed)
        self.tree = Tree()
        self.leader: Process | None = None
        """Absent for a session's command: its shell leads."""
        self.interrupt: Callable[[], None] = lambda: None
        """Ends what runs outside its tree: a session's shell goes back to waiting."""
        self.pid = 0
        self.death = 0
        self.stdin: BytePipe | Terminal | None = None
        self.fed = 0
        """Bytes of its standard input that were accepted so far."""
        self.timeout_s = min(spec.timeout_s or rules.default_timeout_s, rules.max_timeout_s)
        self.ended = anyio.Event()
        self.drained = Changed()
        self.open_sinks = 0
        self.exit_code: int | None = None
        self.timed_out = self.killed = self.session_reset = False
        self._begun_wall = now
        self._begun = anyio.current_time()
        self._duration = 0.0

    @property
    def running(self) -> bool:
        """Whether its first process, or its output, is still going on."""
        return not self.ended.is_set()

    def descriptors(self) -> tuple[Source, RingSink, RingSink]:
        """Standard streams for its first process."""
        if self.spec.pty is not None:
            terminal = Terminal(self.spec.pty, self.stdout, self.signal)
            self.stdin = terminal
            screen = TerminalSink(self.stdout, self._sink_closed)
            self.open_sinks = 1
            return terminal, screen, screen
        self.open_sinks = 2
        out = RingSink(self.stdout, self._sink_closed)
        err = RingSink(self.stderr, self._sink_closed)
        if self.spec.stdin == "null":
            return NullSource(), out, err
        self.stdin = BytePipe()
        return PipeSource(self.stdin), out, err

    def _sink_closed(self) -> None:
        self.open_sinks -= 1
        self.drained.notify()

    def signal(self, number: int) -> None:
        """Deliver a signal to its process group."""
        for process in list(self.tree.processes):
            if self.leader is None or process.pgid == self.leader.pgid:
                process.signal(number)

    def finish(self, status: int, death: int) -> None:
        """It is over; everything it said is in the rings."""
        self.exit_code = status
        self.death = death
        self._duration = anyio.current_time() - self._begun
        self.stdout.close()
        self.stderr.close()
        if isinstance(self.stdin, BytePipe):
            self.stdin.close_reader()
        self.ended.set()
        self.changed.notify()

    def view(self) -> CommandView:
        """As it stands."""
        return CommandView(
            command_id=self.id,
            argv=self.spec.argv or [self.spec.shell or ""],
            session=self.spec.session or "",
            running=self.running,
            pid=self.pid,
            started_at=self._begun_wall,
            exit_code=self.exit_code,
            signal=self.death or None,
            timed_out=self.timed_out,
            oom_killed=self.tree.oom_killed,
            killed=self.killed,
            duration_s=anyio.current_time() - self._begun if self.running else self._duration,
            timeout_s=self.timeout_s,
            session_reset=self.session_reset,
            stdout_bytes=self.stdout.total,
            stderr_bytes=self.stderr.total,
        )

    async def feed(self, data: bytes) -> None:
        """Write to its standard input.

        Raises:
            AetherError: `conflict`, it has none or has ended.
        """
        if self.stdin is None or not self.running:
            raise AetherError("conflict", f"command {self.id} has no open standard input")
        if isinstance(self.stdin, Terminal):
            self.stdin.feed(data)
            return
        try:
            await self.stdin.write(data)
        except BrokenPipe:
            raise AetherError("conflict", f"command {self.id} reads no more") from None

    def end_input(self) -> None:
        """Close its standard input."""
        if isinstance(self.stdin, Terminal):
            self.stdin.hang_up()
        elif self.stdin is not None:
            self.stdin.close_writer()


class Commands:
    """All commands of a sandbox, ended ones included."""

    def __init__(
        self,
        group: anyio.abc.TaskGroup,
        table: ProcessTable,
        programs: Mapping[str, Program],
        rules: Rules,
    ) -> None:
        self._group = group
        self._table = table
        self._programs = programs
        self.rules = rules
        self.by_id: dict[str, Command] = {}

    def find(self, command_id: str) -> Command:
        """Look one up.

        Raises:
            AetherError: `not_found`, kind `command`.
        """
        if command_id not in self.by_id:
            raise not_found("command", f"no command {command_id!r}")
        return self.by_id[command_id]

    @property
    def busy(self) -> bool:
        """Whether any runs."""
        return any(command.running for command in self.by_id.values())

    def start(self, spec: CommandSpec) -> Command:
        """Start, or find the run this id already names.

        Raises:
            AetherError: the request is wrong, or something it names is missing.
        """
        known = self.by_id.get(spec.command_id or "")
        if known is not None:
            return known
        check(spec)
        around = self.surroundings(user=spec.user, cwd=spec.cwd, env=spec.env)
        argv = spec.argv or ["/bin/sh", "-c", spec.shell or ""]
        program = find_program(self._table.fs, self._programs, argv[0], around)
        command = self.register(spec)
        around.stdin, around.stdout, around.stderr = command.descriptors()
        if spec.pty is not None:
            around.env.setdefault("TERM", "xterm-256color")
        around.tree = command.tree
        try:
            command.leader = self._table.spawn(program, argv, around)
            command.pid = command.leader.pid
        except OSError as error:
            del self.by_id[command.id]
            raise AetherError(
                "conflict", f"cannot start: {error.strerror}", errno=error.errno or 0
            ) from None
        self._group.start_soon(self.supervise, command, command.leader)
        return command

    def register(self, spec: CommandSpec) -> Command:
        """A record for a command about to start.

        Raises:
            AetherError: `conflict`, as many run as may.
        """
        running = sum(command.running for command in self.by_id.values())
        if running >= self.rules.max_running:
            raise AetherError("conflict", f"{running} commands are running, no more are allowed")
        command = Command(spec, self.rules, self._table.fs.now())
        self.by_id[command.id] = command
        self._forget()
        return command

    def surroundings(
        self, *, user: str | None, cwd: str | None, env: Mapping[str, str]
    ) -> Surroundings:
        """Identity, directory and environment for a first process.

        Raises:
            AetherError: no such user or directory.
        """
        who = self._table.fs.accounts().find(user or self.rules.user)
        path = self._directory(os.fsencode(cwd or self.rules.workdir or "/"), who)
        base = {
            "PATH": DEFAULT_PATH,
            "HOME": who.home,
            "USER": who.name,
            "LOGNAME": who.name,
        }
        nothing = RingSink(Ring(0), lambda: None)
        return Surroundings(
            who=who,
            env={**base, **self.rules.env, **env},
            cwd=path,
            stdin=NullSource(),
            stdout=nothing,
            stderr=nothing,
            tree=Tree(),
        )

    def _directory(self, path: bytes, who: Who) -> bytes:
        try:
            node, place = self._table.fs.find(path, who=who)
        except AetherError as error:
            if error.code == "not_found":
                raise not_found("cwd", f"no directory {os.fsdecode(path)}") from None
            raise
        if not isinstance(node, Directory):
            raise invalid(f"cwd {os.fsdecode(path)} is not a directory")
        return place.path

    async def supervise(self, command: Command, leader: Process) -> None:
        """Hold a command to its time and see it to its end."""
        with anyio.move_on_after(command.timeout_s):
            await leader.ended.wait()
        if not leader.ended.is_set():
            command.timed_out = True
            command.tree.kill()
            await leader.ended.wait()
        await self.drain(command)
        command.finish(leader.status, leader.death)

    async def drain(self, command: Command) -> None:
        """Let output come in; a killed tree to its end, a background child for a moment."""
        if command.timed_out or command.killed:
            await command.tree.wait_empty()
        with anyio.move_on_after(DRAIN_S):
            while command.open_sinks > 0:
                await command.drained.wait()

    async def kill(self, command: Command) -> None:
        """End its whole tree, also what it left in the background."""
        if command.running:
            command.killed = True
        command.tree.kill()
        command.interrupt()
        await command.tree.wait_empty()
        await command.ended.wait()

    def _forget(self) -> None:
        ended = [command for command in self.by_id.values() if not command.running]
        for command in ended[: max(len(self.by_id) - KEPT_RECORDS, 0)]:
            del self.by_id[command.id]
        held = sum(c.stdout.held + c.stderr.held for c in ended)
        for command in ended:
            if held <= KEPT_OUTPUT_BYTES:
                break
            held -= command.stdout.held + command.stderr.held
            command.stdout.release()
            command.stderr.release()


def check(spec: CommandSpec) -> None:
    """Refuse what makes no sense.

    Raises:
        AetherError: `invalid_request`.
    """
    if (spec.argv is None) == (spec.shell is None):
        raise invalid("exactly one of argv and shell must be given")
    if spec.argv is not None and not spec.argv:
        raise invalid("argv is empty")
    texts = [*(spec.argv or []), spec.shell or "", *spec.env, *spec.env.values()]
    if any("\0" in text for text in texts):
        raise invalid("a NUL byte in an argument or in the environment")
    if any("=" in name or not name for name in spec.env):
        raise invalid("the name of an environment variable is empty or holds =")


def text_of(spec: CommandSpec) -> str:
    """A command as text for a session's shell."""
    return spec.shell if spec.shell is not None else shlex.join(spec.argv or [])
