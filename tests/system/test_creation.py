"""Creating sandboxes: placed, idempotent, tried elsewhere when one node refuses."""

from __future__ import annotations

import anyio
import httpx
import msgspec
import pytest

from dsec.base.errors import CapacityUnavailable, StartFailed, Unavailable
from dsec.base.ids import NodeId, ProjectId, mint_sandbox_id, sandbox_id
from tests.system.fake_edge import FakeEdge
from tests.system.plane import bearer, control_plane

pytestmark = pytest.mark.anyio
SPEC = {"image": "debian", "backend": "sim"}


def key(text: str) -> dict[str, str]:
    return {"Idempotency-Key": text}


async def test_a_sandbox_is_created_and_listed() -> None:
    async with control_plane([FakeEdge()]) as plane:
        made = await plane.client.post("/v1/sandboxes", json=SPEC | {"labels": {"job": "7"}})
        assert made.status_code == 201
        view = made.json()
        assert view["id"].startswith("sbxn001")
        assert view["project"] == "root"
        listed = (await plane.client.get("/v1/sandboxes?label=job%3D7&state=running")).json()
        assert [v["id"] for v in listed["sandboxes"]] == [view["id"]]
        assert "next" not in listed
        assert (await plane.client.get("/v1/sandboxes?label=job=8")).json()["sandboxes"] == []


async def test_the_same_key_gives_the_same_sandbox() -> None:
    async with control_plane([FakeEdge()]) as plane:
        first = await plane.client.post("/v1/sandboxes", json=SPEC, headers=key("a"))
        again = await plane.client.post("/v1/sandboxes", json=SPEC, headers=key("a"))
        other = await plane.client.post("/v1/sandboxes", json=SPEC, headers=key("b"))
        foreign = await plane.client.post(
            "/v1/sandboxes", json=SPEC, headers=key("a") | bearer(plane.keys.foreign)
        )
    assert first.json() == again.json()
    assert len({first.json()["id"], other.json()["id"], foreign.json()["id"]}) == 3
    assert plane.fakes[0].created == 3


async def test_a_repeat_makes_no_second_sandbox_of_an_id_the_edge_has_forgotten() -> None:
    async with control_plane([FakeEdge()]) as plane:
        first = await plane.client.post("/v1/sandboxes", json=SPEC, headers=key("a"))
        plane.fakes[0].sandboxes.clear()
        again = await plane.client.post("/v1/sandboxes", json=SPEC, headers=key("a"))
    assert first.status_code == 201
    assert again.status_code == 410
    assert again.json()["error"]["code"] == "sandbox_gone"
    assert plane.fakes[0].created == 1


async def test_the_same_key_for_another_request_is_a_conflict() -> None:
    async with control_plane([FakeEdge()]) as plane:
        await plane.client.post("/v1/sandboxes", json=SPEC, headers=key("a"))
        clash = await plane.client.post(
            "/v1/sandboxes", json=SPEC | {"hostname": "other"}, headers=key("a")
        )
    assert clash.status_code == 409
    assert clash.json()["error"]["code"] == "conflict"


async def test_fifty_at_once_under_one_key_make_one_sandbox() -> None:
    edge = FakeEdge()
    edge.gate = anyio.Event()
    ids: list[str] = []
    async with control_plane([edge, FakeEdge("n002")]) as plane:

        async def create() -> None:
            made = await plane.client.post("/v1/sandboxes", json=SPEC, headers=key("a"))
            ids.append(made.json()["id"])

        async with anyio.create_task_group() as group:
            for _ in range(50):
                group.start_soon(create)
            await anyio.lowlevel.checkpoint()
            edge.gate.set()
        assert len(plane.server.sandboxes._flights._locks) == 0
    assert len(ids) == 50
    assert len(set(ids)) == 1
    assert sum(fake.created for fake in plane.fakes) == 1


