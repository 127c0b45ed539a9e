"""What a node's tools say of where they get packages, from made-up settings of made-up hosts."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import anyio
import pytest

from dsec.base.errors import InvalidRequest
from dsec.edge.network.discovery import FINDERS, Host, ask_program, key_of
from dsec.edge.network.policy import Service, parse
from dsec.edge.network.services import Services, find_services, services_of

Answers = Mapping[str, str]
Make = Callable[..., Host]


@pytest.fixture
def host(tmp_path: Path) -> Make:
    """A machine with these files, variables and answers of tools."""

    def make(
        files: Mapping[str, str] | None = None,
        environ: Mapping[str, str] | None = None,
        answers: Answers | None = None,
    ) -> Host:
        for name, text in (files or {}).items():
            path = tmp_path / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)

        def ask(argv: Sequence[str], _environ: Mapping[str, str]) -> str:
            said = " ".join(argv)
            for beginning, answer in (answers or {}).items():
                if said.startswith(beginning):
                    return answer
            raise LookupError(f"{argv[0]} is not installed")

        environ = {"HOME": str(tmp_path / "root"), **(environ or {})}
        return Host(root=tmp_path, environ=environ, ask=ask)

    return make


def keys(name: str, host: Host) -> list[str]:
    return list(find_services({}, host)[name].keys)


@pytest.mark.parametrize(
    ("url", "key"),
    [
        ("https://a.test/simple", "tcp://a.test:443"),
        ("http://u:p@A.test:8080/x", "tcp://a.test:8080"),
        ("sparse+https://a.test/", "tcp://a.test:443"),
        ("http://[2001:db8::1]/", "tcp://[2001:db8::1]:80"),
        ("http://192.0.2.1:99999/", ""),
        ("http://mirror/", "tcp://mirror.:80"),
        ("file:///wheels", ""),
        ("/wheels", ""),
        ("", ""),
    ],
)
def test_addresses_of_the_web_are_keys(url: str, key: str) -> None:
    assert key_of(url) == key
    if key:
        parse({key: True}, {})


PIP_CONF = """
[global]
index-url = https://mirror.test/simple
extra-index-url =
    https://more.test/simple
    http://192.0.2.5:8080/simple
