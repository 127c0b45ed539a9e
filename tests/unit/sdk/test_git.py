"""A repository flattened to a commit holds that commit and nothing else, the same every time."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from dsec import InvalidRequest, NotFound, Unsupported
from dsec.sdk._git import Checkout, check_out
from dsec.sdk._layer_tar import Manner, pack_layer
from dsec.sdk.sources import GitTree, History

WHO = {
    f"GIT_{role}_{what}": value
    for role in ("AUTHOR", "COMMITTER")
    for what, value in (("NAME", "A"), ("EMAIL", "a@b.test"), ("DATE", "1700000000 +0200"))
}
COMMITTED_AT = 1700000000


@pytest.fixture(autouse=True)
def own_temporary_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(scratch))
    monkeypatch.setenv("GIT_CONFIG_GLOBAL", os.devnull)
    yield scratch
    assert list(scratch.iterdir()) == []


def git(where: Path, *arguments: str) -> str:
    done = subprocess.run(
        ["git", "-C", str(where), *arguments],
        env={**os.environ, **WHO},
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout.strip()


def commit(where: Path, text: str) -> str:
    (where / "answer.txt").write_text(text)
    git(where, "add", "--all")
    git(where, "commit", "--quiet", "--message", text)
    return git(where, "rev-parse", "HEAD")


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """Three commits and another branch; the second commit is the task's."""
    where = tmp_path / "repository"
    where.mkdir()
    git(where, "init", "--quiet", "--initial-branch=main")
    (where / "src").mkdir()
    (where / "src" / "run.sh").write_text("#!/bin/sh\n")
    (where / "src" / "run.sh").chmod(0o700)
    (where / "link").symlink_to("src/run.sh")
    (where / ".gitattributes").write_text("src/* export-ignore\n")
    (where / "big").write_bytes(b"0123456789" * 30_000)
    commit(where, "past")
    (where / "big").write_bytes(b"0123456789" * 30_000 + b"x")
    git(where, "tag", "--annotate", "--message", "x", "v1", commit(where, "now"))
    commit(where, "future: the fix")
    git(where, "checkout", "--quiet", "-b", "solution")
    commit(where, "another future")
    git(where, "checkout", "--quiet", "main")
    return where


def digest(checkout: Checkout) -> str:
    manner = Manner((0, 0), mtime=checkout.committed_at, plain_modes=True)
    hashed = hashlib.sha256()
    for chunk in pack_layer(checkout.directory, "/workspace", manner):
        hashed.update(chunk)
    return hashed.hexdigest()


@contextmanager
def flattened(
    where: Path | str, what: str, history: History = "commit", branch: str | None = None
) -> Iterator[Checkout]:
    checkout = check_out(GitTree(where, what, history, branch))
    try:
        yield checkout
    finally:
        checkout.remove()


def test_nothing_but_the_commit_is_there(repository: Path) -> None:
    task = git(repository, "rev-parse", "v1^{commit}")
    with flattened(repository, "v1") as checkout:
        files = checkout.directory
        assert (checkout.commit, checkout.committed_at) == (task, COMMITTED_AT)
        assert (files / "answer.txt").read_text() == "now"
        assert (files / "link").readlink() == Path("src/run.sh")
        assert (files / "src" / "run.sh").exists()
        listed = git(files, "cat-file", "--batch-all-objects", "--batch-check").splitlines()
        reachable = git(repository, "ls-tree", "-r", "-t", task).splitlines()
        assert {line.split()[0] for line in listed} == {
            task,
            git(repository, "rev-parse", f"{task}^{{tree}}"),
            *(line.split()[2] for line in reachable),
        }
        assert [line.split()[0] for line in listed if " commit " in line] == [task]
        assert git(files, "rev-list", "--all", "HEAD") == task
        assert git(files, "for-each-ref") == ""
        assert git(files, "remote") == ""
        assert git(files, "reflog") == ""
        there = {str(p.relative_to(files / ".git")) for p in (files / ".git").rglob("*")}
        assert not there & {"packed-refs", "logs", "FETCH_HEAD", "ORIG_HEAD", "hooks", "info"}
        text = b"".join(p.read_bytes() for p in files.rglob("*") if p.is_file())
        for future in ("main", "solution"):
            assert git(repository, "rev-parse", future).encode() not in text
        assert str(repository).encode() not in text


def test_git_goes_on_working_there(repository: Path) -> None:
    with flattened(repository, "v1") as checkout:
        files = checkout.directory
        assert git(files, "status", "--porcelain") == ""
        assert git(files, "diff") == ""
        git(files, "fsck", "--strict")
        (files / "answer.txt").write_text("mine")
        assert git(files, "status", "--porcelain") == "M answer.txt"
        commit(files, "mine")
        assert git(files, "log", "--format=%s").splitlines() == ["mine", "now"]


