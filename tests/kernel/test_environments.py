"""Environments over a shared store: composed, loaded on demand, recorded, collected."""

from __future__ import annotations

import tarfile
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import anyio
import pytest

from dsec.base.errors import Conflict, DataUnavailable, InvalidRequest, NotFound, Unavailable
from dsec.images.oci.layer import MAX_IMPLIED
from dsec.images.service import finish
from dsec.wire.public_v1 import EnvironmentRef
from tests.kernel.nodes import (
    MIB,
    Node,
    anyio_backend,
    imported,
    node,
    noise,
    published,
    read_all,
    seen,
    store,
    tar_of,
)
from tests.tars import Tar

__all__ = ["anyio_backend", "node", "store"]
pytestmark = [pytest.mark.needs_root]

BIG = 8 * MIB
IMAGE = {
    "etc/os-release": b"ID=test\n",
    "usr/bin/tool": noise(3 * MIB, 1),
    "usr/share/large": noise(BIG, 2),
    "tmp/keep": b"",
}


@pytest.fixture
async def publisher(node: Callable[[str], Node]) -> None:
    async with node("publisher").running() as images:
        await imported(images, "base", tar_of(IMAGE))
        await published(images, "workspace", "task:v1", tar_of({"workspace/a.py": b"a = 1\n"}))
        await published(images, "toolkit", "lint:v1", tar_of({"opt/lint": b"one"}))


ALL = EnvironmentRef(image="base", workspace="task", toolkits=["lint"])


@pytest.mark.usefixtures("publisher")
async def test_a_cold_node_reads_what_it_needs_and_no_more(
    node: Callable[[str], Node], tmp_path: Path
) -> None:
    async with node("cold").running() as images:
        async with seen(images, ALL, "s1", tmp_path) as root:
            assert (root / "etc/os-release").read_bytes() == b"ID=test\n"
            assert (root / "workspace/a.py").read_bytes() == b"a = 1\n"
            assert (root / "opt/lint").read_bytes() == b"one"
            view = await images.store()
            assert 0 < view.fetched_bytes < BIG / 2
            assert dict(read_all(root)) == IMAGE | {
                "workspace/a.py": b"a = 1\n",
                "opt/lint": b"one",
            }
        environment = await images.environments.compose(ALL)
        assert (environment.workspace, environment.toolkits) == ("task:v1", ["lint:v1"])
        assert not any(images.data.raw(digest) for digest in images.data.digests())


@pytest.mark.usefixtures("publisher")
async def test_many_at_once_fetch_once(node: Callable[[str], Node], tmp_path: Path) -> None:
    async with node("cold").running() as images:
        found: list[bytes] = []

        async def use(owner: str) -> None:
            async with seen(images, ALL, owner, tmp_path) as root:
                found.append(await anyio.Path(root / "usr/bin/tool").read_bytes())

        async with anyio.create_task_group() as group:
            for number in range(20):
                group.start_soon(use, f"s{number}")
        assert found == [IMAGE["usr/bin/tool"]] * 20
        assert len(images.layers.mounted_digests()) == 3
        assert (await images.store()).fetched_bytes < 2 * (BIG + 3 * MIB)


@pytest.mark.usefixtures("publisher")
async def test_a_node_goes_on_with_what_an_earlier_edge_mounted(
    node: Callable[[str], Node], tmp_path: Path
) -> None:
    here = node("cold")
    async with here.running() as images:
        environment = await images.environments.compose(ALL)
        layers = await images.environments.mount(environment, "s1")
        assert (layers[-1] / "etc/os-release").read_bytes() == b"ID=test\n"
    async with here.running() as images:  # the sandbox lives on
        images.environments.rebuild_pins([("s1", environment.layers)])
        assert await images.environments.mount(environment, "s2") == layers
        assert (layers[-1] / "usr/bin/tool").read_bytes() == IMAGE["usr/bin/tool"]
        await images.environments.release("s1")
        await images.environments.release("s2")


