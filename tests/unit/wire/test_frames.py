"""Both encoders are held to the same bytes: these vectors, and frame.rs in its own tests."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dsec.wire.frames import MAX_PAYLOAD, Decoder, Frame, FrameError, Kind, encode

VECTORS: list[dict[str, Any]] = msgspec.json.decode(
    (Path(__file__).parents[3] / "spec/vectors/frames.json").read_bytes()
)
VALID = [v for v in VECTORS if v["valid"]]
BROKEN = [v for v in VECTORS if not v["valid"]]


@pytest.mark.parametrize("vector", VALID, ids=lambda v: v["name"])
def test_vector(vector: dict[str, Any]) -> None:
    frame = Frame(
        Kind(vector["kind"]), vector["stream"], bytes.fromhex(vector["payload"]), vector["channel"]
    )
    data = bytes.fromhex(vector["bytes"])
    assert encode(frame) == data
    assert list(Decoder().feed(data)) == [frame]


@pytest.mark.parametrize("vector", BROKEN, ids=lambda v: v["name"])
def test_broken_vector(vector: dict[str, Any]) -> None:
    with pytest.raises(FrameError):
        list(Decoder().feed(bytes.fromhex(vector["bytes"])))


def test_every_kind_has_a_vector() -> None:
    assert {v["kind"] for v in VALID} == set(Kind)


def test_too_large_a_payload_is_not_encoded() -> None:
    encode(Frame(Kind.DATA, 1, bytes(MAX_PAYLOAD)))
    with pytest.raises(FrameError):
        encode(Frame(Kind.DATA, 1, bytes(MAX_PAYLOAD + 1)))


FRAMES = st.builds(
    Frame,
    kind=st.sampled_from(Kind),
    stream=st.integers(0, 2**32 - 1),
    payload=st.binary(max_size=64),
    channel=st.integers(0, 2**16 - 1),
)


@given(st.lists(FRAMES, max_size=5), st.integers(1, 40))
def test_any_pieces_give_the_same_frames(frames: list[Frame], step: int) -> None:
    data = b"".join(map(encode, frames))
    decoder = Decoder()
    pieces = [data[i : i + step] for i in range(0, len(data), step)]
    assert [f for piece in pieces for f in decoder.feed(piece)] == frames
