from __future__ import annotations

import json as js
from pathlib import Path
from typing import Any

from dsec import NotFound
from dsec.wire.sandbox import Captured, Recorded
from tests.unit.cli.conftest import Dsec
from tests.unit.sdk.fake import SANDBOX, FakePlatform, error, json, lines, result, sandbox

OTHER = "sbx0000000000000000000b"
CREATED = Recorded(
    seq=1, op="create", at=0.0, ended_at=0.1, outcome="ok", args={"spec": {"image": "debian"}}
)


def command(seq: int, shell: str, out: bytes = b"", code: int = 0, **more: Any) -> Recorded:
    fields: dict[str, Any] = {
        "seq": seq,
        "op": "command",
        "id": f"cmd{seq}",
        "at": float(seq),
        "ended_at": seq + 0.25,
        "outcome": "ok",
        "args": {"shell": shell},
        "result": {"exit_code": code},
        "stdout": Captured(head=out),
    }
    return Recorded(**(fields | more))


def recorded(platform: FakePlatform, *entries: Recorded, sandbox_id: str = SANDBOX) -> None:
    platform.on("GET", f"/v1/sandboxes/{sandbox_id}/trajectory", lines(CREATED, *entries))


def test_a_trajectory_is_a_table_that_fits(platform: FakePlatform, dsec: Dsec) -> None:
    recorded(
        platform,
        command(2, "echo \x1b[2J" + "x" * 200 + "\nsecond line", code=3),
        command(3, "true", outcome="not_found"),
        command(4, "sleep inf", ended_at=None, outcome=""),
        Recorded(seq=5, op="file.move", at=5.0, ended_at=5.0, outcome="ok",
                 args={"path": "/a", "to": "/b"}, inherited=True),
        Recorded(seq=6, op="command.stdin", at=6.0, ended_at=6.0, outcome="ok",
                 args={"command_id": "c", "data": {"size_bytes": 9000, "sha256": "ab" * 32}}),
    )  # fmt: skip
    done = dsec("trace", SANDBOX)
    assert done.exit_code == 0
    table = done.stdout.splitlines()
    assert max(map(len, table)) <= 100
    assert "\x1b" not in done.stdout
    assert [line.split()[0] for line in table] == ["SEQ", "1", "2", "3", "4", "5", "6"]
    assert "debian" in table[1]
    assert "echo \\x1b[2Jxxx" in table[2]
    assert "…  exit 3" in table[2]
    assert table[2].endswith("250.0 ms")
    assert "not_found" in table[3]
    assert table[4].endswith("unfinished")
    assert "/a -> /b" in table[5]
    assert "data=9000 bytes, sha256 abababababab …" in table[6]


def test_parts_of_it_as_json_lines(platform: FakePlatform, dsec: Dsec) -> None:
    recorded(platform, command(2, "x"))
    options = ["--op", "command", "--op", "create", "--since", "1", "--until", "9"]
    done = dsec("trace", "--json", *options, SANDBOX)
    assert [js.loads(line)["seq"] for line in done.stdout.splitlines()] == [1, 2]
    call = platform.calls("GET", "/trajectory")[0]
    assert b"op=command&op=create" in call.raw_query
    assert (call.query["since"], call.query["until"]) == ("1", "9")


def test_export(platform: FakePlatform, dsec: Dsec, tmp_path: Path) -> None:
    recorded(platform, command(2, "x"))
    file = tmp_path / "run.jsonl"
    done = dsec("trace", SANDBOX, "--export", str(file))
    assert (done.exit_code, done.stdout, done.stderr) == (0, "", f"2 entries in {file}\n")
    assert len(file.read_text().splitlines()) == 2
    assert dsec("trace", SANDBOX, "--export", str(tmp_path / "run.csv")).exit_code == 69
    assert dsec("trace", SANDBOX, "--json", "--export", str(file)).exit_code == 64
    assert dsec("trace", SANDBOX, "--export", str(tmp_path / "no" / "f.jsonl")).exit_code == 66


def test_two_that_are_alike(platform: FakePlatform, dsec: Dsec) -> None:
    recorded(platform, command(2, "x"))
    recorded(platform, command(2, "x", at=9.0), sandbox_id=OTHER)
    done = dsec("trace", "diff", SANDBOX, OTHER)
    assert (done.exit_code, done.stderr) == (0, "2 the same\n")
    assert dsec("trace", "diff", "--brief", SANDBOX, OTHER).stdout.count("\n") == 1


