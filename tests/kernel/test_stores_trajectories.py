"""A node is killed and taken away, and what happened in its sandboxes is read from the store."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import anyio
import httpx
import msgspec
import pytest

from dsec.base.errors import NotFound
from dsec.base.ids import NodeId
from dsec.main.apiserver import reach
from dsec.main.settings import EdgeAddress
from dsec.wire.sandbox import Recorded
from tests.kernel.stores import BUCKET, S3_KEY, S3_SECRET, s3_server
from tests.system.plane import Plane, bearer, control_plane

pytestmark = [pytest.mark.anyio]
FIRST, SECOND = NodeId("n0e1"), NodeId("n0e2")
PROGRAM = Path(__file__).with_name("trajectory_edge.py")
ROOT = Path(__file__).parents[2]
PATIENCE_S = 60.0


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(params=["directory", "s3"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    place = tmp_path / "store"
    place.mkdir()
    if request.param == "directory":
        yield f"file://{place}"
        return
    with s3_server(place, request.node.nodeid) as address:
        yield f"s3://{BUCKET}/dsec?endpoint=http://{address}&region=eu-1&path_style=true"


class EdgeProcess:
    """One node's edge; `kill` and `start` again keep its state."""

    def __init__(self, home: Path, node: NodeId, store: str) -> None:
        self.node = node
        self._store = store
        self._home = home / node
        self._home.mkdir()
        self._log = self._home / "log"
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def address(self) -> EdgeAddress:
        return EdgeAddress(unix_socket=str(self._home / "edge.sock"))

    def start(self) -> None:
        keys = {"AWS_ACCESS_KEY_ID": S3_KEY, "AWS_SECRET_ACCESS_KEY": S3_SECRET}
        env = {**os.environ, **keys, "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}"}
        argv = [sys.executable, str(PROGRAM), str(self._home), self.node, self._store]
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(argv, env=env, stdout=log, stderr=log)

    def kill(self) -> None:
        """As `kill -9` does."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def check(self) -> None:
        assert self._process is not None
        assert self._process.poll() is None, self._log.read_text()


@pytest.fixture
def fleet(store: str) -> Iterator[list[EdgeProcess]]:
    home = Path(tempfile.mkdtemp(prefix="dsec-t"))  # short: a socket's path has 107 bytes
    edges = [EdgeProcess(home, node, store) for node in (FIRST, SECOND)]
    try:
        for edge in edges:
            edge.start()
        yield edges
    finally:
        for edge in edges:
            edge.kill()
        shutil.rmtree(home)


@asynccontextmanager
async def plane_over(*edges: EdgeProcess) -> AsyncIterator[Plane]:
    """A control plane that knows these nodes and has heard nothing yet."""
    async with reach([edge.address for edge in edges]) as links, control_plane([], links) as plane:
        await until_answering(plane, *edges)
        yield plane


async def until_answering(plane: Plane, *edges: EdgeProcess) -> None:
    with anyio.fail_after(PATIENCE_S):
        while True:
            await plane.edges.refresh()
            if {edge.node for edge in edges} <= {v.id for v in plane.edges.views() if v.healthy}:
                return
            for edge in edges:
                edge.check()
            await anyio.sleep(0.05)


async def made_on(plane: Plane, node: NodeId) -> str:
    """A sandbox of the team's on that node, in which something has happened."""
    team = bearer(plane.keys.team)
    spec = {"image": "debian", "backend": "sim"}
    while True:
        made = await plane.client.post("/v1/sandboxes", json=spec, headers=team)
        assert made.status_code == 201, made.text
        if made.json()["node"] == node:
            break
    sandbox = str(made.json()["id"])
    command = {"shell": "echo said", "command_id": "c1"}
    run = await plane.client.post(
        f"/v1/sandboxes/{sandbox}/commands/run", json=command, headers=team
    )
    assert run.json()["exit_code"] == 0, run.text
    return sandbox


async def asked(plane: Plane, sandbox: str, key: str) -> httpx.Response:
    url = f"/v1/sandboxes/{sandbox}/trajectory"
    return await plane.client.get(url, headers=bearer(key))


async def told(plane: Plane, sandbox: str) -> list[Recorded]:
    response = await asked(plane, sandbox, plane.keys.team)
    assert response.status_code == 200, response.text
    return [msgspec.json.decode(line, type=Recorded) for line in response.text.splitlines()]


async def until_sent(plane: Plane, sandbox: str) -> None:
    api = plane.edges.at(SECOND).api
    with anyio.fail_after(PATIENCE_S):
        while True:
            try:
                await api.sent_trajectory(sandbox)
            except NotFound:
                await anyio.sleep(0.05)
            else:
                return


def refusal(response: httpx.Response) -> tuple[int, str, str]:
    error = response.json()["error"]
    return response.status_code, error["code"], error["message"]


async def test_the_record_outlives_its_node(fleet: list[EdgeProcess]) -> None:
    first, second = fleet
    async with plane_over(first, second) as plane:
        over, alive = await made_on(plane, FIRST), await made_on(plane, FIRST)
        foreign = refusal(await asked(plane, over, plane.keys.foreign))
        denied = refusal(await asked(plane, over, plane.keys.reader))
        assert (foreign[0], denied[0]) == (404, 403)
        await plane.client.delete(f"/v1/sandboxes/{over}")
        before = await told(plane, over)
        assert [entry.op for entry in before] == ["create", "command", "stop", "over"]
        await until_sent(plane, over)

        first.kill()
        await plane.edges.refresh()
        assert await told(plane, over) == before
        assert refusal(await asked(plane, over, plane.keys.foreign)) == foreign
        assert refusal(await asked(plane, over, plane.keys.reader)) == denied
        status, code, message = refusal(await asked(plane, alive, plane.keys.team))
        assert (status, code) == (503, "unavailable")
        assert f"node {FIRST} is away" in message

    async with plane_over(second) as plane:  # the node was removed, and nobody remembers it
        assert await told(plane, over) == before
        assert refusal(await asked(plane, over, plane.keys.foreign)) == foreign
        assert refusal(await asked(plane, over, plane.keys.reader)) == denied
        assert (await asked(plane, alive, plane.keys.team)).status_code == 404

    first.start()
    async with plane_over(first, second) as plane:
        told_again = [entry.op for entry in await told(plane, alive)]
        assert told_again == ["create", "command", "over"]
        assert await told(plane, over) == before
