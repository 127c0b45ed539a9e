"""Snapshots over several nodes: whose they are, who may see and restore them, and how they go."""

from __future__ import annotations

import pytest
from typing_extensions import override

from dsec.base.errors import Unavailable
from dsec.base.ids import PrincipalId, ProjectId
from dsec.iam.keys import digest_of, mint_key
from dsec.iam.permissions import OWNER, READER
from dsec.iam.principals import Grant, Principal
from dsec.wire.edge_v1 import CreateOnEdge
from dsec.wire.sandbox import SandboxView
from tests.system.fake_edge import FakeEdge
from tests.system.plane import Plane, bearer, control_plane

pytestmark = pytest.mark.anyio


class Listening(FakeEdge):
    """Remembers who asked."""

    def __init__(self, node: str = "n001") -> None:
        super().__init__(node)
        self.asked: list[CreateOnEdge] = []

    @override
    async def create(self, request: CreateOnEdge) -> SandboxView:
        self.asked.append(request)
        return await super().create(request)


async def create(plane: Plane, image: str, key: str) -> tuple[int, dict[str, object]]:
    answer = await plane.client.post("/v1/sandboxes", json={"image": image}, headers=bearer(key))
    body: dict[str, object] = answer.json()
    return answer.status_code, body


async def names(plane: Plane, key: str) -> list[str]:
    answer = await plane.client.get("/v1/snapshots", headers=bearer(key))
    return [view["name"] for view in answer.json()]


async def test_a_project_sees_its_own_of_all_nodes_newest_first() -> None:
    one, two = FakeEdge("n001"), FakeEdge("n002")
    one.snapshot("team", "a", created_at=1.0)
    one.snapshot("team", "both", created_at=2.0)
    two.snapshot("team", "both", created_at=2.0, stored=True)
    two.snapshot("team", "c", created_at=3.0)
    two.snapshot("foreign", "x")
    async with control_plane([one, two]) as plane:
        assert await names(plane, plane.keys.team) == ["c", "both", "a"]
        assert await names(plane, plane.keys.foreign) == ["x"]
        shown = await plane.client.get("/v1/snapshots/both", headers=bearer(plane.keys.team))
        assert (shown.json()["stored"], shown.json()["image"]) == (True, "snapshots/team/both")
        for name in ("x", "none"):
            absent = await plane.client.get(
                f"/v1/snapshots/{name}", headers=bearer(plane.keys.team)
            )
            assert absent.status_code == 404
            assert absent.json()["error"]["details"] == {"kind": "snapshot"}


async def test_what_one_changes_is_asked_of_a_node_that_has_it() -> None:
    one, two = FakeEdge("n001"), FakeEdge("n002")
    two.snapshot("team", "s")
    async with control_plane([one, two]) as plane:
        diff = await plane.client.get("/v1/snapshots/s/diff", headers=bearer(plane.keys.team))
        assert [entry["path"] for entry in diff.json()] == ["/n002"]
        absent = await plane.client.get("/v1/snapshots/t/diff", headers=bearer(plane.keys.team))
        assert absent.status_code == 404


async def test_a_snapshot_is_removed_everywhere_once_nobody_stands_on_it() -> None:
    one, two = FakeEdge("n001"), FakeEdge("n002")
    for edge in (one, two):
        edge.snapshot("team", "s")
    async with control_plane([one, two]) as plane:
        team = bearer(plane.keys.team)
        _, made = await create(plane, "snapshots/team/s", plane.keys.team)
        refused = await plane.client.delete("/v1/snapshots/s", headers=team)
        assert (refused.status_code, refused.json()["error"]["code"]) == (409, "conflict")
        assert one.kept
        assert two.kept
        await plane.client.delete(f"/v1/sandboxes/{made['id']}", headers=team)
        two.away = Unavailable("gone")
        assert (await plane.client.delete("/v1/snapshots/s", headers=team)).status_code == 503
        assert one.kept
        two.away = None
        assert (await plane.client.delete("/v1/snapshots/s", headers=team)).status_code == 204
        assert not one.kept
        assert not two.kept
        assert (await plane.client.delete("/v1/snapshots/s", headers=team)).status_code == 404


