"""A document as an OCI artifact: a manifest whose first layer is the body. Pure.

The other layers are the blobs the document needs: a registry's garbage collection keeps what a
manifest names, and knows nothing else of ours.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import msgspec
from msgspec import Struct, field

from dsec.base.digests import digest_of
from dsec.base.errors import DataUnavailable
from dsec.images.store.interface import BlobRef, DocumentKind
from dsec.images.store.layout import check_name

MANIFEST_TYPE = "application/vnd.oci.image.manifest.v1+json"
MAX_MANIFEST_BYTES = 4 << 20
"""What registries take."""
EMPTY = b"{}"
EMPTY_REF = BlobRef(digest_of(EMPTY), len(EMPTY))
_EMPTY_TYPE = "application/vnd.oci.empty.v1+json"
_BLOB_TYPE = "application/vnd.dsec.blob.v1"
_NAME = "dev.dsec.name"
_HASH_CHARACTERS = 32


class Descriptor(Struct, rename="camel", frozen=True):
    """What a manifest says about a blob."""

    media_type: str
    digest: str
    size: int


class Artifact(Struct, rename="camel", frozen=True):
    """A manifest of ours."""

    media_type: str
    artifact_type: str
    config: Descriptor
    layers: list[Descriptor]
    annotations: dict[str, str] = field(default_factory=dict)
    schema_version: int = 2

    @property
    def name(self) -> str:
        """The document's name."""
        return self.annotations.get(_NAME, "")


def tag_of(kind: DocumentKind, name: str) -> str:
    """The tag a document has: names of ours do not fit into one.

    Raises:
        InvalidRequest: the name is empty or too long.
    """
    return f"{kind}-{hashlib.sha256(check_name(name)).hexdigest()[:_HASH_CHARACTERS]}"


def is_tag_of(kind: DocumentKind, tag: str) -> bool:
    """Whether a tag is that of a document of this kind."""
    start = f"{kind}-"
    return tag.startswith(start) and len(tag) == len(start) + _HASH_CHARACTERS


def manifest(kind: DocumentKind, name: str, body: BlobRef, blobs: Sequence[BlobRef]) -> bytes:
    """The manifest of a document; the same for the same."""
    own = _type_of(kind)
    needed = {blob.digest: blob.size_bytes for blob in blobs}
    artifact = Artifact(
        media_type=MANIFEST_TYPE,
        artifact_type=own,
        config=Descriptor(_EMPTY_TYPE, EMPTY_REF.digest, EMPTY_REF.size_bytes),
        layers=[
            Descriptor(own, body.digest, body.size_bytes),
            *(Descriptor(_BLOB_TYPE, digest, size) for digest, size in sorted(needed.items())),
        ],
        annotations={_NAME: name},
    )
    return msgspec.json.encode(artifact)


def read_manifest(data: bytes, tag: str) -> Artifact:
    """Read the manifest at a tag.

    Raises:
        DataUnavailable: it is not one of ours.
    """
    try:
        artifact = msgspec.json.decode(data, type=Artifact)
    except msgspec.MsgspecError as error:
        raise DataUnavailable(f"what the registry has at {tag} is no document: {error}") from error
    if not artifact.layers or not artifact.name:
        raise DataUnavailable(f"what the registry has at {tag} is no document")
    return artifact


def _type_of(kind: DocumentKind) -> str:
    return f"application/vnd.dsec.{kind}.v1+json"
