from __future__ import annotations

import json as js

import pytest

from dsec import CapacityUnavailable, Conflict, InvalidRequest, NotFound
from dsec.base.states import SandboxState
from dsec.wire.public_v1 import BatchItem, ErrorBody, SandboxList
from dsec.wire.sandbox import DiffEntry, Heartbeat, Pause, SnapshotView
from tests.unit.cli.conftest import Dsec
from tests.unit.sdk.fake import (
    SANDBOX,
    FakePlatform,
    Reply,
    error,
    json,
    lines,
    sandbox,
)

SNAPSHOT = SnapshotView(
    name="built",
    image="snapshots/p/built",
    digest="sha256:aa",
    parent="debian",
    sandbox=SANDBOX,
    created_at=1.0,
    description="evil \x1b[31m",
    entries=3,
    size_bytes=10 << 20,
    left_out=2,
    frozen_ms=11.7,
    cleaned=False,
)


def test_pause_and_resume(platform: FakePlatform, dsec: Dsec) -> None:
    pause = Pause(at=1.0, memory_before_bytes=300 << 20, memory_after_bytes=8 << 20, detail="tmpfs")
    platform.sandbox("POST", "/pause", json(sandbox(state=SandboxState.PAUSED, pause=pause)))
    platform.sandbox("POST", "/resume", json(sandbox()))
    platform.on("GET", "/v1/sandboxes/sbxgone", error(NotFound("no sandbox", kind="sandbox")))
    done = dsec("pause", "sbxgone", SANDBOX)
    assert (done.exit_code, done.stdout) == (66, f"{SANDBOX}\n")
    assert "300.0 MiB of memory before, 8.0 MiB now" in done.stderr
    assert "tmpfs" in done.stderr
    assert js.loads(dsec("pause", "--json", SANDBOX).stdout)[0]["state"] == "paused"
    done = dsec("resume", SANDBOX)
    assert (done.exit_code, done.stdout, done.stderr) == (0, f"{SANDBOX}\n", "")


def test_resize(platform: FakePlatform, dsec: Dsec) -> None:
    platform.sandbox("PATCH", "", json(sandbox(qos="be")))
    assert dsec("resize", "-m", "4G", "-c", "0.5", "--qos", "be", SANDBOX).stdout == f"{SANDBOX}\n"
    sent = platform.calls("PATCH", SANDBOX)[0].json()
    changes = {name: value for name, value in sent.items() if value is not None}
    assert changes == {"memory_mb": 4096, "cpu_cores": 0.5, "qos": "be"}
    for words in (["resize", SANDBOX], ["resize", "--qos", "best", SANDBOX]):
        done = dsec(*words)
        assert done.exit_code == 64
        assert "--qos" in done.stderr
    refusal = InvalidRequest("not valid: memory_mb: expected >= 16", place="memory_mb")
    platform.sandbox("PATCH", "", error(refusal))
    assert dsec("resize", "-m", "1M", SANDBOX).stderr == "error: --memory: expected >= 16\n"
    # The same of one that is created among many.
    place = "spec.limits.memory_mb"
    refusal = InvalidRequest(f"not valid: {place}: expected >= 16", place=place)
    platform.on("GET", "/v1/snapshots/built", json(SNAPSHOT))
    platform.on("POST", "/v1/sandboxes:batch", error(refusal))
    assert dsec("restore", "-m", "1M", "built").stderr == "error: --memory: expected >= 16\n"


def test_one_that_is_held_says_how_it_goes_on(platform: FakePlatform, dsec: Dsec) -> None:
    held = Conflict("it is paused: superseded", kind="held")
    platform.sandbox("GET", "/processes", error(held))
    done = dsec("ps", SANDBOX)
    assert (done.exit_code, "dsec resume" in done.stderr) == (Conflict.exit_status, True)