def test_a_branch_as_asked(repository: Path) -> None:
    with flattened(repository, "v1", branch="team/task") as checkout:
        assert git(checkout.directory, "branch", "--show-current") == "team/task"
        assert git(checkout.directory, "status", "--porcelain") == ""
        assert git(checkout.directory, "for-each-ref", "--format=%(refname)") == (
            "refs/heads/team/task"
        )


def test_files_alone(repository: Path) -> None:
    with flattened(repository, "v1", history="none") as checkout:
        names = {path.name for path in checkout.directory.iterdir()}
        assert names == {".gitattributes", "answer.txt", "big", "link", "src"}
        assert (checkout.directory / "src" / "run.sh").exists(), "export-ignore is of no account"


@pytest.mark.parametrize("history", ["commit", "none"])
def test_two_clones_give_the_same_bytes(repository: Path, tmp_path: Path, history: History) -> None:
    other = tmp_path / "clone"
    git(tmp_path, "clone", "--quiet", "--no-hardlinks", str(repository), str(other))
    git(other, "repack", "-a", "-d", "-f", "--quiet", "--depth=50", "--window=50")
    full = git(repository, "rev-parse", "v1^{commit}")
    digests = []
    for where, what in ((repository, "v1"), (other, full), (f"file://{other}", full)):
        old = os.umask(0o077 if where == other else 0o022)
        try:
            with flattened(where, what, history) as checkout:
                digests.append(digest(checkout))
        finally:
            os.umask(old)
    assert len(digests) == 3
    assert len(set(digests)) == 1


def test_a_first_commit_is_not_shallow(repository: Path) -> None:
    with flattened(repository, "v1~1") as checkout:
        assert not (checkout.directory / ".git" / "shallow").exists()
        git(checkout.directory, "fsck", "--strict")
        assert git(checkout.directory, "status", "--porcelain") == ""


def test_submodules_are_refused_by_name(repository: Path, tmp_path: Path) -> None:
    module = tmp_path / "module"
    shutil.copytree(repository, module)
    git(
        repository, "-c", "protocol.file.allow=always", "submodule", "add", "-q", str(module), "sub"
    )
    git(repository, "commit", "--quiet", "--message", "with a submodule")
    with pytest.raises(InvalidRequest, match=r"submodules \(sub\)"):
        check_out(GitTree(repository))


@pytest.mark.parametrize(
    ("what", "error", "words"),
    [
        ("nonsense", NotFound, "has no commit nonsense"),
        ("--upload-pack=x", InvalidRequest, "not a commit"),
        ("", InvalidRequest, "not a commit"),
    ],
)
def test_what_is_no_commit(repository: Path, what: str, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        check_out(GitTree(repository, what))


def test_what_is_no_repository(repository: Path, tmp_path: Path) -> None:
    with pytest.raises(NotFound, match="no local repository"):
        check_out(GitTree(tmp_path / "nowhere"))
    (tmp_path / "plain").mkdir()
    with pytest.raises(NotFound, match="is no repository"):
        check_out(GitTree(tmp_path / "plain"))
    with pytest.raises(InvalidRequest, match="part of the repository"):
        check_out(GitTree(repository / "src"))
    with pytest.raises(InvalidRequest, match="whole id"):
        check_out(GitTree(f"file://{repository}", "abcdef1"))
    with pytest.raises(NotFound, match="cannot fetch"):
        check_out(GitTree(f"file://{tmp_path}/nowhere", "0" * 40))


@pytest.mark.parametrize("branch", ["-x", "a..b", "a/.b", "x.lock", "a//b", "a b", "a/"])
def test_a_branch_that_is_none(repository: Path, branch: str) -> None:
    with pytest.raises(InvalidRequest, match="branch"):
        check_out(GitTree(repository, "v1", "commit", branch))


def test_no_git_here(repository: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(Unsupported, match="git"):
        check_out(GitTree(repository))


def test_the_users_own_settings_change_nothing(
    repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with flattened(repository, "v1") as checkout:
        plain = digest(checkout)
    config = tmp_path / "config"
    config.write_text("[core]\n autocrlf = true\n[pack]\n window = 50\n compression = 1\n")
    monkeypatch.setenv("GIT_CONFIG_GLOBAL", str(config))
    monkeypatch.setenv("GIT_DIR", "/nowhere")
    with flattened(repository, "v1") as checkout:
        assert digest(checkout) == plain
