"""`pristine_node`: what a node is made of, before and after; nothing may be left behind.

A snapshot is taken of what belongs to one node only, so that suites may run side by side on one
machine: its processes, mounts (kept network namespaces are mounts), control groups, network devices
and packet rules, loop devices, the directories it was given (pinned eBPF objects are files there),
and the descriptors of its server.
"""

from __future__ import annotations

import os
import re
import shutil
import stat
import subprocess
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from pathlib import Path

SETTLE_S = 30.0
"""How long the traces of what has ended may take to go."""
OURS = re.compile(r"^(aether|dsec|probe)")
CGROUPS = Path("/sys/fs/cgroup")
GROWING = re.compile(
    r"(\.(db|sqlite)3?(-(wal|shm|journal))?|\.log|\.toml|\d\.ext4|lock|\.json|/trajectories/[^/]+)$"
)
"""Files of the state directory that are meant to be there, or to come and go."""


@dataclass(frozen=True)
class Node:
    """What to look at."""

    server_pid: int
    name: str = ""
    """Part of every sandbox's id, so of the names of its groups."""
    directories: tuple[Path, ...] = ()


@dataclass(frozen=True)
class Snapshot:
    """What a node consists of at one moment."""

    processes: Counter[str] = field(default_factory=Counter)
    mounts: Counter[str] = field(default_factory=Counter)
    cgroups: Counter[str] = field(default_factory=Counter)
    network_namespaces: Counter[str] = field(default_factory=Counter)
    network_devices: Counter[str] = field(default_factory=Counter)
    packet_rules: Counter[str] = field(default_factory=Counter)
    loop_devices: Counter[str] = field(default_factory=Counter)
    files: Counter[str] = field(default_factory=Counter)
    descriptors: Counter[str] = field(default_factory=Counter)

    def differences(self, before: Snapshot) -> list[str]:
        """What has come and what has gone, in words."""
        found: list[str] = []
        for each in fields(self):
            now, then = getattr(self, each.name), getattr(before, each.name)
            found += [f"{each.name}: left behind {n} x {what}" for what, n in (now - then).items()]
            found += [f"{each.name}: gone {n} x {what}" for what, n in (then - now).items()]
        return found


def snapshot(node: Node) -> Snapshot:
    """Look at a node."""
    members = list(_members(node))
    return Snapshot(
        processes=Counter(name for pid in members if (name := _comm(pid))),
        mounts=Counter(_mounts(node)),
        cgroups=Counter(_cgroups(node)),
        network_namespaces=Counter({"distinct": len(_namespaces(members))}),
        network_devices=Counter(_network_devices(node)),
        packet_rules=Counter(_packet_rules(node)),
        loop_devices=Counter(_loop_devices(node)),
        files=Counter(_files(node)),
        descriptors=Counter(set(_pooled(node.server_pid))) + Counter(_descriptors(node.server_pid)),
    )


@contextmanager
def pristine_node(look: Callable[[], Snapshot]) -> Iterator[Snapshot]:
    """Assert that a node is afterwards as it was before, once what has ended has gone.

    Args:
        look: takes a snapshot; see `snapshot`.
    """
    before = _settled(look)
    yield before
    deadline = time.monotonic() + SETTLE_S
    while differences := look().differences(before):
        if time.monotonic() > deadline:
            raise AssertionError("the node is not as it was:\n  " + "\n  ".join(differences))
        time.sleep(0.05)


def _settled(look: Callable[[], Snapshot]) -> Snapshot:
    """Two looks that agree: what an earlier test ended may still be going."""
    deadline = time.monotonic() + SETTLE_S
    one, two = look(), look()
    while one != two and time.monotonic() < deadline:
        time.sleep(0.05)
        one, two = two, look()
    return two


