"""A Debian image built by mmdebstrap over the node's own package sources.

No mirror is named anywhere: the node's apt files say where Debian comes from, and only their
entries for Debian itself are handed on (those whose suite is the release's or its updates or
security, component main), so that a vendor's repository on the node stays out of the image.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from dsec.base.errors import DsecError, InternalError, InvalidRequest, Unavailable, Unsupported
from dsec.images.disk import storage_full
from dsec.images.records import ImageConfig
from dsec.linux.process import CommandFailed, run_async

DEFAULT_PACKAGES = (
    "ca-certificates",
    "diffutils",
    "patch",
    "procps",
    "python3",
    "python3-venv",
)
"""What work on pure Python needs beside the minimal system; git is left to who wants it."""

CONFIG = ImageConfig(
    env={
        "PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
        "LANG": "C.UTF-8",
    },
    workdir="/",
    cmd=["bash"],
)

ADVICE = "install Debian's package mmdebstrap"
_TIMEOUT_S = 3600.0
_OPTIONS = re.compile(r"\[([^\]]*)\]")
_LINE = re.compile(r"I: (?P<text>.*)")


@dataclass(frozen=True, slots=True)
class Source:
    """Where one or more suites of Debian come from."""

    uris: tuple[str, ...]
    suites: tuple[str, ...]
    signed_by: str = ""
    """Keyrings, or a key itself over several lines."""
    trusted: bool = False
    """The node's administrator takes it without signatures."""

    def stanza(self) -> str:
        """In the deb822 form of sources.list(5)."""
        lines = ["Types: deb", f"URIs: {' '.join(self.uris)}", f"Suites: {' '.join(self.suites)}"]
        lines.append("Components: main")
        if self.signed_by:
            lines.append("Signed-By: " + self.signed_by.replace("\n", "\n "))
        if self.trusted:
            lines.append("Trusted: yes")
        return "\n".join(lines) + "\n"


def parse_sources(text: str) -> list[dict[str, str]]:
    """Read the stanzas of a `.sources` file, keys in lower case; folded lines are joined."""
    stanzas: list[dict[str, str]] = [{}]
    key = ""
    for line in text.splitlines():
        if line.startswith("#"):
            continue
        if not line.strip():
            stanzas.append({})
            key = ""
        elif line[0] in " \t" and key:
            stanzas[-1][key] += "\n" + line.strip()
        else:
            key, _, value = line.partition(":")
            key = key.strip().lower()
            stanzas[-1][key] = value.strip()
    return [stanza for stanza in stanzas if stanza]


def parse_list(text: str) -> list[dict[str, str]]:
    """Read the lines of a `.list` file as stanzas."""
    return [found for line in text.splitlines() if (found := _parse_list_line(line))]


def _parse_list_line(line: str) -> dict[str, str]:
    line = line.partition("#")[0].strip()
    options = _OPTIONS.search(line)
    words = _OPTIONS.sub(" ", line, count=1).split()
    if len(words) < 4:
        return {}
    stanza = {
        "types": words[0],
        "uris": words[1],
        "suites": words[2],
        "components": " ".join(words[3:]),
    }
    pairs = [pair.partition("=") for pair in (options[1].split() if options else [])]
    return stanza | {name.lower(): value.replace(",", " ") for name, _, value in pairs}


def debian_sources(stanzas: Iterable[Mapping[str, str]], codename: str, suite: str) -> list[Source]:
    """Those entries of a node that are Debian's, turned to the suite asked for.

    Args:
        stanzas: the node's entries.
        codename: the node's own release.
        suite: the release to build; the node's mirror is taken to have it too.
    """
    ours = {codename, f"{codename}-updates", f"{codename}-security"}
    found = []
    for stanza in stanzas:
        suites = tuple(name for name in stanza.get("suites", "").split() if name in ours)
        if suites and _usable(stanza):
            turned = tuple(suite + name.removeprefix(codename) for name in suites)
            trusted = stanza.get("trusted", "no").lower() == "yes"
            uris = tuple(stanza["uris"].split())
            found.append(Source(uris, turned, stanza.get("signed-by", ""), trusted))
    return found


def _usable(stanza: Mapping[str, str]) -> bool:
    return (
        "deb" in stanza.get("types", "").split()
        and "main" in stanza.get("components", "").split()
        and bool(stanza.get("uris"))
        and stanza.get("enabled", "yes").lower() not in ("no", "false", "0")
    )


def read_stanzas(apt: Path) -> list[dict[str, str]]:
    """All entries of a directory laid out like /etc/apt."""
    found = parse_list(_text(apt / "sources.list"))
    parts = apt / "sources.list.d"
    for file in sorted(parts.iterdir()) if parts.is_dir() else []:
        if file.suffix == ".sources":
            found += parse_sources(_text(file))
        elif file.suffix == ".list":
            found += parse_list(_text(file))
    return found


def _text(file: Path) -> str:
    return file.read_text("utf-8", "replace") if file.is_file() else ""


def parse_os_release(text: str) -> dict[str, str]:
    """os-release(5) as a mapping."""
    pairs = (line.partition("=")[::2] for line in text.splitlines() if "=" in line)
    return {name.strip(): value.strip().strip("\"'") for name, value in pairs}


