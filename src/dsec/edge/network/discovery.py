"""Where a node's own tools get their packages: read in their settings, or asked of them.

No address of a registry is known here. What a tool has no setting for is asked of the tool, and where
an index sends its clients for files is asked of it through the tool. All of it blocks.
"""

from __future__ import annotations

import configparser
import json
import os
import re
import sys
import tomllib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from dsec.linux import process

ASK_S = 5.0
"""For one question to a tool."""
_URL = re.compile(r"https?://[^\s\"'()]+")
_PORTS = {"http": 80, "https": 443}

Ask = Callable[[Sequence[str], Mapping[str, str]], str]


def ask_program(argv: Sequence[str], environ: Mapping[str, str]) -> str:
    """What a program says.

    Raises:
        LookupError: it is not there, or says nothing of use.
    """
    try:
        return process.run(argv, timeout_s=ASK_S, env=environ).stdout.decode("utf-8", "replace")
    except FileNotFoundError:
        raise LookupError(f"{argv[0]} is not installed") from None
    except (process.CommandFailed, OSError) as exc:
        raise LookupError(f"{argv[0]} could not be asked: {str(exc)[:200]}") from exc


@dataclass(frozen=True, kw_only=True)
class Host:
    """A machine whose tools are looked at."""

    root: Path = Path("/")
    environ: Mapping[str, str] = field(default_factory=lambda: dict(os.environ))
    ask: Ask = ask_program

    @property
    def home(self) -> Path:
        """Whose settings count beside the machine's."""
        return Path(self.environ.get("HOME") or self.root / "root")

    @property
    def config(self) -> Path:
        """Where that user's settings are."""
        return Path(self.environ.get("XDG_CONFIG_HOME") or self.home / ".config")

    def etc(self, name: str) -> Path:
        """A file of the machine's."""
        return self.root / "etc" / name

    def tool(self, *argv: str, **more: str) -> str:
        """What a tool says. Raises LookupError."""
        return self.ask(argv, {**self.environ, **more})


@dataclass
class Found:
    """Addresses a tool uses, and where that is said."""

    urls: list[str] = field(default_factory=list)
    sources: list[str] = field(default_factory=list)

    def add(self, urls: Iterable[str], source: object) -> None:
        """More of them, if there are any of use."""
        if more := [url for url in urls if key_of(url)]:
            self.urls += more
            self.sources.append(str(source))


def key_of(url: str) -> str:
    """The key of a rule for an address of the Web; "" for what is none."""
    with suppress(ValueError):
        parts = urlsplit(url.strip().rpartition("+")[2])
        port = parts.port or _PORTS.get(parts.scheme)
        if port and parts.hostname:
            host = f"[{parts.hostname}]" if ":" in parts.hostname else parts.hostname
            dotted = host if "." in host or ":" in host else f"{host}."
            return f"tcp://{dotted}:{port}"
    return ""


def _text(path: Path) -> str:
    with suppress(OSError, UnicodeDecodeError):
        return path.read_text()
    return ""


# pip


def pypi(host: Host) -> Found:
    """Where pip looks. Raises LookupError."""
    found, index = Found(), False
    for option in ("index-url", "extra-index-url", "find-links"):
        value, source = _pip_setting(host, option)
        found.add(value.split(), source)
        index |= option == "index-url" and bool(value)
    if not index:
        said = " ".join(host.tool("pip", "install", "--help").split())
        found.add(_URL.findall(said.partition("(default")[2])[:1], "pip's own default")
    with suppress(LookupError):  # as in a node without a way out: then these are all there is
        found.add(_pip_files(host), "where its index sends pip")
    return found


def _pip_setting(host: Host, option: str) -> tuple[str, str]:
    name = "PIP_" + option.upper().replace("-", "_")
    if value := host.environ.get(name, ""):
        return value, name
    for path in reversed(_pip_files_of_settings(host)):
        parser = configparser.RawConfigParser(strict=False)
        with suppress(configparser.Error):
            parser.read_string(_text(path))
        for section in ("install", "download", "global"):
            for spelled in (option, option.replace("-", "_")):
                if value := parser.get(section, spelled, fallback=""):
                    return value, str(path)
    return "", ""


def _pip_files_of_settings(host: Host) -> list[Path]:
    own = host.environ.get("PIP_CONFIG_FILE", "")
    return [
        host.etc("xdg/pip/pip.conf"),
        host.etc("pip.conf"),
        host.home / ".pip" / "pip.conf",
        host.config / "pip" / "pip.conf",
        host.root / Path(sys.prefix).relative_to("/") / "pip.conf",
        *([Path(own)] if own else []),
    ]


def _pip_files(host: Host) -> list[str]:
    """Where the files of a package are that every index has: pip itself."""
    argv = "pip install --dry-run --no-deps --ignore-installed --no-cache-dir --quiet --retries 0"
    said = host.tool(*argv.split(), "--timeout", "3", "--report", "-", "pip", PIP_FIND_LINKS="")
    return _URL.findall(said.partition('"download_info"')[2])[:1]


# npm


