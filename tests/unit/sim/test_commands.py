"""Commands of the simulated aether, at the level of frames."""

from __future__ import annotations

import anyio
import pytest

from dsec.wire.frames import Kind
from tests.unit.sim.client import Client, Failed, connected, joined, record


async def processes(client: Client) -> int:
    return len(await client.call("processes"))


async def test_run_returns_output_and_exit_code() -> None:
    async with connected() as client:
        result = await client.run("/probe", "both")
        assert (joined(result, "stdout"), joined(result, "stderr")) == (b"out\n", b"err\n")
        assert (await client.run("/probe", "exit", "7"))["exit_code"] == 7


async def test_an_hour_of_sleep_is_cut_by_its_time_out() -> None:
    async with connected() as client:
        result = await client.run("sleep", "3600", timeout_s=0.05)
        assert result["timed_out"]
        assert result["exit_code"] == 137
        assert await processes(client) == 1


async def test_a_time_out_kills_daemons_and_keeps_output() -> None:
    async with connected() as client:
        result = await client.run("/probe", "tree", "3", timeout_s=0.05)
        assert len(joined(result, "stdout").split()) == 5
        assert await processes(client) == 1


async def test_the_same_id_is_the_same_run() -> None:
    async with connected() as client:
        first = await client.call("start", command_id="a", shell="echo x >> /tmp/n; sleep 0.01")
        again = await client.call("start", command_id="a", shell="echo x >> /tmp/n")
        assert first["pid"] == again["pid"]
        await client.call("wait", command_id="a")
        assert (await client.shell("cat /tmp/n"))[1] == "x\n"


@pytest.mark.parametrize(
    ("argv", "more", "code", "kind"),
    [
        (["/missing"], {}, "not_found", "executable"),
        (["missing"], {}, "not_found", "executable"),
        (["/etc/passwd"], {}, "permission_denied", ""),
        (["true"], {"cwd": "/missing"}, "not_found", "cwd"),
        (["true"], {"cwd": "/etc/passwd"}, "invalid_request", ""),
        (["true"], {"user": "ghost"}, "not_found", "user"),
        (["true"], {"timeout_s": -1.0}, "invalid_request", ""),
        ([], {}, "invalid_request", ""),
    ],
)
async def test_a_bad_start_says_what_is_wrong(
    argv: list[str], more: dict[str, object], code: str, kind: str
) -> None:
    async with connected() as client:
        with pytest.raises(Failed) as caught:
            await client.run(*argv, **more)
        assert (caught.value.code, caught.value.kind) == (code, kind)
        assert await processes(client) == 1


async def test_output_beyond_the_limit_keeps_head_and_tail() -> None:
    async with connected() as client:
        result = await client.run("/probe", "flood", "1000003", output_limit_bytes=1000)
        out = result["stdout"]
        assert (len(out["head"]), len(out["tail"]), out["dropped_bytes"]) == (500, 500, 999003)
        assert result["stdout_bytes"] == 1000003


async def test_a_reader_without_credit_gets_a_gap() -> None:
    async with connected() as client:
        await client.call(
            "start", command_id="a", argv=["/probe", "flood", "3000000"], output_limit_bytes=10000
        )
        await client.call("wait", command_id="a")
        call = await client.open("attach", command_id="a", stdout_from=0, stderr_from=0)
        await call.result()
        kinds = [next(iter(event)) for event in call.events]
        assert kinds == ["started", "gap", "exited"]
        assert call.events[1]["gap"]["dropped_bytes"] == 2990000
        assert len(call.received[1]) == 10000


async def test_attach_goes_on_from_an_offset() -> None:
    async with connected() as client:
        await client.call("start", command_id="a", argv=["/probe", "bytes"])
        call = await client.open("attach", command_id="a", stdout_from=200, stderr_from=0)
        await call.result()
        assert bytes(call.received[1]) == bytes(range(200, 256))


async def test_stdin_reaches_the_command_and_ends() -> None:
    async with connected() as client:
        await client.call("start", command_id="a", argv=["cat"], stdin="pipe")
        assert (await client.send_all("stdin", b"abc", command_id="a"))["written"] == 3
        await client.send_all("stdin", b"def", command_id="a", eof=True)
        assert joined(await client.call("wait", command_id="a"), "stdout") == b"abcdef"
        with pytest.raises(Failed) as caught:
            await client.send_all("stdin", b"x", command_id="a")
        assert caught.value.code == "conflict"


