"""Real sockets on loopback: one event loop, no clock that jumps."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.unit.edge.warden.names import NameServer
from tests.unit.edge.warden.sites import Authority, Sites
from tests.unit.edge.warden.world import World


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(scope="session")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("authority"))


@pytest.fixture
async def server() -> AsyncIterator[NameServer]:
    async with NameServer().running() as running:
        yield running


@pytest.fixture
async def sites(authority: Authority) -> AsyncIterator[Sites]:
    async with Sites(authority).running() as running:
        yield running


@pytest.fixture
async def world(server: NameServer, sites: Sites, authority: Authority) -> AsyncIterator[World]:
    async with World(server, sites, authority).running() as running:
        yield running


@pytest.fixture
def pins(tmp_path: Path) -> str:
    return str(tmp_path)
