"""Looks into metadata images and data: `python -m dsec.images.lint.child`, job on standard input.

What it looks at is not trusted. It has bounds on its processor time and memory, opens what it
reads, becomes nobody, and looks at it only then; it dies with its parent. What came of it is one
line of JSON on standard output.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import gc
import signal
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO

import msgspec
from msgspec import Struct

from dsec.base.errors import DataUnavailable, DsecError, InternalError, PayloadTooLarge
from dsec.images.children import Bounds, Refused, become_nobody, confine, refusal
from dsec.images.erofs.read import read_opened
from dsec.images.lint.content import Devices
from dsec.images.lint.engine import lint
from dsec.images.lint.environment import Environment, Surroundings
from dsec.images.lint.indexes import Indexes
from dsec.images.lint.patterns import TooSlow
from dsec.images.overlaid import Part
from dsec.images.records import ImageConfig
from dsec.images.tracing import trace_view
from dsec.linux.process import die_with_parent
from dsec.wire.filler import Recording
from dsec.wire.public_v1 import EnvironmentRef, LintReport, LintRequest, TraceView

BOUNDS = Bounds(memory_bytes=1 << 30, cpu_s=300)
"""Room for a million names; a larger environment is refused."""


class JobPart(Struct, kw_only=True):
    """A part, by files of this host."""

    label: str
    """`image`, `workspace NAME` or `toolkit NAME`."""
    meta: str
    """Its metadata image."""
    devices: list[str] = []
    """Its data devices, in the order of its device table; none where no content is read."""


class LintJob(Struct, tag="lint", kw_only=True):
    """Parts to look over, bottom first."""

    request: LintRequest
    parts: list[JobPart]
    config: ImageConfig
    indexes: Indexes = Indexes()
    now_s: float = 0.0
    layers: int = 0
    """Before any were merged; 0 = as many as parts."""
    search_s: float = 2.0
    """Processor time for one search of one of the caller's expressions in one file."""


class TraceJob(Struct, tag="trace", kw_only=True):
    """A recording to be told by files; see `trace_view`."""

    environment: EnvironmentRef
    parts: list[JobPart]
    trace: str
    recorded_at: float
    recording: Recording


Job = LintJob | TraceJob


class Linted(Struct, tag="linted"):
    """Answers a `LintJob`."""

    report: LintReport


class Viewed(Struct, tag="viewed"):
    """Answers a `TraceJob`."""

    view: TraceView


Said = Linted | Viewed | Refused


def main(argv: Sequence[str]) -> int:
    """Do the job; 0 also when it is refused, which is an answer."""
    parser = argparse.ArgumentParser(prog="python -m dsec.images.lint.child")
    parser.add_argument("--parent", type=int, default=0, help="die with this process")
    arguments = parser.parse_args(argv)
    confine(BOUNDS)
    said = answer(sys.stdin.buffer.read(), arguments.parent)
    sys.stdout.buffer.write(msgspec.json.encode(said) + b"\n")
    return 0


def answer(job: bytes, parent: int) -> Said:
    """What to say."""
    try:
        return _do(msgspec.json.decode(job, type=Job), parent)
    except DsecError as error:
        return refusal(error)
    except OSError as error:
        return refusal(DataUnavailable(f"the environment's data cannot be read: {error}"))
    except MemoryError:
        pass  # with the exception goes what took the memory
    return refusal(PayloadTooLarge("looking the environment over takes too much memory"))


def _do(job: Job, parent: int) -> Linted | Viewed:
    with contextlib.ExitStack() as opened:
        metas = [opened.enter_context(Path(part.meta).open("rb")) for part in job.parts]
        devices = Devices([[Path(device) for device in part.devices] for part in job.parts])
        become_nobody()
        if parent:
            die_with_parent(parent)  # after the change of user, which would undo it
        parts = _read(job.parts, metas)
    match job:
        case LintJob():
            return Linted(_lint(job, parts, devices))
        case TraceJob():
            return Viewed(
                trace_view(job.environment, job.trace, job.recorded_at, parts, job.recording)
            )


def _read(parts: Sequence[JobPart], metas: Sequence[IO[bytes]]) -> list[Part]:
    gc.disable()  # trees have no cycles, and looking through millions of inodes for some takes long
    found = [
        Part(part.label, read_opened(meta, Path(part.meta)))
        for part, meta in zip(parts, metas, strict=True)
    ]
    gc.freeze()
    gc.enable()
    return found


def _lint(job: LintJob, parts: Sequence[Part], devices: Devices) -> LintReport:
    for part, wanted in zip(parts, job.parts, strict=True):
        there, given = len(part.tree.devices), len(wanted.devices)
        if there != given:
            raise InternalError(f"{wanted.meta} has {there} devices, not {given}")
    around = Surroundings(
        indexes=job.indexes,
        now_s=job.now_s,
        answers=tuple(job.request.answers),
        layers=job.layers,
    )
    environment = Environment(parts, job.config, devices.read, around)
    return lint(environment, job.request, functools.partial(_timed, job.search_s))


@contextlib.contextmanager
def _timed(limit_s: float) -> Iterator[None]:
    """Bound the processor time of a search: Python's expressions look at signals as they go."""
    before = signal.signal(signal.SIGVTALRM, _too_slow)
    signal.setitimer(signal.ITIMER_VIRTUAL, limit_s)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)


def _too_slow(_number: int, _frame: object) -> None:
    raise TooSlow


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
