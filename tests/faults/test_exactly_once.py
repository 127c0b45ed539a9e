"""Exactly once under fire: clients, apiserver and edge are killed again and again, nothing runs twice.

The long form (1,000 commands, 30 kills) runs with DSEC_FIRE=full; DSEC_FIRE_SEED chooses the kills.
"""

from __future__ import annotations

import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
import tomllib
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Literal

import anyio
import pytest

from dsec import DSecClient, DSecContainerRunArgs
from tests.contract import image
from tests.contract.server import remove_groups

pytestmark = [pytest.mark.needs_root]

FULL = os.environ.get("DSEC_FIRE") == "full"
COMMANDS, KILLS = (1000, 30) if FULL else (96, 6)
SEED = int(os.environ.get("DSEC_FIRE_SEED", "4"))
PROGRAMS, CLIENTS_EACH = 4, 4
START_S, END_S = 60.0, 900.0 if FULL else 180.0
Victim = Literal["edge", "apiserver", "client"]


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


class Fire:
    """An edge, an apiserver and client programs, each a process of its own."""

    def __init__(self, place: Path) -> None:
        self.place = place
        self._socket = place / "e.sock"
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self._port = free.getsockname()[1]
        (place / "edge.toml").write_text(f'aether = "{os.environ.get("DSEC_AETHER", "")}"\n')
        (place / "api.toml").write_text(
            f'port = {self._port}\nstate_dir = "{place}/api"\n[[edges]]\nunix_socket = "{self._socket}"\n'
        )
        self.sandbox = ""
        self.programs: list[subprocess.Popen[bytes]] = []
        self._started: list[subprocess.Popen[bytes]] = []

    def start(self) -> None:
        self.edge = self.start_edge()
        self.apiserver = self.start_apiserver()

    def _start(self, log: str, argv: list[str]) -> subprocess.Popen[bytes]:
        env = {"HOME": str(self.place), "PATH": "/usr/sbin:/usr/bin:/sbin:/bin"}
        env["PYTHONPATH"] = f"{image.REPOSITORY}/src:{image.REPOSITORY}"
        with (self.place / log).open("ab") as file:
            process = subprocess.Popen([sys.executable, *argv], stdout=file, stderr=file, env=env)
        self._started.append(process)
        return process

    def start_edge(self) -> subprocess.Popen[bytes]:
        argv = ["-m", "dsec.main.command", "edge", "--listen", str(self._socket)]
        # A killed one stops nothing; the last one clears up, whatever became of the test.
        argv += ["--stop-sandboxes", "--state-dir", f"{self.place}/edge"]
        argv += ["--run-dir", f"{self.place}/run"]
        process = self._start("edge.log", [*argv, "--config", str(self.place / "edge.toml")])
        self._until(process, self._edge_answers)
        return process

    def _edge_answers(self) -> bool:
        with socket.socket(socket.AF_UNIX) as probe:
            return not probe.connect_ex(str(self._socket))

    def start_apiserver(self) -> subprocess.Popen[bytes]:
        argv = ["-m", "dsec.main.command", "apiserver", "--config", str(self.place / "api.toml")]
        process = self._start("api.log", argv)
        self._until(process, self._api_answers)
        return process

    def _api_answers(self) -> bool:
        if not (self.place / "api" / "credentials.toml").exists():
            return False
        with socket.socket() as probe:
            return not probe.connect_ex(("127.0.0.1", self._port))

    def _until(self, process: subprocess.Popen[bytes], condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + START_S
        while not condition():
            assert process.poll() is None, self.tail()
            assert time.monotonic() < deadline, self.tail()
            time.sleep(0.02)

    def credentials(self) -> tuple[str, str]:
        values = tomllib.loads((self.place / "api" / "credentials.toml").read_text())
        return values["api_url"], values["api_key"]

    def start_program(self, number: int, idents: list[str]) -> subprocess.Popen[bytes]:
        script = str(Path(__file__).with_name("fire_client.py"))
        results = str(self.place / f"results-{number}")
        url, key = self.credentials()
        mine = idents[number::PROGRAMS]
        given = [url, key, self.sandbox, results, str(CLIENTS_EACH), *mine]
        return self._start("clients.log", [script, *given])

    def results(self) -> list[tuple[str, str, str, int]]:
        found = []
        for path in self.place.glob("results-*"):
            whole, _, _torn = path.read_text().rpartition("\n")
            for line in whole.splitlines():
                try:
                    found.append(tuple(json.loads(line)))
                except (
                    json.JSONDecodeError
                ):  # a killed program's last line, and the next one's first
                    found.append(tuple(json.loads(line[line.rindex("[") :])))
        return found

    def tail(self) -> str:
        logs = [self.place / f"{name}.log" for name in ("edge", "api", "clients")]
        return "\n".join(f"{log.name}:\n{log.read_text()[-2000:]}" for log in logs if log.exists())

    def stop(self) -> None:
        for process in reversed(self._started):
            process.terminate()
            process.wait(60)
        for line in reversed(Path("/proc/self/mountinfo").read_text().splitlines()):
            if (point := line.split()[4]).startswith(str(self.place)):
                subprocess.run(["umount", "--lazy", point], check=True)
        remove_groups((self.place / "edge" / "node").read_text().strip())


@pytest.fixture
def fire(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fire]:
    burning = Fire(tmp_path_factory.mktemp("f"))
    try:
        burning.start()
        yield burning
    except BaseException:
        print(burning.tail())  # noqa: T201 - shown with the failure
        raise
    finally:
        burning.stop()


def kill(process: subprocess.Popen[bytes]) -> None:
    process.send_signal(signal.SIGKILL)
    process.wait(60)


async def test_every_command_runs_once_and_everyone_gets_its_result(
    fire: Fire, tmp_path: Path
) -> None:
    idents = [f"op-{number}" for number in range(COMMANDS)]
    with anyio.fail_after(END_S + 120):
        async with _client(fire) as client:
            archive = image.build(tmp_path / "contract.tar")
            await client.images.import_archive(archive, image.NAME).wait()
            args = DSecContainerRunArgs(container_image=image.NAME, ttl_running_stop=None)
            fire.sandbox = (await client.run_container(args)).id
        await anyio.to_thread.run_sync(_burn, fire, idents)
        async with _client(fire) as client:
            sandbox = await client.get(fire.sandbox)
            ran = (await sandbox.files.read("/tmp/ran")).decode().splitlines()
            recorded = [entry async for entry in sandbox.trajectory(ops=["command"])]
            await sandbox.stop()
    _judge(idents, fire, ran)
    assert Counter(entry.id for entry in recorded) == Counter(idents)
    true = dict(line.split() for line in ran)
    for entry in recorded:
        assert entry.stdout is not None
        assert entry.outcome == "ok"
        assert entry.stdout.join().decode().strip() == true[entry.id]


def _client(fire: Fire) -> DSecClient:
    url, key = fire.credentials()
    return DSecClient(api_url=url, api_key=key)


def _judge(idents: list[str], fire: Fire, ran: list[str]) -> None:
    true = dict(line.split() for line in ran)
    assert sorted(line.split()[0] for line in ran) == sorted(idents), fire.tail()
    told = fire.results()
    assert {ident for ident, *_ in told} == set(idents)
    for ident, stdout, stderr, status in told:
        assert (stdout, stderr) == (true[ident], ident)
        assert status == int(ident.rpartition("-")[2]) % 7


def _burn(fire: Fire, idents: list[str]) -> None:
    """Have all done, with kills spread over the work."""
    chance = random.Random(SEED)
    victims: list[Victim] = ["edge", "apiserver", "client"] * (KILLS // 3)
    chance.shuffle(victims)
    marks = sorted(chance.sample(range(1, COMMANDS - PROGRAMS * CLIENTS_EACH), KILLS))
    fire.programs = [fire.start_program(number, idents) for number in range(PROGRAMS)]
    deadline = time.monotonic() + END_S
    for mark, victim in zip(marks, victims, strict=True):
        _until_done(fire, mark, deadline)
        time.sleep(chance.uniform(0, 0.05))  # in the middle of whatever goes on
        _strike(fire, victim, chance, idents)
    _until_done(fire, COMMANDS, deadline)
    for program in fire.programs:
        assert program.wait(END_S) == 0, fire.tail()


def _until_done(fire: Fire, count: int, deadline: float) -> None:
    while len({ident for ident, *_ in fire.results()}) < count:
        assert time.monotonic() < deadline, fire.tail()
        time.sleep(0.05)


def _strike(fire: Fire, victim: Victim, chance: random.Random, idents: list[str]) -> None:
    if victim == "edge":
        kill(fire.edge)
        fire.edge = fire.start_edge()
    elif victim == "apiserver":
        kill(fire.apiserver)
        fire.apiserver = fire.start_apiserver()
    else:
        number = chance.randrange(PROGRAMS)
        kill(fire.programs[number])
        fire.programs[number] = fire.start_program(number, idents)
