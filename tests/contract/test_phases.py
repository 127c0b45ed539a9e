"""File rules and phases, as a caller sees them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import anyio
import anyio.lowlevel
import pytest

from dsec import (
    Conflict,
    DSecClient,
    FileRule,
    InvalidRequest,
    NotFound,
    PermissionDenied,
    Phase,
    Sandbox,
    Unsupported,
)
from tests.contract.capabilities import needs
from tests.contract.conftest import MakeArgs
from tests.contract.server import Server

DENY = [FileRule(path="/etc/answers", access="deny")]
SETUP, AGENT, VERIFY = (
    Phase(name="setup", files=[]),
    Phase(name="agent", files=DENY, user="user", secrets={"TOKEN": "t0p-secret"}),
    Phase(name="verify", files=[FileRule(path="/home", access="read_only")], final=True),
)
SET_ID = r'"Uid":"1000\u00090\u0009'
"""In the report of a program that has root's rights and was started by user 1000."""
QUIET = [Phase(name="fast"), Phase(name="slow", qos="be", ttl_running_stop=600)]


async def said(sandbox: Sandbox, line: str, **given: Any) -> str:
    return (await sandbox.run_shell(line, timeout=30, **given)).stdout


@needs("phases")
async def test_what_is_denied_is_denied_to_the_files_api_too(
    client: DSecClient, args: MakeArgs
) -> None:
    async with await client.run_container(args()) as free:
        assert b"root" in await free.files.read("/etc/passwd")
    rules = [FileRule(path="/etc/passwd", access="deny")]
    async with await client.run_container(args(files=rules)) as sandbox:
        with pytest.raises(PermissionDenied):
            await sandbox.files.read("/etc/passwd")
        assert "root" not in await said(sandbox, "cat /etc/passwd")


@needs("phases")
async def test_a_life_of_three_phases(client: DSecClient, args: MakeArgs) -> None:
    async with await client.run_container(args(phases=[SETUP, AGENT, VERIFY])) as sandbox:
        assert sandbox.view.phase == "setup"
        assert await said(sandbox, "id -u; echo 42 > /etc/answers; cat /etc/answers") == "0\n42\n"
        view = await sandbox.enter_phase("agent")
        assert view.phase == "agent"
        look = "id -u; cat /etc/answers; echo $TOKEN; echo mine > /home/user/work"
        assert await said(sandbox, look) == "1000\nt0p-secret\n"
        with pytest.raises(PermissionDenied):
            await sandbox.run_shell("id", user="root")
        with pytest.raises(PermissionDenied):
            await sandbox.files.read("/etc/answers")
        await sandbox.enter_phase("verify")
        grade = "id -u; cat /etc/answers /home/user/work; echo $TOKEN; echo x > /home/user/work"
        assert await said(sandbox, grade) == "0\n42\nmine\n\n"
        assert await said(sandbox, "cat /home/user/work") == "mine\n"
        with pytest.raises(Conflict, match="final"):
            await sandbox.enter_phase("setup")


@needs("phases")
async def test_nothing_that_ran_before_runs_on(client: DSecClient, args: MakeArgs) -> None:
    hold = "exec 3</etc/answers; trap '' TERM HUP; (setsid sleep 1000 <&3 &) ; sleep 1000"
    async with await client.run_container(args(phases=[SETUP, AGENT])) as sandbox:
        await said(sandbox, "echo 42 > /etc/answers")
        async with await sandbox.open_session() as session:
            await session.run("cd /etc; exec 3</etc/answers")
            command = await sandbox.start(["sh", "-c", hold])
            await sandbox.enter_phase("agent")
            assert (await command.wait()).exit_code == 137
            assert [process.pid for process in await sandbox.processes()] == [1]
            with pytest.raises(NotFound):
                await session.run("cat <&3")


