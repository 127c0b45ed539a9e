"""The apiserver is killed between a lease's lapse and what is to come of it: it comes all the same."""

from __future__ import annotations

import contextlib
import os
import signal
import sqlite3
import subprocess
import sys
import time
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

START_S = 60.0
SPEC = {"image": "debian", "backend": "sim", "job": "run"}


class Split:
    """A simulated edge and an apiserver, each a process of its own."""

    def __init__(self, place: Path) -> None:
        self.place = place
        self.processes: list[subprocess.Popen[bytes]] = []
        self.edge_socket = place / "e.sock"
        (place / "api.toml").write_text(
            f'port = 0\nstate_dir = "{place}/api"\n[[edges]]\nunix_socket = "{self.edge_socket}"\n'
        )

    def start(self) -> None:
        state = ["--state-dir", f"{self.place}/edge", "--run-dir", f"{self.place}/run"]
        listen = ["--listen", str(self.edge_socket)]
        self.edge = self._start("edge", "--backend", "sim", *listen, *state)
        self.until(self.edge_socket.exists)
        self.apiserver = self.start_apiserver()

    def _start(self, *words: str) -> subprocess.Popen[bytes]:
        env = {"HOME": str(self.place), "PATH": os.environ["PATH"]}
        with (self.place / "log").open("ab") as log:
            argv = [sys.executable, "-m", "dsec.main.command", *words]
            self.processes.append(subprocess.Popen(argv, stdout=log, stderr=log, env=env))
        return self.processes[-1]

    def until(self, condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + START_S
        while not condition():
            assert time.monotonic() < deadline, (self.place / "log").read_text()[-3000:]
            time.sleep(0.05)

    def start_apiserver(self) -> subprocess.Popen[bytes]:
        written = self.place / "api" / "credentials.toml"
        written.unlink(missing_ok=True)
        process = self._start("apiserver", "--config", str(self.place / "api.toml"))
        self.until(written.exists)
        values = tomllib.loads(written.read_text())
        self.url = values["api_url"]
        self.headers = {"Authorization": f"Bearer {values['api_key']}"}
        return process

    def ask(self, method: str, path: str, **body: Any) -> httpx.Response:
        given: dict[str, Any] = {"json": body} if body else {}
        return httpx.request(
            method, f"{self.url}{path}", headers=self.headers, timeout=START_S, **given
        )

    def kill_apiserver(self) -> None:
        self.apiserver.kill()
        self.apiserver.wait(START_S)

    def lapsed(self) -> bool:
        """As it is written: while the edge does not answer, no call tells it."""
        with contextlib.closing(sqlite3.connect(self.place / "api" / "control.db")) as database:
            return bool(database.execute("SELECT lapsed_at FROM leases").fetchone()[0])

    def stop(self) -> None:
        for process in self.processes:
            if process.poll() is None:
                process.send_signal(signal.SIGCONT)
                process.terminate()
                process.wait(START_S)


@pytest.fixture
def split(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Split]:
    running = Split(tmp_path_factory.mktemp("l"))
    try:
        running.start()
        yield running
    finally:
        running.stop()


@pytest.mark.parametrize("policy", ["reap", "pause"])
def test_what_is_owed_is_done_after_a_restart(split: Split, policy: str) -> None:
    lease = "/v1/jobs/run/lease"
    held = split.ask("PUT", lease, ttl_s=3600)
    assert held.status_code == 200, held.text
    made = split.ask("POST", "/v1/sandboxes", **SPEC)
    assert made.status_code == 201, made.text
    split.edge.send_signal(signal.SIGSTOP)
    split.ask("PUT", lease, epoch=1, ttl_s=1, on_lapse=policy)
    split.until(split.lapsed)
    split.kill_apiserver()
    split.edge.send_signal(signal.SIGCONT)
    split.apiserver = split.start_apiserver()
    wanted = {"reap": "stopped", "pause": "paused"}[policy]
    path = f"/v1/sandboxes/{made.json()['id']}"
    split.until(lambda: split.ask("GET", path).json().get("state") == wanted)
    [job] = split.ask("GET", "/v1/jobs").json()
    assert (job["epoch"], job["lapsed"]) == (1, True)
    refused = split.ask("POST", "/v1/sandboxes", **SPEC)
    assert refused.json()["error"]["details"]["reason"] == "lapsed"
