"""One thing asked of many nodes: of all at once, of one after another, of the first that can."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from functools import partial
from typing import TypeVar

import anyio

from dsec.base.errors import DsecError, NotFound, Unavailable, Unsupported
from dsec.control.edges import Edge, Edges
from dsec.kit.generators import closing
from dsec.kit.together import together
from dsec.wire.edge_v1 import EdgeApi, ImageEvent
from dsec.wire.public_v1 import ImageProgress, ImageReady

T = TypeVar("T")
FANOUT_TIMEOUT_S = 10.0
Start = Callable[[EdgeApi], AsyncIterator[ImageEvent]]


def present(edges: Edges) -> list[Edge]:
    """Every edge that has answered once, those that answer now before the others.

    Raises:
        Unavailable: there is none.
    """
    known = [edge for _, edge in edges.all()]
    if not known:
        raise Unavailable("no node is known yet")
    return sorted(known, key=lambda edge: edge.view is None or not edge.view.healthy)


async def gather(edges: Edges, ask: Callable[[EdgeApi], Awaitable[T]]) -> list[T]:
    """What every node says that says something in time, in the order of `present`.

    Raises:
        DsecError: none does; what one of them said instead, if that is more than being away.
    """
    known = present(edges)
    answers: dict[int, T] = {}
    failures: list[DsecError] = []

    async def one(index: int, edge: Edge) -> None:
        try:
            with anyio.fail_after(FANOUT_TIMEOUT_S):
                answers[index] = await ask(edge.api)
        except DsecError as exc:
            failures.append(exc)
        except TimeoutError:
            failures.append(Unavailable("no answer in time"))

    async with anyio.create_task_group() as group:
        for index, edge in enumerate(known):
            group.start_soon(one, index, edge)
    if not answers:
        raise _worth_saying(failures)
    return [answers[index] for index in sorted(answers)]


def _worth_saying(failures: list[DsecError]) -> DsecError:
    # What is a kind of Unavailable says more than that a node is away.
    said = [failure for failure in failures if type(failure) is not Unavailable]
    return said[0] if said else Unavailable("no node answers")


async def first(edges: Edges, ask: Callable[[EdgeApi], Awaitable[T]]) -> T:
    """What the first node says that has what is asked about.

    Raises:
        NotFound: no node has it. DsecError: a node that has it failed.
    """
    missing: NotFound | None = None
    for edge in present(edges):
        try:
            return await ask(edge.api)
        except NotFound as exc:
            missing = exc
    raise missing or Unavailable("no node is known yet")


async def remove(
    edges: Edges,
    take_away: Callable[[EdgeApi], Awaitable[None]],
    check_unused: Callable[[EdgeApi], Awaitable[None]],
) -> None:
    """Remove something from every node, after all have said that nothing of theirs uses it.

    Args:
        edges: of the nodes.
        take_away: removes it from one; a node that has it no more says NotFound.
        check_unused: raises Conflict if something of the node uses it.

    Raises:
        NotFound: no node has it.
        Conflict: it is in use; nothing was removed, unless that use began just now.
        Unavailable: a node is away; nothing was removed, unless it went just now.
        Unsupported: every node has removed it, and what they share cannot.
    """
    known = present(edges)
    await together(partial(_check_unused, check_unused, edge.api) for edge in known)
    refused: list[NotFound | Unsupported] = []
    for edge in known:
        try:
            await take_away(edge.api)
        except (NotFound, Unsupported) as exc:
            refused.append(exc)
    for refusal in refused:
        if isinstance(refusal, Unsupported) or len(refused) == len(known):
            raise refusal


async def _check_unused(ask: Callable[[EdgeApi], Awaitable[None]], api: EdgeApi) -> None:
    try:
        with anyio.fail_after(FANOUT_TIMEOUT_S):
            await ask(api)
    except NotFound:
        return  # so it does not use it
    except TimeoutError:
        raise Unavailable("a node does not say in time whether it uses it") from None


async def one_after_another(known: list[Edge], start: Start) -> AsyncIterator[ImageEvent]:
    """Progress of all, and one `ready` at the end."""
    ready: ImageReady | None = None
    for edge in known:
        async with closing(start(edge.api)) as events:
            async for event in events:
                if isinstance(event, ImageProgress):
                    yield event
                else:
                    ready = event
    if ready is not None:
        yield ready


async def first_stream(known: list[Edge], start: Start) -> AsyncIterator[ImageEvent]:
    """Events of the first node that has what is asked about.

    Raises:
        NotFound: no node has it.
    """
    missing: NotFound | None = None
    for edge in known:
        begun = False
        try:
            async with closing(start(edge.api)) as events:
                async for event in events:
                    begun = True
                    yield event
                return
        except NotFound as exc:
            if begun:
                raise
            missing = exc
    if missing is not None:
        raise missing
