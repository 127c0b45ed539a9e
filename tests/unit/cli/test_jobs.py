from __future__ import annotations

import json as js
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from dsec import Conflict
from dsec.cli.completing import jobs, sandboxes, snapshots
from dsec.wire.public_v1 import ErrorBody, JobItem, JobView, SandboxList
from tests.unit.cli.conftest import Dsec
from tests.unit.sdk.fake import SANDBOX, FakePlatform, Reply, error, json, lines, sandbox

HELD = JobView(job="run-7", project="p", epoch=3, expires_at=9e9, running=2, paused=1, sandboxes=3)
LAPSED = JobView(job="old", project="p", epoch=1, expires_at=1.0, lapsed=True)
FREE = JobView(job="free", project="p", sandboxes=1, running=1)
LEASE = "/v1/jobs/run-7/lease"
DSEC = [sys.executable, "-m", "dsec.cli.app"]


def test_ls_and_show(platform: FakePlatform, dsec: Dsec) -> None:
    platform.on("GET", "/v1/jobs", json([HELD, LAPSED, FREE]))
    rows = dsec("job", "ls").stdout.splitlines()
    assert "left" in rows[1]
    assert "lapsed" in rows[2]
    assert "none" in rows[3]
    assert [job["epoch"] for job in js.loads(dsec("job", "ls", "--json").stdout)] == [3, 1, 0]
    platform.on("GET", "/v1/jobs/run-7", json(HELD))
    box = sandbox(job="run-7", epoch=3, step="12", group="g")
    platform.on("GET", "/v1/sandboxes", json(SandboxList(sandboxes=[box])))
    shown = dsec("job", "show", "run-7").stdout
    assert SANDBOX in shown
    assert "12    g" in shown
    assert platform.calls("GET", "/v1/sandboxes")[0].query["job"] == "run-7"
    told = js.loads(dsec("job", "show", "--json", "run-7").stdout)
    assert (told["job"]["epoch"], told["sandboxes"][0]["id"]) == (3, SANDBOX)


@pytest.mark.parametrize("act", ["pause", "resume", "reap"])
def test_a_whole_job(platform: FakePlatform, dsec: Dsec, act: str) -> None:
    away = JobItem(id="sbx2", error=ErrorBody(code="unavailable", message="its node is away"))
    items = [JobItem(id="sbx1", sandbox=sandbox("sbx1")), away]
    platform.on("POST", f"/v1/jobs/run-7/{act}", lines(*items))
    done = dsec("job", act, "run-7")
    assert (done.exit_code, done.stdout) == (69, "sbx1\n")
    assert "error: its node is away" in done.stderr
    assert len(js.loads(dsec("job", act, "run-7", "--json").stdout)) == 2


def test_a_lease_is_taken_renewed_and_released(platform: FakePlatform, dsec: Dsec) -> None:
    platform.on("PUT", LEASE, json(HELD))
    platform.on("DELETE", LEASE, Reply(204))
    policies = ["--on-lapse", "reap", "--on-superseded", "pause"]
    assert dsec("job", "lease", "--ttl", "90s", *policies, "run-7").stdout == "3\n"
    assert dsec("job", "lease", "--epoch", "3", "--json", "run-7").exit_code == 0
    first, second = (call.json() for call in platform.calls("PUT", LEASE))
    assert first == {"epoch": 0, "ttl_s": 90, "on_lapse": "reap", "on_superseded": "pause"}
    assert (second["epoch"], second["on_lapse"]) == (3, "pause")
    assert dsec("job", "lease", "--release", "--epoch", "3", "run-7").exit_code == 0
    assert platform.calls("DELETE", LEASE)[0].query == {"epoch": "3"}


@pytest.mark.parametrize(
    "words",
    [
        ["--hold", "run-7"],
        ["run-7", "--", "true"],
        ["--release", "run-7"],
        ["--release", "--epoch", "3", "--hold", "run-7", "--", "true"],
        ["--on-lapse", "stop", "run-7"],
        ["run-7", "--ttl", "5m"],
        ["--ttl", "none", "run-7"],
    ],
)
def test_mistakes_about_leases(dsec: Dsec, words: list[str]) -> None:
    done = dsec("job", "lease", *words)
    assert done.exit_code == 64
    assert done.stderr.startswith("error: ")


def holding(platform: FakePlatform, *script: str, ttl: str = "5m") -> list[str]:
    platform.on("DELETE", LEASE, Reply(204))
    return [*DSEC, "job", "lease", "--hold", "--ttl", ttl, "run-7", "--", *script]


def test_a_command_runs_under_the_lease(platform: FakePlatform, url: str) -> None:
    platform.on("PUT", LEASE, json(HELD))
    script = 'read line; echo "$line $DSEC_JOB $DSEC_EPOCH"; exit 5'
    done = subprocess.run(
        holding(platform, "sh", "-c", script), input=b"in\n", capture_output=True, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (5, b"in run-7 3\n", b"")
    assert platform.calls("DELETE", LEASE)[0].query == {"epoch": "3"}
    done = subprocess.run(
        holding(platform, "/nowhere"), capture_output=True, check=False, stdin=subprocess.DEVNULL
    )
    assert done.returncode == 66
    assert len(platform.calls("PUT", LEASE)) == 1, "it superseded whoever holds the job"


def test_it_is_renewed_until_superseded_and_then_the_command_ends(
    platform: FakePlatform, url: str
) -> None:
    superseded = Conflict("epoch 3 of job run-7 is superseded", kind="lease")
    platform.on("PUT", LEASE, json(HELD), json(HELD), error(superseded))
    done = subprocess.run(
        holding(platform, "sleep", "1000", ttl="1s"),
        capture_output=True,
        check=False,
        stdin=subprocess.DEVNULL,
    )
    assert done.returncode == Conflict.exit_status
    assert b"error: epoch 3 of job run-7 is superseded" in done.stderr
    assert [call.json()["epoch"] for call in platform.calls("PUT", LEASE)] == [0, 3, 3]


def test_signals_reach_the_command(platform: FakePlatform, url: str, tmp_path: Path) -> None:
    ready = tmp_path / "ready"
    os.mkfifo(ready)
    platform.on("PUT", LEASE, json(HELD))
    script = f"trap 'echo got it; exit 7' TERM; echo > {ready}; while :; do sleep 0.1; done"
    held = subprocess.Popen(
        holding(platform, "sh", "-c", script), stdout=subprocess.PIPE, stdin=subprocess.DEVNULL
    )
    try:
        ready.read_text()
        held.send_signal(signal.SIGTERM)
        said, _ = held.communicate()
        assert (held.returncode, said) == (7, b"got it\n")
    finally:
        held.kill()
        held.wait()


def test_names_are_completed(platform: FakePlatform, url: str) -> None:
    platform.on(
        "GET", "/v1/sandboxes", json(SandboxList(sandboxes=[sandbox(), sandbox("sbxother")]))
    )
    platform.on("GET", "/v1/jobs", json([HELD, FREE]))
    assert sandboxes("sbx0") == [(SANDBOX, "debian")]
    assert jobs("run") == [("run-7", "3 sandboxes")]
    assert snapshots("") == []


def test_nothing_is_completed_where_nothing_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DSEC_API_URL", "http://127.0.0.1:9")
    assert sandboxes("") == []
