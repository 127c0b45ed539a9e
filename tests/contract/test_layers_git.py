"""Workspaces from git: one commit, and nothing that came after it."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from dsec import DSecClient, GitTree, RequestError, Sandbox
from tests.contract.capabilities import needs
from tests.contract.conftest import MakeArgs
from tests.contract.expect import refusal
from tests.contract.parts import Parts

pytestmark = [needs("layers")]

WHO = {
    "GIT_CONFIG_GLOBAL": "/dev/null",
    "GIT_CONFIG_SYSTEM": "/dev/null",
    "GIT_AUTHOR_NAME": "a",
    "GIT_AUTHOR_EMAIL": "a@example.test",
    "GIT_COMMITTER_NAME": "c",
    "GIT_COMMITTER_EMAIL": "c@example.test",
    "GIT_AUTHOR_DATE": "2024-05-06T07:08:09Z",
    "GIT_COMMITTER_DATE": "2024-05-06T07:08:09Z",
}


def git(where: Path, *arguments: str) -> str:
    """Run git without anybody's configuration; what it said."""
    argv = ["git", "-C", str(where), "-c", "safe.directory=*", "-c", "protocol.file.allow=always"]
    done = subprocess.run(
        [*argv, *arguments], env={**os.environ, **WHO}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, f"git {arguments}: {done.stderr}"
    return done.stdout.strip()


def commit(where: Path, text: str) -> str:
    (where / "src/fix.py").write_text(text)
    git(where, "add", "--all")
    git(where, "commit", "--quiet", "--message", text)
    return git(where, "rev-parse", "HEAD")


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """Past, the task (tag `task`), the future; another branch, a stash, packed and loose refs."""
    where = tmp_path / "repository"
    (where / "src").mkdir(parents=True)
    git(where, "init", "--quiet", "--initial-branch=main")
    (where / "run").write_text("#!/bin/sh\n")
    (where / "run").chmod(0o755)
    (where / "link").symlink_to("src/fix.py")
    (where / "odd é\n name").write_text("odd")
    (where / ".gitattributes").write_text("run export-ignore\n*.id ident\n")
    (where / "v.id").write_text("$Id$\n")
    commit(where, "past")
    commit(where, "the task")
    git(where, "tag", "--annotate", "--message", "x", "task")
    commit(where, "future: the fix")
    git(where, "checkout", "--quiet", "-b", "solution")
    commit(where, "another future")
    git(where, "gc", "--quiet")
    git(where, "checkout", "--quiet", "main")
    (where / "src/fix.py").write_text("not committed")
    (where / "untracked").write_text("not committed")
    git(where, "stash")
    git(where, "remote", "add", "origin", "https://example.test/x.git")
    return where


async def fetched(sandbox: Sandbox, target: Path, place: str = "/workspace") -> Path:
    """The sandbox's copy, to look at with our own git."""
    await sandbox.files.download_tree(place, target)
    return target


def objects(where: Path) -> set[str]:
    """Ids of all objects a repository holds, reachable or not."""
    listed = git(where, "cat-file", "--batch-all-objects", "--batch-check=%(objectname)")
    return set(listed.splitlines())


async def test_nothing_but_the_commit_is_there(
    client: DSecClient, args: MakeArgs, parts: Parts, repository: Path, tmp_path: Path
) -> None:
    task = git(repository, "rev-parse", "task^{commit}")
    everything = objects(repository)
    made = await parts.workspace(GitTree(repository, task))
    async with await client.run_container(args(workspace=made.name)) as sandbox:
        copy = await fetched(sandbox, tmp_path / "copy")
        stray = await sandbox.run_shell("cd /workspace/.git && find . -type f | sort")
    assert git(copy, "rev-parse", "HEAD") == task
    assert git(copy, "log", "--all", "--reflog", "--format=%H") == task
    assert git(copy, "status", "--porcelain", "--ignored") == ""
    assert git(copy, "fsck", "--full") == ""
    tree = git(repository, "ls-tree", "-r", "-t", "--format=%(objectname)", task).splitlines()
    wanted = {task, git(repository, "rev-parse", f"{task}^{{tree}}"), *tree}
    assert objects(copy) == wanted
    assert everything - wanted
    assert git(copy, "for-each-ref") == ""
    assert git(copy, "remote") == git(copy, "stash", "list") == ""
    assert (copy / "run").stat().st_mode & 0o111
    assert (copy / "link").readlink() == Path("src/fix.py")
    assert (copy / "odd é\n name").read_text() == "odd"
    assert not (copy / "untracked").exists()
    for name in ("logs", "ORIG_HEAD", "FETCH_HEAD", "packed-refs", "hooks/", "description"):
        assert f"./{name}" not in stray.stdout, stray.stdout
    assert (copy / "src/fix.py").read_text() == "the task"


async def test_work_goes_on_from_there(
    client: DSecClient, args: MakeArgs, parts: Parts, repository: Path, tmp_path: Path
) -> None:
    made = await parts.workspace(GitTree(repository, "task", branch="work"))
    async with await client.run_container(args(workspace=made.name)) as sandbox:
        copy = await fetched(sandbox, tmp_path / "copy")
    assert git(copy, "symbolic-ref", "HEAD") == "refs/heads/work"
    assert git(copy, "branch", "--all", "--format=%(refname)") == "refs/heads/work"
    (copy / "src/fix.py").write_text("mine")
    assert git(copy, "status", "--porcelain") == "M src/fix.py"
    commit(copy, "mine too")
    assert git(copy, "log", "--format=%s").splitlines() == ["mine too", "the task"]


async def test_history_is_left_out_where_it_is_not_wanted(
    client: DSecClient, args: MakeArgs, parts: Parts, repository: Path
) -> None:
    tool = await parts.toolkit(GitTree(repository, "task"), at="/opt/repo")
    bare = await parts.workspace(GitTree(repository, "task", history="none"))
    whole = await parts.toolkit(GitTree(repository, "task", history="commit"), at="/opt/whole")
    wanted = args(workspace=bare.name, toolkits=[tool.name, whole.name])
    async with await client.run_container(wanted) as sandbox:
        for place in ("/opt/repo", "/workspace"):
            assert await sandbox.files.read(f"{place}/src/fix.py") == b"the task"
            assert not await sandbox.files.exists(f"{place}/.git")
        assert await sandbox.files.exists("/opt/whole/.git/HEAD")


async def test_the_same_commit_is_the_same_layer_from_any_clone(
    parts: Parts, repository: Path, tmp_path: Path
) -> None:
    task = git(repository, "rev-parse", "task^{commit}")
    clone = tmp_path / "clone"
    git(tmp_path, "clone", "--quiet", "--no-local", str(repository), str(clone))
    made = await parts.workspace(GitTree(repository, task), "same:v1")
    for other in (GitTree(clone, task), GitTree(f"file://{clone}", task), GitTree(clone, "task")):
        again = await parts.workspace(other, "same:v1")
        assert again.digest == made.digest


@pytest.mark.parametrize("what", ["nonesuch", "0" * 40, "", "--all"])
async def test_an_unknown_commit_is_refused(
    client: DSecClient, parts: Parts, repository: Path, what: str
) -> None:
    with refusal(RequestError):
        await parts.workspace(GitTree(repository, what))
    assert await client.layers.list() == []


async def test_what_is_no_repository_is_refused(
    client: DSecClient, parts: Parts, tmp_path: Path, repository: Path
) -> None:
    (tmp_path / "plain").mkdir()
    with refusal(RequestError):
        await parts.workspace(GitTree(tmp_path / "plain"))
    task = git(repository, "rev-parse", "task^{commit}")
    with refusal(RequestError):
        await parts.workspace(GitTree(f"file://{repository}", task[:12]))
    git(repository, "submodule", "--quiet", "add", str(repository), "sub")
    with refusal(RequestError):
        await parts.workspace(GitTree(repository, commit(repository, "with a submodule")))
    assert await client.layers.list() == []
