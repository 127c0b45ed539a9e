"""Environments looked at from outside: the linter, and traces of what a run read."""

from __future__ import annotations

import json
import random
import tarfile
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from xml.etree import ElementTree as ET

import anyio
import pytest

from dsec import (
    DSecClient,
    GitTree,
    InvalidRequest,
    LayerView,
    LintReport,
    LintRule,
    NotFound,
    TraceView,
)
from tests.contract import image
from tests.contract.capabilities import needs
from tests.contract.expect import eventually, refusal
from tests.contract.parts import Parts
from tests.contract.server import Server
from tests.contract.test_layers_git import commit, git
from tests.tars import Tar

pytestmark = [needs("layers")]

KEY = (
    b"-----BEGIN OPENSSH PRIVATE KEY-----\n"
    + b"b3BlbnNzaC1rZXktdjEAAAAABG5vbmUAAAAEbm9uZQAAAAAAAAAB\n" * 8
    + b"-----END OPENSSH PRIVATE KEY-----\n"
)
CAPABLE = {"security.capability": bytes.fromhex("0100000200002000" + "00" * 12)}
"""cap_sys_admin."""

PLANTED: dict[str, Callable[[Tar], Tar]] = {
    "answer-file-name": lambda tar: tar.add("workspace/solution.py", content=b"x = 1\n"),
    "secret-private-key": lambda tar: tar.add("home/user/.ssh/id_ed25519", content=KEY),
    "secret-credentials": lambda tar: tar.add(
        "root/.netrc", content=b"machine a.test login me password hunter2hunter2\n"
    ),
    "secret-token": lambda tar: tar.add("etc/app.conf", content=b"key = AKIAQYLPMN5HFIQR7XYA\n"),
    "secret-url": lambda tar: tar.add(
        "etc/app.conf", content=b"db = postgres://admin:s3cr3tpassw0rd@db.test/x\n"
    ),
    "secret-shell-history": lambda tar: tar.add("root/.bash_history", content=b"make test\n"),
    "setuid-unknown": lambda tar: tar.add("opt/helper", content=b"\x7fELF", mode=0o4755),
    "file-capabilities": lambda tar: tar.add(
        "opt/c", content=b"\x7fELF", mode=0o755, xattrs=CAPABLE
    ),
    "world-writable-system": lambda tar: tar.add("usr/bin/tool", content=b"#!", mode=0o777),
    "world-writable-no-sticky": lambda tar: tar.add("srv/x", tarfile.DIRTYPE, mode=0o777),
    "users-unknown-owner": lambda tar: tar.add("workspace/a", content=b"", uid=4321),
    "users-no-passwd": lambda tar: tar.add("etc/.wh.passwd"),
    "toolkit-overrides": lambda tar: tar.add(
        "etc/group", content=image.GROUP.encode() + b"a:x:5:\n"
    ),
    "layer-directory-mode": lambda tar: tar.add("tmp", tarfile.DIRTYPE, mode=0o755),
    "size-big-file": lambda tar: tar,  # planted as a sparse file, see below
}
"""Rule -> what makes it speak."""


def rules(report: LintReport) -> set[str]:
    return {finding.rule for finding in report.findings}


async def test_a_clean_image_is_clean(client: DSecClient) -> None:
    report = await client.environments.lint(image.NAME)
    assert report.findings == []
    assert not report.truncated
    assert report.entries > 100
    assert report.size_bytes > 1 << 20
    assert {*PLANTED, "git-future-objects"} <= set(report.rules)


async def test_a_clean_environment_is_clean(
    client: DSecClient, parts: Parts, tmp_path: Path
) -> None:
    """Also a repository whose later commits hold the fix, if it is published as it should be."""
    (tmp_path / "r/src").mkdir(parents=True)
    git(tmp_path / "r", "init", "--quiet")
    task = commit(tmp_path / "r", "task")
    commit(tmp_path / "r", "the fix")
    work = await parts.workspace(GitTree(tmp_path / "r", task))
    tool = await parts.toolkit({"opt/agent/run": b"#!/bin/sh\n"})
    report = await client.environments.lint(
        image.NAME, workspace=work.name, toolkits=[tool.name], answers=["the fix"]
    )
    assert report.findings == []
    assert (report.environment.workspace, report.environment.toolkits) == (work.name, [tool.name])
    assert report.layers >= 3


@pytest.mark.parametrize("rule", PLANTED)
async def test_what_is_planted_is_found(
    client: DSecClient, parts: Parts, tmp_path: Path, rule: str
) -> None:
    tools = await planted(parts, rule, tmp_path)
    report = await client.environments.lint(image.NAME, toolkits=[tools.name])
    assert rule in rules(report), report.findings
    finding = next(one for one in report.findings if one.rule == rule)
    assert finding.advice
    if rule != "users-no-passwd":  # which is about what is not there
        assert finding.layer == f"toolkit {tools.name}"
        assert finding.path.startswith("/")
    assert "hunter2" not in finding.message
    quiet = await client.environments.lint(image.NAME, toolkits=[tools.name], disabled=[rule])
    assert rule not in rules(quiet)
    assert rules(report) - {rule} <= rules(quiet)


