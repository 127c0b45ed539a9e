"""Commands, each run once: what was recorded is answered, what runs is attached to.

A command is recorded as begun before aether hears of it, and its end before the caller does. Its end
is heard by whoever waits for it; where nobody does (it was only started, its caller has left), by an
open `wait` on the connection, which costs an object while the command runs and nothing else. After a
connection was lost, or the edge killed, the open ones are asked for again when the sandbox is used
next: aether forgets none while fewer than 16,384 others have ended, and none can before that.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Iterator
from functools import partial
from typing import Literal, NamedTuple, TypeVar

import anyio
import msgspec

from dsec.base.errors import DsecError, NotFound, SandboxGone
from dsec.edge import commands
from dsec.edge.calls import Heard
from dsec.edge.channel import AetherChannel
from dsec.edge.charge import Charge
from dsec.edge.lifecycle.owner import Owner
from dsec.edge.recording import Known, Recording, Recordings
from dsec.edge.recording_values import OUTPUT_BYTES, bounded, clipped, digest_of
from dsec.trajectory.format import Begun, Ended
from dsec.trajectory.index import COMMAND, OK
from dsec.wire.sandbox import (
    Captured,
    CommandEvent,
    CommandResult,
    CommandSpec,
    CommandView,
    Exited,
    Gap,
    Output,
    Started,
)

logger = logging.getLogger("dsec.edge.recording_commands")

T = TypeVar("T")
Spawn = Callable[[Callable[[], Coroutine[object, object, None]]], None]


class Caller(NamedTuple):
    """Who asks, and how to say that the answer is an old one."""

    principal: str = ""
    from_record: Callable[[], None] = lambda: None


NOBODY = Caller()


class _Run(NamedTuple):
    """A command on its way."""

    recording: Recording
    command: str
    seq: int
    """0: it could not be recorded."""
    result: CommandResult | None = None
    """It is over, and was recorded."""


class RecordedCommands:
    """Commands of a node's sandboxes."""

    def __init__(self, recordings: Recordings, spawn: Spawn) -> None:
        self._recordings = recordings
        self._spawn = spawn

    async def run(
        self, owner: Owner, spec: CommandSpec, caller: Caller = NOBODY, charge: Charge | None = None
    ) -> CommandResult:
        """Run a command to its end, once; cancelled, the command goes on.

        Raises:
            Conflict: the id was used for another command. Else as aether does.
        """
        spec = commands.checked(spec, owner.record.image)
        run = await self._begin(owner, spec, caller.principal)
        if run.result is not None:
            caller.from_record()
            return await self._fuller(owner, run.result, charge)
        with self._followed(owner, run):
            result = await self._tried(owner, run, partial(commands.run, owner, spec, charge))
        await _end(run.recording, run.seq, result)
        return result

    async def start(self, owner: Owner, spec: CommandSpec, caller: Caller = NOBODY) -> CommandView:
        """Start a command, or find the run its id names. Raises as `run`."""
        spec = commands.checked(spec, owner.record.image)
        run = await self._begin(owner, spec, caller.principal)
        if run.result is not None:
            caller.from_record()
            return _view(run.result)
        with self._followed(owner, run):
            view = await self._tried(owner, run, partial(commands.start, owner, spec))
        self._hear(owner, run.recording, run.command)
        return view

    async def stream(
        self, owner: Owner, spec: CommandSpec, caller: Caller = NOBODY
    ) -> AsyncGenerator[CommandEvent, None]:
        """Run a command and report all it says. Raises as `run`."""
        view = await self.start(owner, spec, caller)
        async with contextlib.aclosing(self.events(owner, view.command_id, 0, 0)) as said:
            async for event in said:
                yield event

    async def result(
        self, owner: Owner, command: str, charge: Charge | None = None
    ) -> CommandResult:
        """Wait for a command's end. Raises NotFound."""
        recording = await self.of(owner)
        if recorded := await recording.recorded(COMMAND, command):
            return await self._fuller(owner, _result(*recorded), charge)
        place = recording.index.find(COMMAND, command)
        result = await commands.result(owner, command, charge)
        if place is not None:
            await _end(recording, place.seq, result)
        return result

    async def view(self, owner: Owner, command: str) -> CommandView:
        """Look at a command, also at one that aether has forgotten. Raises NotFound."""
        recording = await self.of(owner)
        try:
            return await commands.view(owner, command)
        except NotFound:
            if recorded := await recording.recorded(COMMAND, command):
                return _view(_result(*recorded))
            raise

    async def events(
        self, owner: Owner, command: str, stdout_from: int | None, stderr_from: int | None
    ) -> AsyncGenerator[CommandEvent, None]:
        """What a command says, from given offsets (None = from now). Raises NotFound."""
        recording = await self.of(owner)
        said = commands.events(owner, command, stdout_from, stderr_from)
        async with contextlib.aclosing(said):
            try:
                async for event in said:
                    yield event
            except NotFound:
                recorded = await recording.recorded(COMMAND, command)
                if recorded is None:
                    raise
                for event in _events(_result(*recorded), stdout_from, stderr_from):
                    yield event

    async def of(self, owner: Owner) -> Recording:
        """A sandbox's trajectory, with the ends of what runs asked for. Raises SandboxGone."""
        recording = await self._recordings.of(owner)
        if recording.heard is not owner.channel and owner.channel is not None:
            recording.heard = owner.channel
            for command in recording.index.running:
                self._hear(owner, recording, command)
        return recording

    async def _begin(self, owner: Owner, spec: CommandSpec, principal: str) -> _Run:
        """Find a command, or record that it begins."""
        recording = await self.of(owner)
        command = spec.command_id or ""
        facts = msgspec.to_builtins(spec)
        del facts["command_id"]
        digest = digest_of(facts)
        known = await recording.known(COMMAND, command, digest)
        if known and (known.ended or recording.index.is_open(known.seq)):
            return _Run(recording, command, known.seq, _result_if_over(known))
        # One that is closed without its own end was never started: it begins now.
        seq = await recording.attempt(
            COMMAND, ident=command, caller=principal, args=bounded(facts), digest=digest
        )
        return _Run(recording, command, seq)

    @contextlib.contextmanager
    def _followed(self, owner: Owner, run: _Run) -> Iterator[None]:
        """Whoever leaves before a command's end leaves an ear behind."""
        try:
            yield
        except anyio.get_cancelled_exc_class():
            self._hear(owner, run.recording, run.command)
            raise

    async def _tried(self, owner: Owner, run: _Run, work: Callable[[], Awaitable[T]]) -> T:
        with _trying(run):
            try:
                return await work()
            except SandboxGone:
                raise
            except DsecError as exc:
                await self._settle(owner, run, exc)
                raise

    async def _settle(self, owner: Owner, run: _Run, error: DsecError) -> None:
        """It failed: if aether does not know it, it never ran and its id is free again."""
        try:
            await commands.view(owner, run.command)
        except NotFound:
            if run.recording.trying[run.seq] == 1:  # else another caller may have it started yet
                await run.recording.end(run.seq, error.code, {"message": error.message})
        except DsecError:
            run.recording.heard = None  # asked for again when the sandbox is used next
        else:
            self._hear(owner, run.recording, run.command)

    def _hear(self, owner: Owner, recording: Recording, command: str) -> None:
        """Have a running command's end recorded when it comes; asked for once on a connection."""
        place, channel = recording.index.find(COMMAND, command), owner.channel
        if place is None or not recording.index.is_open(place.seq) or channel is None:
            return
        if recording.hearing.get(place.seq) is channel:
            return
        try:
            then = partial(self._heard, owner, recording, place.seq, channel)
            channel.hear("wait", {"command_id": command}, then, OUTPUT_BYTES)
            recording.hearing[place.seq] = channel
        except DsecError:
            recording.heard = None

    def _heard(
        self, owner: Owner, recording: Recording, seq: int, channel: AetherChannel, heard: Heard
    ) -> None:
        if recording.hearing.get(seq) is channel:
            del recording.hearing[seq]
        if isinstance(heard.error, NotFound):
            return  # it was never started: the same id again starts it
        if heard.error is not None:
            recording.heard = None
            return
        try:
            result = commands.ended(owner, heard.collected, heard.dropped)
            self._spawn(partial(_end, recording, seq, result))
        except Exception:  # what a sandbox says may make no sense
            logger.exception("an end was not understood", extra={"sandbox_id": owner.record.id})

    async def _fuller(
        self, owner: Owner, recorded: CommandResult, charge: Charge | None
    ) -> CommandResult:
        """A recorded result, or aether's where that still has more of the output."""
        if not recorded.stdout.dropped_bytes and not recorded.stderr.dropped_bytes:
            return recorded
        try:
            kept = await commands.result(owner, recorded.command_id, charge)
        except DsecError:
            return recorded
        return kept if _missing(kept) < _missing(recorded) else recorded


