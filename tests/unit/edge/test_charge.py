from __future__ import annotations

from typing import Any

import anyio
import pytest

from dsec.base.errors import RateLimited
from dsec.edge import charge
from dsec.edge.charge import Budget, Charge
from dsec.kit import http
from dsec.wire.frames import Kind
from tests.unit.edge.node import Node, request
from tests.unit.edge.peer import talking


def test_it_is_held_until_released() -> None:
    budget = Budget(100)
    first, second = Charge(budget), Charge(budget)
    first.take(60)
    second.take(40)
    with pytest.raises(RateLimited):
        second.take(1)
    first.release()
    first.release()
    second.take(60)
    second.release()
    assert budget.used == 0


async def test_a_call_that_would_take_too_much_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(charge.EDGE, "limit", 100_000)
    async with talking() as (channel, peer), anyio.create_task_group() as group:
        caught: list[Exception] = []

        async def ask() -> None:
            try:
                await channel.collect("run")
            except RateLimited as exc:
                caught.append(exc)

        group.start_soon(ask)
        number, _ = await peer.opened()
        await peer.say(Kind.DATA, number, bytes(60_000), 1)
        await peer.say(Kind.DATA, number, bytes(60_000), 1)
        assert (await peer.frame()).kind is Kind.CREDIT
        assert (await peer.frame()).kind is Kind.CANCEL
        await anyio.wait_all_tasks_blocked()
        assert caught
        assert not channel.busy
    assert charge.EDGE.used == 0


async def test_an_answer_is_charged_until_it_has_gone_out(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    held: list[int] = []
    encode = http.json_response

    def encoded(*args: Any) -> Any:
        held.append(charge.EDGE.used)
        return encode(*args)

    monkeypatch.setattr(http, "json_response", encoded)
    async with node.host.running(), node.edge() as edge:
        asked = request()
        await edge.create(asked)
        async with node.client(edge) as client:
            body = {"shell": "head -c 3000000 /dev/zero", "output_limit_bytes": 8 << 20}
            place = f"/v1/sandboxes/{asked.id}/commands/run"
            answer = await client.post(place, json=body)
            assert answer.status_code == 200
    assert held[-1] >= 3_000_000
    assert charge.EDGE.used == 0
