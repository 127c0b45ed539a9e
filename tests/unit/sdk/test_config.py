from __future__ import annotations

from pathlib import Path

import pytest

from dsec import DSecClient, InvalidRequest
from dsec.sdk._config import DEFAULT_URL, find_credentials
from dsec.sdk._http import encode_query, parse_address


def saved(home: Path, text: str) -> dict[str, str]:
    (home / "dsec").mkdir(exist_ok=True)
    (home / "dsec/credentials.toml").write_text(text)
    return {"XDG_CONFIG_HOME": str(home)}


def test_arguments_beat_the_environment_beats_the_file_beats_the_default(tmp_path: Path) -> None:
    env = saved(tmp_path, 'api_url = "http://file:1"\napi_key = "f"\n')
    found = find_credentials(None, None, env)
    assert (found.api_url, found.api_key) == ("http://file:1", "f")
    env |= {"DSEC_API_URL": "http://env:2", "DSEC_API_KEY": "e"}
    assert find_credentials(None, None, env).api_key == "e"
    assert find_credentials(None, "a", env).api_url == "http://env:2"
    found = find_credentials("http://arg:3", "a", env)
    assert (found.api_url, found.api_key) == ("http://arg:3", "a")
    assert find_credentials(None, None, {"HOME": str(tmp_path)}).api_url == DEFAULT_URL


def test_the_key_of_the_file_goes_only_to_the_address_of_the_file(tmp_path: Path) -> None:
    env = saved(tmp_path, 'api_url = "http://file:1"\napi_key = "f"\n')
    assert find_credentials("http://evil:2", None, env).api_key == ""
    assert find_credentials("http://file:1/", None, env).api_key == "f"
    assert "'f'" not in repr(find_credentials(None, None, env))


def test_a_broken_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match="credentials"):
        find_credentials(None, None, saved(tmp_path, "api_url ="))


def test_addresses() -> None:
    assert str(parse_address("http://h:80/x/")) == "http://h/x"
    assert parse_address("https://[::1]:7420").authority == "[::1]:7420"
    for wrong in ("h:1", "ftp://h", "http://", "http://h:port"):
        with pytest.raises(InvalidRequest):
            DSecClient(wrong)


def test_queries() -> None:
    pairs = {"a": None, "b": True, "c": 1, "d": ["x", "y z"], "e": b"\xff/", "f": 1.5}
    assert encode_query(pairs) == "b=true&c=1&d=x&d=y%20z&e=%FF/&f=1.5"