@needs("phases")
async def test_secrets_are_in_no_view_and_no_trajectory(client: DSecClient, args: MakeArgs) -> None:
    async with await client.run_container(args(phases=[AGENT, VERIFY])) as sandbox:
        assert await said(sandbox, "test $TOKEN = t0p-secret && echo yes") == "yes\n"
        await sandbox.enter_phase("verify")
        told = [entry async for entry in sandbox.trajectory()]
        assert [entry.args for entry in told if entry.op == "phase"] == [{"name": "verify"}]
        assert "t0p-secret" not in repr(told).replace("test $TOKEN = t0p-secret", "")
        assert "t0p-secret" not in repr((await client.get(sandbox.id)).view)


@needs("phases")
async def test_a_rule_that_cannot_hold_leaves_the_phase(client: DSecClient, args: MakeArgs) -> None:
    phases = [SETUP, Phase(name="next", files=[FileRule(path="/tmp/d/file", access="deny")])]
    async with await client.run_container(args(phases=phases)) as sandbox:
        await said(sandbox, "mkdir /tmp/e; echo 42 > /tmp/e/file; ln -s e /tmp/d")
        with pytest.raises(Conflict, match="symbolic link"):
            await sandbox.enter_phase("next")
        assert (await client.get(sandbox.id)).view.phase == "setup"
        assert await said(sandbox, "rm /tmp/d; mv /tmp/e /tmp/d; ln /tmp/d/file /tmp/b") == ""
        with pytest.raises(Conflict, match="hard links"):
            await sandbox.enter_phase("next")
        assert await said(sandbox, "rm /tmp/b; cat /tmp/d/file") == "42\n"
        await sandbox.enter_phase("next")
        assert await said(sandbox, "cat /tmp/d/file") == ""
        await sandbox.enter_phase("setup")
        assert await said(sandbox, "cat /tmp/d/file") == "42\n"


@needs("phases", "snapshots")
async def test_a_fork_is_in_its_parents_phase(client: DSecClient, args: MakeArgs) -> None:
    async with await client.run_container(args(phases=[SETUP, AGENT])) as parent:
        await said(parent, "echo 42 > /etc/answers")
        await parent.enter_phase("agent")
        [child] = await parent.fork(1)
        async with child:
            assert child.view.phase == "agent"
            assert await said(child, "id -u; cat /etc/answers") == "1000\n"
            await child.enter_phase("setup")
            assert await said(child, "cat /etc/answers") == "42\n"


@needs("phases", "snapshots")
async def test_a_snapshot_has_nothing_that_is_denied(client: DSecClient, args: MakeArgs) -> None:
    async with await client.run_container(args(phases=[SETUP, AGENT])) as sandbox:
        await said(sandbox, "echo 42 > /etc/answers; echo 1 > /etc/other")
        await sandbox.enter_phase("agent")
        await sandbox.pack("without-answers")
    async with await client.restore("without-answers") as again:
        assert await said(again, "cat /etc/other /etc/answers") == "1\n"
    await client.snapshots.remove("without-answers")


async def test_where_nothing_inside_changes_processes_go_on(
    client: DSecClient, args: MakeArgs
) -> None:
    async with await client.run_container(args(phases=QUIET)) as sandbox:
        command = await sandbox.start(["/probe", "sleep", "1000"])
        view = await sandbox.enter_phase("slow")
        assert (view.phase, view.qos, view.ttl_running_stop) == ("slow", "be", 600)
        assert [p.pid for p in await sandbox.processes()]
        view = await sandbox.enter_phase("fast")
        assert (view.phase, view.qos, view.ttl_running_stop) == ("fast", "ls", 1800)
        await command.kill()


async def test_there_are_no_other_phases(client: DSecClient, args: MakeArgs) -> None:
    async with await client.run_container(args(phases=QUIET)) as sandbox:
        with pytest.raises(NotFound, match="fast, slow"):
            await sandbox.enter_phase("other")
        assert (await sandbox.enter_phase("fast")).phase == "fast"


