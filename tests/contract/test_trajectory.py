"""What happened in a sandbox is on record, and a repeat is answered from it."""

from __future__ import annotations

import anyio
import pytest

from dsec import Conflict, DSecClient, Sandbox
from dsec.wire.sandbox import Recorded
from tests.contract.conftest import MakeArgs


async def entries(sandbox: Sandbox, *ops: str) -> list[Recorded]:
    return [entry async for entry in sandbox.trajectory(ops=ops)]


async def test_a_life_is_on_record_in_order(client: DSecClient, args: MakeArgs) -> None:
    sandbox = await client.run_container(args())
    await sandbox.files.write("/tmp/a", b"12345")
    await sandbox.run_shell("cat /tmp/a; exit 3", command_id="c1")
    await sandbox.files.move("/tmp/a", "/tmp/b")
    await sandbox.files.remove("/tmp/b")
    await sandbox.stop()
    told = await entries(sandbox)
    ops = ["create", "file.write", "command", "file.move", "file.remove", "stop", "over"]
    assert [entry.op for entry in told] == ops
    assert [entry.seq for entry in told] == [1, 2, 3, 4, 5, 6, 7]
    assert all(entry.outcome == "ok" and entry.ended_at for entry in told)
    command = told[2]
    assert command.stdout is not None
    assert (command.id, command.stdout.head, command.result["exit_code"]) == ("c1", b"12345", 3)
    assert told[1].args["body"]["size_bytes"] == 5


async def test_another_command_under_the_same_id_is_refused(sandbox: Sandbox) -> None:
    await sandbox.run_shell("echo x >> /tmp/n", command_id="only")
    with pytest.raises(Conflict):
        await sandbox.run_shell("echo y >> /tmp/n", command_id="only")
    assert await sandbox.files.read("/tmp/n") == b"x\n"


async def test_what_nobody_waits_for_is_recorded_when_it_ends(sandbox: Sandbox) -> None:
    await sandbox.start(shell="sleep 0.2; seq 20000", command_id="alone")
    entry = (await entries(sandbox, "command"))[0]
    while entry.ended_at is None:
        await anyio.sleep(0.02)
        entry = (await entries(sandbox, "command"))[0]
    assert entry.stdout is not None
    assert entry.stdout.head.startswith(b"1\n2\n3\n")
    assert entry.stdout.tail.endswith(b"19999\n20000\n")
    assert len(entry.stdout.join()) == 64 << 10
    whole = sum(len(str(number)) + 1 for number in range(1, 20001))
    assert entry.stdout.dropped_bytes == whole - (64 << 10)
    assert entry.result["exit_code"] == 0


async def test_a_recorded_result_is_the_whole_result(sandbox: Sandbox) -> None:
    first = await sandbox.run_shell("seq 20000; echo no >&2; exit 4", command_id="long")
    again = await sandbox.run_shell("seq 20000; echo no >&2; exit 4", command_id="long")
    assert first == again


async def test_input_that_is_sent_again_is_taken_once(sandbox: Sandbox) -> None:
    command = await sandbox.start(["cat"], stdin="pipe", command_id="in")
    other = await sandbox.start(["cat"], stdin="pipe", command_id="in")
    await command.write(b"abc")
    await other.write(b"abcdef")
    await command.write(b"def")
    await command.close_stdin()
    assert (await command.wait()).stdout == "abcdef"
