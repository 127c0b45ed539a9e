"""The apiserver alone is killed: its clients reconnect, and nothing runs twice."""

from __future__ import annotations

import socket
import subprocess
import sys
import time
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path

import anyio
import pytest

from dsec import DSecClient, DSecContainerRunArgs
from tests.contract import image

pytestmark = [pytest.mark.needs_root]
START_S = 30.0


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


class Split:
    """An edge and an apiserver, each a process of its own."""

    def __init__(self, place: Path) -> None:
        self.place = place
        self.edge_socket = place / "e.sock"
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        (place / "api.toml").write_text(
            f'port = {port}\nstate_dir = "{place}/api"\n[[edges]]\nunix_socket = "{self.edge_socket}"\n'
        )
        edge = ["--listen", str(self.edge_socket), "--state-dir", f"{place}/edge"]
        self.edge = self._start("edge", *edge, "--run-dir", f"{place}/run", "--stop-sandboxes")
        self._until(self.edge_socket.exists)
        self.apiserver = self.start_apiserver()

    def _start(self, *words: str) -> subprocess.Popen[bytes]:
        env = {"HOME": str(self.place), "PATH": "/usr/sbin:/usr/bin:/sbin:/bin"}
        with (self.place / "log").open("ab") as log:
            argv = [sys.executable, "-m", "dsec.main.command", *words]
            return subprocess.Popen(argv, stdout=log, stderr=log, env=env)

    def _until(self, condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + START_S
        while not condition():
            assert time.monotonic() < deadline, (self.place / "log").read_text()[-3000:]
            time.sleep(0.05)

    def start_apiserver(self) -> subprocess.Popen[bytes]:
        process = self._start("apiserver", "--config", str(self.place / "api.toml"))
        self._until((self.place / "api" / "credentials.toml").exists)
        return process

    def client(self) -> DSecClient:
        with (self.place / "api" / "credentials.toml").open("rb") as file:
            values = tomllib.load(file)
        return DSecClient(api_url=values["api_url"], api_key=values["api_key"])

    def stop(self) -> None:
        for process in (self.apiserver, self.edge):
            process.terminate()
            process.wait(60)


@pytest.fixture
def split(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Split]:
    place = tmp_path_factory.mktemp("s")
    running = Split(place)
    yield running
    running.stop()


async def test_clients_of_a_killed_apiserver_reconnect(split: Split, tmp_path: Path) -> None:
    with anyio.fail_after(120):
        async with split.client() as client:
            archive = image.build(tmp_path / "contract.tar")
            await client.images.import_archive(archive, image.NAME).wait()
            args = DSecContainerRunArgs(container_image=image.NAME)
            async with (
                await client.run_container(args) as sandbox,
                anyio.create_task_group() as group,
            ):

                async def wait() -> None:
                    result = await sandbox.run_shell("echo x >> /tmp/runs; sleep 3; echo done")
                    assert (result.stdout, result.exit_code) == ("done\n", 0)

                group.start_soon(wait)
                while not await sandbox.files.exists("/tmp/runs"):  # noqa: ASYNC110 - nobody is told of a file
                    await anyio.sleep(0.05)
                split.apiserver.kill()
                split.apiserver.wait()
                split.apiserver = split.start_apiserver()
                assert await sandbox.files.read("/tmp/runs") == b"x\n"
