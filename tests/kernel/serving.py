"""Starts `aether serve` in a pid namespace of its own and speaks frames with it; plain blocking code."""

from __future__ import annotations

import atexit
import contextlib
import errno
import itertools
import os
import select
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from dsec.wire.frames import INITIAL_CREDIT, Decoder, Frame, Kind, encode

ROOT = Path(__file__).parents[2]
RELEASE = ROOT / "native/target/x86_64-unknown-linux-gnu/release"
AETHER = RELEASE / "aether"


def _within_reach(binary: Path) -> Path:
    """A copy that any user may execute: the checkout may be in a closed home."""
    place = Path(tempfile.mkdtemp(prefix="dsec-kernel-tests-"))
    atexit.register(shutil.rmtree, place, ignore_errors=True)
    place.chmod(0o755)
    return Path(shutil.copy(binary, place))


PROBE = _within_reach(RELEASE / "probe")
UNIFIED = next(
    (
        p
        for p in (Path("/sys/fs/cgroup/unified"), Path("/sys/fs/cgroup"))
        if (p / "cgroup.procs").exists() and (p / "cgroup.controllers").exists()
    ),
    None,
)
DEADLINE_S = 30.0

SPEC: dict[str, Any] = {
    "id": "sb-test",
    "hostname": "",
    "uid_base": 0,
    "layers": [],
    "upper": "",
    "work": "",
    "socket": "",
    "default_timeout_s": 60.0,
    "max_timeout_s": 120.0,
    "seccomp": "none",
    "output_limit_bytes": 1 << 20,
    "max_running_commands": 256,
    "capabilities": [
        "CAP_CHOWN",
        "CAP_DAC_OVERRIDE",
        "CAP_FOWNER",
        "CAP_FSETID",
        "CAP_KILL",
        "CAP_SETGID",
        "CAP_SETUID",
        "CAP_MKNOD",
        "CAP_SYS_CHROOT",
    ],
}


class Refused(Exception):
    """An ERROR frame."""

    def __init__(self, payload: dict[str, Any]) -> None:
        super().__init__(payload)
        self.payload = payload
        self.code = payload["code"]
        self.kind = payload.get("kind")


class Dropped(Exception):
    """The connection is gone."""


class Stream:
    """One stream; frames of it wait here until they are asked for."""

    def __init__(self, client: Client, number: int, *, credit: bool) -> None:
        self.client = client
        self.number = number
        self.frames: deque[Frame] = deque()
        self.auto_credit = credit
        self.window = INITIAL_CREDIT
        self.over = False

    def next(self, timeout: float = DEADLINE_S) -> Frame:
        end = time.monotonic() + timeout
        while not self.frames:
            self.client.receive(end - time.monotonic())
        return self.frames.popleft()

    def event(self, timeout: float = DEADLINE_S) -> Any:
        frame = self.next(timeout)
        if frame.kind is Kind.ERROR:
            raise Refused(msgspec.msgpack.decode(frame.payload))
        assert frame.kind is Kind.EVENT, frame
        return msgspec.msgpack.decode(frame.payload)

    def finish(self, timeout: float = DEADLINE_S) -> tuple[Any, list[Any], dict[int, bytes]]:
        """All that comes until the end: result, events, data by channel."""
        events: list[Any] = []
        data: dict[int, bytearray] = {}
        end = time.monotonic() + timeout
        while True:
            frame = self.next(end - time.monotonic())
            if frame.kind is Kind.EVENT:
                events.append(msgspec.msgpack.decode(frame.payload))
            elif frame.kind is Kind.DATA:
                data.setdefault(frame.channel, bytearray()).extend(frame.payload)
            elif frame.kind is Kind.RESULT:
                joined = {k: bytes(v) for k, v in data.items()}
                return msgspec.msgpack.decode(frame.payload), events, joined
            elif frame.kind is Kind.ERROR:
                raise Refused(msgspec.msgpack.decode(frame.payload))

    def result(self, timeout: float = DEADLINE_S) -> Any:
        return self.finish(timeout)[0]

    def send(self, data: bytes) -> None:
        """DATA, as credit allows."""
        view = memoryview(data)
        while view:
            while self.window <= 0 and not self.over:
                self.client.receive(DEADLINE_S)
            if self.over:
                return
            piece = view[: min(self.window, 128 * 1024)]
            self.window -= len(piece)
            self.client.send(Frame(Kind.DATA, self.number, bytes(piece)))
            view = view[len(piece) :]

    def end(self) -> None:
        self.client.send(Frame(Kind.END, self.number))

    def credit(self, size: int) -> None:
        self.client.send(Frame(Kind.CREDIT, self.number, size.to_bytes(4, "big")))

    def cancel(self) -> None:
        self.client.send(Frame(Kind.CANCEL, self.number))


