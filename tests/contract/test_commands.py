"""Commands: what is run, as whom, where, for how long, and how it ends."""

from __future__ import annotations

import json
import secrets
import time

import anyio
import pytest

from dsec import (
    CommandFailed,
    DSecClient,
    InvalidRequest,
    NotFound,
    PermissionDenied,
    Sandbox,
)
from tests.contract.capabilities import needs
from tests.contract.conftest import MakeArgs
from tests.contract.expect import PROBE, eventually, read_until, refusal

ODD = [
    "",
    " ",
    "a b",
    "'",
    '"',
    "\\",
    "a\nb",
    "\t",
    "$HOME",
    "*",
    "--",
    "-n",
    "é",
    "日本",
    "😀",
    ";",
]


@pytest.mark.parametrize("code", [0, 1, 2, 77, 126, 127, 128, 137, 254, 255])
async def test_the_exit_status_is_a_value(sandbox: Sandbox, code: int) -> None:
    result = await sandbox.exec([PROBE, "exit", str(code)])
    assert (result.exit_code, result.ok, result.signal) == (code, code == 0, None)


async def test_every_exit_status_comes_back(sandbox: Sandbox) -> None:
    seen: dict[int, int] = {}

    async def ask(code: int) -> None:
        async with limit:
            seen[code] = (await sandbox.exec([PROBE, "exit", str(code)])).exit_code

    limit = anyio.CapacityLimiter(16)
    async with anyio.create_task_group() as group:
        for code in range(256):
            group.start_soon(ask, code)
    assert seen == {code: code for code in range(256)}


@pytest.mark.parametrize(("name", "number"), [("TERM", 15), ("KILL", 9), ("INT", 2), ("HUP", 1)])
async def test_a_signal_that_ends_a_command_is_told(
    sandbox: Sandbox, name: str, number: int
) -> None:
    command = await sandbox.start([PROBE, "sleep", "1000"])
    await eventually(lambda: _executed(sandbox), "it sleeps")
    await command.signal(name)
    result = await command.wait()
    assert (result.exit_code, result.signal) == (128 + number, number)


async def _executed(sandbox: Sandbox) -> bool:
    return any("1000" in process.argv for process in await sandbox.processes())


async def test_check_raises_only_on_failure(sandbox: Sandbox) -> None:
    (await sandbox.exec([PROBE, "exit", "0"])).check()
    with pytest.raises(CommandFailed) as caught:
        (await sandbox.exec([PROBE, "exit", "3"])).check()
    assert caught.value.result.exit_code == 3


async def test_arguments_arrive_exactly(sandbox: Sandbox) -> None:
    result = await sandbox.exec([PROBE, "args", *ODD])
    wanted = b"".join(b"%d:%s\n" % (len(a.encode()), a.encode()) for a in ODD)
    assert result.stdout_bytes == wanted


async def test_a_shell_line_arrives_exactly(sandbox: Sandbox) -> None:
    result = await sandbox.run_shell("/probe args 'a  b' \"c'd\" é\\ f; /probe exit 4")
    assert result.stdout_bytes == "4:a  b\n3:c'd\n4:é f\n".encode()
    assert result.exit_code == 4


async def test_a_nul_byte_in_an_argument_is_refused(sandbox: Sandbox) -> None:
    with refusal(InvalidRequest):
        await sandbox.exec([PROBE, "echo", "a\0b"])


async def test_no_arguments_at_all_are_refused(sandbox: Sandbox) -> None:
    with refusal(InvalidRequest):
        await sandbox.exec([])


async def test_the_commands_environment_beats_the_sandboxes(
    client: DSecClient, args: MakeArgs
) -> None:
    async with await client.run_container(args(env={"A": "sandbox", "B": "sandbox"})) as sandbox:
        assert (await sandbox.exec([PROBE, "env", "A"])).stdout == "sandbox\n"
        given = await sandbox.exec([PROBE, "env", "B"], env={"B": "command"})
        assert given.stdout == "command\n"
        assert (await sandbox.exec([PROBE, "env", "B"])).stdout == "sandbox\n"


