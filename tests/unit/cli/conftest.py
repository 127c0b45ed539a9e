from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from dsec.cli.app import app
from tests.unit.sdk.fake import FakePlatform
from tests.unit.sdk.served import served

Dsec = Callable[..., Result]


@pytest.fixture
def platform() -> FakePlatform:
    return FakePlatform()


@pytest.fixture
def url(
    platform: FakePlatform,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[str]:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path_factory.mktemp("config")))
    monkeypatch.setenv("DSEC_API_KEY", "k3y")
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).resolve().parents[3] / "src"))
    with served(platform) as address:
        monkeypatch.setenv("DSEC_API_URL", address)
        yield address


@pytest.fixture
def dsec(url: str) -> Dsec:
    runner = CliRunner()

    def run(*arguments: str, **kwargs: object) -> Result:
        return runner.invoke(app, list(arguments), catch_exceptions=False)

    return run
