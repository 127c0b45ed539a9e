"""The warden as a process, behind a real filter and router: names, inspected connections, its death."""

from __future__ import annotations

import functools
import os
import secrets
import signal
import socket
import ssl
import tempfile
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import anyio
import anyio.to_thread
import dns.message
import dns.rcode
import pytest
from anyio.abc import ByteStream, ConnectedUDPSocket, SocketListener, SocketStream
from anyio.streams.tls import TLSListener, TLSStream

from dsec.base.clock import SystemClock
from dsec.edge.network.networks import NetworkConfig, Networks
from dsec.edge.network.router import RouterConfig
from dsec.edge.network.routing import retire_router
from dsec.edge.network.services import Services
from dsec.edge.network.slots import Slot, SlotLimits
from dsec.linux import net
from dsec.wire.sandbox import DeniedTraffic
from tests.kernel.edge_process import network as network_of
from tests.kernel.networks import WORLD, WORLD6, world
from tests.pristine import Node, pristine_node, snapshot
from tests.unit.edge.warden.names import NameServer
from tests.unit.edge.warden.sites import Authority

pytestmark = [pytest.mark.needs_root, pytest.mark.anyio]
ANSWER = b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhello"
HOST = "good.example"


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture
def home() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="wd") as directory:
        (Path(directory) / "run").mkdir()
        (Path(directory) / "state").mkdir()
        yield Path(directory)


@pytest.fixture
def router(home: Path) -> Iterator[RouterConfig]:
    """Of a node of which afterwards nothing may be there."""
    made = RouterConfig(node=secrets.token_hex(2), run=home / "run")
    look = functools.partial(snapshot, Node(os.getpid(), made.node, (made.run,)))
    try:
        with pristine_node(look):
            yield made
    finally:
        retire_router(made)


@pytest.fixture
def beyond(home: Path) -> Iterator[Path]:
    with world(home, "wd") as place:
        yield place


@pytest.fixture
def authority(home: Path) -> Authority:
    return Authority(home)


class Bench:
    """One sandbox's slot, and who is inside."""

    def __init__(self, networks: Networks, slot: Slot, authority: Authority) -> None:
        self.networks = networks
        self.slot = slot
        self._authority = authority

    async def apply(self, *allowed: str) -> None:
        await self.networks.apply("sb-1", dict.fromkeys(allowed, True))

    async def ask(self, name: str, kind: str = "A") -> tuple[str, list[str]]:
        def work() -> socket.socket:
            sock = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
            sock.setblocking(False)
            sock.connect((self.slot.gateway4, 53))
            return sock

        sock = net.in_namespace(Path(self.slot.namespace), work)
        async with await ConnectedUDPSocket.from_socket(sock) as udp:
            wire = b""
            with anyio.fail_after(30):
                while not wire:  # as any resolver of a libc does: nobody may listen just now
                    with anyio.move_on_after(1):
                        await udp.send(dns.message.make_query(name, kind).to_wire())
                        wire = await udp.receive()
        answer = dns.message.from_wire(wire)
        return dns.rcode.to_text(answer.rcode()), [r.to_text() for s in answer.answer for r in s]

    async def connect(self, address: str, port: int) -> SocketStream:
        def work() -> socket.socket:
            return socket.create_connection((address, port), 10)

        sock = await anyio.to_thread.run_sync(net.in_namespace, Path(self.slot.namespace), work)
        sock.setblocking(False)
        return await SocketStream.from_socket(sock)

    async def http(self, stream: ByteStream, host: str = HOST) -> bytes:
        with anyio.fail_after(20):
            await stream.send(f"GET / HTTP/1.1\r\nHost: {host}\r\n\r\n".encode())
            got = b""
            while not got.endswith((b"hello", b"not allowed\n")):
                got += await stream.receive()
            return got

    @asynccontextmanager
    async def tls(self, stream: SocketStream, host: str = HOST) -> AsyncIterator[ByteStream]:
        with anyio.fail_after(20):
            context = self._authority.client()
            inner = await TLSStream.wrap(
                stream, hostname=host, ssl_context=context, standard_compatible=False
            )
        async with inner:
            yield inner


async def serve(stream: ByteStream) -> None:
    async with stream:
        try:
            async for _ in stream:
                await stream.send(ANSWER)
        except anyio.BrokenResourceError:
            return


@asynccontextmanager
async def sites(beyond: Path, authority: Authority) -> AsyncIterator[None]:
    """Servers of the world, at all its addresses."""

    def listen(address: str, port: int) -> socket.socket:
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        sock = socket.create_server((address, port), family=family)
        sock.setblocking(False)
        return sock

    async with anyio.create_task_group() as tasks:
        for address in (WORLD, WORLD6):
            for port in (80, 443, 8000):
                made = net.in_namespace(beyond, functools.partial(listen, address, port))
                listener = await SocketListener.from_socket(made)
                tasks.start_soon(_serve_at, listener, authority if port == 443 else None)
        yield
        tasks.cancel_scope.cancel()


async def _serve_at(listener: SocketListener, authority: Authority | None) -> None:
    async with listener:
        if authority is None:
            await listener.serve(serve)
        else:
            secured = TLSListener(listener, authority.server(), standard_compatible=False)
            await secured.serve(serve)


