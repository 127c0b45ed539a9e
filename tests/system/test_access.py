"""Every route against every kind of key. A new route fails here until it has a line."""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable

import httpx
import pytest

from dsec.apiserver.gateway import permission_for
from dsec.base.ids import NodeId, mint_sandbox_id
from dsec.edge.server import EDGE_ROUTES
from dsec.iam.permissions import OWNER, READER, Permission
from dsec.kit.http import Route
from tests.system.fake_edge import FakeEdge
from tests.system.plane import Plane, bearer, control_plane

pytestmark = pytest.mark.anyio

P = Permission
NEEDS: dict[str, Permission | None] = {
    "GET /v1/version": None,
    "GET /healthz": None,
    "GET /openapi.json": None,
    "POST /v1/sandboxes": P.SANDBOX_CREATE,
    "POST /v1/sandboxes:batch": P.SANDBOX_CREATE,
    "GET /v1/sandboxes": P.SANDBOX_READ,
    "GET /v1/nodes": P.NODE_READ,
    "GET /v1/images": P.IMAGE_READ,
    "DELETE /v1/images": P.IMAGE_WRITE,
    "POST /v1/images/pull": P.IMAGE_WRITE,
    "POST /v1/images/build": P.IMAGE_WRITE,
    "POST /v1/images/import": P.IMAGE_WRITE,
    "POST /v1/images/push": P.IMAGE_WRITE,
    "GET /v1/layers": P.IMAGE_READ,
    "GET /v1/layers/show": P.IMAGE_READ,
    "DELETE /v1/layers": P.IMAGE_WRITE,
    "POST /v1/layers/publish": P.IMAGE_WRITE,
    "POST /v1/environments/lint": P.SANDBOX_CREATE,
    "GET /v1/environments/trace": P.IMAGE_READ,
    "GET /v1/store": P.NODE_READ,
    "POST /v1/store/collect": P.IMAGE_WRITE,
    "GET /v1/jobs": P.SANDBOX_READ,
    "GET /v1/jobs/{job}": P.SANDBOX_READ,
    "POST /v1/jobs/{job}/pause": P.SANDBOX_OPERATE,
    "POST /v1/jobs/{job}/resume": P.SANDBOX_OPERATE,
    "POST /v1/jobs/{job}/reap": P.SANDBOX_STOP,
    "PUT /v1/jobs/{job}/lease": P.SANDBOX_OPERATE,
    "DELETE /v1/jobs/{job}/lease": P.SANDBOX_OPERATE,
    "GET /v1/snapshots": P.SANDBOX_READ,
    "GET /v1/snapshots/{name}": P.SANDBOX_READ,
    "DELETE /v1/snapshots/{name}": P.SANDBOX_OPERATE,
    "GET /v1/snapshots/{name}/diff": P.SANDBOX_OPERATE,
    "GET S": P.SANDBOX_READ,
    "DELETE S": P.SANDBOX_STOP,
    "GET S/processes": P.SANDBOX_READ,
    "GET S/usage": P.SANDBOX_READ,
    "POST S/commands": P.SANDBOX_OPERATE,
    "GET S/commands": P.SANDBOX_OPERATE,
    "POST S/commands/run": P.SANDBOX_OPERATE,
    "POST S/commands/stream": P.SANDBOX_OPERATE,
    "GET S/commands/{cid}": P.SANDBOX_OPERATE,
    "DELETE S/commands/{cid}": P.SANDBOX_OPERATE,
    "GET S/commands/{cid}/result": P.SANDBOX_OPERATE,
    "GET S/commands/{cid}/events": P.SANDBOX_OPERATE,
    "POST S/commands/{cid}/stdin": P.SANDBOX_OPERATE,
    "POST S/commands/{cid}/signal": P.SANDBOX_OPERATE,
    "POST S/commands/{cid}/resize": P.SANDBOX_OPERATE,
    "POST S/sessions": P.SANDBOX_OPERATE,
    "GET S/sessions": P.SANDBOX_OPERATE,
    "DELETE S/sessions/{sid}": P.SANDBOX_OPERATE,
    "GET S/files": P.SANDBOX_OPERATE,
    "PUT S/files": P.SANDBOX_OPERATE,
    "DELETE S/files": P.SANDBOX_OPERATE,
    "GET S/files/stat": P.SANDBOX_OPERATE,
    "GET S/files/list": P.SANDBOX_OPERATE,
    "POST S/files/mkdir": P.SANDBOX_OPERATE,
    "POST S/files/move": P.SANDBOX_OPERATE,
    "GET S/files/watch": P.SANDBOX_OPERATE,
    "GET S/tree": P.SANDBOX_OPERATE,
    "PUT S/tree": P.SANDBOX_OPERATE,
    "POST S/pause": P.SANDBOX_OPERATE,
    "POST S/phase": P.SANDBOX_OPERATE,
    "POST S/resume": P.SANDBOX_OPERATE,
    "PATCH S": P.SANDBOX_OPERATE,
    "GET S/network": P.SANDBOX_READ,
    "PUT S/network": P.SANDBOX_OPERATE,
    "POST S/pack": P.SANDBOX_OPERATE,
    "GET S/diff": P.SANDBOX_OPERATE,
    "POST S/fork": P.SANDBOX_OPERATE,
    "GET S/tamper": P.SANDBOX_OPERATE,
    "GET S/trajectory": P.SANDBOX_OPERATE,
}
"""What each route needs. `S` = `/v1/sandboxes/{id}`."""

