"""Ids: a sandbox's names its node; a caller's is checked."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dsec.base.errors import InvalidRequest, NotFound
from dsec.base.ids import (
    command_id,
    derive_sandbox_id,
    mint_command_id,
    mint_sandbox_id,
    node_id,
    node_of,
    sandbox_id,
)


def test_a_sandbox_id_encodes_its_node_and_is_a_dns_label() -> None:
    node = node_id("0a1z")
    minted = mint_sandbox_id(node)
    assert node_of(sandbox_id(minted)) == node
    assert re.fullmatch(r"[a-z0-9]{1,63}", minted)
    assert mint_sandbox_id(node) != minted


@given(st.text())
def test_any_text_is_an_id_or_a_clear_refusal(text: str) -> None:
    try:
        assert command_id(text) == text
    except InvalidRequest as refusal:
        assert "command id" in refusal.message
    try:
        assert sandbox_id(text) == text
    except NotFound as refusal:
        assert refusal.details["kind"] == "sandbox"


def test_minted_command_ids_are_acceptable() -> None:
    assert command_id(mint_command_id())


@pytest.mark.parametrize("bad", ["", "abc", "ABCD", "ab!d", "abcde"])
def test_bad_node_ids_are_refused(bad: str) -> None:
    with pytest.raises(InvalidRequest):
        node_id(bad)


def test_a_derived_id_is_one_and_always_the_same() -> None:
    node = node_id("n0de")
    one = derive_sandbox_id(node, "parent", "key", "0")
    assert sandbox_id(one) == one == derive_sandbox_id(node, "parent", "key", "0")
    assert node_of(one) == node
    others = [("parent", "key", "1"), ("parent", "key0", ""), ("parentkey", "0"), ("parent", "key")]
    assert len({one, *(derive_sandbox_id(node, *of) for of in others)}) == 5