@pytest.fixture
async def bench(
    home: Path, router: RouterConfig, beyond: Path, authority: Authority
) -> AsyncIterator[Bench]:
    async with NameServer().running() as server, sites(beyond, authority):
        server.has(HOST, A=[WORLD], AAAA=[WORLD6])
        server.has("other.example", A=[WORLD])
        config = NetworkConfig(
            router=router,
            state=home / "state",
            program=network_of(home, router.node).program,
            services=Services.of({}),
            limits=SlotLimits(ready=1),
            resolvers=(f"127.0.0.1#{server.port}",),
        )
        async with Networks(config, SystemClock()).running() as networks:
            slot = await networks.open("sb-1", {})
            yield Bench(networks, slot, authority)
            await networks.close("sb-1")


async def test_a_name_opens_its_addresses_for_itself_alone(bench: Bench) -> None:
    with pytest.raises(ConnectionRefusedError):
        await bench.connect(WORLD, 80)
    await bench.apply(f"tcp://{HOST}:80", f"tcp://{HOST}:443", f"tcp://{HOST}:8000")
    with pytest.raises(ConnectionRefusedError):
        await bench.connect(WORLD, 80)  # nobody has asked
    assert await bench.ask(HOST) == ("NOERROR", [WORLD])
    assert await bench.ask(HOST, "AAAA") == ("NOERROR", [WORLD6])
    assert await bench.ask("other.example") == ("NXDOMAIN", [])
    for address in (WORLD, WORLD6):
        async with await bench.connect(address, 8000) as stream:
            assert await bench.http(stream) == ANSWER
        async with await bench.connect(address, 80) as stream:
            assert b"hello" in await bench.http(stream)
            assert b" 403 " in await bench.http(stream, "other.example")
        async with await bench.connect(address, 443) as stream, bench.tls(stream) as inner:
            assert await bench.http(inner) == ANSWER
        async with await bench.connect(address, 443) as stream:
            with pytest.raises(ssl.SSLError, match="ACCESS_DENIED"):
                await bench.tls(stream, "other.example").__aenter__()
    said = {(each.reason, each.name) for each in await denied(bench)}
    assert {("name", "other.example"), ("rule", "")} <= said


async def denied(bench: Bench) -> list[DeniedTraffic]:
    with anyio.fail_after(20):
        while True:
            view = await bench.networks.view("sb-1", {})
            if any(each.protocol == "tcp" and each.name for each in view.denied):
                return view.denied
            await anyio.sleep(0.01)


async def test_the_explicit_proxy(bench: Bench) -> None:
    await bench.apply(f"tcp://{HOST}:443", f"tcp://{HOST}:80")
    async with await bench.connect(bench.slot.gateway4, 3128) as stream:
        await stream.send(f"CONNECT {HOST}:443 HTTP/1.1\r\nHost: {HOST}:443\r\n\r\n".encode())
        assert b" 200 " in await stream.receive()
        async with bench.tls(stream) as inner:
            assert await bench.http(inner) == ANSWER
    async with await bench.connect(bench.slot.gateway6, 3128) as stream:
        await stream.send(b"CONNECT other.example:443 HTTP/1.1\r\nHost: x\r\n\r\n")
        assert b" 403 " in await stream.receive()


async def test_narrowing_cuts_direct_and_inspected_connections_and_leaves_others(
    bench: Bench,
) -> None:
    await bench.apply(f"tcp://{HOST}:443", f"tcp://{HOST}:8000")
    await bench.ask(HOST)
    direct = await bench.connect(WORLD, 8000)
    inspected = await bench.connect(WORLD, 443)
    async with direct, inspected, bench.tls(inspected) as inner:
        assert await bench.http(direct) == ANSWER
        assert await bench.http(inner) == ANSWER
        await bench.apply(f"tcp://{HOST}:443")
        with pytest.raises((anyio.BrokenResourceError, anyio.EndOfStream)):
            await bench.http(direct)
        assert await bench.http(inner) == ANSWER
        await bench.apply()
        with pytest.raises((anyio.BrokenResourceError, anyio.EndOfStream)):
            await bench.http(inner)


async def test_a_killed_warden_is_followed_by_one_that_knows_all(bench: Bench) -> None:
    await bench.apply(f"tcp://{HOST}:443", f"tcp://{HOST}:8000")
    await bench.ask(HOST)
    async with await bench.connect(WORLD, 8000) as direct:
        assert await bench.http(direct) == ANSWER
        os.kill(warden_of(os.getpid()), signal.SIGKILL)
        assert await bench.http(direct) == ANSWER
        assert await bench.ask(HOST) == ("NOERROR", [WORLD])
        assert await bench.ask("other.example") == ("NXDOMAIN", [])
        async with await bench.connect(WORLD, 443) as stream, bench.tls(stream) as inner:
            assert await bench.http(inner) == ANSWER
        assert await bench.http(direct) == ANSWER


def warden_of(parent: int) -> int:
    """The number of the warden that a process has started."""
    for each in Path("/proc").glob("[0-9]*"):
        try:
            stat, command = (each / "stat").read_text(), (each / "cmdline").read_bytes()
        except OSError:
            continue
        if int(stat.rpartition(")")[2].split()[1]) == parent and b".network.warden" in command:
            return int(each.name)
    raise AssertionError("no warden")
