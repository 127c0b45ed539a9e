"""`dsec up` as a process: one per state directory, the key kept, a clean end."""

from __future__ import annotations

import errno
import json
import os
import signal
import stat
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest

from dsec.base.errors import Conflict, DsecError, InternalError, StorageFull
from dsec.main import credentials, detach, state_dir
from dsec.main.listen import bind_tcp, url_of


class Server:
    def __init__(self, folder: Path) -> None:
        self.state = folder / "state"
        self.home = folder / "config"
        self.env = {**os.environ, "XDG_CONFIG_HOME": str(self.home)}
        self.env.pop("DSEC_API_KEY", None)
        self.env.pop("DSEC_API_URL", None)
        self._dirs = ["--state-dir", str(self.state), "--run-dir", str(folder / "run")]

    def dsec(self, *words: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "dsec.main.command", *words]
        return subprocess.run(
            command, env=self.env, cwd=cwd, capture_output=True, text=True, timeout=60, check=False
        )

    def up(self, *flags: str) -> subprocess.CompletedProcess[str]:
        return self.dsec("up", "--backend", "sim", "--port", "0", *self._dirs, *flags)

    def down(self) -> subprocess.CompletedProcess[str]:
        return self.dsec("down", "--state-dir", str(self.state))

    def client(self) -> httpx.Client:
        found = tomllib.loads((self.home / "dsec" / "credentials.toml").read_text())
        headers = {"Authorization": f"Bearer {found['api_key']}"}
        return httpx.Client(base_url=found["api_url"], headers=headers)

    def key(self) -> str:
        return str(tomllib.loads((self.home / "dsec/credentials.toml").read_text())["api_key"])


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    server = Server(tmp_path)
    yield server
    server.down()


def test_up_serves_and_down_ends(server: Server) -> None:
    up = server.up("--detach")
    assert up.returncode == 0, up.stderr
    assert "DSec serves at http://127.0.0.1:" in up.stdout
    for file in (server.home / "dsec/credentials.toml", server.state / "credentials.toml"):
        assert stat.S_IMODE(file.stat().st_mode) == 0o600
    with server.client() as client:
        made = client.post("/v1/sandboxes", json={"image": "debian"})
        assert made.status_code == 201, made.text
        ran = client.post(
            f"/v1/sandboxes/{made.json()['id']}/commands/run", json={"argv": ["echo", "hello"]}
        )
        assert ran.json()["exit_code"] == 0
    key = server.key()

    second = server.up()
    assert second.returncode == 73
    assert "in use by process" in second.stderr

    down = server.down()
    assert down.returncode == 0, down.stderr
    assert state_dir.holder_of(server.state) is None
    assert server.down().returncode == 66

    assert server.up("--detach").returncode == 0
    assert server.key() == key
    with server.client() as client:
        assert client.get("/v1/nodes").json()[0]["id"] == made.json()["node"]
    log = (server.state / "server.log").read_text()
    assert [line for line in log.splitlines() if json.loads(line)["level"] == "error"] == []
    assert key not in log


def test_a_port_that_is_taken_is_a_clear_error(server: Server) -> None:
    with bind_tcp("127.0.0.1", 0) as taken:
        port = str(taken.getsockname()[1])
        for flags in ((), ("--detach",)):
            refused = server.up("--port", port, *flags)
            assert refused.returncode == 73
            assert f"127.0.0.1:{port} is taken" in refused.stderr
            assert "Traceback" not in refused.stderr


def test_a_state_directory_that_cannot_be_is_a_clear_error(server: Server) -> None:
    refused = server.dsec("up", "--backend", "sim", "--state-dir", "/proc/nope", "--port", "0")
    assert refused.returncode == 64
    assert "cannot use directory /proc/nope" in refused.stderr


