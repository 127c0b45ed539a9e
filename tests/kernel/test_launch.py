"""`aether launch` against the real kernel: what a sandbox is, cannot do, and leaves behind."""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import signal
import socket
import stat
import struct
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from dsec.wire import frames
from dsec.wire.launch import CgroupDir, ExitNotice, LaunchReply, LaunchRequest, LaunchSpec

pytestmark = pytest.mark.needs_root

REPOSITORY = Path(__file__).parents[2]
TARGET = REPOSITORY / "native/target/x86_64-unknown-linux-gnu"
LIBC = ctypes.CDLL(None, use_errno=True)
PROBE = Path(__file__).with_name("test_launch_probe.c")
MASKED = ["/proc/kcore", "/proc/keys", "/proc/timer_list", "/proc/acpi", "/sys/firmware"]
READ_ONLY = ["/proc/bus", "/proc/fs", "/proc/irq", "/proc/sys", "/proc/sysrq-trigger", "/proc/no"]
CAPABILITIES = [
    "CAP_CHOWN", "CAP_DAC_OVERRIDE", "CAP_FOWNER", "CAP_FSETID", "CAP_KILL", "CAP_SETGID",
    "CAP_SETUID", "CAP_SETPCAP", "CAP_NET_BIND_SERVICE", "CAP_NET_RAW", "CAP_SYS_CHROOT",
    "CAP_MKNOD", "CAP_SETFCAP",
]  # fmt: skip
IDS = 1 << 16


def build(profile: str) -> Path:
    options = ["--release"] if profile == "release" else []
    subprocess.run(["cargo", "build", "--quiet", *options], cwd=REPOSITORY / "native", check=True)
    return TARGET / profile / "aether"


@pytest.fixture(scope="session")
def aether() -> Path:
    return build("release")


@pytest.fixture(scope="session")
def aether_that_fails() -> Path:
    """Built for debugging: takes AETHER_FAIL_AT and AETHER_STALL_AT, waits 1 s for a child."""
    return build("debug")


def cgroup_mount(kind: str, option: str = "") -> Path:
    for line in Path("/proc/mounts").read_text().splitlines():
        _, place, found, options, *_ = line.split()
        if found == kind and (not option or option in options.split(",")):
            return Path(place)
    pytest.skip(f"no {kind} {option} hierarchy")


def mount_erofs(image: Path, place: Path) -> None:
    place.mkdir()
    if LIBC.mount(bytes(image), bytes(place), b"erofs", 1, None):
        raise OSError(ctypes.get_errno(), "mount erofs", str(place))


Change = Callable[[Path], object]


class Layers:
    """Builds EROFS images that hold the probe, and mounts them."""

    def __init__(self, home: Path, probe: Path) -> None:
        self.home, self.probe = home, probe
        self.mounted: list[Path] = []

    def make(self, change: Change = lambda _: None) -> Path:
        """A mounted layer; `change` gets its tree before it is packed."""
        home = self.home / str(len(self.mounted))
        tree = home / "tree"
        (tree / "bin").mkdir(parents=True)
        (tree / "etc").mkdir()
        shutil.copy(self.probe, tree / "bin/probe")
        shutil.copy(self.probe, tree / "bin/probe-suid")
        (tree / "bin/probe-suid").chmod(0o4755)
        passwd = "root:x:0:0::/root:/bin/sh\nuser:x:1000:1000::/:/bin/sh\n"
        (tree / "etc/passwd").write_text(passwd)
        change(tree)
        image = home / "image"
        subprocess.run(["mkfs.erofs", "--quiet", image, tree], check=True, capture_output=True)
        mount_erofs(image, home / "mounted")
        self.mounted.append(home / "mounted")
        return home / "mounted"

    def close(self) -> None:
        for place in self.mounted:
            assert LIBC.umount2(bytes(place), 0) == 0, (place, ctypes.get_errno())