@pytest.mark.parametrize("headers", [{}, key("a")])
async def test_a_full_node_is_passed_over(headers: dict[str, str]) -> None:
    full, free = FakeEdge("n001"), FakeEdge("n002", cpus=1)
    full.full()
    async with control_plane([full, free]) as plane:
        made = await plane.client.post("/v1/sandboxes", json=SPEC, headers=headers)
        assert made.status_code == 201
        assert made.json()["node"] == "n002"
        again = await plane.client.post("/v1/sandboxes", json=SPEC, headers=headers)
    assert (again.json() == made.json()) == bool(headers)


@pytest.mark.parametrize("headers", [{}, key("a")])
async def test_when_all_nodes_refuse_the_caller_hears_why(headers: dict[str, str]) -> None:
    fakes = [FakeEdge("n001"), FakeEdge("n002")]
    for fake in fakes:
        fake.full()
    async with control_plane(fakes) as plane:
        refused = await plane.client.post("/v1/sandboxes", json=SPEC, headers=headers)
        assert refused.status_code == 503
        assert refused.json()["error"]["code"] == "capacity_unavailable"
        assert refused.json()["error"]["retryable"] is True
        assert refused.headers["retry-after"] == "1"
        for fake in fakes:
            fake.refusal = None
        made = await plane.client.post("/v1/sandboxes", json=SPEC, headers=headers)
        assert made.status_code == 201
    assert sum(fake.created for fake in fakes) == 1


async def test_a_failed_start_is_not_tried_elsewhere() -> None:
    fakes = [FakeEdge("n001"), FakeEdge("n002")]
    for fake in fakes:
        fake.refusal = StartFailed("no", step="mount")
    async with control_plane(fakes) as plane:
        failed = await plane.client.post("/v1/sandboxes", json=SPEC)
    assert failed.status_code == 500
    assert failed.json()["error"]["details"] == {"step": "mount"}
    assert (
        plane.edges.overlay.count(NodeId("n001")) + plane.edges.overlay.count(NodeId("n002")) == 1
    )


async def test_a_key_moved_by_another_process_leaves_one_sandbox() -> None:
    edge, other = FakeEdge("n001"), FakeEdge("n002")
    edge.gate = anyio.Event()
    made: list[httpx.Response] = []
    async with control_plane([edge, other]) as plane:
        plane.claims.shared = True
        other.away = Unavailable("away", sent=False)
        await plane.edges.refresh()
        other.away = None

        async def create() -> None:
            made.append(await plane.client.post("/v1/sandboxes", json=SPEC, headers=key("a")))

        async with anyio.create_task_group() as group:
            group.start_soon(create)
            while not edge.sandboxes:
                await anyio.lowlevel.checkpoint()
            first = next(iter(edge.sandboxes))
            root = ProjectId("root")
            target = mint_sandbox_id(NodeId("n002"))
            await plane.claims.move(root, "a", sandbox_id(first), target)
            edge.gate.set()
    assert made[0].json()["id"] == target
    assert edge.sandboxes[first].state == "stopped"


async def test_no_node_has_the_backend() -> None:
    async with control_plane([FakeEdge()]) as plane:
        answer = await plane.client.post("/v1/sandboxes", json=SPEC | {"backend": "microvm"})
    assert answer.status_code == 422


async def test_an_edge_that_cannot_be_reached_is_passed_over() -> None:
    away, here = FakeEdge("n001"), FakeEdge("n002", cpus=1)
    async with control_plane([away, here]) as plane:
        away.away = Unavailable("away", sent=False)
        made = await plane.client.post("/v1/sandboxes", json=SPEC)
    assert made.json()["node"] == "n002"


