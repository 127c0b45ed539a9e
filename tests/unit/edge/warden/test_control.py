from __future__ import annotations

import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import anyio
import dns.message
import dns.rcode
import pytest
from anyio.abc import ByteStream, ConnectedUDPSocket, SocketStream

from dsec.base.errors import InvalidRequest, Unavailable
from dsec.edge.network.warden.client import WardenClient
from dsec.edge.network.warden.control import Warden
from dsec.edge.network.warden.messages import Credential, Denied, Reach, framed
from dsec.edge.network.warden.settings import Limits, Settings
from tests.unit.edge.warden.names import NameServer
from tests.unit.edge.warden.world import ALL, ME, FakeKernel, SetClock, allow, assigned

A = "203.0.113.10"
SECRET = "s3cret-value"


class Bench:
    """A client whose wardens run in this process and can be ended."""

    def __init__(self, server: NameServer) -> None:
        self.kernel = FakeKernel()
        self.clock = SetClock()
        self.denied: list[Denied] = []
        self.lives = 0
        self._life = anyio.CancelScope()
        settings = Settings(
            gateway4=ME,
            dns_port=0,
            transparent_port=0,
            proxy_port=0,
            resolvers=(f"127.0.0.1#{server.port}",),
            limits=Limits(denials_every_s=0.01, denials_kinds=4),
        )
        self.client = WardenClient(settings, self.denied.append, self.clock, self._start)

    @asynccontextmanager
    async def running(self) -> AsyncIterator[WardenClient]:
        async with anyio.create_task_group() as tasks:
            await tasks.start(self.client.run)
            yield self.client
            tasks.cancel_scope.cancel()

    def end_warden(self) -> None:
        self._life.cancel()

    @asynccontextmanager
    async def _start(self) -> AsyncIterator[ByteStream]:
        here, there = socket.socketpair()
        for each in (here, there):
            each.setblocking(False)
        self.lives += 1
        async with (
            await SocketStream.from_socket(here) as mine,
            anyio.create_task_group() as tasks,
        ):
            self._life = anyio.CancelScope()
            tasks.start_soon(self._live, await SocketStream.from_socket(there), self._life)
            yield mine
            tasks.cancel_scope.cancel()

    async def _live(self, control: ByteStream, life: anyio.CancelScope) -> None:
        with life:
            async with control:
                await Warden(control, self.kernel, self.clock, transparent=False).run()

    async def ask(self, name: str) -> str | None:
        """What a name is answered with; None: nothing."""
        sock = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        sock.setblocking(False)
        sock.bind((ME, 0))
        sock.connect((ME, self.client.ports["dns_udp"]))
        async with await ConnectedUDPSocket.from_socket(sock) as udp:
            await udp.send(dns.message.make_query(name, "A").to_wire())
            with anyio.fail_after(20):
                try:
                    answer = dns.message.from_wire(await udp.receive())
                except (OSError, anyio.BrokenResourceError):
                    return None  # nobody listens there
        return dns.rcode.to_text(answer.rcode())


async def until(happened: Callable[[], bool]) -> None:
    with anyio.fail_after(20):
        while not happened():  # noqa: ASYNC110 - of a process that tells nobody
            await anyio.sleep(0.002)


@pytest.fixture
def bench(server: NameServer) -> Bench:
    server.has("good.example", A=[A])
    return Bench(server)


async def test_an_assignment_is_in_force_when_it_is_acknowledged(bench: Bench) -> None:
    async with bench.running() as client:
        assert client.ports.keys() == {"dns_udp", "dns_tcp", "transparent", "proxy"}
        assert await client.assign(assigned(allow("good.example"))) == ()
        assert await bench.ask("good.example") == "NOERROR"
        held = await client.assign(assigned(allow("good.example")))
        assert [each.address for each in held] == [bytes((203, 0, 113, 10))]
        bench.kernel.maps.clear()
        await client.refill(ME)
        assert bench.kernel.maps[f"/pins/{ME}"].keys() == {A}
        await client.assign(assigned())
        assert await bench.ask("good.example") == "NXDOMAIN"