@pytest.fixture(scope="session")
def probe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    probe = tmp_path_factory.mktemp("probe") / "probe"
    subprocess.run(["gcc", "-static", "-O1", "-o", probe, PROBE], check=True)
    return probe


@pytest.fixture(scope="module")
def layer(tmp_path_factory: pytest.TempPathFactory, probe: Path) -> Iterator[Path]:
    layers = Layers(tmp_path_factory.mktemp("layer"), probe)
    yield layers.make()
    layers.close()


@pytest.fixture
def layers(node: Node, probe: Path) -> Iterator[Layers]:
    layers = Layers(node.home / "layers", probe)
    yield layers
    layers.close()


class Launcher:
    """A launcher under test and our end of its socket."""

    def __init__(self, binary: Path, **env: str) -> None:
        self.edge, theirs = socket.socketpair()
        self.edge.settimeout(30)
        self.exits: dict[str, int] = {}
        self._next = 0
        with theirs:
            self.process = subprocess.Popen(
                [binary, "launch"],
                env={"SECRET_OF_THE_EDGE": "x", **env},
                preexec_fn=lambda: os.dup2(theirs.fileno(), 3),  # noqa: PLW1509
                pass_fds=[3],
            )

    def launch(self, spec: LaunchSpec) -> LaunchReply:
        self._next += 1
        return self.ask(msgspec.msgpack.encode(LaunchRequest(id=self._next, spec=spec)))

    def ask(self, body: bytes) -> LaunchReply:
        self.edge.sendall(struct.pack(">I", len(body)) + body)
        while not isinstance(reply := self._receive(), LaunchReply):
            self.exits[reply.exited] = reply.status
        assert reply.id == self._next
        return reply

    def wait_exit(self, sandbox: str) -> int:
        while sandbox not in self.exits:
            notice = self._receive()
            assert isinstance(notice, ExitNotice)
            self.exits[notice.exited] = notice.status
        return self.exits.pop(sandbox)

    def _receive(self) -> LaunchReply | ExitNotice:
        (length,) = struct.unpack(">I", self._exactly(4))
        body = self._exactly(length)
        if b"exited" in body[:10]:
            return msgspec.msgpack.decode(body, type=ExitNotice)
        return msgspec.msgpack.decode(body, type=LaunchReply)

    def _exactly(self, length: int) -> bytes:
        data = b""
        while len(data) < length:
            piece = self.edge.recv(length - len(data))
            assert piece, "the launcher hung up"
            data += piece
        return data

    def close(self) -> int:
        self.edge.close()
        return self.process.wait(10)


class Node:
    """A place on this host where sandboxes are launched; knows what it must look like after."""

    def __init__(self, home: Path, layer: Path) -> None:
        self.home = home
        self.layer = layer
        self.v2 = cgroup_mount("cgroup2") / f"dsec-test-{os.getpid()}"
        self.pids = cgroup_mount("cgroup", "pids") / f"dsec-test-{os.getpid()}"
        self._number = 0
        first = 1000 + os.getpid() * 251 % 60000
        self.id_ranges = range(first, first + 1000)
        """Run numbers of host ids, not the same in two test runs at once."""

    def spec(self, **changes: Any) -> LaunchSpec:
        self._number += 1
        name = f"box{self._number}"
        place = self.home / name
        place.mkdir()
        box, pids = self.v2 / name, self.pids / name
        fields: dict[str, Any] = {
            "id": name,
            "hostname": name,
            "machine_id": f"{self._number:032x}",
            "uid_base": self.id_ranges[self._number] * IDS,
            "layers": [str(self.layer)],
            "upper": str(place / "upper"),
            "work": str(place / "work"),
            "socket": str(place / "socket"),
            "cgroups": [
                CgroupDir(path=str(box), delegate=True),
                CgroupDir(path=str(box / "agent")),
                CgroupDir(path=str(box / "work"), delegate=True),
                CgroupDir(path=str(pids), writes=[("pids.max", "64")]),
            ],
            "agent_v2": str(box / "agent"),
            "work_v2": str(box / "work"),
            "work_v1": [str(pids / "tasks")],
            "masked_paths": MASKED,
            "readonly_paths": READ_ONLY,
            "capabilities": CAPABILITIES,
        }
        return LaunchSpec(**{**fields, **changes})

    def clear(self, spec: LaunchSpec) -> None:
        """What the edge does after a sandbox has ended."""
        for group in reversed(spec.cgroups):
            remove_cgroup(Path(group.path))
        shutil.rmtree(Path(spec.socket).parent)

    def left(self, spec: LaunchSpec) -> list[str]:
        """What of one launch is still there."""
        paths = [spec.upper, spec.work, spec.socket, *(group.path for group in spec.cgroups)]
        return [path for path in paths if os.path.lexists(path)]


