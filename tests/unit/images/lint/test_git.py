"""Histories made by git itself, read from their raw files."""

from __future__ import annotations

import os
import subprocess
import zlib
from pathlib import Path

import pytest

from dsec.images.lint.git.objects import Objects
from dsec.images.lint.git.packs import (
    MAX_OBJECT_BYTES,
    Inflater,
    Unreadable,
    apply_delta,
    read_index,
)
from dsec.images.lint.git.repository import ancestors, repositories
from tests.unit.images.lint.build import debian, environment, found, report

_AT = "2024-01-01T00:00:00Z"


class Git:
    """A repository on disk, with commits a minute apart."""

    def __init__(self, path: Path, *options: str) -> None:
        self.path = path
        self._minute = 0
        path.mkdir(parents=True, exist_ok=True)
        self("init", "-q", "-b", "main", *options)

    def __call__(self, *words: str) -> str:
        self._minute += 1
        date = f"2024-01-01T{self._minute // 60:02}:{self._minute % 60:02}:00Z"
        identity = {
            f"GIT_{who}_{what}": "a@b"
            for who in ("AUTHOR", "COMMITTER")
            for what in ("NAME", "EMAIL")
        }
        dates = {"GIT_AUTHOR_DATE": date, "GIT_COMMITTER_DATE": date}
        nobodys = {
            "GIT_CONFIG_GLOBAL": "/dev/null",
            "GIT_CONFIG_NOSYSTEM": "1",
            "HOME": "/nonexistent",
        }
        done = subprocess.run(
            ["git", "-c", "gc.auto=0", "-c", "protocol.file.allow=always", *words],
            cwd=self.path,
            env={"PATH": os.environ["PATH"]} | identity | dates | nobodys,
            check=True,
            capture_output=True,
            text=True,
        )
        return done.stdout.strip()

    def commit(self, message: str) -> str:
        (self.path / "file").write_text(message)
        self("add", "file")
        self("commit", "-q", "-m", message)
        return self("rev-parse", "HEAD")

    def forget(self) -> None:
        """Delete what git keeps beside the refs."""
        self("reflog", "expire", "--expire=now", "--all")
        for name in ("ORIG_HEAD", "FETCH_HEAD", "COMMIT_EDITMSG"):
            (self.path / ".git" / name).unlink(missing_ok=True)
        for log in (self.path / ".git/logs").rglob("*"):
            if log.is_file():
                log.unlink()

    def findings(self) -> list[tuple[str, str]]:
        image = debian()
        image.take(self.path, "/r")
        return found(environment(image))


@pytest.fixture(params=["sha1", "sha256"])
def git(tmp_path: Path, request: pytest.FixtureRequest) -> Git:
    git = Git(tmp_path / "r", f"--object-format={request.param}")
    git.commit("one")
    git.commit("two")
    return git


FUTURE = ("git-future-objects", "/r/.git")


def test_a_history_that_ends_at_head_is_clean(git: Git) -> None:
    git("tag", "-a", "v1", "-m", "tag", "HEAD~1")
    git("branch", "old", "HEAD~1")
    assert git.findings() == []
    git("gc", "-q")
    assert git.findings() == []


def test_everything_that_names_the_future(git: Git) -> None:
    git("tag", "-a", "v2", "-m", "the fix")
    git("branch", "fix")
    git("checkout", "-q", "--detach", "HEAD~1")
    assert git.findings() == [
        FUTURE,
        ("git-future-refs", "/r/.git/logs/HEAD"),
        ("git-future-refs", "/r/.git/logs/refs/heads/fix"),
        ("git-future-refs", "/r/.git/logs/refs/heads/main"),
        ("git-future-refs", "/r/.git/refs/heads/fix"),
        ("git-future-refs", "/r/.git/refs/heads/main"),
        ("git-future-refs", "/r/.git/refs/tags/v2"),
    ]


