"""What this host can do, found out by doing it: each probe tries the real call on something small.

Nothing is left behind: mounts are made in a mount namespace that ends with the probe's thread.
All of it blocks; `tried` is the door.
"""

from __future__ import annotations

import ctypes
import os
import platform
import shutil
import struct
import tempfile
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from dsec.linux import ext4, hostinfo, loop, mounts, process
from dsec.linux.spawn import spawn

_libc = ctypes.CDLL(None, use_errno=True)

_OPEN_TREE, _MOUNT_SETATTR, _LANDLOCK_CREATE_RULESET = 428, 442, 444  # alike on all architectures
_BPF = {"x86_64": 321, "aarch64": 280}
_OPEN_TREE_CLONE, _AT_EMPTY_PATH, _MOUNT_ATTR_IDMAP = 1, 0x1000, 0x100000
_FAN_CLASS_PRE_CONTENT, _FAN_CLOEXEC, _FAN_MARK_ADD = 0x8, 0x1, 0x1
_FAN_PRE_ACCESS, _AT_FDCWD = 0x100000, -100
_PR_SCHED_CORE, _PR_SCHED_CORE_GET = 62, 0
_BPF_MAP_CREATE, _BPF_MAP_TYPE_ARRAY = 0, 2
_LANDLOCK_CREATE_RULESET_VERSION = 1


@dataclass(frozen=True)
class Finding:
    """What a probe found."""

    available: bool
    detail: str = ""


def tried(probe: Callable[[], str]) -> Finding:
    """Run a probe: what it returns is the detail, what it raises is why not."""
    try:
        return Finding(True, probe())
    except (OSError, process.CommandFailed, LookupError, ValueError) as exc:
        return Finding(False, str(exc).partition("\n")[0])


def _syscall(name: str, number: int, *args: object) -> int:
    result: int = _libc.syscall(number, *args)
    if result < 0:
        raise OSError(ctypes.get_errno(), f"{name}: {os.strerror(ctypes.get_errno())}")
    return result


def _in_own_mounts(work: Callable[[], str]) -> str:
    """Run in a thread with a mount namespace of its own."""
    said: list[str | OSError] = []

    def run() -> None:
        try:
            mounts.unshare_mounts()
            said.append(work())
        except OSError as exc:
            said.append(exc)
        except process.CommandFailed as exc:
            said.append(OSError(str(exc)))

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    if isinstance(said[0], OSError):
        raise said[0]
    return said[0]


def user_namespaces() -> str:
    """Make a user namespace."""
    process.run(["unshare", "--user", "--map-root-user", "true"], timeout_s=10)
    return f"up to {_sysctl('user/max_user_namespaces')}"


def idmapped_mounts(directory: Path) -> str:
    """Idmap a mount of a directory, as a sandbox's writable layer is."""
    holder = spawn(["/usr/bin/unshare", "--user", "/bin/sleep", "10"], {})
    try:
        _wait_namespace(holder.pid)
        for kind in ("uid", "gid"):
            Path(f"/proc/{holder.pid}/{kind}_map").write_text("0 1048576 65536")
        namespace = os.open(f"/proc/{holder.pid}/ns/user", os.O_RDONLY | os.O_CLOEXEC)
        try:
            _idmap(directory, namespace)
        finally:
            os.close(namespace)
    finally:
        holder.reap(0)
    return f"on {directory}"


def _wait_namespace(pid: int) -> None:
    ours = Path("/proc/self/ns/user").readlink()
    for _ in range(1000):
        if Path(f"/proc/{pid}/ns/user").readlink() != ours:
            return
        threading.Event().wait(0.002)
    raise TimeoutError("unshare did not make a user namespace")


def _idmap(directory: Path, namespace: int) -> None:
    flags = _OPEN_TREE_CLONE | os.O_CLOEXEC
    tree = _syscall("open_tree", _OPEN_TREE, _AT_FDCWD, os.fsencode(directory), flags)
    try:
        attr = struct.pack("=QQQQ", _MOUNT_ATTR_IDMAP, 0, 0, namespace)
        _syscall(
            "mount_setattr", _MOUNT_SETATTR, tree, b"", _AT_EMPTY_PATH, attr, ctypes.c_size_t(32)
        )
    finally:
        os.close(tree)


def overlay(directory: Path) -> str:
    """Mount an overlay whose upper is in a directory."""

    def work() -> str:
        with tempfile.TemporaryDirectory(dir=directory) as scratch:
            parts = {name: Path(scratch, name) for name in ("lower", "upper", "work", "root")}
            for part in parts.values():
                part.mkdir()
            options = ",".join(
                f"{name}={path}"
                for name, path in (
                    ("lowerdir", parts["lower"]),
                    ("upperdir", parts["upper"]),
                    ("workdir", parts["work"]),
                )
            )
            mounts.mount("overlay", parts["root"], "overlay", mounts.MountFlag(0), options)
            mounts.umount(parts["root"])
        return f"on {directory}"

    return _in_own_mounts(work)


def erofs_from_file(directory: Path, make: Callable[[Path], object]) -> str:
    """Mount an EROFS image that is a plain file in a directory.

    Args:
        directory: where it is tried.
        make: writes a small image.
    """

    def work() -> str:
        with tempfile.TemporaryDirectory(dir=directory) as scratch:
            image, target = Path(scratch, "image"), Path(scratch, "root")
            target.mkdir()
            make(image)
            mounts.mount_erofs(image, target)
            mounts.umount(target)
        return "no loop device needed"

    return _in_own_mounts(work)


