"""What makes an environment larger or slower than it need be."""

from __future__ import annotations

import stat
from collections.abc import Iterator

from dsec.base.quantity import GIB, MIB, format_size
from dsec.images.erofs.tree import Inode
from dsec.images.lint.environment import Environment
from dsec.images.lint.rule import Family, Found, Rule

TOTAL = Rule(
    "size-total",
    "advice",
    "The files of the environment are larger than 8 GiB together.",
    "Converting, storing and caching it takes its time; what a run reads is less by far.",
    "See the largest files and caches below; `dsec env trace` shows what runs read.",
)
BIG_FILE = Rule(
    "size-big-file",
    "advice",
    "A file is larger than 256 MiB (the ten largest are named).",
    "Archives, models and data sets are often left over from building.",
    "Remove it, or put it into a workspace of its own.",
)
CACHE = Rule(
    "size-cache",
    "advice",
    "A cache of a package manager holds more than 5 MiB.",
    "Nobody will read it.",
    "Clean it in the step that fills it: `apt-get clean`, `pip --no-cache-dir`, `npm cache clean`.",
)
LAYERS = Rule(
    "layers-many",
    "advice",
    "The environment is made of more than 20 layers.",
    "Each is a mount, and each name is looked up in every one.",
    "Build with fewer steps; small consecutive layers of an image are merged when it is imported.",
)
SHADOWED = Rule(
    "layers-shadowed",
    "advice",
    "Layers hold more than 32 MiB of files that layers above replace or delete.",
    "They are stored and never read.",
    "Delete files in the step that makes them; change modes and owners there too.",
)

_TOTAL_BYTES = 8 * GIB
_BIG_BYTES = 256 * MIB
_CACHE_BYTES = 5 * MIB
_SHADOWED_BYTES = 32 * MIB
_MANY_LAYERS = 20
_BIGGEST = 10
_CACHES = (
    b"/var/cache/apt",
    b"/var/lib/apt/lists",
    b"/var/cache/apk",
    b"/var/cache/dnf",
    b"/var/cache/yum",
    b"/opt/conda/pkgs",
    b"/usr/local/share/.cache/yarn",
    b"/go/pkg/mod/cache",
    b"/usr/local/cargo/registry/cache",
)
_IN_HOMES = (
    b".cache",
    b".npm/_cacache",
    b".cargo/registry/cache",
    b".gradle/caches",
    b".m2/repository",
    b".nuget/packages",
)


def look(env: Environment) -> Iterator[Found]:
    """Judge sizes."""
    files = {id(entry.inode): entry for entry in env.files()}
    total = sum(entry.inode.size for entry in files.values())
    if total > _TOTAL_BYTES:
        yield TOTAL.at(f"its files are {format_size(total)}")
    biggest = sorted(files.values(), key=lambda entry: -entry.inode.size)[:_BIGGEST]
    for entry in biggest:
        if entry.inode.size > _BIG_BYTES:
            yield BIG_FILE.at(f"it is {format_size(entry.inode.size)}", entry)
    yield from _caches(env)
    yield from _layers(env)


def _caches(env: Environment) -> Iterator[Found]:
    homes = env.find(b"/home")
    users = [e.path for e in env.children(homes)] if homes is not None else []
    inside = [home + b"/" + cache for home in [b"/root", *users] for cache in _IN_HOMES]
    for path in [*_CACHES, *inside]:
        directory = env.find(path)
        if directory is None or not directory.inode.is_dir:
            continue
        size = sum(e.inode.size for e in env.below(directory) if stat.S_ISREG(e.inode.mode))
        if size > _CACHE_BYTES:
            yield CACHE.at(f"it holds {format_size(size)}", directory)


def _layers(env: Environment) -> Iterator[Found]:
    layers = env.around.layers or len(env.parts)
    if layers > _MANY_LAYERS:
        yield LAYERS.at(f"there are {layers} layers")
    shadowed: dict[int, int] = {}
    for hidden in env.hidden:
        size = _size(hidden.lower.inode)
        shadowed[hidden.lower.part] = shadowed.get(hidden.lower.part, 0) + size
    for part, size in sorted(shadowed.items()):
        if size > _SHADOWED_BYTES:
            yield SHADOWED.of(f"{format_size(size)} of it are not seen from above", b"", part)


def _size(inode: Inode) -> int:
    """Of a file, or of all files below a directory."""
    pending, total = [inode], 0
    while pending:
        one = pending.pop()
        total += one.size if stat.S_ISREG(one.mode) else 0
        pending.extend(one.children.values())
    return total


FAMILY = Family("size", (TOTAL, BIG_FILE, CACHE, LAYERS, SHADOWED), look)
