"""Where the API is and with which key: arguments, else the environment, else what `dsec up` wrote."""

from __future__ import annotations

import os
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from dsec.base.errors import InvalidRequest

DEFAULT_URL = "http://127.0.0.1:7420"


@dataclass(frozen=True, slots=True)
class Credentials:
    """An address and a key; the key never shows."""

    api_url: str
    api_key: str = field(repr=False)
    source: str = "the default"
    """Where the address came from, for messages."""


def credentials_path(environ: Mapping[str, str]) -> Path:
    """The file `dsec up` writes."""
    base = environ.get("XDG_CONFIG_HOME") or Path(environ.get("HOME") or Path.home(), ".config")
    return Path(base, "dsec", "credentials.toml")


def find_credentials(
    api_url: str | None, api_key: str | None, environ: Mapping[str, str] | None = None
) -> Credentials:
    """What is to be used, each of the two from the first place that has it.

    A key from the file is only ever sent to the address in the file.

    Raises:
        InvalidRequest: the file cannot be read.
    """
    env = os.environ if environ is None else environ
    url, source = api_url or env.get("DSEC_API_URL"), "DSEC_API_URL"
    key = api_key or env.get("DSEC_API_KEY")
    if api_url:
        source = "the api_url argument"
    if not (url and key):
        path = credentials_path(env)
        saved = _read(path)
        if not url and saved.get("api_url"):
            url, source = saved["api_url"], str(path)
        if not key and url and url.rstrip("/") == saved.get("api_url", DEFAULT_URL).rstrip("/"):
            key = saved.get("api_key")
    if not url:
        url, source = DEFAULT_URL, "the default"
    return Credentials(url, key or "", source)


def _read(path: Path) -> dict[str, str]:
    try:
        values = tomllib.loads(path.read_text("utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as exc:
        raise InvalidRequest(f"{path}: {exc}") from None
    return {key: value for key, value in values.items() if isinstance(value, str)}
