"""`aether launch` against the real kernel: what a sandbox is, and what it cannot do."""

from __future__ import annotations

import os
import shutil
import signal
import stat
import struct
from pathlib import Path

import pytest

from tests.kernel.launching import (
    MASKED,
    READ_ONLY,
    Box,
    Launcher,
    Layers,
    Node,
    aether,
    aether_that_fails,
    box,
    end,
    launcher,
    layer,
    layers,
    node,
    probe,
)

__all__ = ["aether", "aether_that_fails", "box", "launcher", "layer", "layers", "node", "probe"]
pytestmark = pytest.mark.needs_root


# What a sandbox is


def test_root_inside_is_nobody_outside(box: Box) -> None:
    assert box.probe("ids") == {"uid": "0", "euid": "0"}
    assert box.probe("write", "/made", "text") == {"write": "0"}
    assert box.probe("stat", "/made", "/", "/bin/probe", "/etc/hosts") == {
        "/made": "0:0:644",
        "/": "0:0:755",
        "/bin/probe": "0:0:755",
        "/etc/hosts": "0:0:644",
    }
    # On disk it is root's as in any layer, so that it can become one.
    assert (Path(box.spec.upper) / "made").stat().st_uid == 0
    assert box.probe("chown", "/made", "1000") == {"chown": "0"}
    assert (Path(box.spec.upper) / "made").stat().st_uid == 1000


def test_first_process_has_ids_that_do_not_exist_inside(box: Box) -> None:
    base = box.spec.uid_base
    own, inside = str(base + 65535), str(base)
    assert box.status("Uid").split() == [own, own, own, inside]
    assert box.status("Gid").split() == [own, own, own, inside]
    assert Path(f"/proc/{box.pid}/uid_map").read_text().split() == ["0", inside, "65535"]
    assert Path(f"/proc/{box.pid}/setgroups").read_text() == "allow\n"
    assert os.getsid(box.pid) == box.pid
    assert int(box.status("SigBlk"), 16) & ~(1 << signal.SIGCHLD - 1) == 0
    assert box.status("CapPrm") == box.status("CapEff") != box.status("CapBnd")
    assert box.status("CapInh") == box.status("CapAmb") == "0" * 16
    assert not int(box.status("CapPrm"), 16) & (1 << 12 | 1 << 19 | 1 << 24)  # net admin, ptrace


def test_setuid_programs_and_changing_user_work(box: Box) -> None:
    changed = box.probe("setuid", "1000")
    assert changed == {"setgroups": "0", "setgid": "0", "setuid": "0", "uid": "1000"}
    assert box.probe("ids", user="1000") == {"uid": "1000", "euid": "1000"}
    assert box.probe("ids", user="1000", program="probe-suid") == {"uid": "1000", "euid": "0"}


def test_file_capabilities_of_an_image_count_inside(
    node: Node, launcher: Launcher, layers: Layers
) -> None:
    def change(tree: Path) -> None:
        # Version 2, effective, CAP_NET_BIND_SERVICE; as a package sets it when it is unpacked.
        value = struct.pack("<5I", 0x02000001, 1 << 10, 0, 0, 0)
        shutil.copy(tree / "bin/probe", tree / "bin/probe-bind")
        os.setxattr(tree / "bin/probe-bind", "security.capability", value)

    spec = node.spec(layers=[str(layers.make(change))])
    box = Box(spec, launcher.launch(spec))
    code, output = box.run("/bin/probe-bind", "cat", "/proc/self/status", user="1000")
    assert code == 0
    assert f"CapEff:\t{1 << 10:016x}" in output
    end(box, launcher, node)


def test_only_its_own_processes_are_seen(box: Box) -> None:
    processes = [name for name in box.probe("list", "/proc") if name.isdigit()]
    assert "1" in processes
    assert len(processes) == 2
    assert box.read("/proc/1/cmdline") == "aether\0launch\0"
    assert box.read("/proc/1/comm") == "aether\n"


def test_mounts_say_nothing_about_the_host(box: Box) -> None:
    table = box.read("/proc/self/mountinfo")
    assert str(Path(box.spec.socket).parent) not in table
    assert str(Path(box.spec.layers[0]).parent) not in table
    assert "/box" not in table
    places = {line.split()[4] for line in table.splitlines()}
    usual = {"/", "/proc", "/sys", "/dev", "/dev/pts", "/dev/shm", "/dev/mqueue"}
    assert usual <= places
    assert places - usual <= {*MASKED, *READ_ONLY}
    root = next(line for line in table.splitlines() if line.split()[4] == "/")
    assert "nodev" in root
    assert " overlay overlay " in root