async def planted(parts: Parts, rule: str, tmp_path: Path) -> LayerView:
    if rule != "size-big-file":
        return await parts.toolkit(PLANTED[rule](Tar()))
    with (tmp_path / "big").open("wb") as file:
        file.truncate(300 << 20)
    argv = ["tar", "-S", "--format=posix", "-cf", tmp_path / "big.tar", "-C", tmp_path, "big"]
    await anyio.run_process([str(word) for word in argv])
    return await parts.toolkit(tmp_path / "big.tar")


async def test_the_future_in_git_is_found(client: DSecClient, parts: Parts, tmp_path: Path) -> None:
    """A repository checked out at the task's commit with all of its history there."""
    where = tmp_path / "r"
    (where / "src").mkdir(parents=True)
    git(where, "init", "--quiet", "--initial-branch=main")
    task = commit(where, "task")
    commit(where, "the fix")
    git(where, "checkout", "--quiet", "--detach", task)
    loose = await parts.workspace(where)
    git(where, "gc", "--quiet", "--prune=now")
    packed = await parts.workspace(where)
    git(where, "branch", "--delete", "--force", "main")
    hidden = await parts.workspace(where)
    found: dict[str, set[str]] = {}
    for work in (loose, packed, hidden):
        report = await client.environments.lint(image.NAME, workspace=work.name)
        found[work.name] = rules(report)
        assert "git-future-objects" in rules(report), work.name
        named = [one for one in report.findings if one.rule == "git-future-objects"]
        assert named[0].severity == "error"
        assert named[0].layer == f"workspace {work.name}"
        assert named[0].path.startswith("/workspace/.git")
    assert "git-future-refs" in found[loose.name] & found[packed.name]


async def test_reports_say_which_versions_they_are_about(client: DSecClient, parts: Parts) -> None:
    """A report is kept; what its names mean changes with the next version."""
    work = await parts.workspace({"workspace/a": b""})
    tool = await parts.toolkit({"opt/a": b""})
    short = [layer.name.partition(":")[0] for layer in (work, tool)]
    report = await client.environments.lint(image.NAME, workspace=short[0], toolkits=[short[1]])
    environment = report.environment
    assert (environment.workspace, environment.toolkits) == (work.name, [tool.name])


async def test_answers_are_found_in_names_and_contents(client: DSecClient, parts: Parts) -> None:
    work = await parts.workspace(
        {
            "workspace/notes/a": b"x" * 70_000 + b"return frobnicate(x)",
            "workspace/test_hidden_7": b"",
        }
    )
    report = await client.environments.lint(
        image.NAME, workspace=work.name, answers=["return frobnicate(x)", "test_hidden_7"]
    )
    found = [one.path for one in report.findings if one.rule == "answer-in-environment"]
    assert sorted(found) == ["/workspace/notes/a", "/workspace/test_hidden_7"]
    assert (await client.environments.lint(image.NAME, workspace=work.name)).findings == []


async def test_rules_of_our_own(client: DSecClient, parts: Parts) -> None:
    tools = await parts.toolkit({"opt/a/core.1": b"\x7fELF core", "opt/core.txt": b"text"})
    dump = LintRule(
        id="no-core-dumps",
        severity="error",
        message="a core dump",
        path="/**/core.*",
        content="^\\x7fELF",
        advice="remove it",
    )
    named = LintRule(id="no-text", message="a text", path="/opt/*.txt", severity="advice")
    report = await client.environments.lint(image.NAME, toolkits=[tools.name], rules=[named, dump])
    first, second = report.findings
    assert (first.rule, first.path, first.advice) == ("no-core-dumps", "/opt/a/core.1", "remove it")
    assert (second.rule, second.path, second.severity) == ("no-text", "/opt/core.txt", "advice")
    assert {"no-core-dumps", "no-text"} <= set(report.rules)


@pytest.mark.parametrize(
    ("changes", "word"),
    [({"content": "("}, "content"), ({"id": "setuid-unknown"}, "setuid-unknown")],
    ids=["a broken expression", "a name that is taken"],
)
async def test_a_bad_rule_is_refused(
    client: DSecClient, changes: dict[str, str], word: str
) -> None:
    rule = LintRule(**({"id": "ours", "message": "m"} | changes))  # type: ignore[arg-type]
    with pytest.raises(InvalidRequest, match=word):
        await client.environments.lint(image.NAME, rules=[rule])


async def test_a_rule_that_is_not_there_cannot_be_disabled(client: DSecClient) -> None:
    with pytest.raises(InvalidRequest, match="nonesuch"):
        await client.environments.lint(image.NAME, disabled=["nonesuch"])


