"""Which hierarchies this host has mounted, and where a node's groups go in them.

By default they go to the top of each hierarchy, not below the edge's own group: sandboxes outlive the
edge, and a service manager that ends a service ends all in its group.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from dsec.linux.cgroup import files
from dsec.linux.cgroup.interface import Layout

WANTED = ("memory", "cpu", "cpuacct", "pids")


@dataclass(frozen=True)
class Mount:
    """One mounted hierarchy."""

    path: str
    version: int
    controllers: tuple[str, ...]


def parse_mounts(mountinfo: str) -> list[Mount]:
    """The cgroup mounts among the lines of /proc/self/mountinfo; whole hierarchies only."""
    mounts = []
    for line in mountinfo.splitlines():
        before, _, after = line.partition(" - ")
        left, right = before.split(), after.split()
        if len(right) < 3 or right[0] not in ("cgroup", "cgroup2"):
            continue
        path = left[4].replace("\\040", " ")
        if right[0] == "cgroup2":
            mounts.append(Mount(path, 2, ()))
        else:
            mounts.append(Mount(path, 1, tuple(right[2].split(","))))
    return mounts


def layout(
    node: str,
    mounts: list[Mount],
    v2_controllers: dict[str, str],
    *,
    memsw: bool = False,
    parent: str = "",
) -> Layout:
    """Choose the directories. Pure.

    Args:
        node: the node's id.
        mounts: what is mounted.
        v2_controllers: path of a v2 mount -> its cgroup.controllers.
        memsw: whether the kernel can bound swap.
        parent: where in each hierarchy; "" = at its top.
    """
    inside = parent.strip("/")
    v1: dict[str, str] = {}
    v2, have = "", list[str]()
    for mount in mounts:
        if mount.version == 2 and not v2:
            v2 = str(Path(mount.path) / inside)
            have = [c for c in ("memory", "cpu", "pids") if c in v2_controllers[mount.path].split()]
        for controller in mount.controllers:
            if controller in WANTED:
                v1.setdefault(controller, str(Path(mount.path) / inside))
    return Layout(
        base=f"dsec-{node}",
        v2=v2,
        v2_controllers=have,
        v2_swap=memsw,
        # processor time is read from v2 where there is any: one group less per sandbox
        v1={c: d for c, d in v1.items() if c not in have and not (c == "cpuacct" and v2)},
        memsw=memsw,
    )


def detect(node: str, parent: str = "") -> Layout:
    """Look at this host."""
    mounts = parse_mounts(files.read(Path("/proc/self/mountinfo")))
    v2 = {m.path: files.read(Path(m.path, "cgroup.controllers")) for m in mounts if m.version == 2}
    # The top of a v2 hierarchy has no limit files, so there the kernel's own word is taken.
    memsw = Path("/proc/swaps").exists() and all(
        Path(m.path, "memory.memsw.limit_in_bytes").exists()
        for m in mounts
        if "memory" in m.controllers
    )
    return layout(node, mounts, v2, memsw=memsw, parent=parent)
