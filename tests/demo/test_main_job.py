"""The main job, as the first page promises it: a Debian image, its ten lines, real tasks graded."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import anyio
import pytest

from dsec import DSecContainerRunArgs
from tests.contract.server import Server
from tests.pristine import pristine_node, snapshot

ROOT = Path(__file__).parents[2]
TASKS = ROOT / "examples" / "tasks"
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    """A server with the Debian image, built over the system's own mirror."""
    up = Server("container")
    up.start()
    try:
        anyio.run(_build, up)
        with pristine_node(lambda: snapshot(up.node)):
            yield up
        up.stop()
    except BaseException:
        up.kill()
        print(up.tail())  # noqa: T201 - shown with the failure
        raise
    up.remove()


async def _build(up: Server) -> None:
    async with up.client() as client:
        image = await client.images.build("debian").wait()
        assert image.size_bytes > 100 << 20
        # What the first sandbox of an image leaves on purpose is there before the node is looked at.
        async with await client.run_container(
            DSecContainerRunArgs(container_image="debian")
        ) as one:
            await one.exec(["true"])


def run(up: Server, *argv: str) -> subprocess.CompletedProcess[str]:
    """Run a program as a user of this server would."""
    env = {**os.environ, "DSEC_API_URL": up.url, "DSEC_API_KEY": up.key}
    return subprocess.run(argv, env=env, capture_output=True, text=True, timeout=600, check=False)


def test_the_ten_lines_of_the_first_page_work(server: Server) -> None:
    (program,) = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    done = run(server, sys.executable, "-c", program)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "0 45\nroot\n\n"


def test_every_recorded_agent_ends_as_recorded(server: Server) -> None:
    """Each agent once, and for each task an agent that changes nothing, which must fail."""
    done = run(
        server,
        *(sys.executable, "-m", "dsec.rollout.demo"),
        *("--tasks", str(TASKS), "--check", "--json"),
    )
    report = json.loads(done.stdout[done.stdout.index("{\n") :])["report"]
    assert done.returncode == 0, done.stderr[-3000:]
    assert report["mismatches"] == []
    assert len(list(TASKS.glob("*/task.toml"))) >= 8


def test_the_command_line_works_as_the_first_page_says(server: Server) -> None:
    dsec = str(Path(sys.executable).with_name("dsec"))
    done = run(server, dsec, "run", "--rm", "debian", "--", "python3", "-c", "print(45)")
    assert (done.returncode, done.stdout) == (0, "45\n"), done.stderr
