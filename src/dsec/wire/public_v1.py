"""The public API: what a client says to the apiserver. Operations on one sandbox: `sandbox.py`."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta, Struct, field

from dsec.wire.sandbox import SandboxSpec, SandboxView


class CreateSandbox(SandboxSpec, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Ask for one sandbox. Header `Idempotency-Key` makes a repeat return the same one."""


class CreateBatch(Struct, kw_only=True, forbid_unknown_fields=True):
    """Ask for `count` alike, numbered by the key `<Idempotency-Key>.<n>`."""

    spec: SandboxSpec
    count: Annotated[int, Meta(ge=1, le=10000)]


class ErrorBody(Struct, kw_only=True):
    """Body of every answer that is not 2xx."""

    code: str
    message: str
    retryable: bool = False
    request_id: str = ""
    details: dict[str, str | int | float | bool | None] = field(default_factory=dict)


class ErrorAnswer(Struct, kw_only=True):
    """`{"error": {...}}`."""

    error: ErrorBody


class BatchItem(Struct, kw_only=True, omit_defaults=True):
    """One line of a batch answer, in order of completion: a sandbox or why not."""

    index: int
    sandbox: SandboxView | None = None
    error: ErrorBody | None = None


class SandboxList(Struct, kw_only=True, omit_defaults=True):
    """A page of sandboxes; `next` is given if there are more."""

    sandboxes: list[SandboxView]
    next: str = ""


class Capability(Struct, kw_only=True, omit_defaults=True):
    """Something a host can or cannot do, and what to do about it."""

    name: str
    available: bool
    needed_for: str = ""
    detail: str = ""
    advice: str = ""


class NodeView(Struct, kw_only=True, omit_defaults=True):
    """A node: what it can do and how full it is."""

    id: str
    version: str
    backends: list[str]
    healthy: bool = True
    running: int = 0
    creating: int = 0
    memory_total_bytes: int = 0
    memory_available_bytes: int = 0
    cpus: int = 0
    capabilities: list[Capability] = field(default_factory=list)


class ImageView(Struct, kw_only=True, omit_defaults=True):
    """An image a node can start sandboxes from."""

    name: str
    digest: str
    layers: list[str]
    size_bytes: int = 0
    created_at: float = 0.0
    source: str = ""
    env: dict[str, str] = field(default_factory=dict)
    workdir: str = ""
    user: str = ""
    entrypoint: list[str] = field(default_factory=list)
    cmd: list[str] = field(default_factory=list)


class PullImage(Struct, kw_only=True, forbid_unknown_fields=True):
    """Import from an OCI registry."""

    reference: Annotated[str, Meta(min_length=1, max_length=512)]
    name: str | None = None
    tls_verify: bool = True


class BuildImage(Struct, kw_only=True, forbid_unknown_fields=True):
    """Build a distribution image over the node's own package mirror."""

    distribution: Literal["debian"]
    suite: Annotated[str, Meta(pattern=r"^[a-z][a-z0-9-]{0,30}$")] | None = None
    name: str | None = None
    packages: list[Annotated[str, Meta(pattern=r"^[a-z0-9][a-z0-9+.:-]{0,127}$")]] = field(
        default_factory=list
    )


class ImageProgress(Struct, tag_field="type", tag="progress", kw_only=True, omit_defaults=True):
    """A step of an import; sizes in bytes, `total` 0 while unknown."""

    step: str
    done: int = 0
    total: int = 0


class ImageReady(Struct, tag_field="type", tag="ready", kw_only=True):
    """Last line of an import that worked."""

    image: ImageView


LayerKind = Literal["workspace", "toolkit"]
LayerName = Annotated[str, Meta(min_length=1, max_length=256)]


class LayerView(Struct, kw_only=True, omit_defaults=True):
    """A version of a workspace or toolkit: an immutable layer put over an image at creation."""

    kind: LayerKind
    name: str
    """`name:version`."""
    digest: str
    size_bytes: int = 0
    """Of its files."""
    entries: int = 0
    created_at: float = 0.0
    source: str = ""
    description: str = ""
    used_by: int = 0
    """Sandboxes on this node that stand on it now."""


class LayerReady(Struct, tag_field="type", tag="ready", kw_only=True):
    """Last line of a publication that worked."""

    layer: LayerView


class EnvironmentRef(Struct, kw_only=True, forbid_unknown_fields=True):
    """What a sandbox is composed of, bottom first: image, workspace, toolkits."""

    image: Annotated[str, Meta(min_length=1, max_length=512)]
    workspace: LayerName | None = None
    toolkits: Annotated[list[LayerName], Meta(max_length=32)] = field(default_factory=list)


Severity = Literal["error", "warning", "advice"]


