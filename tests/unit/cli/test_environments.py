"""The verbs layer, env and store."""

from __future__ import annotations

import io
import json as js
import tarfile
from pathlib import Path
from typing import Any

import pytest

from dsec import Conflict, NotFound
from dsec.wire.public_v1 import (
    CollectReport,
    EnvironmentRef,
    ImageReady,
    ImageView,
    LayerReady,
    LayerView,
    LintFinding,
    LintReport,
    StoreView,
    TraceFile,
    TracePart,
    TraceRead,
    TraceView,
)
from dsec.wire.sandbox import Exited, FileInfo, Output
from tests.unit.cli.conftest import Dsec
from tests.unit.sdk.fake import SANDBOX, FakePlatform, Reply, command, error, json, lines, sandbox
from tests.unit.sdk.test_git import commit, git

PUBLISH = "/v1/layers/publish"


def layer(name: str = "rg:v1", **changes: Any) -> LayerView:
    return LayerView(kind="toolkit", name=name, digest="sha256:" + "a" * 64, **changes)


def accepts(platform: FakePlatform) -> None:
    progress = {"type": "progress", "step": "take \x1b[31min", "done": 1, "total": 9}
    platform.on("GET", "/v1/layers", json([]))
    platform.on("POST", PUBLISH, lines(progress, progress, LayerReady(layer=layer())))


def names(platform: FakePlatform) -> list[str]:
    body = platform.calls("POST", PUBLISH)[-1].body
    with tarfile.open(fileobj=io.BytesIO(body)) as tar:
        return sorted(tar.getnames())


def test_publish_a_directory(platform: FakePlatform, dsec: Dsec, tmp_path: Path) -> None:
    accepts(platform)
    (tmp_path / "rg").write_text("x")
    done = dsec(
        "layer", "publish", "toolkit", "rg", str(tmp_path), "--at", "/opt", "--owner", "5:6"
    )
    assert (done.exit_code, done.stdout) == (0, "rg:v1\n")
    assert done.stderr == "take \\x1b[31min\n"
    assert names(platform) == ["opt", "opt/rg"]
    assert platform.calls("POST", PUBLISH)[0].query["name"] == "rg:v1"
    done = dsec("layer", "publish", "toolkit", "rg:v1", str(tmp_path), "--json")
    assert js.loads(done.stdout)["digest"].startswith("sha256:aaa")


def test_publish_a_commit(platform: FakePlatform, dsec: Dsec, tmp_path: Path) -> None:
    accepts(platform)
    git(tmp_path, "init", "--quiet", "--initial-branch=main")
    first = commit(tmp_path, "past")
    commit(tmp_path, "future")
    arguments = ["--git", str(tmp_path), "--commit", first[:12], "--branch", "main"]
    assert dsec("layer", "publish", "workspace", "w:1", *arguments).exit_code == 0
    assert "workspace/.git/refs/heads/main" in names(platform)
    assert dsec("layer", "publish", "toolkit", "t:1", "--git", str(tmp_path)).exit_code == 0
    assert names(platform) == ["answer.txt"]


def test_publish_from_a_sandbox(platform: FakePlatform, dsec: Dsec) -> None:
    accepts(platform)
    platform.sandbox("GET", "/files/stat", json(FileInfo(path="/w", kind="dir", mode=0o755)))
    platform.sandbox("GET", "/tree", Reply(200, [bytes(1024)]))
    done = dsec("layer", "publish", "workspace", "w:1", "--from-sandbox", f"{SANDBOX}:/w")
    assert done.exit_code == 0
    assert names(platform) == ["workspace"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["layer", "publish", "toolkit", "rg"], "name one source"),
        (["layer", "publish", "toolkit", "rg", ".", "--git", "."], "name one source"),
        (["layer", "publish", "toolkit", "rg", ".", "--commit", "x"], "need --git"),
        (["layer", "publish", "toolkit", "rg", "--git", ".", "--history", "all"], "is none of"),
        (["layer", "publish", "toolkit", "rg:1", "--from-sandbox", "sbx1:rel"], "SANDBOX:/PATH"),
        (["layer", "publish", "toolkit", "rg:1", ".", "--at", "rel"], "absolute"),
        (["layer", "rm", "toolkit", "rg"], "which version"),
        (["layer", "rm", "toolkit", "host:5000/rg"], "which version"),
        (["env", "trace", "debian"], "say what to run"),
        (["env", "lint", "debian", "--fail-on", "bad"], "is none of"),
    ],
)
def test_mistakes_are_one_line(dsec: Dsec, arguments: list[str], words: str) -> None:
    done = dsec(*arguments)
    assert (done.exit_code, done.stderr.count("\n")) == (64, 1)
    assert words in done.stderr


