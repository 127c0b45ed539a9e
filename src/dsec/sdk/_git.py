"""A git repository flattened to one commit, by the `git` program.

The SDK runs where its user is, so it cannot use `dsec.linux.process`; this is its only module that
starts programs, always in a worker thread. A fetch uses the user's configuration (credentials, the
way to a host); all that makes the result does not, or two machines would make different ones.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess  # noqa: TID251 - see above
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from dsec.base.errors import InternalError, InvalidRequest, NotFound, Unsupported
from dsec.sdk.sources import GitTree

FETCH_TIMEOUT_S = 1800.0
WORK_TIMEOUT_S = 600.0
COMPRESSION = 6
_FULL_ID = re.compile("[0-9a-f]{40}|[0-9a-f]{64}")
_SHORT_ID = re.compile("[0-9a-f]{4,63}")
_BRANCH = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_./-]{0,200}")
_CONFIG = """\
[core]
\trepositoryformatversion = {version}
\tfilemode = true
\tbare = false
\tlogallrefupdates = true
"""
_OBJECT_FORMAT = "[extensions]\n\tobjectformat = sha256\n"
_GITLINK = "160000"


@dataclass(frozen=True, slots=True)
class Checkout:
    """A commit on disk; `directory` is `files` within a temporary directory of its own."""

    directory: Path
    commit: str
    committed_at: int
    """Seconds since the epoch."""

    def remove(self) -> None:
        """Take it away."""
        shutil.rmtree(self.directory.parent, ignore_errors=True)


def check_out(source: GitTree) -> Checkout:
    """Make a checkout of a commit, with no other object in its `.git` than those of the commit.

    Raises:
        NotFound: there is no such repository or commit.
        InvalidRequest: the commit has submodules, or the branch is none.
        Unsupported: there is no git here.
    """
    if not shutil.which("git"):
        raise Unsupported("publishing from git needs the git program on this machine")
    if source.branch is not None and not _is_branch(source.branch):
        raise InvalidRequest(f"{source.branch[:80]!r} is not a branch's name")
    scratch = Path(tempfile.mkdtemp(prefix="dsec-git-"))
    try:
        return _Work(source, scratch).done()
    except BaseException:
        shutil.rmtree(scratch, ignore_errors=True)
        raise


def _is_branch(name: str) -> bool:
    parts = name.split("/")
    return (
        bool(_BRANCH.fullmatch(name))
        and ".." not in name
        and all(part and part[0] != "." and not part.endswith((".", ".lock")) for part in parts)
    )


class _Work:
    """The steps, in a scratch directory: `fetched` (bare) gives `files`."""

    def __init__(self, source: GitTree, scratch: Path) -> None:
        self._source = source
        self._fetched = scratch / "fetched"
        self._files = scratch / "files"
        self._index = scratch / "index"

    def done(self) -> Checkout:
        self._fetch()
        commit = self._git("rev-parse", "--verify", "FETCH_HEAD^{commit}").strip()
        self._refuse_submodules(commit)
        self._files.mkdir()
        self._write_files(commit)
        if self._source.history == "commit":
            self._write_repository(commit)
            self._verify(commit)
        when = self._git("show", "--no-patch", "--format=%ct", commit)
        shutil.rmtree(self._fetched)
        self._index.unlink()
        return Checkout(self._files, commit, max(int(when), 0))

    # the commit comes in

    def _fetch(self) -> None:
        wanted, address = self._wanted()
        kind = "sha256" if len(wanted) == 64 and _FULL_ID.fullmatch(wanted) else "sha1"
        self._init(self._fetched, "--bare", f"--object-format={kind}")
        arguments = ["fetch", "--quiet", "--depth=1", "--no-tags", "--no-write-commit-graph"]
        done = _run(
            ["git", "-C", str(self._fetched), *arguments, "--", address, wanted],
            _users_environment(),
            FETCH_TIMEOUT_S,
        )
        if done.returncode:
            raise NotFound(
                f"git cannot fetch {wanted} from {address}: {_said(done)}", kind="commit"
            )

    def _wanted(self) -> tuple[str, str]:
        """The commit's id, or a ref of a URL; and where to fetch it from."""
        text, commit = str(self._source.repository), self._source.commit
        if commit.startswith("-") or not commit:
            raise InvalidRequest(f"{commit!r} is not a commit")
        path = Path(text)
        if not path.exists():
            if "://" not in text and not re.match(r"[\w.-]+@?[\w.-]*:", text):
                raise NotFound(f"no local repository {text}", kind="local_path")
            if _SHORT_ID.fullmatch(commit) and not _FULL_ID.fullmatch(commit):
                raise InvalidRequest(f"of a remote repository, {commit} must be the whole id")
            return commit, text
        return self._resolve(path, commit)

    def _resolve(self, path: Path, commit: str) -> tuple[str, str]:
        found = _asked(path, "--path-format=absolute", "--git-common-dir", "--show-prefix")
        if found.returncode:
            raise NotFound(f"{path} is no repository: {_said(found)}", kind="local_path")
        home, _, prefix = found.stdout.decode("utf-8", "surrogateescape").partition("\n")
        if prefix.strip():
            raise InvalidRequest(f"{path} is a part of the repository in {home}: name that")
        done = _asked(path, "--verify", "--quiet", f"{commit}^{{commit}}")
        if done.returncode:
            raise NotFound(f"{path} has no commit {commit}", kind="commit")
        return done.stdout.decode().strip(), home

    def _refuse_submodules(self, commit: str) -> None:
        listed = self._git("ls-tree", "-r", "-z", "--full-tree", commit)
        lines = [line for line in listed.split("\0") if line.startswith(_GITLINK)]
        if lines:
            names = ", ".join(line.partition("\t")[2] for line in lines[:5])
            raise InvalidRequest(
                f"the commit has submodules ({names}), which would be missing; check it out with "
                "them and publish the directory"
            )

    # and goes out

    def _write_files(self, commit: str) -> None:
        self._git("read-tree", commit)
        self._git("checkout-index", "--all", "--force", work_tree=self._files)

    def _write_repository(self, commit: str) -> None:
        inside = self._files / ".git"
        if inside.exists() or inside.is_symlink():
            raise InternalError("a commit with a .git of its own")
        packs = inside / "objects" / "pack"
        for directory in (packs, inside / "objects" / "info", inside / "refs" / "tags"):
            directory.mkdir(parents=True)
        (inside / "refs" / "heads").mkdir()
        self._pack(commit, packs / "pack")
        self._write_head(inside, commit)
        sha256 = len(commit) == 64
        config = _CONFIG.format(version=int(sha256)) + (_OBJECT_FORMAT if sha256 else "")
        (inside / "config").write_text(config)
        if "\nparent " in self._git("cat-file", "commit", commit).partition("\n\n")[0]:
            (inside / "shallow").write_text(f"{commit}\n")
        # Made by read-tree alone, it has no file's times in it: only what the commit says.
        shutil.copyfile(self._index, inside / "index")

    def _pack(self, commit: str, base: Path) -> None:
        """One pack, the same whatever packs the objects came from: no deltas, a fixed order."""
        command = ["pack-objects", "--quiet", "--window=0", "--no-reuse-object", "--threads=1"]
        command += [f"--compression={COMPRESSION}", "--index-version=2", str(base)]
        self._git("-c", "pack.writeReverseIndex=false", *command, given=self._objects(commit))

    def _objects(self, commit: str) -> str:
        listed = self._git("rev-list", "--objects", "--no-object-names", "--max-count=1", commit)
        return "\n".join(sorted(listed.split())) + "\n"

    def _write_head(self, inside: Path, commit: str) -> None:
        branch = self._source.branch
        if branch is None:
            (inside / "HEAD").write_text(f"{commit}\n")
            return
        reference = inside / "refs" / "heads" / branch
        reference.parent.mkdir(parents=True, exist_ok=True)
        reference.write_text(f"{commit}\n")
        (inside / "HEAD").write_text(f"ref: refs/heads/{branch}\n")

    def _verify(self, commit: str) -> None:
        """See that exactly the commit's objects are there, read by git from what was written."""
        command = ["git", "-C", str(self._files), "cat-file", "--batch-all-objects"]
        done = _run([*command, "--batch-check"], _own_environment({}), WORK_TIMEOUT_S)
        lines = [line.split() for line in done.stdout.decode().splitlines()]
        commits = [line[0] for line in lines if line[1:2] == ["commit"]]
        there = {line[0] for line in lines}
        if done.returncode or commits != [commit] or there != set(self._objects(commit).split()):
            raise InternalError(f"the repository was not flattened to {commit}: {_said(done)}")

    def _init(self, directory: Path, *options: str) -> None:
        command = ["git", "init", "--quiet", "--template=", *options, str(directory)]
        done = _run(command, _own_environment({}), WORK_TIMEOUT_S)
        if done.returncode:
            raise InternalError(f"git init: {_said(done)}")

    def _git(self, *arguments: str, given: str = "", work_tree: Path | None = None) -> str:
        """Run git on what was fetched."""
        extra = {"GIT_DIR": str(self._fetched), "GIT_INDEX_FILE": str(self._index)}
        if work_tree is not None:
            extra["GIT_WORK_TREE"] = str(work_tree)
        done = _run(["git", *arguments], _own_environment(extra), WORK_TIMEOUT_S, given)
        if done.returncode:
            raise InternalError(f"git {arguments[0]}: {_said(done)}")
        return done.stdout.decode("utf-8", "surrogateescape")


