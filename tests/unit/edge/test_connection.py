from __future__ import annotations

import socket
from collections.abc import AsyncIterator

import anyio
import anyio.lowlevel
import pytest

from dsec.edge import connection
from dsec.edge.connection import UnixConnection


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture
async def pair() -> AsyncIterator[tuple[UnixConnection, socket.socket]]:
    ours, theirs = socket.socketpair()
    ours.setblocking(False)
    with theirs:
        made = await UnixConnection.open(ours)
        yield made, theirs
        await made.aclose()
        await anyio.lowlevel.checkpoint()


async def test_a_peer_that_does_not_read_is_let_go(
    pair: tuple[UnixConnection, socket.socket], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection, "MAX_QUEUED_BYTES", 1 << 20)
    ours, _theirs = pair
    lost = anyio.Event()
    ours.attach(lambda _: None, lost.set)
    written = 0
    with anyio.fail_after(5):
        while not lost.is_set() and written < 64:
            ours.write(bytes(1 << 16))
            written += 1
            await anyio.lowlevel.checkpoint()
        await lost.wait()
    assert written < 64


async def test_a_peer_that_reads_is_kept(
    pair: tuple[UnixConnection, socket.socket], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection, "MAX_QUEUED_BYTES", 1 << 20)
    ours, theirs = pair
    lost = anyio.Event()
    ours.attach(lambda _: None, lost.set)
    for _ in range(64):
        ours.write(bytes(1 << 16))
        await anyio.to_thread.run_sync(theirs.recv, 1 << 16, socket.MSG_WAITALL)
    assert not lost.is_set()
