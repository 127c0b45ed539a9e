"""Which layers a sandbox's root is made of, and in which order. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from dsec.base.errors import InvalidRequest

MAX_LAYERS = 500
"""overlayfs takes 500 lower directories."""


def plan_layers(
    image: Sequence[str], *, workspace: Sequence[str] = (), toolkits: Sequence[Sequence[str]] = ()
) -> list[str]:
    """Order the layers of a sandbox for overlayfs.

    The workspace lies over the image, since it belongs to one task, and toolkits lie over both, so
    that a tool is found whatever the task did; a later toolkit lies over an earlier one.

    Args:
        image: the base image's layers, bottom first.
        workspace: the workspace's layers, bottom first.
        toolkits: each toolkit's layers, bottom first.

    Returns:
        Digests, topmost first, each once (the topmost use of it stays).

    Raises:
        InvalidRequest: none at all, or more than overlayfs takes.
    """
    bottom_first = [*image, *workspace, *(layer for kit in toolkits for layer in kit)]
    topmost_first = list(dict.fromkeys(reversed(bottom_first)))
    if not topmost_first:
        raise InvalidRequest("the image has no layers")
    if len(topmost_first) > MAX_LAYERS:
        raise InvalidRequest(
            f"{len(topmost_first)} layers are more than the {MAX_LAYERS} overlayfs takes"
        )
    return topmost_first