def _members(node: Node) -> Iterator[int]:
    """The server, all below it, and what is in its sandboxes or carries our names under it."""
    parents = {pid: _parent(pid) for pid in _pids()}
    below = {node.server_pid}
    while more := {p for p, parent in parents.items() if parent in below} - below:
        below |= more
    for pid in parents:
        in_group = bool(node.name) and node.name in _read(f"/proc/{pid}/cgroup")
        named = bool(OURS.match(_comm(pid))) and any(
            str(directory) in _read(f"/proc/{pid}/cmdline") for directory in node.directories
        )
        if pid in below or in_group or named:
            yield pid


def _pids() -> list[int]:
    return [int(path.name) for path in Path("/proc").iterdir() if path.name.isdigit()]


def _parent(pid: int) -> int:
    text = _read(f"/proc/{pid}/stat")
    return int(text.rpartition(")")[2].split()[1]) if text else 0


def _comm(pid: int) -> str:
    return _read(f"/proc/{pid}/comm").strip()


def _read(path: str) -> str:
    try:
        return Path(path).read_text(errors="replace")
    except OSError:
        return ""


def _mounts(node: Node) -> Iterator[str]:
    seen: set[str] = set()
    for pid in ("self", str(node.server_pid)):
        for line in _read(f"/proc/{pid}/mountinfo").splitlines():
            before, _, after = line.partition(" - ")
            point, (kind, source, *_) = before.split()[4], after.split()
            place = f"{point} {kind} {source}"
            ours = (node.name and node.name in place) or any(
                str(directory) in place for directory in node.directories
            )
            if ours and place not in seen:
                seen.add(place)
                yield place


def _cgroups(node: Node) -> Iterator[str]:
    for path, names, _ in os.walk(CGROUPS):
        inside = "/dsec" in path
        for name in names:
            whole = f"{path}/{name}"
            if (inside or name.startswith("dsec")) and (not node.name or node.name in whole):
                yield whole


def _namespaces(pids: list[int]) -> set[int]:
    found: set[int] = set()
    for pid in pids:
        try:
            found.add(Path(f"/proc/{pid}/ns/net").stat().st_ino)
        except OSError:
            continue
    return found


def _network_devices(node: Node) -> Iterator[str]:
    """The uplink; what is in the router's namespace goes with that, which is a mount."""
    if node.name:
        yield from (path.name for path in Path("/sys/class/net").glob(f"dsec-{node.name}"))


def _packet_rules(node: Node) -> Iterator[str]:
    nft = shutil.which("nft")
    if not node.name or nft is None:
        return
    listed = subprocess.run([nft, "list", "tables"], capture_output=True, text=True, check=True)
    yield from (line for line in listed.stdout.splitlines() if f"dsec-{node.name}" in line)


def _loop_devices(node: Node) -> Iterator[str]:
    for device in Path("/sys/block").glob("loop*"):
        backing = _read(f"{device}/loop/backing_file").strip()
        if any(backing.startswith(str(directory)) for directory in node.directories):
            yield backing


def _files(node: Node) -> Iterator[str]:
    for directory in node.directories:
        for path, names, files in os.walk(directory):
            yield from (f"{path}/{name}/" for name in names)
            yield from (place for name in files if not GROWING.search(place := f"{path}/{name}"))


def _descriptors(pid: int) -> Iterator[str]:
    return (what for what in _all_descriptors(pid) if not GROWING.search(what))


def _pooled(pid: int) -> Iterator[str]:
    """Files a pool opens more than once, within its limit: the database."""
    return (what for what in _all_descriptors(pid) if GROWING.search(what))


def _all_descriptors(pid: int) -> Iterator[str]:
    try:
        links = list(Path(f"/proc/{pid}/fd").iterdir())
    except OSError:
        return
    for link in links:
        try:
            target = str(link.readlink())
            mode = link.stat().st_mode
        except OSError:
            continue
        kind = target.partition(":")[0] if ":" in target else stat.filemode(mode)[0]
        yield kind if kind in ("socket", "pipe", "anon_inode") else target
