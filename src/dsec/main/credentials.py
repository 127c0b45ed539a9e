"""The first key: made once, kept over restarts, written where local clients look."""

from __future__ import annotations

import ipaddress
import os
import tomllib
from collections.abc import Mapping
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import msgspec

from dsec.base.ids import PrincipalId
from dsec.iam.directory import Directory
from dsec.iam.keys import digest_of, mint_key, well_formed
from dsec.iam.permissions import OWNER
from dsec.iam.principals import Grant, Principal
from dsec.iam.projects import ROOT, Project

ADMIN = PrincipalId("admin")
FILE = "credentials.toml"
PROBE_TIMEOUT_S = 1.0


def user_file(environ: Mapping[str, str]) -> Path:
    """Where local clients look."""
    base = environ.get("XDG_CONFIG_HOME") or Path(environ.get("HOME") or Path.home(), ".config")
    return Path(base, "dsec", FILE)


async def ensure_admin(directory: Directory, state_dir: Path, url: str) -> str:
    """Make the root project, its owner and the owner's key, unless they are there; the key.

    Args:
        directory: where they are kept; of the key only the digest.
        state_dir: holds the key itself, readable by its owner alone.
        url: where the server listens.
    """
    await directory.add_project(Project(ROOT, None, "root"))
    owner = Principal(ADMIN, "admin", "person", ROOT, (Grant(ROOT, OWNER),))
    await directory.add_principal(owner)
    key = _read(state_dir / FILE).get("api_key", "")
    facts = await directory.find_key(digest_of(key)) if well_formed(key) else None
    if facts is None or facts.revoked_at is not None:
        key = mint_key()
        await directory.add_key(digest_of(key), ADMIN, "made at first start")
    write(state_dir / FILE, url, key)
    return key


async def publish(environ: Mapping[str, str], url: str, key: str) -> Path | None:
    """Write address and key where local clients look.

    None if that file speaks of another host, or of another server that serves on this one.
    """
    path = user_file(environ)
    before = _read(path).get("api_url", "")
    if before and before != url and (not _is_local(before) or await _serves(before)):
        return None
    write(path, url, key)
    return path


def write(path: Path, url: str, key: str) -> None:
    """Write a credentials file, whole or not at all, readable by its owner alone."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        os.fchmod(file.fileno(), 0o600)
        for name, value in (("api_url", url), ("api_key", key)):
            # A JSON string is a TOML string.
            file.write(name.encode() + b" = " + msgspec.json.encode(value) + b"\n")
    temporary.replace(path)


def _read(path: Path) -> dict[str, str]:
    try:
        values = tomllib.loads(path.read_text())
    except (OSError, tomllib.TOMLDecodeError, UnicodeDecodeError):
        return {}
    return {name: value for name, value in values.items() if isinstance(value, str)}


async def _serves(url: str) -> bool:
    """Whether a DSec server answers there."""
    async with httpx.AsyncClient(trust_env=False, timeout=PROBE_TIMEOUT_S) as client:
        try:
            return (await client.get(f"{url}/healthz")).status_code == 200
        except (httpx.HTTPError, httpx.InvalidURL):
            return False


def _is_local(url: str) -> bool:
    host = urlsplit(url).hostname or ""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
