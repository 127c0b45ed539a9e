from __future__ import annotations

import io
import json as js
import tarfile
from pathlib import Path

import pytest

from dsec import (
    CapacityUnavailable,
    InternalError,
    InvalidRequest,
    NotFound,
    QuotaExceeded,
    SandboxGone,
    Unauthenticated,
)
from dsec.cli.attach import exit_status
from dsec.wire.public_v1 import Capability, ImageView, NodeView, SandboxList
from dsec.wire.sandbox import Exited, FileInfo, Gap, Output, Process, Usage
from tests.unit.cli.conftest import Dsec
from tests.unit.sdk.fake import (
    SANDBOX,
    FakePlatform,
    Reply,
    Seen,
    command,
    error,
    json,
    lines,
    sandbox,
)


def says(platform: FakePlatform, out: bytes, code: int = 0, err: bytes = b"") -> None:
    platform.sandbox("POST", "/commands", json(command(running=True), 201))
    platform.sandbox(
        "GET",
        "/commands/cmd1/events",
        lines(
            Output(stream="stdout", offset=0, data=out),
            Output(stream="stderr", offset=0, data=err),
            Exited(command=command(exit_code=code)),
        ),
    )


def test_run_without_a_command_prints_the_id(platform: FakePlatform, dsec: Dsec) -> None:
    platform.on("POST", "/v1/sandboxes", json(sandbox(warnings=["no \x1b[31mswap"]), 201))
    done = dsec(
        "run", "-m", "4G", "--cpus", "2", "-e", "A=b=c", "-l", "job=7", "--ttl", "5m",
        "--lifetime", "none", "--allow", "pypi", "--deny", "npm", "--network", "--disk-mb", "512",
        "--workspace", "w:1", "--toolkit", "a", "--toolkit", "b:2", "--trace", "task",
        "--record-trace", "debian",
    )  # fmt: skip
    assert (done.exit_code, done.stdout) == (0, f"{SANDBOX}\n")
    assert done.stderr == "warning: no \\x1b[31mswap\n"
    sent = platform.calls("POST", "/v1/sandboxes")[0].json()
    limits = {"memory_mb": 4096, "cpu_cores": 2.0, "pids": 1024, "disk_mb": 512}
    assert sent["limits"] == limits
    assert (sent["workspace"], sent["toolkits"]) == ("w:1", ["a", "b:2"])
    assert (sent["trace"], sent["record_trace"]) == ("task", True)
    assert sent["env"] == {"A": "b=c"}
    assert sent["labels"] == {"job": "7"}
    assert (sent["ttl_running_stop"], sent["max_lifetime_s"]) == (300, None)
    assert (sent["network_rules"], sent["network"]) == ({"pypi": True, "npm": False}, True)
    assert not platform.calls("DELETE", SANDBOX)


def test_run_with_a_command_exits_as_it_does(platform: FakePlatform, dsec: Dsec) -> None:
    platform.on("POST", "/v1/sandboxes", json(sandbox(), 201))
    raw = b"raw \x1b[31m\xff\n"
    says(platform, raw, 3, b"oh\n")
    done = dsec("run", "--rm", "debian", "--", "make", "-j")
    assert done.exit_code == 3
    assert done.stdout_bytes == raw
    assert done.stderr == "oh\n"
    assert platform.calls("POST", "/commands")[0].json()["argv"] == ["make", "-j"]
    assert platform.calls("DELETE", SANDBOX)
    done = dsec("run", "debian", "ls", "-l")
    assert done.exit_code == 3
    assert f"sandbox {SANDBOX}" in done.stderr
    assert len(platform.calls("DELETE", SANDBOX)) == 1


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["run", "--rm", "debian"], "need a command"),
        (["run", "debian", "--rm", "--", "ls"], "options stand before"),
        (["run", "-m", "lots", "debian"], "not a size"),
        (["run", "--ttl", "soon", "debian"], "not a time"),
        (["run", "-l", "x", "debian"], "KEY=VALUE"),
        (["run", "-t", "debian", "ls"], "terminal"),
        (["run", "-c", "nan", "debian"], "--cpus: nan"),
        (["run", "-m", "\u00b2", "debian"], "not a size"),
        (["exec", SANDBOX], "say what to run"),
        (["shell", SANDBOX], "terminal"),
        (["stop"], "name sandboxes"),
        (["stop", "--all", SANDBOX], "name sandboxes"),
        (["cp", "a", "b"], "in a sandbox"),
        (["exec", "../../nodes", "ls"], "not an id"),
    ],
)
def test_mistakes_are_one_line(dsec: Dsec, arguments: list[str], words: str) -> None:
    done = dsec(*arguments)
    assert done.exit_code == 64
    assert done.stderr.startswith("error: ")
    assert words in done.stderr
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("failure", "status", "words"),
    [
        (Unauthenticated("no such key"), 77, "dsec up"),
        (NotFound("no image 'x'", kind="image"), 66, "dsec image pull"),
        (CapacityUnavailable("full"), 75, "dsec node ls"),
        (QuotaExceeded("quota"), 75, "dsec stop"),
        (SandboxGone("it is over"), 74, "dsec ls --all"),
        (InternalError("incident 5"), 70, "bug"),
    ],
)
def test_errors_have_a_status_and_advice(
    platform: FakePlatform,
    dsec: Dsec,
    failure: NotFound,
    status: int,
    words: str,
) -> None:
    platform.on("POST", "/v1/sandboxes", error(failure))
    done = dsec("run", "--wait", "1s", "x")
    assert done.exit_code == status
    assert done.stderr.splitlines()[0] == f"error: {failure.message}"
    assert words in done.stderr
    assert "Traceback" not in done.stderr
    assert "Traceback" in dsec("--debug", "run", "--wait", "1s", "x").stderr


