"""Sandboxes with a network: a real edge, the filter, the router, the warden, and a world beyond."""

from __future__ import annotations

import shutil
import socket
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anyio
import pytest

from dsec.images.service import ImageService, finish
from dsec.linux import mounts
from tests.kernel.networks import WORLD, listen, world
from tests.kernel.test_edge import Edge, aether, anyio_backend, edge, text

__all__ = ["aether", "anyio_backend", "edge"]
pytestmark = [pytest.mark.needs_root, pytest.mark.anyio]

GREETING = b"hello from the world\n"


@pytest.fixture(scope="session")
def store() -> Iterator[Path]:
    """An image of busybox."""
    with tempfile.TemporaryDirectory(prefix="enet") as directory:
        home = Path(directory)
        tree = home / "tree"
        for part in ("bin", "etc", "tmp", "root", "proc", "sys", "dev"):
            (tree / part).mkdir(parents=True)
        shutil.copy("/bin/busybox", tree / "bin/busybox")
        (tree / "bin/sh").symlink_to("busybox")
        (tree / "etc/passwd").write_text("root:x:0:0::/root:/bin/sh\n")
        (tree / "etc/resolv.conf").write_text("nameserver 203.0.113.53\n")

        async def load() -> None:
            async with ImageService(home / "images", home / "layers") as images:
                await finish(images.import_path(tree, "probe"))

        anyio.run(load)
        yield home
        for mount in mounts.mounts_under(home):
            mounts.umount(Path(mount.target), detach=True)


class Greeter:
    """A TCP server that says one line, and echoes after that."""

    def __init__(self, where: Path | None, address: str) -> None:
        self._listener = listen(where, address)
        self.address = address
        self.port: int = self._listener.getsockname()[1]
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def _serve(self) -> None:
        while True:
            try:
                peer, _ = self._listener.accept()
            except OSError:
                return
            threading.Thread(target=_echo, args=(peer,), daemon=True).start()

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._thread.join(10)


def _echo(peer: socket.socket) -> None:
    with peer:
        try:
            peer.sendall(GREETING)
            while data := peer.recv(4096):
                peer.sendall(data)
        except OSError:
            return


@pytest.fixture
def beyond() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="dw") as directory:
        with world(Path(directory), "enet") as place:
            yield place


@pytest.fixture
def greeter(beyond: Path) -> Iterator[Greeter]:
    greeter = Greeter(beyond, WORLD)
    yield greeter
    greeter.close()


async def sh(edge: Edge, sandbox: str, command: str) -> tuple[int, str]:
    body = {"argv": ["/bin/sh", "-c", command], "timeout_s": 30}
    answer = await edge.http.post(f"/v1/sandboxes/{sandbox}/commands/run", json=body)
    assert answer.status_code == 200, answer.text
    result: dict[str, Any] = answer.json()
    return result["exit_code"], text(result["stdout"]) + text(result["stderr"])


async def greeted(edge: Edge, sandbox: str, greeter: Greeter) -> bool:
    nc = f"busybox nc -w 5 {greeter.address} {greeter.port} </dev/null"
    return GREETING.decode() in (await sh(edge, sandbox, nc))[1]


async def rules(edge: Edge, sandbox: str) -> dict[str, Any]:
    answer = await edge.http.get(f"/v1/sandboxes/{sandbox}/network")
    assert answer.status_code == 200, answer.text
    view: dict[str, Any] = answer.json()
    return view


async def put_rules(edge: Edge, sandbox: str, allowed: dict[str, bool]) -> dict[str, Any]:
    answer = await edge.http.put(f"/v1/sandboxes/{sandbox}/network", json={"rules": allowed})
    assert answer.status_code == 200, answer.text
    view: dict[str, Any] = answer.json()
    return view


async def test_what_is_allowed_is_reached_and_nothing_else(edge: Edge, greeter: Greeter) -> None:
    sandbox = await edge.create(network=True)
    assert not await greeted(edge, sandbox, greeter)
    await put_rules(edge, sandbox, {f"tcp://{WORLD}:{greeter.port}": True})
    assert await greeted(edge, sandbox, greeter)
    await put_rules(edge, sandbox, {})
    assert not await greeted(edge, sandbox, greeter)
    denied = (await rules(edge, sandbox))["denied"]
    assert ("rule", WORLD, greeter.port) in {
        (each["reason"], each["address"], each.get("port")) for each in denied
    }