async def test_directories_left_to_those_below_are_found_there(node: Callable[[str], Node]) -> None:
    image = Tar().add("tmp", tarfile.DIRTYPE, mode=0o1777).add("file").dirs("opaque")
    for name in ("home", "said", "removed", "opaque/in", "plain"):
        image.add(name, tarfile.DIRTYPE, uid=1000, gid=100, mode=0o2750)
    work = Tar().dirs("plain").add("said", tarfile.DIRTYPE, uid=7).add(".wh.removed")
    work.dirs("opaque").add("opaque/.wh..wh..opq").add("tmp/f")
    names = ["tmp", "home", "said", "removed", "opaque/in", "plain", "file", "new"]
    kit = tar_of({f"{name}/kit/f": b"" for name in names})
    async with node("one").running() as images:
        await imported(images, "base", image.data())
        await published(images, "workspace", "work:v1", work.data())
        await published(images, "toolkit", "kit:v1", kit)
        wanted = EnvironmentRef(image="base", workspace="work", toolkits=["kit"])
        environment = await images.environments.compose(wanted)
        layers = await images.environments.mount(environment, "s1")
        found = await images.environments.mends(environment, layers)
        assert {(mend.path, mend.mode, mend.uid, mend.gid) for mend in found} == {
            ("/home", 0o2750, 1000, 100),
            ("/said", 0o755, 7, 0),
            ("/tmp", 0o1777, 0, 0),
        }
        alone = await images.environments.compose(EnvironmentRef(image="base"))
        assert await images.environments.mends(alone, layers[-1:]) == []
        await images.environments.release("s1")


async def test_a_layer_that_leaves_too_much_to_others_is_refused(
    node: Callable[[str], Node],
) -> None:
    async with node("one").running() as images:
        fits = {f"d{number}/f": b"" for number in range(MAX_IMPLIED - 1)}  # and the root
        await published(images, "toolkit", "fits:v1", tar_of(fits))
        with pytest.raises(InvalidRequest, match="does not list"):
            await published(images, "toolkit", "more:v1", tar_of(fits | {"one/more": b""}))
        with pytest.raises(NotFound):
            await images.layer("toolkit", "more:v1")


@pytest.mark.usefixtures("publisher")
async def test_a_mounted_store_needs_no_filler(node: Callable[[str], Node], tmp_path: Path) -> None:
    there = node("direct-publisher")
    there.direct = True
    async with there.running() as images:
        await imported(images, "direct", tar_of(IMAGE))
    here = node("direct")
    here.direct = True
    async with here.running() as images:
        async with seen(images, EnvironmentRef(image="direct"), "s1", tmp_path) as root:
            assert dict(read_all(root)) == IMAGE
        view = await images.store()
        assert (view.front, view.cache_used_bytes) == ("", 0)


@pytest.mark.usefixtures("publisher")
async def test_upgrading_a_toolkit_makes_one_layer(
    node: Callable[[str], Node], tmp_path: Path
) -> None:
    async with node("busy").running() as images:
        for number in range(10):
            data = tar_of({"workspace/n": str(number).encode()})
            await published(images, "workspace", f"task{number}:v1", data)
        for number in range(5):
            await imported(images, f"base{number}", tar_of({"etc/n": str(number).encode()}))
        wanted = [
            EnvironmentRef(image=f"base{image}", workspace=f"task{task}", toolkits=["lint"])
            for image in range(5)
            for task in range(10)
        ]
        before = [await images.environments.compose(one) for one in wanted]
        layers = set(images.layers.digests())
        made = await published(images, "toolkit", "lint:v2", tar_of({"opt/lint": b"two"}))
        assert set(images.layers.digests()) - layers == {made.digest}
        after = [await images.environments.compose(one) for one in wanted]
        for old, new in zip(before, after, strict=True):
            assert new.layers[:-1] == old.layers[:-1]
            assert (old.toolkits, new.toolkits) == (["lint:v1"], ["lint:v2"])
            assert new.layers[-1] == made.digest
        async with seen(images, wanted[7], "s1", tmp_path) as root:
            assert (root / "opt/lint").read_bytes() == b"two"
            assert (root / "workspace/n").read_bytes() == b"7"


@pytest.mark.usefixtures("publisher")
async def test_versions_do_not_change(node: Callable[[str], Node]) -> None:
    async with node("other").running() as images:
        same = await published(images, "toolkit", "lint:v1", tar_of({"opt/lint": b"one"}))
        assert same.name == "lint:v1"
        with pytest.raises(Conflict, match="another content"):
            await published(images, "toolkit", "lint:v1", tar_of({"opt/lint": b"changed"}))
        assert (
            await published(images, "toolkit", "lint", tar_of({"opt/x": b"2"}))
        ).name == "lint:v2"
        with pytest.raises(InvalidRequest, match="which version"):
            await images.remove_layer("toolkit", "lint")
        with pytest.raises(NotFound, match="no toolkit"):
            await images.environments.compose(EnvironmentRef(image="base", toolkits=["nonesuch"]))