def npm(host: Host) -> Found:
    """Where npm looks. Raises LookupError."""
    found = Found()
    for name in ("npm_config_registry", "NPM_CONFIG_REGISTRY"):
        found.add([host.environ.get(name, "")], name)
    for path in (host.home / ".npmrc", host.etc("npmrc")):
        lines = (line.partition("=") for line in _text(path).splitlines())
        keys = ((key.strip(), value.strip().strip('"')) for key, _, value in lines)
        found.add([value for key, value in keys if re.fullmatch(r"(@[^:]+:)?registry", key)], path)
    if not found.urls:
        found.add(
            [host.tool("npm", "config", "get", "registry", "--logs-max=0")], "npm's own default"
        )
    with suppress(LookupError):
        argv = "npm view npm dist.tarball --fetch-retries=0 --fetch-timeout=3000 --logs-max=0"
        found.add(_URL.findall(host.tool(*argv.split()))[:1], "where its registry sends npm")
    return found


# apt


def debian(host: Host) -> Found:
    """Where apt looks. Raises LookupError."""
    found, more = Found(), host.etc("apt/sources.list.d")
    for path in (host.etc("apt/sources.list"), *sorted(more.glob("*.list"))):
        lines = [re.sub(r"#.*|\[[^\]]*\]", "", line).split() for line in _text(path).splitlines()]
        found.add([words[1] for words in lines if words[:1] == ["deb"] and words[1:]], path)
    for path in sorted(more.glob("*.sources")):
        found.add(_deb822(_text(path)), path)
    if not found.urls:
        raise LookupError("apt has no sources on this node")
    return found


def _deb822(text: str) -> Iterator[str]:
    for stanza in re.split(r"\n\s*\n", text):
        lines = [line for line in stanza.splitlines() if not line.startswith("#")]
        unfolded = re.sub(r"\n[ \t]+", " ", "\n".join(lines))
        parts = (line.partition(":") for line in unfolded.splitlines())
        fields = {name.strip().lower(): value.split() for name, _, value in parts}
        if fields.get("enabled") != ["no"] and "deb" in fields.get("types", []):
            yield from fields.get("uris", [])


# cargo


def crates(host: Host) -> Found:
    """Where cargo looks. Raises LookupError."""
    found, home = Found(), Path(host.environ.get("CARGO_HOME") or host.home / ".cargo")
    for path in (home / "config.toml", home / "config"):
        found.add(_cargo_settings(_text(path)), path)
    for name, value in host.environ.items():
        if re.fullmatch(r"CARGO_REGISTRIES_\w+_INDEX", name):
            found.add([value], name)
    # It cannot be asked, but it remembers what it has used, and where files were.
    for path in sorted((home / "registry" / "index").glob("*/config.json")):
        index = path.parent.name.rpartition("-")[0]
        found.add([f"https://{index}", *_texts_in(_text(path), "dl")], path)
    if not found.urls:
        raise LookupError("cargo has no registry in its settings, and has used none here yet")
    return found


def _cargo_settings(text: str) -> list[str]:
    try:
        said = tomllib.loads(text)
    except tomllib.TOMLDecodeError:
        return []
    tables = [_table(said, name) for name in ("source", "registries")]
    values = [value for table in tables for value in table.values() if isinstance(value, dict)]
    urls = [value.get(name) for value in values for name in ("registry", "index")]
    return [url for url in urls if isinstance(url, str)]


def _table(values: Mapping[str, Any], name: str) -> dict[str, Any]:
    table = values.get(name)
    return table if isinstance(table, dict) else {}


def _texts_in(text: str, name: str) -> list[str]:
    with suppress(ValueError):
        values = json.loads(text)
        if isinstance(values, dict) and isinstance(values.get(name), str):
            return [values[name]]
    return []


# go


def go(host: Host) -> Found:
    """Where go looks. Raises LookupError."""
    found = Found()
    proxy, source = _go_setting(host, "GOPROXY")
    found.add((url for url in re.split("[,|]", proxy)), source)
    if not found.urls:
        raise LookupError(f"go uses no proxy here: GOPROXY is {proxy!r}, by {source}")
    sums, source = _go_setting(host, "GOSUMDB")
    found.add(_sum_servers(sums), source)
    return found


def _sum_servers(text: str) -> list[str]:
    """Of `name`, `name+key` or either with an address behind it."""
    words = text.split()
    if not words or words[0] == "off":
        return []
    name = words[0].partition("+")[0]
    return words[1:2] if len(words) > 1 else [f"https://{name}"]


def _go_setting(host: Host, name: str) -> tuple[str, str]:
    if value := host.environ.get(name, ""):
        return value, name
    path = Path(host.environ.get("GOENV") or host.config / "go" / "env")
    if match := re.search(rf"^{name}=(.*)$", _text(path), re.MULTILINE):
        return match[1].strip(), str(path)
    return host.tool("go", "env", name).strip(), "go's own default"


FINDERS: dict[str, Callable[[Host], Found]] = {
    "pypi": pypi,
    "npm": npm,
    "debian": debian,
    "crates": crates,
    "go": go,
}
