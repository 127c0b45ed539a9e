# ruff: noqa: ARG002  -- the arguments are those of the SDK
"""A platform in memory: sandboxes that keep files and answer commands as a test says."""

from __future__ import annotations

import io
import tarfile
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import anyio
import anyio.lowlevel

from dsec.base.errors import DsecError, NotFound
from dsec.sdk import DSecContainerRunArgs

GOOD = '{"check": "a", "passed": true, "detail": ""}\n{"verdict": {"passed": 1, "failed": 0}}\n'
BAD = '{"check": "a", "passed": false, "detail": "no"}\n{"verdict": {"passed": 0, "failed": 1}}\n'


@dataclass
class Ran:
    exit_code: int | None = 0
    stdout: str = ""
    stderr: str = ""
    timed_out: bool = False
    oom_killed: bool = False
    truncated: bool = False


@dataclass
class Used:
    memory_bytes: int = 1 << 20
    memory_peak_bytes: int = 3 << 20


class FakeFiles:
    def __init__(self, client: FakeClient) -> None:
        self._client = client
        self.kept: dict[str, bytes] = {}

    async def write(
        self, path: str, data: Any, *, mode: int = 0o644, parents: bool = False
    ) -> None:
        self._client.reach(f"write {path}")
        self.kept[path] = data

    async def read(self, path: str, *, length: int | None = None) -> bytes:
        self._client.reach(f"read {path}")
        if path not in self.kept:
            raise NotFound(path, kind="path")
        return self.kept[path][:length]

    async def mkdir(self, path: str, *, parents: bool = False) -> None:
        self._client.reach(f"mkdir {path}")

    async def put_tar(self, path: str, chunks: AsyncIterator[bytes]) -> None:
        self._client.reach("put_tar")
        data = b"".join([chunk async for chunk in chunks])
        with tarfile.open(fileobj=io.BytesIO(data)) as tar:
            for member in tar.getmembers():
                file = tar.extractfile(member)
                self.kept[f"{path}/{member.name}"] = file.read() if file else b""

    async def get_tar(self, path: str) -> AsyncGenerator[bytes, None]:
        self._client.reach("get_tar")
        buffer = io.BytesIO()
        with tarfile.open(fileobj=buffer, mode="w") as tar:
            for name, data in self.kept.items():
                if name.startswith(path + "/"):
                    info = tarfile.TarInfo(name.removeprefix(path + "/"))
                    info.size = len(data)
                    tar.addfile(info, io.BytesIO(data))
        yield buffer.getvalue()


class FakeSandbox:
    def __init__(self, client: FakeClient, args: DSecContainerRunArgs) -> None:
        self._client = client
        self.args = args
        self.role = args.labels["role"]
        self.id = f"sbx{len(client.sandboxes)}"
        self.files = FakeFiles(client)
        self.stopped = 0
        self.command_ids: list[str | None] = []

    async def run_shell(
        self,
        command: str,
        *,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        timeout: float | None = None,
        command_id: str | None = None,
        output_limit_bytes: int | None = None,
    ) -> Ran:
        self.command_ids.append(command_id)
        kind = "setup" if command.startswith("set -e") else "shell"
        self._client.reach(f"{self.role} {kind}")
        if kind == "shell":
            self.files.kept["/task/tree/touched"] = b"x"
            if command == "sleep":
                self._client.asleep.set()
                await anyio.sleep_forever()
        return self._client.answer(f"{self.role} {kind}", command)

    async def exec(
        self,
        argv: Sequence[str],
        *,
        timeout: float | None = None,
        command_id: str | None = None,
        output_limit_bytes: int | None = None,
    ) -> Ran:
        self.command_ids.append(command_id)
        self._client.reach("verdict")
        return self._client.answer("verdict", " ".join(argv))

    async def usage(self) -> Used:
        self._client.reach("usage")
        return Used()

    async def stop(self) -> None:
        self.stopped += 1
        self._client.running -= 1
        self._client.reach("stop")


@dataclass
class FakeClient:
    """`errors` are raised where their key is reached; `answers` are given to commands."""

    errors: dict[str, DsecError | TimeoutError] = field(default_factory=dict)
    answers: dict[str, Ran] = field(default_factory=dict)
    sandboxes: list[FakeSandbox] = field(default_factory=list)
    running: int = 0
    most: int = 0
    asleep: anyio.Event = field(default_factory=anyio.Event)
    """Set once a command `sleep` is being waited for."""

    async def run_container(
        self, args: DSecContainerRunArgs, timeout: float = 120.0
    ) -> FakeSandbox:
        self.reach(f"create {args.labels['role']}")
        await anyio.lowlevel.checkpoint()
        sandbox = FakeSandbox(self, args)
        self.sandboxes.append(sandbox)
        self.running += 1
        self.most = max(self.most, self.running)
        await anyio.lowlevel.checkpoint()
        return sandbox

    def reach(self, place: str) -> None:
        for key, error in self.errors.items():
            if place.startswith(key):
                raise error

    def answer(self, place: str, command: str) -> Ran:
        del command
        if place == "verdict" and place not in self.answers:
            return Ran(stdout=GOOD)
        return self.answers.get(place, Ran())