@needs("phases")
async def test_what_is_not_enforced_is_refused_by_name(client: DSecClient, args: MakeArgs) -> None:
    online = Phase(name="online", network_rules={"*": True})
    with pytest.raises(Unsupported, match="network_rules of phase online"):
        await client.run_container(args(phases=[SETUP, online]))


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"files": [FileRule(path="/a/../b", access="deny")]}, "no absolute path"),
        ({"files": [FileRule(path="/proc/1", access="deny")]}, "platform's"),
        ({"files": [*DENY, FileRule(path="/etc/answers/x", access="deny")]}, "which is denied"),
        ({"phases": [SETUP, SETUP]}, "twice"),
        ({"phases": [SETUP, Phase(name="n", files=DENY, end_processes=False)]}, "cannot be false"),
    ],
)
async def test_what_contradicts_itself_is_refused(
    client: DSecClient, args: MakeArgs, given: dict[str, Any], words: str
) -> None:
    with pytest.raises(InvalidRequest, match=words):
        await client.run_container(args(**given))


@needs("phases")
async def test_root_that_was_taken_is_not_had_back(client: DSecClient, args: MakeArgs) -> None:
    set_id = "cp /probe /tmp/root; chmod 4755 /tmp/root"
    async with await client.run_container(args()) as free:
        await said(free, set_id)
        assert SET_ID in await said(free, "/tmp/root report", user="user")
    phases = [SETUP, AGENT, Phase(name="named", user="ann"), Phase(name="number", user="1000")]
    async with await client.run_container(args(phases=phases)) as sandbox:
        await said(sandbox, set_id + "; echo ann:x:0:0::/:/bin/sh >> /etc/passwd")
        await sandbox.enter_phase("agent")
        assert SET_ID not in await said(sandbox, "/tmp/root report")
        await sandbox.enter_phase("named")
        with pytest.raises(PermissionDenied, match="root"):
            await said(sandbox, "id")
        await sandbox.enter_phase("number")
        assert await said(sandbox, "id -u") == "1000\n"
        assert await said(sandbox, "id -u", user="user") == "1000\n"


@needs("phases")
async def test_whoever_asks_between_phases_is_served_in_the_next(
    client: DSecClient, args: MakeArgs
) -> None:
    tries = "test $(id -u) = 0 && cat /etc/answers; test $(id -u) = 1000 && cat /etc/answers"
    async with await client.run_container(args(phases=[SETUP, AGENT])) as sandbox:
        await said(sandbox, "echo 42 > /etc/answers")
        seen: list[str] = []

        async def look() -> None:
            for _ in range(20):
                done = await sandbox.run_shell(f"id -u; {tries}", timeout=30)
                if done.exit_code != 137:
                    seen.append(done.stdout)

        async with anyio.create_task_group() as group:
            group.start_soon(look)
            for _ in range(5):
                await sandbox.enter_phase("agent")
                await sandbox.enter_phase("setup")
        assert {*seen} <= {"0\n42\n", "1000\n"}


@needs("phases")
async def test_nobody_forks_fast_enough_to_stay(client: DSecClient, args: MakeArgs) -> None:
    bomb = "trap '' TERM HUP INT; f() { f | f & }; f; while true; do (setsid true &); done"
    async with await client.run_container(args(phases=[SETUP, AGENT], pids_limit=200)) as sandbox:
        command = await sandbox.start(["sh", "-c", bomb])
        while len(await sandbox.processes()) < 20:
            await anyio.lowlevel.checkpoint()
        await sandbox.enter_phase("agent")
        assert (await command.wait()).exit_code == 137
        assert [process.pid for process in await sandbox.processes()] == [1]


@needs("phases")
async def test_the_command_enters_a_phase(
    server: Server, client: DSecClient, args: MakeArgs, tmp_path: Path
) -> None:
    async with await client.run_container(args(phases=[SETUP, AGENT])) as sandbox:
        entered = await server.dsec("phase", sandbox.id, "agent", cwd=tmp_path)
        assert (entered.returncode, entered.stdout) == (0, b"agent\n")
        assert (await server.dsec("phase", sandbox.id, "no", cwd=tmp_path)).returncode != 0
        assert (await client.get(sandbox.id)).view.phase == "agent"
