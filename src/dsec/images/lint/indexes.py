"""Where packages should come from: the indexes that the node itself is configured to use.

No host is named in the code. A kind of index that the node's files do not name is not judged.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from urllib.parse import urlsplit

from msgspec import Struct

from dsec.images.debian import read_stanzas

PYTHON_VARIABLES = (
    "PIP_INDEX_URL",
    "PIP_EXTRA_INDEX_URL",
    "UV_INDEX_URL",
    "UV_DEFAULT_INDEX",
    "UV_INDEX",
    "UV_EXTRA_INDEX_URL",
)
"""Of the environment, that name Python indexes."""
_SETTING = re.compile(
    r"^[ \t]*(?:extra-index-url|index-url|find-links|url|default-index)[ \t]*="
    r"(.*(?:\n[ \t]+.*)*)",  # indented lines go on with the value
    re.MULTILINE,
)
_URL = re.compile(r"https?://[^\s\"'\],]+")
_MAX_FILE_BYTES = 1 << 20


class Indexes(Struct, frozen=True, kw_only=True):
    """Hosts that packages should come from, by kind; an empty kind is not judged."""

    apt: tuple[str, ...] = ()
    python: tuple[str, ...] = ()


def node_indexes(
    etc: Path = Path("/etc"), home: Path | None = None, variables: Mapping[str, str] = os.environ
) -> Indexes:
    """What this node's apt and pip are configured to use. Blocks; what cannot be read says nothing.

    Args:
        etc: where `apt` and pip's own file are.
        home: of the user whose settings count; this process's own if not given.
        variables: the environment's.
    """
    return Indexes(apt=_sorted(_apt_texts(etc)), python=_sorted(_pip_texts(etc, home, variables)))


def hosts_in(text: str) -> set[str]:
    """Hosts of the http(s) URLs in a text, in lower case."""
    return {host for url in _URL.findall(text) if (host := _host(url))}


def python_settings(text: str) -> str:
    """The values in a `pip.conf` or `uv.toml` that may be URLs of indexes."""
    return " ".join(_SETTING.findall(text))


def is_enabled(stanza: Mapping[str, str]) -> bool:
    """Whether apt uses an entry of its sources."""
    return stanza.get("enabled", "yes").lower() not in ("no", "false", "0")


def _apt_texts(etc: Path) -> Iterator[str]:
    try:
        stanzas = read_stanzas(etc / "apt")
    except OSError:
        return
    yield from (stanza.get("uris", "") for stanza in stanzas if is_enabled(stanza))


def _pip_texts(etc: Path, home: Path | None, variables: Mapping[str, str]) -> Iterator[str]:
    """Where pip looks: the node's file, the user's (old place and new), one named, variables."""
    user = home or Path.home()
    files = [etc / "pip.conf", user / ".pip/pip.conf", user / ".config/pip/pip.conf"]
    if named := variables.get("PIP_CONFIG_FILE"):
        files.append(Path(named))
    yield from (python_settings(_beginning(file)) for file in files)
    yield from (variables.get(name, "") for name in PYTHON_VARIABLES)


def _beginning(file: Path) -> str:
    try:
        with file.open("rb") as stream:
            return stream.read(_MAX_FILE_BYTES).decode("utf-8", "replace")
    except OSError:
        return ""


def _sorted(texts: Iterable[str]) -> tuple[str, ...]:
    return tuple(sorted(hosts_in(" ".join(texts))))


def _host(url: str) -> str:
    try:
        return urlsplit(url).hostname or ""
    except ValueError:
        return ""
