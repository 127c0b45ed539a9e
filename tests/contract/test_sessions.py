"""Sessions: a shell that stays."""

from __future__ import annotations

import json

import anyio
import pytest

from dsec import Conflict, NotFound, Sandbox
from tests.contract.capabilities import needs
from tests.contract.expect import PROBE, eventually, refusal


async def test_directory_and_variables_stay(sandbox: Sandbox) -> None:
    async with await sandbox.open_session() as session:
        assert (await session.run("cd /tmp; export A=1; B=2")).ok
        assert (await session.run("echo $A $B $PWD")).stdout == "1 2 /tmp\n"
        assert (await session.run("/probe env A")).stdout == "1\n"


@needs("shell")
async def test_functions_and_options_stay(sandbox: Sandbox) -> None:
    async with await sandbox.open_session() as session:
        await session.run("greet() { echo hi $1; }; set -f")
        assert (await session.run("greet you; echo *")).stdout == "hi you\n*\n"


async def test_a_session_begins_where_it_was_told(sandbox: Sandbox) -> None:
    async with await sandbox.open_session(cwd="/tmp", env={"A": "x"}, user="user") as session:
        assert (await session.run("echo $A $PWD")).stdout == "x /tmp\n"
        assert json.loads((await session.run("/probe id")).stdout)["uid"] == 1000


@pytest.mark.parametrize("code", [0, 1, 42, 255])
async def test_exit_statuses_come_back(sandbox: Sandbox, code: int) -> None:
    async with await sandbox.open_session() as session:
        assert (await session.run(f"/probe exit {code}")).exit_code == code
        assert (await session.run("echo $?")).stdout == f"{code}\n"


async def test_output_belongs_to_its_command(sandbox: Sandbox) -> None:
    async with await sandbox.open_session() as session:
        for n in range(20):
            result = await session.run(f"echo out{n}; echo err{n} >&2")
            assert (result.stdout, result.stderr) == (f"out{n}\n", f"err{n}\n")


async def test_output_without_a_newline_and_control_words_are_kept(sandbox: Sandbox) -> None:
    async with await sandbox.open_session() as session:
        assert (await session.run("printf 'no newline'")).stdout == "no newline"
        assert (await session.run("/probe bytes")).stdout_bytes == bytes(range(256))
        assert (await session.run("/probe exit 0")).stdout_bytes == b""


async def test_a_large_output_does_not_block_a_session(sandbox: Sandbox) -> None:
    async with await sandbox.open_session() as session:
        result = await session.run("/probe flood 3000000", output_limit_bytes=1000)
        assert result.stdout_dropped == 2999000
        assert (await session.run("echo next")).stdout == "next\n"


async def test_a_syntax_error_is_a_result_and_the_session_goes_on(sandbox: Sandbox) -> None:
    async with await sandbox.open_session() as session:
        assert not (await session.run("echo 'open")).ok
        assert (await session.run("echo next")).stdout == "next\n"


async def test_many_lines_are_one_command(sandbox: Sandbox) -> None:
    async with await sandbox.open_session() as session:
        result = await session.run("echo one\n\necho two # not this\n/probe exit 3")
        assert (result.stdout, result.exit_code) == ("one\ntwo\n", 3)


async def test_a_busy_session_is_a_conflict(sandbox: Sandbox) -> None:
    async with await sandbox.open_session() as session:
        command = await sandbox.start(shell="sleep 1000", session=session.id)
        with refusal(Conflict):
            await session.run("echo no")
        await command.kill()


async def test_exit_ends_the_shell_and_a_fresh_one_takes_over(sandbox: Sandbox) -> None:
    async with await sandbox.open_session() as session:
        await session.run("cd /tmp; A=1")
        result = await session.run("exit 5")
        assert (result.exit_code, result.session_reset) == (5, True)
        fresh = await session.run("echo -$A- $PWD")
        assert (fresh.stdout, fresh.session_reset) == ("-- /\n", False)


async def test_a_time_out_leaves_a_usable_session(sandbox: Sandbox) -> None:
    async with await sandbox.open_session() as session:
        await session.run("cd /tmp; A=1")
        result = await session.run("echo begun; sleep 1000", timeout=0.5)
        assert (result.timed_out, result.stdout) == (True, "begun\n")
        said = (await session.run('echo "$A $PWD"')).stdout
        assert said == (" /\n" if result.session_reset else "1 /tmp\n")