def test_a_published_version_stays(platform: FakePlatform, dsec: Dsec, tmp_path: Path) -> None:
    platform.on("POST", PUBLISH, error(Conflict("toolkit rg:1 has another content")))
    done = dsec("layer", "publish", "toolkit", "rg:1", str(tmp_path))
    assert done.exit_code == 73
    assert dsec("layer", "publish", "toolkit", "rg:1", "/nowhere/x").exit_code == 66


def test_list_show_remove(platform: FakePlatform, dsec: Dsec) -> None:
    found = layer(size_bytes=5 << 20, entries=12, used_by=3, description="evil \x1b[2J")
    platform.on("GET", "/v1/layers", json([found]))
    platform.on("GET", "/v1/layers/show", json(found))
    platform.on("DELETE", "/v1/layers", Reply(204), error(NotFound("no", kind="toolkit")))
    shown = dsec("layer", "ls").stdout
    assert "toolkit  rg:v1  aaaaaaaaaaaa  12" in shown
    assert "evil \\x1b[2J" in shown
    dsec("layer", "ls", "workspace")
    assert platform.calls("GET", "/v1/layers")[1].query == {"kind": "workspace"}
    assert js.loads(dsec("layer", "ls", "--json").stdout)[0]["used_by"] == 3
    one = dsec("layer", "show", "toolkit", "rg").stdout
    assert "12, 5.0 MiB" in one
    assert "by 3 sandboxes" in one
    assert js.loads(dsec("layer", "show", "toolkit", "rg", "--json").stdout)["name"] == "rg:v1"
    assert dsec("layer", "rm", "toolkit", "rg:v1").stdout == "rg:v1\n"
    gone = dsec("layer", "rm", "toolkit", "rg:v1")
    assert gone.exit_code == 66
    assert "dsec layer ls" in gone.stderr


def finding(severity: Any) -> LintFinding:
    return LintFinding(rule="answer", severity=severity, message="the fix", path="/a\x1b[2J")


@pytest.mark.parametrize(
    ("severity", "threshold", "status"),
    [
        ("error", None, 1),
        ("warning", None, 0),
        ("warning", "warning", 1),
        ("advice", "warning", 0),
        ("advice", "advice", 1),
        ("error", "never", 0),
    ],
)
def test_lint_fails_on_what_is_bad_enough(
    platform: FakePlatform, dsec: Dsec, severity: Any, threshold: str | None, status: int
) -> None:
    environment = EnvironmentRef(image="debian")
    report = LintReport(environment=environment, findings=[finding(severity)])
    platform.on("POST", "/v1/environments/lint", json(report))
    options = ["--fail-on", threshold] if threshold else []
    done = dsec("env", "lint", "debian", *options)
    assert done.exit_code == status, done.stderr
    assert "the fix" in done.stdout
    assert "\x1b" not in done.stdout
    told = dsec("env", "lint", "debian", *options, "--json")
    assert (told.exit_code, js.loads(told.stdout)["findings"][0]["rule"]) == (status, "answer")


def test_lint_takes_answers_and_rules_from_files(
    platform: FakePlatform, dsec: Dsec, tmp_path: Path
) -> None:
    report = LintReport(environment=EnvironmentRef(image="debian"), findings=[])
    platform.on("POST", "/v1/environments/lint", json(report))
    answers, rules = tmp_path / "a", tmp_path / "r.toml"
    answers.write_text("  return 42\n\nassert x\n")
    rules.write_text('[[rule]]\nid = "no-core"\nmessage = "a core file"\npath = "/**/core"\n')
    done = dsec(
        "env", "lint", "debian", "--workspace", "w:1", "--toolkit", "a", "--toolkit", "b",
        "--answers", str(answers), "--rules", str(rules), "--disable", "setuid",
    )  # fmt: skip
    assert done.exit_code == 0, done.stderr
    sent = platform.calls("POST", "/lint")[0].json()
    assert sent["answers"] == ["return 42", "assert x"]
    assert (sent["workspace"], sent["toolkits"]) == ("w:1", ["a", "b"])
    assert (sent["rules"][0]["id"], sent["disabled"]) == ("no-core", ["setuid"])
    for wrong in ("rule = 3", "[[rule]]\nid = 'X Y'\nmessage = 'm'", "[[", "[[rules]]"):
        rules.write_text(wrong)
        done = dsec("env", "lint", "debian", "--rules", str(rules))
        assert (done.exit_code, str(rules) in done.stderr) == (64, True)


