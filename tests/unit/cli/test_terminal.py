"""The verbs that join a command and a terminal, as a user has them: in a process, on a terminal."""

from __future__ import annotations

import fcntl
import os
import pty
import select
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Iterator

import anyio
import pytest

from dsec import NotFound
from dsec.wire.sandbox import Exited, Output
from tests.unit.sdk.fake import SANDBOX, FakePlatform, Reply, Seen, command, error, json, lines

DSEC = [sys.executable, "-m", "dsec.cli.app"]


class Terminal:
    """A process on a terminal of its own."""

    def __init__(self, *arguments: str) -> None:
        self._master, slave = pty.openpty()
        self._slave = slave
        self.resize(33, 101)
        self._process = subprocess.Popen(
            [*DSEC, *arguments], stdin=slave, stdout=slave, stderr=slave, start_new_session=True
        )
        self.shown = b""

    def resize(self, rows: int, cols: int) -> None:
        fcntl.ioctl(self._slave, termios.TIOCSWINSZ, struct.pack("HHHH", rows, cols, 0, 0))

    def wait_for(self, text: bytes, within: float = 20) -> None:
        until = time.monotonic() + within
        while text not in self.shown:
            assert time.monotonic() < until, self.shown
            if select.select([self._master], [], [], 0.1)[0]:
                self.shown += os.read(self._master, 65536)

    def type(self, data: bytes) -> None:
        os.write(self._master, data)

    def signal(self, number: int) -> None:
        self._process.send_signal(number)

    def raw(self) -> bool:
        return not termios.tcgetattr(self._slave)[3] & termios.ICANON

    def end(self) -> int:
        return self._process.wait(20)

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        os.close(self._master)
        os.close(self._slave)


@pytest.fixture
def shell(platform: FakePlatform, url: str) -> Iterator[Terminal]:
    typed: list[bytes] = []

    async def stdin(seen: Seen) -> Reply:
        typed.append(seen.body)
        return Reply(204)

    async def until_exit(seen: Seen) -> Reply:
        while b"exit\r" not in b"".join(typed):  # noqa: ASYNC110 - another request
            await anyio.sleep(0.02)
        data = b"\x1b[31mbye"
        return lines(
            Output(stream="stdout", offset=9, data=data), Exited(command=command(exit_code=5))
        )

    def start(seen: Seen) -> Reply:
        if seen.json()["argv"][0] == "bash":
            return error(NotFound("no bash", kind="path"))
        return json(command(running=True), 201)

    platform.sandbox("POST", "/commands", start)
    platform.sandbox("POST", "/commands/cmd1/stdin", stdin)
    platform.sandbox("POST", "/commands/cmd1/resize", Reply(204))
    platform.sandbox("DELETE", "/commands/cmd1", json(command(exit_code=137)))
    platform.sandbox(
        "GET",
        "/commands/cmd1/events",
        lines(Output(stream="stdout", offset=0, data=b"$ welcome"), broken=True),
        until_exit,
    )
    terminal = Terminal("shell", SANDBOX)
    try:
        yield terminal
    finally:
        typed.append(b"exit\r")
        terminal.close()


def test_a_shell_survives_a_lost_connection_and_gives_the_terminal_back(
    platform: FakePlatform, shell: Terminal
) -> None:
    shell.wait_for(b"$ welcome")
    assert shell.raw()
    shell.resize(20, 50)
    shell.signal(28)
    shell.type(b"exit\r")
    assert shell.end() == 5
    shell.wait_for(b"\x1b[31mbye")
    assert not shell.raw()
    started = platform.calls("POST", "/commands")[-1].json()
    assert started["argv"] == ["sh", "-l"]
    assert started["pty"] == {"rows": 33, "cols": 101}
    assert {"rows": "20", "cols": "50"} in [c.query for c in platform.calls("POST", "/resize")]
    assert platform.calls("GET", "/events")[-1].query["stdout_from"] == "9"


def test_leaving_a_shell(platform: FakePlatform, shell: Terminal) -> None:
    shell.wait_for(b"$ welcome")
    shell.type(b"~.")
    assert shell.end() == 0
    shell.wait_for(b"--attach cmd1")
    assert not shell.raw()
    assert not platform.calls("DELETE", "/cmd1")


def test_a_hangup_ends_the_shell_there_and_restores_here(
    platform: FakePlatform, shell: Terminal
) -> None:
    shell.wait_for(b"$ welcome")
    shell.signal(1)
    assert shell.end() == 130
    assert not shell.raw()
    assert platform.calls("DELETE", "/cmd1")


def test_a_second_interrupt_kills_without_a_word(platform: FakePlatform, url: str) -> None:
    platform.sandbox("POST", "/commands", json(command(running=True), 201))
    output = Output(stream="stdout", offset=0, data=b"started")
    platform.sandbox("GET", "/commands/cmd1/events", lines(output, hang=True))
    platform.sandbox("POST", "/commands/cmd1/signal", Reply(204))
    platform.sandbox("DELETE", "/commands/cmd1", json(command(exit_code=137)))
    terminal = Terminal("exec", SANDBOX, "--", "sleep", "1000")
    try:
        terminal.wait_for(b"started")
        terminal.signal(2)
        until = time.monotonic() + 20
        while not platform.calls("POST", "/signal"):
            assert time.monotonic() < until
            select.select([], [], [], 0.02)
        terminal.signal(2)
        assert terminal.end() == 130
        assert platform.calls("DELETE", "/cmd1")
        os.write(terminal._slave, b"|end|")
        terminal.wait_for(b"|end|")
        assert terminal.shown == b"started|end|"
    finally:
        terminal.close()


def test_input_and_output_are_streams_of_bytes(platform: FakePlatform, url: str) -> None:
    got: list[bytes] = []

    def stdin(seen: Seen) -> Reply:
        got.append(seen.body)
        return Reply(204)

    async def echo(seen: Seen) -> Reply:
        while not any("eof" in c.query for c in platform.calls("POST", "/stdin")):  # noqa: ASYNC110
            await anyio.sleep(0.02)
        data = b"".join(got)
        return lines(
            Output(stream="stdout", offset=0, data=data), Exited(command=command(exit_code=0))
        )

    platform.sandbox("POST", "/commands", json(command(running=True), 201))
    platform.sandbox("POST", "/commands/cmd1/stdin", stdin)
    platform.sandbox("GET", "/commands/cmd1/events", echo)
    data = bytes(range(256)) * 1000
    done = subprocess.run(
        [*DSEC, "exec", "-i", SANDBOX, "--", "cat"], input=data, capture_output=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, b"")
    assert done.stdout == data


def test_a_reader_that_leaves_ends_the_command(platform: FakePlatform, url: str) -> None:
    platform.sandbox("POST", "/commands", json(command(running=True), 201))
    outputs = [Output(stream="stdout", offset=i * 9000, data=b"y\n" * 4500) for i in range(100)]
    platform.sandbox("GET", "/commands/cmd1/events", lines(*outputs, hang=True))
    platform.sandbox("DELETE", "/commands/cmd1", json(command(exit_code=137)))
    line = f"{' '.join(DSEC)} exec {SANDBOX} yes | head -1; echo ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", line], capture_output=True, check=False)
    assert done.stdout == b"y\n141\n"
    assert done.stderr == b""
    assert platform.calls("DELETE", "/cmd1")
