from __future__ import annotations

import bz2
import gzip
import io
import lzma
import os
from collections.abc import Callable

import pytest
from typing_extensions import override

from dsec.base.errors import InvalidRequest
from dsec.images.oci.compression import decompressed, sniff

DATA = os.urandom(300_000) + bytes(2_000_000) + b"end"
Pack = Callable[[bytes], bytes]
PACKERS = pytest.mark.parametrize("pack", [gzip.compress, bz2.compress, lzma.compress])


def unpack(packed: bytes, size: int = 70_000) -> bytes:
    parts: list[bytes] = []
    with decompressed(io.BytesIO(packed), sniff(packed)) as plain:
        while part := plain.read(size):
            assert len(part) <= size
            parts.append(part)
    return b"".join(parts)


@PACKERS
def test_round(pack: Pack) -> None:
    assert unpack(pack(DATA)) == DATA
    assert unpack(pack(b"")) == b""


@PACKERS
def test_parts_one_after_the_other(pack: Pack) -> None:
    assert unpack(pack(b"one") + pack(b"") + pack(DATA) + pack(b"two")) == b"one" + DATA + b"two"


def test_zeros_after_gzip_are_padding() -> None:
    assert unpack(gzip.compress(b"one") + bytes(600_000)) == b"one"
    assert unpack(gzip.compress(b"one") + bytes(99) + gzip.compress(b"two")) == b"onetwo"


@PACKERS
@pytest.mark.parametrize("left", [9, 5000, -1, -8, -12])
def test_cut_short(pack: Pack, left: int) -> None:
    with pytest.raises(InvalidRequest, match="cut short"):
        unpack(pack(DATA)[:left])


@PACKERS
def test_damage(pack: Pack) -> None:
    packed = bytearray(pack(DATA))
    packed[200_000] ^= 1
    with pytest.raises(InvalidRequest, match="damaged"):
        unpack(bytes(packed))


def test_what_follows_gzip_must_be_gzip() -> None:
    with pytest.raises(InvalidRequest, match="damaged"):
        unpack(gzip.compress(b"one") + b"rubbish")
    with pytest.raises(InvalidRequest, match="damaged"):
        unpack(gzip.compress(b"one")[:-8] + bytes(8))


def test_errors_of_the_disk_are_not_the_archives() -> None:
    class Broken(io.BytesIO):
        @override
        def read(self, _size: int | None = -1, /) -> bytes:
            raise OSError(5, "broken")

    with pytest.raises(OSError, match="broken"):
        with decompressed(Broken(), "gzip") as plain:
            plain.read(1)