def remove_cgroup(path: Path) -> None:
    for child in [entry for entry in path.iterdir() if entry.is_dir()]:
        remove_cgroup(child)
    for _ in range(200):
        with contextlib.suppress(OSError):
            path.rmdir()
            return
        time.sleep(0.005)
    path.rmdir()


@pytest.fixture
def node(tmp_path: Path, layer: Path) -> Iterator[Node]:
    node = Node(tmp_path, layer)
    node.v2.mkdir()
    node.pids.mkdir()
    before = world(node)
    yield node
    wait_until(lambda: world(node) == before, lambda: difference(before, world(node)))
    node.v2.rmdir()
    node.pids.rmdir()


@pytest.fixture
def launcher(aether: Path) -> Iterator[Launcher]:
    launcher = Launcher(aether)
    yield launcher
    assert launcher.close() == 0


World = dict[str, set[str]]


def world(node: Node) -> World:
    """What this node may have made on the host; others use the host at the same time."""
    processes, namespaces = set(), set()
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            owner = int((process / "status").read_text().split("\nUid:")[1].split()[0])
            if owner >> 16 in node.id_ranges:
                processes.add(process.name)
                namespaces |= {str(kind.readlink()) for kind in (process / "ns").iterdir()}
    table = Path("/proc/self/mountinfo").read_text().splitlines()
    mounts = {line for line in table if str(node.home) in line or " template " in line}
    cgroups = {
        str(path) for root in (node.v2, node.pids) for path in root.iterdir() if path.is_dir()
    }
    return {"ns": namespaces, "process": processes, "mount": mounts, "cgroup": cgroups}


def difference(before: World, after: World) -> str:
    return "; ".join(
        f"{key}: {after[key] ^ before[key]}" for key in before if after[key] != before[key]
    )


def wait_until(done: Callable[[], bool], why: Callable[[], object]) -> None:
    deadline = time.monotonic() + 5
    while not done():
        assert time.monotonic() < deadline, why()
        time.sleep(0.01)


class Box:
    """A sandbox that runs, from the edge's side of its socket."""

    def __init__(self, spec: LaunchSpec, reply: LaunchReply) -> None:
        assert reply.pid > 0, reply
        self.spec, self.pid, self.micros = spec, reply.pid, reply.micros
        self.channel = socket.socket(socket.AF_UNIX)
        self.channel.settimeout(20)
        self.channel.connect(spec.socket)
        self._decoder = frames.Decoder()
        self._stream = 0
        self._ask({"m": "hello", "protocol": 1})

    def run(self, *argv: str, user: str | None = None) -> tuple[int, str]:
        command = {"m": "run", "command_id": f"c{self._stream}", "argv": list(argv), "user": user}
        answer = self._ask(command)
        output = answer["stdout"]["head"] + answer["stderr"]["head"]
        return answer["exit_code"], output.decode()

    def probe(
        self, *arguments: str, user: str | None = None, program: str = "probe"
    ) -> dict[str, str]:
        """The probe's lines as name and answer."""
        code, output = self.run(f"/bin/{program}", *arguments, user=user)
        assert code == 0, output
        return dict(line.split(" ", 1) for line in output.splitlines())

    def read(self, path: str) -> str:
        code, output = self.run("/bin/probe", "cat", path)
        assert code == 0, output
        opened, _, text = output.partition("\n")
        assert opened == "open 0", (path, opened)
        return text

    def _ask(self, message: dict[str, Any]) -> dict[str, Any]:
        self._stream += 1
        body = msgspec.msgpack.encode(message)
        frame = frames.Frame(frames.Kind.OPEN, self._stream, body)
        self.channel.sendall(frames.encode(frame))
        while True:
            for answer in self._decoder.feed(self.channel.recv(65536)):
                if answer.stream == self._stream and answer.kind == frames.Kind.RESULT:
                    return dict(msgspec.msgpack.decode(answer.payload))
                assert answer.kind != frames.Kind.ERROR, answer

    def status(self, key: str) -> str:
        """From the host's /proc/PID/status of its first process."""
        for line in Path(f"/proc/{self.pid}/status").read_text().splitlines():
            if line.startswith(key + ":"):
                return line.split(":", 1)[1].strip()
        raise KeyError(key)


