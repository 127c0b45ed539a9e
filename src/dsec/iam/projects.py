"""Projects nest: each but the root has a parent."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from dsec.base.ids import ProjectId

ROOT = ProjectId("root")


@dataclass(frozen=True, slots=True)
class Project:
    """A project; `parent` is None for the root alone."""

    id: ProjectId
    parent: ProjectId | None
    name: str


class ProjectTree:
    """All projects at one moment; immutable."""

    def __init__(self, parents: Mapping[ProjectId, ProjectId | None]) -> None:
        self._parents = dict(parents)

    def chain(self, project: ProjectId) -> Iterator[ProjectId]:
        """A project and those above it, upwards; nothing for an unknown project."""
        at: ProjectId | None = project
        seen: set[ProjectId] = set()
        while at is not None and at in self._parents and at not in seen:
            seen.add(at)
            yield at
            at = self._parents[at]

    def below(self, project: ProjectId) -> frozenset[ProjectId]:
        """A project and all below it."""
        return frozenset(other for other in self._parents if project in self.chain(other))
