"""What a command says: every byte, in order, in time, and bounded."""

from __future__ import annotations

import time

import anyio
import pytest

from dsec import Exited, Gap, InvalidRequest, Output, Sandbox, Started, TextDecoder
from tests.contract.expect import PROBE, read_until, refusal

MIB = 1 << 20


async def test_all_byte_values_arrive(sandbox: Sandbox) -> None:
    result = await sandbox.exec([PROBE, "bytes"])
    assert result.stdout_bytes == bytes(range(256))


async def test_nothing_said_is_nothing(sandbox: Sandbox) -> None:
    result = await sandbox.exec([PROBE, "exit", "0"])
    assert (result.stdout_bytes, result.stderr_bytes, result.truncated) == (b"", b"", False)


async def test_standard_error_is_apart(sandbox: Sandbox) -> None:
    result = await sandbox.exec([PROBE, "both"])
    assert (result.stdout, result.stderr) == ("out\n", "err\n")


async def test_blank_lines_and_missing_newlines_are_kept(sandbox: Sandbox) -> None:
    result = await sandbox.exec(["printf", "\\n\\na\\n\\nb"])
    assert result.stdout_bytes == b"\n\na\n\nb"


async def test_ten_megabytes_arrive_exactly_when_the_limit_allows(sandbox: Sandbox) -> None:
    size = 10 * MIB
    result = await sandbox.exec([PROBE, "flood", str(size)], output_limit_bytes=16 * MIB)
    assert not result.truncated
    assert len(result.stdout_bytes) == size
    again = await sandbox.exec([PROBE, "flood", str(size)], output_limit_bytes=16 * MIB)
    assert again.stdout_bytes == result.stdout_bytes


async def test_a_flood_keeps_head_and_tail_and_counts_the_rest(sandbox: Sandbox) -> None:
    size, limit = 3 * MIB, 1000
    whole = await sandbox.exec([PROBE, "flood", str(size)], output_limit_bytes=4 * MIB)
    result = await sandbox.exec([PROBE, "flood", str(size)], output_limit_bytes=limit)
    assert result.truncated
    assert result.stdout_dropped == size - limit
    assert result.stdout_bytes == whole.stdout_bytes[:500] + whole.stdout_bytes[-500:]
    assert f"{size - limit} bytes left out" in result.stdout


async def test_the_default_limit_is_a_mebibyte(sandbox: Sandbox) -> None:
    result = await sandbox.exec([PROBE, "flood", str(2 * MIB)])
    assert (len(result.stdout_bytes), result.stdout_dropped) == (MIB, MIB)


async def test_a_flood_on_standard_error_is_bounded_too(sandbox: Sandbox) -> None:
    result = await sandbox.exec([PROBE, "flood", str(2 * MIB), "stderr"], output_limit_bytes=1000)
    assert (len(result.stderr_bytes), result.stderr_dropped) == (1000, 2 * MIB - 1000)
    assert result.stdout_bytes == b""


async def test_a_limit_of_nothing_keeps_nothing(sandbox: Sandbox) -> None:
    result = await sandbox.exec([PROBE, "flood", "5000"], output_limit_bytes=0)
    assert (result.stdout_bytes, result.stdout_dropped) == (b"", 5000)


async def test_an_unread_flood_does_not_hold_up_its_producer(sandbox: Sandbox) -> None:
    command = await sandbox.start(shell=f"/probe flood {64 * MIB}; echo end >&2")
    result = await command.wait(30)
    assert result.stderr == "end\n"
    assert result.stdout_dropped == 63 * MIB


async def test_events_begin_with_started_and_end_with_exited(sandbox: Sandbox) -> None:
    command = await sandbox.start([PROBE, "both"])
    events = [event async for event in command.events()]
    assert isinstance(events[0], Started)
    assert isinstance(events[-1], Exited)
    assert events[-1].command.exit_code == 0
    said = {e.stream: e.data for e in events if isinstance(e, Output)}
    assert said == {"stdout": b"out\n", "stderr": b"err\n"}


async def test_output_comes_while_the_command_runs(sandbox: Sandbox) -> None:
    command = await sandbox.start(shell="echo early; sleep 1000")
    begun = time.monotonic()
    await read_until(command, b"early\n")
    assert time.monotonic() - begun < 10
    assert (await command.refresh()).running
    await command.kill()


