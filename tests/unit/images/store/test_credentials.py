from __future__ import annotations

import base64
import json
from pathlib import Path

import pytest

from dsec.base.errors import InvalidRequest
from dsec.images.store.credentials import Credentials, find_credentials


def auth(user: str, password: str) -> dict[str, str]:
    return {"auth": base64.b64encode(f"{user}:{password}".encode()).decode()}


def write(path: Path, auths: object) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"auths": auths, "credsStore": "desktop"}))
    return path


def test_the_nearest_entry_counts(tmp_path: Path) -> None:
    file = write(
        tmp_path / "auth.json",
        {
            "registry:5000": auth("host", "1"),
            "registry:5000/team": auth("team", "2"),
            "registry": auth("other", "3"),
        },
    )
    environ = {"REGISTRY_AUTH_FILE": str(file)}
    assert find_credentials("registry:5000", "team/envs", environ) == Credentials("team", "2")
    assert find_credentials("registry:5000", "teams/envs", environ) == Credentials("host", "1")
    assert find_credentials("elsewhere", "team/envs", environ) == Credentials()


def test_files_in_their_order(tmp_path: Path) -> None:
    docker = write(tmp_path / "docker/config.json", {"r": auth("docker", "a:b")})
    write(tmp_path / "home/.docker/config.json", {"r": auth("home", "x"), "h": auth("home", "x")})
    write(tmp_path / "run/containers/auth.json", {"p": auth("podman", "y")})
    environ = {
        "REGISTRY_AUTH_FILE": str(tmp_path / "missing"),
        "XDG_RUNTIME_DIR": str(tmp_path / "run"),
        "HOME": str(tmp_path / "home"),
    }
    assert find_credentials("p", "x", environ).user == "podman"
    assert find_credentials("r", "x", environ).user == "home"
    environ["DOCKER_CONFIG"] = str(docker.parent)
    assert find_credentials("r", "x", environ) == Credentials("docker", "a:b")
    assert find_credentials("h", "x", environ) == Credentials()


def test_other_spellings(tmp_path: Path) -> None:
    file = write(
        tmp_path / "auth.json",
        {
            "https://index.example/v1/": {"username": "u", "password": "p"},
            "token.example": {"identitytoken": "secret"},
        },
    )
    environ = {"REGISTRY_AUTH_FILE": str(file)}
    assert find_credentials("index.example", "a", environ) == Credentials("u", "p")
    assert find_credentials("token.example", "a", environ).identity_token == "secret"


@pytest.mark.parametrize(
    "text", ["", "[]", '{"auths": 3}', '{"auths": {"r": {"auth": "hunter2"}}}']
)
def test_a_damaged_file_is_named_and_not_quoted(tmp_path: Path, text: str) -> None:
    file = tmp_path / "auth.json"
    file.write_text(text)
    with pytest.raises(InvalidRequest, match=r"auth\.json") as caught:
        find_credentials("r", "a", {"REGISTRY_AUTH_FILE": str(file)})
    assert "hunter2" not in caught.value.message


def test_credentials_are_not_shown() -> None:
    shown = repr(Credentials("user", "hunter2", "hunter2"))
    assert "hunter2" not in shown