def _asked(path: Path, *arguments: str) -> subprocess.CompletedProcess[bytes]:
    command = ["git", "-C", str(path), "rev-parse", *arguments]
    return _run(command, _users_environment(), WORK_TIMEOUT_S)


def _run(
    command: list[str], environment: Mapping[str, str], timeout_s: float, given: str = ""
) -> subprocess.CompletedProcess[bytes]:
    try:
        return subprocess.run(  # noqa: S603 - a list, no shell
            command,
            env=environment,
            input=given.encode(),
            capture_output=True,
            timeout=timeout_s,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise InvalidRequest(f"git took longer than {timeout_s:.0f} s") from None


def _users_environment() -> dict[str, str]:
    """As the user has it, but never asking, and not for the repository we may be started in."""
    named = ("GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE", "GIT_OBJECT_DIRECTORY", "GIT_PREFIX")
    kept = {key: value for key, value in os.environ.items() if key not in named}
    return kept | {"GIT_TERMINAL_PROMPT": "0", "LC_ALL": "C"}


def _own_environment(extra: Mapping[str, str]) -> dict[str, str]:
    """Nobody's configuration."""
    kept = {key: value for key, value in os.environ.items() if not key.startswith("GIT_")}
    nobody = {"GIT_CONFIG_NOSYSTEM": "1", "GIT_CONFIG_GLOBAL": os.devnull}
    return {**kept, **nobody, "GIT_ATTR_NOSYSTEM": "1", "LC_ALL": "C", **extra}


def _said(done: subprocess.CompletedProcess[bytes]) -> str:
    lines = done.stderr.decode("utf-8", "replace").strip().splitlines()
    return lines[-1][:300] if lines else ""
