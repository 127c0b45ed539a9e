"""What is said about and to one sandbox; shared by the public API, the edge and the helper.

JSON outside, MessagePack between edge and aether: the same structs. Times are seconds (wall times
since the epoch), sizes bytes unless a name says otherwise. Unknown fields are refused in requests.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from msgspec import Meta, Struct, field

from dsec.base.states import SandboxState, StopReason
from dsec.wire.phases import FileRule, Name, Phase, QosClass, Seconds

Backend = Literal["container", "sim", "microvm", "fullvm", "fncall"]
Label = Annotated[str, Meta(max_length=256)]
IdleAction = Literal["stop", "pause"]


class Limits(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a sandbox may use; enforced from outside it."""

    memory_mb: Annotated[int, Meta(ge=16, le=4 << 20)] = 2048
    cpu_cores: Annotated[float, Meta(ge=0.01, le=1024)] = 1.0
    pids: Annotated[int, Meta(ge=8, le=4 << 20)] = 1024
    disk_mb: Annotated[int, Meta(ge=16, le=64 << 20)] | None = None
    """What it may write to its file system; None = as much as the node has."""


SeccompProfile = Literal["default", "strict", "loose"]
Syscall = Annotated[str, Meta(pattern=r"^[a-z0-9_]{1,64}$")]


