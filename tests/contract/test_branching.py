"""A branch at any step of a trajectory; and a record that was cut off by a kill of the platform."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import anyio
import pytest

from dsec import Conflict, DSecClient, Interrupted, InvalidRequest, NotFound, Sandbox
from dsec.wire.sandbox import Recorded
from tests.contract import image
from tests.contract.capabilities import needs
from tests.contract.conftest import MakeArgs
from tests.contract.expect import PROBE
from tests.contract.server import Server

LOG = "/root/log"


async def entries(sandbox: Sandbox, *ops: str) -> list[Recorded]:
    return [entry async for entry in sandbox.trajectory(ops=ops)]


async def append(sandbox: Sandbox, text: str) -> int:
    """Its step."""
    await sandbox.files.write(LOG, text, append=True)
    return (await entries(sandbox, "file.write"))[-1].seq


async def own_words(sandbox: Sandbox) -> list[str]:
    """What was done in it itself."""
    return [entry.op for entry in await entries(sandbox) if not entry.inherited]


async def test_a_branch_without_a_snapshot_is_done_again(
    client: DSecClient, sandbox: Sandbox
) -> None:
    steps = [await append(sandbox, text) for text in "abc"]
    await sandbox.exec([PROBE, "echo", "said"], command_id="echo")
    branch = await client.branch(sandbox.id, steps[1], labels={"try": "b"})
    async with branch.sandbox as made:
        assert (branch.snapshot, branch.start, branch.divergences) == ("", 1, [])
        assert await made.files.read(LOG) == b"ab"
        assert made.view.labels == {"try": "b"}
        assert (await own_words(made))[:3] == ["create", "file.write", "file.write"]
        await append(made, "x")
    assert await sandbox.files.read(LOG) == b"abc"


async def test_a_branch_of_one_that_is_over(client: DSecClient, args: MakeArgs) -> None:
    async with await client.run_container(args()) as sandbox:
        step = await append(sandbox, "a")
        await append(sandbox, "b")
    branch = await client.branch(sandbox.id, step)
    async with branch.sandbox as made:
        assert await made.files.read(LOG) == b"a"


async def test_there_is_no_such_step(sandbox: Sandbox) -> None:
    for step in (0, 999):
        with pytest.raises(InvalidRequest):
            await sandbox.branch(step)


async def alive(client: DSecClient) -> set[str]:
    return {view.id for view in await client.list(states=["creating", "running", "paused"])}


async def test_a_branch_that_diverges_is_stopped_or_kept(
    client: DSecClient, sandbox: Sandbox
) -> None:
    await sandbox.exec([PROBE, "echo", "one"], command_id="one")
    session = await sandbox.open_session()
    await session.run("echo two > /tmp/two")
    last = (await entries(sandbox, "command"))[-1].seq
    before = await alive(client)
    with pytest.raises(Conflict, match="not done again") as told:
        await sandbox.branch(last)
    assert told.value.details["kind"] == "diverged"
    assert await alive(client) == before
    branch = await sandbox.branch(last, strict=False)
    async with branch.sandbox as made:
        assert any("session" in words for words in branch.divergences)
        with pytest.raises(NotFound):
            await made.files.read("/tmp/two")


@needs("shell")
async def test_another_output_is_a_divergence(client: DSecClient, sandbox: Sandbox) -> None:
    await sandbox.run_shell("cat /proc/sys/kernel/random/uuid", command_id="chance")
    step = (await entries(sandbox, "command"))[-1].seq
    before = await alive(client)
    with pytest.raises(Conflict, match="differs in stdout"):
        await sandbox.branch(step)
    assert await alive(client) == before


@needs("snapshots")
async def test_a_branch_begins_with_the_nearest_snapshot(
    client: DSecClient, sandbox: Sandbox
) -> None:
    first = await append(sandbox, "a")
    await sandbox.pack("early")
    second = await append(sandbox, "b")
    await append(sandbox, "c")
    await sandbox.pack("late")
    branch = await sandbox.branch(second)
    async with branch.sandbox as made:
        assert (branch.snapshot, branch.start) == ("early", first)
        assert await made.files.read(LOG) == b"ab"
        told = await entries(made)
        assert [entry.seq for entry in told if entry.inherited] == [1, first]
        assert await own_words(made) == ["create", "file.write", "file.read"]
    for name in ("early", "late"):
        await client.snapshots.remove(name)


@needs("snapshots")
async def test_a_branch_of_a_fork_goes_back_beyond_it(client: DSecClient, sandbox: Sandbox) -> None:
    step = await append(sandbox, "a")
    await append(sandbox, "b")
    (child,) = await sandbox.fork()
    async with child:
        last = await append(child, "c")
        for at, content in ((step, b"a"), (last, b"abc")):
            branch = await child.branch(at)
            async with branch.sandbox as made:
                assert await made.files.read(LOG) == content


@needs("snapshots")
async def test_with_a_snapshot_at_each_step_a_branch_is_a_restore(
    client: DSecClient, sandbox: Sandbox
) -> None:
    steps = sandbox.steps("try", pack=True)
    await steps.files.write(LOG, "a", append=True)
    await steps.run_shell(f"cat /proc/sys/kernel/random/uuid > {LOG}")
    value = await sandbox.files.read(LOG)
    await steps.files.write(LOG, "later")
    step = (await entries(sandbox, "command"))[-1].seq
    branch = await sandbox.branch(step)
    async with branch.sandbox as made:
        assert (branch.snapshot, branch.start) == (f"{sandbox.id}-try-000002", step)
        assert (branch.steps, await made.files.read(LOG)) == ([], value)
    again = sandbox.steps("try", pack=True)
    await again.files.write(LOG, "a", append=True)  # answered from the record: nothing to pack
    names = [view.name for view in await client.snapshots.list()]
    assert sorted(names) == [f"{sandbox.id}-try-00000{number}" for number in (1, 2, 3)]
    for name in names:
        await client.snapshots.remove(name)


@pytest.fixture
def restarted(backend: str) -> Iterator[Server]:
    """A server to kill, whose sandboxes go on."""
    up = Server(backend, stop_sandboxes=False)
    try:
        up.start()
        yield up
    finally:
        up.stop()
        up.remove()


@needs("restart")
@pytest.mark.deadline(180)
async def test_what_a_kill_cut_off_is_interrupted_and_what_lived_on_ends(
    restarted: Server, args: MakeArgs, tmp_path: Path
) -> None:
    async with restarted.client() as client:
        archive = image.build(tmp_path / "image.tar")
        await client.images.import_archive(archive, image.NAME).wait()
        sandbox = await client.run_container(args())
        await sandbox.start(["/probe", "cat"], stdin="pipe", command_id="lives")
        port = int(restarted.url.rpartition(":")[2])
        await _killed_within_an_upload(restarted, sandbox)
    restarted.start(port=port)
    async with restarted.client() as client:
        sandbox = await client.get(sandbox.id)
        try:
            told = {entry.op: entry for entry in await entries(sandbox)}
            assert (told["file.write"].outcome, told["file.write"].ended_at) == (
                "interrupted",
                None,
            )
            assert told["command"].outcome == ""
            command = await sandbox.command("lives")
            await command.close_stdin()
            assert (await command.wait()).exit_code == 0
            assert (await entries(sandbox, "command"))[0].outcome == "ok"
            with pytest.raises(Interrupted):
                await sandbox.steps("cut").files.write(LOG, _never_whole(), append=True)
        finally:
            await sandbox.stop()


async def _killed_within_an_upload(server: Server, sandbox: Sandbox) -> None:
    """The server is killed when it has an upload on record that never comes to an end."""
    async with anyio.create_task_group() as group:
        group.start_soon(_upload, sandbox)
        while not await entries(sandbox, "file.write"):  # noqa: ASYNC110 - nobody is told
            await anyio.sleep(0.02)
        server.kill()
        group.cancel_scope.cancel()


async def _upload(sandbox: Sandbox) -> None:
    await sandbox.steps("cut").files.write(LOG, _never_whole(), append=True)


async def _never_whole() -> AsyncIterator[bytes]:
    yield b"x" * 1000
    await anyio.sleep_forever()