def end(box: Box, launcher: Launcher, node: Node) -> None:
    box.channel.close()
    os.kill(box.pid, signal.SIGKILL)
    assert launcher.wait_exit(box.spec.id) == signal.SIGKILL
    node.clear(box.spec)


@pytest.fixture
def box(node: Node, launcher: Launcher) -> Iterator[Box]:
    spec = node.spec()
    box = Box(spec, launcher.launch(spec))
    yield box
    end(box, launcher, node)


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
    "getfd_1": "EPERM", "renice_1": "EPERM", "affinity_1": "EPERM", "limit_1": "EPERM",
    "oom_1": "EACCES", "cgroup_1": "ENOENT",
    "bpf": "EPERM", "keyctl": "EPERM", "userfaultfd": "EPERM", "io_uring": "EPERM",
    "perf": "EPERM", "by_handle": "EPERM", "vsock": "EPERM", "alg": "EPERM", "unix": "0",
    "tiocsti": "EPERM", "tiocsti_high": "EPERM", "x32": "ENOSYS", "int80": str(signal.SIGSYS),
    "core_pattern": "EACCES", "sysrq": "EROFS", "more_namespaces": "EACCES", "device": "EPERM",
    "new_in_dev": "EROFS", "hostname": "EPERM", "kcore": "ENODATA",
    # Allowed to ask (CAP_KILL), but the kernel lets no process of its namespace end the first.
    "kill_1": "0", "stop_1": "0",
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


# Failures leave nothing


def steps_of(micros: dict[str, int]) -> list[str]:
    return [step for step in micros if step not in {"total", "receive mounts"}]


def test_every_step_can_fail_and_leaves_nothing(node: Node, aether_that_fails: Path) -> None:
    launcher = Launcher(aether_that_fails)
    mends = [("/bin", 0o700, 0, 0)]
    spec = node.spec(mends=mends)
    box = Box(spec, launcher.launch(spec))
    end(box, launcher, node)
    assert launcher.close() == 0
    steps = steps_of(box.micros)
    assert len(steps) > 25
    assert "mend directory" in steps
    for step in steps:
        launcher = Launcher(aether_that_fails, AETHER_FAIL_AT=step)
        spec = node.spec(mends=mends)
        reply = launcher.launch(spec)
        assert (reply.pid, reply.step, reply.errno) == (0, step, 5), reply
        assert step in reply.message
        assert node.left(spec) == [], step
        before = sorted(Path(f"/proc/{launcher.process.pid}/fd").iterdir())
        assert launcher.launch(spec).step == step
        assert sorted(Path(f"/proc/{launcher.process.pid}/fd").iterdir()) == before
        assert launcher.close() == 0


def test_a_silent_child_is_given_up(node: Node, aether_that_fails: Path) -> None:
    launcher = Launcher(aether_that_fails, AETHER_STALL_AT="enter root")
    spec = node.spec()
    reply = launcher.launch(spec)
    assert (reply.pid, reply.step) == (0, "await ready")
    assert "silent" in reply.message
    assert node.left(spec) == []
    assert launcher.close() == 0


