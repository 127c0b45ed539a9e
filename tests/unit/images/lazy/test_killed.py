"""kill -9 at any step: what is marked is there, byte for byte."""

from __future__ import annotations

import os
import random
import signal
import sys
from pathlib import Path

import msgspec
import pytest

from dsec.images.disk import remove_tree
from dsec.images.lazy.config import FillerConfig
from dsec.images.store.opening import open_store
from dsec.linux.process import CommandFailed, run_async
from tests.unit.images.lazy import killed
from tests.unit.images.lazy.bench import CHUNK, Sample, sample

pytestmark = pytest.mark.anyio
ROOT = Path(__file__).parents[4]


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


async def status_of_run(config: Path, step: int) -> int | None:
    argv = [sys.executable, str(Path(killed.__file__)), str(config), str(step)]
    env = {**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'src'}"}
    try:
        await run_async(argv, timeout_s=60.0, env=env)
    except CommandFailed as failed:
        return failed.status
    return 0


def check(device: Sample, directory: Path) -> int:
    """How many chunks are marked; all of them are right."""
    marks = (directory / "map").read_bytes()
    data = (directory / "data").read_bytes()
    for chunk, mark in enumerate(marks):
        span = slice(chunk * CHUNK, (chunk + 1) * CHUNK)
        assert not mark or data[span] == device.content[span], f"chunk {chunk}"
    return sum(marks)


@pytest.mark.slow
@pytest.mark.parametrize("budget_bytes", [0, 48 * CHUNK], ids=["filling", "evicting"])
async def test_what_is_marked_is_right_whenever_it_was_killed(
    tmp_path: Path, budget_bytes: int
) -> None:
    device = sample(128, zeros=(0, 17, 18, 99))
    store = open_store(f"file://{tmp_path / 'store'}")
    (tmp_path / "pack").write_bytes(device.pack)
    await store.put_blob(tmp_path / "pack", device.pack_digest)
    config = FillerConfig(
        store=store.url,
        cache=str(tmp_path / "cache"),
        run=str(tmp_path / "run"),
        window_bytes=4 * CHUNK,
        budget_bytes=budget_bytes,
    )
    config.home.mkdir(parents=True)
    (tmp_path / "config.json").write_bytes(msgspec.json.encode(config))
    requests = msgspec.json.encode([device.request(tmp_path)])
    (tmp_path / "run" / "requests.json").write_bytes(requests)
    directory = tmp_path / "cache" / device.digest[7:]
    dice, ends, marked = random.Random(11), [], []
    for _ in range(5):
        ends.append(await status_of_run(tmp_path / "config.json", dice.randrange(3, 60)))
        marked.append(check(device, directory))
        if marked[-1] == 128:  # nothing is left to do for the next one
            remove_tree(directory)
    assert set(ends) <= {0, -signal.SIGKILL}
    assert ends.count(-signal.SIGKILL) >= 3
    assert max(marked) > 0