def traced(trace: str = "") -> TraceView:
    return TraceView(
        environment=EnvironmentRef(image="debian"),
        trace=trace,
        recorded_at=1.0,
        parts=[TracePart(layer="image", digest="sha256:" + "b" * 64, size_bytes=100, read_bytes=9)],
        reads=[TraceRead(at_ms=1, part=0, offset=0, length=9)],
        files=[
            TraceFile(path=f"/bin/{name}", layer="image", size_bytes=50, read_bytes=9)
            for name in ("python3", "sh")
        ],
        total_bytes=100,
        read_bytes=9,
    )


def test_trace_runs_records_and_shows(platform: FakePlatform, dsec: Dsec, tmp_path: Path) -> None:
    made = sandbox(workspace="w:v2", toolkits=["a:v3"], warnings=["no swap"])
    platform.on("POST", "/v1/sandboxes", json(made, 201))
    platform.sandbox("POST", "/commands", json(command(running=True), 201))
    said = Output(stream="stdout", offset=0, data=b"1\n")
    ended = command(exit_code=3)
    platform.sandbox("GET", "/commands/cmd1/events", lines(said, Exited(command=ended)))
    platform.sandbox("GET", "/commands/cmd1", json(ended))
    platform.on("GET", "/v1/environments/trace", json(traced("t")))
    picture = tmp_path / "reads.svg"
    words = ["--workspace", "w", "--toolkit", "a", "--trace", "t", "--picture", str(picture)]
    done = dsec("env", "trace", *words, "debian", "--", "python3", "-c", "print(1)")
    assert done.exit_code == 3, done.stderr
    assert "/bin/python3" in done.stdout
    assert done.stderr.startswith("warning: no swap\n1\n")
    assert picture.read_text().startswith("<svg")
    sent = platform.calls("POST", "/v1/sandboxes")[0].json()
    assert (sent["record_trace"], sent["trace"], sent["workspace"]) == (True, "t", "w")
    (asked,) = platform.calls("GET", "/trace")
    assert asked.query == {"image": "debian", "workspace": "w:v2", "toolkit": "a:v3", "trace": "t"}
    order = [(call.method, call.path.rpartition("/")[2]) for call in platform.seen]
    assert order.index(("DELETE", SANDBOX)) < order.index(("GET", "trace"))


def test_stat_shows_what_was_recorded(platform: FakePlatform, dsec: Dsec) -> None:
    platform.on("GET", "/v1/environments/trace", json(traced()))
    shown = dsec("env", "stat", "debian", "--toolkit", "a:1", "--files", "1").stdout
    assert "/bin/python3" in shown
    assert "/bin/sh" not in shown
    told = js.loads(dsec("env", "stat", "debian", "--json").stdout)
    assert told["reads"] == [{"at_ms": 1, "part": 0, "offset": 0, "length": 9}]
    assert platform.calls("GET", "/trace")[1].query == {"image": "debian"}
    platform.on("GET", "/v1/environments/trace", error(NotFound("none", kind="trace")))
    assert dsec("env", "stat", "debian").exit_code == 66


def test_the_store(platform: FakePlatform, dsec: Dsec) -> None:
    views = [
        StoreView(node="n001", url="s3://b/p", front="fuse", cache_used_bytes=3 << 20),
        StoreView(node="n002", url="s3://b/p", reachable=False, detail="refused \x07"),
        StoreView(node="n003"),
    ]
    platform.on("GET", "/v1/store", json(views))
    done = dsec("store", "show")
    assert "3.0 MiB" in done.stdout
    assert "unreachable" in done.stdout
    assert done.stderr == "n002: refused \\x07\n"
    assert len(js.loads(dsec("store", "show", "--json").stdout)) == 3
    report = CollectReport(dry_run=True, blobs=2, bytes=3 << 20, kept_blobs=7)
    platform.on("POST", "/v1/store/collect", json(report))
    assert dsec("store", "gc", "--dry-run").stdout == (
        "would remove 2 blobs, 3.0 MiB; 7 are needed\n"
    )
    assert platform.calls("POST", "/collect")[0].query == {"dry_run": "true"}
    image = ImageReady(image=ImageView(name="debian", digest="", layers=[]))
    platform.on("POST", "/v1/images/push", lines(image))
    assert dsec("image", "push", "debian").stdout == "debian\n"


@pytest.mark.parametrize(
    "verb",
    ["layer publish", "layer ls", "layer rm", "env lint", "env trace", "env stat", "store gc"],
)
def test_every_verb_explains_itself(dsec: Dsec, verb: str) -> None:
    done = dsec(*verb.split(), "--help")
    assert done.exit_code == 0
    assert verb.split()[-1] in done.stdout