async def test_a_repeat_does_not_leave_an_edge_that_is_away() -> None:
    edge, other = FakeEdge("n001", cpus=64), FakeEdge("n002", cpus=1)
    async with control_plane([edge, other]) as plane:
        first = await plane.client.post("/v1/sandboxes", json=SPEC, headers=key("a"))
        home = edge if edge.created else other
        home.away = Unavailable("away", sent=False)
        lost = await plane.client.post("/v1/sandboxes", json=SPEC, headers=key("a"))
        assert lost.json()["error"]["code"] == "unavailable"
        home.away = None
        again = await plane.client.post("/v1/sandboxes", json=SPEC, headers=key("a"))
    assert again.json() == first.json()
    assert edge.created + other.created == 1


async def test_an_edge_that_broke_off_is_not_passed_over_under_another_id() -> None:
    edge, other = FakeEdge("n001", cpus=64), FakeEdge("n002", cpus=1)
    async with control_plane([edge, other]) as plane:
        edge.away = other.away = Unavailable("broke off")
        lost = await plane.client.post("/v1/sandboxes", json=SPEC, headers=key("a"))
        assert lost.json()["error"]["code"] == "unavailable"
        edge.away = other.away = None
        made = await plane.client.post("/v1/sandboxes", json=SPEC, headers=key("a"))
    assert made.status_code == 201
    assert edge.created + other.created == 1


async def test_a_batch_reports_each_as_it_is_ready() -> None:
    edge = FakeEdge()
    async with control_plane([edge]) as plane:
        answer = await plane.client.post(
            "/v1/sandboxes:batch", json={"spec": SPEC, "count": 100}, headers=key("b")
        )
        items = [msgspec.json.decode(line) for line in answer.content.splitlines()]
        assert sorted(item["index"] for item in items) == list(range(100))
        assert len({item["sandbox"]["id"] for item in items}) == 100
        again = await plane.client.post(
            "/v1/sandboxes:batch", json={"spec": SPEC, "count": 100}, headers=key("b")
        )
    repeated = [msgspec.json.decode(line) for line in again.content.splitlines()]
    assert {i["index"]: i["sandbox"]["id"] for i in items} == {
        i["index"]: i["sandbox"]["id"] for i in repeated
    }
    assert edge.created == 100


async def test_a_batch_reports_what_failed_beside_what_did_not() -> None:
    edge = FakeEdge()
    edge.refusal = CapacityUnavailable("full: \udcff")  # as of a file's name that is no UTF-8
    async with control_plane([edge]) as plane:
        answer = await plane.client.post("/v1/sandboxes:batch", json={"spec": SPEC, "count": 3})
    items = [msgspec.json.decode(line) for line in answer.content.splitlines()]
    assert answer.status_code == 200
    assert [item["error"]["code"] for item in items] == ["capacity_unavailable"] * 3
    assert all("full: \\udcff" in item["error"]["message"] for item in items)


async def test_lists_come_in_pages_over_all_nodes() -> None:
    async with control_plane([FakeEdge("n001"), FakeEdge("n002")]) as plane:
        for _ in range(7):
            await plane.client.post("/v1/sandboxes", json=SPEC)
        seen: list[dict[str, object]] = []
        mark = ""
        while True:
            page = (
                await plane.client.get("/v1/sandboxes", params={"limit": 3, "next": mark})
            ).json()
            seen += page["sandboxes"]
            mark = page.get("next", "")
            if not mark:
                break
    assert len({view["id"] for view in seen}) == len(seen) == 7
    assert [v["created_at"] for v in seen] == sorted(
        (v["created_at"] for v in seen),
        reverse=True,  # type: ignore[type-var]
    )


async def test_a_list_says_which_node_is_silent() -> None:
    away = FakeEdge("n002")
    async with control_plane([FakeEdge("n001"), away]) as plane:
        await plane.client.post("/v1/sandboxes", json=SPEC)
        away.away = Unavailable("away")
        partial = await plane.client.get("/v1/sandboxes")
        assert partial.headers["x-dsec-silent-nodes"] == "n002"
        plane.fakes[0].away = Unavailable("away")
        assert (await plane.client.get("/v1/sandboxes")).status_code == 503
