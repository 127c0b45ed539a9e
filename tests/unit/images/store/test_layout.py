from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dsec.base.errors import InvalidRequest, Unavailable
from dsec.images.store import layout

DIGEST = "sha256:" + "ab" * 32
NAMES = st.text(st.characters(codec="utf-8"), min_size=1, max_size=512).filter(
    lambda name: len(name.encode()) <= 512
)


@given(NAMES)
def test_every_name_has_a_key_that_file_systems_and_buckets_take(name: str) -> None:
    key = layout.document_key("image", name)
    head, _, last = key.rpartition("/")
    assert head == "documents/image"
    assert last.isascii()
    assert last.isprintable()
    assert 5 < len(last) <= 255
    assert layout.name_in_key(key) in (name, None)


@given(NAMES, NAMES)
def test_two_names_have_two_keys(one: str, other: str) -> None:
    assert (layout.document_key("image", one) == layout.document_key("image", other)) == (
        one == other
    )


@given(NAMES, st.binary(max_size=100))
def test_a_document_comes_out_as_it_went_in(name: str, body: bytes) -> None:
    stored = layout.wrap(name, body)
    assert layout.unwrap(stored, name) == body
    assert layout.header_of(stored[: layout.HEADER_BYTES]).name == name


@pytest.mark.parametrize("at", [0, 12, -1])
def test_a_flipped_bit_is_found(at: int) -> None:
    stored = bytearray(layout.wrap("name", b"body"))
    stored[at] ^= 1
    with pytest.raises(Unavailable):
        layout.unwrap(bytes(stored), "name")


def test_another_s_document_is_found() -> None:
    with pytest.raises(Unavailable):
        layout.unwrap(layout.wrap("one", b"body"), "other")


def test_blobs_keys() -> None:
    key = layout.blob_key(DIGEST)
    assert key == f"blobs/sha256/ab/{'ab' * 32}"
    assert layout.digest_at(key) == DIGEST
    for other in (f"blobs/sha256/aa/{'ab' * 32}", f"{key}x", key[:-1], "incoming/x"):
        assert layout.digest_at(other) is None


@pytest.mark.parametrize("digest", ["", "ab" * 32, "sha256:" + "AB" * 32, DIGEST + "\n"])
def test_what_is_no_digest(digest: str) -> None:
    with pytest.raises(InvalidRequest):
        layout.blob_key(digest)
