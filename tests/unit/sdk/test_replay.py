from __future__ import annotations

import base64
import hashlib
from typing import Any

import pytest

from dsec import DSecClient, NotFound
from dsec.base.errors import DsecError, PermissionDenied, QuotaExceeded, Unauthenticated
from dsec.sdk.replaying import Change, Leave, Run, first_spec, inputs_of, plan
from dsec.trajectory.diff import Step
from dsec.wire.sandbox import Captured, Recorded, SnapshotView
from tests.unit.sdk.fake import (
    SANDBOX,
    FakePlatform,
    Seen,
    error,
    json,
    lines,
    result,
    sandbox,
)

FRESH = "sbx0000000000000000000f"
CREATED = Recorded(
    seq=1,
    op="create",
    at=1.0,
    ended_at=1.1,
    outcome="ok",
    args={"spec": {"image": "debian", "job": "j", "epoch": 4, "workspace": "w:1"}},
)


def entry(seq: int, op: str, args: dict[str, Any], **more: Any) -> Recorded:
    fields: dict[str, Any] = {"at": float(seq), "ended_at": seq + 0.5, "outcome": "ok"}
    return Recorded(seq=seq, op=op, args=args, **(fields | more))


def command(seq: int, shell: str, out: bytes = b"", code: int = 0, **more: Any) -> Recorded:
    return entry(
        seq,
        "command",
        {"shell": shell},
        id=f"cmd{seq}",
        result={"exit_code": code},
        stdout=Captured(head=out),
        **more,
    )


BODY = {"size_bytes": 1, "sha256": "ab", "data": base64.b64encode(b"x").decode()}
WRITE = {"path": "/a", "mode": "600", "parents": "true", "body": BODY}
NOTHING = {"path": "/a", "sha256": hashlib.sha256(b"").hexdigest()}


@pytest.mark.parametrize(
    ("recorded", "wanted"),
    [
        (entry(2, "file.write", NOTHING), ("write", {"path": "/a", "data": b""})),
        (entry(2, "file.write", WRITE), ("write", {"path": "/a", "mode": 0o600, "parents": True, "data": b"x"})),
        (entry(2, "file.mkdir", {"path": "/d", "user": "me"}), ("mkdir", {"path": "/d", "user": "me"})),
        (entry(2, "file.move", {"path": "/d", "to": "/e", "overwrite": "false"}), ("move", {"path": "/d", "to": "/e", "overwrite": False})),
        (entry(2, "file.remove", {"path": "/d", "recursive": True}), ("remove", {"path": "/d", "recursive": True})),
    ],
)  # fmt: skip
def test_changes_of_files(recorded: Recorded, wanted: tuple[str, dict[str, Any]]) -> None:
    assert plan(recorded) == Change(*wanted)


def test_commands_keep_id_and_arguments() -> None:
    made = plan(entry(2, "command", {"argv": ["a"], "cwd": "/b", "timeout_s": 5}, id="c"))
    assert isinstance(made, Run)
    assert (made.spec.command_id, made.spec.argv, made.spec.cwd) == ("c", ["a"], "/b")
    assert made.spec.timeout_s == 5


LONG = {"begins": "x", "size_bytes": 5000, "sha256": "ab"}


@pytest.mark.parametrize(
    ("recorded", "why"),
    [
        (
            entry(2, "file.write", {"path": "/a", "body": {"size_bytes": 9, "sha256": "ab"}}),
            "digest",
        ),
        (entry(2, "file.mkdir", {"path": LONG}), "path"),
        (entry(2, "file.mkdir", {"path": "/a", "mode": "rwx"}), "no sense"),
        (entry(2, "command", {"argv": ["a", LONG]}), "too long"),
        (entry(2, "command", {"argv": ["a"], "env": {"A": LONG}}), "too long"),
        (entry(2, "command", {"sha256": "ab", "size_bytes": 90000}), "too long"),
        (entry(2, "command", {"argv": 7}), "no sense"),
        (entry(2, "command", {"shell": "a", "session": "s"}), "session"),
        (entry(2, "command", {"shell": "a", "stdin": "pipe", "pty": {"rows": 9}}), "terminal"),
        (command(2, "x", ended_at=None, outcome=""), "not known"),
        (entry(2, "command", {"shell": "a"}, result={"killed": True}), "kill"),
        (entry(2, "tree.write", {"path": "/a"}), "tree.write"),
    ],
)
def test_what_is_left_says_why(recorded: Recorded, why: str) -> None:
    made = plan(recorded)
    assert isinstance(made, Leave)
    assert why in made.why


def stdin(seq: int, args: dict[str, Any], **more: Any) -> Recorded:
    return entry(seq, "command.stdin", {"command_id": "cat"} | args, **more)


def test_input_is_put_together_once() -> None:
    def body(data: bytes) -> dict[str, Any]:
        return {"size_bytes": len(data), "sha256": "ab", "data": data}

    parts = [
        stdin(3, {"offset": "0", "body": body(b"abc")}),
        stdin(4, {"offset": "0", "body": body(b"abc")}),
        stdin(5, {"offset": "3", "body": body(b"refused")}, outcome="conflict"),
        stdin(6, {"offset": "3", "body": body(b"def"), "eof": "1"}),
        stdin(7, {"eof": "1"}),
    ]
    cat = entry(2, "command", {"argv": ["cat"], "stdin": "pipe"}, id="cat")
    made = plan(cat, inputs_of([cat, *parts]))
    assert isinstance(made, Run)
    assert made.given == b"abcdef"
    assert plan(cat) == Run(made.spec, b"")
    long = stdin(8, {"body": {"size_bytes": 1 << 20, "sha256": "ab"}})
    left = plan(cat, inputs_of([*parts, long]))
    assert isinstance(left, Leave)
    assert "not all recorded" in left.why
    gap = plan(cat, inputs_of([parts[0], stdin(9, {"offset": "7", "body": body(b"h")})]))
    assert isinstance(gap, Leave)
    assert "not all recorded" in gap.why