def disk_limit(directory: Path) -> str:
    """Mount an ext4 file system that is a file in a directory, as a sandbox's own disk is."""

    def work() -> str:
        with tempfile.TemporaryDirectory(dir=directory) as scratch:
            image, target = Path(scratch, "image"), Path(scratch, "disk")
            target.mkdir()
            ext4.format_image(image, 16 << 20)
            with loop.attached(image, ext4.BLOCK_BYTES) as device:
                ext4.mount_scratch(device, target)
                mounts.umount(target)
        return "ext4 on a loop device"

    return _in_own_mounts(work)


def fuse() -> str:
    """Open /dev/fuse."""
    os.close(os.open("/dev/fuse", os.O_RDWR | os.O_CLOEXEC))
    uring = Path("/sys/module/fuse/parameters/enable_uring")
    return "with io_uring" if uring.exists() and uring.read_text().strip() == "Y" else ""


def fanotify_pre_content(directory: Path) -> str:
    """Ask to be asked before a file's content is read."""
    flags = _FAN_CLASS_PRE_CONTENT | _FAN_CLOEXEC
    group = _libc.fanotify_init(flags, os.O_RDONLY | os.O_CLOEXEC)
    if group < 0:
        raise OSError(ctypes.get_errno(), "fanotify_init: " + os.strerror(ctypes.get_errno()))
    try:
        with tempfile.NamedTemporaryFile(dir=directory) as file:
            path = os.fsencode(file.name)
            mask = ctypes.c_uint64(_FAN_PRE_ACCESS)
            if _libc.fanotify_mark(group, _FAN_MARK_ADD, mask, _AT_FDCWD, path):
                why = os.strerror(ctypes.get_errno())
                raise OSError(ctypes.get_errno(), f"fanotify_mark on {directory}: {why}")
    finally:
        os.close(group)
    return f"on {directory}; as a front it fails open when all its processes are killed at once"


def landlock() -> str:
    """Ask Landlock for its version."""
    version = _syscall(
        "landlock_create_ruleset",
        _LANDLOCK_CREATE_RULESET,
        None,
        ctypes.c_size_t(0),
        _LANDLOCK_CREATE_RULESET_VERSION,
    )
    return f"ABI {version}"


def apparmor() -> str:
    """Whether AppArmor is switched on."""
    if _text("/sys/module/apparmor/parameters/enabled") != "Y":
        raise LookupError("the kernel has it not, or not switched on")
    return ""


def bpf() -> str:
    """Make an eBPF map."""
    number = _BPF[platform.machine()]
    attr = struct.pack("=IIII", _BPF_MAP_TYPE_ARRAY, 4, 8, 1) + bytes(112)
    os.close(_syscall("bpf", number, _BPF_MAP_CREATE, attr, ctypes.c_uint(len(attr))))
    return "with type information" if Path("/sys/kernel/btf/vmlinux").exists() else "without BTF"


def network(filter_object: Path) -> str:
    """Whether sandboxes could be given a network: eBPF, its library, nftables, the compiled filter."""
    bpf()
    if not filter_object.is_file():
        raise LookupError(f"the filter {filter_object} was not compiled; `./dev setup` does it")
    if shutil.which("nft") is None:
        raise LookupError("install nftables")
    try:
        ctypes.CDLL("libbpf.so.1")
    except OSError:
        raise LookupError("install libbpf1") from None
    return ""


def core_scheduling() -> str:
    """Read this process's core scheduling cookie."""
    cookie = ctypes.c_ulong()
    if _libc.prctl(_PR_SCHED_CORE, _PR_SCHED_CORE_GET, 0, 0, ctypes.byref(cookie)):
        raise OSError(ctypes.get_errno(), f"prctl: {os.strerror(ctypes.get_errno())}")
    return ""


def swap() -> str:
    """Which swap there is, and how much of it is free."""
    memory = hostinfo.memory()
    if not memory.swap_total_bytes:
        raise LookupError("none is configured: a pause gives back only memory backed by files")
    devices = ", ".join(area.path for area in hostinfo.swaps())
    free, total = memory.swap_free_bytes >> 20, memory.swap_total_bytes >> 20
    return f"{free} of {total} MiB are free on {devices}"


def freezer(hierarchy: Path) -> str:
    """Make a group in a cgroup v2 hierarchy and see whether it could be frozen."""
    group = hierarchy / f"dsec-probe-{os.getpid()}"
    group.mkdir()
    try:
        if not (group / "cgroup.freeze").exists():
            raise LookupError(f"groups below {hierarchy} have no cgroup.freeze")
    finally:
        group.rmdir()
    return "sandboxes can be frozen"


def pressure() -> str:
    """Read pressure stall information."""
    return Path("/proc/pressure/memory").read_text().splitlines()[0]


def device(path: str) -> str:
    """Whether a device is there; nothing is asked of it."""
    os.stat(path)
    return f"{path} is there"


def program(name: str) -> str:
    """Find a program."""
    found = shutil.which(name)
    if found is None:
        raise LookupError(f"no {name} on PATH")
    return found


def _sysctl(name: str) -> str:
    return _text(f"/proc/sys/{name}")


def _text(path: str) -> str:
    try:
        return Path(path).read_text().strip()
    except OSError:
        return ""
