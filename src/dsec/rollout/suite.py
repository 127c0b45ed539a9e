"""Many rollouts at once, so many in flight and no more."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping, Sequence

import anyio
from msgspec import Struct

from dsec.base.clock import Clock, SystemClock
from dsec.rollout.platform import ClientLike
from dsec.rollout.records import Event, RolloutResult
from dsec.rollout.report import SuiteReport, summarize
from dsec.rollout.rollout import Job, roll_out
from dsec.rollout.tasks import PRISTINE, Task

IN_FLIGHT = 16


class SuiteRun(Struct, frozen=True, kw_only=True):
    """What a run leaves: the numbers and every rollout."""

    report: SuiteReport
    results: list[RolloutResult]


def plan_jobs(tasks: Sequence[Task], per_task: int, run_id: str) -> list[Job]:
    """`per_task` rollouts of each task, its agents in turn, tasks interleaved."""
    return [
        Job(
            rollout_id=f"{run_id}.{task.name}.{number}",
            task=task,
            agent=task.agents[number % len(task.agents)],
        )
        for number in range(per_task)
        for task in tasks
    ]


def plan_check(tasks: Sequence[Task], run_id: str) -> list[Job]:
    """Every agent of every task once, and one that changes nothing and has to fail."""
    return [
        Job(rollout_id=f"{run_id}.{task.name}.{agent.name}"[:56], task=task, agent=agent)
        for task in tasks
        for agent in (PRISTINE, *task.agents)
    ]


async def run_suite(  # noqa: PLR0913 - keywords all
    client: ClientLike,
    tasks: Sequence[Task],
    *,
    image: str,
    distributions: Mapping[str, bytes],
    per_task: int = 8,
    in_flight: int = IN_FLIGHT,
    on_event: Callable[[Event], None] | None = None,
    clock: Clock | None = None,
) -> SuiteReport:
    """Run a suite and sum it up.

    Args:
        client: an open client of the platform.
        tasks: what to run.
        image: the image both sandboxes of a rollout start from.
        distributions: bytes of the tasks' distributions by sha256; see `sources.fetch_all`.
        per_task: rollouts of each task; its recorded agents take turns.
        in_flight: rollouts under way at once; each has one sandbox at a time.
        on_event: told what happens, on the event loop; it must not block.
        clock: what is measured with.
    """
    jobs = plan_jobs(tasks, per_task, new_run_id())
    run = await run_jobs(
        client,
        jobs,
        image=image,
        distributions=distributions,
        in_flight=in_flight,
        on_event=on_event,
        clock=clock,
    )
    return run.report


async def run_jobs(  # noqa: PLR0913 - keywords all
    client: ClientLike,
    jobs: Sequence[Job],
    *,
    image: str,
    distributions: Mapping[str, bytes],
    in_flight: int = IN_FLIGHT,
    on_event: Callable[[Event], None] | None = None,
    clock: Clock | None = None,
) -> SuiteRun:
    """Run rollouts that are planned already; arguments as in `run_suite`."""
    timer = clock or SystemClock()
    limit = anyio.CapacityLimiter(in_flight)
    results: list[RolloutResult] = []
    began = timer.monotonic()

    async def one(job: Job) -> None:
        try:
            result = await roll_out(
                client,
                job,
                image=image,
                distributions=distributions,
                clock=timer,
                on_event=on_event or _ignore,
            )
            results.append(result)
        finally:
            limit.release_on_behalf_of(job.rollout_id)

    async with anyio.create_task_group() as group:
        for job in jobs:  # taken here, so that rollouts start in the order planned
            await limit.acquire_on_behalf_of(job.rollout_id)
            group.start_soon(one, job)
    return SuiteRun(report=summarize(results, timer.monotonic() - began), results=results)


def new_run_id() -> str:
    """Short, and another every time: it is part of every command's id and label."""
    return "r" + secrets.token_hex(3)


def _ignore(event: Event) -> None:
    del event
