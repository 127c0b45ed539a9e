"""Servers on the outside: TLS ones that say their certificate's name, HTTP ones that say what came."""

from __future__ import annotations

import json
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Self

import anyio
import h11
import trustme
from anyio.abc import ByteStream, SocketAttribute
from anyio.streams.tls import TLSListener

from dsec.edge.network.warden.dialing import Dialer
from dsec.edge.network.warden.http_relay import Target
from dsec.edge.network.warden.reach import Address, as_address
from dsec.edge.network.warden.streams import reset_on_close

HOSTS = ("good.example", "other.example", "api.example", "shared.example", "*.wild.example")


class Authority:
    """Signs the certificate of all hosts there are."""

    def __init__(self, folder: Path) -> None:
        self._ca = trustme.CA()
        self.file = folder / "authority.pem"
        self._ca.cert_pem.write_to_path(str(self.file))
        self._leaf = self._ca.issue_cert(*HOSTS)

    def server(self) -> ssl.SSLContext:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self._leaf.configure_cert(context)
        return context

    def client(self) -> ssl.SSLContext:
        return ssl.create_default_context(cafile=str(self.file))


class Sites:
    """All addresses and ports of the outside, served by two servers on loopback."""

    def __init__(self, authority: Authority) -> None:
        self._authority = authority
        self._ports: dict[bool, int] = {}
        self.dialled: list[Target] = []
        self.dialled_tls: list[Target] = []
        self.requests: list[dict[str, object]] = []
        self.tls_ports = {443, 8443}
        self.unreachable: set[str] = set()

    @asynccontextmanager
    async def running(self) -> AsyncIterator[Self]:
        async with (
            await anyio.create_tcp_listener(local_host="127.0.0.1") as plain,
            await anyio.create_tcp_listener(local_host="127.0.0.1") as under_tls,
            anyio.create_task_group() as tasks,
        ):
            self._ports = {
                False: int(plain.extra(SocketAttribute.local_port)),
                True: int(under_tls.extra(SocketAttribute.local_port)),
            }
            secured = TLSListener(under_tls, self._authority.server(), standard_compatible=False)
            tasks.start_soon(plain.serve, self._serve)
            tasks.start_soon(secured.serve, self._serve)
            yield self
            tasks.cancel_scope.cancel()

    async def connect(self, target: Target) -> ByteStream:
        """In the place of a `Dialer`: what would go outside comes here."""
        self.dialled.append(target)
        if target.host in self.unreachable:
            raise ConnectionRefusedError("refused: 10.1.2.3 is the inside of this host")
        context = ssl.create_default_context(cafile=str(self._authority.file))
        here: Address | None = as_address("127.0.0.1")
        assert here is not None
        port = self._ports[target.port in self.tls_ports]
        moved = Target(host=target.host, addresses=(here,), port=port, tls=target.tls)
        return await Dialer(context, 5.0).connect(moved)

    async def _serve(self, stream: ByteStream) -> None:
        """HTTP that answers with the request as it came; `/echo` switches to repeating bytes."""
        http = h11.Connection(h11.SERVER)
        async with stream:
            try:
                while await self._one(http, stream):
                    http.start_next_cycle()
            except (anyio.EndOfStream, anyio.BrokenResourceError, h11.ProtocolError, OSError):
                return

    async def _one(self, http: h11.Connection, stream: ByteStream) -> bool:
        said: dict[str, object] = {}
        body = b""
        while True:
            event = http.next_event()
            if event is h11.NEED_DATA:
                http.receive_data(await stream.receive())
            elif isinstance(event, h11.Request):
                said = _described(event)
                if http.they_are_waiting_for_100_continue:
                    go = h11.InformationalResponse(status_code=100, headers=[])
                    await stream.send(http.send(go) or b"")
            elif isinstance(event, h11.Data):
                body += bytes(event.data)
            elif isinstance(event, h11.EndOfMessage):
                break
            else:
                return False
        said["body"] = body.decode("latin-1")
        self.requests.append(said)
        if said["target"] == "/cut":
            return await self._cut(http, stream)
        if said["target"] == "/echo":
            await self._echo(http, stream)
            return False
        answer = json.dumps(said).encode()
        head = h11.Response(status_code=200, headers=[("content-length", str(len(answer)))])
        out = [
            http.send(head),
            http.send(h11.Data(b"" if said["method"] == "HEAD" else answer)),
            http.send(h11.EndOfMessage()),
        ]
        await stream.send(b"".join(piece or b"" for piece in out))
        return http.our_state is h11.DONE and said["target"] != "/last"

    async def _cut(self, http: h11.Connection, stream: ByteStream) -> bool:
        """Break off in the middle of an answer."""
        await stream.send(http.send(h11.Response(status_code=200, headers=[])) or b"")
        await stream.send(http.send(h11.Data(b"half")) or b"")
        reset_on_close(stream)
        return False

    async def _echo(self, http: h11.Connection, stream: ByteStream) -> None:
        switch = h11.InformationalResponse(
            status_code=101, headers=[("upgrade", "echo"), ("connection", "upgrade")]
        )
        await stream.send(http.send(switch) or b"")
        await stream.send(http.trailing_data[0]) if http.trailing_data[0] else None
        async for data in stream:
            await stream.send(data)


def _described(request: h11.Request) -> dict[str, object]:
    return {
        "method": request.method.decode("latin-1"),
        "target": request.target.decode("latin-1"),
        "headers": [[k.decode("latin-1"), v.decode("latin-1")] for k, v in request.headers],
    }
