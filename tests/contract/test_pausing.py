"""Paused and resumed: whoever wants something of a sandbox need not know that it was paused."""

from __future__ import annotations

import anyio
import pytest

from dsec import DSecClient, Sandbox, SandboxGone
from tests.contract.conftest import MakeArgs
from tests.contract.expect import PROBE, eventually

FLAPS = 8


async def test_it_is_paused_once_and_resumed_once(sandbox: Sandbox) -> None:
    first = await sandbox.pause()
    assert first.state == "paused"
    assert first.pause is not None
    assert (await sandbox.pause()).pause == first.pause
    resumed = await sandbox.resume()
    assert (resumed.state, resumed.pause) == ("running", None)
    assert (await sandbox.resume()).state == "running"


async def test_a_request_resumes_it(client: DSecClient, sandbox: Sandbox) -> None:
    await sandbox.files.write("/tmp/kept", "kept")
    await sandbox.pause()
    assert (await sandbox.exec([PROBE, "echo", "here"])).stdout == "here\n"
    await sandbox.pause()
    assert await sandbox.files.read("/tmp/kept") == b"kept"
    await sandbox.pause()
    again = await client.get(sandbox.id)
    assert again.view.state == "paused", "looking at it resumed it"
    await sandbox.usage()
    assert (await client.get(sandbox.id)).view.state == "paused", "reading its usage resumed it"


async def test_paused_ones_are_found_in_the_list(client: DSecClient, sandbox: Sandbox) -> None:
    await sandbox.pause()
    assert sandbox.id in {view.id for view in await client.list(states=["paused"])}


async def test_a_command_goes_on_after_the_pause(sandbox: Sandbox) -> None:
    command = await sandbox.start([PROBE, "sleep", "0.5"])
    await sandbox.pause()
    await sandbox.resume()
    assert (await command.wait(30)).exit_code == 0


async def test_whoever_waits_for_a_command_waits_on(sandbox: Sandbox) -> None:
    codes: list[int | None] = []

    async def wait() -> None:
        codes.append((await sandbox.exec([PROBE, "sleep", "0.5"], command_id="w")).exit_code)

    async def started() -> bool:
        return any(view.command_id == "w" for view in await sandbox.commands())

    async with anyio.create_task_group() as group:
        group.start_soon(wait)
        await eventually(started, "it has started")
        await sandbox.pause()
        await sandbox.resume()
    assert codes == [0]


async def test_a_paused_one_can_be_stopped(client: DSecClient, args: MakeArgs) -> None:
    sandbox = await client.run_container(args())
    await sandbox.pause()
    await sandbox.stop()
    with pytest.raises(SandboxGone):
        await sandbox.resume()


@pytest.mark.deadline(120)
async def test_nothing_is_refused_while_it_is_paused_and_resumed(sandbox: Sandbox) -> None:
    said: list[str] = []

    async def ask(number: int) -> None:
        said.append((await sandbox.exec([PROBE, "echo", str(number)])).stdout.strip())

    async def flap() -> None:
        for _ in range(FLAPS):
            await sandbox.pause()
            await sandbox.resume()

    async with anyio.create_task_group() as group:
        group.start_soon(flap)
        for number in range(50):
            group.start_soon(ask, number)
    assert sorted(said, key=int) == [str(number) for number in range(50)]


async def test_an_idle_one_is_paused_if_it_was_made_so(client: DSecClient, args: MakeArgs) -> None:
    async with await client.run_container(args(ttl_running_stop=1, idle_action="pause")) as sandbox:

        async def paused() -> bool:
            return (await client.get(sandbox.id)).view.state == "paused"

        await eventually(paused, "it is paused")
        assert (await sandbox.exec([PROBE, "echo", "here"])).stdout == "here\n"
