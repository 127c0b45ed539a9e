"""An image of many layers under an environment, and environments that outlive their server."""

from __future__ import annotations

import stat
import tarfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from dsec import Conflict, DSecClient, Sandbox
from tests.contract import image
from tests.contract.capabilities import needs
from tests.contract.conftest import MakeArgs
from tests.contract.parts import Parts
from tests.contract.server import Server
from tests.contract.test_trees import members
from tests.kernel.trees import run
from tests.tars import Tar

pytestmark = [needs("layers")]

LAYERS = 20
WHEN = 1_600_000_000


def layer(number: int) -> Tar:
    """One of many: it adds, replaces, deletes and hides what those below brought."""
    tar = Tar().dirs("data", f"data/only-{number}", "data/turns")
    tar.add(f"data/only-{number}/f", content=b"%d" % number, uid=number, mtime=WHEN + number)
    tar.add("data/last", content=b"by %d" % number, mode=0o600 + number % 8)
    tar.add(f"data/one-of-{number}", content=b"linked").link(
        f"data/two-{number}", f"data/one-of-{number}"
    )
    if number >= 2:
        tar.add(f"data/.wh.one-of-{number - 2}").link(
            f"data/three-{number}", f"data/two-{number - 1}"
        )
    if number % 5 == 4:
        tar.dirs(f"data/only-{number - 1}").add(f"data/only-{number - 1}/.wh..wh..opq")
        tar.add(f"data/only-{number - 1}/hidden-all", content=b"h")
    if number % 3 == 1:
        tar.add("data/turns/x", content=b"a file")
    if number % 3 == 2:
        tar.dirs("data/turns/x").add("data/turns/x/in", content=b"a directory")
    if number % 3 == 0 and number:
        tar.symlink("data/turns/x", f"../only-{number}")
    return tar


@pytest.fixture(scope="module")
def layout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Its OCI layout, tag `t`: the suite's own image below twenty layers."""
    place = tmp_path_factory.mktemp("many")
    run("umoci", "init", "--layout", place / "layout")
    run("umoci", "new", "--image", f"{place}/layout:t")
    image.build(place / "base.tar")
    tars = [place / "base.tar"]
    for number in range(LAYERS):
        tars.append(place / f"{number}.tar")
        tars[-1].write_bytes(layer(number).data())
    for tar in tars:
        run("umoci", "raw", "add-layer", "--image", f"{place}/layout:t", tar)
    return place / "layout"


def picture(found: dict[str, tarfile.TarInfo]) -> dict[str, tuple[object, ...]]:
    """What a tar says about each file; a hard link by what it is a link to."""
    return {
        name: (one.type, one.mode, one.uid, one.gid, int(one.mtime), one.size, one.linkname)
        for name, one in found.items()
    }


async def test_twenty_layers_are_as_their_merge(
    client: DSecClient, parts: Parts, layout: Path, tmp_path: Path
) -> None:
    run("umoci", "unpack", "--image", f"{layout}:t", tmp_path / "bundle")
    merged = tmp_path / "bundle/rootfs/data"
    run("tar", "-cf", tmp_path / "image.tar", "-C", layout, ".")
    many = await parts.image(tmp_path / "image.tar")
    assert len(many.layers) == LAYERS + 1
    tool = await parts.toolkit({"data/last": b"by a toolkit"})
    async with await client.run_container(parts.over(many.name)) as sandbox:
        await assert_merged(sandbox, merged, tmp_path)
        before = (await sandbox.run_shell("cd /data && find . | sort | sha256sum")).stdout
        (await sandbox.run_shell("rm -rf /data/* && echo mine > /data/last")).check()
        assert (await sandbox.run_shell("ls /data")).stdout == "last\n"
    async with await client.run_container(parts.over(many.name, tool)) as sandbox:
        assert await sandbox.files.read("/data/last") == b"by a toolkit"
        after = (await sandbox.run_shell("cd /data && find . | sort | sha256sum")).stdout
        assert after == before


