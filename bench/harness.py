"""What every benchmark needs: a server of its own, a small image, a Docker engine of its own."""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Sequence
from pathlib import Path

import anyio
import httpx

from dsec.sdk import DSecClient

IMAGE = "bench"
BUSYBOX_LINKS = ("sh", "echo", "true", "cat", "sleep", "ls", "dd")


def percentile(values: Sequence[float], share: float) -> float:
    """The value below which `share` of the values lie (nearest rank)."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def median_ms(values: Sequence[float]) -> float:
    """Median of seconds, in milliseconds."""
    return round(statistics.median(values) * 1000, 3)


def say(text: str) -> None:
    """Progress, on standard error."""
    print(f"  {text}", file=sys.stderr, flush=True)


def rootfs_tar() -> bytes:
    """A root file system around static busybox: the same for every side."""
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as tar:
        for name in ("bin", "etc", "proc", "sys", "dev", "tmp", "root", "home"):
            entry = tarfile.TarInfo(name)
            entry.type, entry.mode = tarfile.DIRTYPE, 0o1777 if name == "tmp" else 0o755
            tar.addfile(entry)
        tar.add("/bin/busybox", "bin/busybox", filter=_root_owned)
        for name in BUSYBOX_LINKS:
            entry = tarfile.TarInfo(f"bin/{name}")
            entry.type, entry.linkname = tarfile.SYMTYPE, "busybox"
            tar.addfile(entry)
        for name, text in (
            ("etc/passwd", "root:x:0:0:root:/root:/bin/sh\n"),
            ("etc/group", "root:x:0:\n"),
        ):
            entry = tarfile.TarInfo(name)
            entry.size = len(text)
            tar.addfile(entry, io.BytesIO(text.encode()))
    return out.getvalue()


def _root_owned(entry: tarfile.TarInfo) -> tarfile.TarInfo:
    entry.uid = entry.gid = 0
    entry.uname = entry.gname = "root"
    return entry


class Server:
    """`dsec up` as a process of its own, with state that goes away with it."""

    def __init__(
        self, scratch: Path, options: Sequence[str] = (), state: Path | None = None
    ) -> None:
        """Name what it will be.

        Args:
            scratch: where it puts all that is its own.
            options: of `dsec up`, besides those it always gets.
            state: its state directory, if that is to outlive it.
        """
        self.scratch = scratch
        self.state = state or scratch / "state"
        self.options = options
        self.env = {**os.environ, "XDG_CONFIG_HOME": str(scratch / "config")}
        self.log = scratch / "server.log"
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int:
        """The server's process id."""
        if self._process is None:
            raise RuntimeError("the server is not running")
        return self._process.pid

    def start(self) -> None:
        """Start it and wait until it has written down how to reach it."""
        credentials = self.scratch / "config" / "dsec" / "credentials.toml"
        credentials.unlink(missing_ok=True)
        command = [
            sys.executable,
            "-m",
            "dsec.main.command",
            "up",
            "--port",
            "0",
            "--stop-sandboxes",
        ]
        command += [
            "--state-dir",
            str(self.state),
            "--run-dir",
            str(self.scratch / "run"),
            *self.options,
        ]
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(command, env=self.env, stderr=log, stdout=log)
        deadline = time.monotonic() + 60
        while not credentials.exists():
            if self._process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"the server did not start:\n{self.log.read_text()[-3000:]}")
            time.sleep(0.05)

    def kill(self) -> None:
        """kill -9."""
        if self._process:
            self._process.kill()
            self._process.wait()

    def stop(self) -> None:
        """Stop it; it was told to stop its sandboxes then."""
        if self._process and self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)
            self._process.wait(120)


@contextlib.contextmanager
def server(options: Sequence[str] = (), state: Path | None = None) -> Iterator[Server]:
    """A running server; everything of it is gone afterwards, but a `state` of the caller's."""
    scratch = Path(tempfile.mkdtemp(prefix="dsec-bench-"))
    os.environ["XDG_CONFIG_HOME"] = str(scratch / "config")
    it = Server(scratch, options, state)
    try:
        it.start()
        yield it
    finally:
        it.stop()
        shutil.rmtree(scratch, ignore_errors=True)


