"""Commands and sessions of one sandbox, in terms of its channel."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Mapping
from types import MappingProxyType
from typing import Any, TypeVar

import anyio
import msgspec

from dsec.base.errors import DeadlineExceeded, InvalidRequest, Unavailable
from dsec.base.ids import command_id, mint_command_id, mint_session_id, session_id
from dsec.edge.calls import Collected
from dsec.edge.channel import AetherChannel, Data
from dsec.edge.charge import Charge
from dsec.edge.lifecycle.owner import Owner
from dsec.wire.frames import Channel
from dsec.wire.public_v1 import ImageView
from dsec.wire.sandbox import (
    Captured,
    CommandEvent,
    CommandResult,
    CommandSpec,
    CommandView,
    Exited,
    Gap,
    Output,
    Process,
    SessionSpec,
    SessionView,
    Started,
)

T = TypeVar("T")

CALL_DEADLINE_S = 60.0
"""For what aether answers at once."""
RUN_GRACE_S = 120.0
"""Beyond a command's own limit, which aether enforces: killing takes its time."""
RUN_MAX_S = 86400.0
MAX_OOM_REMEMBERED = 1024
KILLED = 128 + 9

_view = msgspec.msgpack.Decoder(CommandView, strict=False)
_views = msgspec.msgpack.Decoder(list[CommandView], strict=False)
_result = msgspec.msgpack.Decoder(CommandResult, strict=False)
_session = msgspec.msgpack.Decoder(SessionView, strict=False)
_sessions = msgspec.msgpack.Decoder(list[SessionView], strict=False)
_processes = msgspec.msgpack.Decoder(list[Process], strict=False)


class _Lengths(msgspec.Struct):
    head_bytes: int | None = None
    tail_bytes: int | None = None


class _Sent(msgspec.Struct):
    """How much of a result's output came before it as data."""

    stdout: _Lengths
    stderr: _Lengths


_sent = msgspec.msgpack.Decoder(_Sent, strict=False)


@contextlib.contextmanager
def deadline(seconds: float, what: str) -> Iterator[None]:
    """Bound the waiting for a sandbox.

    Raises:
        DeadlineExceeded: it took longer.
    """
    try:
        with anyio.fail_after(seconds):
            yield
    except TimeoutError:
        raise DeadlineExceeded(f"{what} took over {seconds:.0f} s", seconds=seconds) from None


def checked(spec: CommandSpec, image: ImageView) -> CommandSpec:
    """A command's specification with an id, and what the shapes cannot say checked.

    Raises:
        InvalidRequest: not exactly one of argv and shell, or a malformed id, or the image's own
            program is asked for and it names none.
    """
    if spec.entrypoint:
        spec = _with_entrypoint(spec, image)
    if (spec.argv is None) == (spec.shell is None):
        raise InvalidRequest("a command has either argv or shell")
    if spec.argv is not None and not (spec.argv and spec.argv[0]):
        raise InvalidRequest("argv names no program")
    if spec.session is not None:
        session_id(spec.session)
    given = spec.command_id
    spec.command_id = mint_command_id() if given is None else command_id(given)
    return spec


def _with_entrypoint(spec: CommandSpec, image: ImageView) -> CommandSpec:
    """As Docker has it: arguments take the place of Cmd, behind Entrypoint."""
    if spec.shell is not None:
        raise InvalidRequest("entrypoint goes with argv, not with shell")
    argv = [*image.entrypoint, *(image.cmd if spec.argv is None else spec.argv)]
    if not argv:
        raise InvalidRequest(f"image {image.name} names no program of its own")
    return msgspec.structs.replace(spec, argv=argv, entrypoint=False)


async def start(owner: Owner, spec: CommandSpec) -> CommandView:
    """Start a command, or find the run its id names. Raises as aether does."""
    return await _ask(owner, "start", msgspec.to_builtins(checked(spec, owner.record.image)), _view)


async def run(owner: Owner, spec: CommandSpec, charge: Charge | None = None) -> CommandResult:
    """Run a command to its end; cancelled, the command goes on. `charge` holds its output."""
    args = msgspec.to_builtins(checked(spec, owner.record.image))
    return await _run(owner, "run", args, spec.timeout_s, charge)


async def result(owner: Owner, command: str, charge: Charge | None = None) -> CommandResult:
    """Wait for a command's end. `charge` holds its output."""
    return await _run(owner, "wait", {"command_id": command}, None, charge)


