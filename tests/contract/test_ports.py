"""Connections to ports in a sandbox."""

from __future__ import annotations

import contextlib
import random

import anyio
import pytest

from dsec import Command, DSecClient, DsecError, NotFound, RequestError, Sandbox
from dsec.sdk import PortStream
from tests.contract.conftest import MakeArgs
from tests.contract.expect import PROBE, read_until, refusal

MIB = 1 << 20


async def listening(sandbox: Sandbox, port: int = 8000) -> Command:
    """An echo server in the sandbox."""
    command = await sandbox.start([PROBE, "listen", str(port)])
    await read_until(command, b"ready")
    return command


async def receive_all(stream: PortStream) -> bytes:
    """All until the other side ends."""
    said = b""
    while data := await stream.receive():
        said += data
    return said


async def test_bytes_go_and_come(sandbox: Sandbox) -> None:
    await listening(sandbox)
    stream = await sandbox.connect_port(8000)
    await stream.send(b"hello")
    said = b""
    while len(said) < 5:
        said += await stream.receive()
    assert said == b"hello"
    await stream.aclose()


async def test_a_megabyte_comes_back_exactly(sandbox: Sandbox) -> None:
    await listening(sandbox)
    data = random.Random(1).randbytes(MIB)
    stream = await sandbox.connect_port(8000)
    async with anyio.create_task_group() as group:

        async def send() -> None:
            await stream.send(data)
            await stream.send_eof()

        group.start_soon(send)
        assert await receive_all(stream) == data
    await stream.aclose()


async def test_ending_one_direction_leaves_the_other_open(sandbox: Sandbox) -> None:
    await listening(sandbox)
    stream = await sandbox.connect_port(8000)
    await stream.send(b"last words")
    await stream.send_eof()
    assert await receive_all(stream) == b"last words"
    await stream.aclose()


async def test_a_port_nobody_listens_on_is_not_found(sandbox: Sandbox) -> None:
    with refusal(NotFound):
        await sandbox.connect_port(4444)


@pytest.mark.parametrize("port", [0, -1, 70000])
async def test_a_port_that_cannot_be_is_refused(sandbox: Sandbox, port: int) -> None:
    with pytest.raises(RequestError):
        await sandbox.connect_port(port)


async def test_twenty_connections_keep_apart(sandbox: Sandbox) -> None:
    await listening(sandbox)

    async def ask(n: int) -> None:
        stream = await sandbox.connect_port(8000)
        await stream.send(b"%d" % n * 100)
        await stream.send_eof()
        assert await receive_all(stream) == b"%d" % n * 100
        await stream.aclose()

    async with anyio.create_task_group() as group:
        for n in range(20):
            group.start_soon(ask, n)


async def test_forward_is_a_local_listener(sandbox: Sandbox) -> None:
    await listening(sandbox)
    async with sandbox.forward(8000) as (host, port):
        for _ in range(2):
            async with await anyio.connect_tcp(host, port) as stream:
                await stream.send(b"through")
                await stream.send_eof()
                said = b"".join([data async for data in stream])
                assert said == b"through"


async def test_the_end_of_the_listener_ends_the_connection(sandbox: Sandbox) -> None:
    command = await listening(sandbox)
    stream = await sandbox.connect_port(8000)
    await stream.send(b"x")
    await stream.receive()
    await command.kill()
    with contextlib.suppress(DsecError, OSError):
        assert await stream.receive() == b""
    await stream.aclose()


async def test_a_client_that_goes_away_does_no_harm(sandbox: Sandbox) -> None:
    await listening(sandbox)
    for _ in range(5):
        stream = await sandbox.connect_port(8000)
        await stream.send(bytes(100_000))
        await stream.aclose()
    stream = await sandbox.connect_port(8000)
    await stream.send(b"still here")
    await stream.send_eof()
    assert await receive_all(stream) == b"still here"
    await stream.aclose()


async def test_sandboxes_have_ports_of_their_own(
    sandbox: Sandbox, client: DSecClient, args: MakeArgs
) -> None:
    await listening(sandbox)
    async with await client.run_container(args()) as other:
        with refusal(NotFound):
            await other.connect_port(8000)
