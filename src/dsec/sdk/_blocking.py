"""What the synchronous SDK asks of its surroundings; `_aio` is its twin, name for name."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Protocol, TypeVar

from dsec.base.errors import DsecError

T = TypeVar("T")
CHUNK_BYTES = 256 << 10
AT_ONCE = 16
"""Of many calls that are independent."""

Lock = threading.Lock
sleep = time.sleep  # noqa: TID251 - the synchronous client blocks, that is what it is for
monotonic = time.monotonic


def given_up(exc: BaseException) -> bool:
    """Whether the caller no longer wants an answer."""
    return isinstance(exc, KeyboardInterrupt)


@contextmanager
def finishing(timeout: float) -> Iterator[None]:  # noqa: ARG001 - nobody cancels a thread
    """Let tidying-up finish."""
    yield


def each(function: Callable[[T], None], items: Iterable[T]) -> None:
    """Call a function with each item, `AT_ONCE` at a time."""
    with ThreadPoolExecutor(AT_ONCE, "dsec-each") as threads:
        for _ in threads.map(function, items):
            pass


def in_thread(function: Callable[[], T]) -> T:
    """Run something that blocks."""
    return function()


def read_file(path: Path) -> Iterator[bytes]:
    """A local file in chunks."""
    with path.open("rb") as file:
        while data := file.read(CHUNK_BYTES):
            yield data


class Source(Protocol):
    """Something bytes come out of, b"" at the end."""

    def receive(self) -> bytes:
        """The next bytes."""
        ...


def consume_blocking(source: Source, consumer: Callable[[Callable[[], bytes]], T]) -> T:
    """Run a consumer of a stream; it pulls chunks with the function it gets."""
    return consumer(source.receive)


def iterate_blocking(iterator: Iterator[bytes]) -> Iterator[bytes]:
    """Draw from an iterator."""
    return iterator


def pulling(source: Source) -> Callable[[], bytes]:
    """A function that pulls the next chunk."""
    return source.receive


class Pipe(Protocol):
    """A bidirectional stream with half close."""

    def send(self, data: bytes) -> None:
        """Send bytes."""
        ...

    def receive(self) -> bytes:
        """The next bytes, b"" at the end."""
        ...

    def send_eof(self) -> None:
        """Say that no more will be sent."""
        ...

    def close(self) -> None:
        """Close both directions."""
        ...


@contextmanager
def listen(dial: Callable[[], Pipe], host: str, port: int) -> Iterator[tuple[str, int]]:
    """Listen locally; each connection is joined, by two threads, to a freshly dialled pipe."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.create_server((host, port), family=family) as listener:
        server = _Server(listener, dial)
        thread = threading.Thread(target=server.run, name="dsec-forward", daemon=True)
        thread.start()
        try:
            bound = listener.getsockname()
            yield bound[0], bound[1]
        finally:
            server.close()
            thread.join(5)


class _Server:
    def __init__(self, listener: socket.socket, dial: Callable[[], Pipe]) -> None:
        self._listener = listener
        self._dial = dial
        self._open: set[socket.socket] = set()
        self._lock = threading.Lock()
        self._closing = False

    def run(self) -> None:
        """Accept until closed."""
        while not self._closing:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            with self._lock:
                self._open.add(client)
            threading.Thread(target=self._serve, args=(client,), daemon=True).start()

    def close(self) -> None:
        """Stop accepting and hang up on everybody."""
        self._closing = True
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        with self._lock:
            for client in self._open:
                with suppress(OSError):
                    client.shutdown(socket.SHUT_RDWR)

    def _serve(self, client: socket.socket) -> None:
        try:
            with client, suppress(DsecError, OSError):  # a port nobody listens on: just hang up
                pipe = self._dial()
                try:
                    _join(client, pipe)
                finally:
                    pipe.close()
        finally:
            with self._lock:
                self._open.discard(client)


def _join(client: socket.socket, pipe: Pipe) -> None:
    def upstream() -> None:
        with suppress(DsecError, OSError):
            while data := client.recv(CHUNK_BYTES):
                pipe.send(data)
            pipe.send_eof()

    sender = threading.Thread(target=upstream, daemon=True)
    sender.start()
    with suppress(DsecError, OSError):
        while data := pipe.receive():
            client.sendall(data)
        client.shutdown(socket.SHUT_WR)
    sender.join()


def as_iterator(data: Iterable[bytes]) -> Iterator[bytes]:
    """Any iterable of bytes as an iterator."""
    return iter(data)
