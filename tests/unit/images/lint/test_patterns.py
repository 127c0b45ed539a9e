from __future__ import annotations

import pytest

from dsec.images.lint.patterns import glob_matcher


@pytest.mark.parametrize(
    ("glob", "path"),
    [
        ("**", "/"),
        ("**", "/a/b"),
        ("/", "/"),
        ("/etc/*", "/etc/x"),
        ("etc/*", "/etc/x"),
        ("/etc/**", "/etc"),
        ("/etc/**", "/etc/a/b"),
        ("**/*.py", "/x.py"),
        ("**/*.py", "/a/b/x.py"),
        ("/a/**/z", "/a/z"),
        ("/a/**/b/**/z", "/a/1/b/2/3/z"),
        ("/a?c", "/abc"),
        ("/*a*b*", "/xxaxxabx"),
        ("/[x]", "/[x]"),
        ("/é", "/é"),
    ],
)
def test_matches(glob: str, path: str) -> None:
    assert glob_matcher(glob, "r")(path.encode())


@pytest.mark.parametrize(
    ("glob", "path"),
    [
        ("/etc/*", "/etc/a/b"),
        ("/etc/*", "/etc"),
        ("*.py", "/a/x.py"),
        ("/a?c", "/ac"),
        ("/a/**/z", "/a/zz"),
        ("/[x]", "/x"),
        ("/*a*b", "/xxbxxa"),
        ("/", "/a"),
    ],
)
def test_does_not_match(glob: str, path: str) -> None:
    assert not glob_matcher(glob, "r")(path.encode())


def test_globs_are_never_exponential() -> None:
    assert not glob_matcher("/" + "*a" * 400 + "b", "r")(b"/" + b"a" * 255)
    assert not glob_matcher("**/" * 300 + "x", "r")(b"/a" * 1000)
