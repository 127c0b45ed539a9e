"""Ports of the sandbox through `aether serve`."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from dsec.wire.frames import Frame, Kind
from tests.kernel.serving import PROBE, Client, Refused, Serving, refused
from tests.kernel.test_serve_files import client, server

__all__ = ["client", "server"]
pytestmark = pytest.mark.needs_root


@pytest.fixture
def port(client: Client) -> Iterator[int]:
    client.call("start", command_id=f"port-{id(client)}", argv=[str(PROBE), "listen", "0"])
    reader = client.open("attach", command_id=f"port-{id(client)}", stdout_from=0)
    reader.event()
    yield int(reader.next().payload.split()[1])
    client.call("kill", command_id=f"port-{id(client)}")


def test_connect(client: Client, port: int) -> None:
    stream = client.open("connect", port=port)
    assert stream.event() == {"connected": True}
    stream.send(b"hello")
    assert stream.next().payload == b"hello"
    stream.end()
    assert stream.next().kind is Kind.END
    assert stream.result() is None


def test_connect_relays_much(client: Client, port: int) -> None:
    stream = client.open("connect", port=port)
    stream.event()
    data = os.urandom(16 << 20)
    stream.send(data)
    stream.end()
    assert stream.finish()[2][0] == data


def test_connect_backpressure(client: Client, server: Serving, port: int) -> None:
    stream = client.open("connect", port=port, credit=False)
    stream.event()
    sent = 0
    try:
        while sent < 64 << 20:
            while stream.window > 0:
                piece = min(stream.window, 65536)
                stream.window -= piece
                client.send(Frame(Kind.DATA, stream.number, bytes(piece)))
                sent += piece
            client.receive(0.5)
    except TimeoutError:
        pass
    assert sent < 64 << 20, "it is held up in the end"
    assert server.rss_kib() < 8 * 1024
    assert client.run("true")["exit_code"] == 0
    stream.cancel()
    with pytest.raises(Refused):
        stream.result()


def test_connect_refused(client: Client) -> None:
    assert refused(client, "connect", port=1) == ("not_found", "port")
    assert refused(client, "connect", port=1, host="::1") == ("not_found", "port")
    assert refused(client, "connect", port=1, host="example.com")[0] == "invalid_request"


def test_connect_to_what_ends(client: Client, port: int) -> None:
    stream = client.open("connect", port=port)
    stream.event()
    client.call("kill", command_id=f"port-{id(client)}")
    # Its end is an end of file or a reset; after END in both directions it is over.
    if stream.next().kind is Kind.END:
        stream.end()
        assert stream.result() is None
