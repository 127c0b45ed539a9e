"""The tar of a layer, read back."""

from __future__ import annotations

import io
import os
import socket
import stat
import subprocess
import tarfile
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest

from dsec import InvalidRequest, Unavailable
from dsec.sdk import _layer_tar
from dsec.sdk._layer_tar import Manner, pack_layer, rebase


def read(chunks: Iterable[bytes]) -> dict[str, tarfile.TarInfo]:
    with tarfile.open(fileobj=io.BytesIO(b"".join(chunks)), errors="surrogateescape") as tar:
        return {member.name: member for member in tar}


def content(chunks: Iterable[bytes], name: str) -> bytes:
    with tarfile.open(fileobj=io.BytesIO(b"".join(chunks))) as tar:
        file = tar.extractfile(name)
        assert file is not None
        return file.read()


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    root = tmp_path / "tree"
    (root / "a").mkdir(parents=True)
    (root / "a" / "first").write_bytes(b"x" * 700)
    (root / "a" / "second").hardlink_to(root / "a" / "first")
    (root / "a" / "link").symlink_to("/etc/passwd")
    (root / "a" / "su").write_text("")
    (root / "a" / "su").chmod(0o4751)
    os.mkfifo(root / "pipe")
    (root / os.fsdecode(b"odd \xff\n")).write_text("")
    with (root / "sparse").open("wb") as file:
        file.truncate(1 << 20)
    os.utime(root / "a" / "su", (5, 5))
    return root


def test_everything_is_kept(tree: Path) -> None:
    found = read(pack_layer(tree, "/", Manner()))
    names = {str(path.relative_to(tree)) for path in tree.rglob("*")}
    assert set(found) == names
    assert found["a/link"].linkname == "/etc/passwd"
    assert (found["a/second"].islnk(), found["a/second"].linkname) == (True, "a/first")
    assert content(pack_layer(tree, "/", Manner()), "a/second") == b"x" * 700
    assert (found["a/su"].mode, found["a/su"].mtime) == (0o4751, 5)
    assert found["pipe"].isfifo()
    assert found["sparse"].size == 1 << 20
    assert found["a"].uid == os.getuid()


def test_only_what_is_below_the_place_is_listed(tree: Path) -> None:
    tree.chmod(0o750)
    found = read(pack_layer(tree, "/opt//tools/.", Manner((7, 8))))
    assert {"opt", "opt/tools/pipe"} & set(found) == {"opt/tools/pipe"}
    assert (found["opt/tools"].isdir(), found["opt/tools"].mode) == (True, 0o750)
    assert found["opt/tools/a/second"].linkname == "opt/tools/a/first"
    assert {(member.uid, member.gid) for member in found.values()} == {(7, 8)}


def test_plain_modes_and_one_time(tree: Path) -> None:
    found = read(pack_layer(tree, "/", Manner((0, 0), mtime=9, plain_modes=True)))
    assert {member.mtime for member in found.values()} == {9}
    assert (found["a/first"].mode, found["a/su"].mode, found["a"].mode) == (0o644, 0o755, 0o755)


def test_sockets_mean_nothing_elsewhere(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "s"))
        assert read(pack_layer(tmp_path, "/", Manner())) == {}


def test_attributes_are_kept(tree: Path) -> None:
    value = b"\x01\x00\x00\x02\xff\n= 9 x"
    os.setxattr(tree / "a" / "first", "user.mine", value)
    data = b"".join(pack_layer(tree, "/", Manner()))
    for chunks in ([data], rebase(pulled(data), "/x", Manner())):
        (found,) = [m for m in read(chunks).values() if m.name.endswith("first")]
        kept = found.pax_headers["SCHILY.xattr.user.mine"]
        assert kept.encode("utf-8", "surrogateescape") == value


def pulled(data: bytes) -> Callable[[], bytes]:
    stream = io.BytesIO(data)
    return lambda: stream.read(1000)


