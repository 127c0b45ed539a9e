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


class Version(Struct, kw_only=True):
    """Versions of the server and its API."""

    version: str
    api: str = "v1"
