"""Persistent shells: one process per session that keeps directory and variables between commands."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import anyio
import anyio.abc

from dsec.edge.sim.builtins import BUILTINS
from dsec.edge.sim.commands import Command, Commands, check, text_of
from dsec.edge.sim.errors import AetherError, invalid, not_found
from dsec.edge.sim.pipes import Mailbox
from dsec.edge.sim.processes import Process, ProcessTable, Program, Tree
from dsec.edge.sim.shell import Shell, ShellExit
from dsec.wire.sandbox import CommandSpec, SessionSpec, SessionView

KILLED = 9


@dataclass(eq=False)
class Job:
    """One command in a session's shell."""

    command: Command
    scope: anyio.CancelScope = field(default_factory=anyio.CancelScope)
    done: anyio.Event = field(default_factory=anyio.Event)
    status: int = 128 + KILLED
    left: bool = False
    """Whether the shell ended with it."""


class Session:
    """A shell and what it was opened with."""

    def __init__(self, spec: SessionSpec, shell: Process, jobs: Mailbox[Job]) -> None:
        self.spec = spec
        self.id = spec.session_id or ""
        self.shell = shell
        self.jobs = jobs
        self.busy = False
        self.trees: list[Tree] = []
        """Of its commands, while anything of them lives."""

    def view(self) -> SessionView:
        """As it stands."""
        return SessionView(
            session_id=self.id,
            pid=self.shell.pid,
            busy=self.busy,
            user=self.shell.around.who.name,
        )


class Sessions:
    """All sessions of a sandbox."""

    def __init__(
        self,
        group: anyio.abc.TaskGroup,
        table: ProcessTable,
        programs: Mapping[str, Program],
        commands: Commands,
    ) -> None:
        self._group = group
        self._table = table
        self._programs = programs
        self._commands = commands
        self.by_id: dict[str, Session] = {}

    def open(self, spec: SessionSpec) -> Session:
        """Open, or find the session this id already names.

        Raises:
            AetherError: no such user or directory.
        """
        known = self.by_id.get(spec.session_id or "")
        if known is None:
            shell, jobs = self._shell(spec)
            known = self.by_id[spec.session_id or ""] = Session(spec, shell, jobs)
        return known

    def _shell(self, spec: SessionSpec) -> tuple[Process, Mailbox[Job]]:
        around = self._commands.surroundings(user=spec.user, cwd=spec.cwd, env=spec.env)
        jobs: Mailbox[Job] = Mailbox()

        async def live(process: Process) -> int:
            return await self._serve(process, jobs)

        try:
            return self._table.spawn(live, [spec.shell or "/bin/sh"], around), jobs
        except OSError as error:
            raise AetherError("conflict", f"cannot start a shell: {error.strerror}") from None

    async def _serve(self, process: Process, jobs: Mailbox[Job]) -> int:
        shell = Shell(process, self._programs, BUILTINS)
        async for job in jobs:
            try:
                await self._work(shell, job)
            except ShellExit as leave:
                job.status = leave.status
                job.left = True
                return leave.status
            finally:
                job.done.set()
        return 0

    async def _work(self, shell: Shell, job: Job) -> None:
        around = shell.process.around
        idle = around.stdin, around.stdout, around.stderr, around.tree
        stdin, stdout, stderr = job.command.descriptors()
        around.stdin, around.stdout, around.stderr = stdin, stdout.hold(), stderr.hold()
        around.tree = job.command.tree
        try:
            with job.scope:
                status = await shell.run_text(text_of(job.command.spec))
                await anyio.lowlevel.checkpoint()  # it may have killed itself
                job.status = status
        finally:
            around.stdin, around.stdout, around.stderr, around.tree = idle
            stdout.release()
            stderr.release()

    def find(self, session_id: str) -> Session:
        """Look one up.

        Raises:
            AetherError: `not_found`, kind `session`.
        """
        if session_id not in self.by_id:
            raise not_found("session", f"no session {session_id!r}")
        return self.by_id[session_id]

    def start(self, spec: CommandSpec) -> Command:
        """Run a command in its session's shell, or find the run its id already names.

        Raises:
            AetherError: `conflict`, the session is busy.
        """
        known = self._commands.by_id.get(spec.command_id or "")
        if known is not None:
            return known
        check(spec)
        session = self.find(spec.session or "")
        if spec.cwd is not None or spec.user is not None or spec.env or spec.pty is not None:
            raise invalid("a session's command has the session's cwd, env, user and no pty")
        if session.busy:
            raise AetherError("conflict", f"session {session.id} is busy")
        if session.shell.ended.is_set():
            session.shell, session.jobs = self._shell(session.spec)
        command = self._commands.register(spec)
        job = Job(command)
        command.pid = session.shell.pid
        command.interrupt = job.scope.cancel
        session.busy = True
        session.trees = [t for t in session.trees if t.processes] + [command.tree]
        session.jobs.put(job)
        self._group.start_soon(self._supervise, session, job)
        return command

    async def _supervise(self, session: Session, job: Job) -> None:
        command = job.command
        with anyio.move_on_after(command.timeout_s):
            await job.done.wait()
        if not job.done.is_set():
            command.timed_out = True
            command.tree.kill()
            job.scope.cancel()
            await job.done.wait()
        await self._commands.drain(command)
        if job.left or session.shell.scope.cancel_called:
            command.session_reset = True
            await session.shell.ended.wait()
        session.busy = False
        cancelled = job.scope.cancelled_caught or session.shell.death
        command.finish(job.status, KILLED if cancelled else 0)

    async def close(self, session: Session) -> None:
        """End its shell and every process its commands started."""
        self.by_id.pop(session.id, None)
        for tree in [*session.trees, session.shell.around.tree]:
            tree.kill()
        session.shell.signal(KILLED)
        await session.shell.ended.wait()
        for tree in session.trees:
            await tree.wait_empty()