async def test_environment_values_arrive_exactly(sandbox: Sandbox) -> None:
    value = "a=b c\n'é' $X"
    result = await sandbox.exec([PROBE, "env", "ODD"], env={"ODD": value})
    assert result.stdout == value + "\n"


async def test_nothing_of_the_servers_environment_is_inherited(sandbox: Sandbox) -> None:
    text = (await sandbox.exec([PROBE, "env"])).stdout
    assert "PYTHONPATH" not in text
    assert "dsec-t" not in text


async def test_path_home_and_user_are_set(sandbox: Sandbox) -> None:
    for name, value in (("HOME", "/home/user"), ("USER", "user")):
        assert (await sandbox.exec([PROBE, "env", name], user="user")).stdout == value + "\n"
    assert "/bin" in (await sandbox.exec([PROBE, "env", "PATH"])).stdout


async def test_the_directory_is_the_sandboxes_or_the_commands(
    client: DSecClient, args: MakeArgs
) -> None:
    async with await client.run_container(args(workdir="/tmp")) as sandbox:
        assert (await sandbox.exec([PROBE, "cwd"])).stdout == "/tmp\n"
        assert (await sandbox.exec([PROBE, "cwd"], cwd="/etc")).stdout == "/etc\n"


async def test_the_default_directory_is_the_root(sandbox: Sandbox) -> None:
    assert (await sandbox.exec([PROBE, "cwd"])).stdout == "/\n"


async def test_a_missing_directory_is_not_found(sandbox: Sandbox) -> None:
    with refusal(NotFound, kind="cwd"):
        await sandbox.exec([PROBE, "cwd"], cwd="/no/such")


async def test_a_file_as_directory_is_refused(sandbox: Sandbox) -> None:
    with refusal(InvalidRequest):
        await sandbox.exec([PROBE, "cwd"], cwd="/etc/passwd")


@pytest.mark.parametrize(
    ("user", "uid", "gid"),
    [("root", 0, 0), ("user", 1000, 1000), ("1000", 1000, 1000), ("nobody", 65534, 65534)],
)
async def test_a_user_by_name_or_number(sandbox: Sandbox, user: str, uid: int, gid: int) -> None:
    said = json.loads((await sandbox.exec([PROBE, "id"], user=user)).stdout)
    assert (said["uid"], said["gid"]) == (uid, gid)
    assert set(said["groups"]) <= {gid}


async def test_a_group_can_be_named_with_the_user(sandbox: Sandbox) -> None:
    said = json.loads((await sandbox.exec([PROBE, "id"], user="user:root")).stdout)
    assert (said["uid"], said["gid"]) == (1000, 0)


async def test_an_unknown_user_is_not_found(sandbox: Sandbox) -> None:
    with refusal(NotFound, kind="user"):
        await sandbox.exec([PROBE, "id"], user="ghost")


async def test_the_init_user_is_the_default(client: DSecClient, args: MakeArgs) -> None:
    async with await client.run_container(args(init_user="user")) as sandbox:
        assert json.loads((await sandbox.exec([PROBE, "id"])).stdout)["uid"] == 1000
        as_root = await sandbox.exec([PROBE, "id"], user="root")
        assert json.loads(as_root.stdout)["uid"] == 0


@pytest.mark.parametrize("name", ["no-such-program", "/no/such/program"])
async def test_a_missing_program_is_not_found(sandbox: Sandbox, name: str) -> None:
    with refusal(NotFound, kind="executable"):
        await sandbox.exec([name])


@pytest.mark.parametrize("name", ["/etc/passwd", "/tmp"])
async def test_what_cannot_be_executed_is_permission_denied(sandbox: Sandbox, name: str) -> None:
    with refusal(PermissionDenied):
        await sandbox.exec([name])


