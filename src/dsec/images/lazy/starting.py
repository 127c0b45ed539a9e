"""Has the node's filler run: called by the edge when it starts, and when the settings change."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Sequence
from pathlib import Path

import anyio
import httpx
import msgspec

from dsec.base.errors import Conflict, InternalError, Unavailable, error_from
from dsec.images.lazy.config import FillerConfig
from dsec.images.lazy.holder import Holder, digest_of, is_held, read_holder
from dsec.images.lazy.places import Places
from dsec.kit.blocking import in_thread
from dsec.linux import pidfd
from dsec.linux.process import CommandFailed, run_async
from dsec.wire.public_v1 import ErrorBody

KEEPER = (sys.executable, "-m", "dsec.images.lazy.keeper")
_TIMEOUT_S = 30.0
_PAUSE_S = 0.02
_LOG_TAIL_BYTES = 2000


async def ensure_filler(
    config: FillerConfig,
    *,
    keeper: Sequence[str] = KEEPER,
    timeout_s: float = _TIMEOUT_S,
) -> bool:
    """Have a filler with these settings run and answer; it outlives this process.

    One with other settings gets these and a new worker; what is mounted stays. Its environment,
    credentials included, is that of whoever started the keeper.

    Args:
        config: the settings.
        keeper: the command that becomes the keeper.
        timeout_s: for all of it.

    Returns:
        Whether mounts over data of an earlier one are dead: a keeper was started, and has not
        taken over what the last one left.

    Raises:
        Conflict: the one that runs has another front, which takes an end of all sandboxes.
        Unsupported: this host has no such front.
        Unavailable: it does not answer in time; the message has the end of its log.
    """
    places = Places(config.home)
    try:
        with anyio.fail_after(timeout_s):
            started = await _have_keeper(config, places, keeper)
            while not await _answers(config.socket):
                await _check_alive(places)
                await anyio.sleep(_PAUSE_S)
            return started
    except TimeoutError:
        said = await in_thread("disk", _tail, places.log)
        raise Unavailable(f"the filler does not answer after {timeout_s:g} s. {said}") from None


async def _have_keeper(config: FillerConfig, places: Places, keeper: Sequence[str]) -> bool:
    """Come to a keeper whose worker has these settings; see `ensure_filler`."""
    wanted, told, started = digest_of(config), False, False
    while True:
        holder = await in_thread("disk", read_holder, places.lock)
        if holder is None:
            if not await in_thread("disk", is_held, places.lock):
                started = await _start(config, places, keeper) or started
        elif holder.front != config.front:
            raise Conflict(f"a filler runs that shows data by {holder.front}; end it first")
        elif holder.config == wanted and not holder.resting:
            return started and not holder.inherited
        elif not told:
            await in_thread("disk", _write_config, config, places)
            told = await in_thread("disk", _tell, holder, places)
        await anyio.sleep(_PAUSE_S)


async def _start(config: FillerConfig, places: Places, keeper: Sequence[str]) -> bool:
    """Start a keeper; False if another one was faster."""
    await in_thread("disk", _write_config, config, places)
    argv = [*keeper, "--background", str(places.config)]
    try:
        await run_async(argv, timeout_s=_TIMEOUT_S)
    except CommandFailed as failure:
        error = _error_of(failure)
        if error.code == Conflict.code:
            return False
        raise error_from(error.code, error.message) from failure
    return True


def _error_of(failure: CommandFailed) -> ErrorBody:
    lines = failure.stderr.splitlines() or [""]
    try:
        return msgspec.json.decode(lines[-1], type=ErrorBody)
    except msgspec.MsgspecError:
        return ErrorBody(code=InternalError.code, message=str(failure))


def _write_config(config: FillerConfig, places: Places) -> None:
    places.home.mkdir(mode=0o700, parents=True, exist_ok=True)
    temporary = places.config.with_suffix(f".{os.getpid()}-{threading.get_ident()}")
    file = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    with os.fdopen(file, "wb") as out:
        out.write(msgspec.json.format(msgspec.json.encode(config), indent=1) + b"\n")
    temporary.replace(places.config)


def _tell(holder: Holder, places: Places) -> bool:
    """Send SIGHUP to the keeper if it still is the one; its number could be another's by now."""
    with pidfd.opened(holder.pid) as descriptor:
        if descriptor is None or read_holder(places.lock) != holder:
            return False
        signal.pidfd_send_signal(descriptor, signal.SIGHUP)
    return True


async def _answers(socket: Path) -> bool:
    transport = httpx.AsyncHTTPTransport(uds=str(socket))
    async with httpx.AsyncClient(transport=transport, timeout=5.0) as client:
        try:
            answer = await client.get("http://filler/v1/status")
        except httpx.TransportError:
            return False
    return answer.status_code == httpx.codes.OK


async def _check_alive(places: Places) -> None:
    """Wait no longer for a keeper that has ended or given up.

    Raises:
        Unavailable: with the end of its log.
    """
    holder = await in_thread("disk", read_holder, places.lock)
    gone = holder is None and not await in_thread("disk", is_held, places.lock)
    if gone or (holder is not None and holder.resting):
        said = await in_thread("disk", _tail, places.log)
        raise Unavailable(f"the filler ended before it answered. {said}")


def _tail(log: Path) -> str:
    try:
        text = log.read_bytes()[-_LOG_TAIL_BYTES:].decode("utf-8", "replace")
    except OSError:
        return f"There is no log {log}"
    return f"The end of {log}:\n{text}"
