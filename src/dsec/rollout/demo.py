"""`python -m dsec.rollout.demo`: run a suite of recorded agents on a running platform.

Exits with 0 if every rollout ended as its recording says and every sandbox is known to be stopped.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import anyio
import msgspec

from dsec.base.errors import DsecError, InvalidRequest
from dsec.rollout.display import Display, make_display
from dsec.rollout.platform import ClientLike
from dsec.rollout.rollout import Job
from dsec.rollout.sources import fetch_all
from dsec.rollout.suite import IN_FLIGHT, SuiteRun, new_run_id, plan_check, plan_jobs, run_jobs
from dsec.rollout.tasks import Pin, Task, load_suite
from dsec.sdk import DSecClient


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(prog="python -m dsec.rollout.demo", description=__doc__)
    parser.add_argument("--tasks", type=Path, default=Path("examples/tasks"), help="the suite")
    parser.add_argument("--task", action="append", default=[], help="only this one; repeatable")
    parser.add_argument("--per-task", type=int, default=8, help="rollouts of each task")
    parser.add_argument("--in-flight", type=int, default=IN_FLIGHT, help="rollouts at once")
    parser.add_argument("--image", default="debian", help="image both sandboxes start from")
    parser.add_argument("--cache", type=Path, help="where source distributions are kept")
    parser.add_argument(
        "--check",
        action="store_true",
        help="run every agent once, and one that changes nothing: for authors of tasks",
    )
    parser.add_argument("--json", action="store_true", help="print the report as JSON")
    args = parser.parse_args(argv)
    if args.per_task < 1 or args.in_flight < 1:
        parser.error("--per-task and --in-flight must be at least 1")
    return args


def main(argv: Sequence[str] | None = None) -> int:
    """Run it; returns the exit status."""
    args = parse_args(argv)
    try:
        return anyio.run(_main, args)
    except DsecError as error:
        sys.stderr.write(f"error: {error.message}\n")
        return error.exit_status
    except KeyboardInterrupt:
        return 130


async def _main(args: argparse.Namespace) -> int:
    tasks = _chosen(load_suite(args.tasks), args.task)
    run_id = new_run_id()
    jobs = plan_check(tasks, run_id) if args.check else plan_jobs(tasks, args.per_task, run_id)
    with make_display(tasks, len(jobs)) as display:
        distributions = await _fetch(tasks, args.cache, display)
        async with DSecClient() as client:
            run = await _run(client, jobs, args, distributions, display)
    display.report(run.report)
    if args.json:
        sys.stdout.write(msgspec.json.format(msgspec.json.encode(run)).decode() + "\n")
    return 0 if run.report.ok else 1


async def _run(
    client: ClientLike,
    jobs: Sequence[Job],
    args: argparse.Namespace,
    distributions: dict[str, bytes],
    display: Display,
) -> SuiteRun:
    return await run_jobs(
        client,
        jobs,
        image=args.image,
        distributions=distributions,
        in_flight=args.in_flight,
        on_event=display.event,
    )


async def _fetch(tasks: Sequence[Task], cache: Path | None, display: Display) -> dict[str, bytes]:
    def fetched(pin: Pin, cached: bool) -> None:
        display.note(f"{pin.package} {pin.version}: {'cached' if cached else 'fetched'}")

    return await fetch_all([pin for task in tasks for pin in task.pins], cache, fetched)


def _chosen(tasks: list[Task], names: Sequence[str]) -> list[Task]:
    unknown = set(names) - {task.name for task in tasks}
    if unknown:
        raise InvalidRequest(f"no task {', '.join(sorted(unknown))} in this suite")
    return [task for task in tasks if not names or task.name in names]


if __name__ == "__main__":
    sys.exit(main())
