"""What profiles refuse, that it is counted, and that a flood of it costs nobody but its sender."""

from __future__ import annotations

import errno
import os
import shutil
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from tests.kernel.serving import AETHER, Client, Serving, eventually, serving

pytestmark = [
    pytest.mark.needs_root,
    pytest.mark.skipif(os.uname().machine != "x86_64", reason="numbers of calls are x86-64's"),
]

ATTEMPTS = """
import ctypes, errno, sys
call = ctypes.CDLL(None, use_errno=True).syscall
for line in sys.argv[1:]:
    numbers = [int(word) for word in line.split()]
    done = call(*map(ctypes.c_long, numbers))
    print(errno.errorcode[ctypes.get_errno()] if done < 0 else 0)
"""
"""Prints what each call was answered; each argument is a number and its arguments."""

KEYCTL = "250 0 -3 0 0"
KILL_1 = "62 1 18"
ASK_1 = "62 1 0"
ALG, UNIX, PACKET = "41 38 5 0", "41 1 1 0", "41 17 3 0"
PIDFD_1 = "434 1 0"
PERSONALITY = "135 262144"
VMSPLICE = "278 -1 0 0 0"

Run = Callable[..., Client]


@pytest.fixture
def under(tmp_path: Path) -> Iterator[Run]:
    """Starts aether with a profile."""
    with ExitStack() as stack:

        def start(profile: str, **spec: Any) -> Client:
            place = tmp_path / f"{profile}-{len(list(tmp_path.iterdir()))}"
            place.mkdir()
            capabilities = ["CAP_SYS_CHROOT", "CAP_KILL", "CAP_NET_RAW", "CAP_DAC_OVERRIDE"]
            spec = {"seccomp": profile, "capabilities": capabilities, **spec}
            return stack.enter_context(serving(place, **spec)).client()

        yield start


def attempt(client: Client, *calls: str) -> list[str]:
    done = client.run(sys.executable, "-c", ATTEMPTS, *calls)
    assert done["exit_code"] == 0, done
    return str(done["out"].decode()).split()


def tallies(client: Client) -> dict[tuple[str, int | None], int]:
    report = client.call("tamper")
    assert report["counted"]
    return {(line["name"], line.get("argument")): line["count"] for line in report["calls"]}


@pytest.mark.adversarial
def test_default_refuses_what_goes_without_it(under: Run) -> None:
    calls = [KEYCTL, KILL_1, PIDFD_1, UNIX, PACKET, ASK_1]
    assert attempt(under("none"), *calls) == ["0"] * len(calls)
    client = under("default")
    assert attempt(client, *calls) == ["EPERM"] * 3 + ["0"] * 3
    assert tallies(client) == {("keyctl", 0): 1, ("kill", 18): 1, ("pidfd_open", None): 1}
    at_agent = [line["name"] for line in client.call("tamper")["calls"] if line["at_agent"]]
    assert sorted(at_agent) == ["kill", "pidfd_open"]


@pytest.mark.adversarial
def test_strict_refuses_what_default_allows(under: Run) -> None:
    calls = [PACKET, PERSONALITY, VMSPLICE]
    assert attempt(under("default"), *calls) == ["0", "0", "EBADF"]
    client = under("strict")
    assert attempt(client, *calls) == ["EPERM"] * 3
    assert tallies(client) == {
        ("socket", 17): 1, ("personality", 262144): 1, ("vmsplice", None): 1,
    }  # fmt: skip


def test_calls_allowed_by_name_are_allowed(under: Run) -> None:
    client = under("strict", seccomp_allow=["keyctl", "socket"])
    assert attempt(client, KEYCTL, PACKET, PERSONALITY) == ["0", "0", "EPERM"]


def test_nothing_is_refused_or_counted_without_a_profile(under: Run) -> None:
    report = under("none").call("tamper")
    assert (report["counted"], report["calls"]) == (False, [])


def test_what_was_left_running_is_counted_too(under: Run) -> None:
    client = under("default")
    later = f"import os, time\nwhile os.getppid() != 1: time.sleep(0.01)\n{ATTEMPTS}"
    text = f"{sys.executable} -c '{later}' '{ALG}' >/dev/null 2>&1 &"
    assert client.run(shell=text)["exit_code"] == 0
    eventually(lambda: tallies(client).get(("socket", 38)) == 1)


def test_sessions_are_counted_too(under: Run) -> None:
    client = under("default")
    client.call("session_open", session_id="s")
    text = f"{sys.executable} -c '{ATTEMPTS}' '{ALG}'"
    assert client.run(shell=text, session="s")["out"] == b"EPERM\n"
    assert tallies(client) == {("socket", 38): 1}