async def test_a_time_out_in_a_session_kills_grandchildren(sandbox: Sandbox) -> None:
    async with await sandbox.open_session() as session:
        result = await session.run("/probe tree 2", timeout=1)
        assert result.timed_out
        assert not [p for p in await sandbox.processes() if "tree" in p.argv]


async def test_killing_a_sessions_command_leaves_a_usable_session(sandbox: Sandbox) -> None:
    async with await sandbox.open_session() as session:
        command = await sandbox.start(shell="sleep 1000", session=session.id)
        view = await command.kill()
        assert view.killed
        assert (await session.run("echo next")).stdout == "next\n"


async def test_a_killed_shell_is_replaced(sandbox: Sandbox) -> None:
    async with await sandbox.open_session() as session:
        result = await session.run("kill -9 $$")
        assert result.session_reset
        assert not result.ok
        assert (await session.run("echo next")).stdout == "next\n"


async def test_two_sessions_are_independent(sandbox: Sandbox) -> None:
    async with await sandbox.open_session() as one, await sandbox.open_session() as two:
        await one.run("cd /tmp; A=1")
        await two.run("cd /etc; A=2")
        assert (await one.run("echo $A $PWD")).stdout == "1 /tmp\n"
        assert (await two.run("echo $A $PWD")).stdout == "2 /etc\n"


async def test_sessions_run_at_the_same_time(sandbox: Sandbox) -> None:
    async with await sandbox.open_session() as one, await sandbox.open_session() as two:
        # Each waits for what the other one does.
        with anyio.fail_after(20):
            async with anyio.create_task_group() as group:
                group.start_soon(one.run, "echo a > /tmp/a; sleep 0.5; cat /tmp/b")
                group.start_soon(two.run, "echo b > /tmp/b; sleep 0.5; cat /tmp/a")


async def test_a_sessions_id_can_be_chosen_and_sessions_are_listed(sandbox: Sandbox) -> None:
    async with await sandbox.open_session(session_id="mine") as session:
        await session.run("A=1")
        again = await sandbox.open_session(session_id="mine")
        assert (await again.run("echo $A")).stdout == "1\n"
        assert [view.session_id for view in await sandbox.sessions()] == ["mine"]
    assert await sandbox.sessions() == []


async def test_closing_a_session_ends_its_process_tree(sandbox: Sandbox) -> None:
    session = await sandbox.open_session()
    await session.run("sleep 7654 &")
    await session.close()

    async def gone() -> bool:
        return not any("7654" in p.argv for p in await sandbox.processes())

    await eventually(gone, "the background child has ended")
    with refusal(NotFound, kind="session"):
        await session.run("echo no")


async def test_closing_a_session_twice_is_harmless(sandbox: Sandbox) -> None:
    session = await sandbox.open_session()
    await session.close()
    await session.close()


async def test_an_unknown_session_is_not_found(sandbox: Sandbox) -> None:
    with refusal(NotFound, kind="session"):
        await sandbox.run_shell("echo no", session="never-opened")


async def test_an_unknown_user_of_a_session_is_not_found(sandbox: Sandbox) -> None:
    with refusal(NotFound, kind="user"):
        await sandbox.open_session(user="ghost")


async def test_a_session_reads_no_input_by_default(sandbox: Sandbox) -> None:
    async with await sandbox.open_session() as session:
        assert (await session.run("cat; echo after", timeout=10)).stdout == "after\n"


async def test_arguments_run_in_a_session_arrive_exactly(sandbox: Sandbox) -> None:
    async with await sandbox.open_session() as session:
        result = await sandbox.exec([PROBE, "args", "a b", "", "$X", "'"], session=session.id)
        assert result.stdout == "3:a b\n0:\n2:$X\n1:'\n"


async def test_the_same_id_in_a_session_runs_once(sandbox: Sandbox) -> None:
    async with await sandbox.open_session() as session:
        for _ in range(3):
            result = await session.run("echo x >> /tmp/n; echo done", command_id="one")
            assert result.stdout == "done\n"
    assert await sandbox.files.read("/tmp/n") == b"x\n"
