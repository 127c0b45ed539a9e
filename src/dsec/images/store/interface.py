"""A store of blobs and documents, shared by nodes. One interface over directories, S3 and OCI.

Blobs are immutable and known by `sha256:<hex>` of what is stored. Documents are small JSON texts
under a kind and a name, replaced whole; each says which blobs it needs, so that a store that
collects garbage itself (an OCI registry) knows too.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

from msgspec import Struct

DocumentKind = Literal[
    "image", "layer", "workspace", "toolkit", "trace", "use", "intent", "trajectory"
]
MAX_DOCUMENT_BYTES = 16 << 20


class BlobRef(Struct, frozen=True):
    """A blob: what it is known by, and how large it is."""

    digest: str
    size_bytes: int


@dataclass(frozen=True, slots=True)
class FoundBlob:
    """A blob as a listing has it."""

    digest: str
    size_bytes: int
    modified_at: float
    """Seconds since the epoch, by the store's clock."""


def nothing(_done: int) -> None:
    """Take no note of progress."""


class BlobStore(Protocol):
    """All of it may raise Unavailable (also after a time-out) and PermissionDenied.

    Every call has a deadline of its own, set when the store is opened: a dead or hanging store
    fails it, and none of them waits for ever.
    """

    @property
    def url(self) -> str:
        """Where it is, without secrets; what `open_store` took."""
        ...

    async def put_blob(
        self, file: Path, digest: str, on_progress: Callable[[int], None] = nothing
    ) -> None:
        """Store a file under its digest; one that is there already is left as it is.

        Interrupted, it leaves no blob under that digest, and the next try goes on where it can.

        Args:
            file: what to store; it does not change meanwhile.
            digest: of its content.
            on_progress: told the bytes sent so far.

        Raises:
            StorageFull: no room in the store.
        """
        ...

    async def has_blob(self, digest: str) -> bool:
        """Whether it is there, whole."""
        ...

    async def read_blob(self, digest: str, offset: int, length: int) -> bytes:
        """Exactly `length` bytes from `offset`. What comes back is not verified.

        Raises:
            NotFound: (kind blob) there is none.
            Unavailable: also if the answer was shorter.
        """
        ...

    def list_blobs(self) -> AsyncIterator[FoundBlob]:
        """All blobs, in any order.

        Raises:
            Unsupported: the store cannot list and collects garbage itself.
        """
        ...

    async def delete_blob(self, digest: str) -> None:
        """Forget it; harmless if it is not there.

        Raises:
            Unsupported: the store collects garbage itself.
        """
        ...

    async def put_document(
        self,
        kind: DocumentKind,
        name: str,
        body: bytes,
        blobs: Sequence[BlobRef],
        *,
        absent: bool = False,
    ) -> None:
        """Store or replace a document.

        Args:
            kind: what it is.
            name: any text of at most 512 bytes.
            body: at most `MAX_DOCUMENT_BYTES`.
            blobs: what it needs; all are in the store already.
            absent: never replace another; one that says the same counts as this one.

        Raises:
            Conflict: `absent`, and there is another one. Of several who put at once, exactly one
                succeeds. (A registry has no such request: there it is looked for before and after,
                and only somebody who puts in just that moment is missed.)
        """
        ...

    async def get_document(self, kind: DocumentKind, name: str) -> bytes:
        """A document's text.

        Raises:
            NotFound: (kind document) there is none.
            DataUnavailable: there is one, and it is damaged.
        """
        ...

    def list_documents(self, kind: DocumentKind) -> AsyncIterator[str]:
        """The names of all documents of a kind, in any order."""
        ...

    async def delete_document(self, kind: DocumentKind, name: str) -> None:
        """Forget one; harmless if it is not there."""
        ...

    def blob_path(self, digest: str) -> Path | None:
        """Where the blob lies as a file on this host, if it does: it may be mounted from there."""
        ...

    async def aclose(self) -> None:
        """Give up connections."""
        ...