async def test_what_was_denied_is_told_counted_and_bounded(bench: Bench) -> None:
    async with bench.running() as client:
        await client.assign(assigned(allow("good.example")))
        for n in range(100):
            assert await bench.ask(f"n{n}.bad.example") == "NXDOMAIN"

        def total() -> int:
            return sum(event.count for each in bench.denied for event in each.events)

        await until(lambda: total() == 100)
        assert {each.sandbox for each in bench.denied} == {"sb-1"}
        assert all(len(each.events) <= 5 for each in bench.denied)


async def test_one_that_dies_is_started_again_and_knows_all(bench: Bench) -> None:
    async with bench.running() as client:
        await client.assign(assigned(allow("good.example")))
        bench.end_warden()
        await until(lambda: bench.lives == 2)
        await client.refill(ME)  # waits until it is there
        assert await bench.ask("good.example") == "NOERROR"
        assert await bench.ask("other.example") == "NXDOMAIN"


async def test_what_is_said_while_there_is_none_is_known_to_the_next(bench: Bench) -> None:
    async with bench.running() as client:
        await client.assign(assigned(allow("good.example")))
        bench.end_warden()
        await until(lambda: bench.lives == 2 or client._connection is None)
        await client.assign(assigned(allow("other.example")))
        assert await bench.ask("good.example") == "NXDOMAIN"


async def test_a_forgotten_sandbox_is_a_stranger(bench: Bench) -> None:
    async with bench.running() as client:
        await client.assign(assigned(allow("good.example")))
        assert await bench.ask("good.example") == "NOERROR"
        await client.forget(ME)
        await client.forget(ME)
        bench.end_warden()
        await until(lambda: bench.lives == 2)
        assert await client.assign(assigned(sandbox="sb-2")) == ()
        assert await bench.ask("good.example") == "NXDOMAIN"


async def test_a_wrong_assignment_changes_nothing(bench: Bench) -> None:
    wrong = assigned(networks=[Reach(network="10.0.0.0/99", spans=ALL)])
    async with bench.running() as client:
        await client.assign(assigned(allow("good.example")))
        with pytest.raises(InvalidRequest):
            await client.assign(wrong)
        assert await bench.ask("good.example") == "NOERROR"
        bench.end_warden()
        await until(lambda: bench.lives == 2)
        await client.refill(ME)
        assert await bench.ask("good.example") == "NOERROR"


async def test_a_map_that_is_gone_is_told_and_the_warden_lives(bench: Bench) -> None:
    async with bench.running() as client:
        await client.assign(assigned(allow("good.example")))
        assert await bench.ask("good.example") == "NOERROR"
        bench.kernel.gone = True
        with pytest.raises(Unavailable):
            await client.refill(ME)
        assert await bench.ask("good.example") == "SERVFAIL"
        bench.kernel.gone = False
        assert await bench.ask("good.example") == "NOERROR"
        assert bench.lives == 1


async def test_a_first_one_that_cannot_begin_is_an_error(server: NameServer) -> None:
    bench = Bench(server)
    bench.client._settings = Settings(gateway4="203.0.113.1", dns_port=0)
    with pytest.raises(Unavailable, match="cannot begin"), anyio.fail_after(20):
        await bench.client.run()


async def test_what_is_no_message_ends_it_and_no_secret_is_logged(
    bench: Bench, caplog: pytest.LogCaptureFixture
) -> None:
    key = Credential(host="api.example", header="Authorization", value=SECRET)
    async with bench.running() as client:
        await client.assign(assigned(secrets=[key]))
        connection = client._connection
        assert connection is not None
        whole = framed(assigned(secrets=[key]))
        broken = whole[4:].replace(b"assign", b"bssign")
        await connection._stream.send(len(broken).to_bytes(4, "big") + broken)
        await until(lambda: bench.lives == 2)
        await client.refill(ME)
    assert "broke" in caplog.text
    assert SECRET not in caplog.text
    assert all(SECRET not in str(vars(record)) for record in caplog.records)