async def test_offsets_count_every_byte(sandbox: Sandbox) -> None:
    command = await sandbox.start([PROBE, "flood", "700000"])
    at = 0
    async for event in command.events():
        if isinstance(event, Output):
            assert event.offset == at
            at += len(event.data)
    assert at == 700000


async def test_a_reader_can_go_on_from_an_offset(sandbox: Sandbox) -> None:
    command = await sandbox.start([PROBE, "bytes"])
    await command.wait()
    said = b""
    async for event in command.events(stdout_from=100):
        if isinstance(event, Output):
            said += event.data
    assert said == bytes(range(100, 256))


async def test_two_readers_hear_the_same(sandbox: Sandbox) -> None:
    command = await sandbox.start(shell="sleep 0.2; /probe flood 100000")
    heard: list[bytes] = []

    async def listen() -> None:
        said = b""
        async for event in command.events():
            if isinstance(event, Output):
                said += event.data
        heard.append(said)

    async with anyio.create_task_group() as group:
        group.start_soon(listen)
        group.start_soon(listen)
    assert len(heard[0]) == 100000
    assert heard[0] == heard[1]


async def test_a_reader_that_comes_late_is_told_of_the_gap(sandbox: Sandbox) -> None:
    size = 4 * MIB
    command = await sandbox.start([PROBE, "flood", str(size)], output_limit_bytes=100_000)
    await command.wait()
    heard = skipped = 0
    async for event in command.events():
        if isinstance(event, Output):
            assert event.offset == heard + skipped
            heard += len(event.data)
        elif isinstance(event, Gap):
            skipped += event.dropped_bytes
            assert event.offset == heard + skipped
    assert (heard, skipped) == (100_000, size - 100_000)


async def test_a_slow_reader_loses_bytes_and_is_told_so(sandbox: Sandbox) -> None:
    size = 64 * MIB
    command = await sandbox.start([PROBE, "flood", str(size)], output_limit_bytes=200_000)
    heard = skipped = 0
    async with command.events() as events:
        async for event in events:
            if isinstance(event, Started):
                await command.wait(30)  # the producer ends though nobody reads
            elif isinstance(event, Output):
                heard += len(event.data)
            elif isinstance(event, Gap):
                skipped += event.dropped_bytes
    assert heard + skipped == size
    assert skipped > 0


async def test_leaving_a_reader_does_not_end_the_command(sandbox: Sandbox) -> None:
    command = await sandbox.start(shell="echo one; sleep 0.3; echo two")
    await read_until(command, b"one")
    assert (await command.wait()).stdout == "one\ntwo\n"


async def test_characters_split_between_chunks_stay_whole(sandbox: Sandbox) -> None:
    text = "é日本😀" * 20000
    await sandbox.files.write("/tmp/text", text)
    command = await sandbox.start(["cat", "/tmp/text"])
    decoder, said = TextDecoder(), ""
    async for event in command.events():
        if isinstance(event, Output):
            said += decoder.feed(event.data)
    assert said + decoder.finish() == text


async def test_bytes_that_are_no_text_do_not_break_the_result(sandbox: Sandbox) -> None:
    result = await sandbox.exec([PROBE, "bytes"])
    assert result.stdout.startswith("\x00\x01")
    assert "\ufffd" in result.stdout


async def test_output_before_a_kill_is_kept(sandbox: Sandbox) -> None:
    command = await sandbox.start(shell="echo said; sleep 1000")
    await read_until(command, b"said\n")
    await command.kill()
    assert (await command.wait()).stdout == "said\n"


@pytest.mark.parametrize("limit", [-1, (64 << 20) + 1])
async def test_a_senseless_output_limit_is_refused(sandbox: Sandbox, limit: int) -> None:
    with refusal(InvalidRequest):
        await sandbox.exec([PROBE, "exit", "0"], output_limit_bytes=limit)


async def test_endless_output_is_bounded_and_stopped_by_the_time_out(sandbox: Sandbox) -> None:
    result = await sandbox.exec(["yes"], timeout=1, output_limit_bytes=10_000)
    assert result.timed_out
    assert len(result.stdout_bytes) == 10_000
    assert result.stdout_dropped > 0
