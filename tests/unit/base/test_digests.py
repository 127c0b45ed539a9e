from __future__ import annotations

import pytest

from dsec.base.digests import check_digest, digest_of, hex_of
from dsec.base.errors import InvalidRequest

EMPTY = "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"


def test_a_digest_of_bytes_is_one() -> None:
    assert digest_of(b"") == check_digest(f"sha256:{EMPTY}")
    assert hex_of(digest_of(b"")) == EMPTY


@pytest.mark.parametrize(
    "text", ["", EMPTY, f"sha256:{EMPTY}\n", f"sha256:{EMPTY.upper()}", f"sha256:../{EMPTY}"]
)
def test_anything_else_is_refused(text: str) -> None:
    with pytest.raises(InvalidRequest, match="is not a digest"):
        check_digest(text)
    with pytest.raises(InvalidRequest, match="is not a digest"):
        hex_of(text)
