"""Files, trees and ports of one sandbox, in terms of its channel. Paths are bytes."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator, AsyncIterator
from typing import Any, Literal

import msgspec

from dsec.base.errors import Unavailable
from dsec.edge.channel import AetherChannel, AetherStream, Data, Item
from dsec.edge.lifecycle.owner import Owner
from dsec.wire.sandbox import FileInfo, WatchEvent, WatchStarted

CALL_DEADLINE_S = 60.0
TREE_DEADLINE_S = 1800.0
"""For what walks a whole tree."""

Args = dict[str, Any]


async def stat(owner: Owner, args: Args) -> FileInfo:
    """Look at a file."""
    return await _info(owner, "stat", args)


async def mkdir(owner: Owner, args: Args) -> FileInfo:
    """Make a directory."""
    return await _info(owner, "mkdir", args)


async def move(owner: Owner, args: Args) -> FileInfo:
    """Rename a file."""
    return await _info(owner, "move", args)


async def remove(owner: Owner, args: Args) -> int:
    """Remove a file or tree; how many entries went."""
    async with owner.use(TREE_DEADLINE_S, "remove") as channel:
        answer = await channel.call("remove", args)
        return int(answer["removed"])


async def listdir(owner: Owner, args: Args) -> list[FileInfo]:
    """List a directory."""
    async with owner.use(TREE_DEADLINE_S, "listdir") as channel:
        answer = await channel.collect("listdir", args)
    batches = (msgspec.msgpack.decode(payload)["entries"] for payload in answer.more)
    return [file_info(raw) for batch in batches for raw in batch]


@contextlib.asynccontextmanager
async def reading(owner: Owner, args: Args) -> AsyncIterator[tuple[FileInfo, AsyncIterator[bytes]]]:
    """Read a file: what it is, then its bytes as fast as they are taken."""
    async with owner.use() as channel:
        async with channel.open("read", args) as stream:
            with channel.within(CALL_DEADLINE_S, "read"):
                first = await _first_event(stream)
            yield file_info(first), _bytes_of(stream)


async def write(owner: Owner, args: Args, data: AsyncIterator[bytes]) -> FileInfo:
    """Write a file as its bytes come. If they break off, the old file stays."""
    async with owner.use() as channel:
        async with channel.open("write", args) as stream:
            return file_info(await _sent(channel, stream, data))


@contextlib.asynccontextmanager
async def packing(owner: Owner, args: Args) -> AsyncIterator[AsyncIterator[bytes]]:
    """Read a tree as one tar stream."""
    async with owner.use() as channel:
        async with channel.open("tar_out", args) as stream:
            # What is wrong with the path is known by the first item, before any answer has begun.
            first = await anext(stream, None)
            yield _bytes_of(stream, first)


async def unpack(owner: Owner, args: Args, data: AsyncIterator[bytes]) -> int:
    """Unpack a tar stream as it comes; how many entries there were."""
    async with owner.use() as channel:
        async with channel.open("tar_in", args) as stream:
            answer = await _sent(channel, stream, data)
            return int(answer["entries"])


async def watch(owner: Owner, args: Args) -> AsyncGenerator[WatchStarted | WatchEvent, None]:
    """Report changes below a directory until closed."""
    async with owner.use() as channel:
        async with channel.open("watch", args) as stream:
            async for item in stream:
                if not isinstance(item, dict):
                    continue
                yield WatchStarted() if "watching" in item else _change(item)


@contextlib.asynccontextmanager
async def connecting(owner: Owner, port: int) -> AsyncIterator[AetherStream]:
    """Connect to a port inside; on entry it is connected."""
    async with owner.use() as channel:
        async with channel.open("connect", {"port": port}) as stream:
            with channel.within(CALL_DEADLINE_S, "connect"):
                await _first_event(stream)
            yield stream


def file_info(raw: dict[str, Any]) -> FileInfo:
    """A file as the API shows it: names are bytes inside, text outside where they can be."""
    fields = dict(raw)
    fields["path"], fields["path_b64"] = _texts(raw.get("path", b""))
    for name in ("target", "user", "group"):
        if isinstance(fields.get(name), bytes):
            fields[name] = fields[name].decode("utf-8", "replace")
    known = {k: v for k, v in fields.items() if v is not None}
    return msgspec.convert(known, FileInfo, strict=False)


def _texts(path: bytes | str) -> tuple[str, bytes]:
    raw = path.encode() if isinstance(path, str) else path
    try:
        return raw.decode(), b""
    except UnicodeDecodeError:
        return raw.decode("utf-8", "replace"), raw


def _change(item: dict[str, Any]) -> WatchEvent:
    path, path_b64 = _texts(item["path"])
    event: Literal["create", "write", "remove", "rename", "chmod", "overflow"] = item["event"]
    return WatchEvent(path=path, path_b64=path_b64, event=event)


async def _info(owner: Owner, method: str, args: Args) -> FileInfo:
    async with owner.use(CALL_DEADLINE_S, method) as channel:
        return file_info(await channel.call(method, args))


async def _first_event(stream: AetherStream) -> dict[str, Any]:
    async for item in stream:
        if isinstance(item, dict):
            return item
        break
    raise Unavailable("the sandbox answered out of order")


async def _bytes_of(stream: AetherStream, first: Item | None = None) -> AsyncIterator[bytes]:
    if isinstance(first, Data):
        yield first.data
    async for item in stream:
        if isinstance(item, Data):
            yield item.data


async def _sent(
    channel: AetherChannel, stream: AetherStream, data: AsyncIterator[bytes]
) -> dict[str, Any]:
    await stream.send_all(data)
    with channel.within(TREE_DEADLINE_S, "the end of the upload"):
        answer: dict[str, Any] = await stream.finish()
    return answer
