"""The values the SDK takes and gives."""

from __future__ import annotations

import codecs
import math
import os
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import PurePosixPath

from dsec.base.errors import InvalidRequest
from dsec.wire.phases import FileRule, Phase, QosClass
from dsec.wire.sandbox import (
    Backend,
    Captured,
    CommandResult,
    FileKind,
    IdleAction,
    Limits,
    SandboxSpec,
    Security,
)
from dsec.wire.sandbox import FileInfo as WireFileInfo
from dsec.wire.sandbox import WatchEvent as WireWatchEvent


@dataclass(frozen=True, slots=True)
class DSecContainerRunArgs:
    """What a sandbox is to be.

    Attributes:
        container_image: name of an image the platform has.
        workspace: a published workspace laid over the image, `name[:version]`.
        toolkits: published toolkits laid over that, the last on top.
        memory_limit_mb: memory in MiB.
        cpu_cores_limit: CPU time, in cores.
        pids_limit: processes and threads at once.
        disk_limit_mb: what it may write to its files, in MiB; None: as much as the node has.
        ttl_running_stop: idle seconds (no command, no I/O) after which it is stopped; None: never.
        max_lifetime_s: age at which it is stopped whatever it does; None: never.
        network_rules: network, name or service, with protocol and ports -> allowed. What is not
            allowed is denied. The grammar is in docs/howto/network.md.
        init_user: default user of commands and files; None: the image's, else root.
        workdir: default directory of commands; None: the image's.
        env: environment of all commands, over the image's.
        hostname: its host name; None: made from its id.
        labels: yours, to find it again.
        backend: how it is isolated.
        trace: name of the boot trace to load its data by, e.g. the task's; None: the environment's.
        record_trace: record what it reads, also if there is such a trace.
        idle_action: what happens after `ttl_running_stop`: "stop", or "pause" until it is used.
        qos: "ls", latency-sensitive, or "be", best-effort: it gets what nobody else wants.
        job: the run it belongs to, paused, resumed and reaped with it; None: DSEC_JOB's, if that is
            set; "": none.
        step: of the job, for whoever looks.
        group: of the step, for whoever looks.
        epoch: of the job's lease you hold; None: DSEC_EPOCH's if the job is DSEC_JOB, else the one
            in force, as with 0.
        network: give it a network though no rule allows anything yet: `set_network` may later.
        security: how much of the kernel its programs may use.
        files: paths nobody in it may read, change or execute, root neither.
        phases: parts of its life, with what it may do in each; it begins in the first.
    """

    container_image: str
    memory_limit_mb: int = 2048
    cpu_cores_limit: float = 1.0
    pids_limit: int = 1024
    ttl_running_stop: float | None = 1800.0
    max_lifetime_s: float | None = 86400.0
    network_rules: Mapping[str, bool] = field(default_factory=dict)
    init_user: str | None = None
    workdir: str | None = None
    env: Mapping[str, str] = field(default_factory=dict)
    hostname: str | None = None
    labels: Mapping[str, str] = field(default_factory=dict)
    backend: Backend = "container"
    workspace: str | None = None
    toolkits: Sequence[str] = ()
    disk_limit_mb: int | None = None
    trace: str | None = None
    record_trace: bool = False
    idle_action: IdleAction = "stop"
    qos: QosClass = "ls"
    job: str | None = None
    step: str = ""
    group: str = ""
    epoch: int | None = None
    network: bool = False
    security: Security = field(default_factory=Security)
    files: Sequence[FileRule] = ()
    phases: Sequence[Phase] = ()


def job_and_epoch(
    args: DSecContainerRunArgs, environ: Mapping[str, str] | None = None
) -> tuple[str | None, int]:
    """The job and the epoch of its lease: as said, else as `dsec job lease --hold` has set them.

    Raises:
        InvalidRequest: DSEC_EPOCH is no number.
    """
    env = os.environ if environ is None else environ
    held = env.get("DSEC_JOB") or None
    job = held if args.job is None else args.job or None
    if args.epoch is not None:
        return job, args.epoch
    if job is None or job != held:
        return job, 0
    text = env.get("DSEC_EPOCH") or "0"
    if not (text.isascii() and text.isdecimal()):
        raise InvalidRequest(f"DSEC_EPOCH {text[:80]!r} is no number")
    return job, int(text)


def seconds(value: float | None, name: str) -> float | None:
    """A time span as it goes over the wire, where a NaN would read as no limit at all.

    Raises:
        InvalidRequest: it is none.
    """
    if value is None:
        return None
    try:
        number = float(value)
    except (TypeError, ValueError):
        number = math.nan
    if not 0 < number < math.inf:
        raise InvalidRequest(f"{name} {value!r} must be a positive number of seconds, or None")
    return number


