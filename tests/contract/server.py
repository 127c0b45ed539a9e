"""A whole DSec of its own: `dsec up` as a subprocess with short directories under /tmp."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import tomllib
from pathlib import Path

import anyio
import httpx

from dsec import DSecClient
from tests.pristine import CGROUPS, Node

READY_S = 60.0
END_S = 60.0
REPOSITORY = Path(__file__).parents[2]


class Server:
    """One server process; `kill` and `start` again keep its state."""

    def __init__(self, backend: str, *, stop_sandboxes: bool = True, settings: str = "") -> None:
        self.backend = backend
        self._settings = settings
        self._stop_sandboxes = stop_sandboxes
        # Short: the path of a Unix socket has at most 107 bytes.
        self.base = Path(tempfile.mkdtemp(prefix="dsec-t"))
        self.state = self.base / "state"
        self.run = self.base / "run"
        self.log = self.base / "server.log"
        self.url = self.key = ""
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int:
        """Of the server process."""
        assert self._process is not None
        return self._process.pid

    @property
    def node(self) -> Node:
        """What belongs to it."""
        name = self.state / "node"
        return Node(
            server_pid=self.pid,
            name=name.read_text().strip() if name.exists() else "",
            directories=(self.state, self.run),
        )

    def start(self, *, port: int = 0) -> None:
        """Start it, on any port or on this one, and wait until it answers."""
        argv = [sys.executable, "-m", "dsec.main.command", "up", "--backend", self.backend]
        argv += ["--port", str(port), "--state-dir", str(self.state), "--run-dir", str(self.run)]
        argv += ["--stop-sandboxes"] if self._stop_sandboxes else []
        helper = os.environ.get("DSEC_AETHER", "")
        config = self.base / "dsec.toml"
        config.write_text(f'aether = "{helper}"\n{self._settings}')
        argv += ["--config", str(config)]
        home = str(self.base / "home")
        env = {k: v for k, v in os.environ.items() if not k.startswith(("DSEC_API", "XDG_"))}
        env |= {"HOME": home, "PYTHONPATH": str(REPOSITORY / "src")}
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                argv, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=env
            )
        before = self.key and (self.state / "credentials.toml").stat().st_mtime_ns
        deadline = time.monotonic() + READY_S
        while not self._answers(before or 0):
            if self._process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"the server did not come up:\n{self.tail()}")
            time.sleep(0.05)

    def _answers(self, older_than: int) -> bool:
        written = self.state / "credentials.toml"
        if not written.exists() or written.stat().st_mtime_ns == older_than:
            return False
        values = tomllib.loads(written.read_text())
        self.url, self.key = values["api_url"], values["api_key"]
        try:
            return httpx.get(f"{self.url}/v1/version", timeout=5).status_code == 200
        except httpx.HTTPError:
            return False

    def client(self) -> DSecClient:
        """A client with the server's own key."""
        return DSecClient(api_url=self.url, api_key=self.key)

    async def dsec(self, *arguments: str | Path, cwd: Path) -> subprocess.CompletedProcess[bytes]:
        """Run the command with the server's own key."""
        environment = {
            "PATH": os.environ["PATH"],
            "HOME": str(cwd),
            "PYTHONPATH": str(REPOSITORY / "src"),
            "DSEC_API_URL": self.url,
            "DSEC_API_KEY": self.key,
        }
        argv = [sys.executable, "-m", "dsec.main.command", *map(str, arguments)]
        return await anyio.run_process(argv, env=environment, check=False, cwd=cwd)

    def tail(self, size: int = 4000) -> str:
        """The end of its log."""
        return self.log.read_text(errors="replace")[-size:] if self.log.exists() else ""

    def kill(self) -> None:
        """End it as a crash would."""
        if self._process is not None:
            self._process.send_signal(signal.SIGKILL)
            self._process.wait(END_S)
            self._process = None

    def stop(self) -> None:
        """End it as an operator would."""
        if self._process is not None:
            self._process.terminate()
            try:
                self._process.wait(END_S)
            except subprocess.TimeoutExpired:
                self.kill()
                raise
            self._process = None

    def remove(self) -> None:
        """Remove what a server keeps for its next start: mounted layers, groups, directories."""
        mounted = [
            line.split()[4] for line in Path("/proc/self/mountinfo").read_text().splitlines()
        ]
        for point in reversed(mounted):
            if point.startswith(str(self.base)):
                subprocess.run(["umount", "--lazy", point], check=False)
        name = self.state / "node"
        if name.exists():
            remove_groups(name.read_text().strip())
        shutil.rmtree(self.base, ignore_errors=True)


def remove_groups(node: str) -> None:
    """Remove a node's control groups, which must be empty by now."""
    for path, _, _ in os.walk(CGROUPS, topdown=False):
        if f"/dsec-{node}" in path:
            Path(path).rmdir()