class Client:
    """One connection."""

    def __init__(self, path: Path) -> None:
        self.socket = socket.socket(socket.AF_UNIX)
        end = time.monotonic() + 5
        while True:
            try:
                self.socket.connect(str(path))
                break
            except OSError:
                if time.monotonic() > end:
                    raise
                time.sleep(0.002)
        self.decoder = Decoder()
        self.numbers = itertools.count(1)
        self.streams: dict[int, Stream] = {}
        self.pongs: list[bytes] = []
        self.grants: list[Frame] = []

    def close(self) -> None:
        self.socket.close()

    def send(self, frame: Frame) -> None:
        # Never only write: what comes meanwhile is taken, as any sound peer does.
        data = memoryview(encode(frame))
        while data:
            readable, writable, _ = select.select([self.socket], [self.socket], [], DEADLINE_S)
            if not readable and not writable:
                raise TimeoutError
            if readable:
                self.receive(0.1)
            if writable:
                sent = self.socket.send(data, socket.MSG_DONTWAIT)
                data = data[sent:]

    def receive(self, timeout: float) -> None:
        if timeout <= 0 or not select.select([self.socket], [], [], timeout)[0]:
            raise TimeoutError
        try:
            data = self.socket.recv(1 << 18)
        except ConnectionError as error:
            raise Dropped from error
        if not data:
            raise Dropped
        # All of them before anything is sent: sending receives.
        for frame in list(self.decoder.feed(data)):
            if frame.kind is Kind.PONG:
                self.pongs.append(frame.payload)
                continue
            stream = self.streams.get(frame.stream)
            assert stream is not None, frame
            if frame.kind is Kind.CREDIT:
                stream.window += int.from_bytes(frame.payload, "big")
                continue
            if frame.kind in (Kind.RESULT, Kind.ERROR):
                stream.over = True
                del self.streams[frame.stream]
            elif frame.kind is Kind.DATA and stream.auto_credit and frame.payload:
                grant = len(frame.payload).to_bytes(4, "big")
                self.grants.append(Frame(Kind.CREDIT, frame.stream, grant))
            stream.frames.append(frame)
        while self.grants:
            self.send(self.grants.pop())

    def open(self, method: str, *, credit: bool = True, **args: Any) -> Stream:
        stream = Stream(self, next(self.numbers), credit=credit)
        self.streams[stream.number] = stream
        payload = msgspec.msgpack.encode({"m": method, **args})
        self.send(Frame(Kind.OPEN, stream.number, payload))
        return stream

    def call(self, method: str, **args: Any) -> Any:
        return self.open(method, **args).result()

    def run(self, *argv: str | bytes, **args: Any) -> dict[str, Any]:
        args.setdefault("command_id", os.urandom(6).hex())
        if argv:
            args["argv"] = list(argv)
        result: dict[str, Any]
        result, _, data = self.open("run", **args).finish()
        for channel, name in ((1, "stdout"), (2, "stderr")):
            if "head_bytes" in result[name]:
                cut = result[name]["head_bytes"]
                result[name]["head"] = data.get(channel, b"")[:cut]
                result[name]["tail"] = data.get(channel, b"")[cut:]
        result["out"] = result["stdout"]["head"] + result["stdout"]["tail"]
        result["err"] = result["stderr"]["head"] + result["stderr"]["tail"]
        return result

    def probe(self, *args: str, **more: Any) -> dict[str, Any]:
        return self.run(str(PROBE), *args, **more)


