from __future__ import annotations

from pathlib import Path

import pytest

from dsec.base.errors import InternalError, InvalidRequest, StorageFull, Unavailable, Unsupported
from dsec.images import debian
from dsec.linux.process import CommandFailed

DEB822 = """\
# the main archive
Types: deb
URIs: http://mirror.test/debian
Suites: bookworm bookworm-updates bookworm-backports
Components: main contrib
Signed-By: /usr/share/keyrings/debian.gpg

Types: deb deb-src
URIs: http://mirror.test/debian-security
Suites: bookworm-security
Components: main
Signed-By:
 -----BEGIN PGP PUBLIC KEY BLOCK-----
 .
 abc
"""
VENDOR = """\
Types: deb
URIs: https://vendor.test/node
Suites: nodistro
Components: main
"""
OFF = "Enabled: no\n" + DEB822.partition("\n\n")[0] + "\n"
LIST = """\
# deb http://off.test/debian bookworm main
deb [arch=amd64 signed-by=/k.gpg] http://list.test/debian bookworm main non-free # comment
deb http://vendor.test/docker bookworm stable
deb-src http://list.test/debian bookworm main
"""


@pytest.fixture
def etc(tmp_path: Path) -> Path:
    (tmp_path / "apt/sources.list.d").mkdir(parents=True)
    (tmp_path / "os-release").write_text('ID=debian\nVERSION_CODENAME="bookworm"\n')
    (tmp_path / "apt/sources.list.d/debian.sources").write_text(DEB822)
    (tmp_path / "apt/sources.list.d/vendor.sources").write_text(VENDOR)
    (tmp_path / "apt/sources.list.d/off.sources.disabled").write_text(DEB822)
    return tmp_path


def test_only_debians_own_entries_are_taken(etc: Path) -> None:
    planned = debian.plan(None, [], etc)
    text = planned.stdin().decode()
    assert planned.suite == "bookworm"
    assert planned.is_own_suite
    assert "Suites: bookworm bookworm-updates\nComponents: main\n" in text
    assert "Signed-By: /usr/share/keyrings/debian.gpg" in text
    assert "Suites: bookworm-security" in text
    assert "vendor" not in text
    assert "backports" not in text


def test_a_key_within_the_entry_is_kept(etc: Path) -> None:
    text = debian.plan(None, [], etc).stdin().decode()
    assert "Signed-By: \n -----BEGIN PGP PUBLIC KEY BLOCK-----\n .\n abc\n" in text


def test_lines_of_a_list(etc: Path) -> None:
    (etc / "apt/sources.list.d/debian.sources").write_text(OFF)
    (etc / "apt/sources.list").write_text(LIST)
    (source,) = debian.plan(None, [], etc).sources
    assert source == debian.Source(("http://list.test/debian",), ("bookworm",), "/k.gpg")


def test_a_mirror_trusted_without_signatures(etc: Path) -> None:
    (etc / "apt/sources.list.d/debian.sources").unlink()
    (etc / "apt/sources.list").write_text("deb [trusted=yes] file:/mirror bookworm main\n")
    assert "Trusted: yes\n" in debian.plan(None, [], etc).stdin().decode()


def test_another_suite_from_the_same_mirror(etc: Path) -> None:
    planned = debian.plan("trixie", ["git", "python3"], etc)
    assert not planned.is_own_suite
    assert "Suites: trixie trixie-updates\n" in planned.stdin().decode()
    assert planned.packages == (*debian.DEFAULT_PACKAGES, "git")
    assert planned.command(Path("/r"))[-3:] == ["trixie", "/r", "-"]


def test_a_node_that_is_not_debian(etc: Path) -> None:
    (etc / "os-release").write_text('ID=fedora\nPRETTY_NAME="Fedora 42"\n')
    with pytest.raises(Unsupported, match="Fedora 42"):
        debian.plan(None, [], etc)


def test_a_node_without_sources(etc: Path) -> None:
    (etc / "apt/sources.list.d/debian.sources").unlink()
    with pytest.raises(Unsupported, match="bookworm main"):
        debian.plan(None, [], etc)


@pytest.mark.parametrize(
    ("said", "error"),
    [
        ("E: Unable to locate package nonesuch\nE: apt-get failed", InvalidRequest),
        ("E: The repository 'x' does not have a Release file.", InvalidRequest),
        ("W: Could not resolve 'mirror.test'", Unavailable),
        ("cannot write: No space left on device", StorageFull),
        ("E: something else", InternalError),
    ],
)
def test_what_failures_mean(said: str, error: type[Exception]) -> None:
    failure = CommandFailed(["mmdebstrap", "x y"], 1, said)
    assert type(debian.explain(failure, Path("/r"))) is error


def test_nothing_of_the_node_stays(tmp_path: Path) -> None:
    for directory in ("etc", "var/lib/apt/lists", "var/log/apt", "var/cache/apt/archives"):
        (tmp_path / directory).mkdir(parents=True)
    (tmp_path / "etc/hostname").write_text("node-17\n")
    (tmp_path / "etc/resolv.conf").write_text("nameserver 192.0.2.1\n")
    (tmp_path / "var/lib/apt/lists/mirror_dists_InRelease").write_text("x")
    (tmp_path / "var/log/apt/history.log").write_text("x")
    debian.tidy(tmp_path)
    assert (tmp_path / "etc/machine-id").read_bytes() == b""
    assert (tmp_path / "etc/resolv.conf").read_bytes() == b""
    assert (tmp_path / "etc/hostname").read_text() == "localhost\n"
    assert list((tmp_path / "var/lib/apt/lists").iterdir()) == []
    assert list((tmp_path / "var/log/apt").iterdir()) == []
