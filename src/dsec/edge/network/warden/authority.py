"""Which host and resource an HTTP request is for, strictly. Pure."""

from __future__ import annotations

import re
from http import HTTPStatus

import h11
from msgspec import Struct

from dsec.edge.network.warden.http_relay import Refusal
from dsec.edge.network.warden.reach import Address, as_address

HTTP_PORT, HTTPS_PORT = 80, 443
_AUTHORITY = re.compile(rb"(\[[0-9a-f:.]{2,45}\]|[a-z0-9_.-]{1,254})(?::([0-9]{1,5}))?")
_NAME = re.compile(r"[a-z0-9_-]{1,63}(\.[a-z0-9_-]{1,63})*")
_ABSOLUTE = b"http://"
_TOP_PORT = 65535


class Place(Struct, frozen=True):
    """A host and a port."""

    host: str
    """A name in lower case without a final dot, or an address."""
    port: int | None
    """None: it says none."""

    @property
    def address(self) -> Address | None:
        """If it is one."""
        return as_address(self.host)


def parse_authority(text: bytes) -> Place:
    """`host`, `host:port` or `[IPv6]:port`. Raises Refusal."""
    found = _AUTHORITY.fullmatch(text.lower())
    if found is None:
        raise _wrong("no host")
    host, port = found[1].decode().strip("[]").removesuffix("."), found[2]
    address = as_address(host)
    if address is None and (found[1][:1] == b"[" or not _NAME.fullmatch(host) or _is_number(host)):
        raise _wrong("no host")
    if port is not None and not 0 < int(port) <= _TOP_PORT:
        raise _wrong("no port")
    return Place(host if address is None else str(address), None if port is None else int(port))


def _is_number(host: str) -> bool:
    """Whether a resolver might take it for an address in an old notation (`127.1`, `0x7f.1`)."""
    last = host.rpartition(".")[2]
    return last.isdigit() or last.startswith("0x")


def place_and_resource(request: h11.Request) -> tuple[Place, bytes]:
    """What a request (not a CONNECT) is for; its two ways to name a host have to agree.

    Raises:
        Refusal: it names none, several, or is for another scheme.
    """
    hosts = [value for name, value in request.headers if name == b"host"]
    if len(hosts) != 1:
        raise _wrong("not exactly one Host header")
    place = parse_authority(hosts[0])
    target = request.target
    if target[:1] == b"/" or target == b"*":
        return place, target
    if target[: len(_ABSOLUTE)].lower() != _ABSOLUTE:
        raise _wrong("no path, and no http URL; for https use CONNECT")
    authority, resource = _split(target[len(_ABSOLUTE) :])
    if _with_port(parse_authority(authority)) != _with_port(place):
        raise _wrong("the URL is for another host than the Host header")
    return place, resource


def _split(rest: bytes) -> tuple[bytes, bytes]:
    at = next((i for i, byte in enumerate(rest) if byte in b"/?"), len(rest))
    resource = rest[at:]
    return rest[:at], resource if resource[:1] == b"/" else b"/" + resource


def _with_port(place: Place) -> tuple[str, int]:
    return place.host, place.port or HTTP_PORT


def _wrong(text: str) -> Refusal:
    return Refusal(HTTPStatus.BAD_REQUEST, text)


def authority_of(host: str, port: int, *, tls: bool) -> bytes:
    """A Host header."""
    written = f"[{host}]" if ":" in host else host
    default = HTTPS_PORT if tls else HTTP_PORT
    return (written if port == default else f"{written}:{port}").encode()
