"""What is written down about layers and images. Shapes: spec/formats.md."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping

import msgspec
from msgspec import Struct, field

from dsec.base.errors import InternalError, InvalidRequest
from dsec.wire.public_v1 import ImageView

_DIGEST = re.compile(r"sha256:[0-9a-f]{64}")


def check_digest(text: str) -> str:
    """Check `sha256:` and 64 hex digits; a digest becomes a directory's name.

    Raises:
        InvalidRequest: it is something else.
    """
    if not _DIGEST.fullmatch(text):
        raise InvalidRequest(f"{text[:100]!r} is not a digest: sha256: and 64 hex digits")
    return text


class LayerRecord(Struct, kw_only=True, frozen=True):
    """`layers/<hex>/layer.json`."""

    digest: str
    """What the layer is found by: its diff_id, or see `below`."""
    source: str
    """Where it came from, for people."""
    size_bytes: int
    created_at: float
    mkfs: str
    """Version of mkfs.erofs."""
    diff_id: str = ""
    """sha256 of the uncompressed tar; empty if it was made from a directory."""
    below: list[str] = field(default_factory=list)
    """Layers it was made over (bottom first), if its tar left something to them: then `digest`
    covers them too and the layer fits over these alone."""


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
    size_bytes: int
    created_at: float
    source: str
    config: ImageConfig = ImageConfig()


def digest_of(layers: list[str], config: ImageConfig) -> str:
    """A digest for an image that came without a manifest."""
    body = msgspec.json.encode({"layers": layers, "config": config}, order="deterministic")
    return f"sha256:{hashlib.sha256(body).hexdigest()}"


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


def encode(record: LayerRecord | ImageRecord) -> bytes:
    """A record as the file holds it: readable JSON."""
    return msgspec.json.format(msgspec.json.encode(record), indent=1) + b"\n"


def decode_layer(data: bytes, file: str) -> LayerRecord:
    """Read a layer's record.

    Raises:
        InternalError: the file is damaged; it names it.
    """
    try:
        return msgspec.json.decode(data, type=LayerRecord)
    except msgspec.MsgspecError as error:
        raise InternalError(f"{file} is damaged: {error}", path=file) from error


def decode_image(data: bytes, file: str) -> ImageRecord:
    """Read an image's record.

    Raises:
        InternalError: the file is damaged; it names it.
    """
    try:
        return msgspec.json.decode(data, type=ImageRecord)
    except msgspec.MsgspecError as error:
        raise InternalError(f"{file} is damaged: {error}", path=file) from error


def env_from_pairs(pairs: list[str]) -> dict[str, str]:
    """OCI's `NAME=value` strings as a mapping; a later one wins."""
    split: Mapping[str, str] = dict(pair.partition("=")[::2] for pair in pairs if "=" in pair)
    return dict(split)
