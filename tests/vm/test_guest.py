"""The harness itself: a guest that does not end is ended, and told; archives hold what they should."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests.vm import guest, image, initrd
from tests.vm.kernel import Kernel, find

pytestmark = [pytest.mark.needs_root, pytest.mark.vm]


@pytest.fixture
def kernel() -> Kernel:
    found = find()
    if found is None:
        pytest.skip("no kernel for guests: ./dev test fetches it where the mirror has it")
    return found


def processes_with(word: str) -> list[str]:
    found = []
    for entry in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if word.encode() in entry.read_bytes():
                found.append(entry.parent.name)
        except OSError:
            continue
    return found


def libraries() -> dict[Path, tuple[int, int]]:
    """Of the environment the image is made from, which must come out of it as it was."""
    found = {path: path.stat() for path in image.ENVIRONMENT.rglob("*.so*")}
    return {path: (stat.st_ino, stat.st_mtime_ns) for path, stat in found.items()}


def test_a_guest_over_its_limit_is_killed_and_told(
    kernel: Kernel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(guest, "_kvm_may_work", lambda: False)
    machine = guest._Guest(tmp_path, kernel)
    before = libraries()
    machine.prepare(["tests/vm/inside"])
    assert libraries() == before
    result = machine.live(limit_s=0.5)
    assert result.ended == "the guest did not end by itself"
    assert result.tests == {}
    assert processes_with(str(tmp_path)) == []


def test_reports_become_outcomes() -> None:
    run = guest.Run()
    run.take({"id": "a", "when": "setup", "outcome": "passed", "text": ""})
    run.take({"id": "a", "when": "call", "outcome": "failed", "text": "why"})
    run.take({"id": "a", "when": "teardown", "outcome": "passed", "text": ""})
    run.take({"id": "b", "when": "call", "outcome": "passed", "text": ""})
    assert {name: test.outcome for name, test in run.tests.items()} == {
        "a": "failed",
        "b": "passed",
    }
    assert run.tests["a"].text == "why"
    assert run.ended
    run.take({"when": "collect", "id": "c", "text": "no such file"})
    run.take({"end": 1})
    assert (run.errors, run.ended) == (["no such file"], "")


def test_modules_come_after_those_they_need(kernel: Kernel, tmp_path: Path) -> None:
    initrd.build(kernel, tmp_path / "archive")
    with (tmp_path / "archive").open("rb") as archive:
        subprocess.run(["busybox", "cpio", "-i", "-d"], stdin=archive, cwd=tmp_path, check=True)
    order = (tmp_path / "modules/order").read_text().split()
    assert set(order) >= {"virtio_blk", "erofs", "overlay"}
    for place, name in enumerate(order):
        needed = set(initrd._needs((tmp_path / "modules" / name).read_bytes()))
        assert needed <= set(order[:place]), name