def test_packed_refs_and_objects(git: Git) -> None:
    git("tag", "-a", "v2", "-m", "the fix")
    git("checkout", "-q", "--detach", "HEAD~1")
    git.forget()
    git("gc", "-q")
    assert not list((git.path / ".git/objects").glob("??/*"))
    assert [rule for rule, _ in git.findings()] == ["git-future-objects", *["git-future-refs"] * 2]


def test_commits_that_nothing_names(git: Git) -> None:
    git("reset", "-q", "--hard", "HEAD~1")
    git.forget()
    assert git.findings() == [FUTURE]
    git("gc", "-q", "--prune=now")
    assert git.findings() == []


def test_the_report_says_which_and_whether_newer(git: Git) -> None:
    git("checkout", "-q", "-b", "side", "HEAD~1")
    git.commit("the\x1b fix")
    git("checkout", "-q", "main")
    image = debian()
    image.take(git.path, "/r")
    (future,) = (f for f in report(environment(image)).findings if f.rule == "git-future-objects")
    assert future.message.startswith("1 commit is not in the history of HEAD, 1 newer than it: ")
    assert future.message.endswith(r" 'the\x1b fix'")


def test_stashes_and_left_over_heads(git: Git) -> None:
    (git.path / "file").write_text("solution")
    git("stash", "-q")
    (git.path / ".git/ORIG_HEAD").write_text(git("rev-parse", "stash") + "\n")
    paths = [path for rule, path in git.findings() if rule == "git-future-refs"]
    assert paths == ["/r/.git/ORIG_HEAD", "/r/.git/logs/refs/stash", "/r/.git/refs/stash"]


def test_remotes_and_refs_to_what_is_not_here(git: Git) -> None:
    git("remote", "add", "origin", "https://example.com/r.git")
    width = len(git("rev-parse", "HEAD"))
    (git.path / ".git/FETCH_HEAD").write_text("d" * width + "\t\tbranch 'main' of example\n")
    assert git.findings() == [
        ("git-dangling-refs", "/r/.git/FETCH_HEAD"),
        ("git-remote", "/r/.git"),
    ]


def test_bare_repositories_work_trees_and_alternates(git: Git, tmp_path: Path) -> None:
    git("worktree", "add", "-q", "--detach", str(tmp_path / "other"), "HEAD")
    git("reset", "-q", "--hard", "HEAD~1")
    git.forget()
    assert ("git-future-refs", "/r/.git/worktrees/other/HEAD") in git.findings()
    git("clone", "-q", "--bare", "--shared", ".", str(tmp_path / "bare.git"))
    alternates = tmp_path / "bare.git/objects/info/alternates"
    alternates.write_text("/r/.git/objects\n")
    image = debian()
    image.take(git.path, "/r")
    image.take(tmp_path / "bare.git", "/srv/bare.git")
    assert ("git-future-objects", "/srv/bare.git") in found(environment(image))


def test_commits_stored_as_deltas(git: Git) -> None:
    for number in range(30):
        git("commit", "-q", "--allow-empty", "-m", f"{number}\n\n" + "the same words\n" * 100)
    git("reset", "-q", "--hard", "HEAD~10")
    git("repack", "-q", "-adf", "--depth=50", "--window=50", "--keep-unreachable")
    (index,) = (git.path / ".git/objects/pack").glob("*.idx")
    listed = [line.split() for line in git("verify-pack", "-v", str(index)).splitlines()]
    assert any(len(fields) == 7 and fields[1] == "commit" for fields in listed)
    image = debian()
    image.take(git.path, "/r")
    env = environment(image)
    (repository,) = repositories(env)
    objects = repository.objects()
    assert objects.unread == []
    assert set(objects.commits) == {f[0] for f in listed if f[1:2] == ["commit"]}
    assert ancestors(objects, repository.head()) == set(git("rev-list", "HEAD").split())