def test_cgroups_are_seen_from_the_commands_own(box: Box) -> None:
    for line in box.read("/proc/self/cgroup").splitlines():
        assert line.rsplit(":", 1)[1] == "/", line
    assert "box" not in box.read("/proc/1/cgroup")
    v2 = Path(box.spec.agent_v2) / "cgroup.procs"
    assert v2.read_text().split() == [str(box.pid)]


def test_commands_inherit_no_descriptors(box: Box) -> None:
    assert set(box.probe("list", "/proc/self/fd")) == {"0", "1", "2"}
    kept = {str(fd.readlink()) for fd in Path(f"/proc/{box.pid}/fd").iterdir()}
    outside = {name for name in kept if name.startswith("/") and not name.startswith("/dev/")}
    # The directory of its commands' groups is the root of a mount: from it ".." goes nowhere.
    assert "/" in outside
    of_the_host = [name for name in outside if name.startswith("/sys/")]
    assert [name.rpartition("/")[2] for name in of_the_host] == ["tasks"]


def test_devices(box: Box) -> None:
    listed = box.probe("list", "/dev")
    assert set(listed) == {
        "null", "zero", "full", "random", "urandom", "tty", "fd", "stdin", "stdout", "stderr",
        "ptmx", "pts", "shm", "mqueue",
    }  # fmt: skip
    assert box.probe("write", "/dev/null", "x") == {"write": "0"}
    assert box.probe("write", "/dev/shm/x", "x", user="1000") == {"write": "0"}
    assert box.probe("stat", "/dev", "/dev/null", "/dev/shm", "/dev/pts/ptmx") == {
        "/dev": "0:0:755",
        "/dev/null": "0:0:666",
        "/dev/shm": "0:0:1777",
        "/dev/pts/ptmx": "0:0:666",
    }


def test_host_name_and_names_files(box: Box) -> None:
    assert box.read("/etc/hostname") == f"{box.spec.hostname}\n"
    assert box.spec.hostname in box.read("/etc/hosts")
    assert box.read("/proc/sys/kernel/hostname") == f"{box.spec.hostname}\n"
    assert "lo:" in box.read("/proc/net/dev")
    assert "127.0.0.0" in box.read("/proc/net/fib_trie")


def test_files_the_image_has_are_left_alone(node: Node, launcher: Launcher, layers: Layers) -> None:
    def change(tree: Path) -> None:
        (tree / "etc/hosts").write_text("1.2.3.4 mine\n")
        (tree / "etc/hostname").touch()
        (tree / "etc/machine-id").touch()
        (tree / "etc/resolv.conf").symlink_to("../run/resolv.conf")

    spec = node.spec(layers=[str(layers.make(change)), str(node.layer)])
    box = Box(spec, launcher.launch(spec))
    assert box.read("/etc/hosts") == "1.2.3.4 mine\n"
    assert box.read("/etc/hostname") == f"{spec.hostname}\n"
    assert box.read("/etc/machine-id") == f"{spec.machine_id}\n"
    assert box.read("/etc/resolv.conf") == "nameserver 127.0.0.1\n"
    end(box, launcher, node)


def test_layers_are_stacked_topmost_first(node: Node, launcher: Launcher, layers: Layers) -> None:
    def change(tree: Path) -> None:
        (tree / "etc/passwd").unlink()
        os.mknod(tree / "etc/passwd", stat.S_IFCHR | 0o600, os.makedev(0, 0))
        (tree / "who").write_text("top")

    def base(tree: Path) -> None:
        (tree / "who").write_text("base")
        (tree / "only-base").write_text("base")

    spec = node.spec(layers=[str(layers.make(change)), str(layers.make(base))])
    box = Box(spec, launcher.launch(spec))
    assert box.read("/who") == "top"
    assert box.read("/only-base") == "base"
    assert box.probe("stat", "/etc/passwd") == {"/etc/passwd": "ENOENT"}
    end(box, launcher, node)


def test_directories_are_mended_before_anything_runs(
    node: Node, launcher: Launcher, layers: Layers
) -> None:
    def change(tree: Path) -> None:
        for name in ("mended/deeper", "tmp", "untouched", "dev/pts"):
            (tree / name).mkdir(parents=True)
        (tree / "file").touch()
        (tree / "link").symlink_to("untouched")

    mends = [("/", 0o711, 0, 0), ("/tmp", 0o1777, 0, 0), ("/mended/deeper", 0o2750, 1000, 70_000)]
    mends += [(path, 0o777, 5, 5) for path in ("/file", "/link", "/link/x", "/none", "/dev/pts")]
    spec = node.spec(layers=[str(layers.make(change))], mends=mends)
    box = Box(spec, launcher.launch(spec))
    found = {
        path: attributes(Path(f"/proc/{box.pid}/root{path}"), spec.uid_base)
        for path in ("/", "/tmp", "/mended", "/mended/deeper", "/untouched", "/file", "/dev/pts")
    }
    assert found.pop("/dev/pts") == ("755", 0, 0)  # the sandbox's own, not the image's
    assert found == {
        "/": ("711", 0, 0),
        "/tmp": ("1777", 0, 0),
        "/mended": ("755", 0, 0),
        "/mended/deeper": ("2750", 1000, 65534),
        "/untouched": ("755", 0, 0),
        "/file": ("644", 0, 0),
    }
    end(box, launcher, node)