BODIES: dict[str, object] = {
    "POST /v1/sandboxes": {"image": "debian"},
    "POST /v1/sandboxes:batch": {"spec": {"image": "debian"}, "count": 1},
    "POST /v1/images/pull": {"reference": "alpine"},
    "POST /v1/images/build": {"distribution": "debian"},
    "POST /v1/environments/lint": {"image": "debian"},
}
QUERIES: dict[str, dict[str, str]] = {
    "DELETE /v1/images": {"name": "debian"},
    "POST /v1/images/import": {"name": "mine"},
    "POST /v1/images/push": {"name": "debian"},
    "GET /v1/layers/show": {"kind": "toolkit", "name": "rg"},
    "DELETE /v1/layers": {"kind": "toolkit", "name": "rg:1"},
    "POST /v1/layers/publish": {"kind": "toolkit", "name": "rg:2"},
    "GET /v1/environments/trace": {"image": "debian"},
    "DELETE /v1/jobs/{job}/lease": {"epoch": "1"},
}
S = "/v1/sandboxes/{id}"


def name_of(route: Route) -> str:
    return f"{route.method} {route.path.replace(S, 'S')}"


async def all_routes() -> list[str]:
    async with control_plane([FakeEdge()]) as plane:
        here = [name_of(route) for route in plane.server.routes]
    return [*here, "GET /openapi.json", *(name_of(route) for route in EDGE_ROUTES)]


async def test_every_route_has_a_line() -> None:
    assert sorted(await all_routes()) == sorted(NEEDS)


async def ask(plane: Plane, route: str, sandbox: str, headers: dict[str, str]) -> httpx.Response:
    method, path = route.split()
    path = re.sub(r"^S", f"/v1/sandboxes/{sandbox}", path)
    path = re.sub(r"\{\w+\}", "cmd1", path)
    return await plane.client.request(
        method, path, params=QUERIES.get(route), json=BODIES.get(route), headers=headers
    )


async def team_sandbox(plane: Plane) -> str:
    made = await plane.client.post(
        "/v1/sandboxes", json={"image": "debian"}, headers=bearer(plane.keys.team)
    )
    return str(made.json()["id"])


async def no_key(route: str, plane: Plane, sandbox: str) -> None:
    plane.client.headers.pop("authorization")
    answer = await ask(plane, route, sandbox, {})
    assert (answer.status_code == 401) == (NEEDS[route] is not None)


async def bad_key(route: str, plane: Plane, sandbox: str) -> None:
    for key in (plane.keys.nobody, "nonsense", "dsec_", plane.keys.team[:-1] + "x"):
        answer = await ask(plane, route, sandbox, bearer(key))
        assert (answer.status_code == 401) == (NEEDS[route] is not None)


