"""Snapshots in a store that nodes share: sent when it can be, restored anywhere, gone everywhere."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path

import anyio
import pytest

from dsec.base.errors import Conflict, NotFound
from dsec.images.service import ImageService
from dsec.wire.public_v1 import EnvironmentRef
from tests.kernel.nodes import Node, anyio_backend, imported, node, seen, store, tar_of
from tests.kernel.trees import assert_same, inventory
from tests.kernel.uppers import boxed, change_much

__all__ = ["anyio_backend", "node", "store"]
pytestmark = [pytest.mark.needs_root]
BASE = EnvironmentRef(image="base")
FILES = {
    "etc/os-release": b"ID=test\n",
    "usr/bin/tool": b"tool" * 50_000,
    "usr/share/gone": b"gone",
    "usr/share/dir/in/file": b"file",
    "usr/share/emptied/inner/file": b"file",
}
PATIENCE_S = 60.0


async def until(look: Callable[[], Awaitable[bool]]) -> None:
    """Wait for a condition that others bring about."""
    with anyio.fail_after(PATIENCE_S):
        while True:
            if await look():
                return
            await anyio.sleep(0.01)


async def sent(images: ImageService, name: str) -> None:
    async def look() -> bool:
        return (await images.snapshots.get("root", name)).stored

    await until(look)


async def test_restored_on_another_node_and_removed_from_there(
    node: Callable[[str], Node], tmp_path: Path
) -> None:
    async with node("one").running() as one, node("two").running() as two:
        await imported(one, "base", tar_of(FILES))
        async with boxed(one, BASE, "box", tmp_path) as box:
            change_much(box.root)
            shown = await box.pack(one, "snap")
            expected = inventory(box.root)
        await sent(one, "snap")
        assert [view.name for view in await two.snapshots.list("root")] == ["snap"]
        assert (await two.snapshots.get("root", "snap")).digest == shown.digest
        assert [view.name for view in await two.list_images()] == ["base:latest"]
        async with seen(two, EnvironmentRef(image=shown.image), "again", tmp_path) as root:
            assert_same(root, expected)
        assert len(await two.snapshots.changes("root", "snap")) > 100
        async with boxed(two, EnvironmentRef(image=shown.image), "box2", tmp_path) as box:
            with pytest.raises(Conflict):
                await box.pack(two, "snap")
            (box.root / "more").write_text("more")
            second = await box.pack(two, "second")
        await sent(two, "second")
        assert second.depth == 2
        async with seen(one, EnvironmentRef(image=second.image), "s3", tmp_path) as root:
            assert (root / "more").read_text() == "more"
        await two.snapshots.remove("root", "snap")
        with pytest.raises(NotFound):
            await two.snapshots.get("root", "snap")
        async with seen(one, EnvironmentRef(image=second.image), "s4", tmp_path) as root:
            assert (root / "more").read_text() == "more"


def take_away(store: Path, away: Path) -> None:
    """From here on whatever is asked of it fails."""
    store.rename(away)
    store.touch()


def bring_back(store: Path, away: Path) -> None:
    store.unlink()
    away.rename(store)


async def test_a_store_that_is_away_is_waited_for(
    node: Callable[[str], Node], store: Path, tmp_path: Path
) -> None:
    away = store.with_name("away")
    async with node("one").running() as images:
        await imported(images, "base", tar_of(FILES))
        async with boxed(images, BASE, "box", tmp_path) as box:
            (box.root / "file").write_text("kept")
            take_away(store, away)
            shown = await box.pack(images, "snap")
        assert not shown.stored
        assert not (await images.snapshots.get("root", "snap")).stored
        async with seen(images, EnvironmentRef(image=shown.image), "again", tmp_path) as root:
            assert (root / "file").read_text() == "kept"
    bring_back(store, away)
    async with node("one").running() as images:  # it goes on after a restart
        await sent(images, "snap")
    async with node("two").running() as images:
        async with seen(images, EnvironmentRef(image=shown.image), "far", tmp_path) as root:
            assert (root / "file").read_text() == "kept"


async def test_one_that_cannot_be_removed_is_sent_all_the_same(
    node: Callable[[str], Node], store: Path, tmp_path: Path
) -> None:
    away = store.with_name("away")
    async with node("one").running() as images:
        await imported(images, "base", tar_of(FILES))
        async with boxed(images, BASE, "box", tmp_path) as box:
            (box.root / "file").write_text("kept")
            take_away(store, away)
            shown = await box.pack(images, "snap")
        async with seen(images, EnvironmentRef(image=shown.image), "user", tmp_path):
            with pytest.raises(Conflict):
                await images.snapshots.remove("root", "snap")
        bring_back(store, away)
        await sent(images, "snap")


async def test_a_name_given_twice_while_the_store_was_away_means_the_stores(
    node: Callable[[str], Node], store: Path, tmp_path: Path
) -> None:
    away = store.with_name("away")

    async def packed(images: ImageService, text: str) -> str:
        async with boxed(images, BASE, f"box-{text}", tmp_path) as box:
            (box.root / "file").write_text(text)
            return (await box.pack(images, "snap")).digest

    async def text(images: ImageService) -> str:
        wanted = EnvironmentRef(image="snapshots/root/snap")
        async with seen(images, wanted, "again", tmp_path) as root:
            return (root / "file").read_text()

    async with node("one").running() as one:
        await imported(one, "base", tar_of(FILES))
        take_away(store, away)
        first = await packed(one, "first")
    bring_back(store, away)
    async with node("two").running() as two:
        second = await packed(two, "second")
        await sent(two, "snap")
    for _ in range(2):  # a restart changes nothing
        async with node("one").running() as one:

            async def is_told(images: ImageService = one) -> bool:
                return any(view.conflict for view in await images.snapshots.list("root"))

            await until(is_told)
            views = await one.snapshots.list("root")
            told = {(view.digest, view.stored, view.conflict) for view in views}
            assert told == {(first, False, True), (second, True, False)}
            assert (await one.snapshots.get("root", "snap")).digest == second
            assert await text(one) == "second"
    async with node("one").running() as one:
        await one.snapshots.remove("root", "snap")
        assert await one.snapshots.list("root") == []


async def test_what_others_removed_is_gone_here(
    node: Callable[[str], Node], tmp_path: Path
) -> None:
    async with node("one").running() as one:
        await imported(one, "base", tar_of(FILES))
        async with boxed(one, BASE, "box", tmp_path) as box:
            (box.root / "file").write_text("kept")
            await box.pack(one, "snap")
        await sent(one, "snap")
    async with node("two").running() as two:
        await two.snapshots.remove("root", "snap")
    async with node("one").running() as one:
        assert await one.snapshots.list("root") == []
        with pytest.raises(NotFound):
            await one.snapshots.get("root", "snap")


async def test_collection_keeps_what_snapshots_need(
    node: Callable[[str], Node], tmp_path: Path
) -> None:
    async with node("one").running() as one:
        await imported(one, "base", tar_of(FILES))
        async with boxed(one, BASE, "box", tmp_path) as box:
            (box.root / "file").write_text("kept")
            shown = await box.pack(one, "snap")
        await sent(one, "snap")
        await one.remove("base")
        await one.collect()
        await one.collect_store(dry_run=False)
    async with node("two").running() as two:
        async with seen(two, EnvironmentRef(image=shown.image), "far", tmp_path) as root:
            assert (root / "usr/bin/tool").read_bytes() == FILES["usr/bin/tool"]
            assert (root / "file").read_text() == "kept"


# -- kill -9 ---------------------------------------------------------------------------------------

PROGRAM = """
import os, signal, sys
from pathlib import Path
import anyio
from dsec.images import disk, importer, packer, shelf, sharing, snapshots
from dsec.wire.public_v1 import EnvironmentRef
from tests.kernel.nodes import Node
from tests.kernel.uppers import Box