async def test_a_snapshot_of_another_project_is_as_absent_as_none() -> None:
    edge = Listening()
    edge.snapshot("team", "s")
    async with control_plane([edge]) as plane:
        said = [
            await create(plane, image, plane.keys.foreign)
            for image in ("snapshots/team/s", "snapshots/team/t", "snapshots/none/s")
        ]
        assert [status for status, _ in said] == [404, 404, 404]
        assert {str(body["error"]["details"]) for _, body in said} == {"{'kind': 'image'}"}  # type: ignore[index]
        assert not edge.asked
        for path, body in (
            ("lint", {"image": "snapshots/team/s"}),
            ("lint", {"image": "snapshots/team/t"}),
        ):
            answer = await plane.client.post(
                f"/v1/environments/{path}", json=body, headers=bearer(plane.keys.foreign)
            )
            assert answer.status_code == 404
        trace = await plane.client.get(
            "/v1/environments/trace?image=snapshots/team/s", headers=bearer(plane.keys.foreign)
        )
        assert trace.status_code == 404


async def test_the_edge_is_told_who_restores_and_the_root_may() -> None:
    edge = Listening()
    edge.snapshot("team", "s")
    async with control_plane([edge]) as plane:
        for key in (plane.keys.team, plane.keys.owner):
            assert (await create(plane, "snapshots/team/s", key))[0] == 201
        assert [asked.principal for asked in edge.asked] == ["team", "owner"]
        assert [asked.project for asked in edge.asked] == ["team", "root"]


async def reader_of(plane: Plane, *grants: Grant) -> str:
    """The key of one who may see what is in the project `team`, and no more of it."""
    key, team = mint_key(), ProjectId("team")
    home = grants[0].project if grants else team
    reader = Principal(PrincipalId("r"), "r", "person", home, (*grants, Grant(team, READER)))
    await plane.directory.add_principal(reader)
    await plane.directory.add_key(digest_of(key), reader.id, "test")
    return key


async def test_what_is_inside_is_not_for_a_reader() -> None:
    edge = Listening()
    edge.snapshot("team", "s")
    async with control_plane([edge]) as plane:
        key = await reader_of(plane, Grant(ProjectId("foreign"), OWNER))
        status, body = await create(plane, "snapshots/team/s", key)
        assert (status, body["error"]["code"]) == (403, "permission_denied")  # type: ignore[index]
        assert not edge.asked
        body = {"image": "snapshots/team/s"}
        lint = await plane.client.post("/v1/environments/lint", json=body, headers=bearer(key))
        assert lint.status_code == 403


async def test_what_a_build_left_behind_is_linted_by_its_packer_alone() -> None:
    edge = FakeEdge()
    edge.snapshot("team", "mine", cleaned=False, packed_by="owner")
    edge.snapshot("team", "all", cleaned=True, packed_by="owner")
    async with control_plane([edge]) as plane:

        async def lint(name: str, key: str) -> int:
            body = {"image": f"snapshots/team/{name}"}
            path = "/v1/environments/lint"
            return (await plane.client.post(path, json=body, headers=bearer(key))).status_code

        assert await lint("mine", plane.keys.team) == 403
        assert await lint("mine", plane.keys.owner) == 200
        assert await lint("all", plane.keys.team) == 200


async def test_a_reader_sees_and_does_not_remove() -> None:
    edge = FakeEdge()
    edge.snapshot("team", "s")
    async with control_plane([edge]) as plane:
        key = await reader_of(plane)
        assert await names(plane, key) == ["s"]
        refused = await plane.client.delete("/v1/snapshots/s", headers=bearer(key))
        assert refused.status_code == 403
        assert edge.kept
