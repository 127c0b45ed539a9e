from __future__ import annotations

import io
import os
import time
from pathlib import Path

import anyio
import pytest

from dsec.linux import pidfd
from dsec.linux.process import CommandFailed, Filter, run, run_async

pytestmark = pytest.mark.anyio


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def ended(pid: int) -> bool:
    """Whether it is gone, or will be in a moment: a killed orphan tells init only."""
    with pidfd.opened(pid) as descriptor:
        return descriptor is None or pidfd.wait_end(descriptor, 5)


def test_output_and_input() -> None:
    done = run(["sh", "-c", "cat; echo err >&2"], stdin=b"in" * 100_000, timeout_s=20)
    assert (done.stdout, done.stderr) == (b"in" * 100_000, "err\n")


def test_a_failure_has_the_command_to_copy() -> None:
    with pytest.raises(CommandFailed, match=r"`sh -c 'echo no >&2; exit 3'` exited 3: no"):
        run(["sh", "-c", "echo no >&2; exit 3"], timeout_s=20)
    with pytest.raises(CommandFailed, match="was killed by SIGTERM"):
        run(["sh", "-c", "kill $$"], timeout_s=20)


def test_a_missing_program() -> None:
    with pytest.raises(FileNotFoundError):
        run(["/nonesuch/program"], timeout_s=20)


def test_late_ones_are_killed_with_their_children(tmp_path: Path) -> None:
    script = f"sleep 600 & echo $! > {tmp_path}/pid; wait"
    with pytest.raises(CommandFailed, match=r"took longer than 2 s"):
        run(["sh", "-c", script], timeout_s=2)
    assert not alive(int((tmp_path / "pid").read_text()))


LEAVES_A_CHILD = "sleep 600 & echo $!"
"""The child goes on, and holds the output."""


def test_what_a_program_left_behind_is_killed() -> None:
    begun = time.monotonic()
    done = run(["sh", "-c", LEAVES_A_CHILD], timeout_s=20)
    assert ended(int(done.stdout))
    assert time.monotonic() - begun < 4  # nor is its hold on the output waited for


async def test_what_a_program_left_behind_is_killed_without_a_thread() -> None:
    done = await run_async(["sh", "-c", LEAVES_A_CHILD], timeout_s=20)
    assert ended(int(done.stdout))


def test_what_a_filter_left_behind_is_killed() -> None:
    script = "sleep 600 >/dev/null & echo $!"
    with Filter(["sh", "-c", script], io.BytesIO()) as program:
        pid = int(program.output.read())
        program.finish()
    assert ended(pid)


def test_stderr_is_bounded() -> None:
    with pytest.raises(CommandFailed) as caught:
        run(["sh", "-c", "head -c 200000 /dev/zero | tr '\\0' x >&2; exit 1"], timeout_s=20)
    assert len(caught.value.stderr) == 16 * 1024


async def test_lines_come_as_they_are_said() -> None:
    out: list[str] = []
    err: list[str] = []
    done = await run_async(
        ["sh", "-c", "cat; printf 'a\\rb\\n' >&2"],
        stdin=b"one\ntwo\n",
        timeout_s=20,
        on_stdout_line=out.append,
        on_stderr_line=err.append,
    )
    assert (out, err, done.stdout) == (["one", "two"], ["a", "b"], b"one\ntwo\n")


async def test_failure_and_time(tmp_path: Path) -> None:
    with pytest.raises(CommandFailed, match="exited 4: why"):
        await run_async(["sh", "-c", "echo why >&2; exit 4"], timeout_s=20)
    with pytest.raises(CommandFailed, match="took longer"):
        await run_async(["sleep", "600"], timeout_s=0.2)
    with pytest.raises(FileNotFoundError):
        await run_async(["/nonesuch/program"], timeout_s=20)


async def test_cancelling_leaves_no_child(tmp_path: Path) -> None:
    pids: list[int] = []
    started = anyio.Event()

    def hear(line: str) -> None:
        pids.extend(int(word) for word in line.split())
        started.set()

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(
            lambda: run_async(
                ["sh", "-c", "sleep 600 & echo $$ $!; wait"], timeout_s=600, on_stdout_line=hear
            )
        )
        await started.wait()
        tasks.cancel_scope.cancel()
    assert len(pids) == 2
    with anyio.fail_after(10):
        while any(alive(pid) for pid in pids):  # noqa: ASYNC110 - a killed orphan tells init only
            await anyio.sleep(0.01)


def test_a_filter() -> None:
    data = os.urandom(3_000_000)
    with Filter(["cat"], io.BytesIO(data)) as program:
        assert program.output.read() == data
        program.finish()
    with Filter(["false"], io.BytesIO(data)) as program:
        assert program.output.read() == b""
        with pytest.raises(CommandFailed, match="exited 1"):
            program.finish()


def test_a_filter_left_early_is_ended() -> None:
    with Filter(["cat", "/dev/zero"], io.BytesIO()) as program:
        assert program.output.read(10) == bytes(10)
        pid = program._child.pid
    assert not alive(pid)