class LintRule(Struct, kw_only=True, forbid_unknown_fields=True):
    """A rule of the caller's own: files that match it are findings."""

    id: Annotated[str, Meta(pattern=r"^[a-z0-9][a-z0-9-]{0,63}$")]
    severity: Severity = "warning"
    message: Annotated[str, Meta(min_length=1, max_length=500)]
    path: str = "**"
    """Glob over absolute paths; `**` crosses directories."""
    content: str | None = None
    """Regular expression searched for in the first MiB of regular files."""
    advice: str = ""


class LintRequest(EnvironmentRef, kw_only=True, forbid_unknown_fields=True):
    """Look an environment over for what spoils an evaluation."""

    answers: Annotated[list[Annotated[str, Meta(max_length=4096)]], Meta(max_length=5000)] = field(
        default_factory=list
    )
    """Texts that must not be found: lines of the reference solution, names of hidden tests."""
    rules: Annotated[list[LintRule], Meta(max_length=200)] = field(default_factory=list)
    disabled: Annotated[list[Annotated[str, Meta(max_length=128)]], Meta(max_length=500)] = field(
        default_factory=list
    )
    """Rule ids that are not applied."""


class LintFinding(Struct, kw_only=True, omit_defaults=True):
    """One thing found."""

    rule: str
    severity: Severity
    message: str
    path: str = ""
    layer: str = ""
    """Which part has it: image, or `workspace NAME`, `toolkit NAME`."""
    advice: str = ""


class LintReport(Struct, kw_only=True):
    """Everything found, worst first."""

    environment: EnvironmentRef
    findings: list[LintFinding]
    entries: int = 0
    size_bytes: int = 0
    layers: int = 0
    rules: list[str] = field(default_factory=list)
    """Ids of the rules applied."""
    truncated: bool = False
    """There were more findings than are shown."""


class TraceRead(Struct, frozen=True, array_like=True):
    """Some bytes read for the first time."""

    at_ms: int
    part: int
    """Index into `TraceView.parts`."""
    offset: int
    length: int


class TracePart(Struct, kw_only=True):
    """A data device of the environment."""

    layer: str
    """Which part it belongs to: image, or `workspace NAME`, `toolkit NAME`."""
    digest: str
    size_bytes: int
    read_bytes: int = 0


class TraceFile(Struct, kw_only=True):
    """A file a run read from."""

    path: str
    layer: str
    size_bytes: int
    read_bytes: int


class TraceView(Struct, kw_only=True):
    """What a run read of an environment: bytes over time, by part and by file."""

    environment: EnvironmentRef
    trace: str
    """Its name: the task's, or "" for the environment's own."""
    recorded_at: float
    parts: list[TracePart]
    reads: list[TraceRead]
    files: list[TraceFile] = field(default_factory=list)
    """The most read first."""
    total_bytes: int = 0
    read_bytes: int = 0


class StoreView(Struct, kw_only=True, omit_defaults=True):
    """The shared store and this node's part of it."""

    node: str
    url: str = ""
    """Empty = environments lie on the node alone."""
    reachable: bool = True
    detail: str = ""
    front: str = ""
    """How data is loaded on demand: fuse, fanotify, or "" for direct."""
    cache_used_bytes: int = 0
    cache_budget_bytes: int = 0
    fetched_bytes: int = 0
    requests: int = 0
    evicted_bytes: int = 0


class CollectReport(Struct, kw_only=True):
    """What a garbage collection removed from the store, or would."""

    dry_run: bool
    blobs: int
    bytes: int
    kept_blobs: int
    detail: str = ""


LeasePolicy = Literal["reap", "pause"]


class LeaseRequest(Struct, kw_only=True, forbid_unknown_fields=True):
    """Take or renew a job's lease."""

    epoch: Annotated[int, Meta(ge=0)] = 0
    """0 = take the next one, superseding whoever holds it; else renew that epoch."""
    ttl_s: Annotated[float, Meta(ge=1, le=7 * 86400)] = 300.0
    on_lapse: LeasePolicy = "pause"
    """What becomes of the job's sandboxes when it is not renewed in time."""
    on_superseded: LeasePolicy = "reap"
    """What becomes of those of older epochs."""


class JobView(Struct, kw_only=True, omit_defaults=True):
    """A job: its lease, if it has one, and its sandboxes.

    What a lease request is answered with says nothing of sandboxes: no node is asked.
    """

    job: str
    project: str
    epoch: int = 0
    """0 = it never had a lease."""
    expires_at: float | None = None
    lapsed: bool = False
    on_lapse: LeasePolicy = "pause"
    on_superseded: LeasePolicy = "reap"
    running: int = 0
    paused: int = 0
    sandboxes: int = 0
    """All that are not over."""


class JobItem(Struct, kw_only=True, omit_defaults=True):
    """One sandbox of a job that was asked for something: how it stands, or why not."""

    id: str
    sandbox: SandboxView | None = None
    error: ErrorBody | None = None


class Version(Struct, kw_only=True):
    """Versions of the server and its API."""

    version: str
    api: str = "v1"
