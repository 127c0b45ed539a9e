"""Drift: what is installed is not what the package indexes would give."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator

import msgspec
from msgspec import Struct

from dsec.images.debian import parse_list, parse_sources
from dsec.images.lint.environment import Environment
from dsec.images.lint.indexes import PYTHON_VARIABLES, hosts_in, is_enabled, python_settings
from dsec.images.lint.rule import Family, Found, Rule
from dsec.images.overlaid import Entry

PIP_DIRECT = Rule(
    "pip-direct-url",
    "warning",
    "A Python package was installed from a repository, an archive's URL or a directory.",
    "It is not what the index has under its version, and cannot be installed again from there.",
    "Install the release, or note the commit in the task.",
)
PIP_EDITABLE = Rule(
    "pip-editable",
    "advice",
    "A Python package is installed in editable form.",
    "It changes with the directory it points to; right for the task's own project alone.",
    "Install other packages without `-e`.",
)
PIP_NO_RECORD = Rule(
    "pip-no-record",
    "warning",
    "A Python package has no RECORD of its files.",
    "pip can neither upgrade nor remove it, and fails when it should.",
    "Install it with pip, or with the distribution's packages.",
)
PIP_INDEX = Rule(
    "pip-index",
    "warning",
    "pip or uv is configured to use an index that the node does not name.",
    "What a run installs differs from what was tested, or does not come at all.",
    "Remove the setting, or have the node's own configuration name the host.",
)
APT_BROKEN = Rule(
    "apt-broken",
    "error",
    "A Debian package is not fully installed or configured.",
    "apt refuses further work until it is mended.",
    "`dpkg --configure -a; apt-get -f install` when the environment is built.",
)
APT_HELD = Rule(
    "apt-held",
    "advice",
    "A Debian package is held at its version.",
    "Installing what needs another version fails.",
    "`apt-mark unhold` it if that is not meant.",
)
APT_FOREIGN = Rule(
    "apt-foreign",
    "advice",
    "An installed Debian package is in none of the package lists of the environment.",
    "It came from a file or a source since removed, and cannot be installed again.",
    "Note where it comes from, or add the source.",
)
APT_SOURCE = Rule(
    "apt-source",
    "warning",
    "apt is configured with a source that the node does not name.",
    "What a run installs differs from what was tested, or does not come at all.",
    "Remove the source, or have the node's own configuration name the host.",
)
APT_OLD = Rule(
    "apt-lists-old",
    "advice",
    "apt's package lists are older than 30 days.",
    "Versions they name are gone from most mirrors: `apt-get install` fails.",
    "Remove /var/lib/apt/lists/* when the image is built; runs do `apt-get update` first.",
)

_OLD_S = 30 * 86400
_MAX_STATUS_BYTES = 32 << 20
_MAX_LISTS_BYTES = 512 << 20
_MAX_LINE = 4096
_PIP_FILES = re.compile(rb"/(pip\.conf|\.pip/pip\.conf|uv\.toml)$")
_NAME = re.compile(rb"^Package: (\S+)", re.MULTILINE)


class _DirInfo(Struct):
    editable: bool = False


class _VcsInfo(Struct):
    vcs: str = ""
    commit_id: str = ""


class _DirectUrl(Struct):
    """`direct_url.json`, of the Python packaging specifications."""

    url: str
    dir_info: _DirInfo | None = None
    vcs_info: _VcsInfo | None = None


def look(env: Environment) -> Iterator[Found]:
    """Judge Python's and Debian's packages, and where more would come from."""
    for entry in env.entries.values():
        if entry.path in env.packaged:
            continue
        if entry.name.endswith(b".dist-info") and entry.inode.is_dir:
            yield from _distribution(env, entry)
        elif entry.name.endswith(b".egg-link"):
            yield PIP_EDITABLE.at("it is a link to a directory", entry)
        elif _PIP_FILES.search(entry.path) and env.around.indexes.python:
            yield from _python_elsewhere(env, python_settings(env.text(entry.path) or ""), entry)
    yield from _variables(env)
    yield from _debian(env)


def _distribution(env: Environment, entry: Entry) -> Iterator[Found]:
    names = {child.name for child in env.children(entry)}
    if b"METADATA" in names and b"RECORD" not in names:
        yield PIP_NO_RECORD.at("it has no RECORD", entry)
    if b"direct_url.json" not in names:
        return
    text = env.text(entry.path + b"/direct_url.json", 65536) or ""
    try:
        direct = msgspec.json.decode(text, type=_DirectUrl)
    except msgspec.MsgspecError:
        yield PIP_DIRECT.at("its direct_url.json is damaged", entry)
        return
    yield _direct(direct, entry)


def _direct(direct: _DirectUrl, entry: Entry) -> Found:
    origin = _without_password(direct.url)
    if direct.dir_info is not None and direct.dir_info.editable:
        return PIP_EDITABLE.at(f"it is {origin}", entry)
    if direct.vcs_info is not None:
        origin += f" at {direct.vcs_info.commit_id[:12]}"
    return PIP_DIRECT.at(f"it came from {origin}", entry)


def _without_password(url: str) -> str:
    scheme, slashes, rest = url[:300].partition("://")
    host, slash, path = rest.partition("/")
    return scheme + slashes + host.rpartition("@")[2] + slash + path


def _variables(env: Environment) -> Iterator[Found]:
    for name in PYTHON_VARIABLES:
        yield from _python_elsewhere(env, env.config.env.get(name, ""), None)


def _python_elsewhere(env: Environment, text: str, entry: Entry | None) -> Iterator[Found]:
    for host in _foreign(text, env.around.indexes.python):
        yield PIP_INDEX.at(f"it names {host}", entry)


def _foreign(text: str, own: Collection[str]) -> list[str]:
    """Hosts of URLs that are not the node's; none if the node names no such hosts at all."""
    return sorted(hosts_in(text).difference(own)) if own else []