@pytest.mark.parametrize(
    ("place", "option"), [("limits.memory_mb", "--memory"), ("hostname", "--hostname")]
)
def test_a_wrong_value_has_its_options_name(
    platform: FakePlatform, dsec: Dsec, place: str, option: str
) -> None:
    refusal = InvalidRequest(f"not valid: {place}: expected a whole number >= 16", place=place)
    platform.on("POST", "/v1/sandboxes", error(refusal))
    done = dsec("run", "debian")
    assert done.exit_code == 64
    assert done.stderr == f"error: {option}: expected a whole number >= 16\n"


def test_an_error_of_many_lines_has_lines(platform: FakePlatform, dsec: Dsec) -> None:
    platform.on("POST", "/v1/sandboxes", error(InvalidRequest("first\nsecond\x1b[2J\n")))
    assert dsec("run", "debian").stderr == "error: first\n  second\\x1b[2J\n"


def test_choices_are_listed(dsec: Dsec) -> None:
    for words in (["run", "--backend", "qemu", "debian"], ["image", "build", "fedora"]):
        done = dsec(*words)
        assert done.exit_code == 64
        assert "is none of" in done.stderr


def test_a_time_out_says_the_time(capsys: pytest.CaptureFixture[str]) -> None:
    for spent, said in ((0.52, "0.5 s"), (90.04, "90 s")):
        exit_status(command(timed_out=True, exit_code=137, duration_s=spent))
        assert f"after {said};" in capsys.readouterr().err


