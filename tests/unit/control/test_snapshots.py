"""Snapshots of several nodes in one list."""

from __future__ import annotations

from dsec.control.snapshots import _merged
from dsec.wire.sandbox import SnapshotView


def view(digest: str, *, stored: bool = False, conflict: bool = False) -> SnapshotView:
    return SnapshotView(
        name="s",
        image="snapshots/p/s",
        digest=digest,
        parent="base",
        sandbox="sbx",
        stored=stored,
        conflict=conflict,
    )


def test_what_several_nodes_have_is_listed_once() -> None:
    assert _merged([view("a"), view("a", stored=True)]) == [view("a", stored=True)]


def test_two_that_were_given_one_name_are_both_listed() -> None:
    views = [view("b", conflict=True), view("a", stored=True), view("a", stored=True)]
    assert _merged(views) == [view("b", conflict=True), view("a", stored=True)]
