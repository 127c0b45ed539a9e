"""The node's store of images: mounted, shared, swept, killed in the middle, and filled from a real registry.

Needs root, and umoci, skopeo and docker-registry of Debian.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import anyio
import pytest

from dsec.base.errors import (
    Conflict,
    DsecError,
    NotFound,
    Unavailable,
    Unsupported,
)
from dsec.images.importer import file_digest
from dsec.images.service import ImageService, finish
from dsec.linux import mounts
from dsec.wire.public_v1 import ImageProgress, PullImage
from tests.kernel.odd_images import (
    ENVIRONMENT,
    anyio_backend,
    first_layer,
    images,
    imported,
    layout,
    place,
    reference_tree,
)
from tests.kernel.trees import assert_same, mounted, overlaid, run
from tests.tars import Tar

__all__ = ["anyio_backend", "images", "layout", "place", "reference_tree"]
pytestmark = [pytest.mark.anyio, pytest.mark.needs_root]


# -- the store ---------------------------------------------------------------------------------


async def test_a_layer_is_mounted_once_and_adopted(place: Path, layout: Path) -> None:
    async with ImageService(place / "root", place / "run") as images:
        record = await imported(images, layout)
        first = await mounted(images, record, "sbx1")
        assert await mounted(images, record, "sbx2") == first
    async with ImageService(place / "root", place / "run") as images:
        images.environments.rebuild_pins([("sbx1", record.mounts)])
        assert await mounted(images, await images.resolve("t"), "sbx3") == first
        assert len(mounts.mounts_under(place / "run")) == 1
        with pytest.raises(Conflict):
            await images.remove("t")
        for sandbox in ("sbx1", "sbx3"):
            assert await images.environments.unmount_unused() == []
            await images.environments.release(sandbox)
        assert sorted(await images.environments.unmount_unused()) == sorted(record.mounts)
        assert mounts.mounts_under(place / "run") == []
        await images.remove("t")
        assert images.layers.records() == []
        with pytest.raises(NotFound):
            await images.resolve("t")


async def test_a_layer_somebody_unmounted_is_mounted_again(
    images: ImageService, place: Path, layout: Path
) -> None:
    record = await imported(images, layout)
    wanted = await mounted(images, record, "sbx1")
    for path in wanted:
        mounts.umount(path)
        path.rmdir()
    (place / "run/layers").rmdir()
    assert await mounted(images, record, "sbx2") == wanted
    assert len(mounts.mounts_under(place / "run")) == len(record.mounts)


async def test_a_file_system_that_cannot_carry_images_is_named(place: Path) -> None:
    (place / "t.tar").write_bytes(Tar().dirs("old").data())
    (place / "small").mkdir()
    mounts.mount("tmpfs", place / "small", "tmpfs", mounts.MountFlag(0), "size=5m")
    try:
        async with ImageService(place / "small", place / "run") as images:
            record = await imported(images, place / "t.tar")
            with pytest.raises(Unsupported, match=r"small.* cannot carry images; keep the state"):
                await mounted(images, record, "sbx1")
    finally:
        mounts.umount(place / "small")


async def test_layers_nobody_needs_go_with_the_next_import(
    images: ImageService, place: Path, layout: Path
) -> None:
    """Those of an image that was replaced, unless a sandbox has them, and of a failed import."""
    (place / "t.tar").write_bytes(Tar().dirs("old").data())
    (place / "u.tar").write_bytes(Tar().dirs("older").data())
    used = await imported(images, place / "u.tar")
    await mounted(images, used, "sbx1")
    dropped = await imported(images, place / "t.tar")
    kept = await imported(images, layout)
    assert set(images.layers.digests()) == {*used.layers, *kept.layers, *kept.mounts}
    assert not images.layers.has(dropped.layers[0])


async def test_an_upload_outlives_its_uploader_if_others_wait_for_it(
    images: ImageService, place: Path
) -> None:
    data = first_layer()

    async def archive() -> AsyncIterator[bytes]:
        yield data

    first = images.import_archive("t", archive())
    async for event in first:
        if event.step != "receiving":  # type: ignore[union-attr]
            break
    second = images.import_archive("t", archive())
    joined = [await anext(second), await anext(second)]
    assert joined[-1].step != "receiving"  # type: ignore[union-attr]
    await first.aclose()  # type: ignore[attr-defined]
    assert (await finish(second)).name == "t:latest"


async def test_layers_shared_by_images_outlive_one(images: ImageService, layout: Path) -> None:
    await imported(images, layout, "one")
    record = await imported(images, layout, "two")
    await mounted(images, record, "sbx1")
    await images.remove("one")  # the sandbox's layers are kept by the other name
    with pytest.raises(Conflict):
        await images.remove("two")
    assert len(images.layers.records()) == 4  # and what they are merged into


async def test_two_who_want_the_same_share_the_work(images: ImageService, layout: Path) -> None:
    seen: list[list[Any]] = [[], []]

    async def watch(into: list[Any]) -> None:
        into.extend([event async for event in images.import_path(layout, "t")])

    async with anyio.create_task_group() as tasks:
        for into in seen:
            tasks.start_soon(watch, into)
    assert seen[0][-1] == seen[1][-1]
    assert any(isinstance(event, ImageProgress) for event in seen[1])


async def test_different_images_at_once_convert_a_shared_layer_once(
    images: ImageService, layout: Path
) -> None:
    async with anyio.create_task_group() as tasks:
        for name in ("one", "two", "three"):
            tasks.start_soon(imported, images, layout, name)
    assert len(images.layers.records()) == 4  # and what they are merged into
    assert len(await images.list_images()) == 3


async def test_who_leaves_cancels(images: ImageService, place: Path) -> None:
    (place / "t.tar").write_bytes(first_layer())
    events = images.import_path(place / "t.tar", "t")
    async for _ in events:
        break
    await events.aclose()  # type: ignore[attr-defined]
    with anyio.fail_after(20):
        while list((place / "root/tmp").iterdir()):  # noqa: ASYNC110 - the file system tells nobody
            await anyio.sleep(0.01)
    assert await images.list_images() == []


async def test_what_a_crash_left_is_swept(place: Path) -> None:
    rubbish = place / "root/tmp/import-1/new"
    rubbish.mkdir(parents=True)
    (rubbish / "file").write_text("half")
    async with ImageService(place / "root", place / "run"):
        assert not rubbish.exists()


_KILLED = """
import sys, anyio
from pathlib import Path
from dsec.images.service import ImageService

