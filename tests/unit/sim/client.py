"""The smallest edge that can talk to a simulated aether: frames in, frames out."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import anyio
import msgspec
from anyio.abc import ByteStream

from dsec.edge.record import SandboxRecord
from dsec.edge.sim import Faults, SimBackend, SimHost
from dsec.edge.sim.pipes import Mailbox
from dsec.images.records import Environment
from dsec.wire.frames import Decoder, Frame, Kind, encode
from dsec.wire.public_v1 import ImageView
from dsec.wire.sandbox import Limits, SandboxSpec


class Failed(Exception):
    """An ERROR frame."""

    def __init__(self, body: dict[str, Any]) -> None:
        super().__init__(body)
        self.code: str = body["code"]
        self.kind: str = body.get("kind", "")


class Call:
    """One stream."""

    def __init__(self, client: Client, number: int) -> None:
        self.number = number
        self._client = client
        self._frames: Mailbox[Frame] = Mailbox()
        self.events: list[dict[str, Any]] = []
        self.received: dict[int, bytearray] = {}

    def push(self, frame: Frame) -> None:
        self._frames.put(frame)

    async def send(self, kind: Kind, payload: bytes = b"") -> None:
        await self._client.send(Frame(kind, self.number, payload))

    async def next(self) -> Frame:
        frame = await anext(self._frames)
        if frame.kind == Kind.EVENT:
            self.events.append(msgspec.msgpack.decode(frame.payload))
        elif frame.kind == Kind.DATA:
            self.received.setdefault(frame.channel, bytearray()).extend(frame.payload)
        return frame

    async def until(self, kind: Kind) -> Frame:
        while (frame := await self.next()).kind != kind:
            if frame.kind == Kind.ERROR:
                raise Failed(msgspec.msgpack.decode(frame.payload))
        return frame

    async def result(self) -> Any:
        while True:
            frame = await self.next()
            if frame.kind == Kind.DATA:
                await self.send(Kind.CREDIT, len(frame.payload).to_bytes(4, "big"))
            elif frame.kind == Kind.RESULT:
                return msgspec.msgpack.decode(frame.payload)
            elif frame.kind == Kind.ERROR:
                raise Failed(msgspec.msgpack.decode(frame.payload))


class Client:
    """One connection."""

    def __init__(self, stream: ByteStream) -> None:
        self._stream = stream
        self._next = 0
        self._calls: dict[int, Call] = {}
        self.pongs: list[bytes] = []
        self.closed = anyio.Event()

    async def read(self) -> None:
        decoder = Decoder()
        try:
            while True:
                for frame in decoder.feed(await self._stream.receive()):
                    if frame.kind == Kind.PONG:
                        self.pongs.append(frame.payload)
                    else:
                        self._calls[frame.stream].push(frame)
        except (anyio.EndOfStream, anyio.ClosedResourceError):
            self.closed.set()

    async def send(self, frame: Frame) -> None:
        await self._stream.send(encode(frame))

    async def open(self, method: str, **arguments: object) -> Call:
        self._next += 1
        call = self._calls[self._next] = Call(self, self._next)
        await call.send(Kind.OPEN, msgspec.msgpack.encode({"m": method, **arguments}))
        return call

    async def call(self, method: str, **arguments: object) -> Any:
        return await (await self.open(method, **arguments)).result()

    async def send_all(self, method: str, data: bytes, **arguments: object) -> Any:
        """A call that takes data; only for what fits the initial credit."""
        call = await self.open(method, **arguments)
        if data:
            await call.send(Kind.DATA, data)
        await call.send(Kind.END)
        return await call.result()

    async def run(self, *argv: str, **more: object) -> dict[str, Any]:
        command_id = more.pop("command_id", f"c{self._next}")
        result: dict[str, Any] = await self.call(
            "run", command_id=command_id, argv=list(argv), **more
        )
        return result

    async def shell(self, text: str, **more: object) -> tuple[int, str]:
        result = await self.call("run", command_id=f"c{self._next}", shell=text, **more)
        return result["exit_code"], os.fsdecode(joined(result, "stdout"))


def joined(result: dict[str, Any], stream: str) -> bytes:
    captured = result[stream]
    whole: bytes = captured["head"] + captured["tail"]
    return whole


def record(sandbox: str = "sbx0000a", **spec: Any) -> SandboxRecord:
    return SandboxRecord(
        id=sandbox,
        project="test",
        spec=SandboxSpec(image="test", backend="sim", limits=Limits(pids=64), **spec),
        environment=Environment(
            image=ImageView(
                name="test", digest="sha256:0", layers=[], env={"FROM": "image", "ONLY": "image"}
            )
        ),
        created_at=0.0,
        uid_base=1_000_000,
        directory="/nonexistent",
        socket="",
    )


@asynccontextmanager
async def simulated(
    rec: SandboxRecord | None = None, *, faults: Faults | None = None, host: SimHost | None = None
) -> AsyncIterator[tuple[SimBackend, SandboxRecord]]:
    """A backend with one sandbox."""
    backend = SimBackend(faults=faults, host=host)
    rec = rec or record()
    async with backend.running():
        await backend.launch(rec)
        yield backend, rec


@asynccontextmanager
async def connected(rec: SandboxRecord | None = None) -> AsyncIterator[Client]:
    """A client of a fresh sandbox."""
    async with simulated(rec) as (backend, made), anyio.create_task_group() as group:
        client = Client(await backend.connect(made))
        group.start_soon(client.read)
        yield client
        group.cancel_scope.cancel()