def link(name: str, target: str) -> Callable[[Path], None]:
    return lambda tree: (tree / name).symlink_to(target)


@pytest.mark.parametrize("name", ["proc", "sys", "dev", "tmp"])
def test_an_image_whose_mount_point_is_a_link_is_refused(
    node: Node, launcher: Launcher, layers: Layers, name: str
) -> None:
    spec = node.spec(layers=[str(layers.make(link(name, "/etc")))])
    reply = launcher.launch(spec)
    assert (reply.pid, reply.step, reply.path) == (0, "make mount point", f"/{name}")
    assert "symbolic link" in reply.message
    assert node.left(spec) == []


def test_a_masked_path_behind_a_link_is_refused(
    node: Node, launcher: Launcher, layers: Layers
) -> None:
    layer = layers.make(link("elsewhere", "/etc"))
    spec = node.spec(layers=[str(layer)], masked_paths=["/elsewhere/passwd"])
    reply = launcher.launch(spec)
    assert (reply.pid, reply.step, reply.path) == (0, "mask", "/elsewhere/passwd")
    assert node.left(spec) == []


@pytest.mark.parametrize(
    ("changes", "step", "errno"),
    [
        ({"uid_base": 0}, "check", 0),
        ({"layers": []}, "check", 0),
        ({"upper": "relative"}, "check", 0),
        ({"capabilities": ["CAP_ALL"]}, "confine", 22),
        ({"seccomp": "lenient"}, "confine", 22),
        ({"rlimits": {"nofile": (1, 1 << 40)}}, "confine", 1),
        ({"layers": ["/no/such/layer"]}, "copy layer", 2),
        ({"work_v1": ["/no/such/tasks"]}, "open groups", 2),
        ({"agent_v2": "/no/such/group"}, "clone", 2),
        ({"socket": "/no/such/directory/socket"}, "listen", 2),
    ],
)
def test_what_is_wrong_is_said(
    node: Node, launcher: Launcher, changes: dict[str, Any], step: str, errno: int
) -> None:
    spec = node.spec(**changes)
    reply = launcher.launch(spec)
    assert (reply.pid, reply.step, reply.errno) == (0, step, errno), reply
    assert [path for path in node.left(spec) if path.startswith("/")] == []


def test_a_cgroup_in_use_is_not_taken_over(node: Node, launcher: Launcher) -> None:
    spec = node.spec()
    (node.v2 / spec.id / "busy").mkdir(parents=True)
    reply = launcher.launch(spec)
    assert (reply.pid, reply.step, reply.errno) == (0, "make cgroup", 17)
    assert (node.v2 / spec.id / "busy").exists()
    (node.v2 / spec.id / "busy").rmdir()
    box = Box(spec, launcher.launch(spec))
    end(box, launcher, node)


def test_an_upper_directory_of_the_edge_survives_a_failure(node: Node, launcher: Launcher) -> None:
    spec = node.spec(agent_v2="/no/such/group")
    Path(spec.upper).mkdir()
    (Path(spec.upper) / "kept").write_text("x")
    assert launcher.launch(spec).pid == 0
    assert (Path(spec.upper) / "kept").exists()


def test_a_used_work_directory_is_refused(node: Node, launcher: Launcher) -> None:
    spec = node.spec()
    box = Box(spec, launcher.launch(spec))
    assert box.probe("write", "/kept", "x") == {"write": "0"}
    box.channel.close()
    os.kill(box.pid, signal.SIGKILL)
    launcher.wait_exit(spec.id)
    for group in reversed(spec.cgroups):
        remove_cgroup(Path(group.path))
    Path(spec.socket).unlink()
    reply = launcher.launch(spec)
    assert (reply.pid, reply.step) == (0, "mount overlay"), reply
    again = msgspec.structs.replace(spec, work=spec.work + "-2")
    box = Box(again, launcher.launch(again))
    assert box.read("/kept") == "x"
    end(box, launcher, node)


