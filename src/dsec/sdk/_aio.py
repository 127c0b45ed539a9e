"""What the asynchronous SDK asks of its surroundings; `_blocking` is its twin, name for name."""

from __future__ import annotations

import ssl
from collections.abc import AsyncIterable, AsyncIterator, Awaitable, Callable, Iterable, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from pathlib import Path
from typing import Protocol, TypeVar

import anyio
import anyio.abc
import anyio.from_thread

from dsec.base.errors import DsecError
from dsec.kit import blocking

T = TypeVar("T")
CHUNK_BYTES = 256 << 10
AT_ONCE = 16
"""Of many calls that are independent."""

Lock = anyio.Lock
sleep = anyio.sleep
monotonic = anyio.current_time


_BROKEN = (anyio.BrokenResourceError, anyio.ClosedResourceError, OSError, ssl.SSLError)


def given_up(exc: BaseException) -> bool:
    """Whether the caller no longer wants an answer."""
    return isinstance(exc, anyio.get_cancelled_exc_class())


@contextmanager
def finishing(timeout: float) -> Iterator[None]:
    """Let tidying-up finish although the caller is being cancelled, but not for ever."""
    with anyio.move_on_after(timeout, shield=True):
        yield


async def each(function: Callable[[T], Awaitable[None]], items: Iterable[T]) -> None:
    """Call a function with each item, `AT_ONCE` at a time."""
    left = iter(items)

    async def work() -> None:
        for item in left:
            await function(item)

    async with anyio.create_task_group() as group:
        for _ in range(AT_ONCE):
            group.start_soon(work)


async def in_thread(function: Callable[[], T]) -> T:
    """Run something that blocks."""
    return await blocking.in_thread("disk", function)


async def read_file(path: Path) -> AsyncIterator[bytes]:
    """A local file in chunks."""
    with await blocking.in_thread("disk", path.open, "rb") as file:
        while data := await blocking.in_thread("disk", file.read, CHUNK_BYTES):
            yield data


class Source(Protocol):
    """Something bytes come out of, b"" at the end."""

    async def receive(self) -> bytes:
        """The next bytes."""
        ...


async def consume_blocking(source: Source, consumer: Callable[[Callable[[], bytes]], T]) -> T:
    """Run a blocking consumer of a stream in a thread; it pulls chunks with the function it gets."""

    def pull() -> bytes:
        return anyio.from_thread.run(source.receive)

    return await blocking.in_thread("disk", consumer, pull)


async def iterate_blocking(iterator: Iterator[bytes]) -> AsyncIterator[bytes]:
    """Draw from a blocking iterator in a thread."""
    while data := await blocking.in_thread("disk", next, iterator, b""):
        yield data


def pulling(source: Source) -> Callable[[], bytes]:
    """A function that pulls the next chunk, for what `iterate_blocking` runs in a thread."""
    return lambda: anyio.from_thread.run(source.receive)


class Pipe(Protocol):
    """A bidirectional stream with half close."""

    async def send(self, data: bytes) -> None:
        """Send bytes."""
        ...

    async def receive(self) -> bytes:
        """The next bytes, b"" at the end."""
        ...

    async def send_eof(self) -> None:
        """Say that no more will be sent."""
        ...

    async def aclose(self) -> None:
        """Close both directions."""
        ...


@asynccontextmanager
async def listen(
    dial: Callable[[], Awaitable[Pipe]], host: str, port: int
) -> AsyncIterator[tuple[str, int]]:
    """Listen locally; each connection is joined to a freshly dialled pipe."""

    async def serve(client: anyio.abc.SocketStream) -> None:
        async with client:
            with suppress(DsecError, *_BROKEN):  # a port nobody listens on: just hang up
                pipe = await dial()
                try:
                    await _join(client, pipe)
                finally:
                    with finishing(5):
                        await pipe.aclose()

    listener = await anyio.create_tcp_listener(local_host=host, local_port=port)
    async with listener, anyio.create_task_group() as group:
        group.start_soon(listener.serve, serve)
        yield host, listener.extra(anyio.abc.SocketAttribute.local_port)  # noqa: S610 - not Django
        group.cancel_scope.cancel()


async def _join(client: anyio.abc.SocketStream, pipe: Pipe) -> None:
    async def upstream() -> None:
        with suppress(DsecError, *_BROKEN):
            async for data in client:
                await pipe.send(data)
            await pipe.send_eof()

    async with anyio.create_task_group() as group:
        group.start_soon(upstream)
        with suppress(DsecError, *_BROKEN):
            while data := await pipe.receive():
                await client.send(data)
            await client.send_eof()


async def as_iterator(data: AsyncIterable[bytes] | Iterable[bytes]) -> AsyncIterator[bytes]:
    """Any iterable of bytes as an asynchronous one."""
    if isinstance(data, AsyncIterable):
        async for item in data:
            yield item
    else:
        for item in data:
            yield item