class Serving:
    """A running `aether serve` with a directory of its own."""

    def __init__(self, place: Path, *, v2: bool = True, pid1: bool = True, **spec: Any) -> None:
        self.place = place
        self.socket = place / "edge.sock"
        self.group: Path | None = None
        merged = {**SPEC, **spec}
        (place / "spec").write_bytes(msgspec.msgpack.encode(merged))
        argv = [str(AETHER), "serve", "--socket", str(self.socket), "--spec", str(place / "spec")]
        if v2:
            assert UNIFIED is not None, "no cgroup v2 mount"
            self.group = UNIFIED / f"dsec-serve-{os.getpid()}-{os.urandom(4).hex()}"
            self.group.mkdir()
            argv += ["--work-v2", str(self.group)]
        if pid1:
            argv = ["unshare", "--fork", "--pid", "--mount-proc", "--kill-child", *argv]
        self.process = subprocess.Popen(argv, stdin=subprocess.DEVNULL)
        self.clients: list[Client] = []

    def client(self) -> Client:
        client = Client(self.socket)
        self.clients.append(client)
        assert client.call("hello", protocol=1)["protocol"] == 1
        return client

    @property
    def pid(self) -> int:
        """Its pid out here."""
        path = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children")
        children = path.read_text().split()
        return int(children[0]) if children else self.process.pid

    def private_kib(self) -> int:
        text = Path(f"/proc/{self.pid}/smaps_rollup").read_text()
        found = [line.split()[1] for line in text.splitlines() if line.startswith("Private_Dirty")]
        return int(found[0])

    def anonymous_kib(self) -> int:
        text = Path(f"/proc/{self.pid}/smaps_rollup").read_text()
        found = [line.split()[1] for line in text.splitlines() if line.startswith("Anonymous")]
        return int(found[0])

    def rss_kib(self) -> int:
        text = Path(f"/proc/{self.pid}/status").read_text()
        found = [line.split()[1] for line in text.splitlines() if line.startswith("VmRSS")]
        return int(found[0])

    def groups(self) -> list[Path]:
        """Cgroups made for what runs."""
        return list(self.group.glob("*/")) if self.group else []

    def members(self) -> list[int]:
        """All processes of commands, by their pids out here."""
        assert self.group is not None
        pids = []
        for procs in self.group.rglob("cgroup.procs"):
            with contextlib.suppress(OSError):
                pids += [int(line) for line in procs.read_text().split()]
        return pids

    def stop(self) -> None:
        for client in self.clients:
            client.close()
        if self.process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)
            self.process.kill()
            self.process.wait()
        if self.group is not None:
            (self.group / "cgroup.kill").write_text("1")
            for group in (*sorted(self.group.glob("*/"), reverse=True), self.group):
                eventually(lambda group=group: _removed(group), 30)


def _removed(group: Path) -> bool:
    """A group stays busy for a moment after its last process can be seen no more."""
    try:
        group.rmdir()
    except OSError as exc:
        if exc.errno != errno.EBUSY:
            raise
        return False
    return True


@contextlib.contextmanager
def serving(place: Path, **options: Any) -> Iterator[Serving]:
    server = Serving(place, **options)
    try:
        yield server
    finally:
        server.stop()


def eventually(condition: Any, timeout: float = 5.0) -> None:
    """Wait until it holds."""
    end = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < end, "it never became true"
        time.sleep(0.005)


def refused(client: Client, method: str, **args: Any) -> tuple[str, str | None]:
    with pytest.raises(Refused) as caught:
        client.call(method, **args)
    return caught.value.code, caught.value.kind