async def view(owner: Owner, command: str) -> CommandView:
    """Look at a command."""
    return judged(owner, await _ask(owner, "view", {"command_id": command}, _view))


async def views(owner: Owner) -> list[CommandView]:
    """All commands it remembers, oldest first."""
    return [judged(owner, found) for found in await _list(owner, "list", _views)]


async def kill(owner: Owner, command: str) -> CommandView:
    """Kill a command's whole tree; harmless twice."""
    return await _ask(owner, "kill", {"command_id": command}, _view)


async def signal(owner: Owner, command: str, number: int) -> None:
    """Send a signal to a command's process group."""
    await _tell(owner, "signal", {"command_id": command, "signal": number})


async def resize(owner: Owner, command: str, rows: int, cols: int) -> None:
    """Give a command's terminal another size."""
    await _tell(owner, "resize", {"command_id": command, "rows": rows, "cols": cols})


async def feed(
    owner: Owner,
    command: str,
    data: AsyncIterator[bytes],
    *,
    eof: bool,
    offset: int | None = None,
) -> None:
    """Write to a command's standard input as it takes it.

    Args:
        owner: of its sandbox.
        command: its id.
        data: what to write.
        eof: whether the input ends after it.
        offset: where in all of the input it begins; what was taken before is skipped.

    Raises:
        Conflict: it takes no input, or bytes before `offset` are missing (kind offset).
    """
    args = {"command_id": command, "eof": eof, "offset": offset}
    async with owner.use() as channel:
        async with channel.open("stdin", args) as stream:
            # A command may take its time: the sandbox is in use for as long as it runs anyway.
            await stream.send_all(data, stall_s=None)
            await stream.finish()


async def events(
    owner: Owner, command: str, stdout_from: int | None, stderr_from: int | None
) -> AsyncGenerator[CommandEvent, None]:
    """What a command says, from given offsets (None = from now); closed, the command goes on."""
    args = {"command_id": command, "stdout_from": stdout_from, "stderr_from": stderr_from}
    async with owner.use() as channel:
        async with channel.open("attach", args) as stream:
            offsets: dict[int, int] = {
                Channel.STDOUT: stdout_from or 0,
                Channel.STDERR: stderr_from or 0,
            }
            async for item in stream:
                if isinstance(item, Data):
                    at = offsets[item.channel]
                    offsets[item.channel] = at + len(item.data)
                    yield Output(stream=_name(item.channel), offset=at, data=item.data)
                elif isinstance(item, dict) and (event := _event(item)):
                    yield await _tracked(owner, event, offsets, args)


async def open_session(owner: Owner, spec: SessionSpec) -> SessionView:
    """Open a persistent shell."""
    given = spec.session_id
    spec.session_id = mint_session_id() if given is None else session_id(given)
    return await _ask(owner, "session_open", msgspec.to_builtins(spec), _session)


async def close_session(owner: Owner, session: str) -> None:
    """End a session and all it runs."""
    await _tell(owner, "session_close", {"session_id": session})


async def sessions(owner: Owner) -> list[SessionView]:
    """Sessions that are open."""
    return await _list(owner, "session_list", _sessions)


async def processes(owner: Owner) -> list[Process]:
    """Processes of the sandbox, by the ids it sees."""
    return await _list(owner, "processes", _processes)


async def any_running(channel: AetherChannel) -> tuple[bool, float]:
    """Whether a command runs, and when (wall time) the last one ended, 0 if none has.

    For the idle clock: it does not count as use.
    """
    answer = await channel.collect("list")
    found = _join(answer, _views)
    ended = [c.started_at + c.duration_s for c in found if not c.running]
    return any(c.running for c in found), max(ended, default=0.0)


def judged(owner: Owner, command: CommandView, *, just_ended: bool = False) -> CommandView:
    """Add what only the outside knows of it: what the memory limit killed, what the store withheld.

    A v1 group's kill counter cannot be read from within, so it is read here when a command's end is
    told, and the command whose end told of a rise is remembered. Of two that end at once the wrong
    one may be named.
    """
    if command.running:
        return command
    command.data_unavailable = owner.data_failed_since(command.started_at)
    if command.oom_killed:
        return command
    if command.command_id in owner.oom_commands:
        command.oom_killed = True
    elif (just_ended or command.exit_code == KILLED) and owner.oom_kill_seen():
        command.oom_killed = True
        owner.oom_commands = [*owner.oom_commands[-MAX_OOM_REMEMBERED:], command.command_id]
    return command