async def main(root, run, path):
    async with ImageService(Path(root), Path(run)) as images:
        async for event in images.import_path(Path(path), "t"):
            print(event, flush=True)

anyio.run(main, *sys.argv[1:])
"""


def kill_at(steps: int, place: Path, layout: Path) -> None:
    argv = [sys.executable, "-c", _KILLED, str(place / "root"), str(place / "run"), str(layout)]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, env=ENVIRONMENT) as child:
        assert child.stdout is not None
        for _ in range(steps):
            child.stdout.readline()
        child.kill()


async def test_killed_in_the_middle(place: Path, layout: Path, reference_tree: Path) -> None:
    """At whatever step the edge is killed, the next one finds whole layers or none."""
    for steps in range(1, 10):
        kill_at(steps, place, layout)
        async with ImageService(place / "root", place / "run") as images:
            for layer in images.layers.records():
                assert file_digest(images.layers.meta(layer.digest)) == layer.meta.digest
                for device in layer.devices:
                    raw = images.data.raw(device)
                    assert raw is not None
                    assert file_digest(raw) == device
            assert len(await images.list_images()) in (0, 1)
    async with ImageService(place / "root", place / "run") as images:
        record = await imported(images, layout)
        seen = await overlaid(images, record, place / "seen")
        try:
            assert_same(seen, reference_tree)
        finally:
            mounts.umount(place / "seen")
    assert sorted(path.name for path in (place / "root").iterdir()) == [
        *("data", "images", "layers", "lock", "named", "tmp", "traces")
    ]


async def test_errors_come_out_as_they_are(place: Path) -> None:
    with pytest.raises(NotFound):
        async with ImageService(place / "root", place / "run") as images:
            await images.resolve("nonesuch")


async def test_one_store_has_one_owner(images: ImageService, place: Path) -> None:
    with pytest.raises(Conflict):
        async with ImageService(place / "root", place / "run"):
            pass


# -- a registry --------------------------------------------------------------------------------

_REGISTRY = """
version: 0.1
log: {{level: info}}
storage: {{filesystem: {{rootdirectory: {place}/blobs}}}}
http: {{addr: "127.0.0.1:0"}}
"""


@pytest.fixture(scope="module")
def registry(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    place = tmp_path_factory.mktemp("registry")
    (place / "config.yml").write_text(_REGISTRY.format(place=place))
    argv = ["docker-registry", "serve", str(place / "config.yml")]
    with subprocess.Popen(argv, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE) as child:
        assert child.stderr is not None
        try:
            for line in child.stderr:
                if found := re.search(rb"listening on (127\.0\.0\.1:\d+)", line):
                    yield found[1].decode()
                    break
        finally:
            child.kill()


async def test_pull(
    images: ImageService, layout: Path, registry: str, reference_tree: Path, place: Path
) -> None:
    reference = f"{registry}/team/tool:1.0"
    run(
        *("skopeo", "copy", "-q", "--dest-tls-verify=false"),
        *(f"oci:{layout}:t", f"docker://{reference}"),
    )
    events = [e async for e in images.pull(PullImage(reference=reference, tls_verify=False))]
    steps = {event.step for event in events if isinstance(event, ImageProgress)}
    assert {"pulling", "converting layer 3 of 3"} <= steps
    record = await images.resolve(reference)
    seen = await overlaid(images, record, place / "seen")
    try:
        assert_same(seen, reference_tree)
    finally:
        mounts.umount(place / "seen")


async def test_what_a_registry_refuses(images: ImageService, registry: str) -> None:
    async def pull(reference: str) -> DsecError:
        with pytest.raises(DsecError) as caught:
            await finish(images.pull(PullImage(reference=reference, tls_verify=False)))
        return caught.value

    assert isinstance(await pull(f"{registry}/team/nothing:1"), NotFound)
    assert isinstance(await pull("127.0.0.1:1/team/nothing:1"), Unavailable)
