"""The edge's side of `aether launch`, against a stand-in that does as a sandbox's name says."""

from __future__ import annotations

import sys
from collections import OrderedDict
from pathlib import Path

import anyio
import pytest

from dsec.base.errors import StartFailed, StorageFull, Unavailable
from dsec.edge import launcher
from dsec.edge.launcher import Launcher, Launchers
from dsec.wire.launch import LaunchReply, LaunchSpec

STAND_IN = """#!{python}
import os, socket, sys, time
import msgspec
with open("{log}", "a") as log:
    print(os.getpid(), file=log)
talk = socket.socket(fileno=3).makefile("rwb", buffering=0)
while head := talk.read(4):
    asked = msgspec.msgpack.decode(talk.read(int.from_bytes(head, "big")))
    word = asked["spec"]["id"]
    if word == "hangs":
        time.sleep(600)
    if word == "dies":
        os._exit(1)
    answer = dict(id=asked["id"], pid=0 if word == "fails" else 7)
    if word == "full":
        answer |= dict(pid=0, step="make directory", path="/s/upper", errno=28, message="no space")
    if word == "limit":
        answer |= dict(pid=0, step="clone", path="", errno=28, message="clone: no space")
    if word == "fails":
        answer |= dict(step="copy layer", path="/l", errno=2, message="copy layer /l: no such file")
    body = msgspec.msgpack.encode(answer)
    talk.write(len(body).to_bytes(4, "big") + body)
"""


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


class Binary:
    def __init__(self, place: Path) -> None:
        self.path, self._log = place / "aether", place / "log"
        self.put_back()

    def put_back(self) -> None:
        self.path.write_text(STAND_IN.format(python=sys.executable, log=self._log))
        self.path.chmod(0o755)

    def lives(self) -> bool:
        """Whether the first process of it is there."""
        return Path("/proc", self._log.read_text().split()[0]).exists()


@pytest.fixture
def binary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Binary:
    monkeypatch.setattr(launcher, "RESTART_PAUSE_S", 0.01)
    return Binary(tmp_path)


def spec(word: str) -> LaunchSpec:
    return LaunchSpec(
        id=word, hostname="h", uid_base=0, layers=[], upper="/u", work="/w", socket="/s"
    )


async def launched(launchers: Launchers) -> LaunchReply:
    """Launch one as soon as a launcher is there again."""
    with anyio.fail_after(20):
        while True:
            try:
                return await launchers.launch(spec("starts"))
            except Unavailable:
                await anyio.sleep(0.01)


async def test_it_starts_and_says_once_what_failed(binary: Binary) -> None:
    launchers = Launchers(binary.path, 1)
    async with launchers.running():
        assert (await launchers.launch(spec("starts"))).pid == 7
        with pytest.raises(StartFailed) as caught:
            await launchers.launch(spec("fails"))
        assert caught.value.message == (
            "the sandbox could not be started: copy layer /l: no such file"
        )


async def test_a_full_disk_is_told_from_a_limit_of_the_kernel(binary: Binary) -> None:
    launchers = Launchers(binary.path, 1)
    async with launchers.running():
        with pytest.raises(StorageFull, match="/s/upper"):
            await launchers.launch(spec("full"))
        with pytest.raises(StartFailed):
            await launchers.launch(spec("limit"))


async def test_without_a_binary_it_does_not_come_up(tmp_path: Path) -> None:
    with pytest.RaisesGroup(FileNotFoundError):
        async with Launchers(tmp_path / "nonesuch", 1).running():
            pass


async def test_one_that_cannot_be_started_again_is_tried_again(binary: Binary) -> None:
    launchers = Launchers(binary.path, 1)
    async with launchers.running():
        binary.path.unlink()
        with pytest.raises(Unavailable):
            await launchers.launch(spec("dies"))
        await anyio.sleep(0.1)
        binary.put_back()
        assert (await launched(launchers)).pid == 7


async def test_a_launch_given_up_is_over_before_its_caller_goes_on(binary: Binary) -> None:
    one = Launcher(binary.path, OrderedDict())
    async with anyio.create_task_group() as group:
        await group.start(one.run)
        assert (await one.launch(spec("starts"))).pid == 7
        with anyio.move_on_after(0.2):
            await one.launch(spec("hangs"))
        assert not binary.lives()
        group.cancel_scope.cancel()
