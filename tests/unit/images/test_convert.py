"""The conversion's jobs, in this process: what they answer, whatever they are given."""

from __future__ import annotations

import bz2
import gzip
import io
import lzma
import os
import stat
import tarfile
import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dsec.images import convert
from dsec.images.children import Refused
from dsec.images.convert import Converted
from dsec.images.erofs.read import read_image
from dsec.images.erofs.tree import BLOCK, Inode, Tree
from dsec.images.oci.layer import MAX_IMPLIED
from tests.tars import Tar
from tests.unit.images.oci.test_members import with_checksum


def convert_to(out: Path, *argv: str | Path) -> Converted | Refused:
    out.mkdir(exist_ok=True)
    return convert.answer(convert._arguments(["--out", str(out), *map(str, argv)]))


def convert_tar(out: Path, data: bytes, *lowers: Path, flags: tuple[str, ...] = ()) -> Any:
    out.mkdir(exist_ok=True)
    blob = out.with_name(f"{out.name}.tar")
    blob.write_bytes(data)
    limits = ("--max-entries", "2000", "--max-bytes", str(1 << 24))
    what = ("--blob", str(blob), "--size", str(len(data)), "--")
    return convert_to(out, *limits, "tar", *flags, *what, *lowers)


def done(answer: Converted | Refused) -> Converted:
    assert isinstance(answer, Converted), answer
    return answer


def refused(answer: Converted | Refused) -> str:
    assert isinstance(answer, Refused), answer
    return answer.code


def plain_tar() -> bytes:
    tar = Tar().dirs("d").add("d/f", content=b"x" * 5000).add("d/e", content=b"y").link("l", "d/f")
    return tar.symlink("s", "d", xattrs={"user.no": b"1"}).data()


def test_a_tar(tmp_path: Path) -> None:
    converted = done(convert_tar(tmp_path / "out", plain_tar()))
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["data", "meta.erofs"]
    assert (converted.entries, converted.content_bytes, converted.dropped_xattrs) == (5, 5001, 1)
    assert converted.self_contained
    assert converted.meta.size_bytes == (tmp_path / "out/meta.erofs").stat().st_size
    assert [device.digest for device in converted.devices] == [converted.own_data]
    assert converted.devices[0].size_bytes == (tmp_path / "out/data").stat().st_size