def toolkit_names(toolkits: Sequence[str]) -> list[str]:
    """Toolkits as they go over the wire.

    Raises:
        InvalidRequest: it is one name, whose letters would be taken for names.
    """
    if isinstance(toolkits, str):
        raise InvalidRequest(f"toolkits must be a list of names, such as [{toolkits!r}]")
    return [*toolkits]


def sandbox_spec(args: DSecContainerRunArgs) -> SandboxSpec:
    """The arguments as they go over the wire."""
    job, epoch = job_and_epoch(args)
    return SandboxSpec(
        image=args.container_image,
        workspace=args.workspace,
        toolkits=toolkit_names(args.toolkits),
        trace=args.trace,
        record_trace=args.record_trace,
        backend=args.backend,
        limits=Limits(
            memory_mb=args.memory_limit_mb,
            cpu_cores=float(args.cpu_cores_limit),
            pids=args.pids_limit,
            disk_mb=args.disk_limit_mb,
        ),
        ttl_running_stop=seconds(args.ttl_running_stop, "ttl_running_stop"),
        max_lifetime_s=seconds(args.max_lifetime_s, "max_lifetime_s"),
        network_rules=dict(args.network_rules),
        network=args.network,
        security=args.security,
        files=list(args.files),
        phases=list(args.phases),
        init_user=args.init_user,
        workdir=args.workdir,
        env=dict(args.env),
        hostname=args.hostname,
        labels=dict(args.labels),
        idle_action=args.idle_action,
        qos=args.qos,
        job=job,
        step=args.step,
        group=args.group,
        epoch=epoch,
    )


class CommandFailed(Exception):
    """Raised by `ExecResult.check()`, and only there: a command that fails is a result."""

    def __init__(self, result: ExecResult) -> None:
        super().__init__(_describe(result))
        self.result = result


def _describe(result: ExecResult) -> str:
    said = result.stderr.strip() or result.stdout.strip()
    how = f"exit status {result.exit_code}"
    if result.timed_out:
        how = f"timed out after {result.duration_s:.1f} s"
    elif result.oom_killed:
        how += ", killed for want of memory"
    elif result.data_unavailable:
        how += "; parts of its environment could not be read"
    elif result.signal:
        how = f"ended by signal {result.signal}"
    last = f": {said[-400:]}" if said else ""
    return f"{shlex.join(result.argv)[:200]}: {how}{last}"


@dataclass(frozen=True, slots=True)
class ExecResult:
    """A command that has ended.

    Attributes:
        command_id: its id.
        argv: what ran; of a shell command, the shell's.
        exit_code: exit status; 128 + signal when a signal ended it.
        stdout_bytes: what is kept of its standard output: head and tail.
        stderr_bytes: the same of standard error.
        stdout_dropped: bytes left out between head and tail; 0: it is whole.
        stderr_dropped: the same of standard error.
        signal: the signal that ended it, if one did.
        timed_out: it ran into its time limit and was killed; the output so far is here.
        oom_killed: it, or a child of it, was killed for want of memory.
        killed: somebody asked for its end.
        data_unavailable: parts of its environment could not be read while it ran: do not grade it.
        session_reset: its session's shell did not survive it; a fresh one takes its place.
        duration_s: how long it ran.
        timeout_s: the limit that was in force.
    """

    command_id: str
    exit_code: int
    argv: tuple[str, ...] = ()
    stdout_bytes: bytes = field(default=b"", repr=False)
    stderr_bytes: bytes = field(default=b"", repr=False)
    stdout_dropped: int = 0
    stderr_dropped: int = 0
    signal: int | None = None
    timed_out: bool = False
    oom_killed: bool = False
    killed: bool = False
    session_reset: bool = False
    duration_s: float = 0.0
    timeout_s: float | None = None
    data_unavailable: bool = False
    _cuts: tuple[int, int] = field(default=(0, 0), repr=False)

    @property
    def stdout(self) -> str:
        """Standard output as text; where bytes were left out, a line says so."""
        return _text(self.stdout_bytes, self._cuts[0], self.stdout_dropped)

    @property
    def stderr(self) -> str:
        """Standard error as text; where bytes were left out, a line says so."""
        return _text(self.stderr_bytes, self._cuts[1], self.stderr_dropped)

    @property
    def ok(self) -> bool:
        """Whether it ended with exit status 0."""
        return self.exit_code == 0

    @property
    def truncated(self) -> bool:
        """Whether some of its output was left out."""
        return self.stdout_dropped > 0 or self.stderr_dropped > 0

    def check(self) -> ExecResult:
        """This result, if the command succeeded.

        Raises:
            CommandFailed: it did not.
        """
        if not self.ok:
            raise CommandFailed(self)
        return self


