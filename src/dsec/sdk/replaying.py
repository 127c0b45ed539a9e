"""What of a trajectory can be done again, and how: `plan` looks at an entry and decides. Pure."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec

from dsec.base.errors import NotFound
from dsec.trajectory.diff import Step, diff
from dsec.wire.sandbox import CommandSpec, Recorded, SandboxSpec

CREATION = "create"


@dataclass(frozen=True, slots=True)
class Run:
    """Run a command, and wait for its end."""

    spec: CommandSpec
    given: bytes | None = None
    """Its input, if it had any."""


@dataclass(frozen=True, slots=True)
class Change:
    """Change files: a call of `sandbox.files` by name, with its keywords."""

    call: str
    keywords: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Leave:
    """It is not done again; `why` says so in words, "" if there is nothing to do."""

    why: str = ""


@dataclass(frozen=True, slots=True)
class Replayed:
    """A step of a replay: done again, unless `left` says why not."""

    entry: Recorded
    left: str = ""


Plan = Run | Change | Leave
_NOTHING = frozenset(
    {
        CREATION,
        "over",
        "stop",
        "tamper",
        "pause",
        "resume",
        "pack",
        "fork",
        "processes",
        "command.resize",
        "command.stdin",
    }
)
"""What changes no file and starts nothing, or is done again with what it belongs to."""
Inputs = Mapping[str, bytes | None]
"""What was written to commands, by their ids; None: it was not all kept."""


def plan(entry: Recorded, inputs: Inputs | None = None) -> Plan:
    """How to do an operation again."""
    if entry.op in _NOTHING or _is_read(entry):
        return Leave()
    if entry.ended_at is None:
        return Leave("how it ended is not known")
    if entry.op == "command":
        return _command(entry, inputs or {})
    make = _PLANS.get(entry.op)
    return make(entry) if make else Leave(f"{entry.op} is not done again")


def _is_read(entry: Recorded) -> bool:
    return entry.op.rpartition(".")[2] in {"read", "stat", "list", "watch", "look"}


def _command(entry: Recorded, inputs: Inputs) -> Plan:
    args = {key: value for key, value in entry.args.items() if key in _COMMAND_FIELDS}
    given = inputs.get(entry.id, b"") if args.get("stdin") == "pipe" else b""
    if why := _why_left(entry, given):
        return Leave(why)
    args["command_id"] = entry.id or None
    try:
        spec = msgspec.convert(args, CommandSpec)
    except msgspec.ValidationError as exc:
        return Leave(f"its arguments make no sense here: {exc}")
    return Run(spec, given if spec.stdin == "pipe" else None)


def _why_left(entry: Recorded, given: bytes | None) -> str:
    reasons = [
        (_cut(entry.args), "an argument was too long to be recorded"),
        (entry.args.get("session"), "a persistent session's commands are not done again"),
        (entry.result.get("killed"), "somebody ended it by a kill"),
        (entry.args.get("pty"), "somebody sat at its terminal"),
        (given is None, "its input was not all recorded"),
    ]
    return next((why for holds, why in reasons if holds), "")


_COMMAND_FIELDS = frozenset(CommandSpec.__struct_fields__)


def _cut(value: object) -> bool:
    """Whether something was recorded by its digest alone."""
    match value:
        case Mapping():
            return {"sha256", "size_bytes"} <= value.keys() or any(
                _cut(item) for item in value.values()
            )
        case list():
            return any(_cut(item) for item in value)
        case _:
            return False


def inputs_of(entries: Iterable[Recorded]) -> dict[str, bytes | None]:
    """What was written to each command; what was sent twice counts once."""
    found: dict[str, bytes | None] = {}
    for entry in entries:
        if entry.op == "command.stdin" and entry.outcome == "ok":
            command = str(entry.args.get("command_id", ""))
            found[command] = _fed(found.get(command, b""), entry.args)
    return found


def _fed(before: bytes | None, args: Mapping[str, Any]) -> bytes | None:
    data = _content(args) if "body" in args else b""
    if before is None or data is None:
        return None
    at = int(args.get("offset", len(before)))
    if at > len(before):  # what came before it is not on record
        return None
    return before[:at] + data + before[at + len(data) :]


def _write(entry: Recorded) -> Plan:
    data = _content(entry.args)
    if data is None:
        return Leave("what was written is recorded by its digest only")
    return _change(entry, data=data)


def _content(args: Mapping[str, Any]) -> bytes | None:
    """What was written, if it was little enough to be kept."""
    match args.get("body"):
        case {"data": bytes(data)}:
            return data
        case {"data": str(text)}:
            return base64.b64decode(text)
        case None if args.get("sha256") == _EMPTY:
            return b""
        case _:
            return None


_EMPTY = hashlib.sha256(b"").hexdigest()
_KEYWORDS = {
    "file.write": ("write", ("path", "mode", "user", "parents", "append", "atomic")),
    "file.mkdir": ("mkdir", ("path", "mode", "user", "parents")),
    "file.move": ("move", ("path", "to", "user", "overwrite")),
    "file.remove": ("remove", ("path", "user", "recursive")),
}


def _change(entry: Recorded, **more: Any) -> Plan:
    call, names = _KEYWORDS[entry.op]
    keywords = {name: entry.args[name] for name in names if entry.args.get(name) is not None}
    if "path" not in keywords or _cut(keywords):
        return Leave("its path was too long to be recorded")
    try:
        return Change(call, {name: _value(name, keywords[name]) for name in keywords} | more)
    except ValueError as exc:
        return Leave(f"its arguments make no sense here: {exc}")


_TEXTS = frozenset({"path", "to", "user"})


def _value(name: str, given: Any) -> Any:
    """An argument as the SDK takes it; requests have them as texts."""
    if name in _TEXTS or not isinstance(given, str):
        return given
    return int(given, 8) if name == "mode" else given in {"true", "1"}


_PLANS: dict[str, Callable[[Recorded], Plan]] = {
    "file.write": _write,
    "file.mkdir": _change,
    "file.move": _change,
    "file.remove": _change,
}


def first_spec(entries: Iterable[Recorded]) -> SandboxSpec:
    """What the sandbox was made as, without the job it belonged to.

    Raises:
        NotFound: its trajectory does not begin with its creation.
    """
    for entry in entries:
        if entry.op == CREATION:
            return made_as(entry)
    raise no_creation()


def made_as(creation: Recorded) -> SandboxSpec:
    """What an entry says a sandbox was made as, without the job it belonged to."""
    made = creation.args.get("spec", creation.args)
    known = {key: made[key] for key in made if key in SandboxSpec.__struct_fields__}
    known |= {"job": None, "epoch": 0, "step": "", "group": ""}
    return msgspec.convert(known, SandboxSpec, strict=False)


def no_creation() -> NotFound:
    """What a trajectory without a beginning is answered with."""
    return NotFound("its trajectory does not say how it was made", kind="trajectory")


def compare(done: Iterable[Recorded], again: Iterable[Recorded]) -> Iterator[Step]:
    """What was recorded, beside what has come of doing it again."""
    ours = [entry for entry in again if entry.op not in _NOTHING and not entry.inherited]
    return diff(map(_essence, done), map(_essence, ours))


def _essence(entry: Recorded) -> Recorded:
    """A write without what its sender said of its content: the content itself counts."""
    if entry.op != "file.write" or "body" not in entry.args:
        return entry
    args = {name: value for name, value in entry.args.items() if name != "sha256"}
    return msgspec.structs.replace(entry, args=args)