def attributes(path: Path, base: int) -> tuple[str, int, int]:
    """Mode, uid and gid inside."""
    found = path.stat()
    return f"{stat.S_IMODE(found.st_mode):o}", found.st_uid - base, found.st_gid - base


# What it cannot do


CONTAINED = {
    "mount": "EPERM", "umount": "EPERM", "remount": "EPERM", "fsopen": "EPERM",
    "open_tree": "EPERM", "pivot_root": "EPERM", "unshare_user": "EPERM",
    "unshare_mount": "EPERM", "unshare_files": "0", "clone_user": "EPERM", "clone3": "ENOSYS",
    "setns": "EPERM",
    "ptrace_1": "EPERM", "fds_of_1": "EACCES", "memory_of_1": "EACCES", "maps_of_1": "EACCES",
    "environ_of_1": "EACCES", "root_of_1": "EACCES", "exe_of_1": "EACCES", "read_1": "EPERM",
    "getfd_1": "EBADF",  # there is no pidfd of it to be had
    "renice_1": "EPERM", "affinity_1": "EPERM", "limit_1": "EPERM",
    "oom_1": "EACCES", "cgroup_1": "ENOENT",
    "bpf": "EPERM", "keyctl": "EPERM", "userfaultfd": "EPERM", "io_uring": "EPERM",
    "perf": "EPERM", "by_handle": "EPERM", "vsock": "EPERM", "alg": "EPERM", "unix": "0",
    "tiocsti": "EPERM", "tiocsti_high": "EPERM", "x32": "ENOSYS", "int80": str(signal.SIGSYS),
    "core_pattern": "EACCES", "sysrq": "EROFS", "more_namespaces": "EACCES", "device": "EPERM",
    "new_in_dev": "EROFS", "hostname": "EPERM", "kcore": "ENODATA",
    "kill_1": "EPERM", "stop_1": "EPERM",
}  # fmt: skip


@pytest.mark.adversarial
def test_root_inside_is_contained(box: Box) -> None:
    done = box.probe("attack")
    if not Path("/proc/sysrq-trigger").exists():
        assert done.pop("sysrq") == "ENOENT"
        done["sysrq"] = CONTAINED["sysrq"]
    assert done == CONTAINED
    assert box.probe("ids")["uid"] == "0"
    assert box.status("State")[0] in "RS"  # neither stopped nor a zombie


@pytest.mark.adversarial
def test_first_process_is_out_of_reach_without_any_filter(node: Node, launcher: Launcher) -> None:
    """Namespaces and ids alone hold, were the filter to miss something."""
    spec = node.spec(seccomp="none")
    box = Box(spec, launcher.launch(spec))
    done = box.probe("attack")
    # Allowed to ask (CAP_KILL), but the kernel lets no process of its namespace end the first.
    reached = {name for name in done if name.endswith("_1") and done[name] == "0"}
    assert reached == {"kill_1", "stop_1"}
    assert done["mount"] == done["unshare_mount"] == done["setns"] == "EPERM"
    # The kernel's own limit, set in the sandbox's user namespace.
    assert done["unshare_user"] == done["clone_user"] == "ENOSPC"
    assert box.probe("ids")["uid"] == "0"
    end(box, launcher, node)


def test_limits_reach_commands(node: Node, launcher: Launcher) -> None:
    spec = node.spec(rlimits={"nofile": (100, 200), "core": (0, 0)}, no_new_privs=True)
    box = Box(spec, launcher.launch(spec))
    limits = box.read("/proc/self/limits")
    assert "100                  200" in limits
    status = box.read("/proc/self/status")
    assert "NoNewPrivs:\t1" in status
    assert "Seccomp:\t2" in status
    assert f"CapBnd:\t{kept():016x}" in status
    assert box.probe("ids", user="1000", program="probe-suid")["euid"] == "1000"
    end(box, launcher, node)


def kept() -> int:
    numbers = [0, 1, 3, 4, 5, 6, 7, 8, 10, 13, 18, 27, 31]
    return sum(1 << number for number in numbers)
