"""What is written down about layers and images. Shapes: spec/formats.md."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeVar

import msgspec
from msgspec import Struct, field

from dsec.base.digests import check_digest as check_digest  # who reads records checks them too
from dsec.base.digests import digest_of as digest_of_bytes
from dsec.base.errors import InternalError
from dsec.images.store.interface import BlobRef
from dsec.wire.public_v1 import ImageView, LayerKind
from dsec.wire.sandbox import SnapshotView

R = TypeVar("R")
DIFFERENCE = "difference"
"""Label of the parts that sandboxes wrote."""


class DataRecord(Struct, kw_only=True, frozen=True):
    """`data/<hex>/data.json`: raw file data that layers point into."""

    digest: str
    """sha256 of the raw data."""
    size_bytes: int
    """A multiple of 4096, never 0."""
    packed: Packed | None = None
    """How it lies in a store, once it is known."""


class Packed(Struct, kw_only=True, frozen=True):
    """Data in a store: chunks compressed one by one with zstd, back to back in one blob."""

    pack: BlobRef
    table: BlobRef
    """Per chunk u32 little-endian stored size and sha256 of what is stored."""
    chunk_bytes: int
    """Of each chunk uncompressed; the last may be shorter."""
    raw: bool = False
    """The uncompressed data is a blob of the store too, under its own digest."""


class LayerRecord(Struct, kw_only=True, frozen=True):
    """`layers/<hex>/layer.json`: something that can be mounted."""

    digest: str
    """What the layer is found by: its diff_id, or see `below` and `merged`."""
    source: str
    """Where it came from, for people."""
    created_at: float
    meta: BlobRef
    """`meta.erofs` beside this file."""
    devices: list[str] = field(default_factory=list)
    """Digests of the data it points into, in the order of its device table."""
    entries: int = 0
    """Names in it."""
    content_bytes: int = 0
    """Of its regular files."""
    diff_id: str = ""
    """sha256 of the uncompressed tar; empty for a merged layer."""
    below: list[str] = field(default_factory=list)
    """Layers it was made over (bottom first), if its tar left something to them: then `digest`
    covers them too and the layer fits over these alone."""
    merged: list[str] = field(default_factory=list)
    """Layers it holds in one (bottom first); `digest` covers them."""
    implied: list[str] = field(default_factory=list)
    """Absolute paths of directories its tar did not list: over other layers than those it was made
    over they shall be what they are there. No more than `MAX_IMPLIED` and one."""


class StoredLayer(Struct, kw_only=True, frozen=True):
    """A document of kind `layer` in a store: all that is needed to mount it there lazily."""

    layer: LayerRecord
    meta: BlobRef
    """`meta.erofs`, compressed with zstd."""
    data: list[DataRecord]
    """Its devices in order, each with `packed`."""


class NamedLayer(Struct, kw_only=True, frozen=True):
    """`named/<kind>/<quoted name>.json`: a version of a workspace or toolkit."""

    kind: LayerKind
    name: str
    """`name:version`."""
    digest: str
    """Of its layer."""
    size_bytes: int
    created_at: float
    source: str
    description: str = ""


class ImageConfig(Struct, kw_only=True, frozen=True):
    """How a command in the image begins."""

    env: dict[str, str] = field(default_factory=dict)
    workdir: str = ""
    user: str = ""
    entrypoint: list[str] = field(default_factory=list)
    cmd: list[str] = field(default_factory=list)


class ImageRecord(Struct, kw_only=True, frozen=True):
    """`images/<quoted name>.json`."""

    name: str
    digest: str
    """Of the OCI manifest; for other sources, of the layers and the configuration."""
    layers: list[str]
    """Digests of the layers, bottom first as OCI has them."""
    mounts: list[str] = field(default_factory=list)
    """What is mounted for them, bottom first: layers, or several merged into one; empty = `layers`."""
    size_bytes: int
    created_at: float
    source: str
    config: ImageConfig = ImageConfig()
    snapshot: SnapshotRecord | None = None
    """Where it comes from, if it was packed from a sandbox."""

    @property
    def is_contested(self) -> bool:
        """Whether the store means another one by its name."""
        return self.snapshot is not None and self.snapshot.shown.conflict


class SnapshotFacts(Struct, kw_only=True, frozen=True):
    """What a snapshot is called and where it comes from."""

    project: str
    name: str
    sandbox: str
    step: int
    packed_by: str
    description: str
    frozen_ms: float
    unclean: bool = False
    """What it was packed over holds residue, whatever was left out of the difference itself."""


class SnapshotRecord(Struct, kw_only=True, frozen=True):
    """What makes an image a snapshot."""

    shown: SnapshotView
    """As the API shows it; `stored` is what this node knows."""
    parts: list[EnvironmentPart]
    """What a sandbox restored from it stands on, bottom first; the last is of differences."""
    differences: list[str]
    """The layers of the last part one by one, as far as they were here when it was packed; the
    last is its own."""


class DirectoryMark(Struct, kw_only=True, frozen=True):
    """What a directory is."""

    path: str
    """Absolute."""
    mode: int
    """Permission bits, with those for set-id and sticky."""
    uid: int
    gid: int


class EnvironmentPart(Struct, kw_only=True, frozen=True):
    """One part of an environment, as it was resolved."""

    label: str
    """`image`, `workspace NAME`, `toolkit NAME`; `difference` or `fork of SANDBOX`."""
    layers: list[str]
    """What is mounted for it, bottom first."""


def is_difference(part: EnvironmentPart) -> bool:
    """Whether a sandbox wrote it."""
    return part.label == DIFFERENCE or part.label.startswith("fork of ")


class Environment(Struct, kw_only=True, frozen=True):
    """What a sandbox stands on: names may mean other content tomorrow, this does not."""

    image: ImageView
    workspace: str = ""
    toolkits: list[str] = field(default_factory=list)
    parts: list[EnvironmentPart] = field(default_factory=list)
    """Bottom first."""

    @property
    def layers(self) -> list[str]:
        """All that is mounted, bottom first."""
        return [digest for part in self.parts for digest in part.layers]

    @property
    def digest(self) -> str:
        """Of its content, whatever the names."""
        return digest_of_all(self.layers)


def digest_of_all(digests: Sequence[str]) -> str:
    """One digest for several in order."""
    body = msgspec.json.encode(list(digests))
    return digest_of_bytes(body)


def digest_of(layers: list[str], config: ImageConfig) -> str:
    """A digest for an image that came without a manifest."""
    body = msgspec.json.encode({"layers": layers, "config": config}, order="deterministic")
    return digest_of_bytes(body)


def view(record: ImageRecord) -> ImageView:
    """The record as the API shows it."""
    config = record.config
    return ImageView(
        name=record.name,
        digest=record.digest,
        layers=record.layers,
        size_bytes=record.size_bytes,
        created_at=record.created_at,
        source=record.source,
        env=config.env,
        workdir=config.workdir,
        user=config.user,
        entrypoint=config.entrypoint,
        cmd=config.cmd,
    )


class KeptTrajectory(Struct, kw_only=True, frozen=True):
    """The trajectory of a sandbox that is over, in the store."""

    sandbox: str
    blob: BlobRef
    """The file behind a line that says whose it is, compressed with zstd."""
    kept_at: float
    """When it was put there."""
    project: str = ""
    """The sandbox's: who may read it. Empty in one that was sent before this was told: nobody may."""
    size_bytes: int = 0
    """Of the file."""


def encode(record: object) -> bytes:
    """A record as the file holds it: readable JSON."""
    return msgspec.json.format(msgspec.json.encode(record), indent=1) + b"\n"


def decode(data: bytes, type_: type[R], file: str) -> R:
    """Read a record.

    Raises:
        InternalError: it is damaged; the error names the file.
    """
    try:
        return msgspec.json.decode(data, type=type_)
    except msgspec.MsgspecError as error:
        raise InternalError(f"{file} is damaged: {error}", path=file) from error


def env_from_pairs(pairs: list[str]) -> dict[str, str]:
    """OCI's `NAME=value` strings as a mapping; a later one wins."""
    split: Mapping[str, str] = dict(pair.partition("=")[::2] for pair in pairs if "=" in pair)
    return dict(split)
