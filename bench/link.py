"""A network link between a node and a store: a TCP proxy that adds latency and shares a bandwidth.

Run as a process of its own, so that what it costs is its own and can be told:

    python -m bench.link --to PORT --latency-ms 5 --mbit 1000

It prints the port it listens on; each line on its standard input is answered by a line of JSON
(`Reading`), and the end of its input ends it.

What a client sends is passed on after the latency, which stands for a whole round trip; what the
server answers leaves no sooner than the shared bandwidth allows, over all connections together.
A connection has no more than a window on the link at a time, so those that wait take turns, and
one alone fills the link. Opening a connection costs a round trip too.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import resource
import socket
import subprocess
import sys
import threading
from collections.abc import Coroutine, Iterator
from dataclasses import asdict, dataclass

from typing_extensions import override

PIECE_BYTES = 256 << 10
"""Read from the server at once, at most: 2 ms at 1 Gb/s."""
WINDOW_BYTES = 640 << 10
"""On the link at a time, of one connection: what 5 ms and 1 Gb/s hold."""
SLACK_S = 0.001
"""Ahead of the schedule by so much, a piece goes at once: timers are no finer."""
_METHODS = (b"GET ", b"HEAD ", b"PUT ", b"POST ", b"DELETE ", b"PATCH ")


@dataclass(kw_only=True)
class Reading:
    """What has passed since the link began. Bytes are those of HTTP, headers included."""

    connections: int = 0
    requests: int = 0
    up_bytes: int = 0
    """From clients to the server."""
    down_bytes: int = 0
    """From the server to clients."""
    cpu_s: float = 0.0
    """Processor time of the link itself."""

    def since(self, before: Reading) -> Reading:
        """What has passed since an earlier reading."""
        earlier = asdict(before)
        return Reading(**{name: value - earlier[name] for name, value in asdict(self).items()})

    def count_up(self, data: bytes) -> None:
        """A client sent this, in one piece; a request's head is the beginning of one."""
        self.up_bytes += len(data)
        self.requests += data.startswith(_METHODS)


class Schedule:
    """When bytes have passed a link of some bandwidth: one queue, first come first served."""

    def __init__(self, bytes_per_s: float) -> None:
        self._bytes_per_s = bytes_per_s
        self._free_at = 0.0

    def passed_at(self, size: int, now: float) -> float:
        """Put some bytes on the link; when the last of them has passed."""
        self._free_at = max(self._free_at, now) + size / self._bytes_per_s
        return self._free_at


class _Upstream(asyncio.BufferedProtocol):
    """The server's side of a connection: reads a piece, waits its time, hands it on."""

    def __init__(self, link: Link, client: asyncio.Transport) -> None:
        self._link = link
        self._client = client
        self._buffer = bytearray(PIECE_BYTES)
        self._transport: asyncio.Transport | None = None
        self._waits = {"link": False, "client": False}
        self._on_link = 0
        self._ended = False

    @override
    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        self._socket = transport.get_extra_info("socket")
        self.acknowledge_at_once()

    def acknowledge_at_once(self) -> None:
        """Keep the kernel from holding acknowledgements back, which it takes up again by itself.

        A server that writes small pieces and does not turn Nagle's algorithm off waits for them,
        40 ms each time: a delay that is neither the link's nor a store's.
        """
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_QUICKACK, 1)

    @override
    def get_buffer(self, sizehint: int) -> memoryview:
        return memoryview(self._buffer)

    @override
    def buffer_updated(self, nbytes: int) -> None:
        self.acknowledge_at_once()
        piece = bytes(memoryview(self._buffer)[:nbytes])
        self._link.reading.down_bytes += nbytes
        now = self._link.loop.time()
        due = self._link.down.passed_at(nbytes, now)
        if due - now <= SLACK_S and not self._on_link:
            self._client.write(piece)
            return
        self._on_link += nbytes
        self.hold("link", waits=self._on_link >= WINDOW_BYTES)
        self._link.loop.call_at(due, self._pass, piece)

    def _pass(self, piece: bytes) -> None:
        self._client.write(piece)
        self._on_link -= len(piece)
        if self._ended and not self._on_link:
            self._client.close()
        self.hold("link", waits=self._on_link >= WINDOW_BYTES)

    def hold(self, why: str, *, waits: bool) -> None:
        """Read on from the server only when neither the link nor the client makes it wait."""
        held = any(self._waits.values())
        self._waits[why] = waits
        transport = self._transport
        if transport is None or transport.is_closing() or held == any(self._waits.values()):
            return
        if held:
            transport.resume_reading()
        else:
            transport.pause_reading()

    @override
    def eof_received(self) -> bool:
        return False

    @override
    def connection_lost(self, exc: Exception | None) -> None:
        self._ended = True
        if not self._on_link:  # else the last piece that is still on the link closes it
            self._client.close()


