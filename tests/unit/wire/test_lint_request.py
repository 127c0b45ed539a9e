from __future__ import annotations

import msgspec
import pytest

from dsec.wire.public_v1 import LintRequest


def decoded(**fields: list[str]) -> LintRequest:
    return msgspec.json.decode(msgspec.json.encode({"image": "i", **fields}), type=LintRequest)


def test_much_is_taken() -> None:
    assert len(decoded(answers=["x" * 4096] * 5000).answers) == 5000


@pytest.mark.parametrize("field", ["answers", "disabled"])
def test_no_end_of_texts_and_no_endless_text_is_taken(field: str) -> None:
    with pytest.raises(msgspec.ValidationError, match=rf"length <= \d+ - at `\$.{field}`"):
        decoded(**{field: ["x"] * 5001})
    with pytest.raises(msgspec.ValidationError, match=rf"length <= \d+ - at `\$.{field}"):
        decoded(**{field: ["x" * 4097]})
