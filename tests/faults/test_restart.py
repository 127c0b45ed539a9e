"""The server is killed in the middle of everything, and nobody's work is lost."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import anyio
import pytest

from dsec import Conflict, DSecClient, DSecContainerRunArgs, Output, Sandbox
from tests.contract import image
from tests.contract.server import Server
from tests.pristine import pristine_node, snapshot

COUNT = int(os.environ.get("DSEC_RESTART_SANDBOXES", "200"))
LINE = "echo begun; sleep 4; echo x >> /tmp/runs; echo done; /probe exit 9"
pytestmark = [pytest.mark.needs_root]


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    archive = image.build(tmp_path / "contract.tar")
    up = Server("container", stop_sandboxes=False)
    try:
        up.start()
        anyio.run(_import, up, archive)
        yield up
    except BaseException:
        print(up.tail())  # noqa: T201 - shown with the failure
        raise
    finally:
        anyio.run(_stop_all, up)
        up.stop()
        up.remove()


async def _import(up: Server, archive: Path) -> None:
    async with up.client() as client:
        await client.images.import_archive(archive, image.NAME).wait()
        async with await client.run_container(_args()) as sandbox:
            await sandbox.exec(["/probe", "echo"])


async def _stop_all(up: Server) -> None:
    async with up.client() as client:
        for view in await client.list(states=["running"]):
            await (await client.get(view.id)).stop()


def _args() -> DSecContainerRunArgs:
    return DSecContainerRunArgs(container_image=image.NAME, labels={"job": "restart"})


async def _made(client: DSecClient) -> list[Sandbox]:
    batch = client.run_containers(_args(), count=COUNT)
    made = [item async for item in batch if isinstance(item, Sandbox)]
    assert len(made) == COUNT
    return made


async def test_a_killed_server_finds_every_sandbox_and_command_again(server: Server) -> None:
    with anyio.fail_after(120 + COUNT):
        async with server.client() as client:
            sandboxes = await _made(client)
            for sandbox in sandboxes:
                await sandbox.start(shell=LINE, command_id="work")
        server.kill()
        server.start()
        async with server.client() as client, anyio.create_task_group() as group:
            views = await client.list(states=["running"])
            assert {view.id for view in views} == {sandbox.id for sandbox in sandboxes}
            for view in views:
                group.start_soon(_finishes, client, view.id)


async def _finishes(client: DSecClient, name: str) -> None:
    sandbox = await client.get(name)
    assert (await sandbox.exec(["/probe", "echo", "here"])).stdout == "here\n"
    command = await sandbox.command("work")
    result = await command.wait(60)
    assert (result.stdout, result.exit_code) == ("begun\ndone\n", 9)
    said = b"".join([e.data async for e in command.events() if isinstance(e, Output)])
    assert said == b"begun\ndone\n"
    assert await sandbox.files.read("/tmp/runs") == b"x\n"
    assert (await sandbox.run_shell(LINE, command_id="work")).exit_code == 9
    with pytest.raises(Conflict):
        await sandbox.run_shell("echo twice >> /tmp/runs", command_id="work")
    assert await sandbox.files.read("/tmp/runs") == b"x\n"


async def test_a_client_that_waits_does_not_notice_a_restart(server: Server) -> None:
    with anyio.fail_after(120):
        async with server.client() as client:
            sandbox = await client.run_container(_args())
            async with anyio.create_task_group() as group:

                async def wait() -> None:
                    result = await sandbox.run_shell("sleep 5; echo done", command_id="w")
                    assert result.stdout == "done\n"

                group.start_soon(wait)
                await anyio.sleep(0.5)
                port = server.url.rpartition(":")[2]
                server.kill()
                server.start(port=int(port))
            await sandbox.stop()


async def test_a_session_lives_through_a_restart(server: Server) -> None:
    with anyio.fail_after(120):
        async with server.client() as client:
            sandbox = await client.run_container(_args())
            session = await sandbox.open_session(session_id="s")
            await session.run("cd /tmp; A=1")
        server.kill()
        server.start()
        async with server.client() as client:
            sandbox = await client.get(sandbox.id)
            result = await sandbox.run_shell("echo $A $PWD", session="s")
            assert result.stdout == "1 /tmp\n"
            await sandbox.stop()


async def test_nothing_is_left_of_sandboxes_that_lived_through_a_restart(server: Server) -> None:
    with pristine_node(lambda: snapshot(server.node)):
        async with server.client() as client:
            sandboxes = await _made(client)
        server.kill()
        server.start()
        async with server.client() as client, anyio.create_task_group() as group:
            for sandbox in sandboxes:
                group.start_soon((await client.get(sandbox.id)).stop)


async def test_a_planned_restart_keeps_sandboxes_too(server: Server) -> None:
    async with server.client() as client:
        sandbox = await client.run_container(_args())
    server.stop()
    server.start()
    async with server.client() as client:
        again = await client.get(sandbox.id)
        assert (await again.exec(["/probe", "echo", "here"])).stdout == "here\n"
        await again.stop()