class _Client(asyncio.Protocol):
    """A client's side of a connection."""

    def __init__(self, link: Link) -> None:
        self._link = link
        self._sent: list[bytes] = []
        self._upstream: tuple[asyncio.Transport, _Upstream] | None = None
        self._closed = False

    @override
    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        _no_delay(transport)
        self._transport = transport
        self._link.reading.connections += 1
        self._link.loop.call_later(self._link.latency_s, self._connect)

    def _connect(self) -> None:
        self._link.spawn(self._open())

    async def _open(self) -> None:
        try:
            transport, upstream = await self._link.loop.create_connection(
                lambda: _Upstream(self._link, self._transport), "127.0.0.1", self._link.to
            )
        except OSError:
            self._transport.abort()
            return
        _no_delay(transport)
        if self._closed:
            transport.abort()
            return
        self._upstream = (transport, upstream)
        self._link.loop.call_later(self._link.latency_s, self._forward, b"".join(self._sent))

    @override
    def data_received(self, data: bytes) -> None:
        self._link.reading.count_up(data)
        if self._upstream is None:
            self._sent.append(data)
        else:
            self._link.loop.call_later(self._link.latency_s, self._forward, data)

    def _forward(self, data: bytes) -> None:
        if self._upstream is not None and not self._upstream[0].is_closing():
            self._upstream[0].write(data)
            self._upstream[1].acknowledge_at_once()

    @override
    def pause_writing(self) -> None:
        if self._upstream is not None:
            self._upstream[1].hold("client", waits=True)

    @override
    def resume_writing(self) -> None:
        if self._upstream is not None:
            self._upstream[1].hold("client", waits=False)

    @override
    def connection_lost(self, exc: Exception | None) -> None:
        self._closed = True
        if self._upstream is not None:
            self._upstream[0].close()


def _no_delay(transport: asyncio.Transport) -> None:
    transport.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


class Link:
    """The proxy, in the process that is it."""

    def __init__(self, to: int, latency_s: float, bytes_per_s: float) -> None:
        self.to = to
        self.latency_s = latency_s
        self.down = Schedule(bytes_per_s)
        self.reading = Reading()
        self.loop = asyncio.get_running_loop()
        self._group = asyncio.TaskGroup()

    def spawn(self, work: Coroutine[None, None, None]) -> None:
        """Run a coroutine of a connection."""
        self._group.create_task(work)

    async def run(self) -> None:
        """Serve until standard input ends."""
        server = await self.loop.create_server(lambda: _Client(self), "127.0.0.1", 0)
        async with server, self._group:
            print(server.sockets[0].getsockname()[1], flush=True)
            ended = asyncio.Event()
            threading.Thread(target=self._answer, args=(ended,), daemon=True).start()
            await ended.wait()
            server.close()
        # Connections that are still open end with the process.

    def _answer(self, ended: asyncio.Event) -> None:
        for _line in sys.stdin:
            usage = resource.getrusage(resource.RUSAGE_SELF)
            self.reading.cpu_s = round(usage.ru_utime + usage.ru_stime, 3)
            print(json.dumps(asdict(self.reading)), flush=True)
        self.loop.call_soon_threadsafe(ended.set)


class LinkProcess:
    """A link as a process, for the benchmark that started it."""

    def __init__(self, process: subprocess.Popen[str], port: int) -> None:
        self._process = process
        self.port = port

    def read(self) -> Reading:
        """What has passed so far."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write("?\n")
        self._process.stdin.flush()
        return Reading(**json.loads(self._process.stdout.readline()))


@contextlib.contextmanager
def link_to(port: int, latency_ms: float, mbit: float) -> Iterator[LinkProcess]:
    """A link to a server on this machine."""
    command = [sys.executable, "-m", "bench.link", "--to", str(port)]
    command += ["--latency-ms", str(latency_ms), "--mbit", str(mbit)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        yield LinkProcess(process, int(process.stdout.readline()))
    finally:
        process.stdin.close()
        try:
            process.wait(5)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        process.stdout.close()


def main() -> None:
    """The process."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--to", type=int, required=True, help="port of the server")
    parser.add_argument("--latency-ms", type=float, required=True)
    parser.add_argument("--mbit", type=float, required=True)
    options = parser.parse_args()

    async def serve() -> None:
        await Link(options.to, options.latency_ms / 1000, options.mbit * 1e6 / 8).run()

    asyncio.run(serve())


if __name__ == "__main__":
    main()
