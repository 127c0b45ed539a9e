"""What a container is launched with. Pure: facts in, LaunchSpec out."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from dsec.base.quantity import MIB
from dsec.edge.backends.disk import DISK
from dsec.edge.phases import by_name
from dsec.edge.record import SandboxRecord
from dsec.images.records import DirectoryMark
from dsec.linux.cgroup.interface import Bounds, Layout
from dsec.linux.cgroup.plan import plan
from dsec.linux.processors import choose
from dsec.wire.launch import LaunchFileRule, LaunchSpec
from dsec.wire.sandbox import SandboxSpec

UPPER = "upper"
"""What a sandbox has written, in its own directory or on its own disk there."""

PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"

MASKED_PATHS = [
    # Docker's, plus what tells about or reaches the host's kernel, memory and firmware
    "/proc/acpi",
    "/proc/asound",
    "/proc/cmdline",
    "/proc/config.gz",
    "/proc/diskstats",
    "/proc/fs",
    "/proc/interrupts",
    "/proc/kallsyms",
    "/proc/kcore",
    "/proc/keys",
    "/proc/key-users",
    "/proc/kmsg",
    "/proc/kpagecgroup",
    "/proc/kpagecount",
    "/proc/kpageflags",
    "/proc/latency_stats",
    "/proc/modules",
    "/proc/partitions",
    "/proc/sched_debug",
    "/proc/scsi",
    "/proc/swaps",
    "/proc/sysrq-trigger",
    "/proc/timer_list",
    "/proc/timer_stats",
    "/proc/vmallocinfo",
    "/sys/devices/system/cpu/vulnerabilities",
    # which files of the host, and which other sandboxes' disks, stand behind block devices
    "/sys/devices/virtual/block",
    "/sys/devices/virtual/powercap",
    "/sys/firmware",
    "/sys/fs",
    "/sys/kernel/debug",
    "/sys/kernel/security",
    "/sys/kernel/tracing",
]
READONLY_PATHS = ["/proc/bus", "/proc/irq", "/proc/sys"]

CAPABILITIES = [
    "CAP_CHOWN",
    "CAP_DAC_OVERRIDE",
    "CAP_FSETID",
    "CAP_FOWNER",
    "CAP_SETGID",
    "CAP_SETUID",
    "CAP_SETPCAP",
    "CAP_SETFCAP",
    "CAP_NET_BIND_SERVICE",
    "CAP_NET_RAW",
    "CAP_SYS_CHROOT",
    "CAP_KILL",
    "CAP_AUDIT_WRITE",
]
NOFILE = 1_048_576
IDS_PER_SANDBOX = 65_536


@dataclass(frozen=True, kw_only=True)
class CommandLimits:
    """What the node allows commands."""

    default_timeout_s: float = 3600.0
    max_timeout_s: float = 86400.0
    output_limit_bytes: int = 1 << 20
    max_running: int = 256


@dataclass(frozen=True, kw_only=True)
class HostFacts:
    """What a host has for its sandboxes."""

    nofile_max: int
    """The most descriptors the launcher itself may allow."""
    fuse: bool = False
    """Whether sandboxes can be shown their limits where else they would see the host's."""


def machine_id(sandbox: str) -> str:
    """A sandbox's own machine id: 32 digits, the same for as long as it lives."""
    return hashlib.sha256(f"machine {sandbox}".encode()).hexdigest()[:32]


def writable_place(record: SandboxRecord) -> Path:
    """Where a sandbox's writable layer is: in its own directory, or on its own disk there."""
    return record.path if record.spec.limits.disk_mb is None else record.path / DISK


def bounds_of(record: SandboxRecord) -> Bounds:
    """What its control groups hold it to."""
    limits = record.spec.limits
    return Bounds(
        memory_bytes=limits.memory_mb * MIB,
        cpu_cores=limits.cpu_cores,
        pids=limits.pids,
        best_effort=record.spec.qos == "be",
    )


def processors_of(record: SandboxRecord, processors: Sequence[int]) -> list[int]:
    """Which of the host's processors to move it to: as many as it may use, each sandbox others."""
    turn = record.uid_base // IDS_PER_SANDBOX
    return choose(list(processors), record.spec.limits.cpu_cores, turn)


def environment_of(record: SandboxRecord) -> dict[str, str]:
    """What every command begins with, the secrets of its phase among it."""
    secrets = by_name(record.spec, record.phase).secrets if record.phase else {}
    return {"PATH": PATH, **record.image.env, **record.spec.env, **secrets}


def user_of(record: SandboxRecord) -> tuple[str, bool]:
    """Whom commands run as unless they say, and whether they may not say."""
    if record.phase and (user := by_name(record.spec, record.phase).user):
        return user, True
    return record.spec.init_user or record.image.user or "root", False


def file_rules(spec: SandboxSpec) -> list[LaunchFileRule]:
    """Those that are in force."""
    return [LaunchFileRule(path=rule.path, access=rule.access) for rule in spec.files]


def launch_spec(
    record: SandboxRecord,
    layers: Sequence[str],
    layout: Layout,
    limits: CommandLimits,
    host: HostFacts,
    mends: Sequence[DirectoryMark] = (),
) -> LaunchSpec:
    """Put together what the launcher needs.

    Args:
        record: the sandbox.
        layers: mounted layers, topmost first.
        layout: where its control groups go.
        limits: of its commands.
        host: what there is to be had.
        mends: directories of its root to give back what they are below.
    """
    spec, image = record.spec, record.image
    groups = plan(layout, record.id, bounds_of(record))
    user, only_user = user_of(record)
    nofile = min(NOFILE, host.nofile_max)
    writable = writable_place(record)
    return LaunchSpec(
        id=record.id,
        hostname=spec.hostname or record.id,
        machine_id=machine_id(record.id),
        uid_base=record.uid_base,
        layers=list(layers),
        mends=[(mend.path, mend.mode, mend.uid, mend.gid) for mend in mends],
        upper=f"{writable}/{UPPER}",
        work=f"{writable}/work",
        socket=record.socket,
        cgroups=groups.directories,
        agent_v2=groups.agent_v2,
        work_v2=groups.work_v2,
        work_v1=groups.work_v1,
        meters=groups.meters if host.fuse else None,
        masked_paths=MASKED_PATHS,
        readonly_paths=READONLY_PATHS,
        files=file_rules(spec),
        files_change=any(phase.files for phase in spec.phases),
        capabilities=CAPABILITIES,
        seccomp=spec.security.profile,
        seccomp_allow=spec.security.allow,
        no_new_privs=spec.security.no_new_privs,
        rlimits={"nofile": (nofile, nofile), "core": (0, 0)},
        env=environment_of(record),
        workdir=spec.workdir or image.workdir or "/",
        user=user,
        only_user=only_user,
        default_timeout_s=limits.default_timeout_s,
        max_timeout_s=limits.max_timeout_s,
        output_limit_bytes=limits.output_limit_bytes,
        max_running_commands=limits.max_running,
    )
