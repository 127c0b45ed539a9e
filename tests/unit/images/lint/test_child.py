"""The linter in its process, over real metadata images and data files."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import anyio
import msgspec
import pytest
from msgspec import structs

from dsec.base.errors import (
    DataUnavailable,
    DeadlineExceeded,
    InternalError,
    InvalidRequest,
    PayloadTooLarge,
)
from dsec.images.children import Refused
from dsec.images.erofs.data import DataWriter
from dsec.images.erofs.read import read_image
from dsec.images.erofs.scan import scan
from dsec.images.erofs.write import write_image
from dsec.images.lint import run
from dsec.images.lint.child import Job, JobPart, Linted, LintJob, Said, TraceJob
from dsec.images.lint.indexes import Indexes
from dsec.images.records import ImageConfig
from dsec.linux.process import run_async
from dsec.wire.filler import ReadSpan, Recording
from dsec.wire.public_v1 import EnvironmentRef, LintReport, LintRequest, LintRule
from tests.unit.images.lint.build import GROUP, KEY, PASSWD

pytestmark = pytest.mark.anyio


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


def part(tmp_path: Path, label: str, files: dict[str, bytes]) -> JobPart:
    place = tmp_path / label.replace(" ", "-")
    for name, content in files.items():
        (place / "root" / name).parent.mkdir(parents=True, exist_ok=True)
        (place / "root" / name).write_bytes(content)
    with DataWriter(place / "data") as data:
        tree = scan(place / "root", data)
        device = data.finish()
    tree.devices = [] if device is None else [device]
    write_image(tree, place / "meta")
    return JobPart(label=label, meta=str(place / "meta"), devices=[str(place / "data")])


@pytest.fixture
def image(tmp_path: Path) -> JobPart:
    files = {"etc/passwd": PASSWD, "etc/group": GROUP, "app/main.py": b"fixed = True\n" * 1000}
    return part(tmp_path, "image", files)


def job(*parts: JobPart, request: LintRequest | None = None) -> LintJob:
    return LintJob(
        request=request or LintRequest(image="i"),
        parts=list(parts),
        config=ImageConfig(),
        search_s=0.2,
    )


def rules(report: LintReport) -> set[tuple[str, str, str]]:
    return {(f.rule, f.path, f.layer) for f in report.findings}


async def test_looks_at_what_lies_in_data_files(tmp_path: Path, image: JobPart) -> None:
    kit = part(tmp_path, "toolkit t:1", {"opt/key": b"\0" * 70_000 + KEY, "app/main.py": b"x"})
    request = LintRequest(
        image="i",
        toolkits=["t:1"],
        answers=["fixed = True"],
        rules=[LintRule(id="own", message="m", path="/opt/*")],
    )
    report = await run.run_lint(job(image, kit, request=request))
    found = rules(report)
    assert ("secret-private-key", "/opt/key", "toolkit t:1") in found
    assert ("toolkit-overrides", "/app/main.py", "toolkit t:1") in found
    assert ("own", "/opt/key", "toolkit t:1") in found
    assert not any(rule == "answer-in-environment" for rule, _, _ in found)  # it is replaced
    alone = await run.run_lint(job(image, request=LintRequest(image="i", answers=["fixed = True"])))
    assert ("answer-in-environment", "/app/main.py", "image") in rules(alone)


async def test_an_expression_that_explodes_is_given_up(tmp_path: Path) -> None:
    image = part(tmp_path, "image", {"a": b"a" * 5000 + b"!", "z": b"find me"})
    own = [
        LintRule(id="bomb", message="m", content=r"(a+)+$"),
        LintRule(id="fine", message="m", content="find"),
    ]
    report = await run.run_lint(job(image, request=LintRequest(image="i", rules=own)))
    assert {("lint-rule-too-slow", "/a", "image"), ("fine", "/z", "image")} <= rules(report)


HOSTILE = {
    "root/.pgpass": b":" * 1_000_000,
    "root/.git-credentials": b"://a:" * 200_000,
    "root/.netrc": b"password " * 100_000 + b" " * 100_000,
    "root/.pypirc": b"\n" * 1_000_000,
    "etc/pip.conf": b" \n" * 500_000,
    "etc/apt/sources.list": b"[" * 1_000_000,
    "var/lib/dpkg/status": b"\n\n" * 500_000,
    "r/config": b"\n" * 500_000 + b"[remote " + b" " * 500_000,
    "r/packed-refs": b"a" * 1_000_000,
    "r/HEAD": b"ref: HEAD",
    "r/objects/aa/" + "b" * 38: b"x",
    "app/urls": b"aa://a:b" * 100_000 + b"@",
    "app/keys": b"-----BEGIN PRIVATE KEY-----\n" * 30_000,
}


async def test_hostile_content_does_not_take_for_ever(tmp_path: Path) -> None:
    """Whatever is quadratic in one of these takes many minutes."""
    image = part(tmp_path, "image", HOSTILE)
    around = job(image)
    around.config = ImageConfig(user="\u00b2")
    around.indexes = Indexes(apt=("mirror",), python=("mirror",))
    assert rules(await run.run_lint(around, timeout_s=60))


async def test_data_that_is_not_there_is_not_clean(image: JobPart) -> None:
    os.truncate(image.devices[0], 4096)
    with pytest.raises(DataUnavailable, match="cannot be read"):
        await run.run_lint(job(image))
    os.unlink(image.devices[0])  # noqa: PTH108 - pathlib is for blocking code
    with pytest.raises(DataUnavailable, match="cannot be read"):
        await run.run_lint(job(image))


async def test_refusals_come_back_as_they_are(image: JobPart) -> None:
    bad = LintRequest(image="i", rules=[LintRule(id="r", message="m", content="(")])
    with pytest.raises(InvalidRequest, match="rule r: its content is no regular expression"):
        await run.run_lint(job(image, request=bad))
    with pytest.raises(InternalError, match="has 1 devices, not 2"):
        await run.run_lint(job(structs.replace(image, devices=image.devices * 2)))
    os.truncate(image.meta, 100)
    with pytest.raises(InternalError, match="is damaged"):
        await run.run_lint(job(image))


async def test_it_ends_in_time(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "meta")  # opening it waits for ever
    stuck = JobPart(label="image", meta=str(tmp_path / "meta"), devices=[str(tmp_path / "meta")])
    with pytest.raises(DeadlineExceeded):
        await run.run_lint(job(stuck), timeout_s=0.5)


async def test_cancelling_ends_it(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "meta")
    stuck = JobPart(label="image", meta=str(tmp_path / "meta"), devices=[])
    with anyio.move_on_after(0.5) as scope:
        await run.run_lint(job(stuck))
    assert scope.cancelled_caught


async def in_child(job: Job, before: str) -> Said:
    """What the child says after some code of ours."""
    code = f"import os, sys; from dsec.images.lint import child; {before}; sys.exit(child.main([]))"
    argv = [sys.executable, "-c", code]
    done = await run_async(argv, stdin=msgspec.json.encode(job), timeout_s=60)
    return msgspec.json.decode(done.stdout, type=Said)


async def test_more_memory_than_it_may_have_is_refused(tmp_path: Path) -> None:
    status = b"Package: x\nStatus: install ok installed\n\n" + bytes(32 << 20)
    image = part(tmp_path, "image", {"var/lib/dpkg/status": status})
    vm = "int(open('/proc/self/statm').read().split()[0]) * os.sysconf('SC_PAGE_SIZE')"
    little = f"child.BOUNDS = child.Bounds(memory_bytes={vm} + (24 << 20))"
    said = await in_child(job(image), little)
    assert isinstance(said, Refused)
    assert isinstance(said.error(), PayloadTooLarge)
    assert isinstance(await in_child(job(image), "pass"), Linted)


@pytest.mark.needs_root
async def test_metadata_is_read_by_nobody(tmp_path: Path, image: JobPart) -> None:
    os.chmod(tmp_path, 0o700)  # noqa: PTH101 - pathlib is for blocking code
    os.chmod(image.meta, 0o600)  # noqa: PTH101
    fail = "raise child.InternalError(str(os.getresuid()))"
    spy = f"exec('def spy(file, name): {fail}'); child.read_opened = spy"
    assert await in_child(job(image), spy) == Refused("internal_error", str((65534,) * 3))
    assert isinstance(await in_child(job(image), "pass"), Linted)


def trace_job(*parts: JobPart) -> TraceJob:
    digests = [d.digest for p in parts for d in read_image(Path(p.meta)).devices]
    recording = Recording(
        recording="r",
        digests=digests,
        chunk_bytes=4096,
        started_at=1.0,
        spans=[ReadSpan(7, 0, 0, 2)],
    )
    return TraceJob(
        environment=EnvironmentRef(image="i"),
        parts=[structs.replace(p, devices=[]) for p in parts],
        trace="t",
        recorded_at=5.0,
        recording=recording,
    )


async def test_a_recording_is_told_by_files(tmp_path: Path) -> None:
    image = part(tmp_path, "image", {"app/main.py": b"x" * 10_000})
    view = await run.run_view(trace_job(image))
    assert [(f.path, f.layer, f.read_bytes) for f in view.files] == [
        ("/app/main.py", "image", 8192)
    ]
    assert (view.trace, view.recorded_at, view.read_bytes) == ("t", 5.0, 8192)


async def test_a_recording_over_damaged_metadata_is_refused(image: JobPart) -> None:
    asked = trace_job(image)
    os.truncate(image.meta, 100)
    with pytest.raises(InternalError, match="is damaged"):
        await run.run_view(asked)
