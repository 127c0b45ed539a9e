"""Sessions: a shell that stays, and what is left of it when a command goes wrong."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.kernel.serving import PROBE, Client, Refused, Serving, eventually, serving

pytestmark = pytest.mark.needs_root


@pytest.fixture(scope="module", params=["bash", "dash", "no cgroup"])
def server(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Serving]:
    with serving(tmp_path_factory.mktemp("serve"), v2=request.param != "no cgroup") as server:
        server.shell = "/bin/dash" if request.param == "dash" else None  # type: ignore[attr-defined]
        yield server


@pytest.fixture
def client(server: Serving) -> Iterator[Client]:
    client = server.client()
    client.call("session_open", session_id="s", shell=server.shell)  # type: ignore[attr-defined]
    yield client
    client.close()
    last = server.client()
    last.call("session_close", session_id="s")
    last.close()
    if server.group is not None:
        eventually(lambda: not server.groups())


def run(client: Client, text: str | bytes, **args: Any) -> dict[str, Any]:
    return client.run(shell=text, session="s", **args)


def test_state_stays(client: Client) -> None:
    run(client, "cd /usr; A=1; export B=2; f() { echo f-$1; }; umask 077")
    result = run(client, "pwd; echo $A $B; f x; umask")
    assert result["out"] == b"/usr\n1 2\nf-x\n0077\n"
    assert (result["session"], result["argv"]) == ("s", ["pwd; echo $A $B; f x; umask"])
    assert not result["session_reset"]


def test_exit_codes_and_streams(client: Client) -> None:
    result = run(client, "echo out; echo err >&2; false")
    assert (result["out"], result["err"], result["exit_code"]) == (b"out\n", b"err\n", 1)
    assert run(client, "(exit 42)")["exit_code"] == 42
    assert run(client, "kill -9 $(sh -c 'echo $PPID') & wait $!")["exit_code"] in {0, 137}
    assert run(client, "")["exit_code"] == 0
    assert run(client, "# nothing")["exit_code"] == 0
    assert run(client, "no-such-command-here")["exit_code"] == 127


def test_the_last_status_stays(client: Client) -> None:
    for code in (1, 42, 0, 255):
        assert run(client, f"(exit {code})")["exit_code"] == code
        assert run(client, "echo $?")["out"] == b"%d\n" % code
        assert run(client, "echo $?")["out"] == b"0\n"
    run(client, "no-such-command-here")
    assert run(client, "")["exit_code"] == 0
    assert run(client, "echo $?")["out"] == b"0\n"
    # Traps and functions notice nothing of it, and stay.
    run(client, "f() { return 5; }; A=1; cd /usr; trap 'echo bye' EXIT")
    assert run(client, "f")["exit_code"] == 5
    run(client, "[ -z \"$BASH\" ] || trap 'echo trapped' ERR")
    assert run(client, '[ -z "$BASH" ] && f; f')["exit_code"] == 5
    result = run(client, "echo $? $A; pwd")
    assert (result["out"], result["err"]) == (b"5 1\n/usr\n", b"")
    run(client, '[ -z "$BASH" ] || trap - ERR')
    # What fails ends the shell that is to end then, what comes before it does not.
    assert run(client, "f")["exit_code"] == 5
    result = run(client, "echo $?; set -e")
    assert (result["out"], result["session_reset"]) == (b"5\n", False)
    result = run(client, "f || echo $?")
    assert (result["out"], result["session_reset"]) == (b"5\n", False)
    result = run(client, "f; echo never")
    assert (result["out"], result["exit_code"], result["session_reset"]) == (b"bye\n", 5, True)
    assert run(client, "echo $?")["out"] == b"0\n"
    run(client, "trap 'echo bye' EXIT")
    # A new shell knows nothing of it.
    result = run(client, "exit 3")
    assert (result["exit_code"], result["out"]) == (3, b"bye\n")
    assert run(client, "echo $?")["out"] == b"0\n"


@pytest.mark.parametrize(
    "text",
    [
        "echo 'it'\"'\"'s'",
        "cat <<'EOF'\na\n'b'\n\nEOF\n",
        "printf '%s' '\\'",
        'echo "a\nb"',
        "printf '\\001\\002\\377'",
    ],
    ids=range(5),
)
def test_text_is_taken_as_it_is(client: Client, text: str) -> None:
    wanted = client.run("/bin/bash", "-c", text)["out"]
    assert run(client, text)["out"] == wanted
    assert run(client, "echo fine")["out"] == b"fine\n"


def test_bytes_that_are_no_text(client: Client) -> None:
    assert run(client, b"printf '%s' '\xff\xfe'")["out"] == b"\xff\xfe"
    with pytest.raises(Refused):
        run(client, "a\0b")
    long = "x" * 300_000
    assert run(client, f"printf %s '{long}' | wc -c")["out"].split() == [b"300000"]


def test_argv(client: Client) -> None:
    result = client.run(str(PROBE), "args", "a b", "it's", "$HOME", session="s")
    assert result["out"] == b"3:a b\n4:it's\n5:$HOME\n"


@pytest.mark.parametrize("text", ["echo (", "if", 'echo "', "}", "fi", "echo $(", "<<"])
def test_syntax_errors_leave_the_session(client: Client, text: str) -> None:
    run(client, "A=kept")
    result = run(client, text)
    assert result["exit_code"] != 0
    assert result["err"]
    assert not result["session_reset"]
    assert run(client, "echo $A")["out"] == b"kept\n"


def test_standard_input_is_empty_and_control_is_out_of_reach(client: Client) -> None:
    assert run(client, "cat; read x; echo got=$x")["out"] == b"got=\n"
    fds = run(client, "readlink /proc/self/fd/0; ls /proc/self/fd | tr '\\n' ' '")["out"]
    assert fds.startswith(b"/dev/null\n")
    assert fds.split(b"\n")[1].split() == [b"0", b"1", b"2", b"3"]
    script = run(client, 'for i in 3 4 5 6 7; do eval "exec $i>/dev/null"; done; echo ok')
    assert script["out"] == b"ok\n"


def test_exit_ends_the_shell_and_says_so(client: Client) -> None:
    run(client, "cd /usr")
    result = run(client, "echo bye; exit 3")
    assert (result["exit_code"], result["session_reset"], result["out"]) == (3, True, b"bye\n")
    result = run(client, "pwd")
    assert (result["out"], result["session_reset"]) == (b"/\n", False)
    result = run(client, "kill -9 $$")
    assert (result["exit_code"], result["signal"], result["session_reset"]) == (137, 9, True)
    result = run(client, "exec true")
    assert (result["exit_code"], result["session_reset"]) == (0, True)
    assert run(client, "echo again")["out"] == b"again\n"


def test_a_shell_that_died_between_commands_is_told(client: Client) -> None:
    pid = client.call("session_list")[0]["pid"]
    client.run("kill", "-9", str(pid))
    eventually(lambda: client.call("session_list")[0]["pid"] == 0)
    result = run(client, "echo here")
    assert (result["out"], result["session_reset"]) == (b"here\n", True)
    assert not run(client, "true")["session_reset"]


def test_time_out_of_one_command_leaves_the_session(client: Client, server: Serving) -> None:
    run(client, "cd /usr")
    began = time.monotonic()
    result = run(client, f"cd /tmp && printf partial && {PROBE} tree 3 | cat", timeout_s=0.4)
    assert time.monotonic() - began < 1.4
    assert result["timed_out"]
    assert (result["exit_code"], result["signal"]) == (137, 9)
    assert result["out"].startswith(b"partial")
    # Without a cgroup it cannot be told what is the shell's and what is the command's.
    assert result["session_reset"] == (server.group is None)
    assert run(client, "pwd")["out"] == (b"/\n" if server.group is None else b"/tmp\n")
    shells = {client.call("session_list")[0]["pid"], 1}
    eventually(lambda: {p["pid"] for p in client.call("processes")} == shells)


def test_what_would_come_after_a_time_out_never_runs(client: Client, tmp_path: Path) -> None:
    result = run(client, f"sleep 60; touch {tmp_path}/ran", timeout_s=0.2)
    assert (result["timed_out"], result["session_reset"]) == (True, True)
    assert run(client, "echo on")["out"] == b"on\n"
    assert not (tmp_path / "ran").exists()


def test_a_shell_that_loops_is_replaced(client: Client) -> None:
    began = time.monotonic()
    result = run(client, "while :; do :; done", timeout_s=0.2)
    assert (result["timed_out"], result["session_reset"]) == (True, True)
    result = run(client, "trap '' TERM INT && cat <&9", timeout_s=0.2)
    assert time.monotonic() - began < 5
    assert run(client, "echo on")["out"] == b"on\n"


def test_a_command_in_the_shell_itself_that_does_not_come_back(
    client: Client, tmp_path: Path
) -> None:
    fifo = tmp_path / "fifo"
    client.run("mkfifo", str(fifo))
    began = time.monotonic()
    result = run(client, f"read x <{fifo}", timeout_s=0.2)
    assert time.monotonic() - began < 3
    assert (result["timed_out"], result["session_reset"]) == (True, True)
    assert run(client, "echo on")["out"] == b"on\n"


def test_closing_the_control_descriptor_is_no_hang(client: Client) -> None:
    run(client, "exec 63>&- 8>&-")
    result = run(client, "eval 'exec 63>&- 8>&- 10>&- 11>&- 12>&-'; echo said", timeout_s=2)
    assert result["exit_code"] is not None
    assert run(client, "echo on", timeout_s=5)["out"] == b"on\n"


def test_one_at_a_time(client: Client) -> None:
    client.call("start", command_id="long-s", shell="sleep 60", session="s")
    assert client.call("session_list")[0]["busy"]
    with pytest.raises(Refused) as caught:
        run(client, "true")
    assert caught.value.code == "conflict"
    view = client.call("kill", command_id="long-s")
    assert (view["killed"], view["signal"]) == (True, 9)
    assert run(client, "true")["exit_code"] == 0


def test_background_output_is_not_the_next_commands(client: Client) -> None:
    run(client, "(sleep 0.2; echo stray) & true")
    time.sleep(0.3)
    assert run(client, "echo mine")["out"] == b"mine\n"


def test_signal(client: Client) -> None:
    client.call("start", command_id="sig", shell="sleep 60", session="s")
    time.sleep(0.1)
    if client.call("session_list"):
        try:
            client.call("signal", command_id="sig", signal=15)
        finally:
            client.call("kill", command_id="sig")


def test_flood(client: Client) -> None:
    result = run(client, f"{PROBE} flood {8 << 20}")
    assert result["stdout_bytes"] == 8 << 20
    assert len(result["out"]) == 1 << 20
    assert run(client, "echo on")["out"] == b"on\n"


def test_refusals(client: Client) -> None:
    args: dict[str, Any]
    for args in (
        {"user": "nobody"},
        {"pty": {}},
        {"stdin": "pipe"},
        {"cwd": "/"},
        {"env": {"A": "1"}},
    ):
        with pytest.raises(Refused) as caught:
            run(client, "true", **args)
        assert caught.value.code == "invalid_request"
    for args, kind in (
        ({"shell": "/no/shell"}, "executable"),
        ({"cwd": "/no"}, "cwd"),
        ({"user": "zed"}, "user"),
    ):
        with pytest.raises(Refused) as caught:
            client.call("session_open", session_id="bad", **args)
        assert (caught.value.code, caught.value.kind) == ("not_found", kind)
    with pytest.raises(Refused) as caught:
        client.call("session_close", session_id="bad")
    assert caught.value.kind == "session"
    again = client.call("session_open", session_id="s")
    assert again == client.call("session_list")[0]


def test_user_directory_and_environment(client: Client) -> None:
    client.call("session_open", session_id="t", user="nobody", cwd="/usr", env={"MINE": "1"})
    result = client.run(shell="id -u; pwd; echo $MINE", session="t")
    assert result["out"] == b"65534\n/usr\n1\n"
    client.call("session_close", session_id="t")


def test_close_ends_everything(client: Client, server: Serving) -> None:
    client.call("session_open", session_id="u")
    run_in = client.open("run", command_id="in-u", shell=f"{PROBE} tree 2", session="u")
    eventually(lambda: client.call("view", command_id="in-u")["stdout_bytes"] > 3)
    time.sleep(0.1)
    client.call("session_close", session_id="u")
    result = run_in.result()
    assert (result["killed"], result["session_reset"]) == (True, True)
    shells = {client.call("session_list")[0]["pid"], 1}
    eventually(lambda: {p["pid"] for p in client.call("processes")} == shells)


def test_sessions_outlive_the_connection(client: Client, server: Serving) -> None:
    run(client, "cd /usr; A=5")
    other = server.client()
    assert other.run(shell="pwd; echo $A", session="s")["out"] == b"/usr\n5\n"
