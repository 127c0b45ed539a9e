from __future__ import annotations

import anyio
import pytest

from dsec import InvalidRequest, Sandbox
from dsec.sdk import Steps
from dsec.wire.public_v1 import BatchItem
from dsec.wire.sandbox import FileInfo
from tests.unit.sdk.fake import FakePlatform, Reply, command, json, lines, result, sandbox

INFO = json(FileInfo(path="/a", kind="file"))


async def program(steps: Steps) -> None:
    await steps.run_shell("echo a")
    await steps.files.read("/a")
    await steps.files.write("/a", b"b")
    await steps.exec(["cat"], input=b"x")
    async with await steps.open_session() as session:
        await session.run("cd /")
    await steps.pause()
    await steps.fork(1)
    await steps.exec(["mine"], command_id="mine")
    await steps.exec(["last"])


def ids(platform: FakePlatform) -> list[str]:
    found = []
    for seen in platform.seen:
        sent = seen.json() if seen.headers.get("content-type") == "application/json" else {}
        if name := sent.get("command_id") or seen.headers.get("idempotency-key"):
            found.append(name)
    return found


def answers(platform: FakePlatform) -> None:
    platform.sandbox("POST", "/commands/run", json(result()))
    platform.sandbox("POST", "/commands", json(command(), 201))
    platform.sandbox("POST", "/commands/cmd1/stdin", Reply(204))
    platform.sandbox("GET", "/commands/cmd1/result", json(result()))
    platform.sandbox("GET", "/files", Reply(200, [b"a"]))
    platform.sandbox("PUT", "/files", INFO)
    platform.sandbox("POST", "/sessions", json({"session_id": "ses1"}, 201))
    platform.sandbox("DELETE", "/sessions/ses1", Reply(204))
    platform.sandbox("POST", "/pause", json(sandbox()))
    platform.sandbox("POST", "/fork", lines(BatchItem(index=0, sandbox=sandbox("sbx0"))))


async def test_the_same_program_gives_the_same_ids(platform: FakePlatform, box: Sandbox) -> None:
    answers(platform)
    await program(box.steps("run.7"))
    first = ids(platform)
    assert first == [
        "run.7-000001", "run.7-000002", "run.7-000003", "run.7-000004", "run.7-000005",
        "run.7-000006", "run.7-000007", "mine", "run.7-000008",
    ]  # fmt: skip
    platform.seen.clear()
    await program(box.steps("run.7"))
    assert ids(platform) == first
    platform.seen.clear()
    await program(box.steps("other", first=41))
    assert ids(platform)[0] == "other-000041"


async def test_they_tell_what_came_from_the_record(platform: FakePlatform, box: Sandbox) -> None:
    steps = box.steps()
    assert steps.recorded is None
    platform.sandbox(
        "POST",
        "/commands/run",
        json(result(b"old"), x_recorded="true"),
        json(result(b"new"), x_recorded="false"),
        json(result(b"new")),
    )
    told = []
    for _ in range(3):
        await steps.run_shell("x")
        told.append((steps.next, steps.recorded))
    assert told == [(2, True), (3, False), (4, None)]


async def test_a_plain_handle_is_not_numbered(platform: FakePlatform, box: Sandbox) -> None:
    answers(platform)
    steps = box.steps()
    await box.run_shell("x")
    assert steps.next == 1
    assert ids(platform)[0].startswith("cmd")


async def test_a_numbered_command_goes_on_when_its_caller_leaves(
    platform: FakePlatform, box: Sandbox
) -> None:
    platform.sandbox("POST", "/commands/run", Reply(200, [b"\n"], hang=True))
    with anyio.move_on_after(0.05):
        await box.steps().exec(["sleep", "inf"])
    assert not [seen for seen in platform.seen if seen.method == "DELETE"]


async def test_children_of_a_numbered_parent_are_not_numbered(
    platform: FakePlatform, box: Sandbox
) -> None:
    answers(platform)
    (child,) = await box.steps().fork(1)
    platform.on("POST", "/v1/sandboxes/sbx0/commands/run", json(result()))
    await child.exec(["x"])
    sent = platform.calls("POST", "sbx0/commands/run")[0].json()
    assert sent["command_id"].startswith("cmd")


@pytest.mark.parametrize("prefix", ["", "a b", "-x", "x" * 60])
async def test_a_prefix_must_begin_an_id(box: Sandbox, prefix: str) -> None:
    with pytest.raises(InvalidRequest):
        box.steps(prefix)
