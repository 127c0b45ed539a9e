"""Every file of a real image is what `umoci unpack` of the same image gives, to the last attribute.

Needs root; the first run makes the images, for which it needs apt's and pip's sources.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from dsec.images.service import finish
from dsec.linux import mounts
from dsec.wire.public_v1 import EnvironmentRef
from tests.kernel.nodes import Node, seen
from tests.kernel.real_images import TAG, layout
from tests.kernel.trees import Inventory, assert_same, inventory, run

pytestmark = [pytest.mark.anyio, pytest.mark.needs_root, pytest.mark.slow]

LAYERS = {"minimal": 1, "changed": 8, "many": 20}
"""At least so many has each image."""


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(scope="module", params=LAYERS)
def image(request: pytest.FixtureRequest) -> tuple[str, Path]:
    """An image's name and layout."""
    name: str = request.param
    return name, layout(name)


@pytest.fixture(scope="module")
def expected(image: tuple[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Inventory:
    """What umoci unpacks."""
    bundle = tmp_path_factory.mktemp("reference") / "bundle"
    run("umoci", "unpack", "--image", f"{image[1]}:{TAG}", bundle)
    found = inventory(bundle / "rootfs")
    run("rm", "-rf", bundle)
    return found


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Callable[[str], Node]]:
    """Makes nodes that share a store."""
    (tmp_path / "store").mkdir()
    made: list[Node] = []

    def make(name: str) -> Node:
        made.append(Node(name, tmp_path / "store", tmp_path))
        # A machine busy with the tests may be slow; that is not what is tested here.
        made[-1].options["attempt_timeout_s"] = 20.0
        return made[-1]

    yield make
    for one in made:
        one.clean()
    assert mounts.mounts_under(tmp_path) == []


async def test_here_and_loaded_on_demand_on_another_node(
    image: tuple[str, Path],
    expected: Inventory,
    node: Callable[[str], Node],
    tmp_path: Path,
) -> None:
    name, place = image
    async with node("first").running() as images:
        await finish(images.import_path(place, name))
        record = await images.resolve(name)
        assert len(record.layers) >= LAYERS[name]
        async with seen(images, EnvironmentRef(image=name), "s1", tmp_path) as root:
            assert_same(root, expected)
    async with node("second").running() as images:
        async with seen(images, EnvironmentRef(image=name), "s1", tmp_path) as root:
            assert_same(root, expected)
            assert (await images.store()).fetched_bytes > 0
        assert not any(images.data.raw(digest) for digest in images.data.digests())


def test_what_is_hard_is_in_them(image: tuple[str, Path], expected: Inventory) -> None:
    """So that the comparison means something."""
    files = list(expected.values())
    assert any(one.get("nlink", 1) > 1 for one in files)
    if image[0] == "minimal":
        assert any((one["mtime_ns"] or 0) % 10**9 for one in files)
        assert any("target" in one for one in files)
    if image[0] == "changed":
        xattrs = {name for one in files for name in one["xattrs"]}
        assert {"security.capability", "system.posix_acl_access", "user.of-a-directory"} <= xattrs
        assert {"trusted.mine", "system.posix_acl_default"} <= xattrs
        assert {"odd/new\nline", "odd/" + "n" * 255, "odd/caf\udce9-\udcff"} <= set(expected)
        assert any(one.get("rdev") == (259, 300_000) for one in files)
        assert expected["usr/bin/another-bash"]["nlink"] == 2
        assert "usr/share/perl5/only" in expected
        assert not any(name.startswith("opt/perl/") for name in expected)
