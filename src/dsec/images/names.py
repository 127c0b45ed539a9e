"""Names of images, and references to images in a registry."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import NewType
from urllib.parse import quote, unquote

from dsec.base.errors import InvalidRequest

ImageName = NewType("ImageName", str)
"""`[registry/]path:tag`, the tag always written out."""

_COMPONENT = r"[a-z0-9]+(?:(?:\.|_|__|-+)[a-z0-9]+)*"
_HOST_PART = r"(?:[A-Za-z0-9](?:[A-Za-z0-9-]*[A-Za-z0-9])?)"
_HOST = rf"(?:{_HOST_PART}(?:\.{_HOST_PART})*|\[[0-9a-fA-F:]+\])(?::[0-9]{{1,5}})?"
_REFERENCE = re.compile(
    rf"(?:(?P<registry>{_HOST})/)?(?P<path>{_COMPONENT}(?:/{_COMPONENT})*)"
    r"(?::(?P<tag>[A-Za-z0-9_][A-Za-z0-9_.-]{0,127}))?"
    r"(?:@(?P<digest>sha256:[0-9a-f]{64}))?"
)
_SNAPSHOTS = "snapshots/"
_FREE = r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}"
_SNAPSHOT = re.compile(
    rf"(?P<path>{_SNAPSHOTS}(?P<project>{_FREE}(?:/{_FREE})*)/(?P<name>{_FREE}))(?::latest)?"
)
_FILE_NAME_LIMIT = 255 - len(".json") - len(".tmp")


@dataclass(frozen=True, slots=True)
class Reference:
    """A reference taken apart; empty strings where a part was not given."""

    registry: str
    path: str
    tag: str
    digest: str

    @property
    def repository(self) -> str:
        """Registry and path."""
        return f"{self.registry}/{self.path}" if self.registry else self.path


def _is_registry(host: str) -> bool:
    """Docker's rule: `localhost`, or anything with a dot, a colon or a capital, is a host."""
    return host == "localhost" or any(c in ".:[" or c.isupper() for c in host)


def parse_reference(text: str) -> Reference:
    """Take a reference apart as Docker does.

    Raises:
        InvalidRequest: it is not `[registry/]path[:tag][@sha256:...]`.
    """
    match = _REFERENCE.fullmatch(text)
    if not match:
        raise InvalidRequest(
            f"{text[:200]!r} is not an image reference: [registry/]name[:tag], "
            "the name in lower case, such as debian, team/tools:1.2 or registry.test:5000/a/b:1"
        )
    registry, path = match["registry"] or "", match["path"]
    if registry and not _is_registry(registry):
        registry, path = "", f"{registry}/{path}"
    return Reference(registry, path, match["tag"] or "", match["digest"] or "")


def image_name(text: str) -> ImageName:
    """Check a name and write out its tag: `debian` is `debian:latest`.

    A snapshot's name is `snapshots/<project>/<name>`, with capitals if the snapshot has them.

    Raises:
        InvalidRequest: it is no name, has a digest, or is too long to be a file's name.
    """
    if text.startswith(_SNAPSHOTS):
        return _snapshot_name(text)
    reference = parse_reference(text)
    if reference.digest:
        raise InvalidRequest(f"an image's name carries no digest: {text[:200]!r}")
    return _checked(f"{reference.repository}:{reference.tag or 'latest'}")


def _snapshot_name(text: str) -> ImageName:
    match = _SNAPSHOT.fullmatch(text)
    if not match:
        raise InvalidRequest(
            f"{text[:200]!r} is no snapshot: snapshots/PROJECT/NAME, of letters, digits and any of "
            "_ . -, without a tag"
        )
    return _checked(f"{match['path']}:latest")


def snapshot_name(project: str, name: str) -> ImageName:
    """The name of a snapshot's image.

    Raises:
        InvalidRequest: project and name do not make one.
    """
    return _snapshot_name(f"{_SNAPSHOTS}{project}/{name}")


def is_snapshot(name: str) -> bool:
    """Whether a name is one that snapshots alone have."""
    return name.startswith(_SNAPSHOTS)


def given_name(text: str) -> ImageName:
    """Check a name somebody wants to give to an image, as `image_name` does.

    Raises:
        InvalidRequest: it is no name, or kept for snapshots.
    """
    if is_snapshot(text):
        raise InvalidRequest(
            f"names under {_SNAPSHOTS} are those of snapshots; call the image {text[:200]!r} "
            "something else"
        )
    return image_name(text)


def name_of_reference(text: str) -> ImageName:
    """The name a pulled image gets if none was asked for: the reference itself.

    A digest becomes the tag `sha256-<its first 12 digits>` unless there is a tag.

    Raises:
        InvalidRequest: it is not a reference, or its name is kept for snapshots.
    """
    reference = parse_reference(text)
    digest_tag = reference.digest.replace(":", "-")[: len("sha256-") + 12]
    return given_name(f"{reference.repository}:{reference.tag or digest_tag or 'latest'}")


def _checked(name: str) -> ImageName:
    if len(quote(name, safe="")) > _FILE_NAME_LIMIT:
        raise InvalidRequest(f"image name {name[:80]!r}... is too long", length=len(name))
    return ImageName(name)


def file_name(name: ImageName) -> str:
    """The file an image's record is kept in."""
    return quote(name, safe="") + ".json"


def name_of_file(file: str) -> ImageName:
    """Undo `file_name`.

    Raises:
        InvalidRequest: no image's record has this name.
    """
    name = image_name(unquote(file.removesuffix(".json")))
    if file_name(name) != file:
        raise InvalidRequest(f"{file!r} is not the record of an image")
    return name
