"""Tasks as files: `task.toml`, `agents/*.toml`, `verify/`. See docs/reference/task-format.md."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path, PurePosixPath
from typing import Annotated, Literal, TypeVar

import msgspec
from msgspec import Meta, Struct, field

from dsec.base.errors import InvalidRequest
from dsec.rollout.outcomes import Outcome

Seconds = Annotated[float, Meta(gt=0, le=86400)]
Ended = Literal["ok", "failed", "timed_out", "truncated"]
_NAME = re.compile(r"[a-z0-9][a-z0-9-]{0,40}")


class Pin(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One source distribution: exactly this file or none."""

    package: Annotated[str, Meta(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")]
    version: Annotated[str, Meta(pattern=r"^[0-9][A-Za-z0-9.!+]*$")]
    sha256: Annotated[str, Meta(pattern=r"^[0-9a-f]{64}$")]
    import_path: str = "."
    """The directory in it that goes on the import path."""


class Source(Pin, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The distribution the agent works on, and the release that fixed the bug."""

    fixed_in: str = ""


class Image(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What the image must have: commands looked for before the agent starts."""

    needs: list[str] = field(default_factory=lambda: ["python3", "tar"])


class TaskLimits(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What both sandboxes may use, and what is taken over from the agent's one."""

    memory_mb: Annotated[int, Meta(ge=64, le=65536)] = 256
    cpu_cores: Annotated[float, Meta(gt=0, le=64)] = 1.0
    pids: Annotated[int, Meta(ge=16, le=65536)] = 128
    output_kb: Annotated[int, Meta(ge=1, le=16384)] = 64
    """Kept of each output stream of a tool call."""
    tree_mb: Annotated[int, Meta(ge=1, le=1024)] = 32
    """The agent's work tree as a tar; a larger one is the agent's failure."""


class Timeouts(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Seconds for each phase; `tool` for a tool call that states none."""

    setup: Seconds = 60.0
    tool: Seconds = 30.0
    agent: Seconds = 120.0
    verify: Seconds = 90.0


class _TaskFile(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    format: Literal[1]
    name: str
    title: Annotated[str, Meta(min_length=1, max_length=100)]
    difficulty: Literal["easy", "medium", "hard"]
    problem: Annotated[str, Meta(min_length=40)]
    source: Source
    requires: list[Pin] = field(default_factory=list)
    image: Image = field(default_factory=Image)
    limits: TaskLimits = field(default_factory=TaskLimits)
    timeouts: Timeouts = field(default_factory=Timeouts)


class ShellCall(
    Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="shell", tag_field="tool"
):
    """Run a command line in the work tree."""

    command: str
    timeout_s: Seconds | None = None
    expect: Ended | None = None


class ReadCall(
    Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="read", tag_field="tool"
):
    """Read a file; relative paths are below the work tree."""

    path: str
    expect: Ended | None = None


class WriteCall(
    Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="write", tag_field="tool"
):
    """Write a whole file."""

    path: str
    content: str
    expect: Ended | None = None


class ReplaceCall(
    Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="replace", tag_field="tool"
):
    """Replace a text that occurs exactly once in a file; otherwise the call fails."""

    path: str
    old: Annotated[str, Meta(min_length=1)]
    new: str
    expect: Ended | None = None


class FinishCall(
    Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="finish", tag_field="tool"
):
    """The agent says that it is done; nothing after it is replayed."""

    answer: str


Call = ShellCall | ReadCall | WriteCall | ReplaceCall | FinishCall


class _AgentFile(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    expected: Outcome
    note: str
    timeout_s: Seconds | None = None
    call: list[Call]


class Agent(Struct, frozen=True, kw_only=True):
    """A recorded agent: the tool calls it made, and what has to come of them."""

    name: str
    expected: Outcome
    note: str
    calls: list[Call]
    timeout_s: float | None = None
    """Its own limit for the whole agent phase; None = the task's."""


class Task(Struct, frozen=True, kw_only=True):
    """A task as loaded: everything a rollout needs except the distributions' bytes."""

    name: str
    title: str
    difficulty: str
    problem: str
    source: Source
    requires: list[Pin]
    image: Image
    limits: TaskLimits
    timeouts: Timeouts
    agents: list[Agent]
    verify: dict[str, bytes]
    """The files the agent never sees, by their path below `verify/`."""

    @property
    def pins(self) -> list[Pin]:
        """The distributions to fetch, the one worked on first."""
        return [self.source, *self.requires]


PRISTINE = Agent(
    name="pristine", expected="failed", note="Changes nothing: the bug must be there.", calls=[]
)
"""Run beside the recorded agents when a suite is checked."""


def load_task(directory: Path) -> Task:
    """Read one task directory and check it.

    Raises:
        InvalidRequest: a file is missing or wrong; the message names it.
    """
    head = _read(directory / "task.toml", _TaskFile)
    agents = [_load_agent(path) for path in sorted((directory / "agents").glob("*.toml"))]
    # Those that solve it first, so that even one rollout per task shows a solution.
    agents.sort(key=lambda agent: (agent.name != "solves", agent.name))
    verify = {
        path.relative_to(directory / "verify").as_posix(): path.read_bytes()
        for path in sorted((directory / "verify").rglob("*"))
        if path.is_file() and "__pycache__" not in path.parts
    }
    task = Task(
        agents=agents,
        verify=verify,
        **{f: getattr(head, f) for f in head.__struct_fields__ if f != "format"},
    )
    complaints = lint(task, directory.name)
    if complaints:
        raise InvalidRequest(f"{directory}: " + "; ".join(complaints))
    return task


def load_suite(directory: Path) -> list[Task]:
    """Read every task of a suite, in the order of their names.

    Raises:
        InvalidRequest: a task is wrong, or there is none.
    """
    found = sorted(path.parent for path in directory.glob("*/task.toml"))
    if not found and (directory / "task.toml").is_file():
        found = [directory]
    if not found:
        raise InvalidRequest(f"{directory}: no task.toml in it or in its directories")
    return [load_task(path) for path in found]


def lint(task: Task, directory: str) -> list[str]:
    """What is wrong with a task beyond the types of its fields, in words."""
    complaints = []
    if not _NAME.fullmatch(task.name) or task.name != directory:
        complaints.append(f"name {task.name!r} must be that of its directory, a-z 0-9 and -")
    if not any(agent.expected == "solved" for agent in task.agents):
        complaints.append("no recorded agent is expected to solve it")
    if not any(agent.expected != "solved" for agent in task.agents):
        complaints.append("no recorded agent is expected to fail")
    if "verify.py" not in task.verify:
        complaints.append("verify/verify.py is missing")
    if "grading.py" in task.verify:
        complaints.append("verify/grading.py would be overwritten")
    for pin in task.pins:
        path = PurePosixPath(pin.import_path)
        if path.is_absolute() or ".." in path.parts:
            complaints.append(f"import_path {pin.import_path!r} must lie in the distribution")
    complaints += [
        f"agent {agent.name} cannot be expected to break the platform"
        for agent in task.agents
        if agent.expected in {"verifier", "infrastructure"}
    ]
    return complaints


def _load_agent(path: Path) -> Agent:
    recorded = _read(path, _AgentFile)
    return Agent(
        name=path.stem,
        expected=recorded.expected,
        note=recorded.note,
        calls=recorded.call,
        timeout_s=recorded.timeout_s,
    )


_T = TypeVar("_T")


def _read(path: Path, shape: type[_T]) -> _T:
    try:
        return msgspec.convert(tomllib.loads(path.read_text("utf-8")), shape)
    except FileNotFoundError:
        raise InvalidRequest(f"{path}: missing") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, msgspec.ValidationError) as error:
        raise InvalidRequest(f"{path}: {error}") from error
