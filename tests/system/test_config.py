"""Settings: unknown keys are refused, flags beat the file, the example is right."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import pytest

from dsec.base.errors import InvalidRequest
from dsec.kit.config import load_config, parse_config
from dsec.main.edge_parts import aether_binary
from dsec.main.parts import node_name
from dsec.main.settings import EdgeAddress, Settings, settle

EXAMPLE = Path(__file__).parents[2] / "deploy" / "dsec.toml"


@dataclass(frozen=True)
class Inner:
    size: int = 1


@dataclass(frozen=True)
class Outer:
    name: str = "x"
    inner: Inner = Inner()
    many: list[Inner] = field(default_factory=list)
    maybe: Inner | None = None


def test_a_file_becomes_dataclasses() -> None:
    text = 'name = "y"\n[inner]\nsize = 2\n[[many]]\nsize = 3\n[maybe]\nsize = 4\n'
    assert parse_config(text, Outer) == Outer("y", Inner(2), [Inner(3)], Inner(4))
    assert parse_config("", Outer) == Outer()


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("nam = 1", "unknown key nam; known: inner, many, maybe, name"),
        ("[inner]\nsiz = 2", "unknown key inner.siz"),
        ("[[many]]\nsize = 1\n[[many]]\nsiz = 1", "unknown key many.siz"),
        ("[maybe]\nsiz = 1", "unknown key maybe.siz"),
        ("name = 1", "$.name"),
        ("name =", "settings:"),
    ],
)
def test_what_is_wrong_is_named(text: str, says: str) -> None:
    with pytest.raises(InvalidRequest) as wrong:
        parse_config(text, Outer)
    assert says in wrong.value.message


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match="cannot read"):
        load_config(tmp_path / "none.toml", Outer)


def test_the_example_says_what_holds_without_it() -> None:
    assert load_config(EXAMPLE, Settings) == Settings()
    commented = [
        line.removeprefix("# ")
        for line in EXAMPLE.read_text().splitlines()
        if line.startswith(("# [[", "# unix_socket =", "# url =", "# token_file ="))
    ]
    edges = parse_config("\n".join(commented), Settings).edges
    assert edges == [
        EdgeAddress(unix_socket="/run/dsec/edge.sock"),
        EdgeAddress(url="http://10.0.0.7:7421", token_file="/etc/dsec/edge-7.token"),
    ]


def test_flags_beat_the_file(tmp_path: Path) -> None:
    file = tmp_path / "dsec.toml"
    file.write_text('port = 1\nhost = "::1"\nstate_dir = "/s"\n')
    settings = settle(file, {"port": 2, "host": None})
    assert (settings.port, settings.host, settings.state_dir) == (2, "::1", "/s")
    with pytest.raises(InvalidRequest, match="backend"):
        settle(None, {"backend": "docker"})


def test_paths_are_made_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    file = tmp_path / "dsec.toml"
    file.write_text('state_dir = "s"\n[[edges]]\nunix_socket = "e"\ntoken_file = "t"\n')
    settings = settle(file, {"run_dir": "r", "edge_token_file": "k"}, {"DSEC_AETHER": "a"})
    assert settings.state == tmp_path / "s"
    assert settings.run == tmp_path / "r"
    assert settings.edge_token_file == str(tmp_path / "k")
    assert settings.aether == str(tmp_path / "a")
    assert settings.edges == [
        EdgeAddress(unix_socket=str(tmp_path / "e"), token_file=str(tmp_path / "t"))
    ]


def test_a_node_keeps_its_name(tmp_path: Path) -> None:
    name = node_name(tmp_path)
    assert node_name(tmp_path) == name
    assert [file.name for file in tmp_path.iterdir()] == ["node"]
    (tmp_path / "node").unlink()
    (tmp_path / "node.part").write_text("")  # of a start that was cut off
    assert node_name(tmp_path) == node_name(tmp_path)


def test_a_helper_that_is_named_is_the_one(tmp_path: Path) -> None:
    settings = settle(None, {}, {"DSEC_AETHER": str(tmp_path / "nosuch")})
    with pytest.raises(InvalidRequest, match="nosuch"):
        aether_binary(settings)


def test_a_user_has_directories_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.geteuid", lambda: 1000)
    settings = settle(None, {}, {"HOME": "/home/ada", "XDG_RUNTIME_DIR": "/run/user/1000"})
    assert settings.state == Path("/home/ada/.local/state/dsec")
    assert settings.run == Path("/run/user/1000/dsec")
    monkeypatch.setattr("os.geteuid", lambda: 0)
    assert settle(None, {}, {}).state == Path("/var/lib/dsec")
