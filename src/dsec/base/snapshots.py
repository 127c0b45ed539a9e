"""Names of snapshots' images: `snapshots/<project>/<name>`, reserved for them."""

from __future__ import annotations

PREFIX = "snapshots/"


def is_snapshot(image: str) -> bool:
    """Whether an image's name is reserved for a snapshot."""
    return image.startswith(PREFIX)


def project_in(image: str) -> str:
    """The project whose snapshot an image is; "" for every other image."""
    return image.removeprefix(PREFIX).rpartition("/")[0] if is_snapshot(image) else ""
