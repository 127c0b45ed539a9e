"""The linter in a process of its own: `python -m dsec.images.lint.child`, job on standard input.

What it looks at is not trusted. It has bounds on its processor time and memory, opens what it reads
before it looks at anything, then becomes nobody; it dies with its parent. What came of it is one
line of JSON on standard output.
"""

from __future__ import annotations

import contextlib
import functools
import os
import resource
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec
from msgspec import Struct

from dsec.base.errors import DataUnavailable, DsecError, InternalError
from dsec.images.erofs.read import read_image
from dsec.images.lint.content import Devices
from dsec.images.lint.engine import lint
from dsec.images.lint.environment import Environment, Surroundings
from dsec.images.lint.patterns import TooSlow
from dsec.images.overlaid import Part
from dsec.images.records import ImageConfig
from dsec.linux.process import die_with_parent
from dsec.wire.public_v1 import LintReport, LintRequest

MEMORY_BYTES = 4 << 30
CPU_S = 300
_NOBODY = 65534


class JobPart(Struct, kw_only=True):
    """A part, by files of this host."""

    label: str
    """`image`, `workspace NAME` or `toolkit NAME`."""
    meta: str
    """Its metadata image."""
    devices: list[str]
    """Its data devices, in the order of its device table."""


class Job(Struct, kw_only=True):
    """What to look over, bottom first."""

    request: LintRequest
    parts: list[JobPart]
    config: ImageConfig
    index_hosts: list[str] = []
    now_s: float = 0.0
    layers: int = 0
    """Before any were merged; 0 = as many as parts."""
    search_s: float = 2.0
    """Processor time for one search of one of the caller's expressions in one file."""
    parent: int = 0
    """The process to die with; 0 = none."""


class Linted(Struct, tag="linted"):
    """It was looked over."""

    report: LintReport


class Refused(Struct, tag="refused"):
    """It was not; an error of the tree in `dsec.base.errors`."""

    code: str
    message: str


Said = Linted | Refused


def main() -> int:
    """Do the job; 0 also when it is refused, which is an answer."""
    job = msgspec.json.decode(sys.stdin.buffer.read(), type=Job)
    try:
        said: Said = Linted(_run(job))
    except DsecError as error:
        said = Refused(error.code, error.message)
    except OSError as error:
        said = Refused(DataUnavailable.code, f"the environment's data cannot be read: {error}")
    except MemoryError:
        said = Refused("payload_too_large", "looking the environment over takes too much memory")
    sys.stdout.buffer.write(msgspec.json.encode(said) + b"\n")
    return 0


def _run(job: Job) -> LintReport:
    resource.setrlimit(resource.RLIMIT_CPU, (CPU_S, CPU_S + 5))
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    parts = [_part(part) for part in job.parts]
    devices = Devices([[Path(device) for device in part.devices] for part in job.parts])
    become_nobody()
    if job.parent:
        die_with_parent(job.parent)  # after the change of user, which would undo it
    around = Surroundings(
        index_hosts=tuple(job.index_hosts),
        now_s=job.now_s,
        answers=tuple(job.request.answers),
        layers=job.layers,
    )
    environment = Environment(parts, job.config, devices.read, around)
    return lint(environment, job.request, functools.partial(_timed, job.search_s))


def _part(part: JobPart) -> Part:
    tree = read_image(Path(part.meta))
    if len(tree.devices) != len(part.devices):
        raise InternalError(f"{part.meta} has {len(tree.devices)} devices, not {len(part.devices)}")
    return Part(part.label, tree)


def become_nobody() -> None:
    """Give up root, if that is what this process is."""
    if os.geteuid() == 0:
        os.setgroups([])
        os.setresgid(_NOBODY, _NOBODY, _NOBODY)
        os.setresuid(_NOBODY, _NOBODY, _NOBODY)


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
    sys.exit(main())