async def test_ctrl_c_on_a_terminal_interrupts() -> None:
    async with connected() as client:
        await client.call(
            "start", command_id="a", argv=["/probe", "tty", "watch"], pty={"rows": 5, "cols": 6}
        )
        call = await client.open("attach", command_id="a", stdout_from=0, stderr_from=0)
        while b"\n" not in call.received.get(1, b""):
            await call.next()
        assert b"5 6" in call.received[1]
        await client.send_all("stdin", b"\x03", command_id="a")
        result = await client.call("wait", command_id="a")
        assert (result["exit_code"], result["signal"]) == (130, 2)


async def test_a_resize_reaches_the_program() -> None:
    async with connected() as client:
        await client.call("start", command_id="a", argv=["/probe", "tty", "watch"], pty={})
        call = await client.open("attach", command_id="a", stdout_from=0, stderr_from=0)
        while b"\n" not in call.received.get(1, b""):
            await call.next()
        await client.call("resize", command_id="a", rows=50, cols=132)
        result = await client.call("wait", command_id="a")
        assert b"50 132" in joined(result, "stdout")


async def test_cancel_detaches_and_the_command_goes_on() -> None:
    async with connected() as client:
        call = await client.open("run", command_id="a", shell="sleep 0.05; echo done")
        await call.send(Kind.CANCEL)
        with pytest.raises(Failed) as caught:
            await call.result()
        assert caught.value.code == "cancelled"
        assert joined(await client.call("wait", command_id="a"), "stdout") == b"done\n"


async def test_kill_beats_ignored_signals() -> None:
    async with connected() as client:
        await client.call("start", command_id="a", argv=["/probe", "ignore-term"])
        await client.call("signal", command_id="a", signal=15)
        assert (await client.call("view", command_id="a"))["running"]
        view = await client.call("kill", command_id="a")
        assert (view["killed"], view["exit_code"]) == (True, 137)
        assert not (await client.call("kill", command_id="a")).get("running", False)


async def test_a_background_child_is_left_and_can_be_killed() -> None:
    async with connected() as client:
        code, _ = await client.shell("sleep 1000 & echo $!")
        assert code == 0
        assert await processes(client) == 2
        await client.call("kill", command_id="c0")
        assert await processes(client) == 1


async def test_memory_beyond_the_limit_is_an_oom_kill() -> None:
    async with connected() as client:
        result = await client.run("/probe", "alloc", "4096")
        assert (result["oom_killed"], result["exit_code"]) == (True, 137)
        assert (await client.call("usage"))["oom_kills"] == 1


async def test_a_fork_bomb_stops_at_the_pids_limit() -> None:
    async with connected() as client:
        result = await client.run("/probe", "forkbomb", "1000")
        assert result["exit_code"] == 0
        assert await processes(client) <= 64


async def test_environment_is_image_then_sandbox_then_command() -> None:
    rec = record(env={"FROM": "sandbox", "BOTH": "sandbox"})
    async with connected(rec) as client:
        _, text = await client.shell("echo $ONLY $FROM $BOTH", env={"BOTH": "command"})
        assert text == "image sandbox command\n"


