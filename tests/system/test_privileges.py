"""Who may make sandboxes that have more of the kernel than others."""

from __future__ import annotations

from typing import Any

import pytest

from tests.system.fake_edge import FakeEdge
from tests.system.plane import Plane, bearer, control_plane

pytestmark = pytest.mark.anyio

WIDER: list[dict[str, Any]] = [{"profile": "loose"}, {"allow": ["ptrace"]}]
PLAIN: list[dict[str, Any]] = [{"profile": "strict", "no_new_privs": True}, {"profile": "default"}]


async def create(plane: Plane, key: str, security: dict[str, Any]) -> int:
    body = {"image": "debian", "security": security}
    made = await plane.client.post("/v1/sandboxes", json=body, headers=bearer(key))
    return made.status_code


@pytest.mark.parametrize("security", PLAIN)
async def test_less_is_for_everybody(security: dict[str, Any]) -> None:
    async with control_plane([FakeEdge()]) as plane:
        assert await create(plane, plane.keys.team, security) == 201


@pytest.mark.parametrize("security", WIDER)
async def test_more_is_for_those_who_have_the_right_in_the_root(security: dict[str, Any]) -> None:
    async with control_plane([FakeEdge()]) as plane:
        assert await create(plane, plane.keys.owner, security) == 201
        assert await create(plane, plane.keys.team, security) == 403


@pytest.mark.parametrize("security", WIDER)
async def test_more_is_not_had_by_a_batch(security: dict[str, Any]) -> None:
    async with control_plane([FakeEdge()]) as plane:
        body = {"spec": {"image": "debian", "security": security}, "count": 1}
        keys = bearer(plane.keys.team)
        made = await plane.client.post("/v1/sandboxes:batch", json=body, headers=keys)
        assert '"permission_denied"' in made.text
        assert not plane.fakes[0].sandboxes


async def test_more_is_not_had_by_a_fork() -> None:
    async with control_plane([FakeEdge()]) as plane:
        assert await create(plane, plane.keys.team, {}) == 201
        [parent] = plane.fakes[0].sandboxes.values()
        path, keys = f"/v1/sandboxes/{parent.id}/fork", bearer(plane.keys.team)
        plain = await plane.client.post(path, json={}, headers=keys)
        assert plain.status_code != 403
        parent.security = type(parent.security)(profile="loose")
        assert (await plane.client.post(path, json={}, headers=keys)).status_code == 403
