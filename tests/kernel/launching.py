"""`aether launch` for tests: a node's places, a launcher, and a sandbox from the edge's side of its socket."""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import signal
import socket
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
