"""Disks of their own: what fits, what is counted, what is left when a step fails."""

from __future__ import annotations

import errno
import os
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from dsec.base.errors import CapacityUnavailable, DsecError, StartFailed, StorageFull
from dsec.edge.backends import disk
from dsec.edge.backends.disk import DISK, IMAGE, Disks
from dsec.linux import ext4, loop, mounts
from dsec.linux.process import CommandFailed

pytestmark = pytest.mark.needs_root
MIB = 1 << 20
MIN_MB = 16


@pytest.fixture
def state() -> Iterator[Path]:
    """A state directory; after the test no disk of it may be mounted or attached."""
    with tempfile.TemporaryDirectory(prefix="disk") as directory:
        home = Path(directory)
        (home / "sandboxes").mkdir()
        yield home
        left = mounts.mounts_under(home)
        for mount in left:
            mounts.umount(Path(mount.target), detach=True)
        assert left == []
        assert attached_below(home) == []


@pytest.fixture
def disks(state: Path) -> Disks:
    made = Disks(state)
    made.prepare()
    return made


@pytest.fixture
def place(state: Path, disks: Disks) -> Iterator[Path]:
    """The directory of a sandbox, whose disk is removed after the test."""
    directory = place_of(state, "one")
    yield directory
    disks.remove(directory)


def place_of(state: Path, name: str) -> Path:
    directory = state / "sandboxes" / name
    directory.mkdir()
    return directory


def attached_below(directory: Path) -> list[str]:
    """Files below a directory that are loop devices now."""
    found = []
    for backing in Path("/sys/block").glob("loop*/loop/backing_file"):
        try:
            name = backing.read_text().strip()
        except OSError:
            continue
        if name.startswith(str(directory)):
            found.append(name)
    return found


def fill(path: Path, chunk: int = MIB) -> int:
    """Write until the disk is full; how much went in, bytes."""
    written = 0
    with path.open("wb", buffering=0) as file:
        try:
            while True:
                written += file.write(bytes(chunk))
        except OSError as exc:
            assert exc.errno == errno.ENOSPC
    return written


def used(disks: Disks, place: Path, size_mb: int) -> int:
    return disks.use(place, size_mb).used_bytes


@pytest.mark.parametrize("size_mb", [MIN_MB, 64, 300])
def test_it_takes_what_was_asked_and_little_more(disks: Disks, place: Path, size_mb: int) -> None:
    disks.make(place, size_mb)
    written = fill(place / DISK / "a")
    assert size_mb * MIB <= written <= size_mb * MIB * 1.03
    use = disks.use(place, size_mb)
    assert use.limit_bytes == size_mb * MIB
    assert written <= use.used_bytes <= written + MIB
    (place / DISK / "a").unlink()
    assert used(disks, place, size_mb) < MIB
    assert fill(place / DISK / "b") >= size_mb * MIB * 0.99


