"""The warden's sockets: listening in the router's namespace, connecting from the host's.

Inspected connections come by TPROXY: a listening socket with IP_TRANSPARENT accepts them at the
address the sandbox wanted, which so is the accepted socket's own. There is no translation and
nothing to ask conntrack for. The rules this needs are the router's (`dsec.edge.network.rules`).
"""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Callable, Iterator
from pathlib import Path

from anyio.abc import SocketAttribute, SocketListener, SocketStream, UDPSocket
from msgspec import Struct

from dsec.edge.network.warden.reach import Address, as_address
from dsec.edge.network.warden.settings import Settings
from dsec.linux.net import in_namespace

_BACKLOG = 1024
_UDP_BUFFER_BYTES = 1 << 20
_IPV6_TRANSPARENT = 75


class Places(Struct, kw_only=True):
    """Sockets that listen."""

    dns_udp: list[socket.socket]
    dns_tcp: list[socket.socket]
    transparent: list[socket.socket]
    proxy: list[socket.socket]

    def ports(self) -> dict[str, int]:
        """Which port each kind has."""
        kinds = {name: getattr(self, name) for name in self.__struct_fields__}
        return {name: each[0].getsockname()[1] for name, each in kinds.items() if each}


def opened(settings: Settings, *, transparent: bool = True) -> Places:
    """Listen. Blocks.

    Args:
        settings: where.
        transparent: accept connections to whatever address; needs root.

    Raises:
        OSError: the namespace, an address or a port is not to be had; nothing stays open.
    """
    if settings.router:
        return in_namespace(
            Path(settings.router), lambda: _opened(settings, transparent=transparent)
        )
    return _opened(settings, transparent=transparent)


def _opened(settings: Settings, *, transparent: bool) -> Places:
    gateways = [each for each in (settings.gateway4, settings.gateway6) if each]
    anywhere = ["0.0.0.0", "::"][: len(gateways)]  # noqa: S104 - in a namespace of its own
    with _all_or_none() as keep:
        udp = [keep(_udp(host, settings.dns_port)) for host in gateways]
        tcp = [keep(_tcp(host, settings.dns_port)) for host in gateways]
        proxy = [keep(_tcp(host, settings.proxy_port)) for host in gateways]
        port = settings.transparent_port
        hosts = anywhere if transparent else gateways
        inspected = [keep(_tcp(host, port, transparent=transparent)) for host in hosts]
        return Places(dns_udp=udp, dns_tcp=tcp, transparent=inspected, proxy=proxy)


@contextlib.contextmanager
def _all_or_none() -> Iterator[Callable[[socket.socket], socket.socket]]:
    with contextlib.ExitStack() as undo:
        yield undo.enter_context
        undo.pop_all()


def _family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET


def _udp(host: str, port: int) -> socket.socket:
    with contextlib.ExitStack() as undo:
        sock = undo.enter_context(socket.socket(_family(host), socket.SOCK_DGRAM))
        sock.setblocking(False)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _UDP_BUFFER_BYTES)
        sock.bind((host, port))
        undo.pop_all()
    return sock


def _tcp(host: str, port: int, *, transparent: bool = False) -> socket.socket:
    family = _family(host)
    with contextlib.ExitStack() as undo:
        sock = undo.enter_context(socket.socket(family, socket.SOCK_STREAM))
        sock.setblocking(False)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        if transparent and family == socket.AF_INET6:
            sock.setsockopt(socket.IPPROTO_IPV6, _IPV6_TRANSPARENT, 1)
        elif transparent:
            sock.setsockopt(socket.SOL_IP, socket.IP_TRANSPARENT, 1)
        sock.bind((host, port))
        sock.listen(_BACKLOG)
        undo.pop_all()
    return sock


async def listener(sock: socket.socket) -> SocketListener:
    """A listening socket for the loop."""
    return await SocketListener.from_socket(sock)


async def datagrams(sock: socket.socket) -> UDPSocket:
    """A bound socket for the loop."""
    return await UDPSocket.from_socket(sock)


def peer_of(stream: SocketStream) -> str:
    """The address of whoever connected; nobody's, if they are gone already."""
    try:
        return str(stream.extra(SocketAttribute.remote_address)[0])  # noqa: S610 - no Django
    except (OSError, ValueError, LookupError):
        return ""


Destination = tuple[Address, int]
DestinationOf = Callable[[SocketStream], Destination | None]


def destination_of(stream: SocketStream) -> Destination | None:
    """Where the sandbox wanted to connect to: the accepted socket's own address."""
    try:
        address = as_address(stream.extra(SocketAttribute.local_address)[0])  # noqa: S610
        port = stream.extra(SocketAttribute.local_port)  # noqa: S610
    except (OSError, ValueError, LookupError):
        return None  # the sandbox is gone already
    return None if address is None else (address, port)