async def foreign_key(route: str, plane: Plane, sandbox: str) -> None:
    if " S" not in route:
        return
    foreign = await ask(plane, route, sandbox, bearer(plane.keys.foreign))
    absent = mint_sandbox_id(NodeId("n001"))
    none = await ask(plane, route, absent, bearer(plane.keys.foreign))
    assert foreign.status_code == none.status_code == 404
    said = [a.json()["error"] | {"request_id": ""} for a in (foreign, none)]
    assert said[0] == {**said[1], "message": said[1]["message"].replace(absent, sandbox)}


async def reader_key(route: str, plane: Plane, sandbox: str) -> None:
    need = NEEDS[route]
    answer = await ask(plane, route, sandbox, bearer(plane.keys.reader))
    assert (answer.status_code == 403) == (need is not None and need not in READER)


async def good_key(route: str, plane: Plane, sandbox: str) -> None:
    # An image is everybody's: whoever owns one project alone must not replace it.
    shared = NEEDS[route] is P.IMAGE_WRITE
    if shared:
        answer = await ask(plane, route, sandbox, bearer(plane.keys.team))
        assert answer.status_code == 403, answer.text
    for key in [plane.keys.owner] if shared else [plane.keys.team, plane.keys.owner]:
        answer = await ask(plane, route, sandbox, bearer(key))
        assert answer.status_code not in {401, 403}, answer.text
        plane.fakes[0].image_names.append("debian")


Check = Callable[[str, Plane, str], Awaitable[None]]


@pytest.mark.parametrize("check", [no_key, bad_key, foreign_key, reader_key, good_key])
@pytest.mark.parametrize("route", sorted(NEEDS))
async def test_access(route: str, check: Check) -> None:
    async with control_plane([FakeEdge()]) as plane:
        await check(route, plane, await team_sandbox(plane))


def test_passed_through_operations_need_what_the_table_says() -> None:
    for route in EDGE_ROUTES:
        operation = route.path.removeprefix(S).removeprefix("/")
        assert permission_for(route.method, operation) == NEEDS[name_of(route)]


async def test_the_other_header_does_too() -> None:
    async with control_plane([FakeEdge()]) as plane:
        plane.client.headers.pop("authorization")
        answer = await plane.client.get("/v1/nodes", headers={"X-API-KEY": plane.keys.owner})
    assert answer.status_code == 200


async def test_a_revoked_key_is_refused() -> None:
    from dsec.iam.keys import digest_of

    async with control_plane([FakeEdge()]) as plane:
        await plane.directory.revoke_key(digest_of(plane.keys.team))
        answer = await plane.client.get("/v1/nodes", headers=bearer(plane.keys.team))
    assert answer.status_code == 401


async def test_lists_show_the_callers_projects_only() -> None:
    async with control_plane([FakeEdge()]) as plane:
        sandbox = await team_sandbox(plane)
        for key, seen in (
            (plane.keys.team, [sandbox]),
            (plane.keys.owner, [sandbox]),
            (plane.keys.reader, [sandbox]),
            (plane.keys.foreign, []),
        ):
            answer = await plane.client.get("/v1/sandboxes", headers=bearer(key))
            assert [view["id"] for view in answer.json()["sandboxes"]] == seen


async def test_what_the_platform_says_to_itself_cannot_be_said_by_a_client() -> None:
    async with control_plane([FakeEdge()]) as plane:
        sandbox = await team_sandbox(plane)
        answer = await plane.client.get(
            f"/v1/sandboxes/{sandbox}/headers?a=%2Fb",
            headers={"X-Dsec-Project": "root", "X-API-KEY": "x", "X-Mine": "1"},
        )
    seen = answer.json()
    assert seen["x-mine"] == "1"
    assert seen["query"] == "a=%2Fb"
    assert not {"authorization", "x-api-key", "x-dsec-project"} & set(seen)


def test_owners_may_all() -> None:
    assert frozenset(Permission) == OWNER
