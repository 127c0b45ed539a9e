"""Asynchronous generators that end where they are used, not where they are collected."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from typing import TypeVar

T = TypeVar("T")


@asynccontextmanager
async def closing(items: AsyncIterator[T]) -> AsyncIterator[AsyncIterator[T]]:
    """Close what makes the items at the end of the context, if it is a generator.

    A `for` loop that is left early leaves its generator suspended; the collector would run its
    `finally` some time later, in a task without a parent.
    """
    try:
        yield items
    finally:
        if isinstance(items, AsyncGenerator):
            await items.aclose()


async def generator_of(items: AsyncIterator[T]) -> AsyncGenerator[T, None]:
    """The items as a generator, which closes what makes them when it is closed."""
    async with closing(items) as inner:
        async for item in inner:
            yield item