@contextlib.contextmanager
def _trying(run: _Run) -> Iterator[None]:
    """Count those who ask aether for a command: only the last can say that it never ran."""
    trying = run.recording.trying
    trying[run.seq] = trying.get(run.seq, 0) + 1
    try:
        yield
    finally:
        trying[run.seq] -= 1
        if not trying[run.seq]:
            del trying[run.seq]


def _missing(result: CommandResult) -> int:
    return result.stdout.dropped_bytes + result.stderr.dropped_bytes


async def _end(recording: Recording, seq: int, result: CommandResult) -> None:
    facts = msgspec.to_builtins(_view(result))
    output = clipped(result.stdout), clipped(result.stderr)
    await recording.end(seq, OK, facts, output=output)


def _view(result: CommandResult) -> CommandView:
    names = CommandView.__struct_fields__
    return CommandView(**{name: getattr(result, name) for name in names})


def _result_if_over(known: Known) -> CommandResult | None:
    if known.begun is None or known.ended is None:
        return None
    return _result(known.begun, known.ended)


def _result(begun: Begun, ended: Ended) -> CommandResult:
    facts = {"command_id": begun.id, **ended.result}
    result = msgspec.convert(facts, CommandResult)
    result.stdout = ended.stdout or _left_out(result.stdout_bytes)
    result.stderr = ended.stderr or _left_out(result.stderr_bytes)
    return result


def _left_out(size: int) -> Captured:
    return Captured(dropped_bytes=size)


def _events(
    result: CommandResult, stdout_from: int | None, stderr_from: int | None
) -> list[CommandEvent]:
    """What a recorded command said, as if it were heard now."""
    view = _view(result)
    said: list[CommandEvent] = [Started(command=view)]
    if stdout_from is not None:
        said += _pieces("stdout", result.stdout, stdout_from)
    if stderr_from is not None:
        said += _pieces("stderr", result.stderr, stderr_from)
    return [*said, Exited(command=view)]


def _pieces(name: Literal["stdout", "stderr"], kept: Captured, start: int) -> list[CommandEvent]:
    said: list[CommandEvent] = []
    middle = len(kept.head) + kept.dropped_bytes
    if head := kept.head[start:]:
        said.append(Output(stream=name, offset=start, data=head))
    at = max(start, len(kept.head))
    if kept.dropped_bytes and at < middle:
        said.append(Gap(stream=name, offset=middle, dropped_bytes=middle - at))
        at = middle
    if tail := kept.tail[max(0, at - middle) :]:
        said.append(Output(stream=name, offset=at, data=tail))
    return said
