"""What `aether serve` owes as first process: orphans, usage, its end, its rest."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.kernel.serving import PROBE, Client, Serving, eventually, serving

pytestmark = pytest.mark.needs_root


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    with serving(tmp_path_factory.mktemp("serve"), env={"FROM_SPEC": "1"}) as server:
        yield server


@pytest.fixture
def client(server: Serving) -> Iterator[Client]:
    client = server.client()
    yield client
    client.close()
    # Nothing any test starts stays behind.
    assert server.group is not None
    for pid in server.members():
        os.kill(pid, 9)
    eventually(lambda: not server.groups())


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