def damaged(git: Git, name: str, content: bytes) -> Objects:
    image = debian()
    image.take(git.path, "/r")
    (entry,) = (e for e in environment(image).entries if e.endswith(name.encode()))
    image.file(entry, content)
    (repository,) = repositories(environment(image))
    return repository.objects()


def test_damage_is_told(git: Git) -> None:
    git("gc", "-q")
    (pack,) = (git.path / ".git/objects/pack").glob("*.pack")
    index = pack.with_suffix(".idx").read_bytes()
    for name, content in [
        (".pack", b""),
        (".pack", pack.read_bytes()[:40]),
        (".pack", pack.read_bytes().replace(b"x\x9c", b"x\x00")),
        (".pack", b"\xff" * len(pack.read_bytes())),
        (".idx", b""),
        (".idx", index[:1100]),
        (".idx", index[: 8 + 1020] + b"\xff" * 4 + index[8 + 1024 :]),
    ]:
        objects = damaged(git, name, content)
        assert [entry.name.endswith(b".pack") for entry, _ in objects.unread] == [True], name
    pack.with_suffix(".idx").unlink()
    assert ("git-unreadable", f"/r/.git/objects/pack/{pack.name}") in git.findings()


def test_a_damaged_loose_object_does_not_hide_the_others(git: Git) -> None:
    loose = sorted((git.path / ".git/objects").glob("??/*"))
    name = "/".join(loose[0].parts[-2:])
    objects = damaged(git, name, b"garbage")
    assert len(objects.unread) == 1
    assert objects.commits


def test_a_loose_bomb_is_not_inflated(git: Git) -> None:
    bomb = b"commit 9000000000\0" + bytes(64 << 20)
    name = "/".join(min((git.path / ".git/objects").glob("??/*")).parts[-2:])
    objects = damaged(git, name, zlib.compress(bomb))
    assert "too large" in objects.unread[0][1]


def test_what_is_inflated_is_bounded() -> None:
    inflater = Inflater(max_bytes=2500)
    data = zlib.compress(bytes(1000))
    for _ in range(2):
        assert inflater.inflate(data, 1000) == bytes(1000)
    with pytest.raises(Unreadable, match="altogether"):
        inflater.inflate(data, 1000)
    with pytest.raises(Unreadable, match="too large"):
        Inflater().inflate(data, MAX_OBJECT_BYTES + 1)


def test_deltas() -> None:
    base = b"0123456789" * 10
    assert apply_delta(base, bytes([100, 7, 0x91, 5, 4, 3]) + b"abc") == b"5678abc"
    for bad in (
        b"",
        b"\x80",
        bytes([99, 1, 1]) + b"a",
        bytes([100, 9, 1]) + b"a",
        bytes([100, 1, 0x91]),
        bytes([100, 0xFF, 0xFF, 0xFF, 0x7F, 0x80]),
    ):
        with pytest.raises(Unreadable):
            apply_delta(base, bad)


def test_large_offsets_in_an_index() -> None:
    names = b"\x01" * 20 + b"\x02" * 20
    fans = b"".join(n.to_bytes(4, "big") for n in [0, 1, *[2] * 254])
    offsets = (12).to_bytes(4, "big") + (0x80000000).to_bytes(4, "big")
    index = b"\xfftOc\0\0\0\2" + fans + names + bytes(8) + offsets + (5 << 32).to_bytes(8, "big")
    assert read_index(index, 20) == {b"\x01" * 20: 12, b"\x02" * 20: 5 << 32}
    with pytest.raises(Unreadable, match="cut short"):
        read_index(index[:-8], 20)


def test_an_empty_repository_and_a_reftable(tmp_path: Path) -> None:
    git = Git(tmp_path / "r")
    assert git.findings() == []
    (git.path / ".git/reftable").mkdir()
    (git.path / ".git/reftable/tables.list").write_text("x")
    assert git.findings() == [("git-unreadable", "/r/.git")]