def test_nothing_there(dsec: Dsec, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DSEC_API_URL", "http://127.0.0.1:9")
    done = dsec("ls")
    assert done.exit_code == 69
    assert "dsec up" in done.stderr
    done = dsec("version", "--json")
    assert done.exit_code == 0
    assert js.loads(done.stdout)["server"] is None


def test_ls(platform: FakePlatform, dsec: Dsec) -> None:
    boxes = [
        sandbox("sbx1", labels={"job": "7", "evil": "\x1b]0;x\x07[red]\u202e"}),
        sandbox("sbx2", state="stopped", stop_reason="idle"),
    ]
    platform.on("GET", "/v1/sandboxes", json(SandboxList(sandboxes=boxes)))
    done = dsec("ls", "--label", "job=7")
    assert "\x1b" not in done.stdout
    assert "\x07" not in done.stdout
    assert "evil=\\x1b]0;x\\x07[red]\\u202e" in done.stdout
    assert "stopped (idle)" in done.stdout
    query = platform.calls("GET", "/v1/sandboxes")[0].raw_query
    assert b"label=job%3D7" in query
    assert b"state=running" in query
    assert b"state=stopped" not in query
    assert dsec("ls", "-a", "-q").stdout == "sbx1\nsbx2\n"
    assert b"state" not in platform.calls("GET", "/v1/sandboxes")[1].raw_query
    shown = dsec("ls", "--json").stdout
    assert shown.isascii()
    assert "\x1b" not in shown
    assert [view["id"] for view in js.loads(shown)] == ["sbx1", "sbx2"]


def test_stop(platform: FakePlatform, dsec: Dsec) -> None:
    platform.on("GET", "/v1/sandboxes/sbxgone", error(NotFound("no sandbox", kind="sandbox")))
    done = dsec("stop", "sbxgone", SANDBOX)
    assert done.exit_code == 66
    assert done.stdout == f"{SANDBOX}\n"
    assert "error: no sandbox" in done.stderr
    platform.on("GET", "/v1/sandboxes", json(SandboxList(sandboxes=[sandbox()])))
    done = dsec("stop", "--all", "--label", "job=7", "--json")
    assert done.exit_code == 0
    assert [view["state"] for view in js.loads(done.stdout)] == ["stopped"]


def test_ps_and_stats(platform: FakePlatform, dsec: Dsec) -> None:
    found = [Process(pid=7, ppid=1, argv=["sh", "-c", "\x1b[2J"]), Process(pid=1, argv=["aether"])]
    platform.sandbox("GET", "/processes", json(found))
    shown = dsec("ps", SANDBOX).stdout
    assert shown.index("aether") < shown.index("sh -c \\x1b[2J")
    platform.sandbox("GET", "/usage", json(Usage(at=1.0, memory_bytes=3 << 20, oom_kills=1)))
    assert "3.0 MiB" in dsec("stats", SANDBOX).stdout
    told = js.loads(dsec("stats", SANDBOX, "--json").stdout)[SANDBOX]
    assert (told["oom_kills"], told["pids"], told["disk_bytes"]) == (1, 0, 0)


def test_logs(platform: FakePlatform, dsec: Dsec) -> None:
    first = command("cmd0", started_at=1.0, exit_code=0, argv=["true"])
    last = command("cmd1", started_at=2.0, running=True, argv=["x"], stdout_bytes=5, stderr_bytes=1)
    platform.sandbox("GET", "/commands", json([last, first]))
    platform.sandbox("GET", "/commands/cmd1", json(last))
    platform.sandbox(
        "GET",
        "/commands/cmd1/events",
        lines(
            Gap(stream="stdout", offset=2, dropped_bytes=2),
            Output(stream="stdout", offset=2, data=b"cde"),
            Output(stream="stderr", offset=0, data=b"E"),
            hang=True,
        ),
    )
    done = dsec("logs", SANDBOX)
    assert (done.exit_code, done.stdout, done.stderr) == (0, "cde", "E")
    assert "cmd0" in dsec("logs", "--list", SANDBOX).stdout
    says(platform, b"all\n", 4)
    platform.sandbox("GET", "/commands/cmd1", json(last))
    done = dsec("logs", "-f", SANDBOX, "cmd1")
    assert (done.exit_code, done.stdout) == (4, "all\n")


def test_nodes_and_version(platform: FakePlatform, dsec: Dsec) -> None:
    lacking = Capability(name="ebpf", available=False, detail="no CAP_BPF", advice="run as root")
    node = NodeView(id="0000", version="0.1.0", backends=["container"], capabilities=[lacking])
    platform.on("GET", "/v1/nodes", json([node]))
    done = dsec("node", "ls")
    assert "0000" in done.stdout
    assert "no ebpf: no CAP_BPF run as root" in done.stderr
    assert "API v1" in dsec("version").stdout


def test_images(platform: FakePlatform, dsec: Dsec, tmp_path: Path) -> None:
    image = ImageView(name="tools", digest="sha256:" + "a" * 64, layers=["l"], size_bytes=5 << 20)
    ready = {"type": "ready", "image": image}
    platform.on("GET", "/v1/images", json([image]))
    assert "aaaaaaaaaaaa  1" in dsec("image", "ls").stdout
    platform.on(
        "POST",
        "/v1/images/pull",
        lines(
            {"type": "progress", "step": "layer \x1b[31m1", "done": 1, "total": 9},
            {"type": "progress", "step": "layer \x1b[31m1", "done": 9, "total": 9},
            ready,
        ),
    )
    done = dsec("image", "pull", "docker.io/x", "--name", "tools")
    assert (done.exit_code, done.stdout, done.stderr) == (0, "tools\n", "layer \\x1b[31m1\n")
    platform.on("POST", "/v1/images/build", lines(ready))
    dsec("image", "build", "-p", "git", "-p", "make")
    assert platform.calls("POST", "/build")[0].json()["packages"] == ["git", "make"]
    platform.on("POST", "/v1/images/import", lines(ready))
    archive = tmp_path / "my.tar.gz"
    archive.write_bytes(b"\x1f\x8b..")
    assert js.loads(dsec("image", "import", str(archive), "--json").stdout)["name"] == "tools"
    call = platform.calls("POST", "/import")[0]
    assert (call.body, call.query["name"]) == (b"\x1f\x8b..", "my")
    platform.on("DELETE", "/v1/images", Reply(204))
    assert dsec("image", "rm", "tools", "other").stdout == "tools\nother\n"


def test_copying_files(platform: FakePlatform, dsec: Dsec, tmp_path: Path) -> None:
    local = tmp_path / "report.txt"
    local.write_bytes(b"text")
    local.chmod(0o640)
    platform.sandbox("GET", "/files/stat", json(FileInfo(path="/d", kind="dir")))
    platform.sandbox("PUT", "/files", json(FileInfo(path="/d/report.txt", kind="file")))
    assert dsec("cp", str(local), f"{SANDBOX}:/d").exit_code == 0
    call = platform.calls("PUT", "/files")[0]
    assert (call.query["path"], call.query["mode"]) == ("/d/report.txt", "640")
    assert call.body == b"text"
    info = FileInfo(path="/d/f", kind="file", size_bytes=2, mode=0o4755)
    platform.sandbox("GET", "/files/stat", json(info))
    platform.sandbox("GET", "/files", Reply(200, [b"ab"]))
    assert dsec("cp", f"{SANDBOX}:/d/f", str(tmp_path)).exit_code == 0
    assert (tmp_path / "f").read_bytes() == b"ab"
    assert (tmp_path / "f").stat().st_mode & 0o7777 == 0o755
    platform.sandbox("GET", "/files", error(SandboxGone("over")))
    assert dsec("cp", f"{SANDBOX}:/d/f", str(tmp_path / "g")).exit_code == 74
    assert {path.name for path in tmp_path.iterdir()} == {"report.txt", "f"}
    assert dsec("cp", "nowhere", f"{SANDBOX}:/d").exit_code == 66
    done = dsec("cp", f"{SANDBOX}:/d/f", str(tmp_path / "no" / "f"))
    assert (done.exit_code, done.stderr) == (66, f"error: no directory {tmp_path}/no\n")


def test_copying_trees(platform: FakePlatform, dsec: Dsec, tmp_path: Path) -> None:
    tree = tmp_path / "tree"
    tree.mkdir()
    (tree / "f").write_text("x")
    bodies: list[bytes] = []

    def keep(seen: Seen) -> Reply:
        bodies.append(seen.body)
        return json({"entries": 1})

    platform.sandbox("GET", "/files/stat", json(FileInfo(path="/d", kind="dir")))
    platform.sandbox("PUT", "/tree", keep)
    assert dsec("cp", str(tree), f"{SANDBOX}:/d").exit_code == 0
    assert dsec("cp", f"{tree}/.", f"{SANDBOX}:/d").exit_code == 0
    paths = [call.query["path"] for call in platform.calls("PUT", "/tree")]
    assert paths == ["/d/tree", "/d"]
    evil = tarfile.TarInfo("../\x1b[2Jevil")
    extra = io.BytesIO()
    with tarfile.open(fileobj=extra, mode="w") as tar:
        tar.addfile(evil)
    platform.sandbox("GET", "/tree", Reply(200, [bodies[0]]), Reply(200, [extra.getvalue()]))
    assert dsec("cp", f"{SANDBOX}:/d", str(tmp_path / "out")).exit_code == 0
    assert (tmp_path / "out/f").read_text() == "x"
    done = dsec("cp", f"{SANDBOX}:/d", str(tmp_path / "out2"))
    assert done.stderr.startswith("left out: ../\\x1b[2Jevil: ")
    assert done.exit_code == 1
    many = io.BytesIO()
    with tarfile.open(fileobj=many, mode="w") as tar:
        for number in range(25):
            tar.addfile(tarfile.TarInfo(f"../{number}"))
    platform.sandbox("GET", "/tree", Reply(200, [many.getvalue()]))
    done = dsec("cp", f"{SANDBOX}:/d", str(tmp_path / "out3"))
    assert (done.exit_code, done.stderr.count("\n")) == (1, 11)
    assert "15 more" in done.stderr
    platform.sandbox("GET", "/tree", Reply(200, [bodies[0]]))
    assert dsec("cp", f"{SANDBOX}:/d", "-").stdout_bytes == bodies[0]


@pytest.mark.parametrize("verb", ["run", "ls", "exec", "shell", "logs", "cp", "stop", "image pull"])
def test_every_verb_explains_itself(dsec: Dsec, verb: str) -> None:
    done = dsec(*verb.split(), "--help")
    assert done.exit_code == 0
    assert verb.split()[-1] in done.stdout
