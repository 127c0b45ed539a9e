"""Listing sandboxes: ask every edge at once, put the answers in one order, cut a page."""

from __future__ import annotations

import base64
import binascii
import logging
from dataclasses import dataclass, field

import anyio
import msgspec

from dsec.base.errors import DsecError, InvalidRequest, Unavailable
from dsec.base.ids import NodeId, ProjectId
from dsec.base.states import SandboxState
from dsec.control.access import Caller
from dsec.control.edges import Edge, Edges
from dsec.iam.permissions import Permission
from dsec.wire.edge_v1 import ListFilter
from dsec.wire.public_v1 import SandboxList
from dsec.wire.sandbox import SandboxView

logger = logging.getLogger("dsec.control")

LIST_TIMEOUT_S = 5.0


@dataclass(frozen=True, slots=True)
class Wanted:
    """Which sandboxes; empty = all."""

    labels: dict[str, str] = field(default_factory=dict)
    states: list[SandboxState] = field(default_factory=list)
    job: str = ""
    limit: int = 100
    after: str = ""
    """The `next` of the page before."""


@dataclass(slots=True)
class Page:
    """A page, and the nodes that did not answer: what they have is missing from it."""

    listed: SandboxList
    silent: list[NodeId]


async def list_sandboxes(edges: Edges, caller: Caller, wanted: Wanted) -> Page:
    """Sandboxes the caller may see, newest first.

    Raises:
        InvalidRequest: `after` is not from an earlier page.
        PermissionDenied: the caller may see none at all.
        Unavailable: no edge answers.
    """
    projects = caller.visible(Permission.SANDBOX_READ)
    if not projects:
        caller.require(Permission.SANDBOX_READ, caller.project)
    start = _read_mark(wanted.after)
    answers, silent = await ask_all(edges, _filter(wanted, projects))
    found = sorted((v for v in answers if v.project in projects), key=_mark)
    rest = [view for view in found if start is None or _mark(view) > start]
    page = rest[: wanted.limit]
    more = _write_mark(_mark(page[-1])) if len(rest) > len(page) else ""
    return Page(SandboxList(sandboxes=page, next=more), silent)


def _filter(wanted: Wanted, projects: frozenset[ProjectId]) -> ListFilter:
    only = next(iter(projects)) if len(projects) == 1 else ""
    return ListFilter(
        project=only, labels=wanted.labels, states=list(wanted.states), job=wanted.job
    )


async def ask_all(edges: Edges, matching: ListFilter) -> tuple[list[SandboxView], list[NodeId]]:
    """What every edge has that matches, and the nodes that do not answer.

    Raises:
        Unavailable: none does.
    """
    views: list[SandboxView] = []
    silent: list[NodeId] = []

    async def ask(node: NodeId, edge: Edge) -> None:
        try:
            with anyio.fail_after(LIST_TIMEOUT_S):
                views.extend(await edge.api.list_sandboxes(matching))
        except (DsecError, TimeoutError):
            silent.append(node)

    known = edges.all()
    async with anyio.create_task_group() as group:
        for node, edge in known:
            group.start_soon(ask, node, edge)
    if len(silent) == len(known):
        raise Unavailable("no node answers")
    if silent:
        logger.warning("a list is incomplete", extra={"silent": silent})
    return views, sorted(silent)


def _mark(view: SandboxView) -> tuple[float, str]:
    """Place in the order: newest first, then by id."""
    return (-view.created_at, view.id)


def _write_mark(mark: tuple[float, str]) -> str:
    return base64.urlsafe_b64encode(msgspec.json.encode(mark)).decode().rstrip("=")


def _read_mark(text: str) -> tuple[float, str] | None:
    if not text:
        return None
    try:
        raw = base64.urlsafe_b64decode(text + "=" * (-len(text) % 4))
        return msgspec.json.decode(raw, type=tuple[float, str])
    except (binascii.Error, ValueError, msgspec.MsgspecError):
        raise InvalidRequest("`next` is not from an earlier page") from None