class Security(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How much of the kernel its programs may use: docs/howto/containment.md."""

    profile: SeccompProfile = "default"
    allow: Annotated[list[Syscall], Meta(max_length=64)] = field(default_factory=list)
    """System calls its profile refuses and it may make all the same."""
    no_new_privs: bool = False
    """No program gives more rights than its caller has: set-id bits and file capabilities do nothing."""

    @property
    def widened(self) -> bool:
        """Whether it asks for more than everybody may have."""
        return self.profile == "loose" or bool(self.allow)


class SandboxSpec(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a caller asks for when creating a sandbox."""

    image: Annotated[str, Meta(min_length=1, max_length=512)]
    workspace: Annotated[str, Meta(min_length=1, max_length=256)] | None = None
    """A published workspace, `name[:version]`, laid over the image."""
    toolkits: Annotated[
        list[Annotated[str, Meta(min_length=1, max_length=256)]], Meta(max_length=32)
    ] = field(default_factory=list)
    """Published toolkits, laid over the workspace in this order: the last is on top."""
    trace: Annotated[str, Meta(max_length=128)] | None = None
    """Boot trace to prefetch by, and to record if there is none: a task's name; None = the
    environment's own."""
    record_trace: bool = False
    """Record what it reads, also if there is a trace already."""
    backend: Backend = "container"
    limits: Limits = field(default_factory=Limits)
    ttl_running_stop: Seconds | None = 1800.0
    """Idle time (no command, no I/O) after which it is stopped; None = never."""
    max_lifetime_s: Seconds | None = 86400.0
    """Age at which it is stopped whatever it does; None = never."""
    network_rules: dict[str, bool] = field(default_factory=dict)
    """Network, name or service, with protocol and ports -> allowed. What is not allowed is denied;
    grammar: docs/howto/network.md."""
    network: bool = False
    """Give it a network though no rule allows anything yet. Without one, and without a rule that
    allows something, it has none for life."""
    security: Security = field(default_factory=Security)
    files: Annotated[list[FileRule], Meta(max_length=256)] = field(default_factory=list)
    """What nobody in it may read, change or execute."""
    phases: Annotated[list[Phase], Meta(max_length=32)] = field(default_factory=list)
    """Parts of its life; it begins in the first."""
    init_user: Annotated[str, Meta(min_length=1, max_length=256)] | None = None
    """Default user of commands and file operations; None = the image's, else root."""
    workdir: Annotated[str, Meta(max_length=4096)] | None = None
    env: dict[str, str] = field(default_factory=dict)
    hostname: Annotated[str, Meta(pattern=r"^[A-Za-z0-9][A-Za-z0-9-]{0,62}$")] | None = None
    labels: dict[Label, Label] = field(default_factory=dict)
    idle_action: IdleAction = "stop"
    """What happens when `ttl_running_stop` has elapsed."""
    qos: QosClass = "ls"
    job: Name | None = None
    """The run it belongs to: paused, resumed and reaped with it, and held by the job's lease."""
    step: Label = ""
    """Of the job, for whoever looks."""
    group: Label = ""
    """Of the step, for whoever looks."""
    epoch: Annotated[int, Meta(ge=0)] = 0
    """Of the job's lease its creator holds; a newer epoch supersedes it. 0 = whatever is in force."""


class Fault(Struct, kw_only=True, omit_defaults=True):
    """Something outside the sandbox that keeps it from working as it should."""

    code: str
    """`data_unavailable`: parts of its environment cannot be read from the store; `storage_full`:
    the node has no room for them."""
    message: str
    since: float


class SandboxView(Struct, kw_only=True, omit_defaults=True):
    """What anyone allowed to may know of a sandbox."""

    id: str
    node: str
    backend: Backend
    image: str
    image_digest: str = ""
    workspace: str = ""
    toolkits: list[str] = field(default_factory=list)
    """As resolved: `name:version`."""
    state: SandboxState
    created_at: float
    limits: Limits
    ttl_running_stop: float | None = None
    max_lifetime_s: float | None = None
    idle_since: float | None = None
    ended_at: float | None = None
    stop_reason: StopReason | None = None
    stop_detail: str = ""
    labels: dict[str, str] = field(default_factory=dict)
    project: str = ""
    warnings: list[str] = field(default_factory=list)
    """What was asked for and is not to be had here, in words; never silently dropped."""
    faults: list[Fault] = field(default_factory=list)
    """What is wrong now; empty again when it is over."""
    idle_action: IdleAction = "stop"
    qos: QosClass = "ls"
    job: str = ""
    step: str = ""
    group: str = ""
    epoch: int = 0
    parent: str = ""
    """The sandbox it was forked from."""
    pause: Pause | None = None
    """Set while it is paused."""
    security: Security = field(default_factory=Security)
    phase: str = ""
    """The one it is in, if it has any."""


class Pause(Struct, kw_only=True, omit_defaults=True):
    """What a pause has given back."""

    at: float
    memory_before_bytes: int = 0
    memory_after_bytes: int = 0
    """Resident, once all was reclaimed that could be."""
    swapped_bytes: int = 0
    detail: str = ""
    """What could not be reclaimed and why, in words."""
    held: str = ""
    """Why only an explicit resume wakes it, in words; empty = whatever is asked of it next does."""


class Resize(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """New limits of a live sandbox; what is left out stays."""

    memory_mb: Annotated[int, Meta(ge=16, le=4 << 20)] | None = None
    cpu_cores: Annotated[float, Meta(ge=0.01, le=1024)] | None = None
    pids: Annotated[int, Meta(ge=8, le=4 << 20)] | None = None
    disk_mb: Annotated[int, Meta(ge=16, le=64 << 20)] | None = None
    """Only upwards, and only of a sandbox made with a limit."""
    qos: QosClass | None = None


class Pack(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Take an incremental snapshot of the writable layer (the paper's pack_diff, 6.1)."""

    name: Name
    """Of the snapshot in the caller's project; a name that exists is a Conflict."""
    description: Annotated[str, Meta(max_length=1000)] = ""
    exclude: Annotated[
        list[Annotated[str, Meta(min_length=1, max_length=4096)]], Meta(max_length=500)
    ] = field(default_factory=list)
    """Globs over absolute paths; `**` crosses directories."""
    clean: bool = True
    """Leave residue out: caches, histories, logs, keys, build-only paths. What is packed with it can
    be restored by the principal who packed it alone."""


class SnapshotView(Struct, kw_only=True, omit_defaults=True):
    """A snapshot: an image made of a sandbox's environment and what was written over it."""

    name: str
    image: str
    """What a sandbox is created from: the `image` of a specification."""
    digest: str
    """Of the layer with the difference."""
    parent: str
    """What it was packed over: the image's or snapshot's image name."""
    sandbox: str
    step: int = 0
    """Entries of the sandbox's trajectory before it: where a branch of it begins."""
    project: str = ""
    packed_by: str = ""
    created_at: float = 0.0
    description: str = ""
    cleaned: bool = True
    entries: int = 0
    size_bytes: int = 0
    """Of the files that differ."""
    left_out: int = 0
    """Entries that were excluded or cleaned away."""
    depth: int = 1
    """Differences stacked on the original environment."""
    stored: bool = False
    """Whether it is in the shared store too, for other nodes."""
    conflict: bool = False
    """The store has another one of this name, which the name means: this one is only listed."""
    frozen_ms: float = 0.0
    """How long the sandbox stood still for it."""
    duration_ms: float = 0.0


class DiffEntry(Struct, kw_only=True, omit_defaults=True):
    """A file that a snapshot, or a sandbox so far, has changed."""

    path: str
    path_b64: bytes = b""
    change: Literal["added", "modified", "removed"]
    kind: FileKind
    size_bytes: int = 0
    mode: int = 0


class Fork(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Make sandboxes that begin where this one stands now.

    Files are as they are at one moment; processes are not copied. Children have ids, hostnames and
    machine ids of their own, and the parent's specification: limits, rules, users, lifetimes.
    """

    count: Annotated[int, Meta(ge=1, le=1000)] = 1
    labels: dict[Label, Label] | None = None
    """Instead of the parent's."""
    key: Annotated[str, Meta(max_length=200)] = ""
    """Idempotency key: the same key gives the same children."""


class Recorded(Struct, kw_only=True, omit_defaults=True):  # type: ignore[explicit-any]
    """One operation that reached a sandbox, as its trajectory has it (`dsec.trajectory`)."""

    seq: int
    """1 for the first; total order of their beginnings."""
    op: str
    """`command`, `stdin`, `file.write`, `pause`, `pack`, ...: spec/formats.md."""
    id: str = ""
    """The caller's id of it; a command's id."""
    caller: str = ""
    """The principal."""
    at: float
    args: dict[str, Any] = field(default_factory=dict)  # type: ignore[explicit-any]
    """Long values are given by size_bytes and sha256."""
    ended_at: float | None = None
    """None: it goes on, or its outcome is not known."""
    outcome: str = ""
    """`ok`, or the code of an error; "" while it goes on. `interrupted`: it has no end and cannot be
    going on, for the edge was killed at it, or the sandbox is over; it may or may not have happened."""
    result: dict[str, Any] = field(default_factory=dict)  # type: ignore[explicit-any]
    stdout: Captured | None = None
    stderr: Captured | None = None
    inherited: bool = False
    """It happened in the sandbox this one was forked or restored from."""


class NetworkChange(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """New network rules of a live sandbox, in place of all it has; what they narrow ends at once."""

    rules: dict[str, bool]
    """Grammar: docs/howto/network.md."""


DenialReason = Literal[
    "rule", "never", "spoofed", "fragment", "malformed", "protocol", "expired", "name", "name_type",
    "name_rate", "name_entropy", "host_mismatch",
]  # fmt: skip
"""Why something was denied: no rule allows it; no rule could; a source address not its own; a
fragment; a broken or exotic packet; a protocol that is none of TCP, UDP and ICMP; a name's time has
run out; a name nobody allowed; a kind of DNS question that is not answered; too many questions; names
that look like smuggled data; a connection for another host than its address was given for."""


class DeniedTraffic(Struct, kw_only=True, omit_defaults=True):
    """Something it tried to reach and could not; like ones are counted together."""

    reason: DenialReason
    first_at: float
    last_at: float
    count: int = 1
    protocol: str = ""
    """`tcp`, `udp`, `icmp`, a number, or `dns`."""
    address: str = ""
    port: int = 0
    name: str = ""
    """Of the question or of the connection's host; not to be trusted, nor printable as it is."""


class NetworkView(Struct, kw_only=True, omit_defaults=True):
    """A sandbox's network."""

    enabled: bool = False
    """Whether it has one at all: decided at its creation."""
    address4: str = ""
    address6: str = ""
    rules: dict[str, bool] = field(default_factory=dict)
    sent_bytes: int = 0
    received_bytes: int = 0
    sent_packets: int = 0
    received_packets: int = 0
    denied_packets: int = 0
    denied: list[DeniedTraffic] = field(default_factory=list)
    """The latest kinds of it, newest last, at most 256."""
    detail: str = ""
    """What of this does not hold here, in words."""


class DeniedCall(Struct, kw_only=True, omit_defaults=True):
    """A system call its programs made and were refused; like ones are counted together."""

    name: str
    argument: int | None = None
    """The one that tells what was wanted, of calls that are many in one: the family of a `socket`, the
    number of an `ioctl`, the flags of an `unshare`, the signal of a `kill`."""
    count: int = 1
    first_at: float
    last_at: float


class TamperReport(Struct, kw_only=True, omit_defaults=True):
    """What was tried in a sandbox and did not work, and what of its system was changed.

    All of it is made by what runs inside: names are data, not to be trusted, nor printable as they
    are.
    """

    at: float
    counted: bool = False
    """Whether refused calls are counted; if not, `detail` says why, and an empty list means nothing."""
    simulated: bool = False
    detail: str = ""
    """What of this is not known, in words."""
    denied_calls: list[DeniedCall] = field(default_factory=list)
    agent_signals: list[DeniedCall] = field(default_factory=list)
    """Refused calls aimed at the sandbox's first process, which is the platform's: signals, debugging,
    taking descriptors."""
    other_calls: int = 0
    """Refused calls of further kinds, when there are too many kinds to tell apart."""
    system_files: list[DiffEntry] = field(default_factory=list)
    """Programs, libraries and settings of the environment that were overwritten or removed; at most
    1,000."""
    system_files_count: int = 0
    """All of them."""
    flooded_streams: int = 0
    """Output streams of commands that were more than is kept."""
    dropped_bytes: int = 0
    """Of these."""
    oom_kills: int = 0
    pids_limit_hits: int = 0
    """Processes and threads that could not begin."""
    disk_full: bool = False
    """Whether its own disk is full now."""
    network: list[DeniedTraffic] = field(default_factory=list)


class PtySize(Struct, frozen=True, forbid_unknown_fields=True):
    """A terminal's size in characters."""

    rows: Annotated[int, Meta(ge=1, le=10000)] = 24
    cols: Annotated[int, Meta(ge=1, le=10000)] = 80


class CommandSpec(Struct, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """A command to run. Exactly one of `argv` and `shell`, or `entrypoint`.

    `shell` is run by the image's own shell (`bash -c`, else `sh -c`): the caller's business,
    nothing of the platform depends on it. With `session`, it runs in that persistent shell.
    """

    command_id: str | None = None
    """The caller's id and idempotency key: sending it again attaches to the same run."""
    argv: list[str] | None = None
    shell: str | None = None
    entrypoint: bool = False
    """Put the image's Entrypoint before `argv`; without `argv`, run its Entrypoint and Cmd."""
    session: str | None = None
    cwd: str | None = None
    env: dict[str, str] = field(default_factory=dict)
    user: str | None = None
    stdin: Literal["null", "pipe"] = "null"
    pty: PtySize | None = None
    timeout_s: Seconds | None = None
    """None = the server's default (3600 s); the server's ceiling beats a larger value."""
    output_limit_bytes: Annotated[int, Meta(ge=0, le=64 << 20)] | None = None
    """Kept per stream, half from the head and half from the tail; None = 1 MiB."""


class Captured(Struct, kw_only=True, omit_defaults=True):
    """What is kept of one output stream: its head, then its tail.

    `dropped_bytes` were left out between `head` and `tail`. Over JSON the bytes are base64.
    """

    head: bytes = b""
    tail: bytes = b""
    dropped_bytes: int = 0

    def join(self) -> bytes:
        """Head and tail in one piece, with nothing said about what is missing between them."""
        return self.head + self.tail


class CommandView(Struct, kw_only=True, omit_defaults=True):
    """A command as it stands."""

    command_id: str
    argv: list[str] = field(default_factory=list)
    """What is run; for a session's command, the one-element list of its text."""
    session: str = ""
    running: bool = False
    pid: int = 0
    started_at: float = 0.0
    exit_code: int | None = None
    """Exit status; 128 + signal when a signal ended it; None while it runs."""
    signal: int | None = None
    timed_out: bool = False
    oom_killed: bool = False
    killed: bool = False
    """Ended by a kill call, not by itself."""
    data_unavailable: bool = False
    """Parts of its environment could not be read while it ran: its outcome is the platform's fault,
    not the program's, and must not be graded."""
    duration_s: float = 0.0
    timeout_s: float | None = None
    """The limit in force."""
    session_reset: bool = False
    """The session's shell did not survive this command; a fresh one takes its place."""
    stdout_bytes: int = 0
    stderr_bytes: int = 0
    """Total produced so far, kept or not."""


class CommandResult(CommandView, kw_only=True, omit_defaults=True):
    """A command that has ended, with what it said."""

    stdout: Captured = field(default_factory=Captured)
    stderr: Captured = field(default_factory=Captured)


class Output(Struct, tag_field="type", tag="output", kw_only=True):
    """Bytes a command wrote; `offset` counts from the stream's first byte."""

    stream: Literal["stdout", "stderr"]
    offset: int
    data: bytes


class Gap(Struct, tag_field="type", tag="gap", kw_only=True):
    """Bytes this reader was too slow for: the stream goes on at `offset`."""

    stream: Literal["stdout", "stderr"]
    offset: int
    dropped_bytes: int


class Started(Struct, tag_field="type", tag="started", kw_only=True):
    """First event of an attached command."""

    command: CommandView


class Exited(Struct, tag_field="type", tag="exited", kw_only=True):
    """Last event of an attached command; all output came before it."""

    command: CommandView


class Heartbeat(Struct, tag_field="type", tag="heartbeat", kw_only=True):
    """Nothing happened, the connection is alive."""


class StreamError(Struct, tag_field="type", tag="error", kw_only=True):
    """The stream ends here, for this reason (an entry of the error table)."""

    code: str
    message: str
    details: dict[str, str | int | float | bool | None] = field(default_factory=dict)
    http_status: int = 500


CommandEvent = Started | Output | Gap | Exited | Heartbeat | StreamError

FileKind = Literal["file", "dir", "symlink", "fifo", "socket", "char", "block"]


class FileInfo(Struct, kw_only=True, omit_defaults=True):
    """One file. Names are bytes in Linux: `path` is UTF-8 if it can be, else `path_b64` is set."""

    path: str
    path_b64: bytes = b""
    kind: FileKind
    size_bytes: int = 0
    mode: int = 0
    """Permission bits, e.g. 0o644."""
    uid: int = 0
    gid: int = 0
    user: str = ""
    group: str = ""
    mtime: float = 0.0
    target: str = ""
    """Of a symbolic link."""
    sha256: str = ""
    """Of what was written; only in the answer to a write."""


class WatchEvent(Struct, tag_field="type", tag="watch", kw_only=True, omit_defaults=True):
    """A change below a watched directory; `path` is relative to it."""

    path: str
    path_b64: bytes = b""
    event: Literal["create", "write", "remove", "rename", "chmod", "overflow"]


class WatchStarted(Struct, tag_field="type", tag="watching", kw_only=True):
    """First event of a watch: changes from now on are reported."""


WatchStreamEvent = WatchStarted | WatchEvent | Heartbeat | StreamError


class SessionView(Struct, kw_only=True, omit_defaults=True):
    """A persistent shell session."""

    session_id: str
    pid: int = 0
    busy: bool = False
    user: str = ""


class SessionSpec(Struct, kw_only=True, forbid_unknown_fields=True):
    """A session to open."""

    session_id: str | None = None
    cwd: str | None = None
    env: dict[str, str] = field(default_factory=dict)
    user: str | None = None
    shell: Annotated[str, Meta(min_length=1)] | None = None
    """Path of the shell; None = the image's bash, else sh."""


class Process(Struct, kw_only=True, omit_defaults=True):
    """A process in the sandbox, by the ids it sees itself."""

    pid: int
    ppid: int = 0
    uid: int = 0
    state: str = ""
    rss_bytes: int = 0
    cpu_s: float = 0.0
    argv: list[str] = field(default_factory=list)


class Usage(Struct, kw_only=True, omit_defaults=True):
    """What a sandbox uses now, measured from outside it where the host can."""

    at: float
    cpu_s: float = 0.0
    memory_bytes: int = 0
    memory_peak_bytes: int = 0
    memory_limit_bytes: int = 0
    pids: int = 0
    oom_kills: int = 0
    disk_bytes: int = 0
    disk_limit_bytes: int = 0
    """0 = no limit of its own."""