[install]
find-links = /wheels https://links.test/x
"""


def test_pip_by_its_files(host: Make) -> None:
    assert keys("pypi", host({"etc/pip.conf": PIP_CONF})) == [
        "tcp://mirror.test:443",
        "tcp://more.test:443",
        "tcp://192.0.2.5:8080",
        "tcp://links.test:443",
    ]


def test_pip_by_its_environment_and_its_user_before_the_machine(host: Make) -> None:
    files = {
        "etc/pip.conf": PIP_CONF,
        "root/.config/pip/pip.conf": "[global]\nindex_url = https://user.test/simple\n",
    }
    environ = {"PIP_EXTRA_INDEX_URL": "https://env.test/simple"}
    assert keys("pypi", host(files, environ)) == [
        "tcp://user.test:443",
        "tcp://env.test:443",
        "tcp://links.test:443",
    ]


def test_pip_without_settings_is_asked_for_its_own_and_where_that_sends_it(host: Make) -> None:
    answers = {
        "pip install --help": "-i <url>  Base URL of the index\n (default\n  https://own.test/simple).",
        "pip install --dry-run": '{"install": [{"download_info": {"url": "https://files.test/p"}}]}',
    }
    service = find_services({}, host(answers=answers))["pypi"]
    assert service.keys == ("tcp://own.test:443", "tcp://files.test:443")
    assert "default" in service.source


def test_npm(host: Make) -> None:
    files = {
        "root/.npmrc": "fund=false\nregistry=https://n.test/\n@our:registry = http://o.test:4/\n"
    }
    assert keys("npm", host(files)) == ["tcp://n.test:443", "tcp://o.test:4"]
    answers = {"npm view": "https://tarballs.test/npm-1.tgz\n"}
    environ = {"npm_config_registry": "https://e.test"}
    assert keys("npm", host({"root/.npmrc": ""}, environ, answers)) == [
        "tcp://e.test:443",
        "tcp://tarballs.test:443",
    ]
    asked = host({"root/.npmrc": ""}, answers={"npm config get registry": "https://own.test/\n"})
    assert keys("npm", asked) == ["tcp://own.test:443"]


def test_apt(host: Make) -> None:
    files = {
        "etc/apt/sources.list": "# deb http://no.test/ x\ndeb [arch=amd64] http://a.test/d x main\n"
        "deb-src http://src.test/d x main\ndeb cdrom:[x]/ y main\n",
        "etc/apt/sources.list.d/b.sources": "Types: deb deb-src\n# Old: x\nURIs: http://b.test/d\n"
        "  https://c.test/d\nSuites: x\n\nTypes: deb\nURIs: http://off.test/\nEnabled: no\n",
        "etc/apt/sources.list.d/d.sources.disabled": "Types: deb\nURIs: http://no.test/\n",
    }
    assert keys("debian", host(files)) == ["tcp://a.test:80", "tcp://b.test:80", "tcp://c.test:443"]


def test_cargo(host: Make) -> None:
    config = """
    [source.crates-io]
    replace-with = "ours"
    [source.ours]
    registry = "sparse+https://index.test/"
    [registries.other]
    index = "https://other.test:8443/git/index"
    """
    assert keys("crates", host({"root/.cargo/config.toml": config})) == [
        "tcp://index.test:443",
        "tcp://other.test:8443",
    ]
    used = {
        "root/.cargo/config.toml": "not = [toml",
        "root/.cargo/registry/index/used.test-0123/config.json": '{"dl": "https://dl.test/c"}',
        "root/.cargo/registry/index/broken.test-0123/config.json": "[]",
    }
    assert keys("crates", host(used)) == [
        "tcp://broken.test:443",
        "tcp://used.test:443",
        "tcp://dl.test:443",
    ]


def test_go(host: Make) -> None:
    answers = {"go env GOPROXY": "https://p.test,direct\n", "go env GOSUMDB": "sum.test\n"}
    assert keys("go", host(answers=answers)) == ["tcp://p.test:443", "tcp://sum.test:443"]
    files = {"root/.config/go/env": "GOPROXY=http://f.test:3000|direct\nGOSUMDB=off\n"}
    assert keys("go", host(files)) == ["tcp://f.test:3000"]
    environ = {"GOPROXY": "https://e.test", "GOSUMDB": "s.test+abc https://sums.test"}
    assert keys("go", host(environ=environ)) == ["tcp://e.test:443", "tcp://sums.test:443"]


def test_what_is_not_there_says_why(host: Make) -> None:
    found = find_services({}, host({"etc/apt/sources.list": ""}, {"GOPROXY": "off"}))
    assert {name: service.source for name, service in found.items()} == {
        "pypi": "pip is not installed",
        "npm": "npm is not installed",
        "debian": "apt has no sources on this node",
        "crates": "cargo has no registry in its settings, and has used none here yet",
        "go": "go uses no proxy here: GOPROXY is 'off', by GOPROXY",
    }
    assert not any(service.keys for service in found.values())
    capabilities = Services.of(found).capabilities()
    assert [entry.name for entry in capabilities] == [f"service:{name}" for name in sorted(FINDERS)]
    assert not any(entry.available for entry in capabilities)
    assert all("services_file" in entry.advice for entry in capabilities)


def test_a_program_that_is_not_there_or_fails_is_no_answer() -> None:
    for argv in (["/no/such/program"], ["false"]):
        with pytest.raises(LookupError):
            ask_program(argv, {"PATH": "/bin:/usr/bin"})
    assert ask_program(["echo", "said"], {"PATH": "/bin:/usr/bin"}) == "said\n"


# the operator's file


def test_the_operators_file_goes_before_what_is_found(tmp_path: Path, host: Make) -> None:
    file = tmp_path / "services.toml"
    file.write_text(
        '[services]\npypi = ["tcp://mine.test:443", "10.0.0.0/8"]\nwiki = ["*.wiki.test"]\nnpm = []\n'
    )
    answers = {"npm config get registry": "https://own.test/\n"}
    found = services_of(str(file), host({"etc/pip.conf": PIP_CONF}, answers=answers))()
    assert found["pypi"].keys == ("tcp://mine.test:443", "10.0.0.0/8")
    assert found["wiki"] == Service(name="wiki", keys=("*.wiki.test",), source=str(file))
    assert not found["npm"].keys
    assert "says there is none" in found["npm"].source
    parse({"pypi": True, "wiki": True, "npm": False}, found)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('[services]\n"a.b" = []', "'a.b' is no name for a service"),
        ('[services]\nx = ["10.0.0.1/8"]', "x: network rule '10.0.0.1/8': the network is 10"),
        ('[services]\nx = ["pypi"]', "'pypi' is a service itself"),
        ("[servces]", "unknown key servces"),
        ("[services]\nx = 1", "services"),
        ("[services", "services.toml"),
    ],
)
def test_a_wrong_file_is_told_at_the_start(tmp_path: Path, text: str, words: str) -> None:
    file = tmp_path / "services.toml"
    file.write_text(text)
    with pytest.raises(InvalidRequest) as caught:
        services_of(str(file))
    assert words in caught.value.message
    with pytest.raises(InvalidRequest, match="cannot read"):
        services_of(str(tmp_path / "none.toml"))


async def test_they_are_looked_for_once() -> None:
    looked = list[None]()

    def look() -> dict[str, Service]:
        looked.append(None)
        return {"x": Service(name="x", keys=("a.test",))}

    services = Services(look)
    assert [entry.name for entry in services.capabilities()] == ["services"]
    async with anyio.create_task_group() as group:
        group.start_soon(services.table)
        assert "x" in await services.table()
    assert len(looked) == 1
    assert [entry.name for entry in services.capabilities()] == ["service:x"]
