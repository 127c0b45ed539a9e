"""Which directories of an environment need mending, and what mounted layers say about them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest

from dsec.images.compose import HiddenError, plan_mends
from dsec.images.mends import look
from dsec.images.records import DirectoryMark

Layer = Mapping[str, tuple[int, int, int] | None]
"""By path mode, uid and gid of what a layer has; None hides what is below."""


def mark(path: str, mode: int, uid: int = 0, gid: int = 0) -> DirectoryMark:
    return DirectoryMark(path=path, mode=mode, uid=uid, gid=gid)


def plan(*layers: tuple[list[str], Layer]) -> list[DirectoryMark]:
    """Plan for layers, topmost first: what each implies and what it has."""

    def asked(number: int, path: str) -> DirectoryMark | None:
        found = layers[number][1].get(path, ())
        if found is None:
            raise HiddenError
        return mark(path, *found) if found else None

    return plan_mends([implied for implied, _ in layers], asked)


IMAGE: tuple[list[str], Layer] = ([], {"/tmp": (0o1777, 0, 0), "/a": (0o755, 7, 8)})


def test_a_directory_left_to_those_below_is_as_there() -> None:
    toolkit: tuple[list[str], Layer] = (["/", "/a", "/tmp", "/new"], {})
    assert plan(toolkit, ([], {}), IMAGE) == [mark("/a", 0o755, 7, 8), mark("/tmp", 0o1777)]


def test_it_is_left_on_through_layers_that_leave_it_too() -> None:
    leaving: tuple[list[str], Layer] = (["/tmp"], {})
    assert plan(leaving, leaving, IMAGE) == [mark("/tmp", 0o1777)]


def test_the_nearest_layer_that_says_it_counts() -> None:
    saying: tuple[list[str], Layer] = ([], {"/tmp": (0o700, 5, 5)})
    assert plan((["/tmp"], {}), saying, IMAGE) == [mark("/tmp", 0o700, 5, 5)]
    plain: tuple[list[str], Layer] = ([], {"/tmp": (0o755, 0, 0)})
    assert plan((["/tmp"], {}), plain, IMAGE) == []


def test_the_topmost_layer_that_says_it_needs_no_mending() -> None:
    saying: tuple[list[str], Layer] = ([], {"/tmp": (0o700, 5, 5)})
    assert plan(saying, (["/tmp"], {}), IMAGE) == []


def test_what_is_hidden_is_not_what_a_directory_was() -> None:
    hiding: tuple[list[str], Layer] = ([], {"/tmp": None})
    assert plan((["/tmp"], {}), hiding, IMAGE) == []
    assert plan(hiding, (["/tmp"], {}), IMAGE) == []


def test_nothing_to_mend() -> None:
    assert plan((["/", "/tmp"], {})) == []
    assert plan(IMAGE) == []
    assert plan(IMAGE, (["/tmp"], {})) == []


@pytest.fixture
def layer(tmp_path: Path) -> Path:
    (tmp_path / "d/e").mkdir(parents=True)
    (tmp_path / "d/e").chmod(0o1751)
    (tmp_path / "file").touch()
    (tmp_path / "link").symlink_to("d")
    return tmp_path


def test_what_a_layer_has(layer: Path) -> None:
    here = layer.stat()
    assert look(layer, "/d/e") == mark("/d/e", 0o1751, here.st_uid, here.st_gid)
    assert look(layer, "/") == mark("/", here.st_mode & 0o7777, here.st_uid, here.st_gid)
    assert look(layer, "/d/none") is None
    assert look(layer, "/none/e") is None


@pytest.mark.parametrize("path", ["/file", "/file/x", "/link", "/link/e"])
def test_what_hides_and_is_not_followed(layer: Path, path: str) -> None:
    with pytest.raises(HiddenError):
        look(layer, path)
