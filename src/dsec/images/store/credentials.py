"""Credentials for registries from the file that docker, podman and skopeo log in to."""

from __future__ import annotations

import base64
import binascii
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
from msgspec import Struct

from dsec.base.errors import InvalidRequest


@dataclass(frozen=True, slots=True)
class Credentials:
    """What to log in with; all empty = nothing is known."""

    user: str = ""
    password: str = field(default="", repr=False)
    identity_token: str = field(default="", repr=False)
    """Exchanged for access tokens instead of a password."""

    @property
    def basic(self) -> str:
        """The value of an Authorization header; empty without a user."""
        pair = f"{self.user}:{self.password}".encode()
        return f"Basic {base64.b64encode(pair).decode()}" if self.user else ""


class _Entry(Struct):
    auth: str = ""
    username: str = ""
    password: str = ""
    identitytoken: str = ""


class _File(Struct):
    auths: dict[str, _Entry] = {}


def find_credentials(
    host: str, repository: str, environ: Mapping[str, str] = os.environ
) -> Credentials:
    """The credentials for a repository, from the first file that has some. Blocks.

    Looked at: `$REGISTRY_AUTH_FILE`, `$XDG_RUNTIME_DIR/containers/auth.json`,
    `$DOCKER_CONFIG/config.json` or `~/.docker/config.json`. Helper programs are not asked.

    Args:
        host: with the port, if there is one in the URL.
        repository: an entry for it, or for what it lies below, goes before one for the host.
        environ: where the files are named.

    Raises:
        InvalidRequest: a file cannot be understood; the message names it and nothing in it.
    """
    for path in _files(environ):
        try:
            data = path.read_bytes()
        except OSError:
            continue
        if entry := _matching(_decoded(data, path), host, repository):
            return _credentials(entry, path)
    return Credentials()


def _files(environ: Mapping[str, str]) -> Iterator[Path]:
    if named := environ.get("REGISTRY_AUTH_FILE"):
        yield Path(named)
    if runtime := environ.get("XDG_RUNTIME_DIR"):
        yield Path(runtime) / "containers/auth.json"
    if docker := environ.get("DOCKER_CONFIG"):
        yield Path(docker) / "config.json"
    elif home := environ.get("HOME"):
        yield Path(home) / ".docker/config.json"


def _decoded(data: bytes, path: Path) -> _File:
    try:
        return msgspec.json.decode(data, type=_File)
    except msgspec.MsgspecError:
        raise InvalidRequest(f"{path} is not a file of registry credentials") from None


def _matching(file: _File, host: str, repository: str) -> _Entry | None:
    by_place = {_place(key): entry for key, entry in file.auths.items()}
    place = f"{host}/{repository}"
    while place:
        if place in by_place:
            return by_place[place]
        place = place.rpartition("/")[0]
    return None


def _place(key: str) -> str:
    """An entry's key without what older programs put around the host."""
    return key.partition("://")[2].partition("/")[0] if "://" in key else key.rstrip("/")


def _credentials(entry: _Entry, path: Path) -> Credentials:
    user, password = entry.username, entry.password
    if entry.auth:
        try:
            user, _, password = base64.b64decode(entry.auth).decode().partition(":")
        except (binascii.Error, UnicodeDecodeError):
            raise InvalidRequest(f"an entry in {path} is not base64 of user:password") from None
    return Credentials(user, password.rstrip("\0"), entry.identitytoken)
