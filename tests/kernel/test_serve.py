"""Commands of `aether serve`: each line of the pains list that is about commands is a test here."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from dsec.wire.frames import Frame, Kind
from tests.kernel.serving import PROBE, Client, Refused, Serving, eventually, serving

pytestmark = pytest.mark.needs_root


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    with serving(tmp_path_factory.mktemp("serve"), env={"FROM_SPEC": "1"}) as server:
        yield server


@pytest.fixture
def client(server: Serving) -> Iterator[Client]:
    client = server.client()
    yield client
    client.close()
    # Nothing any test starts stays behind.
    assert server.group is not None
    for pid in server.members():
        os.kill(pid, 9)
    eventually(lambda: not server.groups())


def refusal(client: Client, **args: Any) -> tuple[str, str | None]:
    with pytest.raises(Refused) as caught:
        client.run(**args)
    return caught.value.code, caught.value.kind


def test_output_and_exit_code(client: Client) -> None:
    result = client.probe("both")
    assert (result["out"], result["err"], result["exit_code"]) == (b"out\n", b"err\n", 0)
    assert client.probe("exit", "7")["exit_code"] == 7
    assert client.run(shell="kill -TERM $$")["exit_code"] == 143
    assert client.run(shell="kill -TERM $$")["signal"] == 15
    assert client.probe("bytes")["out"] == bytes(range(256))
    assert not result["timed_out"]
    assert result["timeout_s"] == 60.0


def test_arguments_arrive_as_they_are(client: Client) -> None:
    args = ["", "a b", "$HOME", "new\nline", "é", "*"]
    wanted = b"".join(b"%d:%s\n" % (len(a.encode()), a.encode()) for a in args)
    assert client.probe("args", *args)["out"] == wanted
    result = client.run(str(PROBE), "args", b"\xff\xfe")
    assert result["out"] == b"2:\xff\xfe\n"


def test_many_arguments_and_variables(client: Client) -> None:
    args = ["x" * 90] * 9000
    assert client.probe("args", *args)["stdout_bytes"] == 9000 * 94
    env = {f"NAME_{i}": str(i) for i in range(10_000)}
    out = client.probe("env", env=env)["out"]
    assert {f"{k}={v}".encode() for k, v in env.items()} < set(out.splitlines())
    # A single argument has a limit of the kernel's own.
    assert refusal(client, argv=[str(PROBE), "args", "x" * 200_000])[0] == "payload_too_large"


def test_environment(client: Client) -> None:
    lines = client.probe("env", env={"HOME": "/x", "MINE": "a=b\nc"})["out"]
    assert b"HOME=/x\n" in lines
    assert b"MINE=a=b\nc\n" in lines
    assert b"FROM_SPEC=1\n" in lines
    assert b"USER=root\n" in lines
    assert b"TERM=" not in lines
    assert b"DSEC" not in lines
    assert refusal(client, argv=["true"], env={"A=B": "x"})[0] == "invalid_request"
    assert refusal(client, argv=["true"], env={"A": "x\0"})[0] == "invalid_request"


def test_refusals(client: Client, tmp_path: Path) -> None:
    plain = tmp_path / "plain"
    plain.write_text("#!/no/such/interpreter\n")
    assert refusal(client, argv=["no-such-thing"]) == ("not_found", "executable")
    assert refusal(client, argv=["/no/such/thing"]) == ("not_found", "executable")
    assert refusal(client, argv=[str(plain)])[0] == "permission_denied"
    plain.chmod(0o755)
    assert refusal(client, argv=[str(plain)]) == ("not_found", "executable")
    plain.write_text("no program at all\n")
    assert refusal(client, argv=[str(plain)])[0] == "invalid_request"
    assert refusal(client, argv=["true"], cwd="/no/such") == ("not_found", "cwd")
    assert refusal(client, argv=["true"], cwd=str(plain))[0] == "invalid_request"
    assert refusal(client, argv=["true"], user="nobody-here") == ("not_found", "user")
    assert refusal(client, argv=["true"], shell="true")[0] == "invalid_request"
    assert refusal(client)[0] == "invalid_request"
    assert refusal(client, argv=[])[0] == "invalid_request"
    assert refusal(client, argv=["a\0b"])[0] == "invalid_request"
    assert refusal(client, argv=["true"], timeout_s=-1)[0] == "invalid_request"
    assert refusal(client, argv=["true"], session="none") == ("not_found", "session")
    with pytest.raises(Refused, match="no command"):
        client.call("view", command_id="none")


def test_a_failed_start_leaves_its_id_free(client: Client) -> None:
    with pytest.raises(Refused):
        client.run("no-such-thing", command_id="again")
    assert client.run("true", command_id="again")["exit_code"] == 0


def test_users(client: Client, tmp_path: Path) -> None:
    tmp_path.chmod(0o700)
    ids = msgspec.json.decode(client.probe("id", user="nobody")["out"])
    assert ids["uid"] == 65534
    ids = msgspec.json.decode(client.probe("id", user="1234:50")["out"])
    assert ids == {"uid": 1234, "gid": 50, "groups": [50]}
    ids = msgspec.json.decode(client.probe("id", user=1234)["out"])
    assert ids["uid"] == 1234
    assert client.probe("env", "HOME", user="nobody")["out"] == b"/nonexistent\n"
    # Judged as the user, not as whoever starts it.
    assert (
        refusal(client, argv=["true"], user="nobody", cwd=str(tmp_path))[0] == "permission_denied"
    )
    status = msgspec.json.decode(client.probe("report", user="nobody")["out"])["status"]
    assert status["CapEff"] == "0" * 16
    assert status["CapPrm"] == "0" * 16
    assert status["SigBlk"] == "0" * 16
    # Not by the probe: the runtime of Rust ignores SIGPIPE itself.
    assert client.run("grep", "SigIgn", "/proc/self/status")["out"].split()[1] == b"0" * 16


def test_nothing_of_ours_is_inherited(client: Client) -> None:
    report = msgspec.json.decode(client.probe("report")["out"])
    assert report["fds"].keys() == {"0", "1", "2"}
    assert report["fds"]["0"] == "/dev/null"
    assert int(report["status"]["NSpid"].split()[-1]) == report["pid"]
    assert report["oom_score_adj"] == "500"


def test_stdin_is_null_unless_asked_for(client: Client) -> None:
    assert client.probe("cat", timeout_s=5)["exit_code"] == 0
    data = os.urandom(600_000)
    result = client.probe("cat", input=data)
    assert result["stdout_bytes"] == len(data)
    assert result["out"] == data


def test_stdin_stream(client: Client) -> None:
    client.call("start", command_id="in", argv=[str(PROBE), "cat"], stdin="pipe")
    reader = client.open("attach", command_id="in")
    assert reader.event()["started"]["running"]
    data = os.urandom(3 << 20)
    first = client.open("stdin", command_id="in")
    first.send(data[: 1 << 20])
    with pytest.raises(Refused) as caught:
        client.open("stdin", command_id="in").result()
    assert caught.value.code == "conflict"
    first.end()
    assert first.result() == {"written": 1 << 20}
    second = client.open("stdin", command_id="in", eof=True)
    second.send(data[1 << 20 :])
    second.end()
    assert second.result() == {"written": 2 << 20}
    _, events, received = reader.finish()
    assert received[1] == data
    assert events[-1]["exited"]["exit_code"] == 0
    with pytest.raises(Refused) as caught:
        client.open("stdin", command_id="in").result()
    assert caught.value.code == "conflict"


def test_input_that_is_sent_again_is_taken_once(client: Client) -> None:
    client.call("start", command_id="again-in", argv=[str(PROBE), "cat"], stdin="pipe")
    data = os.urandom(1 << 20)
    first = client.open("stdin", command_id="again-in", offset=0)
    first.send(data[:300_000])
    first.end()
    assert first.result() == {"written": 300_000}
    with pytest.raises(Refused) as caught:
        client.open("stdin", command_id="again-in", offset=300_001).result()
    assert (caught.value.code, caught.value.kind) == ("conflict", "offset")
    again = client.open("stdin", command_id="again-in", offset=100_000)
    again.send(data[100_000:600_000])
    again.end()
    assert again.result() == {"written": 300_000}
    idle = client.open("stdin", command_id="again-in", offset=600_000)
    rest = client.open("stdin", command_id="again-in", offset=0, eof=True)  # takes over
    with pytest.raises(Refused) as caught:
        idle.result()
    assert caught.value.code == "cancelled"
    rest.send(data)
    rest.end()
    assert rest.result() == {"written": (1 << 20) - 600_000}
    assert client.call("wait", command_id="again-in")["stdout_bytes"] == 1 << 20
    over = client.open("stdin", command_id="again-in", offset=0, eof=True)
    over.send(data)
    over.end()
    assert over.result() == {"written": 0}
    beyond = client.open("stdin", command_id="again-in", offset=0, eof=True)
    beyond.send(data + b"x")
    with pytest.raises(Refused) as caught:
        beyond.result()
    assert caught.value.code == "conflict"


def end_of_input(client: Client, command: str, data: bytes = b"") -> Any:
    """The answer to `stdin` with eof."""
    stream = client.open("stdin", command_id=command, eof=True)
    stream.send(data)
    if not stream.over:
        stream.end()
    return stream.result(5)


def test_the_end_of_stdin_may_be_said_again(client: Client) -> None:
    client.call("start", command_id="over", shell="cat; read x <&0; sleep 60", stdin="pipe")
    assert end_of_input(client, "over", b"all of it") == {"written": 9}
    for _ in range(2):
        assert end_of_input(client, "over") == {"written": 0}
        with pytest.raises(Refused) as caught:
            end_of_input(client, "over", b"more")
        assert caught.value.code == "conflict"
    client.call("kill", command_id="over")
    assert end_of_input(client, "over") == {"written": 0}
    with pytest.raises(Refused) as caught:
        end_of_input(client, "over", b"more")
    assert caught.value.code == "conflict"
    # One that never had any.
    client.run("true", command_id="never")
    with pytest.raises(Refused) as caught:
        end_of_input(client, "never")
    assert caught.value.code == "conflict"


@pytest.mark.parametrize("holder", ["", "sleep 5 <&0 >/dev/null 2>&1 & "], ids=["alone", "held"])
def test_stdin_ends_with_its_command(client: Client, holder: str) -> None:
    name = f"short-{len(holder)}"
    shell = f"{holder}head -c 100000 >/dev/null"
    client.call("start", command_id=name, shell=shell, stdin="pipe")
    stream = client.open("stdin", command_id=name, eof=True)
    # More than pipe and credit hold, and no END: it has to end by itself.
    stream.send(bytes(2 << 20))
    assert stream.over
    assert 100_000 <= stream.result(5)["written"] < 2 << 20
    # All was taken, and nothing more is coming.
    client.call("start", command_id=f"{name}-2", shell=f"{holder}sleep 0.3", stdin="pipe")
    stream = client.open("stdin", command_id=f"{name}-2")
    stream.send(b"some")
    assert stream.result(5) == {"written": 4}
    client.call("kill", command_id=name)
    client.call("kill", command_id=f"{name}-2")


def test_stdin_of_what_could_not_be_started(client: Client) -> None:
    begun = client.open("run", command_id="none", argv=["/no/such"], stdin="pipe")
    stream = client.open("stdin", command_id="none", eof=True)
    with pytest.raises(Refused) as caught:
        begun.result(5)
    assert (caught.value.code, caught.value.kind) == ("not_found", "executable")
    with pytest.raises(Refused) as caught:
        stream.result(5)
    assert caught.value.code == "not_found"


def test_stdin_of_a_command_that_does_not_read(client: Client) -> None:
    client.call("start", command_id="deaf", argv=["sleep", "60"], stdin="pipe")
    stream = client.open("stdin", command_id="deaf")
    for _ in range(2):
        client.send(Frame(Kind.DATA, stream.number, bytes(100_000)))
    stream.end()
    client.call("kill", command_id="deaf")
    assert stream.result()["written"] == 65536
    client.call("start", command_id="null", argv=["sleep", "60"])
    with pytest.raises(Refused) as caught:
        client.open("stdin", command_id="null").result()
    assert caught.value.code == "conflict"
    client.call("kill", command_id="null")


@pytest.mark.parametrize("v2", [True, False], ids=["cgroup", "no cgroup"])
def test_time_out_ends_the_whole_tree(tmp_path: Path, v2: bool) -> None:
    with serving(tmp_path, v2=v2) as server:
        client = server.client()
        result = client.probe("tree", "4", timeout_s=0.5)
        assert result["timed_out"]
        assert (result["exit_code"], result["signal"]) == (137, 9)
        pids = result["out"].split()
        assert len(pids) == 6, "what it said before comes back"
        assert result["duration_s"] < 1.5
        client.call("kill", command_id=result["command_id"])
        assert [p["pid"] for p in client.call("processes")] == [1]


def test_kill_ends_the_whole_tree(client: Client, server: Serving) -> None:
    client.call("start", command_id="tree", argv=[str(PROBE), "tree", "10"])
    eventually(lambda: client.call("view", command_id="tree")["stdout_bytes"] > 20)
    eventually(lambda: len(server.members()) == 12)
    view = client.call("kill", command_id="tree")
    assert (view["killed"], view["running"], view["signal"]) == (True, False, 9)
    assert server.members() == []
    assert client.call("kill", command_id="tree") == view


def test_kill_of_a_fork_bomb(client: Client, server: Serving) -> None:
    client.call("start", command_id="bomb", argv=[str(PROBE), "forkbomb", "500"])
    eventually(lambda: client.call("view", command_id="bomb")["stdout_bytes"] > 0)
    client.call("kill", command_id="bomb")
    assert server.members() == []


def test_ignoring_term_helps_nothing(client: Client) -> None:
    client.call("start", command_id="deaf-to-term", argv=[str(PROBE), "ignore-term"])
    reader = client.open("attach", command_id="deaf-to-term", stdout_from=0)
    assert reader.event()["started"]["command_id"] == "deaf-to-term"
    assert reader.next().payload == b"ready\n"
    client.call("signal", command_id="deaf-to-term", signal=15)
    client.call("signal", command_id="deaf-to-term", signal=1)
    assert client.call("view", command_id="deaf-to-term")["running"]
    assert client.call("kill", command_id="deaf-to-term")["signal"] == 9
    with pytest.raises(Refused) as caught:
        client.call("signal", command_id="deaf-to-term", signal=15)
    assert caught.value.code == "not_found"


def test_signal_reaches_the_group(client: Client) -> None:
    client.call("start", command_id="group", shell="sleep 60; echo never")
    client.call("signal", command_id="group", signal=2)
    assert client.call("wait", command_id="group")["signal"] == 2


def test_a_background_child_does_not_hold_up_the_end(client: Client, server: Serving) -> None:
    began = time.monotonic()
    result = client.run(shell="echo before; sleep 60 & echo after", command_id="bg")
    assert 0.2 < time.monotonic() - began < 0.6
    assert result["out"] == b"before\nafter\n"
    assert len(server.members()) == 1, "it goes on"
    began = time.monotonic()
    client.run(shell="sleep 60 >/dev/null 2>&1 </dev/null & echo quick", command_id="bg2")
    assert time.monotonic() - began < 0.2
    assert not client.call("kill", command_id="bg")["killed"]
    client.call("kill", command_id="bg2")
    assert server.members() == []


def test_a_background_child_may_go_on_writing(client: Client, server: Serving) -> None:
    result = client.run(
        shell="(sleep 0.4; for i in 1 2 3; do echo late; done; sleep 60) & exit 0",
        command_id="late",
    )
    assert result["exit_code"] == 0
    time.sleep(0.4)
    assert server.members(), "no SIGPIPE"
    assert client.call("view", command_id="late")["stdout_bytes"] == 0
    client.call("kill", command_id="late")


def test_the_last_bytes_are_never_lost(client: Client) -> None:
    for i in range(100):
        size = 1000 * i + 1
        result = client.probe("flood", str(size))
        assert result["stdout_bytes"] == len(result["out"]) == size


def test_time_limits(client: Client) -> None:
    assert client.run("true", timeout_s=10**6)["timeout_s"] == 120.0
    assert client.run("true")["timeout_s"] == 60.0
    result = client.run(shell="printf partial; sleep 60", timeout_s=0.2)
    assert (result["timed_out"], result["out"]) == (True, b"partial")


def test_flood_is_bounded_and_never_blocks(tmp_path: Path) -> None:
    with serving(tmp_path) as server:
        flood_and_ask(server, server.client())


def flood_and_ask(server: Serving, client: Client) -> None:
    client.call("start", command_id="yes", shell="yes")
    client.call("start", command_id="yes2", shell="yes >&2")
    worst = 0.0
    end = time.monotonic() + 2
    while time.monotonic() < end:
        began = time.monotonic()
        client.call("view", command_id="yes")
        worst = max(worst, time.monotonic() - began)
        assert server.rss_kib() < 8 * 1024
    assert worst < 0.2
    assert client.call("view", command_id="yes")["stdout_bytes"] > 50 << 20
    client.call("kill", command_id="yes")
    client.call("kill", command_id="yes2")
    stream = client.open("wait", command_id="yes")
    result, _, data = stream.finish()
    assert result["stdout"]["head_bytes"] == result["stdout"]["tail_bytes"] == 1 << 19
    assert len(data[1]) == 1 << 20
    kept = result["stdout"]["head_bytes"] + result["stdout"]["tail_bytes"]
    assert kept + result["stdout"]["dropped_bytes"] == result["stdout_bytes"]


def test_head_and_tail(client: Client) -> None:
    result = client.probe("flood", str(16 * 1000), output_limit_bytes=64)
    assert result["stdout"]["head"] == b"000000000000000\n000000000000001\n"
    assert result["stdout"]["tail"] == b"000000000000998\n000000000000999\n"
    assert result["stdout"]["dropped_bytes"] == 16 * 996
    result = client.probe("flood", "100", output_limit_bytes=0)
    assert result["stdout"] == {"head": b"", "tail": b"", "dropped_bytes": 100}


def test_attach_delivers_everything_across_connections(client: Client, server: Serving) -> None:
    size = 40 << 20
    argv = [str(PROBE), "flood", str(size)]
    # Slow enough to be cut in the middle.
    shell = f"{argv[0]} flood {size // 2}; sleep 0.3; {argv[0]} flood {size // 2}"
    client.call("start", command_id="long", shell=shell, output_limit_bytes=64 << 20)
    first = client.open("attach", command_id="long", stdout_from=0, stderr_from=0)
    assert first.event()["started"]["running"]
    data = bytearray()
    while len(data) < 3 << 20:
        frame = first.next()
        assert frame.kind is Kind.DATA
        data += frame.payload
    client.socket.close()
    again = server.client()
    second = again.open("attach", command_id="long", stdout_from=len(data), stderr_from=0)
    _, events, rest = second.finish()
    assert "gap" not in events[1]
    data += rest[1]
    assert len(data) == size
    lines = b"".join(b"%015d\n" % i for i in range(size // 32))
    assert data == lines * 2
    assert events[-1]["exited"]["exit_code"] == 0
    third = again.open("attach", command_id="long", stdout_from=size - 16).finish()
    assert third[2][1] == lines[-16:]
    with pytest.raises(Refused):
        again.open("attach", command_id="long", stdout_from=size + 1).finish()


def test_a_slow_reader_gets_a_gap_and_holds_up_nobody(client: Client) -> None:
    client.call("start", command_id="fast", argv=[str(PROBE), "flood", str(64 << 20)])
    slow = client.open("attach", credit=False, command_id="fast", stdout_from=0)
    assert slow.event()["started"]
    assert client.call("wait", command_id="fast", timeout=10)["exit_code"] == 0
    assert client.call("view", command_id="fast")["stdout_bytes"] == 64 << 20
    slow.credit(64 << 20)
    offset, gaps = 0, []
    while True:
        frame = slow.next()
        if frame.kind is Kind.DATA:
            for at in range(0, len(frame.payload), 4096):
                wanted = b"%015d\n" % ((offset + at) // 16)
                part = frame.payload[at:]
                if (offset + at) % 16 == 0 and len(part) >= 16:
                    assert part[:16] == wanted
            offset += len(frame.payload)
        elif frame.kind is Kind.EVENT:
            event = msgspec.msgpack.decode(frame.payload)
            if "exited" in event:
                break
            gap = event["gap"]
            assert gap["channel"] == 1
            assert gap["offset"] - gap["dropped_bytes"] == offset
            gaps.append(gap)
            offset = gap["offset"]
    assert gaps
    assert offset == 64 << 20


def test_attach_from_now(client: Client) -> None:
    client.call("start", command_id="now", shell="echo early; read x; echo late", stdin="pipe")
    eventually(lambda: client.call("view", command_id="now")["stdout_bytes"] == 6)
    reader = client.open("attach", command_id="now")
    assert reader.event()["started"]["stdout_bytes"] == 6
    stream = client.open("stdin", command_id="now", eof=True)
    stream.send(b"\n")
    stream.end()
    assert reader.finish()[2] == {1: b"late\n"}


def test_the_id_is_the_key(client: Client, server: Serving, tmp_path: Path) -> None:
    shell = f"echo x >>{tmp_path}/ran; cat {tmp_path}/ran"
    first = client.run(shell=shell, command_id="once")
    assert client.run(shell=shell, command_id="once") == first
    view = client.call("start", shell=shell, command_id="once")
    assert view["exit_code"] == 0
    other = server.client()
    assert other.run(shell=shell, command_id="once") == first
    assert (tmp_path / "ran").read_text() == "x\n"
    assert [v["command_id"] for v in other.call("list")].count("once") == 1


def test_cancel_detaches(client: Client) -> None:
    stream = client.open("run", command_id="goes-on", shell="sleep 0.3; echo done")
    stream.cancel()
    with pytest.raises(Refused) as caught:
        stream.result()
    assert caught.value.code == "cancelled"
    assert client.call("wait", command_id="goes-on")["stdout"]["head"] == b"done\n"


def test_two_hundred_at_once(client: Client, server: Serving) -> None:
    streams = [
        client.open("run", command_id=f"many-{i}", shell=f"sleep 0.2; echo {i}") for i in range(200)
    ]
    for i, stream in enumerate(streams):
        assert stream.result()["stdout"]["head"] == b"%d\n" % i
    assert server.members() == []
    listed = [v["command_id"] for v in all_commands(client)]
    assert [c for c in listed if c.startswith("many-")] == [f"many-{i}" for i in range(200)]


def all_commands(client: Client) -> list[dict[str, Any]]:
    result, events, _ = client.open("list").finish()
    views: list[dict[str, Any]] = [view for event in events for view in event["more"]]
    return [*views, *result]


def test_too_many_at_once(tmp_path: Path) -> None:
    with serving(tmp_path, max_running_commands=3) as server:
        client = server.client()
        for i in range(3):
            client.call("start", command_id=str(i), argv=["sleep", "60"])
        assert refusal(client, argv=["true"]) == ("rate_limited", "commands")
        client.call("kill", command_id="0")
        assert client.run("true")["exit_code"] == 0


def test_output_is_kept_while_somebody_reads_it(tmp_path: Path) -> None:
    with serving(tmp_path) as server:
        client = server.client()
        size = 24 << 20
        argv, limit = [str(PROBE), "flood", str(size)], 64 << 20
        client.call("start", command_id="big", argv=argv, output_limit_bytes=limit)
        reader = client.open("attach", command_id="big", stdout_from=0, credit=False)
        assert len(client.run(argv=argv, output_limit_bytes=limit)["out"]) == size
        client.run("true")
        reader.auto_credit = True
        reader.credit(1 << 18)
        _, events, data = reader.finish()
        assert len(data[1]) == size
        assert [list(e) for e in events] == [["started"], ["exited"]]
        client.run("true")
        assert client.run(command_id="big")["stdout"]["dropped_bytes"] == size


def test_old_output_goes_first(client: Client) -> None:
    for i in range(20):
        client.call(
            "wait",
            command_id=client.call(
                "start", command_id=f"old-{i}", argv=[str(PROBE), "flood", str(1 << 20)]
            )["command_id"],
        )
    old = client.run(command_id="old-0")
    assert old["stdout"] == {"head": b"", "tail": b"", "dropped_bytes": 1 << 20}
    assert old["exit_code"] == 0
    assert len(client.run(command_id="old-19")["out"]) == 1 << 20


def test_terminal(client: Client) -> None:
    result = client.probe("tty", pty={"rows": 30, "cols": 100})
    assert result["out"] == b"tty 30 100\r\n"
    client.call(
        "start", command_id="pty", argv=[str(PROBE), "tty", "wait"], pty={"rows": 24, "cols": 80}
    )
    reader = client.open("attach", command_id="pty", stdout_from=0)
    reader.event()
    assert reader.next().payload == b"tty 24 80\r\n"
    client.call("resize", command_id="pty", rows=50, cols=132)
    assert reader.finish()[2][1] == b"tty 50 132\r\n"
    with pytest.raises(Refused):
        client.call("resize", command_id="pty", rows=50, cols=132)


def test_terminal_of_another_user(client: Client) -> None:
    result = client.run(shell="tty && stat -c %U $(tty) && echo hi >$(tty)", user="nobody", pty={})
    assert result["exit_code"] == 0, result
    assert result["out"].split()[1:] == [b"nobody", b"hi"]


def test_keys_of_a_terminal(client: Client) -> None:
    client.call("start", command_id="keys", argv=["cat"], pty={"rows": 24, "cols": 80})
    reader = client.open("attach", command_id="keys", stdout_from=0)
    stream = client.open("stdin", command_id="keys", eof=True)
    stream.send(b"typed\n")
    stream.end()
    assert stream.result() == {"written": 6}
    _, events, data = reader.finish()
    assert data[1] == b"typed\r\ntyped\r\n"
    assert events[-1]["exited"]["exit_code"] == 0
    client.call("start", command_id="ctrl-c", argv=["sleep", "60"], pty={})
    stream = client.open("stdin", command_id="ctrl-c")
    stream.send(b"\x03")
    stream.end()
    assert client.call("wait", command_id="ctrl-c")["signal"] == 2
