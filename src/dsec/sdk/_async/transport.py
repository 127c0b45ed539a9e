"""The one seam between the SDK and a network: send a request, get a response, open a WebSocket."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from typing import Protocol

from dsec.sdk._http import Address, Request


class Response(Protocol):
    """An answer: its head, and its body as it comes."""

    @property
    def status(self) -> int:
        """The HTTP status."""
        ...

    @property
    def headers(self) -> Mapping[str, str]:
        """Header fields; names in any case find them."""
        ...

    async def receive(self, timeout: float) -> bytes:
        """The next bytes of the body, b"" at its end.

        Raises:
            ConnectionFailed: the body broke off, or nothing came for `timeout` seconds.
        """
        ...

    async def aclose(self) -> None:
        """Be done with it, read to the end or not."""
        ...


class PortStream(Protocol):
    """A connection to a port: bytes both ways, each direction ends by itself.

    One task may send while another receives. A connection that breaks is Unavailable.
    """

    async def send(self, data: bytes) -> None:
        """Send bytes; waits until the connection has taken them."""
        ...

    async def send_eof(self) -> None:
        """Say that no more will be sent; receiving goes on."""
        ...

    async def receive(self) -> bytes:
        """The next bytes, b"" when the other side has ended its direction."""
        ...

    async def aclose(self) -> None:
        """Close both directions."""
        ...


class Transport(Protocol):
    """What carries requests: a network, an application in this process, a fake."""

    async def send(
        self, request: Request, body: AsyncIterator[bytes] | None, timeout: float
    ) -> Response:
        """Send a request; returns when the head of the answer is there.

        Raises:
            ConnectionFailed: no answer; `sent` says whether the server may have seen the request.
        """
        ...

    async def websocket(self, request: Request, timeout: float) -> PortStream:
        """Open a WebSocket.

        Raises:
            ConnectionFailed: as for send.
            DsecError: the server refused.
        """
        ...

    async def aclose(self) -> None:
        """Close every connection."""
        ...


def network(address: Address) -> Transport:
    """What carries requests over TCP and TLS."""
    # As long to import as all the rest of the SDK: only for those who use a network.
    from dsec.sdk._aiohttp import HttpTransport

    return HttpTransport(address)