@contextlib.asynccontextmanager
async def client_with_image(scratch: Path) -> AsyncIterator[DSecClient]:
    """An open client of the server, the bench image imported."""
    archive = scratch / "rootfs.tar"
    archive.write_bytes(rootfs_tar())
    async with DSecClient() as client:
        async for _event in client.images.import_archive(archive, IMAGE):
            pass
        yield client


class Docker:
    """Debian's Docker engine, started by hand: own data, own socket, no network."""

    def __init__(self, scratch: Path) -> None:
        self.scratch = scratch / "docker"
        self.scratch.mkdir()
        self.socket = self.scratch / "docker.sock"
        self.log = self.scratch / "dockerd.log"
        self._process: subprocess.Popen[bytes] | None = None
        self.http = httpx.AsyncClient(
            transport=httpx.AsyncHTTPTransport(uds=str(self.socket)),
            base_url="http://docker",
            timeout=120,
        )

    async def start(self) -> None:
        """Start the engine and import the bench image."""
        with self.log.open("wb") as log:
            self._process = subprocess.Popen(  # noqa: ASYNC220 - a fork, once
                [
                    "dockerd",
                    f"--host=unix://{self.socket}",
                    f"--data-root={self.scratch / 'data'}",
                    f"--exec-root={self.scratch / 'exec'}",
                    f"--pidfile={self.scratch / 'pid'}",
                    "--iptables=false",
                    "--bridge=none",
                ],
                stdout=log,
                stderr=log,
            )
        with anyio.fail_after(60):
            while True:
                with contextlib.suppress(httpx.HTTPError):
                    if (await self.http.get("/_ping")).is_success:
                        break
                await anyio.sleep(0.1)
        answer = await self.http.post(
            "/images/create",
            params={"fromSrc": "-", "repo": IMAGE, "tag": "latest"},
            content=rootfs_tar(),
        )
        answer.raise_for_status()

    async def create(self, command: list[str]) -> str:
        """Create a container and start it."""
        body = {
            "Image": IMAGE,
            "Cmd": command,
            "HostConfig": {"NetworkMode": "none", "Memory": 256 << 20, "PidsLimit": 128},
        }
        answer = await self.http.post("/containers/create", json=body)
        answer.raise_for_status()
        name = str(answer.json()["Id"])
        (await self.http.post(f"/containers/{name}/start")).raise_for_status()
        return name

    async def exec(self, name: str, command: list[str]) -> bytes:
        """Run a command in a container and collect its output."""
        body = {"AttachStdout": True, "AttachStderr": True, "Cmd": command}
        made = await self.http.post(f"/containers/{name}/exec", json=body)
        made.raise_for_status()
        ran = await self.http.post(f"/exec/{made.json()['Id']}/start", json={"Detach": False})
        ran.raise_for_status()
        return ran.content

    async def remove(self, name: str) -> None:
        """Kill and remove a container."""
        await self.http.delete(f"/containers/{name}", params={"force": "true", "v": "true"})

    async def stop(self) -> None:
        """End the engine."""
        await self.http.aclose()
        if self._process:
            self._process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(30)
            if self._process.poll() is None:
                self._process.kill()
                self._process.wait()


@contextlib.asynccontextmanager
async def docker(scratch: Path) -> AsyncIterator[Docker]:
    """A running Docker engine; gone afterwards."""
    engine = Docker(scratch)
    try:
        await engine.start()
        yield engine
    finally:
        with anyio.CancelScope(shield=True):
            await engine.stop()


def report(
    main: Callable[[argparse.Namespace], Coroutine[None, None, dict[str, object]]],
    **defaults: int | str,
) -> None:
    """Run a benchmark from the command line.

    Args:
        main: measures, and returns the figures by name.
        defaults: options, numbers or texts, and their defaults.
    """
    parser = argparse.ArgumentParser(description=sys.modules["__main__"].__doc__)
    parser.add_argument(
        "--json", action="store_true", help="print one JSON object as the last line"
    )
    for name, default in defaults.items():
        parser.add_argument(f"--{name}", type=type(default), default=default)
    options = parser.parse_args()
    figures = anyio.run(main, options)
    if options.json:
        print(json.dumps(figures))
        return
    width = max(map(len, figures))
    for name, value in figures.items():
        print(f"{name:<{width}}  {value}")