async def test_a_program_that_is_not_there_leaves_the_id_free(sandbox: Sandbox) -> None:
    with refusal(NotFound):
        await sandbox.exec(["no-such-program"], command_id="again")
    assert (await sandbox.exec([PROBE, "exit", "5"], command_id="again")).exit_code == 5


async def test_a_script_written_by_the_caller_runs(sandbox: Sandbox) -> None:
    await sandbox.files.write("/tmp/script", "#!/bin/sh\necho $1 $2\n", mode=0o755)
    assert (await sandbox.exec(["/tmp/script", "a", "b"])).stdout == "a b\n"


async def test_a_time_out_kills_the_command_and_keeps_its_output(sandbox: Sandbox) -> None:
    begun = time.monotonic()
    result = await sandbox.run_shell("echo before; sleep 1000", timeout=0.5)
    assert (result.timed_out, result.exit_code, result.stdout) == (True, 137, "before\n")
    assert time.monotonic() - begun < 10


async def test_a_time_out_kills_grandchildren_and_daemons(sandbox: Sandbox) -> None:
    result = await sandbox.exec([PROBE, "tree", "3"], timeout=1)
    assert result.timed_out
    assert len(result.stdout.split()) >= 4
    left = [p for p in await sandbox.processes() if "tree" in p.argv]
    assert left == []


async def test_the_time_limit_in_force_is_told(sandbox: Sandbox) -> None:
    assert (await sandbox.exec([PROBE, "exit", "0"])).timeout_s == 3600
    assert (await sandbox.exec([PROBE, "exit", "0"], timeout=7)).timeout_s == 7
    huge = await sandbox.exec([PROBE, "exit", "0"], timeout=29 * 86400)
    assert huge.timeout_s == 86400


@pytest.mark.parametrize("limit", [-1, 0])
async def test_a_senseless_time_limit_is_refused(sandbox: Sandbox, limit: float) -> None:
    with refusal(InvalidRequest):
        await sandbox.exec([PROBE, "exit", "0"], timeout=limit)


async def test_the_duration_is_told(sandbox: Sandbox) -> None:
    result = await sandbox.exec([PROBE, "sleep", "0.3"])
    assert 0.25 < result.duration_s < 5


async def test_kill_ends_the_whole_tree(sandbox: Sandbox) -> None:
    command = await sandbox.start([PROBE, "tree", "2"])
    await eventually(lambda: _count(sandbox, "tree", 4), "the tree has grown")
    view = await command.kill()
    assert (view.running, view.killed, view.exit_code) == (False, True, 137)
    assert not await _count(sandbox, "tree", 1)


async def _count(sandbox: Sandbox, word: str, at_least: int) -> bool:
    return sum(word in p.argv for p in await sandbox.processes()) >= at_least


async def test_kill_is_harmless_twice(sandbox: Sandbox) -> None:
    command = await sandbox.start([PROBE, "sleep", "1000"])
    for _ in range(2):
        assert (await command.kill()).exit_code == 137
    ended = await sandbox.start([PROBE, "exit", "0"])
    await ended.wait()
    assert (await ended.kill()).exit_code == 0


async def test_kill_beats_ignored_signals(sandbox: Sandbox) -> None:
    command = await sandbox.start([PROBE, "ignore-term"])
    await read_until(command, b"ready")
    for name in ("TERM", "INT", "HUP"):
        await command.signal(name)
    assert (await command.refresh()).running
    assert (await command.kill()).exit_code == 137


async def test_a_signal_to_an_ended_command_is_not_found(sandbox: Sandbox) -> None:
    command = await sandbox.start([PROBE, "exit", "0"])
    await command.wait()
    with refusal(NotFound):
        await command.signal("TERM")


async def test_a_nonsense_signal_is_refused(sandbox: Sandbox) -> None:
    command = await sandbox.start([PROBE, "sleep", "1000"])
    with refusal(InvalidRequest):
        await command.signal("NONSENSE")
    await command.kill()


