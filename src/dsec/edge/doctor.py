"""What this host can do and what to do about the rest: `dsec doctor`, and `describe` of the edge."""

from __future__ import annotations

import stat
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from dsec.images.erofs.tree import Inode, Tree
from dsec.images.erofs.write import write_image
from dsec.kit.blocking import in_thread
from dsec.linux import hostinfo, probes
from dsec.linux.cgroup.detect import detect
from dsec.wire.public_v1 import Capability


@dataclass(frozen=True)
class Check:
    """One thing to find out."""

    name: str
    needed_for: str
    probe: Callable[[], str]
    advice: str = ""


async def examine(state: Path) -> list[Capability]:
    """Try everything once; takes a second or so.

    Args:
        state: the edge's state directory, since much depends on its file system.
    """
    return [await in_thread("scan", _result, check) for check in checks(state)]


def _result(check: Check) -> Capability:
    found = probes.tried(check.probe)
    return Capability(
        name=check.name,
        available=found.available,
        needed_for=check.needed_for,
        detail=found.detail,
        advice="" if found.available else check.advice,
    )


def checks(state: Path) -> list[Check]:
    """The list, what containers need first."""
    return [*_kernel(state), *_isolation(), *_on_demand(state), *_machines(), *_programs()]


def _kernel(state: Path) -> list[Check]:
    containers = "containers"
    return [
        Check("kernel", containers, _kernel_release, "use Linux 6.6 or later"),
        Check(
            "user_namespaces",
            containers,
            probes.user_namespaces,
            "run as root, with sysctl user.max_user_namespaces above 0",
        ),
        Check("overlayfs", containers, partial(probes.overlay, state), "load the overlay module"),
        Check(
            "idmapped_mounts",
            containers,
            partial(probes.idmapped_mounts, state),
            "put the state directory on ext4, xfs or btrfs and use Linux 6.3 or later",
        ),
        Check(
            "erofs",
            containers,
            partial(probes.erofs_from_file, state, _small_image),
            "use a kernel with EROFS file-backed mounts (6.12) and put the state directory on ext4, "
            "xfs or btrfs",
        ),
        Check("cgroup_limits", containers, _cgroup_limits, "mount memory, cpu and pids, v1 or v2"),
        Check(
            "cgroup_v2",
            "killing whole trees",
            _cgroup_v2,
            "mount it: mount -t cgroup2 none /sys/fs/cgroup/unified",
        ),
        Check(
            "disk_limit",
            "a limit on what a sandbox writes",
            partial(probes.disk_limit, state),
            "have /dev/loop-control (the loop module) and ext4, and install e2fsprogs",
        ),
        Check("pressure", "admission by pressure", probes.pressure, "boot with psi=1"),
        Check(
            "pause",
            "pausing sandboxes",
            _pausing,
            "mount cgroup2: mount -t cgroup2 none /sys/fs/cgroup/unified",
        ),
        Check(
            "swap",
            "giving back a paused sandbox's own memory",
            probes.swap,
            "add a swap file on a local disk, or zram: docs/howto/pausing.md",
        ),
    ]


def _isolation() -> list[Check]:
    more = "hardening"
    return [
        Check("landlock", more, probes.landlock, "boot with landlock among lsm="),
        Check("apparmor", more, probes.apparmor, "boot with apparmor=1 where the kernel has it"),
        Check("bpf", "network rules", probes.bpf, "run as root on a kernel with eBPF"),
        Check(
            "core_scheduling",
            "LS and BE on one core",
            probes.core_scheduling,
            "use a kernel with CONFIG_SCHED_CORE on processors with SMT",
        ),
    ]


def _on_demand(state: Path) -> list[Check]:
    lazy = "images on demand"
    return [
        Check("fuse", lazy, probes.fuse, "load the fuse module"),
        Check(
            "fanotify_pre_content",
            lazy,
            partial(probes.fanotify_pre_content, state),
            "use Linux 6.14 or later with the state on ext4, xfs or btrfs",
        ),
        Check("nbd", lazy, partial(probes.device, "/dev/nbd0"), "load the nbd module"),
        Check("ublk", lazy, partial(probes.device, "/dev/ublk-control"), "load ublk_drv"),
    ]


def _machines() -> list[Check]:
    return [
        Check(
            "kvm",
            "microVMs",
            _kvm,
            "enable virtualisation in the firmware, or nested virtualisation where this is a guest",
        )
    ]


def _small_image(path: Path) -> None:
    write_image(Tree(Inode(stat.S_IFDIR | 0o755)), path)


def _programs() -> list[Check]:
    wanted = [
        ("skopeo", "pulling images", "skopeo"),
        ("mmdebstrap", "building Debian images", "mmdebstrap"),
        ("docker", "exporting images from Docker", "docker.io; not needed otherwise"),
        ("qemu-system-x86_64", "full virtual machines", "qemu-system-x86"),
    ]
    return [
        Check(name, purpose, partial(probes.program, name), f"install {package}")
        for name, purpose, package in wanted
    ]


def _kernel_release() -> str:
    release = hostinfo.kernel_release()
    major, minor = (int(part) for part in release.split("-")[0].split(".")[:2])
    if (major, minor) < (6, 6):
        raise ValueError(f"{release} is older than 6.6")
    return release


def _cgroup_limits() -> str:
    layout = detect("none")
    places = {
        **dict.fromkeys(layout.v1, "v1"),
        **dict.fromkeys(layout.v2_controllers, "v2"),
    }
    if missing := {"memory", "cpu", "pids"} - set(places):
        raise LookupError(f"no controller for {', '.join(sorted(missing))}")
    return ", ".join(f"{name} by {places[name]}" for name in ("memory", "cpu", "pids"))


def _cgroup_v2() -> str:
    layout = detect("none")
    if not layout.v2:
        raise LookupError("no cgroup2 file system is mounted")
    return f"at {layout.v2}"


def _pausing() -> str:
    layout = detect("none")
    if not layout.v2:
        raise LookupError("no cgroup2 file system is mounted")
    return probes.freezer(Path(layout.v2))


def _kvm() -> str:
    probes.device("/dev/kvm")
    return "/dev/kvm is there; not probed: whether a guest runs shows only by booting one"
