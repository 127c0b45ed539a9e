"""What an edge does about the past when it starts: adopt, undo, remove.

journal says           aether answers   then
running                yes              adopted
running                no               removed, remembered as lost
being removed          -                removed, remembered as it was meant
half made              -                undone and forgotten: whoever asked asks again
nothing it knows of    -                its groups, sockets and mounts are removed
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator, Mapping

import anyio

from dsec.edge import changing, entering
from dsec.edge.backends.interface import Backend
from dsec.edge.lifecycle.journal import Journal, Story
from dsec.edge.lifecycle.owner import Owner
from dsec.edge.lifecycle.surroundings import Surroundings
from dsec.edge.record import SandboxRecord
from dsec.kit.blocking import in_thread

logger = logging.getLogger("dsec.edge.sweep")

AT_ONCE = 16


async def sweep(
    around: Surroundings, backends: Mapping[str, Backend], live: dict[str, Owner]
) -> list[Story]:
    """Bring the node's state and its journals together; `live` holds what was adopted.

    What cannot be removed now is logged and stays journaled for the next time.

    Returns what is still journaled then: nobody else may touch what is theirs.
    """
    journal = around.journal
    stories = await in_thread("disk", journal.stories)
    limit = anyio.CapacityLimiter(AT_ONCE)
    async with anyio.create_task_group() as group:
        for story in stories:
            group.start_soon(_settle, story, around, backends, live, limit)
    left = await in_thread("disk", journal.stories)
    known = frozenset(story.id for story in left)
    for backend in backends.values():
        with _logged("strays"):
            for removed in await backend.strays(known):
                logger.warning("removed a stray", extra={"what": removed})
    return left


async def _settle(
    story: Story,
    around: Surroundings,
    backends: Mapping[str, Backend],
    live: dict[str, Owner],
    limit: anyio.CapacityLimiter,
) -> None:
    async with limit:
        with _logged(story.id):
            record = story.record
            backend = backends.get(record.spec.backend) if record else None
            if record is None:
                await _without_record(story, around.journal)
            elif backend is None:
                logger.error("its backend is not configured", extra={"sandbox_id": story.id})
            elif story.launched or story.stopping:
                owner = live[story.id] = Owner(record, backend, around)
                owner.detail = story.stop_detail
                await owner.adopt(story.stopping, story.pause, unsettled=story.unsettled)
                if story.changed is not None and not owner.over.is_set():
                    await changing.settle(owner, story.changed, entering.settle)
            else:
                await _undo(record, backend, around.journal)


async def _without_record(story: Story, journal: Journal) -> None:
    # Its facts are written before anything is made, so without a whole record nothing was; but one
    # that is there and cannot be read is kept for a person to look at.
    if await in_thread("disk", journal.unreadable, story.id):
        logger.error("its record cannot be read", extra={"sandbox_id": story.id})
        return
    await in_thread("disk", journal.discard, story.id)


async def _undo(record: SandboxRecord, backend: Backend, journal: Journal) -> None:
    logger.warning("undoing a half-made sandbox", extra={"sandbox_id": record.id})
    await backend.kill(record)
    await backend.clean(record)
    await in_thread("disk", journal.mark, record.id, "undone", "launch")
    await in_thread("disk", journal.discard, record.id)


@contextlib.contextmanager
def _logged(what: str) -> Iterator[None]:
    try:
        yield
    except Exception:  # one that cannot be settled must not keep the edge from starting
        logger.exception("could not be swept", extra={"what": what})
