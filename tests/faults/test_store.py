"""The store, and what loads from it, fail in every way there is: no zeros, no hang, no leak."""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import os
import random
import signal
import tarfile
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import anyio
import pytest

from dsec import DSecClient, DSecContainerRunArgs, Sandbox
from dsec.base.errors import DataUnavailable, DeadlineExceeded, DsecError, NotFound, Unavailable
from dsec.images.lazy.client import FillerClient
from dsec.images.lazy.holder import read_holder
from dsec.linux import mounts
from tests.contract import image
from tests.contract.server import Server
from tests.kernel.faulty import Fault, Proxy, proxy
from tests.kernel.stores import registry_server

pytestmark = [pytest.mark.needs_root]

DATA = random.Random(5).randbytes(12 << 20)
SHA = hashlib.sha256(DATA).hexdigest()
ALL = ["sha256sum", "/data"]
BLOCK = 1 << 20


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


def settings(store: str, **more: object) -> str:
    # Without traces: what one test read would be fetched ahead for the next.
    values = {"store": store, "store_timeout_s": 1.0, "record_traces": False, **more}
    return "".join(f"{key} = {json.dumps(value)}\n" for key, value in values.items())


@pytest.fixture(scope="module")
def registry(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A registry with an image in it, published by a node that is no more."""
    place = tmp_path_factory.mktemp("registry")
    archive = image.build(place / "contract.tar")
    with tarfile.open(archive, "a") as tar:
        member = tarfile.TarInfo("data")
        member.size = len(DATA)
        tar.addfile(member, io.BytesIO(DATA))
    with registry_server(place) as address:
        publisher = Server("container", settings=settings(f"oci+http://{address}/env"))
        try:
            publisher.start()
            anyio.run(publish, publisher, archive)
        finally:
            publisher.stop()
            publisher.remove()
        yield address


async def publish(server: Server, archive: Path) -> None:
    async with server.client() as client:
        await client.images.import_archive(archive, image.NAME).wait()


@asynccontextmanager
async def cold_node(store: str, **more: object) -> AsyncIterator[tuple[Server, DSecClient]]:
    """A server that has nothing, over a store; afterwards nothing of it is left."""
    up = Server("container", settings=settings(store, **more))
    try:
        await anyio.to_thread.run_sync(up.start)
        async with up.client() as client:
            yield up, client
    except BaseException:
        print(up.tail())  # noqa: T201 - shown with the failure
        raise
    finally:
        await anyio.to_thread.run_sync(up.stop)
        left = [*mounts.mounts_under(up.base), *processes_naming(up.base)]
        up.remove()
        assert left == []


def processes_naming(place: Path) -> list[bytes]:
    """Command lines of this host that speak of a place."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            words = (entry / "cmdline").read_bytes()
            found += [words] if bytes(place) in words else []
    return found


@asynccontextmanager
async def faulty_node(
    registry: str, **more: object
) -> AsyncIterator[tuple[Proxy, Server, Sandbox]]:
    async with (
        proxy(registry) as between,
        cold_node(f"oci+http://{between.address}/env", **more) as (server, client),
        await client.run_container(DSecContainerRunArgs(container_image=image.NAME)) as sandbox,
    ):
        yield between, server, sandbox


async def read_data(sandbox: Sandbox) -> str | None:
    """The digest of what the sandbox reads; None if it is told that it cannot."""
    try:
        result = await sandbox.exec(ALL, timeout=120)
    except DataUnavailable:  # the program itself cannot be read
        return None
    if result.exit_code != 0:
        assert "Input/output error" in result.stderr or "I/O error" in result.stderr, result
        assert result.data_unavailable, "a failure of the platform's looks like the program's"
        return None
    return result.stdout.split()[0]


@pytest.mark.parametrize("fault", ["hang", "truncate", "flip", "cut", "500"])
async def test_a_store_that_fails_gives_an_error_and_comes_back(
    registry: str, fault: Fault
) -> None:
    async with faulty_node(registry) as (between, _server, sandbox):
        between.misbehave(fault)
        with anyio.fail_after(90):
            assert await read_data(sandbox) is None
            (found,) = (await sandbox.refresh()).faults
        assert found.code == "data_unavailable"
        between.behave()
        with anyio.fail_after(60):
            while (await sandbox.refresh()).faults:  # noqa: ASYNC110 - nobody is told
                await anyio.sleep(0.1)
            assert await read_data(sandbox) == SHA


async def test_a_fault_now_and_then_is_not_noticed(registry: str) -> None:
    async with faulty_node(registry) as (between, _server, sandbox):
        between.misbehave("flip", times=1)
        assert await read_data(sandbox) == SHA
        assert between.faults == 1


async def test_a_cold_creation_while_the_store_is_away(registry: str) -> None:
    async with (
        proxy(registry) as between,
        cold_node(f"oci+http://{between.address}/env") as (_server, client),
    ):
        between.misbehave("hang")
        args = DSecContainerRunArgs(container_image=image.NAME)
        with anyio.fail_after(60), pytest.raises((Unavailable, DeadlineExceeded)):
            await client.run_container(args, timeout=8)
        assert await client.list() == []
        between.behave()
        async with await client.run_container(args) as sandbox:
            assert await read_data(sandbox) == SHA


async def test_two_cold_creations_at_once(registry: str) -> None:
    async with cold_node(f"oci+http://{registry}/env") as (_server, client):
        args = DSecContainerRunArgs(container_image=image.NAME)
        found: list[str | None] = []

        async def use() -> None:
            async with await client.run_container(args) as sandbox:
                found.append(await read_data(sandbox))

        async with anyio.create_task_group() as group:
            for _ in range(8):
                group.start_soon(use)
        assert found == [SHA] * 8
        (view,) = await client.store.show()
        assert view.fetched_bytes < 2 * len(DATA)


async def test_a_cache_without_room_still_gives_right_bytes(registry: str) -> None:
    async with cold_node(f"oci+http://{registry}/env", cache_mb=1) as (_server, client):
        args = DSecContainerRunArgs(container_image=image.NAME)
        async with await client.run_container(args) as sandbox:
            assert await read_data(sandbox) == SHA
            (view,) = await client.store.show()
            assert view.cache_used_bytes <= 2 << 20


async def test_the_worker_killed_while_it_is_read_from(registry: str) -> None:
    seeded = random.Random(9)
    async with cold_node(f"oci+http://{registry}/env") as (server, client):
        args = DSecContainerRunArgs(container_image=image.NAME)
        async with await client.run_container(args) as sandbox, anyio.create_task_group() as group:
            found: list[str | None] = []

            async def read() -> None:
                found.append(await read_data(sandbox))

            group.start_soon(read)
            for _ in range(3):
                await anyio.sleep(seeded.uniform(0.02, 0.3))
                await kill_worker(server)
        assert found == [SHA]


async def kill_worker(server: Server) -> None:
    filler = FillerClient(server.run / "filler" / "socket")
    try:
        with anyio.fail_after(30):
            while True:
                try:
                    os.kill((await filler.status()).pid, signal.SIGKILL)
                except DsecError:
                    await anyio.sleep(0.05)
                else:
                    return
    finally:
        await filler.aclose()


async def test_the_whole_filler_killed_is_told_and_outlived(registry: str) -> None:
    """Sandboxes on the old mounts are told; new ones get new mounts."""
    async with cold_node(f"oci+http://{registry}/env") as (server, client):
        args = DSecContainerRunArgs(container_image=image.NAME)
        async with await client.run_container(args) as stranded:
            keeper = read_holder(server.run / "filler" / "lock")
            assert keeper is not None
            os.kill(keeper.pid, signal.SIGKILL)
            with anyio.fail_after(60):
                while not (await stranded.refresh()).faults:  # noqa: ASYNC110
                    await anyio.sleep(0.1)
                assert await read_data(stranded) is None
                async with await client.run_container(args) as fresh:
                    assert await read_data(fresh) == SHA
                    assert (await fresh.refresh()).faults == []


async def test_an_image_removed_while_it_is_used(registry: str) -> None:
    async with (
        cold_node(f"oci+http://{registry}/env") as (_one, using),
        cold_node(f"oci+http://{registry}/env") as (_two, operator),
    ):
        args = DSecContainerRunArgs(container_image=image.NAME)
        async with await using.run_container(args) as sandbox:
            await operator.images.remove(image.NAME)
            with pytest.raises((NotFound, DsecError)):
                await using.images.remove(image.NAME)
            assert await read_data(sandbox) == SHA
            # Published again for the tests that follow.
            await using.images.push(image.NAME).wait()