def _text(kept: bytes, cut: int, dropped: int) -> str:
    if not dropped:
        return kept.decode("utf-8", "replace")
    head, tail = kept[:cut], kept[cut:]
    return (
        f"{head.decode('utf-8', 'replace')}\n[... {dropped} bytes left out ...]\n"
        f"{tail.decode('utf-8', 'replace')}"
    )


def exec_result(wire: CommandResult) -> ExecResult:
    """A result from the wire."""
    return ExecResult(
        command_id=wire.command_id,
        exit_code=-1 if wire.exit_code is None else wire.exit_code,
        argv=tuple(wire.argv),
        stdout_bytes=wire.stdout.join(),
        stderr_bytes=wire.stderr.join(),
        stdout_dropped=wire.stdout.dropped_bytes,
        stderr_dropped=wire.stderr.dropped_bytes,
        signal=wire.signal,
        timed_out=wire.timed_out,
        oom_killed=wire.oom_killed,
        killed=wire.killed,
        session_reset=wire.session_reset,
        duration_s=wire.duration_s,
        timeout_s=wire.timeout_s,
        data_unavailable=wire.data_unavailable,
        _cuts=(_cut(wire.stdout), _cut(wire.stderr)),
    )


def _cut(captured: Captured) -> int:
    return len(captured.head)


class TextDecoder:
    """Bytes of one output stream to text, a character split between two chunks kept together."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def feed(self, data: bytes) -> str:
        """The text a chunk completes."""
        return self._decoder.decode(data)

    def finish(self) -> str:
        """What is left at the end."""
        return self._decoder.decode(b"", final=True)


@dataclass(frozen=True, slots=True)
class FileInfo:
    """One file in a sandbox.

    Attributes:
        path: its path; bytes that are not UTF-8 as with `os.fsdecode`.
        kind: file, dir, symlink, fifo, socket, char or block.
        size_bytes: its size.
        mode: permission bits, e.g. 0o644.
        uid: owner.
        gid: group.
        user: the owner's name in the sandbox, if it has one.
        group: the group's name in the sandbox, if it has one.
        mtime: last modification, seconds since the epoch.
        target: of a symbolic link.
    """

    path: str
    kind: FileKind
    size_bytes: int = 0
    mode: int = 0
    uid: int = 0
    gid: int = 0
    user: str = ""
    group: str = ""
    mtime: float = 0.0
    target: str = ""

    @property
    def name(self) -> str:
        """The last part of its path."""
        return PurePosixPath(self.path).name

    @property
    def is_dir(self) -> bool:
        """Whether it is a directory."""
        return self.kind == "dir"

    @property
    def is_file(self) -> bool:
        """Whether it is a regular file."""
        return self.kind == "file"


def file_info(wire: WireFileInfo) -> FileInfo:
    """A file from the wire."""
    return FileInfo(
        path=_name(wire.path, wire.path_b64),
        kind=wire.kind,
        size_bytes=wire.size_bytes,
        mode=wire.mode,
        uid=wire.uid,
        gid=wire.gid,
        user=wire.user,
        group=wire.group,
        mtime=wire.mtime,
        target=wire.target,
    )


def _name(text: str, raw: bytes) -> str:
    return raw.decode("utf-8", "surrogateescape") if raw else text


@dataclass(frozen=True, slots=True)
class WatchEvent:
    """A change below a watched directory.

    Attributes:
        path: what changed, relative to the directory.
        event: create, write, remove, rename, chmod; overflow: some changes were missed, look.
    """

    path: str
    event: str


def watch_event(wire: WireWatchEvent) -> WatchEvent:
    """A change from the wire."""
    return WatchEvent(_name(wire.path, wire.path_b64), wire.event)


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a transfer is: `done_bytes` of `total_bytes` (0: unknown), now at `path`."""

    path: str
    done_bytes: int
    total_bytes: int = 0


PathLike = str | bytes | os.PathLike[str]


def remote_path(path: PathLike) -> bytes:
    """A path in the sandbox as its bytes."""
    raw = path if isinstance(path, (str, bytes)) else os.fspath(path)
    return raw.encode("utf-8", "surrogateescape") if isinstance(raw, str) else raw
