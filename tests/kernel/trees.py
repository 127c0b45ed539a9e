"""Trees compared: what the layers of an image show as one against what umoci unpacks."""

from __future__ import annotations

import hashlib
import os
import stat
import subprocess
from pathlib import Path
from typing import Any

from dsec.images.records import Environment, EnvironmentPart, ImageRecord, view
from dsec.images.service import ImageService
from dsec.linux import mounts

Inventory = dict[str, dict[str, Any]]
"""Path relative to the tree's root -> everything that can be seen of it."""


def run(*argv: str | Path, cwd: Path | None = None, env: dict[str, str] | None = None) -> str:
    """Run a program that must succeed; what it wrote."""
    done = subprocess.run(argv, cwd=cwd, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{argv}: {done.stdout}{done.stderr}"
    return done.stdout


async def mounted(images: ImageService, record: ImageRecord, owner: str) -> list[Path]:
    """Mount an image's layers for an owner; topmost first."""
    part = EnvironmentPart(label="image", layers=record.mounts or record.layers)
    return await images.environments.mount(Environment(image=view(record), parts=[part]), owner)


async def overlaid(images: ImageService, record: ImageRecord, target: Path) -> Path:
    """A read-only overlay of an image, as a sandbox would see it."""
    layers = await mounted(images, record, "sbx-test")
    return mount_view(layers, target)


def mount_view(layers: list[Path], target: Path) -> Path:
    """Lay layers over each other, the first on top."""
    target.mkdir()
    (target.parent / "empty").mkdir(exist_ok=True)
    stack = layers if len(layers) > 1 else [*layers, target.parent / "empty"]
    mounts.mount_overlay_view([str(layer) for layer in stack], target)
    return target


def inventory(root: Path) -> Inventory:
    """Look at every file of a tree; links to one file are told by the first of their names."""
    found: Inventory = {".": _describe(root, is_root=True)}
    for directory, directories, files in os.walk(root):
        for name in [*directories, *files]:
            path = Path(directory) / name
            found[str(path.relative_to(root))] = _describe(path)
    return _with_first_names(found)


def _describe(path: Path, *, is_root: bool = False) -> dict[str, Any]:
    status = path.lstat()
    kind = stat.S_IFMT(status.st_mode)
    found: dict[str, Any] = {
        "mode": oct(status.st_mode),
        "owner": (status.st_uid, status.st_gid),
        "mtime_ns": None if is_root else status.st_mtime_ns,
        "xattrs": {
            name: os.getxattr(path, name, follow_symlinks=False)
            for name in sorted(os.listxattr(path, follow_symlinks=False))
        },
        "inode": (status.st_dev, status.st_ino),
    }
    if kind in (stat.S_IFCHR, stat.S_IFBLK):
        found["rdev"] = (os.major(status.st_rdev), os.minor(status.st_rdev))
    if kind == stat.S_IFLNK:
        found["target"] = str(path.readlink())
    if kind == stat.S_IFREG:
        found["size"] = status.st_size
        with path.open("rb") as file:
            found["content"] = hashlib.file_digest(file, "sha256").hexdigest()
    if kind != stat.S_IFDIR:
        found["nlink"] = status.st_nlink
    return found


def _with_first_names(found: Inventory) -> Inventory:
    first: dict[tuple[int, int], str] = {}
    for name in sorted(found):
        inode = found[name].pop("inode")
        if found[name].get("nlink", 1) > 1:
            found[name]["is"] = first.setdefault(inode, name)
    return found


def differences(ours: Inventory, theirs: Inventory) -> list[str]:
    """What differs, in words, by name."""
    said = [f"{name!r} is missing" for name in sorted(theirs.keys() - ours.keys())]
    said += [f"{name!r} should not be there" for name in sorted(ours.keys() - theirs.keys())]
    for name in sorted(ours.keys() & theirs.keys()):
        for what in sorted(ours[name].keys() | theirs[name].keys()):
            one, other = ours[name].get(what), theirs[name].get(what)
            if one != other:
                said.append(f"{name!r}: {what} is {one!r}, not {other!r}")
    return said


def assert_same(found: Path, expected: Path | Inventory) -> None:
    """Every file has the same name, kind, attributes and content, and is linked to the same."""
    theirs = expected if isinstance(expected, dict) else inventory(expected)
    said = differences(inventory(found), theirs)
    assert not said, f"{len(said)} differences:\n  " + "\n  ".join(said[:40])
