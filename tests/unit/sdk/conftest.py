from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from dsec.sdk import DSecClient, Sandbox
from dsec.sdk.asgi import AsgiTransport
from tests.unit.sdk.fake import SANDBOX, FakePlatform


@pytest.fixture(params=["asyncio", "trio"])
def anyio_backend(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(autouse=True)
def no_credentials(
    monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory
) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path_factory.mktemp("config")))
    monkeypatch.delenv("DSEC_API_URL", raising=False)
    monkeypatch.delenv("DSEC_API_KEY", raising=False)


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dsec.sdk._patience.FIRST_PAUSE_S", 0.001)
    monkeypatch.setattr("dsec.sdk._patience.LONGEST_PAUSE_S", 0.01)


@pytest.fixture
def platform() -> FakePlatform:
    return FakePlatform()


@pytest.fixture
async def client(platform: FakePlatform) -> AsyncIterator[DSecClient]:
    async with AsgiTransport(platform) as transport:
        async with DSecClient(api_key="k3y", transport=transport, unreachable_s=1) as client:
            yield client


@pytest.fixture
async def box(client: DSecClient) -> Sandbox:
    return await client.get(SANDBOX)