async def _run(
    owner: Owner,
    method: str,
    args: dict[str, Any],
    timeout_s: float | None,
    charge: Charge | None,
) -> CommandResult:
    async with owner.use() as channel:
        limit_s = min(timeout_s or RUN_MAX_S, RUN_MAX_S) + RUN_GRACE_S
        with channel.within(limit_s, "the command"):
            answer = await channel.collect(method, args, charge)
        return ended(owner, answer)


def ended(
    owner: Owner, answer: Collected, dropped: Mapping[int, int] = MappingProxyType({})
) -> CommandResult:
    """A command's end as aether told it.

    Args:
        owner: of its sandbox.
        answer: what came.
        dropped: bytes taken out of the middle of each channel's data meanwhile.
    """
    result = _result.decode(answer.result)
    if answer.data:
        lengths = _sent.decode(answer.result)
        for channel, kept, sent in (
            (Channel.STDOUT, result.stdout, lengths.stdout),
            (Channel.STDERR, result.stderr, lengths.stderr),
        ):
            data, less = answer.data.pop(channel, None), dropped.get(channel, 0)
            _fill(kept, data, len(data) // 2 if data and less else sent.head_bytes or 0)
            kept.dropped_bytes += less
    judged(owner, result, just_ended=True)
    return result


def _fill(kept: Captured, data: bytearray | None, head: int) -> None:
    """Output too large for one frame came as data: head and tail in one piece."""
    if data is None:
        return
    with memoryview(data) as whole:  # one copy: it may be large
        kept.head, kept.tail = bytes(whole[:head]), bytes(whole[head:])


def _event(item: dict[str, Any]) -> CommandEvent | None:
    if "started" in item:
        return Started(command=msgspec.convert(item["started"], CommandView, strict=False))
    if "exited" in item:
        return Exited(command=msgspec.convert(item["exited"], CommandView, strict=False))
    if gap := item.get("gap"):
        return Gap(
            stream=_name(gap["channel"]), offset=gap["offset"], dropped_bytes=gap["dropped_bytes"]
        )
    return None  # of a newer aether


async def _tracked(
    owner: Owner, event: CommandEvent, offsets: dict[int, int], asked: dict[str, Any]
) -> CommandEvent:
    """Keep the offsets right: "from now" is told by the view, a gap moves on."""
    if isinstance(event, Started):
        if asked["stdout_from"] is None:
            offsets[Channel.STDOUT] = event.command.stdout_bytes
        if asked["stderr_from"] is None:
            offsets[Channel.STDERR] = event.command.stderr_bytes
    elif isinstance(event, Gap):
        offsets[Channel.STDOUT if event.stream == "stdout" else Channel.STDERR] = event.offset
    elif isinstance(event, Exited):
        judged(owner, event.command, just_ended=True)
    return event


def _name(channel: int) -> Any:
    if channel == Channel.STDOUT:
        return "stdout"
    if channel == Channel.STDERR:
        return "stderr"
    raise Unavailable(f"aether sent output on channel {channel}")


async def _ask(
    owner: Owner, method: str, args: dict[str, Any], decoder: msgspec.msgpack.Decoder[T]
) -> T:
    async with owner.use(CALL_DEADLINE_S, method) as channel:
        return decoder.decode((await channel.collect(method, args)).result)


async def _tell(owner: Owner, method: str, args: dict[str, Any]) -> None:
    async with owner.use(CALL_DEADLINE_S, method) as channel:
        await channel.collect(method, args)


async def _list(owner: Owner, method: str, decoder: msgspec.msgpack.Decoder[list[T]]) -> list[T]:
    async with owner.use(CALL_DEADLINE_S, method) as channel:
        return _join(await channel.collect(method), decoder)


def _join(answer: Collected, decoder: msgspec.msgpack.Decoder[list[T]]) -> list[T]:
    """A list, the first parts of which may have come as events `{more: [...]}`."""
    parts = [msgspec.msgpack.decode(payload, type=_More).more for payload in answer.more]
    found = [item for part in parts for item in decoder.decode(part)]
    return found + (decoder.decode(answer.result) if answer.result else [])


class _More(msgspec.Struct):
    more: msgspec.Raw = msgspec.Raw(b"\x90")
