"""What a workspace or toolkit does to the parts below it."""

from __future__ import annotations

import stat
from collections.abc import Iterator

from dsec.images.lint.environment import Environment
from dsec.images.lint.rule import Family, Found, Rule
from dsec.images.overlaid import Entry, Hidden

OVERRIDES = Rule(
    "toolkit-overrides",
    "warning",
    "A toolkit replaces or deletes a file of another part.",
    "The environment behaves otherwise than without the toolkit, in what is not the toolkit's.",
    "Install toolkits below a directory of their own, such as /opt/NAME.",
)
DIRECTORY_MODE = Rule(
    "layer-directory-mode",
    "warning",
    "A workspace or toolkit changes the mode or owner of a directory that is there already.",
    "A root directory of mode 0700 locks all users out; a /tmp that is not sticky is everybody's.",
    "Publish it with the directory's mode and owner, or leave the directory out.",
)


def look(env: Environment) -> Iterator[Found]:
    """Judge what is hidden, and directories that are merged."""
    for hidden in env.hidden:
        upper = env.label(hidden.upper.part)
        if upper.startswith("toolkit") and upper != env.label(hidden.lower.part):
            yield _override(env, hidden)
    for entry in env.entries.values():
        if entry.under and not env.label(entry.part).startswith("image"):
            yield from _directory(env, entry)


def _override(env: Environment, hidden: Hidden) -> Found:
    what = "a directory" if hidden.lower.inode.is_dir else "a file"
    verb = "deletes" if hidden.upper.inode.is_whiteout else "replaces"
    message = f"it {verb} {what} of {env.label(hidden.lower.part)}"
    return OVERRIDES.of(message, hidden.path, hidden.upper.part)


def _directory(env: Environment, entry: Entry) -> Iterator[Found]:
    top, below = entry.inode, entry.under[0].inode
    label = env.label(entry.under[0].part)
    if label == env.label(entry.part):
        return
    if top.mode != below.mode:
        old, new = stat.S_IMODE(below.mode), stat.S_IMODE(top.mode)
        yield DIRECTORY_MODE.at(f"its mode becomes {new:04o}; {label} has {old:04o}", entry)
    if (top.uid, top.gid) != (below.uid, below.gid):
        yield DIRECTORY_MODE.at(
            f"its owner becomes {top.uid}:{top.gid}; {label} has {below.uid}:{below.gid}", entry
        )


FAMILY = Family("layers", (OVERRIDES, DIRECTORY_MODE), look)
