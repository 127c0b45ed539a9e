"""History that the task's state should not know of yet."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

from dsec.images.lint.environment import Environment
from dsec.images.lint.git.objects import Objects
from dsec.images.lint.git.repository import Named, Repository, ancestors, peeled, repositories
from dsec.images.lint.rule import Family, Found, Rule
from dsec.images.overlaid import Entry

FUTURE_OBJECTS = Rule(
    "git-future-objects",
    "error",
    "A repository holds commits, loose or packed, that are not in the history of its HEAD.",
    "`git log --all`, `git fsck --lost-found` or `git show` finds the fix there.",
    "Flatten the history to HEAD, or remove the refs and logs, then `git gc --prune=now`.",
)
FUTURE_REFS = Rule(
    "git-future-refs",
    "error",
    "A ref, packed ref, reflog, stash, tag or ORIG_HEAD names a commit outside HEAD's history.",
    "It leads to a solution, or to other work, by name.",
    "Delete the ref or log file, then `git reflog expire --expire=now --all; git gc --prune=now`.",
)
DANGLING_REFS = Rule(
    "git-dangling-refs",
    "warning",
    "A ref or log names a commit that the repository does not hold.",
    "Its id can be looked up or fetched elsewhere.",
    "Delete the ref or log file.",
)
REMOTE = Rule(
    "git-remote",
    "warning",
    "A repository's configuration has a remote.",
    "With a network, `git fetch` brings the future; without, it names where to look.",
    "`git remote remove NAME` when the environment is built.",
)
UNREADABLE = Rule(
    "git-unreadable",
    "warning",
    "A part of a repository could not be read: damaged, without an index, or of an unknown form.",
    "What it hides was not judged.",
    "Run `git fsck` and `git gc` when the environment is built.",
)
OTHER_HISTORY = Rule(
    "history-other",
    "warning",
    "There is a Mercurial, Subversion, Bazaar, Fossil or Jujutsu history, which is not looked into.",
    "It may hold the future as well as Git's can.",
    "Remove it if the task does not need it.",
)

_OTHER = {b".hg", b".svn", b".bzr", b".jj", b".fslckout"}
_SHOWN = 3


def look(env: Environment) -> Iterator[Found]:
    """Judge every repository."""
    for path, entry in env.entries.items():
        if entry.name in _OTHER:
            yield OTHER_HISTORY.at(
                f"a history is kept in {path.rpartition(b'/')[2].decode()}", entry
            )
    for repository in repositories(env):
        yield from _judge(repository)


def _judge(repository: Repository) -> Iterator[Found]:
    objects, head = repository.objects(), repository.head()
    history = ancestors(objects, head)
    yield from _future_objects(repository.directory, objects, history, head)
    yield from _named(repository, objects, history)
    for name in repository.remotes:
        yield REMOTE.at(f"there is a remote named {name}", repository.directory)
    for entry, why in objects.unread:
        yield UNREADABLE.at(why, entry)
    if repository.reftable:
        yield UNREADABLE.at("its refs are kept as a reftable", repository.directory)


def _future_objects(
    directory: Entry, objects: Objects, history: set[str], head: str
) -> Iterator[Found]:
    future = objects.commits.keys() - history
    if not future:
        return
    now = objects.commits[head].committed_s if head in objects.commits else 0
    by_time = sorted(future, key=lambda name: (-objects.commits[name].committed_s, name))
    newer = sum(objects.commits[name].committed_s > now for name in future)
    shown = ", ".join(f"{name[:12]} {objects.commits[name].subject!r}" for name in by_time[:_SHOWN])
    count = f"{len(future)} commits are" if len(future) > 1 else "1 commit is"
    yield FUTURE_OBJECTS.at(
        f"{count} not in the history of HEAD, {newer} newer than it: {shown}", directory
    )


def _named(repository: Repository, objects: Objects, history: set[str]) -> Iterator[Found]:
    """One finding for each ref or log, however many commits it names."""
    future: dict[tuple[bytes, str], list[Named]] = defaultdict(list)
    dangling: dict[tuple[bytes, str], list[Named]] = defaultdict(list)
    for named in repository.named():
        target = peeled(objects, named.target)
        if target not in history:
            kind = future if target in objects.commits else dangling
            kind[named.entry.path, named.name].append(named)
    for rule, found in ((FUTURE_REFS, future), (DANGLING_REFS, dangling)):
        for (_, name), each in found.items():
            targets = sorted({named.target[:12] for named in each})
            more = f" and {len(targets) - _SHOWN} more" if len(targets) > _SHOWN else ""
            shown = ", ".join(targets[:_SHOWN]) + more
            yield rule.at(f"{name} names {shown}", each[0].entry)


FAMILY = Family(
    "git",
    (FUTURE_OBJECTS, FUTURE_REFS, DANGLING_REFS, REMOTE, UNREADABLE, OTHER_HISTORY),
    look,
)
