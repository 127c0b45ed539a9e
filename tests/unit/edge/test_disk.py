"""Disks of their own, as far as no kernel is needed; the rest is in tests/kernel/test_disk.py."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from dsec.base.errors import CapacityUnavailable, Unsupported
from dsec.edge.backends import container
from dsec.edge.backends.container import ContainerBackend, ContainerConfig
from dsec.edge.backends.disk import DISK, Disks
from dsec.edge.sim.backend import SimBackend
from dsec.linux import ext4, probes
from dsec.linux.sparse import copy_sparse, data_extents
from dsec.wire.sandbox import Limits, SandboxSpec
from tests.unit.edge.node import AnyClock, FakeImages

MIB = 1 << 20
ASKED = SandboxSpec(image="debian", limits=Limits(disk_mb=64))


def holed(path: Path) -> bytes:
    """Write a file of 16 MiB with data at its start, in its middle and near its end."""
    with path.open("wb") as file:
        file.truncate(16 * MIB)
        for offset, data in ((0, b"a" * 5000), (8 * MIB + 1, b"b" * 70_000), (15 * MIB, b"c")):
            file.seek(offset)
            file.write(data)
    return path.read_bytes()


def test_a_copy_is_equal_and_has_its_holes(tmp_path: Path) -> None:
    source, target = tmp_path / "a", tmp_path / "b"
    content = holed(source)
    with source.open("rb") as one, target.open("wb") as two:
        copy_sparse(one.fileno(), two.fileno())
    assert target.read_bytes() == content
    assert target.stat().st_blocks <= source.stat().st_blocks < 16 * MIB // 512


def test_a_file_of_nothing_but_a_hole_is_copied(tmp_path: Path) -> None:
    with (tmp_path / "a").open("wb") as file:
        file.truncate(MIB)
    with (tmp_path / "a").open("rb") as one, (tmp_path / "b").open("wb") as two:
        assert list(data_extents(one.fileno())) == []
        copy_sparse(one.fileno(), two.fileno())
    assert (tmp_path / "b").stat().st_size == MIB


@pytest.mark.parametrize("size_mb", [16, 17, 100, 511, 2048, 10_241, 1 << 20])
def test_every_size_has_what_was_asked_and_two_percent_at_most(
    tmp_path: Path, size_mb: int
) -> None:
    image = tmp_path / "image"
    ext4.format_image(image, size_mb * MIB)
    assert size_mb * MIB <= ext4.usable_in(image) <= size_mb * MIB * 1.02
    assert image.stat().st_blocks * 512 < 16 * MIB


@pytest.mark.parametrize("content", [b"", bytes(4096)])
def test_what_is_no_file_system_is_told(tmp_path: Path, content: bytes) -> None:
    image = tmp_path / "image"
    image.write_bytes(content)
    with pytest.raises(OSError, match="not an ext4"):
        ext4.usable_in(image)


def test_more_than_the_node_has_is_refused_with_numbers(tmp_path: Path) -> None:
    found = os.statvfs(tmp_path)
    with pytest.raises(CapacityUnavailable) as caught:
        Disks(tmp_path).make(tmp_path, found.f_bavail * found.f_frsize // MIB + (1 << 20))
    assert caught.value.details["free_bytes"]
    assert list(tmp_path.iterdir()) == []


def test_a_directory_that_is_no_disk_uses_nothing(tmp_path: Path) -> None:
    (tmp_path / DISK).mkdir()
    use = Disks(tmp_path).use(tmp_path, 64)
    assert (use.used_bytes, use.limit_bytes) == (0, 0)
    assert not Disks(tmp_path).remove(tmp_path)


def test_a_node_without_disks_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = ContainerConfig(node="n0de", state=tmp_path, aether=tmp_path / "aether")
    backend = ContainerBackend(config, FakeImages(), AnyClock())
    monkeypatch.setattr(container, "_missing", lambda _: "")
    monkeypatch.setattr(backend, "_disk_limit", probes.Finding(False, "no mkfs.ext4"))
    with pytest.raises(Unsupported, match=r"disk_mb: not on this node: no mkfs\.ext4"):
        backend.refuse(ASKED)
    backend.refuse(SandboxSpec(image="debian"))
    monkeypatch.setattr(backend, "_disk_limit", probes.Finding(True))
    backend.refuse(ASKED)


def test_the_simulation_says_that_it_has_no_such_limit() -> None:
    said = SimBackend().warnings(ASKED)
    assert any("disk_mb" in line for line in said)
    assert not any("disk_mb" in line for line in SimBackend().warnings(SandboxSpec(image="d")))
