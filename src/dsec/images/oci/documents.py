"""The JSON of OCI images, as much of it as is needed, and the choice of a platform. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

import msgspec
from msgspec import Struct, field

from dsec.base.errors import InvalidRequest, Unsupported
from dsec.images.records import ImageConfig, env_from_pairs

T = TypeVar("T")

MAX_DOCUMENT_BYTES = 8 << 20
REF_NAME = "org.opencontainers.image.ref.name"
_MACHINES = {
    "x86_64": "amd64",
    "aarch64": "arm64",
    "riscv64": "riscv64",
    "ppc64le": "ppc64le",
    "s390x": "s390x",
    "i686": "386",
    "armv7l": "arm",
}


class Platform(Struct, frozen=True):
    """What a manifest of an index is for."""

    architecture: str = ""
    os: str = ""
    variant: str = ""


class Descriptor(Struct, frozen=True, rename="camel"):
    """A pointer to a blob."""

    digest: str
    size: int = 0
    media_type: str = ""
    platform: Platform | None = None
    annotations: dict[str, str] | None = None

    def ref_name(self) -> str:
        """The tag a layout gives it, "" if none."""
        return (self.annotations or {}).get(REF_NAME, "")


class Index(Struct, frozen=True, rename="camel"):
    """`index.json`, or a list of manifests."""

    manifests: list[Descriptor]


class Manifest(Struct, frozen=True, rename="camel"):
    """An image for one platform."""

    config: Descriptor
    layers: list[Descriptor]


class RootFs(Struct, frozen=True):
    """Digests of the uncompressed layers, bottom first."""

    diff_ids: list[str] = field(default_factory=list)


class RunConfig(Struct, frozen=True, rename="pascal"):
    """`config` of an image's configuration. Docker writes null for what is empty."""

    env: list[str] | None = None
    working_dir: str | None = None
    user: str | None = None
    entrypoint: list[str] | None = None
    cmd: list[str] | None = None

    def plain(self) -> ImageConfig:
        """As an image's record has it."""
        return ImageConfig(
            env=env_from_pairs(self.env or []),
            workdir=self.working_dir or "",
            user=self.user or "",
            entrypoint=self.entrypoint or [],
            cmd=self.cmd or [],
        )


class ConfigFile(Struct, frozen=True):
    """An image's configuration."""

    rootfs: RootFs
    architecture: str = ""
    os: str = ""
    config: RunConfig | None = None


class SavedImage(Struct, frozen=True, rename="pascal"):
    """One image of a `docker save` archive."""

    config: str
    layers: list[str]
    repo_tags: list[str] | None = None


class MediaTyped(Struct, frozen=True, rename="camel"):
    """Enough of a document to see what it is."""

    media_type: str = ""
    manifests: list[Descriptor] | None = None


def decode(data: bytes, shape: type[T], what: str) -> T:
    """Read a document of a foreign image.

    Raises:
        InvalidRequest: it is not what it should be; the message names it.
    """
    try:
        return msgspec.json.decode(data, type=shape)
    except msgspec.MsgspecError as error:
        raise InvalidRequest(f"{what} cannot be read: {error}") from error


def host_architecture(machine: str) -> str:
    """OCI's word for a machine as uname calls it."""
    return _MACHINES.get(machine, machine)


def pick_platform(candidates: Sequence[Descriptor], architecture: str, what: str) -> Descriptor:
    """The one manifest for linux on this architecture.

    Raises:
        Unsupported: there is none; the message lists what there is.
        InvalidRequest: several differ, and nothing says which is meant.
    """
    fitting = [d for d in candidates if _fits(d.platform, architecture)]
    if not fitting:
        there = ", ".join(sorted({_spell(d.platform) for d in candidates})) or "nothing"
        raise Unsupported(f"{what} has nothing for linux/{architecture}, only {there}")
    if len({d.digest for d in fitting}) > 1:
        names = ", ".join(d.ref_name() or d.digest[:19] for d in fitting[:8])
        raise InvalidRequest(f"{what} holds several images ({names}); import it with one inside")
    return fitting[0]


def _fits(platform: Platform | None, architecture: str) -> bool:
    if platform is None:
        return True
    return platform.os in ("", "linux") and platform.architecture in ("", architecture)


def _spell(platform: Platform | None) -> str:
    return f"{platform.os}/{platform.architecture}" if platform else "an unnamed platform"


def check_platform(config: ConfigFile, architecture: str, what: str) -> None:
    """Check that an image is for this host.

    Raises:
        Unsupported: it is for another.
    """
    if not _fits(Platform(config.architecture, config.os), architecture):
        raise Unsupported(
            f"{what} is for {config.os}/{config.architecture}, this node is linux/{architecture}"
        )