async def assert_merged(sandbox: Sandbox, merged: Path, tmp_path: Path) -> None:
    run("tar", "--sort=name", "-cf", tmp_path / "merged.tar", "-C", merged, ".")
    with tarfile.open(tmp_path / "merged.tar") as archive:
        expected = {one.name.removeprefix("./"): one for one in archive}
    found = await members(sandbox, "/data")
    for several in (found, expected):
        several.pop(".", None)
        several.pop("", None)
    assert sorted(found) == sorted(expected)
    told, wanted = picture(found), picture(expected)
    # Which of its names a file has first in a tar, and which are links to it, is the packer's.
    alike = {n for n in wanted if not found[n].islnk() and not expected[n].islnk()}
    assert {n: told[n] for n in alike} == {n: wanted[n] for n in alike}
    for name in sorted(expected):
        status = (merged / name).lstat()
        if not stat.S_ISDIR(status.st_mode):
            shown = await sandbox.run_shell(f"stat -c '%f %u %g %Y' '/data/{name}'")
            said = f"{status.st_mode:x} {status.st_uid} {status.st_gid} {int(status.st_mtime)}\n"
            assert shown.stdout == said, name
        if stat.S_ISREG(status.st_mode):
            assert await sandbox.files.read(f"/data/{name}") == (merged / name).read_bytes()


async def test_a_link_to_a_file_of_a_lower_layer_is_that_file(
    client: DSecClient, parts: Parts, tmp_path: Path
) -> None:
    """Also under the other names it has there already."""
    run("umoci", "init", "--layout", tmp_path / "layout")
    run("umoci", "new", "--image", f"{tmp_path}/layout:t")
    image.build(tmp_path / "0.tar")
    lower = Tar().add("data/one", content=b"linked").link("data/two", "data/one")
    (tmp_path / "1.tar").write_bytes(lower.data())
    (tmp_path / "2.tar").write_bytes(Tar().link("data/three", "data/two").data())
    for number in range(3):
        tar = tmp_path / f"{number}.tar"
        run("umoci", "raw", "add-layer", "--image", f"{tmp_path}/layout:t", tar)
    run("tar", "-cf", tmp_path / "image.tar", "-C", tmp_path / "layout", ".")
    made = await parts.image(tmp_path / "image.tar")
    async with await client.run_container(parts.over(made.name)) as sandbox:
        shown = await sandbox.run_shell("cd /data && stat -c '%h %i' one two three")
        first, second, third = shown.stdout.splitlines()
        assert first.startswith("3 ")
        assert first == second == third


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
async def test_a_killed_server_changes_no_environment(
    restarted: Server, args: MakeArgs, tmp_path: Path
) -> None:
    port = 0
    async with restarted.client() as client:
        parts = Parts(client, tmp_path, restarted.backend)
        archive = image.build(tmp_path / "image.tar")
        await client.images.import_archive(archive, image.NAME).wait()
        work = await parts.workspace({"workspace/f": b"1" * 100_000})
        tool = await parts.toolkit({"opt/f": b"2" * 100_000})
        wanted = args(workspace=work.name, toolkits=[tool.name])
        sandbox_id = (await client.run_container(wanted)).id
        port = int(restarted.url.rpartition(":")[2])
    restarted.kill()
    restarted.start(port=port)
    async with restarted.client() as client:
        sandbox = await client.get(sandbox_id)
        try:
            assert (sandbox.view.workspace, sandbox.view.toolkits) == (work.name, [tool.name])
            assert await sandbox.files.read("/workspace/f") == b"1" * 100_000
            with pytest.raises(Conflict):
                await client.layers.remove("toolkit", tool.name)
            assert (await client.layers.get("toolkit", tool.name)).used_by == 1
            async with await client.run_container(wanted) as another:
                assert await another.files.read("/opt/f") == b"2" * 100_000
            assert await sandbox.files.read("/opt/f") == b"2" * 100_000
        finally:
            await sandbox.stop()
        await client.layers.remove("toolkit", tool.name)