@pytest.mark.usefixtures("publisher")
async def test_what_is_used_stays_and_what_nobody_needs_goes(
    node: Callable[[str], Node], tmp_path: Path
) -> None:
    user, operator = node("user"), node("operator")
    async with user.running() as using, operator.running() as images:
        async with seen(using, ALL, "s1", tmp_path) as root:
            await images.remove("base")
            await images.remove_layer("workspace", "task:v1")
            with pytest.raises(Conflict, match="is used by s1"):
                await using.remove_layer("toolkit", "lint:v1")
            report = await images.collect_store(dry_run=False)
            assert report.blobs == 0  # a node declared that it uses them
            assert dict(read_all(root)).keys() >= IMAGE.keys()
        await using.environments.unmount_unused()
        dry = await images.collect_store(dry_run=True)
        assert "layers" in dry.detail


@pytest.mark.usefixtures("publisher")
async def test_a_store_that_is_gone_is_an_error_and_comes_back(
    node: Callable[[str], Node], store: Path, tmp_path: Path
) -> None:
    async with node("cold").running() as images:
        environment = await images.environments.compose(ALL)
        async with seen(images, ALL, "s1", tmp_path) as root:
            assert (root / "etc/os-release").read_bytes() == b"ID=test\n"
            store.rename(tmp_path / "away")  # noqa: ASYNC240
            with pytest.raises(OSError, match="Input/output error"):
                await anyio.Path(root / "usr/share/large").read_bytes()
            with anyio.fail_after(30):
                while not images.environments.faults(environment, "s1"):  # noqa: ASYNC110
                    await anyio.sleep(0.05)
            (fault,) = images.environments.faults(environment, "s1")
            assert fault.code == DataUnavailable.code
            with pytest.raises((Unavailable, NotFound)):
                await images.environments.compose(EnvironmentRef(image="another"))
            (tmp_path / "away").rename(store)
            with anyio.fail_after(60):
                while images.environments.faults(environment, "s1"):  # noqa: ASYNC110
                    await anyio.sleep(0.05)
            assert (root / "usr/share/large").read_bytes() == IMAGE["usr/share/large"]


@pytest.mark.usefixtures("publisher")
async def test_a_trace_is_recorded_shared_and_used(
    node: Callable[[str], Node], tmp_path: Path
) -> None:
    async with node("first").running() as images:
        async with seen(images, ALL, "s1", tmp_path, record=True) as root:
            (root / "usr/bin/tool").read_bytes()
        view = await images.trace(ALL, "")
        assert 3 * MIB <= view.read_bytes < BIG
        assert view.files[0].path == "/usr/bin/tool"
    async with node("second").running() as images:
        environment = await images.environments.compose(ALL)
        await images.environments.mount(environment, "s1")
        with anyio.fail_after(30):
            while (await images.store()).fetched_bytes < 3 * MIB:  # noqa: ASYNC110
                await anyio.sleep(0.05)
        await images.environments.release("s1")
        assert (await images.trace(ALL, "")).read_bytes == view.read_bytes


async def test_a_node_without_a_store_records_too(tmp_path: Path) -> None:
    """The embedded default: everything whole on the node; the filler only writes down."""
    here = Node("alone", tmp_path / "no-store", tmp_path)
    async with here.running() as images:
        await imported(images, "base", tar_of(IMAGE))
        async with seen(images, EnvironmentRef(image="base"), "s1", tmp_path, record=True) as root:
            assert (root / "etc/os-release").read_bytes() == b"ID=test\n"
        view = await images.trace(EnvironmentRef(image="base"), "")
        assert 0 < view.read_bytes < BIG
    here.clean()


@pytest.mark.usefixtures("publisher")
async def test_an_interrupted_publication_leaves_nothing_to_be_found(
    node: Callable[[str], Node], store: Path
) -> None:
    async with node("other").running() as images:
        with anyio.move_on_after(0.3):
            await finish(images.import_archive("half", _slow(tar_of(IMAGE))))
    async with node("third").running() as images:
        with pytest.raises(NotFound):
            await images.resolve("half")
    assert not list((store / "documents" / "intent").glob("*"))


async def _slow(data: bytes) -> AsyncIterator[bytes]:
    yield data[:MIB]
    await anyio.sleep(30)
