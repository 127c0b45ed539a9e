"""Words the suite is written in: how a failure must look, and waiting for something to be so."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager

import anyio
import pytest

from dsec import Command, DsecError, Output

PROBE = "/probe"


@contextmanager
def refusal(expected: type[DsecError], /, **details: object) -> Iterator[None]:
    """Expect an error of a class, with a stable code, a message and these details."""
    with pytest.raises(expected) as caught:
        yield
    error = caught.value
    assert error.message
    assert error.code == type(error).code
    for name, value in details.items():
        assert error.details.get(name) == value, f"{error!r} has details {error.details}"


async def eventually(
    holds: Callable[[], Awaitable[object]], what: str, within_s: float = 20.0
) -> None:
    """Wait until something holds."""
    with anyio.move_on_after(within_s):
        while not await holds():  # noqa: ASYNC110 - what is waited for is elsewhere
            await anyio.sleep(0.05)
        return
    pytest.fail(f"not within {within_s:.0f} s: {what}")


async def read_until(command: Command, wanted: bytes, stream: str = "stdout") -> bytes:
    """Follow a command until it has said something; all it said on that stream so far."""
    said = b""
    async with command.events() as events:
        async for event in events:
            if isinstance(event, Output) and event.stream == stream:
                said += event.data
            if wanted in said:
                return said
    pytest.fail(f"the command ended without saying {wanted!r}; it said {said[-200:]!r}")
