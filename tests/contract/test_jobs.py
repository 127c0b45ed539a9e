"""A job's sandboxes as one, and the page that tells how a preempted trainer goes on."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

import anyio
import pytest

from dsec import Conflict, DSecClient
from tests.contract import image
from tests.contract.conftest import MakeArgs
from tests.contract.server import Server

PAGE = Path(__file__).parents[2] / "docs" / "howto" / "jobs.md"
COUNT = 6


async def states(client: DSecClient, job: str) -> list[str]:
    return [view.state for view in await client.list(job=job)]


async def test_a_job_pauses_resumes_and_ends_as_one(client: DSecClient, args: MakeArgs) -> None:
    lease = await client.jobs.lease("one")
    made = [
        await client.run_container(args(job="one", epoch=lease.epoch, step="1"))
        for _ in range(COUNT)
    ]
    other = await client.run_container(args(job="other"))
    assert {box.view.epoch for box in made} == {lease.epoch}
    for act, state in (("pause", "paused"), ("resume", "running"), ("reap", "stopped")):
        items = [item async for item in client.jobs.each(act, "one")]
        assert {item.id for item in items} == {box.id for box in made}
        assert [item.sandbox and item.sandbox.state for item in items] == [state] * COUNT
        assert await states(client, "one") == [state] * COUNT
    assert await states(client, "other") == ["running"]
    await other.stop()
    job = await client.jobs.get("one")
    assert (job.epoch, job.sandboxes) == (lease.epoch, 0)
    await client.jobs.release("one", lease.epoch)


async def test_a_new_epoch_ends_what_is_older(client: DSecClient, args: MakeArgs) -> None:
    first = await client.jobs.lease("two")
    old = await client.run_container(args(job="two", epoch=first.epoch))
    second = await client.jobs.lease("two")
    new = await client.run_container(args(job="two", epoch=second.epoch))
    while (await client.get(old.id)).view.state != "stopped":  # noqa: ASYNC110 - nobody is told
        await anyio.sleep(0.05)
    with pytest.raises(Conflict) as refused:
        await client.run_container(args(job="two", epoch=first.epoch))
    assert refused.value.details["epoch"] == second.epoch
    assert await states(client, "two") == ["running", "stopped"]
    await new.stop()
    await client.jobs.release("two", second.epoch)


async def test_a_lease_that_lapses_pauses_its_sandboxes(client: DSecClient, args: MakeArgs) -> None:
    lease = await client.jobs.lease("three")
    made = await client.run_container(args(job="three", epoch=lease.epoch))
    await client.jobs.lease("three", epoch=lease.epoch, ttl_s=1)
    while (await client.get(made.id)).view.state != "paused":  # noqa: ASYNC110 - nobody is told
        await anyio.sleep(0.05)
    with pytest.raises(Conflict, match="lapsed"):
        await client.run_container(args(job="three", epoch=lease.epoch))
    await client.jobs.lease("three", epoch=lease.epoch)
    assert await states(client, "three") == ["paused"]
    assert (await made.exec(["/probe", "echo", "here"])).stdout == "here\n"
    await made.stop()
    await client.jobs.release("three", lease.epoch)


@pytest.mark.deadline(120)
async def test_the_page_about_jobs_is_true(server: Server, tmp_path: Path) -> None:
    (program,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    # Any image with a shell will do.
    program = program.replace('"debian"', repr(image.NAME))
    env = {**os.environ, "DSEC_API_URL": server.url, "DSEC_API_KEY": server.key}
    env |= {"HOME": str(tmp_path), "TMPDIR": str(tmp_path)}
    done = await anyio.run_process([sys.executable, "-c", program], env=env, check=False)
    assert done.returncode == 0, done.stderr.decode()
    said = done.stdout.decode()
    assert said == "epoch 1 ['step']\nepoch 1 ['step', 'step']\nrefused: superseded\n"
    for line in said.splitlines():
        assert f"`{line}`" in PAGE.read_text()
