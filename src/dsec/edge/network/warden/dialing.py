"""Connections to servers, from the host's namespace."""

from __future__ import annotations

import ssl
from pathlib import Path

import anyio
from anyio.abc import ByteStream
from anyio.streams.tls import TLSStream

from dsec.edge.network.warden.http_relay import Target


def trust(authorities: Path | None) -> ssl.SSLContext:
    """Verifies servers by the host's authorities and, if given, those in a file. Blocks.

    Raises:
        OSError: the file cannot be read, or has no certificates.
    """
    context = ssl.create_default_context()
    context.set_alpn_protocols(["http/1.1"])
    if authorities is not None:
        context.load_verify_locations(authorities)
    return context


class Dialer:
    """Opens them."""

    def __init__(self, context: ssl.SSLContext, connect_s: float) -> None:
        """Open nothing yet.

        Args:
            context: how servers are verified.
            connect_s: how long all attempts for one target may take.
        """
        self._context = context
        self._connect_s = connect_s

    async def connect(self, target: Target) -> ByteStream:
        """Connect to the first of a target's addresses that answers; verified, if it is for TLS.

        Raises:
            OSError: none can be connected to, or the server is not who it should be.
            TimeoutError: it took too long.
        """
        with anyio.fail_after(self._connect_s):
            stream = await self._any(target)
            return stream if not target.tls else await self._secured(stream, target.host)

    async def _any(self, target: Target) -> ByteStream:
        failure = OSError("no address")
        for address in target.addresses:
            try:
                with anyio.fail_after(self._connect_s / len(target.addresses)):
                    return await anyio.connect_tcp(str(address), target.port)
            except (OSError, TimeoutError) as exc:
                failure = exc
        raise failure

    async def _secured(self, stream: ByteStream, host: str) -> ByteStream:
        try:
            return await TLSStream.wrap(stream, hostname=host, ssl_context=self._context)
        except BaseException as exc:
            await anyio.aclose_forcefully(stream)
            if isinstance(exc, anyio.EndOfStream | anyio.BrokenResourceError):
                raise ConnectionResetError from exc
            raise