def test_two_that_part(platform: FakePlatform, dsec: Dsec) -> None:
    recorded(platform, command(2, "make", b"ok"), command(3, "only here"))
    recorded(platform, command(2, "make", b"no", 2), sandbox_id=OTHER)
    done = dsec("trace", "diff", SANDBOX, OTHER)
    assert done.exit_code == 1
    rows = done.stdout.splitlines()
    assert rows[2].startswith("~")
    assert rows[2].endswith("exit_code, stdout")
    assert rows[3].startswith("<")
    assert "1 different" in done.stderr
    kinds = [
        step["kind"] for step in js.loads(dsec("trace", "diff", "--json", SANDBOX, OTHER).stdout)
    ]
    assert kinds == ["same", "differs", "only_left"]


def replayable(platform: FakePlatform, again: Recorded) -> None:
    recorded(platform, command(2, "make", b"ok"), Recorded(seq=3, op="tree.write", at=3.0,
             ended_at=3.0, outcome="ok", args={"path": "/t"}))  # fmt: skip
    recorded(platform, again, sandbox_id=OTHER)
    platform.on("POST", "/v1/sandboxes", json(sandbox(OTHER), 201))
    platform.on("POST", f"/v1/sandboxes/{OTHER}/commands/run", json(result()))
    platform.on("DELETE", f"/v1/sandboxes/{OTHER}", json(sandbox(OTHER, state="stopped")))


def test_a_replay_that_holds(platform: FakePlatform, dsec: Dsec) -> None:
    replayable(platform, command(2, "make", b"ok"))
    done = dsec("trace", "replay", SANDBOX)
    assert done.exit_code == 0
    assert "not done again: 3 tree.write" in done.stderr
    assert "1 the same" in done.stderr
    assert platform.calls("DELETE", OTHER)
    done = dsec("trace", "replay", "--keep", SANDBOX)
    assert done.stdout.splitlines()[-1] == OTHER
    assert len(platform.calls("DELETE", OTHER)) == 1


def test_a_replay_that_diverges(platform: FakePlatform, dsec: Dsec) -> None:
    replayable(platform, command(2, "make", b"no"))
    done = dsec("trace", "replay", "--json", "--image", "other", SANDBOX)
    assert done.exit_code == 1
    told = js.loads(done.stdout)
    assert (told["sandbox"], told["steps"][0]["what"]) == (OTHER, ["stdout"])
    assert told["left"][0]["entry"]["seq"] == 3
    assert platform.calls("POST", "/v1/sandboxes")[0].json()["image"] == "other"
    assert dsec("trace", "replay", "--image", "a", "--snapshot", "b", SANDBOX).exit_code == 64


def test_one_nobody_knows(platform: FakePlatform, dsec: Dsec) -> None:
    gone = error(NotFound("no sandbox", kind="sandbox"))
    platform.on("GET", f"/v1/sandboxes/{SANDBOX}/trajectory", gone)
    assert dsec("trace", SANDBOX).exit_code == 66
    assert dsec("trace").exit_code in {0, 2}


def test_what_was_cut_off_is_told(platform: FakePlatform, dsec: Dsec) -> None:
    recorded(platform, command(2, "make", ended_at=None, outcome="interrupted"))
    assert dsec("trace", SANDBOX).stdout.splitlines()[2].endswith("interrupted")
    assert '"outcome":"interrupted"' in dsec("trace", "--json", SANDBOX).stdout.replace(" ", "")


def branched(platform: FakePlatform, out: bytes) -> None:
    recorded(platform, command(2, "x", b"1"))
    recorded(platform, command(2, "x", out), sandbox_id=OTHER)
    platform.on("GET", "/v1/snapshots", json([]))
    platform.on("POST", "/v1/sandboxes", json(sandbox(OTHER), 201))
    platform.on("POST", f"/v1/sandboxes/{OTHER}/commands/run", json(result()))
    platform.on("DELETE", f"/v1/sandboxes/{OTHER}", json(sandbox(OTHER)))


def test_a_branch_is_made_and_named(platform: FakePlatform, dsec: Dsec) -> None:
    branched(platform, b"1")
    done = dsec("trace", "branch", SANDBOX, "--step", "2", "-l", "try=b")
    assert (done.exit_code, done.stdout) == (0, f"{OTHER}\n")
    assert "its own beginning, step 1; 1 steps done again" in done.stderr
    assert platform.calls("POST", "/v1/sandboxes")[0].json()["labels"] == {"try": "b"}


def test_a_branch_that_diverges(platform: FakePlatform, dsec: Dsec) -> None:
    branched(platform, b"other")
    done = dsec("trace", "branch", SANDBOX, "--step", "2")
    assert (done.exit_code, done.stdout) == (73, "")
    assert "step 2 (command) differs in stdout" in done.stderr
    kept = dsec("trace", "branch", SANDBOX, "--step", "2", "--allow-divergence")
    assert (kept.exit_code, kept.stdout) == (0, f"{OTHER}\n")
    assert "diverged: step 2 (command) differs in stdout" in kept.stderr
