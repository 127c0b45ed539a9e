"""What the node's own configuration says about where packages come from."""

from __future__ import annotations

from pathlib import Path

import pytest

from dsec.images.lint.environment import Surroundings
from dsec.images.lint.indexes import Indexes, node_indexes
from tests.unit.images.lint.build import Sketch, debian, environment, found

LIST = """\
# deb http://commented.test/debian stable main
deb [signed-by=/k.gpg] http://Apt.test:8080/debian stable main
deb cdrom:[Debian]/ stable main
"""
SOURCES = """\
Types: deb
URIs: https://second.test/debian https://user:pw@third.test/debian
Suites: stable
Components: main

Types: deb
URIs: https://disabled.test/debian
Suites: stable
Components: main
Enabled: no
"""
PIP = """\
[global]
index-url = https://pip.test/simple
extra-index-url =
    https://continued.test/simple
trusted-host = trusted.test
"""


@pytest.fixture
def etc(tmp_path: Path) -> Path:
    (tmp_path / "etc/apt/sources.list.d").mkdir(parents=True)
    return tmp_path / "etc"


def indexes(etc: Path, **variables: str) -> Indexes:
    return node_indexes(etc, etc.parent / "home", variables)


def test_a_node_that_says_nothing_judges_nothing(etc: Path) -> None:
    assert indexes(etc) == Indexes()
    assert node_indexes(etc / "nonesuch", etc, {}) == Indexes()


def test_apt_names_hosts(etc: Path) -> None:
    (etc / "apt/sources.list").write_text(LIST)
    (etc / "apt/sources.list.d/more.sources").write_text(SOURCES)
    assert indexes(etc) == Indexes(apt=("apt.test", "second.test", "third.test"))


def test_pip_is_asked_wherever_it_looks(etc: Path) -> None:
    named = etc / "named.conf"
    places = [etc / "pip.conf", etc.parent / "home/.pip/pip.conf"]
    places += [etc.parent / "home/.config/pip/pip.conf", named]
    for number, place in enumerate(places):
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_text(f"[global]\nindex-url = https://pip{number}.test/simple\n")
    given = indexes(etc, PIP_CONFIG_FILE=str(named), UV_INDEX="https://uv.test/simple")
    assert given.python == ("pip0.test", "pip1.test", "pip2.test", "pip3.test", "uv.test")
    assert given.apt == ()


def test_every_line_of_a_setting_counts(etc: Path) -> None:
    (etc / "pip.conf").write_text(PIP)
    assert indexes(etc).python == ("continued.test", "pip.test")


def test_what_cannot_be_read_says_nothing(etc: Path) -> None:
    (etc / "pip.conf").mkdir()
    (etc / "apt/sources.list").write_bytes(b"\xff\xfe deb http://[ x main\n")
    assert indexes(etc) == Indexes()


def drifted() -> Sketch:
    image = debian()
    image.file("/etc/apt/sources.list", b"deb https://vendor.test/apt stable main\n")
    image.file("/etc/pip.conf", b"[global]\nindex-url = https://python.test/simple\n")
    return image


def drift(indexes: Indexes) -> set[tuple[str, str]]:
    around = Surroundings(indexes=indexes)
    return {
        found for found in found_in(drifted(), around) if found[0] in ("apt-source", "pip-index")
    }


def found_in(image: Sketch, around: Surroundings) -> list[tuple[str, str]]:
    return found(environment(image, around=around))


def test_each_kind_is_judged_by_its_own_hosts() -> None:
    apt, pip = ("apt-source", "/etc/apt/sources.list"), ("pip-index", "/etc/pip.conf")
    assert drift(Indexes()) == set()
    assert drift(Indexes(apt=("python.test",))) == {apt}
    assert drift(Indexes(python=("vendor.test",))) == {pip}
    assert drift(Indexes(apt=("vendor.test",), python=("python.test",))) == set()


def test_a_disabled_source_is_none() -> None:
    image = debian()
    text = b"Types: deb\nURIs: https://off.test/a\nEnabled: No\n"
    image.file("/etc/apt/sources.list.d/off.sources", text)
    assert found_in(image, Surroundings(indexes=Indexes(apt=("mirror",)))) == []
