"""Tars that are cut, damaged or lie, and those that are only odd."""

from __future__ import annotations

import hashlib
import io
import tarfile

import pytest

from dsec.base.errors import InvalidRequest
from dsec.images.oci.members import members
from dsec.images.oci.sparse import map_of
from dsec.images.oci.stream import TarStream
from tests.tars import Tar


def read(data: bytes, *, need_end: bool = True) -> dict[str, bytes | None]:
    """Names and contents, as far as the stream is whole."""
    with TarStream(io.BytesIO(data)) as stream:
        found: dict[str, bytes | None] = {}
        for member, content in members(stream, need_end=need_end):
            found[member.name] = content.read(1 << 20) if content is not None else None
        stream.drain()
        assert stream.digest == f"sha256:{hashlib.sha256(data).hexdigest()}"
    return found


def plain() -> bytes:
    return Tar().dirs("d").add("d/f", content=b"x" * 1000).add("e").add("g", content=b"g").data()


@pytest.mark.parametrize("form", [tarfile.PAX_FORMAT, tarfile.GNU_FORMAT, tarfile.USTAR_FORMAT])
def test_contents(form: int) -> None:
    tar = Tar(form).dirs("d").add("d/f", content=b"x" * 513).add("e").symlink("s", "t").data()
    assert read(tar) == {"d": None, "d/f": b"x" * 513, "e": b"", "s": None}


def test_contents_nobody_reads_are_passed_over() -> None:
    with TarStream(io.BytesIO(plain())) as stream:
        assert [m.name for m, _ in members(stream, need_end=True)] == ["d", "d/f", "e", "g"]


def test_names_of_bytes_and_length() -> None:
    names = ["caf\udce9", "n" * 255, "/".join(["l" * 100] * 20)]
    for form in (tarfile.PAX_FORMAT, tarfile.GNU_FORMAT):
        tar = Tar(form)
        for name in names:
            tar.add(name, content=b"1")
        assert list(read(tar.data())) == names


def test_trailing_bytes_belong_to_the_digest() -> None:
    assert len(read(plain() + b"anything")) == 4


@pytest.mark.parametrize("cut", [0, 1, 511, 512, 700, 1024, 2048])
@pytest.mark.parametrize("need_end", [True, False])
def test_cut_short(cut: int, need_end: bool) -> None:
    data = Tar(tarfile.USTAR_FORMAT).add("f", content=b"x" * 2000).data()[:cut]
    if cut == 0 or cut % 512 or need_end:
        with pytest.raises(InvalidRequest):
            read(data, need_end=need_end)


def test_an_end_mark_is_asked_for_only_if_needed() -> None:
    data = Tar(tarfile.USTAR_FORMAT).add("f", content=b"x" * 512).data()[:1024]
    assert read(data, need_end=False) == {"f": b"x" * 512}
    with pytest.raises(InvalidRequest, match="end mark"):
        read(data)


def test_damage_in_the_middle_is_no_end() -> None:
    data = bytearray(plain())
    data[data.index(b"d/f")] ^= 1
    with pytest.raises(InvalidRequest, match="damaged"):
        read(bytes(data), need_end=False)


def with_checksum(block: bytes) -> bytes:
    """A header whose checksum is right, whatever else is wrong."""
    total = 8 * 32 + sum(block[:148]) + sum(block[156:512])
    return block[:148] + b"%06o\0 " % total + block[156:]


def header(**fields: bytes) -> bytes:
    block = bytearray(tarfile.TarInfo("f").tobuf(tarfile.GNU_FORMAT))
    places = {"size": 124, "kind": 156, "sparse": 386, "extended": 482, "real": 483}
    for field, value in fields.items():
        block[places[field] : places[field] + len(value)] = value
    return with_checksum(bytes(block))


NEGATIVE = b"\xff" * 12
LIES = {
    "a negative size": header(size=NEGATIVE),
    "a header of exabytes": header(size=b"77777777777", kind=b"x"),
    "a long name of gigabytes": header(size=b"\x80" + bytes(3) + b"\xff" * 8, kind=b"L"),
    "a sparse map that is cut": header(kind=b"S", extended=b"\1"),
    "a pax header alone": header(size=b"00000000000", kind=b"x"),
    "a pax header after itself": header(size=b"00000000000", kind=b"x") * 3000,
    "a pax size that is negative": header(size=b"00000000022", kind=b"x")
    + b"18 size=-99999999\n".ljust(512, b"\0")
    + header(),
    "a sparse map without numbers": header(size=b"00000000026", kind=b"x")
    + b"22 GNU.sparse.major=1\n".ljust(512, b"\0")
    + header(),
}


@pytest.mark.adversarial
@pytest.mark.parametrize("lie", LIES)
def test_headers_that_lie(lie: str) -> None:
    with pytest.raises(InvalidRequest):
        read(LIES[lie])


def gnu_sparse(version: str) -> bytes:
    """A file of 8192 bytes that is `abc` at 4096."""
    name = b"GNUSparseFile.0/f"
    if version == "old":
        numbers = b"%011o\0%011o\0" % (4096, 3)
        return header(size=b"00000000003", kind=b"S", sparse=numbers, real=b"%011o\0" % 8192)
    records: dict[str, str] = {"GNU.sparse.size": "8192", "GNU.sparse.name": "f"}
    content = b"abc"
    if version == "0.1":
        records |= {"GNU.sparse.numblocks": "1", "GNU.sparse.map": "4096,3"}
    else:
        records |= {"GNU.sparse.major": "1", "GNU.sparse.minor": "0"}
        records["GNU.sparse.realsize"] = records.pop("GNU.sparse.size")
        content = b"1\n4096\n3\n".ljust(512, b"\0") + content
    info = tarfile.TarInfo(name.decode())
    info.size, info.pax_headers = len(content), records
    return info.tobuf(tarfile.PAX_FORMAT) + content


@pytest.mark.parametrize("version", ["old", "0.1", "1.0"])
def test_sparse_files_of_gnu_tar(version: str) -> None:
    data = gnu_sparse(version) + (b"abc" if version == "old" else b"")
    data += bytes(-len(data) % 512) + Tar(tarfile.USTAR_FORMAT).add("after", content=b"1").data()
    with TarStream(io.BytesIO(data)) as stream:
        found = [
            (member.name, member.size, map_of(member), content.read(99) if content else None)
            for member, content in members(stream, need_end=True)
        ]
    name, size, sparse, content = found[0]
    assert (name, size, content) == ("f", 8192, b"abc")
    assert [piece for piece in sparse if piece != (0, 0)] == [(4096, 3)]
    assert found[1] == ("after", 1, [], b"1")
