"""A Debian image built over the node's own sources. Needs root, mmdebstrap and a mirror."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import anyio
import pytest

from dsec.base.errors import InvalidRequest
from dsec.images.service import ImageService, finish
from dsec.linux import mounts
from dsec.wire.public_v1 import BuildImage, EnvironmentRef, ImageProgress

pytestmark = [pytest.mark.anyio, pytest.mark.needs_root, pytest.mark.slow]


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Path]:
    yield tmp_path
    for mount in mounts.mounts_under(tmp_path):
        mounts.umount(Path(mount.target), detach=True)


def processes_naming(text: str) -> list[str]:
    found = []
    for entry in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = entry.read_bytes().replace(b"\0", b" ").decode("utf-8", "replace")
        except (FileNotFoundError, ProcessLookupError):
            continue
        if text in words and entry.parent.name != str(os.getpid()):
            found.append(words)
    return found


async def test_a_debian_image(place: Path) -> None:
    async with ImageService(place / "root", place / "run") as images:
        events = [event async for event in images.build(BuildImage(distribution="debian"))]
        steps = [event.step for event in events if isinstance(event, ImageProgress)]
        assert any("installing" in step for step in steps)
        record = await images.resolve("debian")
        names = [image.name for image in await images.list_images()]
        assert names[1] == "debian:latest"
        assert names[0] == f"debian:{record.source.split()[1]}"
        environment = await images.environments.compose(EnvironmentRef(image="debian"))
        (layer,) = await images.environments.mount(environment, "sbx1")
    check_root(layer)


def check_root(layer: Path) -> None:
    program = "import sys, venv, ssl, sqlite3; print(sys.version_info.major)"
    done = subprocess.run(
        ["chroot", layer, "python3", "-c", program], capture_output=True, check=True
    )
    assert done.stdout == b"3\n"
    for tool in ("usr/bin/patch", "usr/bin/diff", "bin/ps"):
        assert (layer / tool).exists()
    assert (layer / "etc/machine-id").read_bytes() == b""
    assert (layer / "etc/resolv.conf").read_bytes() == b""
    assert (layer / "etc/hostname").read_text() == "localhost\n"
    assert not list((layer / "var/lib/apt/lists").glob("*_*"))
    assert not list((layer / "var/cache/apt/archives").glob("*.deb"))


async def test_an_unknown_package(place: Path) -> None:
    async with ImageService(place / "root", place / "run") as images:
        request = BuildImage(distribution="debian", packages=["nonesuch-package"])
        with pytest.raises(InvalidRequest, match="nonesuch-package"):
            await finish(images.build(request))
        assert await images.list_images() == []


async def test_a_build_left_is_ended(place: Path) -> None:
    async with ImageService(place / "root", place / "run") as images:
        events = images.build(BuildImage(distribution="debian"))
        async for event in events:
            if isinstance(event, ImageProgress) and "extracting" in event.step:
                break
        assert processes_naming(str(place))
        await events.aclose()  # type: ignore[attr-defined]
        with anyio.fail_after(60):
            while list((place / "root/tmp").iterdir()):  # noqa: ASYNC110
                await anyio.sleep(0.05)
        assert processes_naming(str(place)) == []