step, store, state, run, upper = sys.argv[1], *map(Path, sys.argv[2:])
node = Node.__new__(Node)
node.name, node.store_url, node.state, node.run = "one", str(store), state, run
node.options, node.direct, node.record = {}, False, False

def dies(place, name, after):
    call = getattr(place, name)
    def dying(*args, **kwargs):
        if after:
            call(*args, **kwargs)
        os.kill(os.getpid(), signal.SIGKILL)
    setattr(place, name, dying)

STEPS = {
    "look": (packer.Packer, "look", True),
    "take": (packer.Packer, "take", True),
    "finish": (packer.Packer, "finish", True),
    "data": (importer.DataStore, "put_raw", True),
    "layer": (importer.LayerStore, "put", True),
    "record": (shelf.Shelf, "put", False),
    "recorded": (shelf.Shelf, "put", True),
    "sending": (sharing.Sharing, "publish_image", False),
}

async def main():
    async with node.running() as images:
        environment = await images.environments.compose(EnvironmentRef(image="base"))
        box = Box("box", environment, state)
        box.upper = upper
        dies(*STEPS[step])
        await box.pack(images, "snap")
        await anyio.sleep_forever()

anyio.run(main)
"""
BEFORE = ("look", "take", "finish", "data", "layer", "record")
AFTER = ("recorded", "sending")


@pytest.mark.parametrize("step", [*BEFORE, *AFTER])
async def test_killed_at_any_step_it_is_there_or_not(
    node: Callable[[str], Node], store: Path, tmp_path: Path, step: str
) -> None:
    here = node("one")
    async with here.running() as images:
        await imported(images, "base", tar_of(FILES))
    upper = tmp_path / "upper"
    upper.mkdir()
    (upper / "file").write_text("kept")
    arguments = [step, str(store), str(here.state), str(here.run), str(upper)]
    command = [sys.executable, "-c", PROGRAM, *arguments]
    env = {**os.environ, "PYTHONPATH": "src:."}
    done = await anyio.run_process(command, env=env, check=False)
    assert done.returncode == -signal.SIGKILL, done.stderr.decode()
    async with here.running() as images:
        images_there = here.state / "images"
        await images.collect()
        assert list((images_there / "tmp").iterdir()) == []
        assert list(images_there.glob("swept-*")) == []
        if step in AFTER:
            await sent(images, "snap")
            wanted = EnvironmentRef(image="snapshots/root/snap")
            async with seen(images, wanted, "again", tmp_path) as root:
                assert (root / "file").read_text() == "kept"
        else:
            assert await images.snapshots.list("root") == []
            kept = (await images.environments.compose(BASE)).layers
            assert set(images.layers.digests()) == set(kept)
            assert len(images.data.digests()) == 1
