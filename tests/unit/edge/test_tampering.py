"""What a tamper report is put together from, and what a node lets sandboxes have."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from dsec.base.errors import SandboxGone, Unsupported
from dsec.edge import tampering
from dsec.edge.privileges import Privileges
from dsec.wire.sandbox import DiffEntry, Security, TamperReport
from tests.unit.edge.node import Node, request


def entry(path: str, change: Any = "modified", kind: Any = "file") -> DiffEntry:
    return DiffEntry(path=path, change=change, kind=kind)


@pytest.mark.parametrize(
    ("path", "change", "kind", "counts"),
    [
        ("/bin/bash", "modified", "file", True),
        ("/usr/lib/x86_64-linux-gnu/libc.so.6", "removed", "file", True),
        ("/lib64/ld-linux-x86-64.so.2", "modified", "symlink", True),
        ("/etc/ld.so.preload", "modified", "file", True),
        ("/etc/profile.d/a.sh", "modified", "file", True),
        ("/etc/ld.so.preload", "added", "file", True),
        ("/bin/new", "added", "file", False),
        ("/usr/lib", "modified", "dir", False),
        ("/usr/local/bin/tool", "modified", "file", False),
        ("/etc/motd", "modified", "file", False),
        ("/root/bin/x", "modified", "file", False),
        ("/binary", "modified", "file", False),
    ],
)
def test_what_a_system_file_is(path: str, change: str, kind: str, counts: bool) -> None:
    assert tampering.is_system(entry(path, change, kind)) is counts


def test_calls_are_sorted_by_whom_they_were_aimed_at() -> None:
    report = TamperReport(at=1.0)
    call = {"name": "kill", "argument": 9, "count": 2, "first_at": 1.0, "last_at": 2.0}
    calls = [{**call, "at_agent": True}, {**call, "name": "bpf"}]
    tampering.fill(report, {"counted": True, "calls": calls, "dropped_bytes": 5, "new": 1})
    assert [call.name for call in report.agent_signals] == ["kill"]
    assert [call.name for call in report.denied_calls] == ["bpf"]
    assert (report.counted, report.dropped_bytes) == (True, 5)
    assert tampering.tells(report)
    assert not tampering.tells(TamperReport(at=1.0, counted=True))


def test_where_nothing_of_the_system_is_written_nothing_is_compared(tmp_path: Path) -> None:
    (tmp_path / "etc").mkdir()
    (tmp_path / "etc/hostname").touch()
    (tmp_path / "root").mkdir()
    assert not tampering.has_system(tmp_path)
    (tmp_path / "etc/ld.so.preload").touch()
    assert tampering.has_system(tmp_path)


@pytest.mark.parametrize("name", ["usr", "bin", "lib64"])
def test_a_link_where_a_directory_was_is_not_followed(tmp_path: Path, name: str) -> None:
    (tmp_path / "etc").symlink_to("/proc/self/nothing")
    assert not tampering.has_system(tmp_path)
    (tmp_path / name).symlink_to("/nowhere")
    assert tampering.has_system(tmp_path)


def test_a_node_gives_what_its_operator_allows() -> None:
    some = Privileges(loose=True, syscalls=frozenset({"ptrace"}))
    some.check(Security(profile="loose", allow=["ptrace"]))
    Privileges().check(Security(profile="strict", no_new_privs=True))
    with pytest.raises(Unsupported, match="allow_loose"):
        Privileges().check(Security(profile="loose"))
    with pytest.raises(Unsupported, match="does not allow bpf, mount"):
        some.check(Security(allow=["mount", "bpf", "ptrace"]))


@pytest.mark.anyio
async def test_a_simulated_sandbox_says_that_it_is(node: Node) -> None:
    async with node.edge() as edge:
        sandbox = (await edge.create(request())).id
        report = await edge.tamper(sandbox)
        assert report.simulated
        assert not tampering.tells(report)
        await edge.stop(sandbox)
        with pytest.raises(SandboxGone):
            await edge.tamper(sandbox)


@pytest.mark.anyio
async def test_a_node_refuses_more_than_its_operator_allows(node: Node) -> None:
    async with node.edge() as edge:
        with pytest.raises(Unsupported, match="security"):
            await edge.create(request(security=Security(profile="loose")))