def _debian(env: Environment) -> Iterator[Found]:
    status = env.file(b"/var/lib/dpkg/status")
    if status is None:
        return
    installed = list(_installed(env.content(status, _MAX_STATUS_BYTES)))
    for name, state in installed:
        want, _, condition = state.partition(" ok ")
        if condition not in ("installed", "config-files", "not-installed", "triggers-pending"):
            yield APT_BROKEN.at(f"{name} is {condition or state}", status)
        if want == "hold":
            yield APT_HELD.at(f"{name} is held", status)
    yield from _lists(env, [name for name, state in installed if state.endswith(" installed")])
    yield from _sources(env)


def _installed(status: bytes) -> Iterator[tuple[str, str]]:
    """Packages with their `Status`, such as `install ok installed`."""
    for stanza in status.decode("utf-8", "replace").split("\n\n"):
        fields = dict(
            line.split(": ", 1)
            for line in stanza.splitlines()
            if line.startswith(("Package: ", "Status: "))
        )
        if "Package" in fields:
            yield fields["Package"], fields.get("Status", "unknown")


def _lists(env: Environment, installed: list[str]) -> Iterator[Found]:
    directory = env.find(b"/var/lib/apt/lists")
    lists = [e for e in env.children(directory) if b"_Packages" in e.name] if directory else []
    if not lists or directory is None:
        return
    newest_s = max(entry.inode.mtime_ns for entry in lists) / 1e9
    if env.around.now_s - newest_s > _OLD_S:
        yield APT_OLD.at(
            f"they are {(env.around.now_s - newest_s) / 86400:.0f} days old", directory
        )
    plain = all(entry.name.endswith(b"_Packages") for entry in lists)
    if plain and sum(entry.inode.size for entry in lists) < _MAX_LISTS_BYTES:
        known = {name for e in lists for name in _NAME.findall(env.content(e, e.inode.size))}
        for name in installed:
            if name.encode("utf-8", "replace") not in known:
                yield APT_FOREIGN.at(f"{name} is in no package list", directory)


def _sources(env: Environment) -> Iterator[Found]:
    directory = env.find(b"/etc/apt/sources.list.d")
    files = list(env.children(directory)) if directory is not None else []
    main = env.file(b"/etc/apt/sources.list")
    for entry in files + ([main] if main is not None else []):
        text = "\n".join(_short_lines(env.text(entry.path) or ""))
        parse = parse_sources if entry.name.endswith(b".sources") else parse_list
        urls = " ".join(stanza.get("uris", "") for stanza in parse(text) if is_enabled(stanza))
        for host in _foreign(urls, env.around.indexes.apt):
            yield APT_SOURCE.at(f"it names {host}", entry)


def _short_lines(text: str) -> Iterator[str]:
    """Lines as people write them; the parsers are made for those of the node's own files."""
    return (line for line in text.splitlines() if len(line) <= _MAX_LINE)


FAMILY = Family(
    "packages",
    (
        PIP_DIRECT,
        PIP_EDITABLE,
        PIP_NO_RECORD,
        PIP_INDEX,
        APT_BROKEN,
        APT_HELD,
        APT_FOREIGN,
        APT_SOURCE,
        APT_OLD,
    ),
    look,
)