@pytest.mark.parametrize("style", [tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
def test_a_stream_is_moved(tmp_path: Path, style: int) -> None:
    long = "d/" * 60 + "n" * 120
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=style) as tar:
        for name, kind, link, data in (
            (".", tarfile.DIRTYPE, "", b""),
            ("./f", tarfile.REGTYPE, "", b"abc"),
            (long, tarfile.REGTYPE, "", b"y" * 512),
            ("h", tarfile.LNKTYPE, long, b""),
            ("s", tarfile.SYMTYPE, "../up", b""),
        ):
            info = tarfile.TarInfo(name)
            info.type, info.linkname, info.size, info.uid = kind, link, len(data), 3_000_000
            info.mode = 0o640
            tar.addfile(info, io.BytesIO(data))
    kept = read(rebase(pulled(out.getvalue()), "/work", Manner()))
    assert set(kept) == {"work/f", f"work/{long}", "work/h", "work/s"}
    assert (kept["work/h"].linkname, kept["work/s"].linkname) == (f"work/{long}", "../up")
    assert {member.uid for member in kept.values()} == {3_000_000}
    owned = list(rebase(pulled(out.getvalue()), "/", Manner((0, 0))))
    assert all(owned), "an empty chunk would end the body"
    assert {member.uid for member in read(owned).values()} == {0}
    assert content(owned, "f") == b"abc"
    assert content(owned, long) == b"y" * 512


@pytest.mark.parametrize("cut", [100, 512 + 100, 512 + 700])
def test_a_stream_that_is_cut_short_is_no_layer(tmp_path: Path, cut: int) -> None:
    (tmp_path / "f").write_bytes(b"x" * 1000)
    data = b"".join(pack_layer(tmp_path, "/", Manner()))
    with pytest.raises(Unavailable, match="broken"):
        list(rebase(pulled(data[:cut]), "/", Manner()))


def test_a_directory_of_its_own() -> None:
    assert _layer_tar.directory("/", 0o755, (0, 0), 1.0) == b""
    header = _layer_tar.directory("/srv/work", 0o2770, (5, 6), 1.9)
    (found,) = read([header, bytes(1024)]).values()
    assert (found.name, found.mode, found.uid, found.gid) == ("srv/work", 0o2770, 5, 6)
    assert stat.S_ISGID & found.mode
    assert found.mtime == 1


@pytest.mark.parametrize("at", ["", "x", "/a/../b", "/a\0"])
def test_places_that_are_none(at: str) -> None:
    with pytest.raises(InvalidRequest):
        _layer_tar.prefix_of(at)


def test_owners() -> None:
    assert _layer_tar.parse_owner("keep") is None
    assert _layer_tar.parse_owner("7") == (7, 7)
    assert _layer_tar.parse_owner("1000:100") == (1000, 100)
    for text in ("root", "1:", "-1:0", ":", "1:2:3"):
        with pytest.raises(InvalidRequest):
            _layer_tar.parse_owner(text)


def test_holes_are_not_sent(tmp_path: Path) -> None:
    """GNU tar unpacks what is sent."""
    tree, out = tmp_path / "tree", tmp_path / "out"
    tree.mkdir()
    out.mkdir()
    (tree / "small").write_bytes(bytes(5000))
    with (tree / "sparse").open("wb") as file:
        for offset, data in ((0, b"begin"), (300 << 20, b"middle"), ((1 << 30) - 3, b"end")):
            file.seek(offset)
            file.write(data)
    with (tree / "hole").open("wb") as file:
        file.truncate(64 << 20)
    sent = b"".join(pack_layer(tree, "/", Manner()))
    assert len(sent) < 1 << 20
    subprocess.run(["tar", "-xf", "-", "-C", str(out)], input=sent, check=True)
    assert (out / "small").read_bytes() == bytes(5000)
    assert (out / "hole").stat().st_size == 64 << 20
    with (out / "sparse").open("rb") as file:
        assert file.read(5) == b"begin"
        file.seek(300 << 20)
        assert file.read(7) == b"middle\0"
        file.seek(-4, os.SEEK_END)
        assert file.read() == b"\0end"
        assert file.tell() == 1 << 30
