"""Watching a directory."""

from __future__ import annotations

import pytest

from dsec import NotFound, RequestError, Sandbox
from dsec.sdk import Watch
from tests.contract.expect import refusal


async def hear(events: Watch, path: str, *kinds: str) -> str:
    """The next event about a path that is one of these."""
    async for event in events:
        if event.path == path and event.event in kinds:
            return event.event
    pytest.fail(f"the watch ended without {kinds} of {path}")


async def test_a_new_file_is_told(sandbox: Sandbox) -> None:
    async with sandbox.files.watch("/tmp") as events:
        await sandbox.run_shell("echo x > /tmp/f")
        await hear(events, "f", "create")


async def test_a_written_file_is_told(sandbox: Sandbox) -> None:
    await sandbox.files.write("/tmp/f", b"")
    async with sandbox.files.watch("/tmp") as events:
        await sandbox.run_shell("echo x >> /tmp/f")
        await hear(events, "f", "write")


async def test_a_removed_file_is_told(sandbox: Sandbox) -> None:
    await sandbox.files.write("/tmp/f", b"")
    async with sandbox.files.watch("/tmp") as events:
        await sandbox.files.remove("/tmp/f")
        await hear(events, "f", "remove")


async def test_a_renamed_file_is_told(sandbox: Sandbox) -> None:
    await sandbox.files.write("/tmp/f", b"")
    async with sandbox.files.watch("/tmp") as events:
        await sandbox.files.move("/tmp/f", "/tmp/g")
        await hear(events, "f", "rename", "remove")
        await hear(events, "g", "rename", "create")


async def test_a_file_written_over_the_api_is_told(sandbox: Sandbox) -> None:
    async with sandbox.files.watch("/tmp") as events:
        await sandbox.files.write("/tmp/f", b"x")
        await hear(events, "f", "create", "rename", "write")


async def test_a_new_directory_is_told(sandbox: Sandbox) -> None:
    async with sandbox.files.watch("/tmp") as events:
        await sandbox.files.mkdir("/tmp/d")
        await hear(events, "d", "create")


async def test_a_fresh_subdirectory_is_watched_at_once(sandbox: Sandbox) -> None:
    async with sandbox.files.watch("/tmp", recursive=True) as events:
        await sandbox.files.write("/tmp/a/b/f", b"x", parents=True)
        await hear(events, "a/b/f", "create", "write", "rename")


async def test_below_is_not_told_unless_recursive(sandbox: Sandbox) -> None:
    await sandbox.files.mkdir("/tmp/d")
    async with sandbox.files.watch("/tmp") as events:
        await sandbox.files.write("/tmp/d/f", b"x")
        await sandbox.files.write("/tmp/last", b"")
        async for event in events:
            assert event.path != "d/f"
            if event.path == "last":
                break


async def test_odd_names_are_told_exactly(sandbox: Sandbox) -> None:
    async with sandbox.files.watch("/tmp") as events:
        for name in ("a b", "é", "\udcff\n"):
            await sandbox.files.write(f"/tmp/{name}", b"")
            await hear(events, name, "create", "rename", "write")


async def test_many_changes_are_all_told(sandbox: Sandbox) -> None:
    async with sandbox.files.watch("/tmp") as events:
        for n in range(100):
            await sandbox.files.write(f"/tmp/f{n}", b"")
        wanted = {f"f{n}" for n in range(100)}
        async for event in events:
            wanted.discard(event.path)
            if not wanted:
                break


async def test_two_watches_hear_the_same(sandbox: Sandbox) -> None:
    async with sandbox.files.watch("/tmp") as one, sandbox.files.watch("/tmp") as two:
        await sandbox.files.mkdir("/tmp/d")
        await hear(one, "d", "create")
        await hear(two, "d", "create")


async def test_a_missing_directory_cannot_be_watched(sandbox: Sandbox) -> None:
    with refusal(NotFound):
        async with sandbox.files.watch("/tmp/missing"):
            pass


async def test_a_directory_of_another_cannot_be_watched(sandbox: Sandbox) -> None:
    with pytest.raises(RequestError):
        async with sandbox.files.watch("/root", user="user"):
            pass
