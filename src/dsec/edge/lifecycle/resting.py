"""What a pause and its end ask of the backend, each part within its time."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Awaitable, Callable, Iterator

import anyio
import msgspec

from dsec.base.errors import Conflict, DsecError, InternalError
from dsec.edge.backends.interface import Backend
from dsec.edge.channel import AetherChannel
from dsec.edge.record import SandboxRecord
from dsec.kit.blocking import place_for
from dsec.kit.recall import Recall
from dsec.kit.together import survive
from dsec.wire.sandbox import Pause

logger = logging.getLogger("dsec.edge.resting")

HOLD_DEADLINE_S = 1.0
AGAIN_S = 30.0
"""What the host lacks for a moment is often back by then."""
FREEZE_DEADLINE_S = 10.0
RECLAIM_DEADLINE_S = 300.0
"""Gigabytes may have to go to a slow disk, after others of the same job."""
WORDS_LENGTH = 400
"""Of each text of a pause in the journal, whose lines are bounded: cut, one could not be read."""


async def hold(channel: AetherChannel) -> None:
    """Have no time count from now on, here and in aether, which ends commands by the same clock.

    The kernel's clocks go on while a sandbox is frozen: without this, what has a minute to run would
    be killed on waking from an hour's pause. An aether that does not know of it is not held up by it.
    """
    channel.hold()
    with anyio.move_on_after(HOLD_DEADLINE_S), contextlib.suppress(DsecError):
        await channel.call("hold")


async def release(channel: AetherChannel) -> None:
    """Have time count again. A new connection does it by itself."""
    channel.release()
    with anyio.move_on_after(HOLD_DEADLINE_S), contextlib.suppress(DsecError):
        await channel.call("release")


async def freeze(backend: Backend, record: SandboxRecord) -> None:
    """Stop all its processes.

    Raises:
        Unsupported: this host cannot. InternalError: some of it does not stand still.
    """
    with within(FREEZE_DEADLINE_S, "it did not stand still"):
        await backend.freeze(record)


async def thaw(backend: Backend, record: SandboxRecord) -> None:
    """Let them go on.

    Without a deadline: it waits for nothing but threads that do only this, and to give up in their
    queue would be to leave it frozen.
    """
    await backend.thaw(record)


async def try_again(wake: Callable[[], Awaitable[None]], stands: Callable[[], bool]) -> None:
    """Once, after a while, let go on what should run and could not be let go, if it still stands."""
    await anyio.sleep(AGAIN_S)
    if stands():
        await survive(wake, "letting a sandbox go on")


def place() -> contextlib.AbstractAsyncContextManager[None]:
    """Wait for what `rest` needs besides, before anything stands still for it."""
    return place_for("reclaim")


async def rest(backend: Backend, record: SandboxRecord, recall: Recall) -> Pause:
    """Freeze it and take back its memory until called off, in a `place`; raises as `freeze`."""
    await freeze(backend, record)
    with within(RECLAIM_DEADLINE_S, "its memory was not given back"):
        return await backend.reclaim(record, recall)


async def refill(backend: Backend, record: SandboxRecord) -> None:
    """Bring its memory back while it runs already; nobody waits for it."""
    try:
        await backend.refill(record)
    except Exception as exc:  # noqa: BLE001 - what is not brought back comes when it is touched
        logger.warning("not refilled", extra={"sandbox_id": record.id, "error": str(exc)})


async def find(backend: Backend, record: SandboxRecord) -> None:
    """See that a frozen sandbox is there: its socket listens, though nobody answers.

    Raises:
        SandboxGone: it has died.
    """
    with within(FREEZE_DEADLINE_S, "it was not found"):
        await (await backend.connect(record)).aclose()


def held(pause: Pause | None, why: str) -> Pause:
    """The same pause, that only an explicit resume ends."""
    return msgspec.structs.replace(pause or Pause(at=0.0), held=why)


def check_wakes(sandbox: str, pause: Pause | None) -> None:
    """See that any request may wake a paused sandbox.

    Raises:
        Conflict: only an explicit resume may; it says why.
    """
    if pause is not None and pause.held:
        why = f"{sandbox} is paused, and only an explicit resume wakes it: {pause.held}"
        raise Conflict(why, kind="held", sandbox=sandbox)


def said(pause: Pause | None) -> str:
    """What the journal keeps of a pause."""
    if pause is not None:
        words = {name: getattr(pause, name)[:WORDS_LENGTH] for name in ("detail", "held")}
        pause = msgspec.structs.replace(pause, **words)
    return msgspec.json.encode(pause).decode()


@contextlib.contextmanager
def within(seconds: float, otherwise: str) -> Iterator[None]:
    """Bound what is asked of a backend.

    Raises:
        InternalError: it took longer; `otherwise` says what was not done.
    """
    try:
        with anyio.fail_after(seconds):
            yield
    except TimeoutError:
        raise InternalError(f"{otherwise} in {seconds:.0f} s") from None
