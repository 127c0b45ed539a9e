"""The journaled facts of one sandbox: what is needed to reach it, and to remove it, after a crash."""

from __future__ import annotations

from pathlib import Path

import msgspec
from msgspec import Raw, Struct, field

from dsec.images.records import Environment, EnvironmentPart
from dsec.wire.public_v1 import ImageView
from dsec.wire.sandbox import SandboxSpec


class SandboxRecord(Struct, frozen=True, kw_only=True):
    """Written before anything of the sandbox is made; never changed afterwards."""

    id: str
    project: str
    spec: SandboxSpec
    environment: Environment
    """As it was resolved: a name may mean another content tomorrow."""
    created_at: float
    uid_base: int
    """First host id of its own run of 65,536; never shared with another live sandbox."""
    directory: str
    """Its own directory on the node; the journal is in it, and all that a backend stores."""
    socket: str
    """Where aether listens, for backends that use a Unix socket."""
    warnings: list[str] = field(default_factory=list)
    """What was asked for and is not to be had here."""

    @property
    def image(self) -> ImageView:
        """The image of its environment."""
        return self.environment.image

    @property
    def path(self) -> Path:
        """Its own directory."""
        return Path(self.directory)


def read_record(data: bytes) -> SandboxRecord:
    """A record as the journal has it; those of before environments name an image alone.

    Raises:
        MsgspecError: it makes no sense.
    """
    facts = msgspec.json.decode(data, type=dict[str, Raw])
    if "environment" not in facts and "image" in facts:
        image = msgspec.json.decode(facts["image"], type=ImageView)
        whole = EnvironmentPart(label="image", layers=image.layers)
        facts["environment"] = Raw(msgspec.json.encode(Environment(image=image, parts=[whole])))
    return msgspec.json.decode(msgspec.json.encode(facts), type=SandboxRecord)
