from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dsec.base.errors import InvalidRequest
from dsec.images.names import (
    ImageName,
    Reference,
    file_name,
    given_name,
    image_name,
    is_snapshot,
    name_of_file,
    name_of_reference,
    parse_reference,
    snapshot_name,
)

DIGEST = "sha256:" + "ab" * 32


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("debian", Reference("", "debian", "", "")),
        ("debian:12", Reference("", "debian", "12", "")),
        ("team/tool", Reference("", "team/tool", "", "")),
        ("localhost/tool", Reference("localhost", "tool", "", "")),
        ("registry.test:5000/a/b:1.2-x", Reference("registry.test:5000", "a/b", "1.2-x", "")),
        ("127.0.0.1:41/a", Reference("127.0.0.1:41", "a", "", "")),
        ("[::1]:5000/a", Reference("[::1]:5000", "a", "", "")),
        ("UPPER/a", Reference("UPPER", "a", "", "")),
        (f"a/b@{DIGEST}", Reference("", "a/b", "", DIGEST)),
        (f"h.test/b:t@{DIGEST}", Reference("h.test", "b", "t", DIGEST)),
        ("a__b/c-d.e_f", Reference("", "a__b/c-d.e_f", "", "")),
    ],
)
def test_references(text: str, expected: Reference) -> None:
    assert parse_reference(text) == expected


@pytest.mark.parametrize(
    "text",
    ["", ":", "a:", "Debian", "a//b", "/a", "a/", "a b", "../a", "a/../b", "-a", "a:b:c", "a@sha256:12",
     "a\n", "a:t/b", "a" * 5 + ":" + "t" * 129, "--help", "a;b", "ä"],
)  # fmt: skip
def test_what_is_no_reference(text: str) -> None:
    with pytest.raises(InvalidRequest):
        parse_reference(text)


def test_the_tag_is_written_out() -> None:
    assert image_name("debian") == "debian:latest"
    assert image_name("r.test/debian:x") == "r.test/debian:x"


def test_a_name_has_no_digest_and_fits_a_file() -> None:
    with pytest.raises(InvalidRequest, match="digest"):
        image_name(f"a@{DIGEST}")
    with pytest.raises(InvalidRequest, match="too long"):
        image_name("/".join(["abcdefgh"] * 40))


def test_a_pulled_digest_becomes_a_tag() -> None:
    assert name_of_reference(f"a/b@{DIGEST}") == "a/b:sha256-abababababab"
    assert name_of_reference(f"a/b:t@{DIGEST}") == "a/b:t"
    assert name_of_reference("a/b") == "a/b:latest"


@given(
    st.from_regex(
        r"\A([a-z0-9]{1,8}\.test(:[0-9]{1,4})?/)?[a-z0-9]{1,9}(/[a-z]{1,5}){0,3}(:[\w.]{1,9})?\Z"
    )
)
def test_names_survive_being_files(text: str) -> None:
    try:
        name = image_name(text)
    except InvalidRequest:
        return
    file = file_name(name)
    assert "/" not in file
    assert not file.startswith(".")
    assert name_of_file(file) == name


def test_a_foreign_file_is_no_record() -> None:
    with pytest.raises(InvalidRequest):
        name_of_file("debian.json")  # its tag is missing
    assert file_name(ImageName("a/b:c")) == "a%2Fb%3Ac.json"


def test_snapshots_have_names_of_their_own() -> None:
    assert snapshot_name("root", "My.Snap-1_") == "snapshots/root/My.Snap-1_:latest"
    assert image_name("snapshots/a/b/C") == "snapshots/a/b/C:latest"
    assert image_name("snapshots/a/b:latest") == "snapshots/a/b:latest"
    assert name_of_file(file_name(image_name("snapshots/a/B"))) == "snapshots/a/B:latest"
    assert is_snapshot("snapshots/a/b")
    assert not is_snapshot("registry.test/snapshots/a/b")


@pytest.mark.parametrize(
    "text", ["snapshots/", "snapshots/a", "snapshots/a/../b", "snapshots/a/b:v1", "snapshots/a/b/"]
)
def test_what_is_no_snapshot_is_no_name(text: str) -> None:
    with pytest.raises(InvalidRequest):
        image_name(text)


def test_nobody_gives_an_image_the_name_of_a_snapshot() -> None:
    assert given_name("team/snapshots") == "team/snapshots:latest"
    for give in (given_name, name_of_reference):
        with pytest.raises(InvalidRequest, match="those of snapshots"):
            give("snapshots/a/b")