def test_a_terabyte_is_made_of_holes(
    disks: Disks, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(disks, "_check_room", lambda _: None)
    disks.make(place, 1 << 20)
    found = os.statvfs(place / DISK)
    assert (1 << 40) <= found.f_bavail * found.f_frsize <= (1 << 40) * 1.02
    assert (place / IMAGE).stat().st_blocks * 512 < 32 * MIB


def test_what_has_no_name_any_more_is_counted_until_it_is_closed(disks: Disks, place: Path) -> None:
    disks.make(place, 64)
    path = place / DISK / "a"
    with path.open("wb", buffering=0) as file:
        file.write(bytes(32 * MIB))
        path.unlink()
        assert used(disks, place, 64) >= 32 * MIB
        assert fill(place / DISK / "b") < 34 * MIB
    (place / DISK / "b").unlink()
    assert used(disks, place, 64) < MIB


def test_holes_cost_nothing_names_little_and_reservations_all(disks: Disks, place: Path) -> None:
    disks.make(place, 64)
    root = place / DISK
    with (root / "sparse").open("wb") as file:
        file.truncate(1 << 40)
    assert used(disks, place, 64) < MIB
    (root / "large").write_bytes(bytes(8 * MIB))
    for number in range(100):
        (root / f"name{number}").hardlink_to(root / "large")
    assert 8 * MIB <= used(disks, place, 64) < 9 * MIB
    with (root / "reserved").open("wb") as file:
        os.posix_fallocate(file.fileno(), 0, 32 * MIB)
        assert used(disks, place, 64) >= 40 * MIB
        with pytest.raises(OSError, match="No space left"):
            os.posix_fallocate(file.fileno(), 0, 128 * MIB)


def test_files_without_end_meet_the_limit_of_inodes(disks: Disks, place: Path) -> None:
    disks.make(place, MIN_MB)
    most = os.statvfs(place / DISK).f_favail
    assert most >= MIN_MB * MIB // ext4.INODE_RATIO
    with pytest.raises(OSError, match="No space left"):
        _make_files(place / DISK, most + 1)
    assert used(disks, place, MIN_MB) < MIB
    (place / DISK / "0").unlink()
    (place / DISK / "again").touch()


def _make_files(directory: Path, count: int) -> None:
    for number in range(count):
        os.close(os.open(directory / str(number), os.O_CREAT | os.O_WRONLY))


def test_what_is_deleted_goes_back_to_the_node(disks: Disks, place: Path) -> None:
    disks.make(place, 64)
    with (place / DISK / "a").open("wb") as file:
        file.write(os.urandom(32 * MIB))
        os.fsync(file.fileno())
    image = place / IMAGE
    assert image.stat().st_blocks * 512 >= 32 * MIB
    (place / DISK / "a").unlink()
    assert image.stat().st_blocks * 512 < 2 * MIB


def test_what_was_not_written_yet_is_dropped_with_the_disk(disks: Disks, place: Path) -> None:
    disks.make(place, 256)
    (place / DISK / "a").write_bytes(bytes(128 * MIB))
    assert disks.remove(place)
    assert (place / IMAGE).stat().st_blocks * 512 < 128 * MIB
    assert attached_below(place) == []


def test_removing_is_harmless_twice_and_without_a_disk(disks: Disks, place: Path) -> None:
    assert not disks.remove(place)
    assert not disks.remove(place / "nowhere")
    disks.make(place, MIN_MB)
    assert disks.remove(place)
    assert not disks.remove(place)
    use = disks.use(place, MIN_MB)
    assert (use.used_bytes, use.limit_bytes) == (0, 0)


def test_one_that_is_looked_at_is_unmounted_all_the_same(disks: Disks, place: Path) -> None:
    disks.make(place, MIN_MB)
    with (place / DISK / "a").open("wb"):
        assert disks.remove(place)
        assert not mounts.is_mounted(place / DISK)
    assert attached_below(place) == []


def test_a_hundred_at_once_are_a_hundred(disks: Disks, state: Path) -> None:
    places = [place_of(state, str(number)) for number in range(100)]
    with ThreadPoolExecutor(16) as pool:
        list(pool.map(lambda place: disks.make(place, MIN_MB), places))
        for number, place in enumerate(places):
            (place / DISK / "mine").write_text(str(number))
        said = [(place / DISK / "mine").read_text() for place in places]
        assert said == [str(number) for number in range(100)]
        assert all(pool.map(disks.remove, places))
    assert len(list((state / "disks").iterdir())) == 1


def test_strays_are_those_nobody_knows(disks: Disks, state: Path) -> None:
    for name in ("known", "stray"):
        disks.make(place_of(state, name), MIN_MB)
    assert disks.strays(frozenset({"known"})) == ["stray"]
    assert [Path(m.target).parent.name for m in mounts.mounts_under(state)] == ["known"]
    assert disks.strays(frozenset()) == ["known"]


def test_few_empty_disks_are_kept(
    disks: Disks, place: Path, state: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(disk, "MAX_TEMPLATES", 2)
    for size_mb in (16, 17, 18, 19):
        disks.make(place, size_mb)
        disks.remove(place)
    names = sorted(path.name for path in (state / "disks").iterdir())
    assert names == [f"{size_mb}-{ext4.REVISION}.ext4" for size_mb in (18, 19)]


def test_a_half_made_empty_disk_is_dropped(disks: Disks, place: Path, state: Path) -> None:
    (state / "disks/.16-1.ext4").write_bytes(b"half")
    disks.prepare()
    assert list((state / "disks").iterdir()) == []
    disks.make(place, MIN_MB)


def test_a_device_nobody_mounts_is_gone(state: Path) -> None:
    image = state / "image"
    ext4.format_image(image, MIN_MB * MIB)
    with loop.attached(image, ext4.BLOCK_BYTES) as device:
        assert attached_below(state) == [str(image)]
        number = device.name
        assert Path(f"/sys/block/{number}/loop/dio").read_text().strip() == "1"
        assert Path(f"/sys/block/{number}/loop/autoclear").read_text().strip() == "1"
    assert attached_below(state) == []


def fails(number: int) -> OSError:
    return OSError(number, os.strerror(number))


@pytest.mark.parametrize(
    ("step", "error", "told"),
    [
        ("ext4.format_image", fails(errno.EIO), StartFailed),
        ("ext4.format_image", CommandFailed(["mkfs.ext4"], 1, "no"), StartFailed),
        ("ext4.format_image", fails(errno.ENOENT), StartFailed),
        ("copy_sparse", fails(errno.ENOSPC), StorageFull),
        ("loop.attached", fails(errno.ENOSPC), CapacityUnavailable),
        ("loop.attached", fails(errno.EBUSY), CapacityUnavailable),
        ("loop.attached", fails(errno.ENOENT), StartFailed),
        ("ext4.mount_scratch", fails(errno.EINVAL), StartFailed),
    ],
)
def test_each_step_may_fail_and_nothing_is_left(
    disks: Disks,
    place: Path,
    monkeypatch: pytest.MonkeyPatch,
    step: str,
    error: Exception,
    told: type[DsecError],
) -> None:
    def fail(*_: object) -> None:
        raise error

    with monkeypatch.context() as broken:
        broken.setattr(f"dsec.edge.backends.disk.{step}", fail)
        with pytest.raises(told):
            disks.make(place, MIN_MB)
        assert attached_below(place) == []
        disks.remove(place)
        assert not mounts.is_mounted(place / DISK)
    disks.make(place, MIN_MB)  # and what is left of the first attempt is not in the way


def test_the_step_is_named(disks: Disks, place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise fails(errno.EINVAL)

    monkeypatch.setattr(ext4, "mount_scratch", fail)
    with pytest.raises(StartFailed) as caught:
        disks.make(place, MIN_MB)
    said = caught.value.details
    assert (said["step"], said["errno"]) == ("mount disk", errno.EINVAL)
    assert str(said["path"]).endswith(DISK)


def test_what_the_node_has_no_room_for_is_refused(disks: Disks, place: Path) -> None:
    disks.make(place, 64)
    inner = place / DISK / "state"
    small = Disks(inner)
    small.prepare()
    other = inner / "one"
    other.mkdir()
    with pytest.raises(CapacityUnavailable, match="disk_mb is 128"):
        small.make(other, 128)
    assert list(other.iterdir()) == []


def test_a_node_that_fills_up_below_is_an_error_inside(disks: Disks, place: Path) -> None:
    """What cannot be kept is said by fsync; what was kept before stays readable."""
    disks.make(place, 64)
    inner = place / DISK / "state"
    overcommitted = Disks(inner)
    overcommitted.prepare()
    one = inner / "one"
    one.mkdir()
    overcommitted.make(one, 32)
    try:
        (one / DISK / "before").write_bytes(b"kept")
        os.sync()
        fill(inner / "hog")
        with (one / DISK / "after").open("wb") as file:
            with pytest.raises(OSError, match=r"No space|Input/output"):
                _write_through(file.fileno(), 24 * MIB)
        assert (one / DISK / "before").read_bytes() == b"kept"
    finally:
        overcommitted.remove(one)
    assert attached_below(one) == []


def _write_through(file: int, size: int) -> None:
    for _ in range(size // MIB):
        os.write(file, bytes(MIB))
    os.fsync(file)