@pytest.mark.parametrize("op", ["create", "file.read", "tree.read", "file.stat", "pause", "pack"])
def test_what_changes_nothing_is_passed_over(op: str) -> None:
    assert plan(entry(2, op, {})) == Leave()


def test_the_fresh_sandbox_is_made_alike_but_of_no_job() -> None:
    spec = first_spec([command(7, "x"), CREATED])
    assert (spec.image, spec.workspace, spec.job, spec.epoch) == ("debian", "w:1", None, 0)
    with pytest.raises(NotFound):
        first_spec([command(1, "x")])


def recorded_before(platform: FakePlatform, *entries: Recorded) -> None:
    platform.sandbox("GET", "/trajectory", lines(CREATED, *entries))
    platform.on("POST", "/v1/sandboxes", json(sandbox(FRESH), 201))


def recorded_again(platform: FakePlatform, *entries: Recorded) -> None:
    platform.on("GET", f"/v1/sandboxes/{FRESH}/trajectory", lines(CREATED, *entries))


def kinds(steps: list[Step]) -> list[tuple[str, list[str]]]:
    return [(step.kind, step.what) for step in steps]


async def test_a_replay_does_the_same_in_order_and_tells_where_it_diverges(
    platform: FakePlatform, client: DSecClient
) -> None:
    written = entry(4, "file.write", WRITE, id="key4")
    before = [command(2, "a", b"1"), entry(3, "file.read", {"path": "/a"}), written]
    before += [entry(5, "tree.write", {"path": "/t"}), command(6, "b", b"date", 0)]
    recorded_before(platform, *before)
    did: list[tuple[str, str]] = []

    def run(seen: Seen) -> Any:
        did.append(("run", seen.json()["command_id"]))
        return error(NotFound("no such user")) if len(did) == 1 else json(result())

    def write(seen: Seen) -> Any:
        did.append((seen.query["path"], seen.headers["idempotency-key"]))
        return json({"path": "/a", "kind": "file"})

    platform.on("POST", f"/v1/sandboxes/{FRESH}/commands/run", run)
    platform.on("PUT", f"/v1/sandboxes/{FRESH}/files", write)
    failed = command(2, "a", ended_at=2.1, outcome="not_found")
    again = [
        failed,
        entry(3, "file.write", WRITE | {"sha256": "ab"}, id="key4"),
        command(4, "b", b"other", 1),
    ]
    again[2].id = "cmd6"
    recorded_again(platform, *again)
    async with await client.replay(SANDBOX) as replay:
        steps = [(step.entry.seq, bool(step.left)) async for step in replay]
        compared = kinds(await replay.compare())
    assert steps == [(2, False), (4, False), (5, True), (6, False)]
    assert did == [("run", "cmd2"), ("/a", "key4"), ("run", "cmd6")]
    assert compared == [
        ("differs", ["outcome", "stdout"]),
        ("same", []),
        ("differs", ["exit_code", "stdout"]),
    ]
    made = platform.calls("POST", "/v1/sandboxes")[0]
    assert (made.json()["image"], made.json()["workspace"]) == ("debian", "w:1")
    assert "idempotency-key" in made.headers
    assert replay.sandbox.id == FRESH


@pytest.mark.parametrize(
    "refusal", [PermissionDenied("not any more"), Unauthenticated("no"), QuotaExceeded("full")]
)
async def test_what_never_reached_the_sandbox_is_not_a_step_done(
    platform: FakePlatform, client: DSecClient, refusal: DsecError
) -> None:
    recorded_before(platform, command(2, "a"))
    platform.on("POST", f"/v1/sandboxes/{FRESH}/commands/run", error(refusal))
    async with await client.replay(SANDBOX) as replay:
        with pytest.raises(type(refusal)):
            await anext(replay)


async def test_a_replay_from_a_snapshot_begins_after_it(
    platform: FakePlatform, client: DSecClient
) -> None:
    recorded_before(platform, command(2, "a"), command(3, "b"))
    platform.on("POST", f"/v1/sandboxes/{FRESH}/commands/run", json(result()))
    recorded_again(platform, command(2, "a", inherited=True), command(3, "b"))
    packed = SnapshotView(
        name="s", image="snapshots/p/s", digest="d", parent="debian", sandbox=SANDBOX, step=2
    )
    platform.on("GET", "/v1/snapshots/s", json(packed))
    replay = await client.replay(SANDBOX, snapshot="s", until=3)
    assert [step.entry.seq async for step in replay] == [3]
    assert kinds(await replay.compare()) == [("same", [])]
    spec = platform.calls("POST", "/v1/sandboxes")[0].json()
    assert (spec["image"], spec["workspace"], spec["toolkits"]) == ("snapshots/p/s", None, [])
    assert platform.calls("GET", f"{SANDBOX}/trajectory")[0].query["until"] == "3"
