"""A live sandbox enters another phase, all of it or nothing.

Where files, secrets or the user change, what runs is ended first, by aether, which begins nothing
new until the rest has changed too: no program sees a part of one phase and a part of another. Else
the sandbox stands still while its network and class change.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from functools import partial
from typing import TYPE_CHECKING, Any

import anyio
from msgspec import to_builtins
from msgspec.structs import replace

from dsec.base.errors import Conflict, DsecError, Unavailable
from dsec.base.states import SandboxState
from dsec.edge import changing, networking, phases
from dsec.edge.backends.interface import NetworkOf
from dsec.edge.backends.launch_spec import environment_of, file_rules, user_of
from dsec.edge.lifecycle import resting
from dsec.edge.lifecycle.machine import Action
from dsec.edge.record import SandboxRecord, changeable
from dsec.kit.blocking import in_thread

if TYPE_CHECKING:
    from dsec.edge.backends.interface import Backend
    from dsec.edge.lifecycle.journal import Journal
    from dsec.edge.lifecycle.owner import Owner
    from dsec.edge.network.services import Services

logger = logging.getLogger("dsec.edge.entering")

ENTER_DEADLINE_S = 20.0
"""Aether waits 5 s for what it has killed."""


async def enter(owner: Owner, name: str, services: Services) -> None:
    """Have a sandbox enter a phase; harmless if it is in it.

    Raises:
        SandboxGone: it is over. NotFound: it has no such phase.
        Conflict: its phase is final; or a file rule cannot hold, and it is as before, but what ran
            may have been ended.
        Unsupported, InternalError: a part could not be changed; it is as before, likewise.
    """
    phase = phases.next_phase(owner.record.spec, owner.record.phase, name)
    said = await networking.check(phase.network_rules or {}, services)
    try:
        await owner.change(partial(_enter, owner, name, said))
    except DsecError as exc:
        # A connection that broke is renewed only after that: it may stand between two phases.
        logger.warning("no other phase", extra={"sandbox_id": owner.record.id, "why": str(exc)})
        with suppress(DsecError):
            await changing.finish(owner, settle)
        raise


async def settle(
    owner: Owner, backend: Backend, journal: Journal, record: SandboxRecord, before: str
) -> None:
    """Bring a sandbox to the phase of its record, from the one it may be in.

    Raises:
        DsecError: it could not be brought there.
    """
    old, new = (phases.by_name(record.spec, name) for name in (before, record.phase))
    if phases.ends_processes(old, new):
        await _ask(owner, "phase", _told(record))
        await _outside(backend, record)
        await _ask(owner, "phase_done", {})
    else:
        async with _noted(journal, record), _standing_still(owner, backend, record):
            await _outside(backend, record)


async def _enter(
    owner: Owner,
    name: str,
    said: list[str],
    backend: Backend,
    journal: Journal,
    record: SandboxRecord,
) -> SandboxRecord:
    phase = phases.next_phase(record.spec, record.phase, name)  # others may have come before
    if name == record.phase:
        return record
    if owner.state is not SandboxState.RUNNING:
        raise Conflict(f"{record.id} was paused meanwhile; ask again", kind="state")
    rules, qos = phase.network_rules or {}, phase.qos or record.spec.qos
    wanted = replace(changeable(record), phase=name, network_rules=rules, qos=qos)
    kept = [words for words in record.warnings if not words.startswith(networking.ABOUT)]
    words = changing.warnings(backend, replace(record, warnings=kept), wanted) + said
    wanted = replace(wanted, warnings=words)
    # Taken back, it comes from the phase it was to enter.
    places = {name: record.phase, record.phase: name}

    async def apply(to: SandboxRecord) -> None:
        await settle(owner, backend, journal, to, places[to.phase])

    return await changing.bring(journal, record, wanted, apply)


@asynccontextmanager
async def _noted(journal: Journal, record: SandboxRecord) -> AsyncIterator[None]:
    """A crash in between may leave it frozen: the next start is told to let it go on."""
    await in_thread("disk", journal.mark, record.id, "begun", Action.STILL)
    try:
        yield
    finally:
        with anyio.CancelScope(shield=True), suppress(OSError, DsecError):
            await in_thread("disk", journal.mark, record.id, "done", Action.STILL)


@asynccontextmanager
async def _standing_still(
    owner: Owner, backend: Backend, record: SandboxRecord
) -> AsyncIterator[None]:
    if owner.channel is not None:
        await resting.hold(owner.channel)
    try:
        await resting.freeze(backend, record)
        yield
    finally:
        with anyio.CancelScope(shield=True):
            await resting.thaw(backend, record)
            if owner.channel is not None:
                await resting.release(owner.channel)


async def _outside(backend: Backend, record: SandboxRecord) -> None:
    """What is enforced from outside: the network first, for it may narrow."""
    if record.spec.network and isinstance(backend, NetworkOf):
        await backend.apply_network(record)
    await backend.resize(record)


async def _ask(owner: Owner, method: str, args: dict[str, Any]) -> None:
    if owner.channel is None:
        raise Unavailable(f"the connection to {owner.record.id} is being renewed; ask again")
    with resting.within(ENTER_DEADLINE_S, "its processes were not ended"):
        await owner.channel.call(method, args)


def _told(record: SandboxRecord) -> dict[str, Any]:
    user, only = user_of(record)
    rules = to_builtins(file_rules(record.spec))
    return {"files": rules, "env": environment_of(record), "user": user, "only_user": only}
