from __future__ import annotations

import math

import anyio
import pytest

from dsec import (
    CommandFailed,
    Conflict,
    DeadlineExceeded,
    DSecContainerRunArgs,
    Exited,
    Gap,
    InvalidRequest,
    Output,
    PtySize,
    Sandbox,
    SandboxGone,
    Started,
    StartFailed,
    TextDecoder,
    Unavailable,
)
from dsec.sdk._aio import as_iterator
from dsec.sdk.models import sandbox_spec
from dsec.wire.sandbox import Captured, Heartbeat
from tests.unit.sdk.fake import (
    LOST,
    FakePlatform,
    Reply,
    command,
    error,
    json,
    lines,
    result,
    sandbox,
)


async def test_a_command_is_sent_again_under_the_same_id(
    platform: FakePlatform, box: Sandbox
) -> None:
    platform.sandbox(
        "POST",
        "/commands/run",
        LOST,
        Reply(200, [b"\n", b"\n"], broken=True),
        error(Unavailable("edge restarts")),
        Reply(200, [b"\n", b"\n", json(result(b"late\n", 3)).chunks[0]]),
    )
    answer = await box.exec(["make", "test"], cwd="/src", env={"A": "b"}, user="me", timeout=5)
    assert (answer.exit_code, answer.stdout, answer.ok) == (3, "late\n", False)
    calls = [call.json() for call in platform.calls("POST", "/commands/run")]
    assert len(calls) == 4
    assert len({call["command_id"] for call in calls}) == 1
    assert calls[0] | {"command_id": ""} == {
        "command_id": "",
        "argv": ["make", "test"],
        "cwd": "/src",
        "env": {"A": "b"},
        "user": "me",
        "timeout_s": 5.0,
    }


async def test_a_late_failure_is_an_error_body_under_200(
    platform: FakePlatform, box: Sandbox
) -> None:
    late = error(SandboxGone("it expired", reason="lifetime"))
    platform.sandbox("POST", "/commands/run", Reply(200, [b"\n", b"\n", *late.chunks]))
    with pytest.raises(SandboxGone, match="expired") as caught:
        await box.run_shell("sleep 100")
    assert caught.value.details["reason"] == "lifetime"


async def test_a_result_whose_output_looks_like_an_error_is_a_result(
    platform: FakePlatform, box: Sandbox
) -> None:
    platform.sandbox("POST", "/commands/run", json(result(b'{"error": {}}')))
    assert (await box.run_shell("x")).stdout == '{"error": {}}'


