"""The fake platform on a real socket, and a server that says byte for byte what it is told."""

from __future__ import annotations

import base64
import hashlib
import re
import socket
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Self

import uvicorn

from tests.unit.sdk.fake import FakePlatform


@contextmanager
def served(platform: FakePlatform) -> Iterator[str]:
    """An address the platform answers at, by uvicorn in a thread."""
    listener = socket.create_server(("127.0.0.1", 0))
    config = uvicorn.Config(
        platform, log_level="critical", lifespan="off", ws="websockets-sansio", loop="asyncio"
    )
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        server.should_exit = server.force_exit = True
        thread.join(10)
        listener.close()


class Scripted:
    """Each connection gets the next script: what is said after each request on it, then the end."""

    def __init__(self, *scripts: Sequence[bytes], host: str = "127.0.0.1") -> None:
        self._scripts = list(scripts)
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._host = f"[{host}]" if ":" in host else host
        self._listener = socket.create_server((host, 0), family=family)
        self.requests: list[bytes] = []
        self.connections = 0
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    @property
    def url(self) -> str:
        return f"http://{self._host}:{self._listener.getsockname()[1]}"

    def _run(self) -> None:
        for script in self._scripts:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            with client, suppress(OSError):
                self.connections += 1
                for answer in script:
                    data = client.recv(1 << 20)
                    if not data:
                        break
                    self.requests.append(data)
                    client.sendall(answer.replace(b"ACCEPT", _accept(data)))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._thread.join(5)


def _accept(request: bytes) -> bytes:
    key = re.search(rb"(?i)sec-websocket-key: (\S+)", request)
    told = (key[1] if key else b"") + b"258EAFA5-E914-47DA-95CA-C5AB0DC85B11"
    return base64.b64encode(hashlib.sha1(told).digest())


UPGRADE = (
    b"HTTP/1.1 101 x\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
    b"Sec-WebSocket-Accept: ACCEPT\r\n\r\n"
)
