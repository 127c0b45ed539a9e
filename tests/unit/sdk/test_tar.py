"""A sandbox's tar stream is hostile."""

from __future__ import annotations

import io
import tarfile
from collections.abc import Callable
from pathlib import Path

import pytest

from dsec.sdk import _tar


def archive(*members: tuple[tarfile.TarInfo, bytes]) -> Callable[[], bytes]:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=tarfile.PAX_FORMAT) as tar:
        for info, data in members:
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    out.seek(0)
    return lambda: out.read(700)


def member(
    name: str, kind: bytes = tarfile.REGTYPE, link: str = "", mode: int = 0o644
) -> tarfile.TarInfo:
    info = tarfile.TarInfo(name)
    info.type = kind
    info.linkname = link
    info.mode = mode
    return info


@pytest.fixture
def target(tmp_path: Path) -> Path:
    (tmp_path / "secret").write_text("untouched")
    return tmp_path / "in/target"


def names(target: Path) -> set[str]:
    return {str(path.relative_to(target)) for path in target.rglob("*")}


@pytest.mark.parametrize(
    "entry",
    [
        member("../secret"),
        member("/secret"),
        member("a/../../secret"),
        member("link", tarfile.SYMTYPE, "../secret"),
        member("link", tarfile.SYMTYPE, "/etc/passwd"),
        member("d/link", tarfile.SYMTYPE, "../../x"),
        member("link", tarfile.SYMTYPE, "a/b/../../../secret"),
        member("link", tarfile.LNKTYPE, "../../secret"),
        member("link", tarfile.LNKTYPE, "/etc/passwd"),
        member("dev", tarfile.CHRTYPE),
        member("pipe", tarfile.FIFOTYPE),
    ],
)
def test_nothing_leads_out(target: Path, entry: tarfile.TarInfo) -> None:
    done = _tar.unpack(archive((entry, b""), (member("fine"), b"ok")), target)
    assert [name for name, _ in done.skipped] == [entry.name]
    assert done.entries == 1
    assert names(target) - {"d"} == {"fine"}
    assert (target.parent.parent / "secret").read_text() == "untouched"


def test_links_are_never_followed(target: Path) -> None:
    outside = target.parent / "outside"
    outside.mkdir(parents=True)
    target.mkdir()
    (target / "mine").symlink_to(outside)
    done = _tar.unpack(
        archive(
            (member("mine/evil"), b"x"),
            (member("here", tarfile.SYMTYPE, "."), b""),
            (member("here/evil"), b"x"),
            (member("file", tarfile.SYMTYPE, "other"), b""),
            (member("file"), b"replaces the link"),
            (member("hard", tarfile.LNKTYPE, "here"), b""),
        ),
        target,
    )
    assert [name for name, _ in done.skipped] == ["mine/evil", "here/evil", "hard"]
    assert list(outside.iterdir()) == []
    assert not (target / "other").exists()
    assert (target / "file").read_bytes() == b"replaces the link"


def test_modes_lose_what_is_dangerous_and_full_directories_get_theirs_last(target: Path) -> None:
    _tar.unpack(
        archive(
            (member("ro", tarfile.DIRTYPE, mode=0o555), b""),
            (member("ro/su"), b"x"),
            (member("su", mode=0o6755), b"x"),
            (member("deep/er/f"), b"x"),
            (member("h", tarfile.LNKTYPE, "deep/er/f"), b""),
        ),
        target,
    )
    assert (target / "ro").stat().st_mode & 0o777 == 0o755
    assert (target / "su").stat().st_mode & 0o7777 == 0o755
    assert (target / "h").samefile(target / "deep/er/f")


def test_a_file_that_grows_while_it_is_packed_keeps_the_archive_whole(tmp_path: Path) -> None:
    (tmp_path / "src").mkdir()
    file = tmp_path / "src/f"
    file.write_bytes(b"a" * 10)
    chunks = _tar.pack(tmp_path / "src")
    first = next(chunks)
    file.write_bytes(b"a" * 9999)
    data = io.BytesIO(first + b"".join(chunks))
    with tarfile.open(fileobj=data) as tar:
        assert tar.getmember("f").size == 10
