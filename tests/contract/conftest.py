"""One server for each backend, a client and a fresh sandbox for each test."""

from __future__ import annotations

import functools
import inspect
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import anyio
import pytest

from dsec import DSecClient, DSecContainerRunArgs, Sandbox
from tests.contract import image
from tests.contract.capabilities import BACKENDS, missing
from tests.contract.parts import Parts
from tests.contract.server import Server
from tests.pristine import pristine_node, snapshot

DEADLINE_S = 60.0
MakeArgs = Callable[..., DSecContainerRunArgs]
_left_out: dict[str, set[str]] = {}


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "needs(*capabilities): where the behaviour applies")
    config.addinivalue_line("markers", "deadline(seconds): how long the test may take")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Every asynchronous test of the suite has a deadline."""
    here = Path(__file__).parent
    for item in items:
        if not isinstance(item, pytest.Function) or here not in item.path.parents:
            continue
        if inspect.iscoroutinefunction(item.obj):
            marker = item.get_closest_marker("deadline")
            item.obj = _within(item.obj, marker.args[0] if marker else DEADLINE_S)


def _within(test: Callable[..., Awaitable[None]], seconds: float) -> Callable[..., Awaitable[None]]:
    @functools.wraps(test)
    async def timed(**given: Any) -> None:
        with anyio.fail_after(seconds):
            await test(**given)

    return timed


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if not _left_out:
        return
    terminalreporter.section("behaviours that do not apply")
    for reason, tests in sorted(_left_out.items()):
        terminalreporter.line(f"{reason}")
        for test in sorted(tests):
            terminalreporter.line(f"    {test}")


@pytest.fixture(scope="session")
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(scope="session", params=BACKENDS)
def backend(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.fixture(autouse=True)
def applies(request: pytest.FixtureRequest, backend: str) -> None:
    """Leave out what the table says does not apply, and remember it for the summary."""
    for marker in request.node.iter_markers("needs"):
        if reason := missing(backend, marker.args):
            _left_out.setdefault(f"{backend} - {reason}", set()).add(request.node.nodeid)
            pytest.skip(reason)


@pytest.fixture(scope="session")
def server(backend: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server with the test image, on which one sandbox has lived and ended already."""
    archive = tmp_path_factory.mktemp("image") / "contract.tar"
    (image.build if backend == "container" else image.empty)(archive)
    up = Server(backend)
    try:
        up.start()
        anyio.run(_prepare, up, archive)
        yield up
    except BaseException:
        print(up.tail())  # noqa: T201 - shown with the failure
        raise
    finally:
        up.stop()
        up.remove()


async def _prepare(up: Server, archive: Path) -> None:
    async with up.client() as client:
        await client.images.import_archive(archive, image.NAME).wait()
        args = DSecContainerRunArgs(container_image=image.NAME, backend=_wire_name(up.backend))
        async with await client.run_container(args) as sandbox:
            await sandbox.exec(["/probe", "echo"])


def _wire_name(backend: str) -> Any:
    return backend


@pytest.fixture(scope="module", autouse=True)
def nothing_left(server: Server) -> Iterator[None]:
    """A module of tests leaves the node as it found it."""
    with pristine_node(lambda: snapshot(server.node)):
        yield


@pytest.fixture
async def client(server: Server) -> AsyncIterator[DSecClient]:
    async with server.client() as opened:
        yield opened


@pytest.fixture
def args(backend: str) -> MakeArgs:
    """Arguments for a sandbox of the backend under test."""

    def make(**given: Any) -> DSecContainerRunArgs:
        given.setdefault("container_image", image.NAME)
        return DSecContainerRunArgs(backend=_wire_name(backend), **given)

    return make


@pytest.fixture
async def sandbox(client: DSecClient, args: MakeArgs) -> AsyncIterator[Sandbox]:
    """A fresh sandbox with default limits."""
    async with await client.run_container(args()) as made:
        yield made


@pytest.fixture
async def parts(client: DSecClient, backend: str, tmp_path: Path) -> AsyncIterator[Parts]:
    """Publishes layers and imports images; all of them are gone after the test."""
    made = Parts(client, tmp_path, backend)
    yield made
    await made.close()
