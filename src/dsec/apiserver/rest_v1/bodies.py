"""What bodies and answers of several nouns have in common."""

from __future__ import annotations

from collections.abc import AsyncIterator

from starlette.requests import Request

MAX_SPEC_BYTES = 1 << 20


async def chunks(request: Request) -> AsyncIterator[bytes]:
    """A request's raw body; raises ClientDisconnect if it breaks off."""
    async for chunk in request.stream():
        if chunk:
            yield chunk
