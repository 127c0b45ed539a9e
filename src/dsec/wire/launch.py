"""What the edge hands to `aether launch` for one sandbox. Words: spec/launch.md."""

from __future__ import annotations

from msgspec import Struct, field


class CgroupDir(Struct, kw_only=True):
    """A cgroup directory to make, and what to write into its files, in order."""

    path: str
    writes: list[tuple[str, str]] = field(default_factory=list)
    delegate: bool = False
    """Give the directory and its cgroup.{procs,threads,subtree_control,kill} to aether's host uid and gid."""


class Meters(Struct, kw_only=True):
    """Files of the sandbox's control groups by which programs inside are told what they have.

    Of version 1 or 2; their contents say which.
    """

    memory_limit: str
    memory_usage: str
    memory_stat: str
    cpu_time: str
    """`cpu.stat` (version 2) or `cpuacct.stat` (version 1)."""
    cpu_limit: str
    """`cpu.max` (version 2) or `cpu.cfs_quota_us` (version 1), of periods of 100 ms."""


class LaunchNetwork(Struct, kw_only=True):
    """A network namespace that is ready: made, joined and filtered by the edge."""

    namespace: str
    """Path; owned by the host's user namespace, so that nobody inside has power over it."""
    resolvers: list[str]
    """Addresses for /etc/resolv.conf, which is written whatever the image has there."""


class LaunchFileRule(Struct, frozen=True, kw_only=True):
    """A path inside and what may not be done with it, nor with what is below it."""

    path: str
    access: str
    """`deny`, `read_only` or `no_exec`."""


class LaunchSpec(Struct, kw_only=True):
    """One sandbox to launch. All paths are host paths unless they say otherwise."""

    id: str
    hostname: str
    machine_id: str = ""
    """For /etc/machine-id, where the image has none; "" = leave it."""
    uid_base: int
    """Host id of the sandbox's uid and gid 0; ids 0 to 65534 map to a run from here, and
    uid_base + 65535, unmapped inside, is aether's own."""
    layers: list[str]
    """Mounted read-only layers, topmost first, as overlayfs has it."""
    mends: list[tuple[str, int, int, int]] = field(default_factory=list)
    """Directories of the sandbox's root to give other attributes, if they are there: path, mode, uid
    and gid inside."""
    upper: str
    work: str
    """Empty directories on the same file system; the launcher makes them if they are missing."""
    socket: str
    """Where the edge will reach aether; its directory exists and is closed to all but root."""
    cgroups: list[CgroupDir] = field(default_factory=list)
    """Made in order; on failure removed in reverse."""
    agent_v2: str = ""
    """cgroup v2 directory aether itself is born in; "" where the host has no v2 mount."""
    work_v2: str = ""
    """Delegated v2 directory; aether makes one child per command in it."""
    work_v1: list[str] = field(default_factory=list)
    """`tasks` files (cgroup v1) every command joins before it is executed."""
    meters: Meters | None = None
    """With them /proc/meminfo, /proc/cpuinfo, /proc/stat and the list of processors in /sys say what
    the sandbox has, and each command may run on as many processors as its share of time asks for;
    without, they say what the host has."""
    network: LaunchNetwork | None = None
    """Where it is to have a network; None = a namespace of its own with loopback alone."""
    masked_paths: list[str] = field(default_factory=list)
    readonly_paths: list[str] = field(default_factory=list)
    files: list[LaunchFileRule] = field(default_factory=list)
    """Made to hold by mounts; a path that lies behind a link fails the launch."""
    files_change: bool = False
    """Other file rules may come later, by `phase` (spec/frames.md)."""
    capabilities: list[str] = field(default_factory=list)
    """Kept in the bounding set of commands, e.g. CAP_CHOWN."""
    seccomp: str = "default"
    """`none`, or a profile of `dsec.wire.sandbox.Security`."""
    seccomp_allow: list[str] = field(default_factory=list)
    """Calls that it refuses and commands may make, by name."""
    no_new_privs: bool = False
    rlimits: dict[str, tuple[int, int]] = field(default_factory=dict)
    """Soft and hard, by name in lower case: nofile, core, ..."""
    env: dict[str, str] = field(default_factory=dict)
    """Environment every command begins with (image, then spec)."""
    workdir: str = "/"
    user: str = "root"
    only_user: bool = False
    """Commands and sessions may name no other."""
    default_timeout_s: float = 3600.0
    max_timeout_s: float = 86400.0
    output_limit_bytes: int = 1 << 20
    max_running_commands: int = 256


class LaunchRequest(Struct, kw_only=True):
    """Edge -> launcher."""

    id: int
    spec: LaunchSpec


class LaunchReply(Struct, kw_only=True):
    """Launcher -> edge. `pid` is 0 on failure; then step, path and errno say what failed."""

    id: int
    pid: int = 0
    step: str = ""
    path: str = ""
    errno: int = 0
    message: str = ""
    micros: dict[str, int] = field(default_factory=dict)
    """Time spent in each step, microseconds."""


class ExitNotice(Struct, kw_only=True):
    """Launcher -> edge, unasked: a sandbox's first process ended."""

    exited: str
    """The sandbox id."""
    status: int
    """Raw wait status."""
