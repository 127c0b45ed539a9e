"""Source distributions: cache, hashes, and a build back end that runs nothing of the package."""

from __future__ import annotations

import hashlib
import runpy
from pathlib import Path

import pytest

from dsec.base.errors import InvalidRequest, Unavailable
from dsec.rollout import sources
from dsec.rollout.tasks import Pin

DATA = b"an archive"


def make_pin(data: bytes = DATA) -> Pin:
    return Pin(package="Some-Thing", version="1.0", sha256=hashlib.sha256(data).hexdigest())


@pytest.fixture
def pip(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A pip that brings DATA; what it was asked for."""
    asked: list[str] = []

    async def run_pip(argv: list[str], scratch: Path) -> str:
        del argv
        asked.append((scratch / "pins.txt").read_text())
        (scratch / "out" / "some_thing-1.0.tar.gz").write_bytes(DATA)
        return ""

    monkeypatch.setattr(sources, "_run_pip", run_pip)
    return asked


async def test_fetched_once_then_cached(tmp_path: Path, pip: list[str]) -> None:
    pin = make_pin()
    told: list[bool] = []
    for _ in range(2):
        got = await sources.fetch_all(
            [pin, pin], tmp_path / "cache", lambda _pin, cached: told.append(cached)
        )
        assert got == {pin.sha256: DATA}
    assert told == [False, True]
    assert pip == [f"Some-Thing==1.0 --hash=sha256:{pin.sha256}\n"]


async def test_spoilt_cache_is_fetched_again(tmp_path: Path, pip: list[str]) -> None:
    pin = make_pin()
    await sources.fetch_all([pin], tmp_path)
    kept = sources._cached_at(tmp_path, pin)
    kept.write_bytes(b"spoilt")
    assert await sources.fetch_all([pin], tmp_path) == {pin.sha256: DATA}
    assert len(pip) == 2
    assert kept.read_bytes() == DATA


async def test_other_hash_is_refused(tmp_path: Path, pip: list[str]) -> None:
    with pytest.raises(InvalidRequest, match="sha256"):
        await sources.fetch_all([make_pin(b"something else")], tmp_path)
    assert not sources._cached_at(tmp_path, make_pin(b"something else")).exists()


async def test_pip_failing_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def run_pip(argv: list[str], scratch: Path) -> str:
        del argv, scratch
        return "no matching distribution"

    monkeypatch.setattr(sources, "_run_pip", run_pip)
    monkeypatch.setattr(sources, "ATTEMPTS", 1)
    with pytest.raises(Unavailable, match=r"Some-Thing 1\.0: no matching distribution"):
        await sources.fetch_all([make_pin()], tmp_path)


@pytest.mark.parametrize("backend", sources._BACKENDS)
def test_backend_answers_for_every_usual_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, backend: str
) -> None:
    scratch = sources._scratch(make_pin())
    module = runpy.run_path(str(scratch / "backend" / (backend.replace(".", "/") + ".py")))
    monkeypatch.chdir(tmp_path)
    Path("PKG-INFO").write_text("Metadata-Version: 2.1\nName: Some-Thing\nVersion: 1.0\n\ntext")
    Path("setup.py").write_text("raise SystemExit('the package ran')")
    made = module["prepare_metadata_for_build_wheel"](str(tmp_path))
    assert made == "Some_Thing-1.0.dist-info"
    assert "Version: 1.0" in (tmp_path / made / "METADATA").read_text()
    assert module["__legacy__"].get_requires_for_build_wheel() == []


def test_cache_dir(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "/c")
    assert sources.cache_dir() == Path("/c/dsec/sdists")
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", "/h")
    assert sources.cache_dir() == Path("/h/.cache/dsec/sdists")
