"""Where the content of a layer comes from, besides a local directory or tar file."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

History = Literal["commit", "none"]


@dataclass(frozen=True, slots=True)
class GitTree:
    """A git repository as it was at one commit, and nothing that came after it.

    The `git` program is run on this machine, with your own credentials. The same commit gives the
    same layer from whichever clone it is taken.

    Attributes:
        repository: a local path, or a URL that `git fetch` takes.
        commit: what to take: an id, a branch or a tag; of a URL, an id must be whole.
        history: "commit": the files and a `.git` that holds exactly this commit, so that `git
            status`, `diff` and `commit` work; "none": the files alone; None: a workspace has the
            former, a toolkit the latter.
        branch: what the commit is checked out as; None: a detached HEAD.
    """

    repository: str | Path
    commit: str = "HEAD"
    history: History | None = None
    branch: str | None = None


@dataclass(frozen=True, slots=True)
class SandboxTree:
    """A directory of a sandbox, with the owners and modes it has there.

    Attributes:
        sandbox: the sandbox's id.
        path: the directory.
        user: on whose behalf it is read; None: the sandbox's `init_user`.
    """

    sandbox: str
    path: str
    user: str | None = None


Source = str | Path | GitTree | SandboxTree
"""A local directory or tar file by its path, or one of the above."""
