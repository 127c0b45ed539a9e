"""Standard input, and terminals."""

from __future__ import annotations

import hashlib
import random
from collections.abc import AsyncIterator

import anyio
import pytest

from dsec import Command, Conflict, InvalidRequest, NotFound, Output, PtySize, Sandbox
from tests.contract.expect import PROBE, eventually, read_until, refusal

MIB = 1 << 20


async def test_standard_input_is_empty_unless_asked_for(sandbox: Sandbox) -> None:
    result = await sandbox.exec([PROBE, "cat"], timeout=10)
    assert (result.stdout_bytes, result.ok) == (b"", True)


@pytest.mark.parametrize("given", [b"", b"x", bytes(range(256)), "é\n"], ids=repr)
async def test_input_arrives_exactly_and_ends(sandbox: Sandbox, given: bytes | str) -> None:
    result = await sandbox.exec([PROBE, "cat"], input=given, timeout=10)
    assert result.stdout_bytes == (given.encode() if isinstance(given, str) else given)


async def test_five_megabytes_of_input_come_back(sandbox: Sandbox) -> None:
    given = random.Random(5).randbytes(5 * MIB)
    result = await sandbox.exec([PROBE, "cat"], input=given, output_limit_bytes=8 * MIB, timeout=30)
    assert hashlib.sha256(result.stdout_bytes).digest() == hashlib.sha256(given).digest()


async def test_input_nobody_reads_does_not_hold_up_the_end(sandbox: Sandbox) -> None:
    result = await sandbox.exec([PROBE, "exit", "3"], input=bytes(2 * MIB), timeout=20)
    assert result.exit_code == 3


async def test_input_can_be_written_piece_by_piece(sandbox: Sandbox) -> None:
    command = await sandbox.start([PROBE, "cat"], stdin="pipe")
    await command.write(b"one ")
    await read_until(command, b"one ")
    await command.write("two")
    await command.close_stdin()
    result = await command.wait(10)
    assert (result.stdout, result.exit_code) == ("one two", 0)


async def test_input_can_be_streamed(sandbox: Sandbox) -> None:
    async def numbers() -> AsyncIterator[bytes]:
        for n in range(1000):
            yield b"%d\n" % n

    command = await sandbox.start([PROBE, "cat"], stdin="pipe")
    await command.write_from(numbers)
    result = await command.wait(10)
    assert result.stdout.split() == [str(n) for n in range(1000)]


async def test_closing_input_twice_is_harmless(sandbox: Sandbox) -> None:
    command = await sandbox.start(shell="cat; sleep 1", stdin="pipe")
    await command.close_stdin()
    await command.close_stdin()
    assert (await command.wait(10)).ok


async def test_writing_where_there_is_no_input_is_a_conflict(sandbox: Sandbox) -> None:
    command = await sandbox.start([PROBE, "sleep", "1000"])
    with refusal(Conflict):
        await command.write(b"x")
    await command.kill()


async def test_writing_to_an_ended_command_is_an_error(sandbox: Sandbox) -> None:
    command = await sandbox.start([PROBE, "exit", "0"], stdin="pipe")
    await command.wait()
    with pytest.raises((Conflict, NotFound)):
        await command.write(b"x")


async def test_without_a_pty_there_is_no_terminal(sandbox: Sandbox) -> None:
    result = await sandbox.exec([PROBE, "tty"])
    assert result.stdout == "not a tty\n"


async def test_a_pty_is_a_terminal_of_the_size_asked_for(sandbox: Sandbox) -> None:
    command = await sandbox.start([PROBE, "tty"], pty=PtySize(rows=33, cols=77))
    assert (await command.wait(10)).stdout == "tty 33 77\r\n"


async def test_a_resize_reaches_the_program(sandbox: Sandbox) -> None:
    command = await _watching(sandbox)
    await command.resize(41, 123)
    assert (await command.wait(10)).stdout == "tty 24 80\r\ntty 41 123\r\n"


async def _watching(sandbox: Sandbox) -> Command:
    command = await sandbox.start([PROBE, "tty", "watch"], pty=PtySize())
    await read_until(command, b"\n")
    return command


async def test_control_c_interrupts_what_runs_on_a_terminal(sandbox: Sandbox) -> None:
    command = await _watching(sandbox)
    await command.write(b"\x03")
    result = await command.wait(10)
    assert (result.exit_code, result.signal) == (130, 2)


async def test_a_terminal_echoes_what_is_typed(sandbox: Sandbox) -> None:
    command = await sandbox.start(["cat"], pty=PtySize())
    await command.write(b"hello\n")
    said = await read_until(command, b"hello\r\nhello\r\n")
    assert said == b"hello\r\nhello\r\n"
    await command.kill()


async def test_control_d_ends_a_terminals_input(sandbox: Sandbox) -> None:
    command = await sandbox.start(["cat"], pty=PtySize())
    await command.write(b"x\n")
    await read_until(command, b"x\r\nx\r\n")
    await command.write(b"\x04")
    assert (await command.wait(10)).exit_code == 0


async def test_both_streams_of_a_terminal_are_one(sandbox: Sandbox) -> None:
    command = await sandbox.start([PROBE, "both"], pty=PtySize())
    result = await command.wait(10)
    assert (result.stdout_bytes, result.stderr_bytes) == (b"out\r\nerr\r\n", b"")


async def test_a_shell_on_a_terminal_answers(sandbox: Sandbox) -> None:
    command = await sandbox.start(["/bin/sh"], pty=PtySize())
    await command.write(b"echo an''swer\n")
    await read_until(command, b"\nanswer\r\n")
    await command.write(b"exit 7\n")
    assert (await command.wait(10)).exit_code == 7


async def test_resizing_without_a_terminal_is_an_error(sandbox: Sandbox) -> None:
    command = await sandbox.start([PROBE, "sleep", "1000"])
    with pytest.raises((Conflict, InvalidRequest)):
        await command.resize(10, 10)
    await command.kill()


@pytest.mark.parametrize(("rows", "cols"), [(0, 10), (10, 0), (100000, 10)])
async def test_a_senseless_size_is_refused(sandbox: Sandbox, rows: int, cols: int) -> None:
    with refusal(InvalidRequest):
        await sandbox.start([PROBE, "tty"], pty=PtySize(rows=rows, cols=cols))


async def test_two_terminals_do_not_mix(sandbox: Sandbox) -> None:
    one = await sandbox.start(["cat"], pty=PtySize())
    two = await sandbox.start(["cat"], pty=PtySize())
    await one.write(b"first\n")
    await two.write(b"second\n")
    assert b"second" not in await read_until(one, b"first\r\nfirst\r\n")
    assert b"first" not in await read_until(two, b"second\r\nsecond\r\n")
    async with anyio.create_task_group() as group:
        group.start_soon(one.kill)
        group.start_soon(two.kill)


async def test_hanging_up_ends_a_terminals_reader(sandbox: Sandbox) -> None:
    command = await sandbox.start(["cat"], pty=PtySize())
    await command.close_stdin()

    async def ended() -> bool:
        return not (await command.refresh()).running

    await eventually(ended, "the reader ended")


async def test_typed_bytes_are_counted_in_offsets(sandbox: Sandbox) -> None:
    command = await sandbox.start([PROBE, "both"], pty=PtySize())
    await command.wait(10)
    at = 0
    async for event in command.events():
        if isinstance(event, Output):
            assert event.offset == at
            at += len(event.data)
    assert at == 10