async def test_what_is_not_there_cannot_be_looked_at(client: DSecClient, parts: Parts) -> None:
    tools = await parts.toolkit({"a": b""})
    with refusal(NotFound):
        await client.environments.lint("nonesuch")
    with refusal(NotFound):
        await client.environments.lint(image.NAME, workspace="nonesuch")
    with refusal(NotFound):
        await client.environments.trace("nonesuch")
    with refusal(NotFound):
        await client.environments.trace(image.NAME, toolkits=["nonesuch"])
    with refusal(NotFound):
        await client.environments.trace(image.NAME, toolkits=[tools.name], trace="never-recorded")


# -- traces ------------------------------------------------------------------------------------

MIB = 1 << 20


@pytest.fixture(scope="module")
def node(backend: str) -> Iterator[Server]:
    """A node of its own: what records starts when it is first needed, and stays."""
    up = Server(backend)
    try:
        up.start()
        yield up
    finally:
        up.stop()
        up.remove()


@pytest.fixture
async def recording(node: Server, tmp_path: Path) -> AsyncIterator[Parts]:
    async with node.client() as client:
        parts = Parts(client, tmp_path, node.backend)
        archive = image.build(tmp_path / "image.tar")
        await client.images.import_archive(archive, image.NAME).wait()
        yield parts
        await parts.close()


async def test_a_trace_tells_which_files_were_read(recording: Parts) -> None:
    noise = random.Random(7).randbytes(8 * MIB)
    work = await recording.workspace({"workspace/read": noise[: 2 * MIB], "workspace/left": noise})
    tool = await recording.toolkit({"opt/read": noise[2 * MIB : 3 * MIB], "opt/left": noise[::-1]})
    trace = f"task-{work.name}"
    wanted = recording.over(image.NAME, tool, workspace=work.name, trace=trace, record_trace=True)
    async with await recording.client.run_container(wanted) as sandbox:
        (await sandbox.run_shell("cat /workspace/read /opt/read | sha256sum")).check()
    view = await recorded(recording.client, work, tool)
    assert view.trace == trace
    files = {file.path: file for file in view.files}
    assert {"/workspace/read", "/opt/read"} <= set(files)
    assert files["/workspace/read"].read_bytes == files["/workspace/read"].size_bytes == 2 * MIB
    assert files["/workspace/read"].layer == f"workspace {work.name}"
    assert files["/opt/read"].layer == f"toolkit {tool.name}"
    for left in ("/workspace/left", "/opt/left"):
        assert left not in files or files[left].read_bytes < MIB
    assert 3 * MIB <= view.read_bytes < 8 * MIB < view.total_bytes
    assert_sums(view)
    assert {part.layer for part in view.parts} >= {f"workspace {work.name}", "image"}


async def test_the_command_line_records_and_shows(
    recording: Parts, node: Server, tmp_path: Path
) -> None:
    tool = await recording.toolkit({"opt/read": random.Random(8).randbytes(2 * MIB)})
    options = ("--toolkit", tool.name, "--trace", "t")
    said = await node.dsec(
        *("env", "trace", "--json", *options, "--picture", "reads.svg"),
        *(image.NAME, "--", "sh", "-c", "cat /opt/read > /dev/null; echo said; exit 3"),
        cwd=tmp_path,
    )
    assert said.returncode == 3, said.stderr.decode()
    assert b"said" in said.stderr
    shown = json.loads(said.stdout)
    assert shown["trace"] == "t"
    assert "/opt/read" in [file["path"] for file in shown["files"]]
    root = ET.parse(tmp_path / "reads.svg").getroot()
    assert root.tag.endswith("svg")
    stat = await node.dsec("env", "stat", "--json", *options, image.NAME, cwd=tmp_path)
    assert stat.returncode == 0, stat.stderr
    assert json.loads(stat.stdout)["read_bytes"] == shown["read_bytes"] >= 2 * MIB
    table = await node.dsec("env", "stat", *options, image.NAME, cwd=tmp_path)
    assert b"/opt/read" in table.stdout


def assert_sums(view: TraceView) -> None:
    """The same bytes whichever way they are counted, in order of time."""
    assert sum(read.length for read in view.reads) == view.read_bytes
    assert [read.at_ms for read in view.reads] == sorted(read.at_ms for read in view.reads)
    for number, part in enumerate(view.parts):
        inside = [read for read in view.reads if read.part == number]
        assert sum(read.length for read in inside) == part.read_bytes <= part.size_bytes


async def recorded(client: DSecClient, work: LayerView, tool: LayerView) -> TraceView:
    found: list[TraceView] = []

    async def there() -> bool:
        try:
            found.append(
                await client.environments.trace(
                    image.NAME,
                    workspace=work.name,
                    toolkits=[tool.name],
                    trace=f"task-{work.name}",
                )
            )
        except NotFound:
            return False
        return True

    await eventually(there, "the trace is there")
    return found[-1]
