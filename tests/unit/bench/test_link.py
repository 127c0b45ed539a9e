"""The link of the benchmarks: its schedule, its counts, and that it changes nothing."""

from __future__ import annotations

import contextlib
import http.client
import random
import socket
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from typing_extensions import override

from bench.link import Reading, Schedule, link_to

BODY = random.Random(1).randbytes((3 << 20) + 17)


def connected(port: int) -> contextlib.closing[http.client.HTTPConnection]:
    """A connection, closed afterwards."""
    return contextlib.closing(http.client.HTTPConnection("127.0.0.1", port, timeout=60))


def test_a_byte_takes_its_time() -> None:
    link = Schedule(bytes_per_s=1000)
    assert link.passed_at(500, now=10.0) == pytest.approx(10.5)


def test_what_comes_while_the_link_is_busy_waits_its_turn() -> None:
    link = Schedule(bytes_per_s=1000)
    link.passed_at(500, now=10.0)
    assert link.passed_at(100, now=10.1) == pytest.approx(10.6)


def test_an_idle_link_saves_nothing_up() -> None:
    link = Schedule(bytes_per_s=1000)
    link.passed_at(500, now=10.0)
    assert link.passed_at(100, now=20.0) == pytest.approx(20.1)


def test_no_more_than_the_bandwidth_passes_however_it_is_cut() -> None:
    link = Schedule(bytes_per_s=125e6)
    last = max(link.passed_at(size, now=0.0) for size in [1, 65536, 1 << 20] * 50)
    assert last == pytest.approx(50 * (1 + 65536 + (1 << 20)) / 125e6)


def test_requests_are_counted_by_their_heads() -> None:
    reading = Reading()
    for piece in (b"GET /a HTTP/1.1\r\n\r\n", b"PUT /b HTTP/1.1\r\n\r\n", b"a body", b"more"):
        reading.count_up(piece)
    assert reading.requests == 2
    assert reading.up_bytes == 48


def test_a_difference_is_what_passed_between() -> None:
    before = Reading(connections=1, requests=2, up_bytes=3, down_bytes=4, cpu_s=0.5)
    after = Reading(connections=2, requests=5, up_bytes=10, down_bytes=40, cpu_s=0.75)
    assert after.since(before) == Reading(
        connections=1, requests=3, up_bytes=7, down_bytes=36, cpu_s=0.25
    )


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        self.send_response(200)
        self.send_header("Content-Length", str(len(BODY)))
        self.end_headers()
        self.wfile.write(BODY)
        self.close_connection = self.path == "/close"  # without a word of it in the head

    def do_POST(self) -> None:
        data = self.rfile.read(int(self.headers["Content-Length"]))
        self.send_response(200)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    @override
    def log_message(self, format: str, *args: object) -> None:
        """Nothing."""


@pytest.fixture
def server() -> Iterator[int]:
    with ThreadingHTTPServer(("127.0.0.1", 0), _Handler) as it:
        it.daemon_threads = True
        thread = threading.Thread(target=it.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield it.server_address[1]
        it.shutdown()
        thread.join()


def ask(
    connection: http.client.HTTPConnection, method: str, path: str = "/", body: bytes = b""
) -> bytes:
    """A request's answer, read to its end."""
    connection.request(method, path, body=body)
    with contextlib.closing(connection.getresponse()) as response:
        return response.read()


def test_bytes_pass_unchanged_and_are_counted(server: int) -> None:
    with link_to(server, latency_ms=1, mbit=4000) as link, connected(link.port) as connection:
        assert ask(connection, "GET") == BODY
        assert ask(connection, "GET") == BODY
        assert ask(connection, "POST", body=BODY) == BODY
        reading = link.read()
    assert (reading.connections, reading.requests) == (1, 3)
    assert reading.down_bytes > 3 * len(BODY)
    assert len(BODY) < reading.up_bytes < len(BODY) + 4096


def test_an_answer_that_ends_with_the_connection_is_whole(server: int) -> None:
    with link_to(server, latency_ms=0, mbit=4000) as link, connected(link.port) as connection:
        assert ask(connection, "GET", "/close") == BODY


def test_no_server_is_a_connection_that_ends() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        gone = taken.getsockname()[1]
    with link_to(gone, latency_ms=0, mbit=4000) as link, connected(link.port) as connection:
        with pytest.raises(ConnectionError):
            ask(connection, "GET")