async def test_the_client_has_a_deadline_of_its_own(
    platform: FakePlatform, box: Sandbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dsec.sdk._async.command.GRACE_S", 0.05)
    platform.sandbox("POST", "/commands/run", Reply(200, [b"\n"], hang=True))
    with anyio.fail_after(5):
        with pytest.raises(DeadlineExceeded):
            await box.exec(["sleep", "inf"], timeout=0.05)


async def test_results_say_what_became_of_the_command(platform: FakePlatform, box: Sandbox) -> None:
    ended = result(
        b"",
        137,
        stdout=Captured(head="grüße".encode()[:3], tail=b"\xffend", dropped_bytes=99),
        stderr=Captured(head=b"killed\n"),
        signal=9,
        oom_killed=True,
        timeout_s=3600.0,
    )
    platform.sandbox("POST", "/commands/run", json(ended))
    answer = await box.exec(["x"])
    assert answer.truncated
    assert answer.stdout_bytes == b"gr\xc3\xffend"
    assert answer.stdout == "gr\ufffd\n[... 99 bytes left out ...]\n\ufffdend"
    assert (answer.signal, answer.oom_killed, answer.timeout_s) == (9, True, 3600.0)
    with pytest.raises(CommandFailed, match="want of memory: killed") as caught:
        answer.check()
    assert caught.value.result is answer
    platform.sandbox("POST", "/commands/run", json(result(b"fine")))
    assert (await box.exec(["x"])).check().stdout == "fine"


async def test_mistakes_are_named_before_anything_is_sent(box: Sandbox) -> None:
    with pytest.raises(InvalidRequest, match="run_shell"):
        await box.exec("ls -l")
    for timeout in (-1, 0, math.nan, math.inf):
        with pytest.raises(InvalidRequest, match="timeout"):
            await box.exec(["ls"], timeout=timeout)
    with pytest.raises(InvalidRequest, match="max_lifetime_s"):
        sandbox_spec(DSecContainerRunArgs("debian", max_lifetime_s=math.nan))
    with pytest.raises(InvalidRequest, match="not UTF-8"):
        await box.exec(["ls", "\udcff"])
    with pytest.raises(InvalidRequest, match="not an id"):
        await box.command("../../x")


async def test_input_is_streamed_and_a_command_that_does_not_read_it_is_no_error(
    platform: FakePlatform, box: Sandbox
) -> None:
    platform.sandbox("POST", "/commands", json(command(), 201))
    platform.sandbox("POST", "/commands/cmd1/stdin", Reply(204))
    platform.sandbox("GET", "/commands/cmd1/result", LOST, json(result(b"3")))
    assert (await box.exec(["wc", "-c"], input="abc")).stdout == "3"
    call = platform.calls("POST", "/stdin")[0]
    assert (call.body, call.query) == (b"abc", {"eof": "1", "offset": "0"})
    assert platform.calls("POST", "/commands")[0].json()["stdin"] == "pipe"
    platform.sandbox("POST", "/commands/cmd1/stdin", error(Conflict("its input is closed")))
    assert (await box.exec(["true"], input=b"abc")).ok


async def test_input_says_where_it_belongs_when_it_is_sent_again(
    platform: FakePlatform, box: Sandbox
) -> None:
    platform.sandbox("POST", "/commands", json(command(), 201))
    platform.sandbox("POST", "/commands/cmd1/stdin", LOST, Reply(204))
    started = await box.start(["cat"], stdin="pipe")
    await started.write(b"once")
    await started.write("")
    platform.sandbox("POST", "/commands/cmd1/stdin", error(Conflict("gap")), Reply(204))
    with pytest.raises(Conflict):
        await started.write("more")
    await started.write("more")
    platform.sandbox("POST", "/commands/cmd1/stdin", LOST, Reply(204))
    await started.write_from(lambda: as_iterator([b"a", b"bc"]), eof=False, again=True)
    await started.close_stdin()
    sent = [(call.body, call.query.get("offset")) for call in platform.calls("POST", "/stdin")]
    assert sent == [
        (b"once", "0"), (b"once", "0"), (b"more", "4"), (b"more", "4"),
        (b"abc", "8"), (b"abc", "8"), (b"", "11"),
    ]  # fmt: skip


async def test_input_whose_place_is_not_known_is_sent_once(
    platform: FakePlatform, box: Sandbox
) -> None:
    platform.sandbox("GET", "/commands/cmd1", json(command(running=True)))
    found = await box.command("cmd1")
    platform.sandbox("POST", "/commands", json(command(), 201))
    started = await box.start(["cat"], stdin="pipe")
    platform.sandbox("POST", "/commands/cmd1/stdin", LOST, Reply(204))
    with pytest.raises(Unavailable):
        await found.write(b"once")
    assert platform.calls("POST", "/stdin")[0].query == {}
    platform.sandbox("POST", "/commands/cmd1/stdin", LOST, Reply(204))
    with pytest.raises(Unavailable):
        await found.write_from(lambda: as_iterator([b"x"]), again=True)
    platform.sandbox("POST", "/commands/cmd1/stdin", LOST, Reply(204))
    with pytest.raises(Unavailable):
        await started.write_from(lambda: as_iterator([b"x"]))
    platform.sandbox("POST", "/commands/cmd1/stdin", LOST, Reply(204))
    await found.close_stdin()
    assert len(platform.calls("POST", "/stdin")) == 5


async def test_two_writers_of_one_handle_take_turns(platform: FakePlatform, box: Sandbox) -> None:
    platform.sandbox("POST", "/commands", json(command(), 201))
    platform.sandbox("POST", "/commands/cmd1/stdin", Reply(204))
    started = await box.start(["cat"], stdin="pipe")
    async with anyio.create_task_group() as group:
        for _ in range(4):
            group.start_soon(started.write, b"12345")
    offsets = [call.query["offset"] for call in platform.calls("POST", "/stdin")]
    assert offsets == ["0", "5", "10", "15"]


async def test_a_signal_has_a_key(platform: FakePlatform, box: Sandbox) -> None:
    platform.sandbox("GET", "/commands/cmd1", json(command(running=True)))
    platform.sandbox("POST", "/commands/cmd1/signal", LOST, Reply(204))
    await (await box.command("cmd1")).signal("SIGINT")
    first, second = platform.calls("POST", "/signal")
    assert first.query == {"signal": "INT"}
    assert first.headers["idempotency-key"] == second.headers["idempotency-key"]


def out(offset: int, data: bytes, stream: str = "stdout") -> Output:
    return Output(stream="stderr" if stream == "stderr" else "stdout", offset=offset, data=data)


async def test_events_go_on_where_a_broken_stream_ended(
    platform: FakePlatform, box: Sandbox
) -> None:
    running, ended = command(running=True), command(exit_code=0)
    platform.sandbox("POST", "/commands", json(running, 201))
    platform.sandbox(
        "GET",
        "/commands/cmd1/events",
        lines(Started(command=running), Heartbeat(), out(0, b"abc"), out(0, b"E", "stderr")),
        LOST,
        lines(Started(command=running), out(1, b"bcdef"), broken=True),
        error(Unavailable("edge restarts")),
        lines(
            Started(command=running),
            out(6, b"g"),
            {"type": "error", "code": "unavailable", "message": "again", "http_status": 503},
        ),
        lines(Started(command=running), Gap(stream="stdout", offset=20, dropped_bytes=13)),
        lines(Started(command=running), out(20, b"end"), Exited(command=ended)),
    )
    started = await box.start(shell="x", pty=PtySize(24, 80))
    events = [event async for event in started.events()]
    assert [type(event).__name__ for event in events] == (
        ["Started", "Output", "Output", "Output", "Output", "Gap", "Output", "Exited"]
    )
    text = b"".join(e.data for e in events if isinstance(e, Output) and e.stream == "stdout")
    assert text == b"abcdefgend"
    offsets = [
        (call.query["stdout_from"], call.query["stderr_from"])
        for call in platform.calls("GET", "/events")
    ]
    assert offsets == [
        ("0", "0"), ("3", "1"), ("3", "1"), ("6", "1"), ("6", "1"), ("7", "1"), ("20", "1"),
    ]  # fmt: skip


async def test_a_stream_says_when_the_sandbox_is_over(platform: FakePlatform, box: Sandbox) -> None:
    platform.sandbox("POST", "/commands", json(command(running=True), 201))
    platform.sandbox(
        "GET",
        "/commands/cmd1/events",
        lines(
            {
                "type": "error",
                "code": "sandbox_gone",
                "message": "stopped",
                "http_status": 410,
                "details": {"reason": "idle"},
            }
        ),
    )
    started = await box.start(["x"])
    with pytest.raises(SandboxGone, match="stopped"):
        async for _ in started.events():
            pass


async def test_a_silent_stream_is_a_broken_one(
    platform: FakePlatform, box: Sandbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dsec.sdk._patience.Patience.wait_s", lambda *_: 0.05)
    platform.sandbox("POST", "/commands", json(command(running=True), 201))
    platform.sandbox(
        "GET",
        "/commands/cmd1/events",
        lines(out(0, b"ab"), hang=True),
        lines(out(2, b"c"), Exited(command=command(exit_code=0))),
    )
    async with (await box.start(["x"])).events() as events:
        got = [event async for event in events]
    assert [e.data for e in got if isinstance(e, Output)] == [b"ab", b"c"]


async def test_sessions(platform: FakePlatform, box: Sandbox) -> None:
    platform.sandbox("POST", "/sessions", LOST, json({"session_id": "ses1"}, 201))
    platform.sandbox("POST", "/commands/run", json(result(b"/tmp")))
    platform.sandbox("DELETE", "/sessions/ses1", Reply(204))
    async with await box.open_session(cwd="/tmp") as session:
        assert (await session.run("pwd", timeout=3)).stdout == "/tmp"
    first, second = (call.json() for call in platform.calls("POST", "/sessions"))
    assert first["session_id"] == second["session_id"]
    assert platform.calls("POST", "/commands/run")[0].json()["session"] == "ses1"
    assert platform.calls("DELETE", "/sessions/ses1")


async def test_a_sandbox_is_stopped_at_the_end_of_its_block(
    platform: FakePlatform, box: Sandbox
) -> None:
    with anyio.move_on_after(0.05):
        async with box:
            await anyio.sleep_forever()
    assert len(platform.calls("DELETE", box.id)) == 1
    assert box.view.state.value == "stopped"


async def test_stopping_one_that_is_over_is_harmless(platform: FakePlatform, box: Sandbox) -> None:
    platform.sandbox("DELETE", "", error(SandboxGone("long ago")))
    platform.sandbox("GET", "", json(sandbox(stop_reason="idle", state="stopped")))
    assert (await box.stop()).stop_reason == "idle"


async def test_a_start_that_failed_says_at_which_step(platform: FakePlatform, box: Sandbox) -> None:
    platform.sandbox("POST", "/commands", error(StartFailed("mount", step="mount", errno=28)))
    with pytest.raises(StartFailed) as caught:
        await box.start(["x"])
    assert caught.value.details == {"step": "mount", "errno": 28}


def test_text_keeps_characters_split_between_chunks_together() -> None:
    decoder = TextDecoder()
    raw = "aé漢🎉".encode()
    assert "".join(decoder.feed(raw[i : i + 1]) for i in range(len(raw))) == "aé漢🎉"
    assert decoder.feed(b"\xe6") == ""
    assert decoder.finish() == "\ufffd"


async def test_a_call_that_is_cancelled_does_not_leave_its_command_running(
    platform: FakePlatform, box: Sandbox
) -> None:
    platform.sandbox("POST", "/commands/run", Reply(200, [b"\n"], hang=True))

    with anyio.move_on_after(0.05):
        await box.exec(["sleep", "inf"])
    first = platform.calls("POST", "/run")[0].json()["command_id"]
    assert [s.path for s in platform.seen if s.method == "DELETE"] == [
        f"/v1/sandboxes/{box.id}/commands/{first}"
    ]
    with anyio.move_on_after(0.05):
        await box.exec(["sleep", "inf"], command_id="mine")
    assert len([s for s in platform.seen if s.method == "DELETE"]) == 1


async def test_events_can_be_waited_for_with_a_time_limit(
    platform: FakePlatform, box: Sandbox
) -> None:
    platform.sandbox("POST", "/commands", json(command(running=True), 201))
    platform.sandbox(
        "GET",
        "/commands/cmd1/events",
        lines(out(0, b"ab"), hang=True),
        lines(out(2, b"c"), Exited(command=command(exit_code=0))),
    )
    got: list[str] = []
    events = (await box.start(["x"])).events()
    while "Exited" not in got:
        with anyio.move_on_after(0.05):
            got.append(type(await anext(events)).__name__)
    assert got == ["Output", "Output", "Exited"]