async def test_a_started_command_goes_on_and_can_be_found_again(
    client: DSecClient, sandbox: Sandbox
) -> None:
    started = await sandbox.start(shell="sleep 0.3; echo done; /probe exit 6")
    elsewhere = await client.get(sandbox.id)
    command = await elsewhere.command(started.id)
    result = await command.wait()
    assert (result.exit_code, result.stdout) == (6, "done\n")
    again = await (await elsewhere.command(started.id)).wait()
    assert (again.exit_code, again.stdout) == (6, "done\n")


async def test_an_unknown_command_is_not_found(sandbox: Sandbox) -> None:
    with refusal(NotFound, kind="command"):
        await sandbox.command("never-started")


async def test_commands_are_listed_oldest_first(sandbox: Sandbox) -> None:
    for name in ("one", "two", "three"):
        await sandbox.exec([PROBE, "exit", "0"], command_id=name)
    assert [view.command_id for view in await sandbox.commands()] == ["one", "two", "three"]


async def test_the_same_id_runs_once(sandbox: Sandbox) -> None:
    for _ in range(3):
        result = await sandbox.run_shell("echo x >> /tmp/n; echo done", command_id="only")
        assert result.stdout == "done\n"
    assert await sandbox.files.read("/tmp/n") == b"x\n"


async def test_the_same_id_at_once_runs_once(sandbox: Sandbox) -> None:
    results: list[str] = []

    async def ask() -> None:
        line = "echo x >> /tmp/n; sleep 0.2; echo done"
        results.append((await sandbox.run_shell(line, command_id="only")).stdout)

    async with anyio.create_task_group() as group:
        for _ in range(10):
            group.start_soon(ask)
    assert results == ["done\n"] * 10
    assert await sandbox.files.read("/tmp/n") == b"x\n"


@pytest.mark.parametrize("name", ["has space", "a/b", "-x", "x" * 65, "é"])
async def test_a_bad_command_id_is_refused(sandbox: Sandbox, name: str) -> None:
    with refusal(InvalidRequest):
        await sandbox.exec([PROBE, "exit", "0"], command_id=name)


async def test_fifty_commands_at_once_keep_to_themselves(sandbox: Sandbox) -> None:
    tokens = {secrets.token_hex(8) for _ in range(50)}

    async def ask(token: str) -> None:
        result = await sandbox.exec([PROBE, "echo", token])
        assert result.stdout == token + "\n"
        tokens.discard(token)

    async with anyio.create_task_group() as group:
        for token in list(tokens):
            group.start_soon(ask, token)
    assert not tokens


async def test_fifty_sleepers_sleep_at_the_same_time(sandbox: Sandbox) -> None:
    begun = time.monotonic()
    async with anyio.create_task_group() as group:
        for _ in range(50):
            group.start_soon(sandbox.exec, [PROBE, "sleep", "1"])
    assert time.monotonic() - begun < 15


async def test_a_background_child_does_not_hold_up_its_command(sandbox: Sandbox) -> None:
    begun = time.monotonic()
    result = await sandbox.run_shell("sleep 30 & echo done")
    assert (result.stdout, result.ok) == ("done\n", True)
    assert time.monotonic() - begun < 5


async def test_what_a_command_left_behind_can_be_killed(sandbox: Sandbox) -> None:
    command = await sandbox.start(shell="sleep 4321 & echo done")
    await command.wait()
    assert await _count(sandbox, "4321", 1)
    await command.kill()
    assert not await _count(sandbox, "4321", 1)


@needs("shell")
async def test_output_of_a_loop_is_whole_and_in_order(sandbox: Sandbox) -> None:
    result = await sandbox.run_shell("i=0; while [ $i -lt 500 ]; do echo $i; i=$((i+1)); done")
    assert result.stdout.split() == [str(n) for n in range(500)]


async def test_exactly_one_of_argv_and_shell(sandbox: Sandbox) -> None:
    for given in ({}, {"argv": ["true"], "shell": "true"}):
        with refusal(InvalidRequest):
            await sandbox.start(**given)  # type: ignore[arg-type]
