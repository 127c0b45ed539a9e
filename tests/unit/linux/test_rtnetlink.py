from __future__ import annotations

import pytest

from dsec.linux import rtnetlink


def test_attributes_are_read_as_they_were_written() -> None:
    written = (
        rtnetlink.text(1, "eth0")
        + rtnetlink.number(2, 7)
        + rtnetlink.nested(3, rtnetlink.attribute(4, b"abc"))
    )
    read = rtnetlink.attributes(written)
    assert len(written) % 4 == 0
    assert (read[1], int.from_bytes(read[2], "little")) == (b"eth0\0", 7)
    assert rtnetlink.attributes(read[3]) == {4: b"abc"}


@pytest.mark.parametrize("data", [b"\x03\0\x01\0", b"\x09\0\x01\0abcd", b"\0\0\0\0"])
def test_an_attribute_cut_off_is_told_and_no_endless_loop(data: bytes) -> None:
    with pytest.raises(ValueError, match="cut off"):
        rtnetlink.attributes(data)
