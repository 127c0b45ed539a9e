"""What is kept for a while only is dropped once an hour."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from typing import Never

import anyio

from dsec.base.clock import Clock

logger = logging.getLogger("dsec.control")

EVERY_S = 3600.0


async def forget_hourly(
    what: str, forget_before: Callable[[float], Awaitable[int]], clock: Clock, kept_s: float
) -> Never:
    """Drop what is older than that, for ever; `what` is for the log."""
    while True:
        try:
            await forget_before(clock.now() - kept_s)
        except Exception:  # a full disk now is no reason to end; the next hour may be better
            logger.exception("cannot forget %s", what)
        await anyio.sleep(EVERY_S)