HELD = f"""#!{sys.executable}
import ctypes, os, sys
allow_all = ctypes.create_string_buffer((0x06).to_bytes(4, "little") + (0x7FFF0000).to_bytes(4, "little"))
class Program(ctypes.Structure):
    _fields_ = [("length", ctypes.c_ushort), ("filter", ctypes.c_void_p)]
program = Program(1, ctypes.addressof(allow_all))
listener = ctypes.CDLL(None).syscall(317, 1, 8, ctypes.byref(program))
assert listener > 0
os.dup2(listener, 99, inheritable=True)
os.execv({str(AETHER)!r}, ["aether", *sys.argv[1:]])
"""
"""Starts aether as it is on a host that is held to a filter with a listener itself."""


def test_where_nobody_can_count_all_is_refused_and_the_report_says_so(
    under: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wrapper = tmp_path / "held"
    wrapper.write_text(HELD)
    wrapper.chmod(0o755)
    monkeypatch.setattr("tests.kernel.serving.AETHER", wrapper)
    client = under("default")
    assert client.call("tamper")["counted"]
    assert attempt(client, KEYCTL, UNIX) == ["EPERM", "0"]
    report = client.call("tamper")
    assert (report["counted"], report["calls"]) == (False, [])


def descriptors(server: int) -> int:
    return len(list(Path(f"/proc/{server}/fd").iterdir()))


def test_no_listener_outlives_its_command_nor_reaches_it(tmp_path: Path) -> None:
    with serving(tmp_path, seccomp="default") as server:
        client = server.client()
        client.run("/bin/true")
        before = descriptors(server.pid)
        links = client.run(shell="ls -l /proc/self/fd")["out"]
        assert b"seccomp" not in links
        assert b"pipe" in links
        for _ in range(20):
            client.run("/bin/true")
        eventually(lambda: descriptors(server.pid) <= before)


TOOLS = {
    "bash": "bash -c 'for i in 1 2 3; do echo $i; done | sort -r | head -1; wait'",
    "python": "python3 -m venv --without-pip venv && venv/bin/python -c 'import ssl, sqlite3'",
    "subprocesses": "python3 -c 'import subprocess; subprocess.run([\"true\"], check=True)'",
    "pip": "python3 -m pip --version",
    "apt": "apt-get -s -o Debug::NoLocking=1 install bash && dpkg -l bash",
    "gcc": "echo 'int main(void) { return 0; }' > a.c && gcc -O1 -o a a.c && ./a",
    "git": "git init -q r && cd r && git -c user.name=x -c user.email=x@x commit -q --allow-empty -m x",
    "node": 'node -e \'require("child_process").execSync("true")\'',
    "go": "go version",
}


@pytest.mark.parametrize("tool", TOOLS)
def test_ordinary_tools_work_under_strict(under: Run, tmp_path: Path, tool: str) -> None:
    program = TOOLS[tool].split()[0]
    if shutil.which(program) is None:
        pytest.skip(f"no {program} on this host")
    client = under("strict")
    done = client.run(
        shell=TOOLS[tool],
        cwd=str(tmp_path),
        env={"HOME": str(tmp_path), "PATH": os.environ["PATH"]},
    )
    assert done["exit_code"] == 0, done
    assert client.call("tamper")["calls"] == []


FLOOD = """
import ctypes, os
call = ctypes.CDLL(None).socket
for _ in range(63):
    if os.fork() == 0:
        break
while True:
    call(38, 5, 0)
"""


def test_commands_run_while_many_processes_flood(under: Run) -> None:
    client = under("default")
    client.call("start", command_id="flood", argv=[sys.executable, "-c", FLOOD], timeout_s=60.0)
    eventually(lambda: tallies(client).get(("socket", 38), 0) > 64)
    before = tallies(client)["socket", 38]
    for _ in range(5):
        assert client.run("/bin/echo", "here")["out"] == b"here\n"
    eventually(lambda: tallies(client)["socket", 38] > before)
    client.call("kill", command_id="flood")


WITNESS = """
import ctypes, sys, time
libc = ctypes.CDLL(None, use_errno=True)
while True:
    done = libc.socket(38, 5, 0)
    with open(sys.argv[1], "w") as file:
        file.write(f"{done} {ctypes.get_errno()}\\n")
    time.sleep(0.01)
"""


def said(file: Path) -> str:
    return file.read_text() if file.exists() else ""


@pytest.mark.adversarial
def test_a_filter_nobody_answers_for_lets_nothing_through(tmp_path: Path) -> None:
    with serving(tmp_path, seccomp="default", pid1=False) as server:
        file = tmp_path / "said"
        argv = [sys.executable, "-c", WITNESS, str(file)]
        server.client().call("start", command_id="witness", argv=argv)
        eventually(lambda: said(file) == f"-1 {errno.EPERM}\n")
        kill_only_aether(server)
        eventually(lambda: said(file) == f"-1 {errno.ENOSYS}\n")
        assert server.members()


def kill_only_aether(server: Serving) -> None:
    os.kill(server.process.pid, signal.SIGKILL)
    server.process.wait()