def test_an_unknown_variable_is_refused_before_anything_is_started(
    platform: FakePlatform, dsec: Dsec, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("NOT_HERE", raising=False)
    platform.on("GET", "/v1/snapshots/built", json(SNAPSHOT))
    done = dsec("restore", "-e", "NOT_HERE", "built")
    assert (done.exit_code, "say NOT_HERE=VALUE" in done.stderr) == (64, True)
    assert platform.calls("POST", "/v1/sandboxes:batch") == []


def test_pack(platform: FakePlatform, dsec: Dsec) -> None:
    platform.sandbox("POST", "/pack", json(SNAPSHOT))
    done = dsec("pack", "--exclude", "/a/**", "--no-clean", "--description", "d", SANDBOX, "built")
    assert (done.exit_code, done.stdout) == (0, "built\n")
    assert done.stderr == "3 entries, 10.0 MiB, 2 left out; it stood still for 12 ms\n"
    sent = platform.calls("POST", "/pack")[0].json()
    assert sent == {"name": "built", "description": "d", "exclude": ["/a/**"], "clean": False}
    assert js.loads(dsec("pack", SANDBOX, "built", "--json").stdout)["image"] == SNAPSHOT.image


def test_diffs(platform: FakePlatform, dsec: Dsec) -> None:
    entries = [
        DiffEntry(path="/a", change="added", kind="file", size_bytes=3, mode=0o644),
        DiffEntry(path="/?", path_b64=b"/\xff\x1b", change="modified", kind="dir", mode=0o1777),
        DiffEntry(path="/gone", change="removed", kind="file"),
    ]
    platform.sandbox("GET", "/diff", json(entries))
    platform.on("GET", "/v1/snapshots/built/diff", json(entries))
    for words in (["diff", SANDBOX], ["snapshot", "diff", "built"]):
        shown = dsec(*words).stdout
        assert [line.split() for line in shown.splitlines()[1:]] == [
            ["added", "file", "644", "3", "B", "/a"],
            ["modified", "dir", "1777", "/\\xff\\x1b"],
            ["removed", "file", "/gone"],
        ]
        assert [entry["change"] for entry in js.loads(dsec(*words, "--json").stdout)] == [
            "added",
            "modified",
            "removed",
        ]


def test_fork(platform: FakePlatform, dsec: Dsec) -> None:
    made = [BatchItem(index=n, sandbox=sandbox(f"sbx{n}", warnings=["w"])) for n in (1, 0)]
    platform.sandbox("POST", "/fork", lines(Heartbeat(), *made))
    done = dsec("fork", "-n", "2", "-l", "try=7", "--key", "k", SANDBOX)
    assert (done.exit_code, done.stdout) == (0, "sbx1\nsbx0\n")
    assert done.stderr == "warning: sbx1: w\nwarning: sbx0: w\n"
    sent = platform.calls("POST", "/fork")[0].json()
    assert sent == {"count": 2, "labels": {"try": "7"}, "key": "k"}
    full = BatchItem(index=1, error=ErrorBody(code="capacity_unavailable", message="full"))
    platform.sandbox("POST", "/fork", lines(made[1], full))
    done = dsec("fork", "-n", "2", SANDBOX)
    assert (done.exit_code, done.stdout) == (CapacityUnavailable.exit_status, "sbx0\n")
    assert "error: full" in done.stderr
    assert platform.calls("POST", "/fork")[1].json()["labels"] is None


def test_restore(platform: FakePlatform, dsec: Dsec, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DSEC_JOB", "run-7")
    monkeypatch.setenv("DSEC_EPOCH", "3")
    platform.on("GET", "/v1/snapshots/built", json(SNAPSHOT))
    platform.on("POST", "/v1/sandboxes:batch", lines(BatchItem(index=0, sandbox=sandbox("sbx0"))))
    done = dsec("restore", "built", "-m", "64M", "--idle", "pause", "--qos", "be", "--step", "9")
    assert (done.exit_code, done.stdout) == (0, "sbx0\n")
    sent = platform.calls("POST", "/v1/sandboxes:batch")[0].json()
    assert sent["count"] == 1
    spec = sent["spec"]
    assert (spec["image"], spec["limits"]["memory_mb"]) == (SNAPSHOT.image, 64)
    assert (spec["idle_action"], spec["qos"], spec["step"]) == ("pause", "be", "9")
    assert (spec["job"], spec["epoch"]) == ("run-7", 3)
    missing = error(NotFound("no snapshot", kind="snapshot"))
    platform.on("GET", "/v1/snapshots/no", missing)
    done = dsec("restore", "no")
    assert done.exit_code == 66
    assert "dsec snapshot ls" in done.stderr


def test_snapshots(platform: FakePlatform, dsec: Dsec) -> None:
    platform.on("GET", "/v1/snapshots", json([SNAPSHOT]))
    platform.on("GET", "/v1/snapshots/built", json(SNAPSHOT))
    platform.on("DELETE", "/v1/snapshots/built", Reply(204))
    shown = dsec("snapshot", "ls").stdout
    assert "built" in shown
    assert "evil \\x1b[31m" in shown
    assert js.loads(dsec("snapshot", "ls", "--json").stdout)[0]["depth"] == 1
    shown = dsec("snapshot", "show", "built").stdout
    assert "snapshots/p/built" in shown
    assert "kept: for who packed it" in shown
    assert js.loads(dsec("snapshot", "show", "built", "--json").stdout)["entries"] == 3
    assert dsec("snapshot", "rm", "built").stdout == "built\n"


def test_run_says_job_and_class(platform: FakePlatform, dsec: Dsec) -> None:
    platform.on("POST", "/v1/sandboxes", json(sandbox(), 201))
    dsec("run", "--job", "j", "--step", "1", "--group", "g", "--qos", "be", "--idle", "pause", "x")
    sent = platform.calls("POST", "/v1/sandboxes")[0].json()
    assert [sent[name] for name in ("job", "step", "group", "qos", "idle_action")] == [
        "j", "1", "g", "be", "pause",
    ]  # fmt: skip
    done = dsec("run", "--idle", "sleep", "x")
    assert (done.exit_code, "--idle" in done.stderr) == (64, True)


def test_ls_of_a_job(platform: FakePlatform, dsec: Dsec) -> None:
    platform.on("GET", "/v1/sandboxes", json(SandboxList(sandboxes=[sandbox(state="paused")])))
    assert "paused" in dsec("ls", "--job", "j").stdout
    assert platform.calls("GET", "/v1/sandboxes")[0].query["job"] == "j"


VERBS = [
    "pause", "resume", "resize", "pack", "diff", "fork", "restore", "snapshot ls", "snapshot show",
    "snapshot rm", "snapshot diff", "network show", "network set", "trace show", "trace diff", "trace replay", "job ls", "job show",
    "job pause", "job resume", "job reap", "job lease",
]  # fmt: skip


@pytest.mark.parametrize("verb", VERBS)
def test_every_verb_has_an_example(dsec: Dsec, verb: str) -> None:
    done = dsec(*verb.split(), "--help")
    assert done.exit_code == 0
    assert f"dsec {verb.replace('trace show', 'trace')}" in done.stdout
