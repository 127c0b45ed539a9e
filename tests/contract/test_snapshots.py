"""Snapshots and forks: sandboxes that begin with the files of another."""

from __future__ import annotations

import pytest

from dsec import (
    Conflict,
    DSecClient,
    DSecContainerRunArgs,
    InvalidRequest,
    NotFound,
    Sandbox,
    Unsupported,
)
from tests.contract.capabilities import needs
from tests.contract.conftest import MakeArgs
from tests.contract.expect import PROBE

FORKS = 8
HOME = "/root"
HISTORY = f"{HOME}/.bash_history"


@needs("snapshots")
async def test_a_snapshot_is_restored_as_often_as_wanted(
    client: DSecClient, sandbox: Sandbox, args: MakeArgs
) -> None:
    await sandbox.files.write("/root/kept", "kept")
    await sandbox.files.write(HISTORY, "secret")
    await sandbox.files.write("/root/cache", "cache")
    packed = await sandbox.pack("once", exclude=["/root/cache"])
    await sandbox.files.write("/root/kept", "changed since")
    for _ in range(2):
        async with await client.restore("once", args()) as restored:
            assert restored.id != sandbox.id
            assert await restored.files.read("/root/kept") == b"kept"
            for gone in (HISTORY, "/root/cache"):
                with pytest.raises(NotFound):
                    await restored.files.read(gone)
    assert (packed.cleaned, packed.sandbox) == (True, sandbox.id)
    changed = {entry.path: entry.change for entry in await client.snapshots.diff("once")}
    assert changed["/root/kept"] == "added"
    assert HISTORY not in changed
    await client.snapshots.remove("once")
    with pytest.raises(NotFound):
        await client.snapshots.get("once")


@needs("snapshots")
async def test_one_on_another(client: DSecClient, sandbox: Sandbox, args: MakeArgs) -> None:
    await sandbox.files.write("/root/first", "1")
    await sandbox.pack("lower")
    async with await client.restore("lower", args()) as second:
        await second.files.write("/root/second", "2")
        await second.files.remove("/root/first")
        upper = await second.pack("upper")
    assert upper.depth == 2
    async with await client.restore("upper", args()) as third:
        assert await third.files.read("/root/second") == b"2"
        with pytest.raises(NotFound):
            await third.files.read("/root/first")
    for name in ("upper", "lower"):
        await client.snapshots.remove(name)


@needs("snapshots")
async def test_a_name_means_one_snapshot(client: DSecClient, sandbox: Sandbox) -> None:
    await sandbox.pack("taken")
    with pytest.raises(Conflict):
        await sandbox.pack("taken")
    with pytest.raises(InvalidRequest):
        await sandbox.pack("../odd")
    await client.snapshots.remove("taken")


@needs("snapshots")
async def test_a_paused_one_is_packed_and_stays_paused(
    client: DSecClient, sandbox: Sandbox, args: MakeArgs
) -> None:
    await sandbox.files.write("/root/kept", "kept")
    await sandbox.pause()
    await sandbox.pack("asleep")
    assert (await client.get(sandbox.id)).view.state == "paused"
    async with await client.restore("asleep", args()) as restored:
        assert await restored.files.read("/root/kept") == b"kept"
    await client.snapshots.remove("asleep")


@needs("snapshots")
async def test_forks_begin_alike_and_go_their_own_ways(sandbox: Sandbox) -> None:
    await sandbox.files.write("/root/kept", "kept")
    await sandbox.start([PROBE, "sleep", "60"])
    children = await sandbox.fork(FORKS, labels={"n": "child"})
    try:
        assert len({sandbox.id, *(child.id for child in children)}) == FORKS + 1
        for number, child in enumerate(children):
            assert await child.files.read("/root/kept") == b"kept"
            assert (child.view.parent, child.view.labels) == (sandbox.id, {"n": "child"})
            assert not any(command.running for command in await child.commands())
            await child.files.write("/root/own", str(number))
        own = [await child.files.read("/root/own") for child in children]
        assert own == [str(number).encode() for number in range(FORKS)]
        with pytest.raises(NotFound):
            await sandbox.files.read("/root/own")
    finally:
        for child in children:
            await child.stop()


@needs("snapshots")
async def test_the_same_key_gives_the_same_forks(sandbox: Sandbox) -> None:
    first = await sandbox.fork(2, key="again")
    try:
        assert {child.id for child in await sandbox.fork(2, key="again")} == {
            child.id for child in first
        }
        with pytest.raises(Conflict):
            await sandbox.fork(3, key="again")
    finally:
        for child in first:
            await child.stop()


async def test_an_image_cannot_be_called_like_a_snapshot(
    client: DSecClient, args: MakeArgs
) -> None:
    wanted: DSecContainerRunArgs = args(container_image="snapshots/prj-of-nobody/x")
    with pytest.raises((NotFound, Unsupported)):
        await client.run_container(wanted)
