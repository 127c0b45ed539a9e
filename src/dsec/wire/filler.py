"""What the edge and the node's filler say to each other. Words: spec/filler.md.

The filler is the process that fetches data of lazily loaded layers. HTTP over a Unix socket; JSON.
"""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta, Struct, field

from dsec.base.digests import PATTERN

Digest = Annotated[str, Meta(pattern=f"^{PATTERN}$")]


class OpenData(Struct, kw_only=True, forbid_unknown_fields=True):
    """Serve a data device whose chunks lie in the store. Sending it again is harmless."""

    digest: Digest
    """Of the raw data."""
    size_bytes: Annotated[int, Meta(ge=4096)]
    chunk_bytes: Annotated[int, Meta(ge=4096, le=16 << 20)]
    raw: str = ""
    """Path of a local file that holds the data whole: nothing is fetched then, and there is no
    table. For recordings of data that is here."""
    pack: str = ""
    """Digest of the blob with the stored chunks, back to back."""
    pack_bytes: int = 0
    table: str = ""
    """Path of a local file: per chunk u32 stored size, 32 bytes sha256 of what is stored; the
    filler keeps a copy."""


class DataOpened(Struct, kw_only=True):
    """Where the device is now."""

    path: str


class StartRecording(Struct, kw_only=True, forbid_unknown_fields=True):
    """Give devices of their own, whose reads are written down, to one sandbox."""

    recording: Annotated[str, Meta(pattern=r"^[A-Za-z0-9_-]{1,64}$")]
    digests: list[Digest]


class RecordingStarted(Struct, kw_only=True):
    """The devices, in the order asked for."""

    paths: list[str]


class ReadSpan(Struct, frozen=True, array_like=True):
    """A first read of some chunks that follow each other."""

    at_ms: int
    """Since the recording started."""
    device: int
    """Index into `Recording.digests`."""
    first: int
    """First chunk."""
    count: int


class Recording(Struct, kw_only=True):
    """What was read so far, each chunk once, in order."""

    recording: str
    digests: list[str]
    chunk_bytes: int
    started_at: float
    spans: list[ReadSpan] = field(default_factory=list)


class Prefetch(Struct, kw_only=True, forbid_unknown_fields=True):
    """Fetch chunks nobody waits for yet, in this order; returns at once."""

    digest: Digest
    spans: list[tuple[int, int]]
    """First chunk and count."""


class DataStatus(Struct, kw_only=True):
    """One data device."""

    digest: str
    size_bytes: int
    present_bytes: int
    """In the node's cache, uncompressed."""
    fetched_bytes: int
    """Taken from the store since the filler began, as stored."""
    failing: bool = False
    """The last fetch failed."""
    last_error: str = ""
    last_error_at: float = 0.0
    errors: int = 0


class FillerStatus(Struct, kw_only=True):
    """The filler as it stands."""

    pid: int
    version: str
    front: str
    """fuse or fanotify."""
    store: str
    used_bytes: int
    """Of the cache."""
    budget_bytes: int
    """0 = no limit."""
    fetched_bytes: int
    requests: int
    """Range requests to the store."""
    evicted_bytes: int = 0
    data: list[DataStatus] = field(default_factory=list)


class DataEvent(Struct, kw_only=True):
    """A device began to fail, or works again. The stream of events begins with all that fail."""

    digest: str
    failing: bool
    code: str = "data_unavailable"
    """Why, as an error's code: the store does not give it, or `storage_full`: the cache cannot take it."""
    message: str = ""
    at: float = 0.0