def test_directories_a_tar_does_not_list(tmp_path: Path) -> None:
    assert done(convert_tar(tmp_path / "all", plain_tar())).implied == ["/"]
    some = Tar().dirs(".", "a/b").add("a/b/c/f").data()
    assert done(convert_tar(tmp_path / "some", some)).implied == ["/a", "/a/b/c"]
    many = Tar()
    for number in range(MAX_IMPLIED // 2):
        many.add(f"d{number}/e/f")
    assert len(done(convert_tar(tmp_path / "many", many.data())).implied) == MAX_IMPLIED + 1


def test_a_tar_without_content_has_no_data(tmp_path: Path) -> None:
    converted = done(convert_tar(tmp_path / "out", Tar().dirs("d").add("e").data()))
    assert (converted.devices, converted.own_data) == ([], "")
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["meta.erofs"]


@pytest.mark.parametrize("pack", [gzip.compress, bz2.compress, lzma.compress])
def test_compressed_tars_are_the_same_layer(tmp_path: Path, pack: Any) -> None:
    packed = done(convert_tar(tmp_path / "packed", pack(plain_tar())))
    assert packed == done(convert_tar(tmp_path / "plain", plain_tar()))
    cut = convert_tar(tmp_path / "cut", pack(plain_tar())[:-20])
    assert refused(cut) == "invalid_request"
    garbled = bytearray(pack(plain_tar()))
    garbled[len(garbled) // 2] ^= 0xFF
    assert refused(convert_tar(tmp_path / "garbled", bytes(garbled))) == "invalid_request"


def test_a_run_of_a_file(tmp_path: Path) -> None:
    data = plain_tar()
    (tmp_path / "blobs").write_bytes(b"before" + data + b"after")
    run = ("--blob", tmp_path / "blobs", "--offset", "6", "--size", str(len(data)))
    assert done(convert_to(tmp_path / "run", "tar", *run)) == done(
        convert_tar(tmp_path / "alone", data)
    )


def test_limits(tmp_path: Path) -> None:
    blob = tmp_path / "t.tar"
    blob.write_bytes(plain_tar())
    what = ("tar", "--blob", blob, "--size", str(blob.stat().st_size))
    for limit in (("--max-entries", "4"), ("--max-bytes", "5000")):
        assert refused(convert_to(tmp_path / limit[0], *limit, *what)) == "payload_too_large"


def test_too_little_memory_is_an_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def exhaust(*_: object) -> None:
        raise MemoryError

    monkeypatch.setattr(convert, "write_image", exhaust)
    assert refused(convert_tar(tmp_path / "out", plain_tar())) == "payload_too_large"


def test_a_layer_over_others(tmp_path: Path) -> None:
    bottom = done(convert_tar(tmp_path / "0", Tar().add("f", content=b"0").dirs("d").data()))
    done(convert_tar(tmp_path / "1", Tar().add(".wh.d").symlink("d", "e").data()))
    lowers = [tmp_path / name / "meta.erofs" for name in ("0", "1")]
    tar = Tar().link("g", "f").add("d/x", content=b"2").data()
    top = done(convert_tar(tmp_path / "2", tar, *lowers))
    assert not top.self_contained
    assert [d.digest for d in top.devices] == [top.own_data, bottom.own_data]
    tree = read_image(tmp_path / "2/meta.erofs")
    assert list(tree.root.children) == [b"e", b"f", b"g"]
    assert tree.root.children[b"f"] is tree.root.children[b"g"]


# -- directories and merges --------------------------------------------------------------------


def fill(directory: Path, names: list[str], content: bytes = b"1") -> Path:
    for name in names:
        (directory / name).parent.mkdir(parents=True, exist_ok=True)
        (directory / name).write_bytes(content + name.encode())
    for path in [*directory.rglob("*"), directory]:
        os.utime(path, (5, 5))
    return directory


def test_equal_directories_are_one_layer(tmp_path: Path) -> None:
    names = ["a/b", "a/c", "z", "big"] + [f"many/{number}" for number in range(50)]
    one = fill(tmp_path / "one", names)
    two = fill(tmp_path / "two", names[::-1])
    first = done(convert_to(tmp_path / "out1", "directory", one))
    assert first == done(convert_to(tmp_path / "out2", "directory", two))
    assert first.diff_id.startswith("sha256:")
    assert (first.entries, first.own_data) == (56, first.devices[0].digest)
    other = fill(tmp_path / "other", names, content=b"2")
    assert done(convert_to(tmp_path / "out3", "directory", other)).diff_id != first.diff_id


def test_limits_of_directories(tmp_path: Path) -> None:
    tree = fill(tmp_path / "tree", ["a", "b", "c"])
    for limit in (("--max-entries", "2"), ("--max-bytes", "5")):
        answer = convert_to(tmp_path / limit[0], *limit, "directory", tree)
        assert refused(answer) == "payload_too_large"
    enough = ("--max-entries", "3", "--max-bytes", "6")
    done(convert_to(tmp_path / "out", *enough, "directory", tree))


def test_a_merge_has_no_data_of_its_own(tmp_path: Path) -> None:
    bottom = done(convert_tar(tmp_path / "0", Tar().add("f", content=b"0").add("g").data()))
    top = done(convert_tar(tmp_path / "1", Tar().add("h", content=b"1").add(".wh.g").data()))
    images = [tmp_path / name / "meta.erofs" for name in ("0", "1")]
    merged = done(convert_to(tmp_path / "m", "merge", "--", *images))
    assert (merged.diff_id, merged.own_data, merged.entries) == ("", "", 2)
    assert {d.digest for d in merged.devices} == {bottom.own_data, top.own_data}
    assert [path.name for path in (tmp_path / "m").iterdir()] == ["meta.erofs"]
    kept = done(convert_to(tmp_path / "k", "merge", "--keep-whiteouts", "--", *images))
    assert kept.entries == 3
    assert read_image(tmp_path / "k/meta.erofs").root.children[b"g"].is_whiteout


# -- hostile tars ------------------------------------------------------------------------------

NAMES = st.lists(
    st.sampled_from(
        *[
            [
                "a",
                "b",
                "c",
                "..",
                ".",
                "",
                ".wh.a",
                ".wh.b",
                ".wh..wh..opq",
                ".wh.",
                "\udcff",
                "x" * 256,
            ]
        ]
    ),
    min_size=1,
    max_size=4,
).map("/".join)
TARGETS = st.one_of(
    NAMES, NAMES.map("/{}".format), st.sampled_from(["", "/etc/passwd", "../" * 20, "a/" * 2000])
)
KINDS = st.sampled_from(
    [
        *([tarfile.REGTYPE] * 3 + [tarfile.DIRTYPE] * 3 + [tarfile.SYMTYPE] * 3),
        *([tarfile.LNKTYPE] * 3 + [tarfile.CHRTYPE, tarfile.BLKTYPE, tarfile.FIFOTYPE]),
        *(tarfile.CONTTYPE, b"Z"),
    ]
)
XATTRS = st.dictionaries(
    st.sampled_from(["user.a", "user.", "trusted.overlay.opaque", "security.capability", "x"]),
    st.sampled_from([b"", b"y", b"\xff" * 70, b"v" * 70_000]),
    max_size=2,
)


@st.composite
def entries(draw: st.DrawFn) -> dict[str, Any]:
    kind = draw(KINDS)
    regular = kind in (tarfile.REGTYPE, tarfile.CONTTYPE)
    return {
        "name": draw(NAMES),
        "kind": kind,
        "linkname": draw(TARGETS),
        "mode": draw(st.sampled_from([0, 0o644, 0o7777])),
        "uid": draw(st.sampled_from([0, 1000, 1 << 20])),
        "devmajor": draw(st.integers(0, 5000)),
        "xattrs": draw(XATTRS) if draw(st.integers(0, 5)) == 0 else {},
        "content": draw(st.sampled_from([b"", b"1", b"x" * 5000, bytes(70_000)]))
        if regular
        else b"",
    }


TARS = st.tuples(
    st.sampled_from([tarfile.PAX_FORMAT, tarfile.GNU_FORMAT]), st.lists(entries(), max_size=12)
)


def make(form: int, fields: list[dict[str, Any]]) -> bytes:
    tar = Tar(form)
    for entry in fields:
        tar.add(**entry)
    return tar.data()


def check_tree(tree: Tree) -> None:
    """What must hold of any layer, whatever tar it came from."""
    seen: dict[Inode, bytes] = {}
    for path, inode in tree.walk():
        parts = path.split(b"/") if path else []
        assert all(0 < len(part) <= 255 and part not in (b".", b"..") for part in parts)
        assert len(parts) <= 257
        assert len(path) < 4096
        assert inode not in seen or not inode.is_dir
        seen[inode] = path
        if stat.S_ISREG(inode.mode):
            assert sum(e.blocks for e in inode.extents) == -(-inode.size // BLOCK)


def check_answer(place: Path, answer: Converted | Refused) -> None:
    out = place / "out"
    if isinstance(answer, Refused):
        assert answer.code in ("invalid_request", "payload_too_large"), answer
    else:
        check_tree(read_image(out / "meta.erofs"))
    assert {path.name for path in out.iterdir()} <= {"data", "meta.erofs"}
    assert {path.name for path in place.iterdir()} <= {"out", "out.tar", "low", "low.tar"}


QUICK = settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow], derandomize=True
)


@pytest.mark.adversarial
@QUICK
@given(TARS, TARS)
def test_any_tar_is_a_layer_or_refused(
    low: tuple[int, list[dict[str, Any]]], top: tuple[int, list[dict[str, Any]]]
) -> None:
    with tempfile.TemporaryDirectory() as name:
        place = Path(name)
        below = convert_tar(place / "low", make(*low))
        lowers = [place / "low/meta.erofs"] if isinstance(below, Converted) else []
        check_answer(place, convert_tar(place / "out", make(*top), *lowers))


MUTATIONS = st.lists(
    st.tuples(st.integers(0, 30), st.integers(0, 511), st.binary(min_size=1, max_size=12)),
    min_size=1,
    max_size=4,
)


@pytest.mark.adversarial
@QUICK
@given(TARS, MUTATIONS, st.booleans())
def test_any_damage_is_refused_or_harmless(
    tar: tuple[int, list[dict[str, Any]]],
    mutations: list[tuple[int, int, bytes]],
    need_end: bool,
) -> None:
    """Headers are changed and then given the right checksum."""
    data = bytearray(make(*tar))
    for number, at, value in mutations:
        start = number * 512 % len(data)
        block = bytearray(data[start : start + 512])
        block[at : at + len(value)] = value
        data[start : start + 512] = with_checksum(bytes(block[:512]))
    with tempfile.TemporaryDirectory() as name:
        flags = ("--need-end",) if need_end else ()
        answer = convert_tar(Path(name) / "out", bytes(data), flags=flags)
        check_answer(Path(name), answer)


@pytest.mark.adversarial
@QUICK
@given(st.binary(max_size=3000))
def test_any_bytes_are_refused(data: bytes) -> None:
    with tempfile.TemporaryDirectory() as name:
        assert refused(convert_tar(Path(name) / "out", data)) == "invalid_request"


def test_said_lines_are_json(capsys: pytest.CaptureFixture[str]) -> None:
    convert.say(Refused("invalid_request", "\u20ac"))
    assert io.StringIO(capsys.readouterr().out).readline().startswith('{"type":"refused"')
