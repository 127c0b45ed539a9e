"""Tasks that run for ever outlive what goes wrong in them."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator

import anyio
import httpx
import msgspec
import pytest
from typing_extensions import override

from dsec.base.clock import SystemClock
from dsec.base.errors import Unavailable
from dsec.control import edges as edges_module
from dsec.control import forgetting
from dsec.control.edges import Edge, Edges
from dsec.control.everywhere import one_after_another, present
from dsec.control.leases import Leases
from dsec.control.ownership import Ownership
from dsec.control.remote import EdgeLink, HttpEdge
from dsec.control.sandboxes import Sandboxes
from dsec.store.memory import MemoryClaims, MemoryLeases
from dsec.wire.edge_v1 import ImageEvent, ListFilter
from dsec.wire.public_v1 import ImageProgress, NodeView, PullImage
from tests.system.fake_edge import FakeEdge

pytestmark = pytest.mark.anyio


class OddEdge(FakeEdge):
    """Raises what nobody foresaw."""

    def __init__(self, oddity: Exception) -> None:
        super().__init__()
        self.oddity = oddity
        self.asked = 0
        self.asked_again = anyio.Event()

    @override
    async def describe(self) -> NodeView:
        self.asked += 1
        if self.asked == 2:
            self.asked_again.set()
        raise self.oddity


@pytest.mark.parametrize("oddity", [RuntimeError("x"), OSError(24, "x"), msgspec.DecodeError("x")])
async def test_one_edges_fault_does_not_end_the_watch_over_all(
    oddity: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(edges_module, "REFRESH_S", 0.001)
    odd = OddEdge(oddity)
    edges = Edges([Edge(odd, odd.app), Edge(FakeEdge("n002"), odd.app)], SystemClock())
    async with anyio.create_task_group() as group:
        group.start_soon(edges.run)
        with anyio.fail_after(5):
            await odd.asked_again.wait()
        assert [view.id for view in edges.views()] == ["n002"]
        group.cancel_scope.cancel()


async def test_keys_are_forgotten_later_if_not_now(monkeypatch: pytest.MonkeyPatch) -> None:
    class FullDisk(MemoryClaims):
        tries = 0
        twice = anyio.Event()

        @override
        async def forget_before(self, moment: float) -> int:
            del moment
            self.tries += 1
            if self.tries == 2:
                self.twice.set()
            raise OSError(28, "no space left")

    monkeypatch.setattr(forgetting, "EVERY_S", 0.001)
    clock = SystemClock()
    edges, claims = Edges([], clock), FullDisk(clock)
    leases = Leases(MemoryLeases(), clock, lambda _: None)
    async with anyio.create_task_group() as group:
        group.start_soon(
            Sandboxes(edges, claims, Ownership(edges), leases, clock).forget_old_claims
        )
        with anyio.fail_after(5):
            await claims.twice.wait()
        group.cancel_scope.cancel()


def edge_that_answers(body: bytes) -> HttpEdge:
    link = EdgeLink("http://edge")
    link._transport = httpx.MockTransport(lambda _: httpx.Response(200, content=body))  # type: ignore[assignment]
    return HttpEdge(link)


@pytest.mark.parametrize("body", [b"{}", b"[1]", b"<html>", b'{"id": 1}'])
async def test_an_edge_of_another_shape_is_one_that_is_away(body: bytes) -> None:
    edge = edge_that_answers(body)
    with pytest.raises(Unavailable, match="another shape"):
        await edge.describe()
    with pytest.raises(Unavailable, match="another shape"):
        await edge.list_sandboxes(ListFilter())
    with pytest.raises(Unavailable, match="another shape"):
        async for _ in edge.pull_image(PullImage(reference="x")):
            pass


async def test_an_import_left_early_ends_at_once() -> None:
    class Slow(FakeEdge):
        stream: AsyncGenerator[ImageEvent, None] | None = None

        @override
        def pull_image(self, request: PullImage) -> AsyncIterator[ImageEvent]:
            async def events() -> AsyncGenerator[ImageEvent, None]:
                yield ImageProgress(step=request.reference)
                await anyio.sleep_forever()

            self.stream = events()
            return self.stream

    slow = Slow()
    edges = Edges([Edge(slow, slow.app)], SystemClock())
    await edges.refresh()
    events = one_after_another(present(edges), lambda api: api.pull_image(PullImage(reference="x")))
    assert isinstance(events, AsyncGenerator)
    await anext(events)
    await events.aclose()
    assert slow.stream is not None
    with pytest.raises(StopAsyncIteration):
        await anext(slow.stream)
