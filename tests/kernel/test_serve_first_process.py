"""What `aether serve` owes as first process: orphans, usage, its end, its rest."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from tests.kernel.serving import PROBE, Client, eventually, serving
from tests.kernel.test_serve import client, server

__all__ = ["client", "server"]
pytestmark = pytest.mark.needs_root


def test_orphans_are_reaped(client: Client) -> None:
    client.run(shell="for i in 1 2 3 4 5; do (sleep 0.05 &) ; done")
    eventually(lambda: [p["pid"] for p in client.call("processes")] == [1])


def test_usage(client: Client) -> None:
    before = client.call("usage")
    client.probe("spin", "0.2")
    after = client.call("usage")
    assert after["cpu_s"] - before["cpu_s"] > 0.02
    assert after["pids"] == 1


def test_shutdown(tmp_path: Path) -> None:
    with serving(tmp_path) as server:
        client = server.client()
        client.call("start", command_id="stubborn", argv=[str(PROBE), "ignore-term"])
        client.call("start", command_id="polite", argv=["sleep", "60"])
        eventually(lambda: client.call("view", command_id="stubborn")["stdout_bytes"])
        began = time.monotonic()
        client.call("shutdown", grace_s=0.3)
        assert 0.25 < time.monotonic() - began < 1.0
        assert server.process.wait(5) == 0
    (tmp_path / "edge.sock").unlink()
    with serving(tmp_path) as server:
        client = server.client()
        client.call("start", command_id="polite", argv=["sleep", "60"])
        began = time.monotonic()
        client.call("shutdown", grace_s=30)
        assert time.monotonic() - began < 1.0, "no grace is waited for when nobody is left"


def test_memory_at_rest(tmp_path: Path) -> None:
    with serving(tmp_path) as server:
        client = server.client()
        for _ in range(5):
            client.probe("flood", "3000")
            client.call("stat", path="/")
        time.sleep(1.2)
        assert server.anonymous_kib() < 300


def test_at_rest_it_never_wakes(tmp_path: Path) -> None:
    with serving(tmp_path) as server:
        client = server.client()
        client.run("/bin/true")
        client.run(shell="sleep 60 & true")
        client.call("session_open", session_id="s")
        client.run(shell="cd /", session="s")
        client.call("start", command_id="waits", argv=["sleep", "60"], stdin="pipe")
        watch = client.open("watch", path=str(tmp_path))
        assert watch.event() == {"watching": True}
        # The last of it: memory that goes back a second after the last command.
        time.sleep(1.5)
        status = Path(f"/proc/{server.pid}/status")
        before = [line for line in status.read_text().splitlines() if "ctxt_switches" in line]
        assert before
        time.sleep(2)
        after = [line for line in status.read_text().splitlines() if "ctxt_switches" in line]
        assert after == before
