"""What the synchronous SDK asks of its surroundings; `_aio` is its twin, name for name."""

from __future__ import annotations

import math
import select
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Protocol, TypeVar

from dsec.base.errors import DsecError
from dsec.sdk._http import ConnectionFailed, watch_peer

T = TypeVar("T")
CONNECT_TIMEOUT_S = 10.0
CHUNK_BYTES = 256 << 10

Lock = threading.Lock
sleep = time.sleep  # noqa: TID251 - the synchronous client blocks, that is what it is for
monotonic = time.monotonic


class Stream:
    """A TCP connection, plain or encrypted; its errors are ConnectionFailed, its end b""."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock

    def stale(self) -> bool:
        """Whether the other side has said something, usually goodbye, while this was idle."""
        try:
            return bool(_readable(self._sock, 0))
        except (OSError, ValueError):
            return True

    def receive(self, timeout: float) -> bytes:
        """What has come; b"" at the end."""
        self._limit(timeout)
        try:
            return self._sock.recv(CHUNK_BYTES)
        except TimeoutError:
            raise ConnectionFailed(
                f"nothing heard for {timeout:.0f} s", sent=True, silence=True
            ) from None
        except ssl.SSLEOFError:
            return b""
        except (OSError, ValueError) as exc:
            raise ConnectionFailed(f"connection lost: {_words(exc)}", sent=True) from exc

    def send(self, data: bytes, timeout: float) -> None:
        """Send all of it."""
        self._limit(timeout)
        try:
            self._sock.sendall(data)
        except TimeoutError:
            raise ConnectionFailed(f"nothing taken for {timeout:.0f} s", sent=True) from None
        except (OSError, ValueError) as exc:
            raise ConnectionFailed(f"connection lost: {_words(exc)}", sent=True) from exc

    def _limit(self, timeout: float) -> None:
        # A time-out belongs to the socket, not to the call: a receive and a send in two threads
        # (ports) may each get the other's, and both cope with that.
        with suppress(OSError):
            self._sock.settimeout(None if math.isinf(timeout) else max(timeout, 0.001))

    def close(self) -> None:
        """Close it, without waiting for the other side."""
        with suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)
        self._sock.close()


def _readable(sock: socket.socket, timeout: float) -> bool:
    if not hasattr(select, "poll"):
        return bool(select.select([sock], [], [], timeout)[0])
    poll = select.poll()
    poll.register(sock, select.POLLIN)
    return bool(poll.poll(timeout * 1000))


def _words(exc: BaseException) -> str:
    return str(exc) or type(exc).__name__


def connect(
    host: str, port: int, tls: ssl.SSLContext | None, timeout: float = CONNECT_TIMEOUT_S
) -> Stream:
    """Open a connection.

    Raises:
        ConnectionFailed: with `sent` false: nothing of a request has left.
    """
    try:
        sock = socket.create_connection((host, port), timeout)
    except OSError as exc:
        raise ConnectionFailed(f"{host}:{port}: {_words(exc)}", sent=False) from exc
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    watch_peer(sock)
    if tls is None:
        return Stream(sock)
    try:
        return Stream(tls.wrap_socket(sock, server_hostname=host))
    except OSError as exc:
        sock.close()
        raise ConnectionFailed(f"{host}:{port}: TLS: {_words(exc)}", sent=False) from exc


def given_up(exc: BaseException) -> bool:
    """Whether the caller no longer wants an answer."""
    return isinstance(exc, KeyboardInterrupt)


@contextmanager
def finishing(timeout: float) -> Iterator[None]:  # noqa: ARG001 - nobody cancels a thread
    """Let tidying-up finish."""
    yield


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
