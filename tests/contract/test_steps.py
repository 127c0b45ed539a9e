"""A program that starts over, two trajectories side by side, and one done again."""

from __future__ import annotations

import pytest

from dsec import Conflict, DSecClient, Sandbox, Steps
from dsec.trajectory.diff import diff
from dsec.wire.sandbox import Recorded
from tests.contract.expect import PROBE


async def program(steps: Steps) -> list[object]:
    """Nothing in it could be done twice unnoticed."""
    said: list[object] = [(await steps.exec([PROBE, "echo", "one"])).stdout]
    await steps.files.mkdir("/tmp/made")
    said.append((await steps.files.write("/tmp/made/log", b"a", append=True)).size_bytes)
    said.append((await steps.files.write("/tmp/made/log", b"b", append=True)).size_bytes)
    await steps.files.move("/tmp/made/log", "/tmp/made/moved")
    said.append((await steps.exec([PROBE, "cat"], input=b"given")).stdout)
    said.append(await steps.files.remove("/tmp/made/moved"))
    return said


async def entries(sandbox: Sandbox) -> list[Recorded]:
    return [entry async for entry in sandbox.trajectory()]


async def test_a_program_that_starts_over_is_answered_from_the_record(sandbox: Sandbox) -> None:
    steps = sandbox.steps("try")
    first = await program(steps)
    assert first[0] == "one\n"
    assert first[2:] == [2, "given", 1]
    done = len(await entries(sandbox))
    again = sandbox.steps("try")
    assert await program(again) == first
    assert (again.recorded, again.next) == (True, steps.next)
    assert len([e for e in await entries(sandbox) if e.op != "command.stdin"]) <= done
    assert (await again.exec([PROBE, "echo", "new"])).stdout == "new\n"
    assert not again.recorded


async def test_another_operation_under_a_number_that_is_taken(sandbox: Sandbox) -> None:
    await sandbox.steps().exec([PROBE, "echo", "one"])
    with pytest.raises(Conflict):
        await sandbox.steps().exec([PROBE, "echo", "two"])


async def test_an_operation_of_another_kind_under_a_number_that_is_taken(sandbox: Sandbox) -> None:
    steps = sandbox.steps()
    await steps.files.write("/tmp/a", b"1")
    await steps.run_shell("true")
    again = sandbox.steps()
    with pytest.raises(Conflict):
        await again.run_shell("touch /tmp/never")
    with pytest.raises(Conflict):
        await again.files.write("/tmp/never", b"")
    assert "/tmp/never" not in [entry.path for entry in await sandbox.files.list("/tmp")]


async def test_a_replay_does_it_all_again(client: DSecClient, sandbox: Sandbox) -> None:
    await program(sandbox.steps("try"))
    replay = await client.replay(sandbox.id)
    async with replay.sandbox:
        left = [step.left async for step in replay if step.left]
        compared = await replay.compare()
        parts = [*diff(await entries(sandbox), await entries(replay.sandbox))]
    assert left == []
    assert [(step.kind, step.what) for step in compared] == [("same", [])] * 7
    assert {step.kind for step in parts} <= {"same", "differs"}
