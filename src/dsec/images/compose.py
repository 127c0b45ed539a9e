"""Which layers a sandbox's root is made of, and in which order. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields

import msgspec

from dsec.base.digests import digest_of
from dsec.base.errors import InvalidRequest
from dsec.images.records import DirectoryMark, LayerRecord

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


@dataclass(frozen=True, slots=True)
class MergeLimits:
    """How far consecutive layers of one image are merged into one."""

    content_bytes: int = 3 << 30
    """The paper's size: larger ones gain nothing and share less."""
    devices: int = 64
    """Their paths are given to one mount call."""
    shared_bytes: int = 32 << 20
    """What other images stand on too is mounted once for all of them, if it is this large."""

    def __post_init__(self) -> None:
        """See that each run can have something in it.

        Raises:
            InvalidRequest: one of them is less than 1.
        """
        for limit in fields(self):
            if (value := getattr(self, limit.name)) < 1:
                raise InvalidRequest(f"{limit.name} is {value}: it must be at least 1")


def plan_merges(
    records: Sequence[LayerRecord], limits: MergeLimits, others: Iterable[Sequence[str]] = ()
) -> list[list[str]]:
    """Runs of layers that become one mount each.

    Fewer mounts are cheaper to put together; a mount that other images have too is loaded, and lies
    in the page cache, once. So runs are cut where another image goes another way.

    Args:
        records: an image's layers, bottom first.
        limits: of each run.
        others: the layers of other images, bottom first.

    Returns:
        The digests in the same order, each once (the topmost use of it stays), in runs.
    """
    digests = [record.digest for record in records]
    cuts = {_common(digests, other) for other in others} - {len(digests)}
    last = {digest: place for place, digest in enumerate(digests)}
    runs: list[list[LayerRecord]] = []
    for place, record in enumerate(records):
        if runs and place in cuts and _content(runs[-1]) >= limits.shared_bytes:
            runs.append([])
        if last[record.digest] != place:
            continue
        if runs and (not runs[-1] or _fits([*runs[-1], record], limits)):
            runs[-1].append(record)
        else:
            runs.append([record])
    return [[record.digest for record in run] for run in runs]


def _common(one: Sequence[str], other: Sequence[str]) -> int:
    """How many layers two images have in common, from the bottom."""
    return next(
        (n for n, (a, b) in enumerate(zip(one, other, strict=False)) if a != b),
        min(len(one), len(other)),
    )


def _content(run: Sequence[LayerRecord]) -> int:
    return sum(record.content_bytes for record in run)


def _fits(run: Sequence[LayerRecord], limits: MergeLimits) -> bool:
    devices = {device for record in run for device in record.devices}
    return _content(run) <= limits.content_bytes and len(devices) <= limits.devices


PLAIN = (0o755, 0, 0)
"""Mode, uid and gid a layer's directory has if its tar says nothing about it."""
Look = Callable[[int, str], DirectoryMark | None]
"""What a layer (its place, topmost first) has under a path: a directory, or None for nothing.

Raises `HiddenError` if it has something else there that hides what is below.
"""


class HiddenError(Exception):
    """Nothing of lower layers shows through under that path."""


def plan_mends(implied: Sequence[Sequence[str]], look: Look) -> list[DirectoryMark]:
    """Directories that must be given back the attributes they have in a lower layer.

    overlayfs takes a directory's owner and mode from the topmost layer that has it, also where that
    layer has it only for what is in it.

    Args:
        implied: of each layer, topmost first, the directories it says nothing about.
        look: asked about those alone.

    Returns:
        What they shall be, parents first; those that are so already are left out.
    """
    known = [frozenset(paths) for paths in implied]
    wanted = sorted({path for paths in implied[:-1] for path in paths})
    found = [mark for path in wanted if (mark := _mark_of(path, known, look)) is not None]
    return [mark for mark in found if (mark.mode, mark.uid, mark.gid) != PLAIN]


def _mark_of(path: str, implied: Sequence[frozenset[str]], look: Look) -> DirectoryMark | None:
    """What the topmost layer that says it makes of a directory; None if that one is on top."""
    is_mended = False
    for number, paths in enumerate(implied):
        if path in paths:
            is_mended = True
            continue
        try:
            mark = look(number, path)
        except HiddenError:
            return None
        if mark is not None:
            return mark if is_mended else None
    return None


def key_over(diff_id: str, below: Sequence[str]) -> str:
    """The digest of a layer that fits over certain layers alone: it covers them too."""
    return _key({"diff_id": diff_id, "below": list(below)})


def key_of_merged(run: Sequence[str], *, bottom: bool) -> str:
    """The digest of several layers in one; at the bottom of an image, deletions are gone from it."""
    return _key({"merged": list(run), "bottom": bottom})


def _key(facts: dict[str, object]) -> str:
    body = msgspec.json.encode(facts, order="deterministic")
    return digest_of(body)