@dataclass(frozen=True, slots=True)
class Plan:
    """What mmdebstrap is to build."""

    suite: str
    is_own_suite: bool
    """Whether it is the node's own release."""
    sources: tuple[Source, ...]
    packages: tuple[str, ...]

    def command(self, root: Path) -> list[str]:
        """The command that builds into the directory `root`; it reads the sources from stdin."""
        return [
            # In mounts of its own: what it mounts below the root goes with it however it ends.
            *("unshare", "--mount", "--propagation=private", "--"),
            *("mmdebstrap", "--mode=root", "--format=directory", "--variant=minbase"),
            # No fsync per file, here and in sandboxes: both are thrown away whole.
            "--dpkgopt=force-unsafe-io",
            f"--include={','.join(self.packages)}",
            *(self.suite, str(root), "-"),
        ]

    def stdin(self) -> bytes:
        """The sources."""
        return "\n".join(source.stanza() for source in self.sources).encode()


def plan(suite: str | None, packages: Iterable[str], etc: Path = Path("/etc")) -> Plan:
    """Plan a build over this node's sources. Reads files.

    Args:
        suite: a release's code name; the node's own if not given.
        packages: to install beside `DEFAULT_PACKAGES`.
        etc: where os-release and apt's files are.

    Raises:
        Unsupported: the node is not Debian, or its apt has no entry for Debian.
    """
    release = parse_os_release(_text(etc / "os-release"))
    codename = release.get("VERSION_CODENAME", "")
    if release.get("ID") != "debian" or not codename:
        raise Unsupported(
            f"this node runs {release.get('PRETTY_NAME', 'an unknown system')}, not Debian; "
            "import an archive instead"
        )
    sources = debian_sources(read_stanzas(etc / "apt"), codename, suite or codename)
    if not sources:
        raise Unsupported(
            f"apt on this node has no entry for {codename} main",
            advice=f"see sources.list(5) and {etc / 'apt/sources.list.d'}",
        )
    wanted = tuple(dict.fromkeys([*DEFAULT_PACKAGES, *packages]))
    return Plan(suite or codename, suite in (None, codename), tuple(sources), wanted)


async def build(planned: Plan, root: Path, on_step: Callable[[str], None]) -> None:
    """Build into a directory that does not exist yet; cancelling kills mmdebstrap.

    Args:
        planned: what to build.
        root: where; on failure what is there is rubbish.
        on_step: called with each step as mmdebstrap names it.

    Raises:
        Unsupported: mmdebstrap is missing.
        InvalidRequest: no such package or suite.
        Unavailable: the mirror cannot be reached.
        StorageFull: no room.
        InternalError: it failed otherwise; the message has the command.
    """

    def hear(line: str) -> None:
        if match := _LINE.fullmatch(line.strip()):
            on_step(match["text"])

    argv = planned.command(root)
    # Beside the root: what a killed mmdebstrap leaves there is swept with everything else.
    env = {**os.environ, "TMPDIR": str(root.parent)}
    try:
        await run_async(
            argv, stdin=planned.stdin(), timeout_s=_TIMEOUT_S, env=env, on_stderr_line=hear
        )
    except FileNotFoundError:
        raise Unsupported("mmdebstrap is not installed", advice=ADVICE) from None
    except CommandFailed as failure:
        raise explain(failure, root) from failure


_MISSING = re.compile(r"E: (Unable to locate package \S+|Package '?\S+'? has no installation.*)")
_NO_SUITE = re.compile(r"does not have a Release file|404 +Not Found")
_NO_MIRROR = re.compile(r"Could not resolve|Could not connect|Connection failed|Failed to fetch")


def explain(failure: CommandFailed, root: Path) -> DsecError:
    """What mmdebstrap's failure means for the caller."""
    said = failure.stderr
    if "No space left" in said or "enough free space" in said:
        return storage_full(root)
    if missing := _MISSING.search(said):
        return InvalidRequest(f"cannot build the image: {missing[1]}")
    if _NO_SUITE.search(said):
        return InvalidRequest(f"cannot build the image: the mirror lacks the suite: {said[-500:]}")
    if _NO_MIRROR.search(said):
        return Unavailable(f"cannot build the image: {said.strip()[-500:]}")
    return InternalError(str(failure))


def tidy(root: Path) -> None:
    """Take out what belongs to the node or to one machine, and what the image need not carry.

    Blocking. An empty machine-id makes each sandbox a machine of its own; the node's host name and
    name servers, which mmdebstrap copies in, are nobody else's business.
    """
    for emptied in ("machine-id", "resolv.conf"):
        file = root / "etc" / emptied
        file.unlink(missing_ok=True)
        file.write_bytes(b"")
        file.chmod(0o644)
    (root / "etc/hostname").write_text("localhost\n")
    (root / "etc/hosts").write_text("127.0.0.1 localhost\n::1 localhost ip6-localhost\n")
    for pattern in ("var/lib/apt/lists/*_*", "var/cache/apt/*.bin", "var/cache/apt/archives/*.deb"):
        for file in root.glob(pattern):
            file.unlink()
    for pattern in ("var/log/*.log", "var/log/apt/*", "var/cache/ldconfig/*"):
        for file in root.glob(pattern):
            file.unlink()