def test_a_request_that_is_not_one_is_answered(launcher: Launcher) -> None:
    reply = launcher.ask(msgspec.msgpack.encode({"id": 0, "spec": {"id": "x"}}))
    assert (reply.step, reply.pid) == ("read request", 0)
    assert "hostname" in reply.message


def test_descriptor_3_must_be_a_stream_socket(aether: Path) -> None:
    done = subprocess.run([aether, "launch"], capture_output=True, text=True, check=False)
    assert done.returncode == 65
    assert "descriptor 3" in done.stderr


def test_plan_is_shown_without_doing_anything(node: Node, aether: Path) -> None:
    spec = node.spec()
    # By descriptor: nobody may not walk to a checkout in a closed home.
    with aether.open("rb") as binary:
        done = subprocess.run(
            ["aether", "launch", "--plan"],
            executable=f"/proc/self/fd/{binary.fileno()}",
            pass_fds=[binary.fileno()],
            input=msgspec.msgpack.encode(spec),
            capture_output=True,
            check=True,
            user=65534,
        )
    lines = done.stdout.decode().splitlines()
    assert f"host    listen on {spec.socket}" in lines
    assert "inside  mount proc on /proc" in lines
    assert node.left(spec) == []


# Launchers come and go


def test_sandboxes_outlive_a_killed_launcher(node: Node, aether: Path) -> None:
    launcher = Launcher(aether)
    spec = node.spec()
    box = Box(spec, launcher.launch(spec))
    launcher.process.kill()
    launcher.process.wait()
    launcher.edge.close()
    assert box.probe("ids")["uid"] == "0"
    box.channel.close()
    os.kill(box.pid, signal.SIGKILL)
    wait_until(lambda: not Path(spec.agent_v2, "cgroup.procs").read_text(), lambda: box.pid)
    node.clear(spec)


def test_sandboxes_outlive_a_launcher_whose_edge_is_gone(node: Node, aether: Path) -> None:
    launcher = Launcher(aether)
    spec = node.spec()
    box = Box(spec, launcher.launch(spec))
    assert launcher.close() == 0
    assert box.probe("ids")["uid"] == "0"
    box.channel.close()
    os.kill(box.pid, signal.SIGKILL)
    wait_until(lambda: not Path(spec.agent_v2, "cgroup.procs").read_text(), lambda: box.pid)
    node.clear(spec)


def test_nothing_of_the_edge_is_in_a_sandboxs_memory(node: Node, launcher: Launcher) -> None:
    first = node.spec(env={"TOKEN": "secret-of-the-first-" + "sandbox"})
    one = Box(first, launcher.launch(first))
    second = node.spec()
    two = Box(second, launcher.launch(second))
    memory = memory_of(two.pid)
    assert b"secret-of-the-first" not in memory
    assert b"SECRET_OF_THE_EDGE" not in memory
    assert second.socket.encode() in memory  # it was searched where it matters
    end(one, launcher, node)
    end(two, launcher, node)


def memory_of(pid: int) -> bytes:
    pieces = []
    with Path(f"/proc/{pid}/mem").open("rb", buffering=0) as memory:
        for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
            span, rights, *_ = line.split()
            if rights.startswith("rw"):
                first, last = (int(edge, 16) for edge in span.split("-"))
                memory.seek(first)
                pieces.append(memory.read(last - first))
    return b"".join(pieces)


def test_many_launches_leave_the_host_as_it_was(node: Node, launcher: Launcher) -> None:
    def descriptors() -> int:
        return len(list(Path(f"/proc/{launcher.process.pid}/fd").iterdir()))

    def once() -> None:
        spec = node.spec()
        reply = launcher.launch(spec)
        assert reply.pid, reply
        os.kill(reply.pid, signal.SIGKILL)
        assert launcher.wait_exit(spec.id) == signal.SIGKILL
        node.clear(spec)

    once()
    before = descriptors()
    for _ in range(199):
        once()
    assert descriptors() == before