@pytest.mark.parametrize(
    ("text", "status", "out"),
    [
        ("echo 'a  b' \"c $HOME\" d\\ e", 0, "a  b c /root d e\n"),
        ("false || echo no && echo yes", 0, "no\nyes\n"),
        ("false; echo $?", 0, "1\n"),
        ("cd /tmp; pwd", 0, "/tmp\n"),
        ("cd /missing || exit 9", 9, ""),
        ("A=1; export B=2; echo $A$B; env | cat | head -n 0", 0, "12\n"),
        ("echo one > /tmp/f; echo two >> /tmp/f; cat < /tmp/f", 0, "one\ntwo\n"),
        ("/probe both 2>&1", 0, "out\nerr\n"),
        ("/probe both > /dev/null", 0, ""),
        ("seq 5 | head -n 2 | cat", 0, "1\n2\n"),
        ("yes | head -n 2", 0, "y\ny\n"),
        ("(cd /tmp; pwd); pwd", 0, "/tmp\n/\n"),
        ("nonsense", 127, ""),
        ("/etc/passwd", 126, ""),
        ("echo 'open", 2, ""),
        ("sleep 0.01 & wait; echo after", 0, "after\n"),
        ("printf '%s-%s\\n' a b", 0, "a-b\n"),
        ("sh -c 'echo $1 $0' name arg; echo \\$HOME", 0, "arg name\n$HOME\n"),
        ("A=x sh -c 'echo $A'; echo -n end", 0, "x\nend"),
        ("sleep 1000 & kill -9 $!; wait $!; echo $?", 0, "137\n"),
    ],
)
async def test_the_tiny_shell(text: str, status: int, out: str) -> None:
    async with connected() as client:
        assert await client.shell(text) == (status, out)


async def test_a_session_keeps_directory_and_variables() -> None:
    async with connected() as client:
        await client.call("session_open", session_id="s")
        await client.call("run", command_id="1", session="s", shell="cd /tmp; A=1; export B=2")
        result = await client.call("run", command_id="2", session="s", shell="echo $A $B $PWD")
        assert joined(result, "stdout") == b"1 2 /tmp\n"


async def test_exit_resets_a_session() -> None:
    async with connected() as client:
        await client.call("session_open", session_id="s")
        result = await client.call("run", command_id="1", session="s", shell="cd /tmp; exit 5")
        assert (result["exit_code"], result["session_reset"]) == (5, True)
        result = await client.call("run", command_id="2", session="s", shell="pwd")
        assert joined(result, "stdout") == b"/\n"


async def test_a_busy_session_is_a_conflict_and_a_time_out_frees_it() -> None:
    async with connected() as client:
        await client.call("session_open", session_id="s")
        await client.call(
            "start", command_id="1", session="s", shell="cd /tmp; sleep 100", timeout_s=0.05
        )
        with pytest.raises(Failed) as caught:
            await client.call("run", command_id="2", session="s", shell="true")
        assert caught.value.code == "conflict"
        assert (await client.call("wait", command_id="1"))["timed_out"]
        result = await client.call("run", command_id="3", session="s", shell="pwd")
        assert joined(result, "stdout") == b"/tmp\n"


async def test_closing_a_session_ends_its_processes() -> None:
    async with connected() as client:
        await client.call("session_open", session_id="s")
        await client.call("run", command_id="1", session="s", shell="sleep 1000 &")
        await client.call("start", command_id="2", session="s", shell="/probe tree 1")
        await anyio.wait_all_tasks_blocked()
        await client.call("session_close", session_id="s")
        assert await processes(client) == 1
        assert await client.call("session_list") == []


async def test_a_port_echoes_and_ends() -> None:
    async with connected() as client:
        await client.call("start", command_id="a", argv=["/probe", "listen", "80"])
        with pytest.raises(Failed) as caught:
            await client.call("connect", port=81)
        assert (caught.value.code, caught.value.kind) == ("not_found", "port")
        call = await client.open("connect", port=80)
        await call.send(Kind.DATA, b"hello")
        await call.send(Kind.END)
        assert await call.result() is None
        assert bytes(call.received[0]) == b"hello"


async def test_shutdown_ends_aether() -> None:
    async with connected() as client:
        await client.call("start", command_id="a", argv=["/probe", "ignore-term"])
        await client.call("shutdown", grace_s=0.01)
        await client.closed.wait()


async def test_ping_is_answered_and_a_broken_peer_dropped() -> None:
    async with connected() as client:
        await client.send(frame(Kind.PING, 0, b"12345"))
        call = await client.open("write", path=b"/tmp/x")
        for _ in range(5):
            await call.send(Kind.DATA, bytes(1 << 16))
        await client.call("list")
        assert client.pongs == [b"12345"]
        await client.send(frame(Kind.DATA, call.number, bytes(1 << 20)))
        await client.closed.wait()


def frame(kind: Kind, stream: int, payload: bytes):  # type: ignore[no-untyped-def]  # noqa: ANN201
    from dsec.wire.frames import Frame

    return Frame(kind, stream, payload)