@pytest.mark.parametrize("sent", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_it_in_order(server: Server, sent: signal.Signals) -> None:
    assert server.up("--detach").returncode == 0
    holder = state_dir.holder_of(server.state)
    assert holder is not None
    process = os.pidfd_open(holder.pid)
    signal.pidfd_send_signal(process, sent)
    assert state_dir._ended(process, 20)
    os.close(process)
    assert "Traceback" not in (server.state / "server.log").read_text()


def test_a_run_directory_is_one_servers(server: Server) -> None:
    assert server.up("--detach").returncode == 0
    refused = server.up("--state-dir", str(server.state.with_name("other")))
    assert refused.returncode == 73
    assert "in use by process" in refused.stderr
    assert "--run-dir" in refused.stderr


def test_one_directory_may_be_both(tmp_path: Path) -> None:
    with state_dir.hold(tmp_path, tmp_path), pytest.raises(Conflict):
        with state_dir.hold(tmp_path, tmp_path):
            pass
    with (
        pytest.raises(BlockingIOError),
        state_dir.hold(tmp_path),
    ):  # the server's own, not the lock's
        raise BlockingIOError


def test_relative_directories_are_the_callers(server: Server, tmp_path: Path) -> None:
    directories = ["--state-dir", "state", "--run-dir", "run"]
    up = server.dsec(
        "up", "--backend", "sim", "--port", "0", "--detach", *directories, cwd=tmp_path
    )
    assert up.returncode == 0, up.stderr
    assert (tmp_path / "state" / "control.db").exists()
    assert (tmp_path / "run" / state_dir.RUN_LOCK).exists()
    assert server.dsec("down", "--state-dir", "state", cwd=tmp_path).returncode == 0


@pytest.mark.parametrize(
    ("failure", "kind"),
    [
        (OSError(errno.ENOSPC, "No space left on device"), StorageFull),
        (RuntimeError("a reason"), InternalError),
        (Conflict("taken"), Conflict),
    ],
)
def test_why_it_does_not_serve_is_told(
    failure: Exception, kind: type[DsecError], tmp_path: Path
) -> None:
    ours, theirs = os.pipe()

    def run(_announce: Callable[[str], None]) -> None:
        raise failure

    assert detach._child(run, theirs) == kind.exit_status
    with pytest.raises(kind, match=r"disk is full|a reason|taken"):
        detach._wait(ours, tmp_path / "log")


def test_a_second_server_leaves_the_first_ones_address_alone(
    server: Server, tmp_path: Path
) -> None:
    assert server.up("--detach").returncode == 0
    first = server.key()
    other = Server(tmp_path / "other")
    other.home = server.home
    other.env["XDG_CONFIG_HOME"] = str(server.home)
    up = other.up("--detach")
    try:
        assert up.returncode == 0, up.stderr
        assert "speaks of another server" in up.stdout
        assert server.key() == first
    finally:
        assert other.down().returncode == 0


def test_what_goes_wrong_after_the_announcement_is_written_to_no_descriptor(
    tmp_path: Path,
) -> None:
    ours, theirs = os.pipe()

    def run(announce: Callable[[str], None]) -> None:
        announce("serves")
        with (tmp_path / "database").open("wb") as file:
            assert file.fileno() == theirs
            raise Conflict("later")

    assert detach._child(run, theirs) == Conflict.exit_status
    assert (tmp_path / "database").read_bytes() == b""
    assert detach._wait(ours, tmp_path / "log") == "serves"


@pytest.mark.anyio
async def test_another_hosts_credentials_are_left_alone(tmp_path: Path) -> None:
    env = {"XDG_CONFIG_HOME": str(tmp_path)}
    file = credentials.user_file(env)
    credentials.write(file, "https://dsec.example.org", "dsec_1")
    assert await credentials.publish(env, "http://127.0.0.1:1", "dsec_2") is None
    assert "example.org" in file.read_text()
    credentials.write(file, "http://localhost:9", "dsec_1")
    assert await credentials.publish(env, "http://127.0.0.1:1", "dsec_2") == file
    assert "dsec_2" in file.read_text()


def test_a_listener_has_an_address_for_clients() -> None:
    for host, found in (("0.0.0.0", "127.0.0.1"), ("127.0.0.1", "127.0.0.1")):
        with bind_tcp(host, 0) as listener:
            assert url_of(listener) == f"http://{found}:{listener.getsockname()[1]}"
