"""Jobs and leases over REST: held, renewed, lost; a whole job moved in one call."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import anyio
import httpx
import msgspec
import pytest
from typing_extensions import override

from dsec.base.clock import SystemClock
from dsec.base.errors import CapacityUnavailable, Unavailable
from dsec.base.ids import PrincipalId, ProjectId
from dsec.control.edges import Edge
from dsec.edge.server import make_edge_app
from dsec.iam.keys import digest_of, mint_key
from dsec.iam.permissions import OWNER, Permission
from dsec.iam.principals import Grant, Principal
from dsec.wire.edge_v1 import PLAIN, CreateOnEdge, PauseOrder
from dsec.wire.sandbox import SandboxView
from tests.system.fake_edge import FakeEdge
from tests.system.plane import Plane, bearer, control_plane
from tests.unit.edge.node import Node

pytestmark = pytest.mark.anyio
SPEC: dict[str, Any] = {"image": "debian", "backend": "sim", "job": "run"}
WAIT_S = 60.0


async def until(condition: Callable[[], Awaitable[bool]]) -> None:
    """Nobody is told of what the control plane does by itself."""
    with anyio.fail_after(WAIT_S):
        while not await condition():  # noqa: ASYNC110
            await anyio.sleep(0.02)


@asynccontextmanager
async def reaping(plane: Plane) -> AsyncIterator[None]:
    async with anyio.create_task_group() as group:
        group.start_soon(plane.server.run)
        yield
        group.cancel_scope.cancel()


async def hold(plane: Plane, epoch: int = 0, job: str = "run", **terms: Any) -> httpx.Response:
    return await plane.client.put(f"/v1/jobs/{job}/lease", json={"epoch": epoch, **terms})


async def create(plane: Plane, key: str = "", **spec: Any) -> httpx.Response:
    headers = {"Idempotency-Key": key} if key else {}
    return await plane.client.post("/v1/sandboxes", json=SPEC | spec, headers=headers)


async def states(plane: Plane) -> dict[str, str]:
    listed = (await plane.client.get("/v1/sandboxes?job=run")).json()["sandboxes"]
    return {view["id"]: view["state"] for view in listed}


async def moved(plane: Plane, verb: str, key: str = "", job: str = "run") -> list[dict[str, Any]]:
    answer = await plane.client.post(
        f"/v1/jobs/{job}/{verb}", headers=bearer(key or plane.keys.owner)
    )
    assert answer.status_code == 200, answer.text
    return [msgspec.json.decode(line) for line in answer.text.splitlines()]


async def test_a_sandbox_says_whose_it_is() -> None:
    async with control_plane([FakeEdge()]) as plane:
        await hold(plane)
        view = (await create(plane, step="3", group="a")).json()
        assert (view["job"], view["step"], view["group"], view["epoch"]) == ("run", "3", "a", 1)
        await create(plane, job="other")
        listed = (await plane.client.get("/v1/sandboxes?job=run")).json()["sandboxes"]
        assert [found["id"] for found in listed] == [view["id"]]


async def test_jobs_are_listed_with_their_leases_and_sandboxes() -> None:
    async with control_plane([FakeEdge()]) as plane:
        held = (await hold(plane, ttl_s=60, on_lapse="reap", on_superseded="pause")).json()
        assert (held["epoch"], held["on_lapse"], held["on_superseded"]) == (1, "reap", "pause")
        sandboxes = [(await create(plane)).json()["id"] for _ in range(2)]
        await create(plane, job="bare")
        await plane.fakes[0].pause(sandboxes[0])
        bare, run = (await plane.client.get("/v1/jobs")).json()
        assert bare == {"job": "bare", "project": "root", "running": 1, "sandboxes": 1}
        assert run == {**held, "running": 1, "paused": 1, "sandboxes": 2}
        assert (await plane.client.get("/v1/jobs/run")).json() == run
        for path in ("/v1/jobs/none", "/v1/jobs/..x", "/v1/jobs/a%20b"):
            assert (await plane.client.get(path)).status_code == 404
        assert (await plane.client.post("/v1/jobs/none/pause")).status_code == 404


async def test_a_lease_is_renewed_and_given_back() -> None:
    async with control_plane([FakeEdge()]) as plane:
        first = (await hold(plane, ttl_s=60)).json()
        again = (await hold(plane, 1, ttl_s=600)).json()
        assert (again["epoch"], again["expires_at"] > first["expires_at"]) == (1, True)
        refused = await hold(plane, 2)
        assert refused.status_code == 409
        assert refused.json()["error"]["details"]["epoch"] == 1
        path = "/v1/jobs/run/lease"
        assert (await plane.client.delete(path, params={"epoch": 2})).status_code == 409
        assert (await plane.client.delete(path, params={"epoch": 1})).status_code == 204
        assert (await plane.client.delete(path, params={"epoch": 1})).status_code == 204
        assert (await hold(plane, 1)).status_code == 409
        assert (await hold(plane)).json()["epoch"] == 2


async def test_taking_a_lease_is_repeated_under_its_key() -> None:
    async with control_plane([FakeEdge()]) as plane:
        for key, epoch in (("a", 1), ("a", 1), ("b", 2), ("b", 2)):
            headers = {"Idempotency-Key": key}
            held = await plane.client.put("/v1/jobs/run/lease", json={}, headers=headers)
            assert held.json()["epoch"] == epoch
        headers = {"Idempotency-Key": "x" * 201}
        held = await plane.client.put("/v1/jobs/run/lease", json={}, headers=headers)
        assert held.status_code == 400


async def test_nothing_is_started_under_an_epoch_that_is_not_in_force() -> None:
    async with control_plane([FakeEdge()]) as plane:
        assert (await create(plane, epoch=1)).status_code == 409
        await hold(plane)
        assert (await create(plane, epoch=1)).json()["epoch"] == 1
        await hold(plane)
        created = plane.fakes[0].created
        refused = await create(plane, epoch=1)
        assert refused.status_code == 409
        assert refused.json()["error"]["details"] == {
            "kind": "lease",
            "reason": "superseded",
            "epoch": 2,
            "holder": "owner",
        }
        assert (await create(plane, epoch=3)).status_code == 409
        assert plane.fakes[0].created == created
        assert (await create(plane, epoch=2)).status_code == 201
        nobodys = await plane.client.post("/v1/sandboxes", json={"image": "debian", "epoch": 1})
        assert nobodys.status_code == 400


async def test_nothing_is_started_under_a_lease_that_has_lapsed() -> None:
    async with control_plane([FakeEdge()]) as plane, reaping(plane):
        await hold(plane, ttl_s=1)

        async def lapsed() -> bool:
            return bool((await plane.client.get("/v1/jobs/run")).json().get("lapsed"))

        await until(lapsed)
        assert (await create(plane)).status_code == 409
        assert (await hold(plane, 1)).status_code == 200
        assert (await create(plane)).status_code == 201


async def test_a_batch_with_the_same_key_is_the_same_within_an_epoch() -> None:
    async def batch(plane: Plane, **spec: Any) -> dict[int, str]:
        answer = await plane.client.post(
            "/v1/sandboxes:batch",
            json={"spec": SPEC | spec, "count": 8},
            headers={"Idempotency-Key": "step-1"},
        )
        items = [msgspec.json.decode(line) for line in answer.text.splitlines()]
        return {item["index"]: item["sandbox"]["id"] for item in items}

    async with control_plane([FakeEdge(), FakeEdge("n002")]) as plane:
        bare = await batch(plane)
        assert await batch(plane) == bare
        await hold(plane)
        first = await batch(plane, epoch=1)
        assert await batch(plane, epoch=1) == first
        assert not set(first.values()) & set(bare.values())
        await hold(plane)
        second = await batch(plane, epoch=2)
        assert not set(first.values()) & set(second.values())
        assert await batch(plane, epoch=2) == second
        refused = await plane.client.post(
            "/v1/sandboxes", json=SPEC | {"epoch": 1}, headers={"Idempotency-Key": "step-1.0"}
        )
        assert refused.status_code == 409


async def test_a_newer_server_takes_an_older_ones_request_for_the_same() -> None:
    async with control_plane([FakeEdge()]) as plane:
        first = await create(plane, key="a")
        spelt_out = {"idle_action": "stop", "qos": "ls", "step": "", "epoch": 0, "labels": {}}
        assert (await create(plane, key="a", **spelt_out)).json() == first.json()
        assert (await create(plane, key="a", qos="be")).status_code == 409


@pytest.mark.parametrize(("policy", "state"), [("pause", "paused"), ("reap", "stopped")])
async def test_a_lapse_is_seen_to(policy: str, state: str) -> None:
    async with control_plane([FakeEdge(), FakeEdge("n002")]) as plane, reaping(plane):
        await hold(plane, ttl_s=3600)
        for _ in range(4):
            assert (await create(plane)).status_code == 201
        await hold(plane, 1, ttl_s=1, on_lapse=policy)

        async def seen_to() -> bool:
            return set((await states(plane)).values()) == {state}

        await until(seen_to)


async def test_a_new_epoch_reaps_the_older_ones() -> None:
    async with control_plane([FakeEdge(), FakeEdge("n002")]) as plane, reaping(plane):
        await hold(plane)
        old = [(await create(plane)).json()["id"] for _ in range(4)]
        await hold(plane)
        new = [(await create(plane)).json()["id"] for _ in range(4)]

        async def reaped() -> bool:
            found = await states(plane)
            return {found[sandbox] for sandbox in old} == {"stopped"}

        await until(reaped)
        found = await states(plane)
        assert {found[sandbox] for sandbox in new} == {"running"}


async def test_jobs_of_the_same_name_in_two_projects_do_not_touch() -> None:
    async with control_plane([FakeEdge()]) as plane, reaping(plane):
        made = {}
        for key in (plane.keys.team, plane.keys.foreign):
            plane.client.headers.update(bearer(key))
            await hold(plane)
            made[key] = (await create(plane)).json()["id"]
        plane.client.headers.update(bearer(plane.keys.team))
        await hold(plane)
        items = await moved(plane, "reap", plane.keys.team)
        assert [item["id"] for item in items] in ([], [made[plane.keys.team]])
        fake = plane.fakes[0]

        async def reaped() -> bool:
            return fake.sandboxes[made[plane.keys.team]].state == "stopped"

        await until(reaped)
        assert fake.sandboxes[made[plane.keys.foreign]].state == "running"
        plane.client.headers.update(bearer(plane.keys.foreign))
        [theirs] = (await plane.client.get("/v1/jobs")).json()
        assert (theirs["project"], theirs["epoch"], theirs["running"]) == ("foreign", 1, 1)
        # Whoever owns all projects still moves the jobs of one at a time.
        plane.client.headers.update(bearer(plane.keys.owner))
        assert (await plane.client.get("/v1/jobs")).json() == []


async def test_a_node_that_is_away_is_said_to_be_missing() -> None:
    fakes = [FakeEdge(), FakeEdge("n002")]
    async with control_plane(fakes) as plane:
        for _ in range(8):
            await create(plane)
        fakes[1].away = Unavailable("the edge is away")
        items = await moved(plane, "pause")
        [missing] = [item for item in items if "error" in item]
        assert (missing["id"], missing["error"]["details"]) == ("", {"node": "n002"})
        paused = [item["sandbox"]["state"] for item in items if "sandbox" in item]
        assert paused == ["paused"] * fakes[0].created
        shown = await plane.client.get("/v1/jobs/run")
        assert shown.headers["x-dsec-silent-nodes"] == "n002"
        fakes[0].away = Unavailable("the edge is away")
        assert (await plane.client.post("/v1/jobs/run/pause")).status_code == 503


async def test_nodes_never_heard_of_are_told_of_in_one_item() -> None:
    fakes = [FakeEdge(), FakeEdge("n002"), FakeEdge("n003")]
    for fake in fakes[1:]:
        fake.away = Unavailable("the edge is away")
    async with control_plane(fakes) as plane:
        await create(plane)
        items = await moved(plane, "pause")
        [missing] = [item for item in items if "error" in item]
        assert missing["error"]["details"] == {"nodes": 2}
        assert "2" in missing["error"]["message"]


@pytest.mark.parametrize("query", ["job=", "label==x", "label=a=1&label=a=2", "state=bogus"])
async def test_odd_filters_are_refused(query: str) -> None:
    async with control_plane([FakeEdge()]) as plane:
        await create(plane)
        answer = await plane.client.get(f"/v1/sandboxes?{query}")
        assert (answer.status_code, answer.json()["error"]["code"]) == (400, "invalid_request")


async def test_an_empty_idempotency_key_is_refused() -> None:
    async with control_plane([FakeEdge()]) as plane:
        for method, path, body in (
            ("POST", "/v1/sandboxes", SPEC),
            ("POST", "/v1/sandboxes:batch", {"spec": SPEC, "count": 1}),
            ("PUT", "/v1/jobs/run/lease", {}),
        ):
            answer = await plane.client.request(
                method, path, json=body, headers={"Idempotency-Key": ""}
            )
            assert (answer.status_code, plane.fakes[0].created) == (400, 0)


async def test_what_ends_meanwhile_is_no_failure() -> None:
    class Quick(FakeEdge):
        @override
        async def pause(self, sandbox: str, order: PauseOrder = PLAIN) -> SandboxView:
            await self.stop(sandbox)
            if len(self.sandboxes) > 1:
                del self.sandboxes[sandbox]
            return await super().pause(sandbox, order)

    async with control_plane([Quick()]) as plane:
        for _ in range(2):
            await create(plane)
        items = await moved(plane, "pause")
        assert [item.get("error") for item in items] == [None, None]
        assert sorted(item.get("sandbox", {}).get("state", "") for item in items) == ["", "stopped"]


@asynccontextmanager
async def simulated(node: Node) -> AsyncIterator[Plane]:
    async with node.edge() as service:
        link = Edge(service, make_edge_app(service, SystemClock()))
        async with control_plane([], [link]) as plane:
            yield plane


async def test_thirty_sandboxes_of_a_real_edge_pause_resume_and_end_together(
    tmp_path: Any,
) -> None:
    node = Node(tmp_path)
    async with simulated(node) as plane:
        answer = await plane.client.post("/v1/sandboxes:batch", json={"spec": SPEC, "count": 30})
        assert len(answer.text.splitlines()) == 30
        other = (await create(plane, job="other")).json()["id"]
        for verb, state in (("pause", "paused"), ("resume", "running"), ("reap", "stopped")):
            items = await moved(plane, verb)
            assert [item["sandbox"]["state"] for item in items] == [state] * 30
            assert set((await states(plane)).values()) == {state}
            shown = (await plane.client.get(f"/v1/sandboxes/{other}")).json()
            assert shown["state"] == "running"
        await moved(plane, "reap", job="other")


async def test_whose_epoch_is_superseded_is_woken_by_an_explicit_resume_alone(
    tmp_path: Any,
) -> None:
    async with simulated(Node(tmp_path)) as plane, reaping(plane):
        await hold(plane)
        old = f"/v1/sandboxes/{(await create(plane)).json()['id']}"
        await hold(plane, on_superseded="pause")

        async def held() -> bool:
            return bool((await plane.client.get(old)).json().get("pause", {}).get("held"))

        await until(held)
        for method, path, body in (
            ("POST", "/commands/run", {"argv": ["true"]}),
            ("GET", "/files?path=/etc/passwd", None),
            ("GET", "/processes", None),
            ("PATCH", "", {"pids": 40}),
            ("PUT", "/network", {"rules": {}}),
        ):
            answer = await plane.client.request(method, old + path, json=body)
            error = answer.json()["error"]
            assert (answer.status_code, error["details"]["kind"]) == (409, "held")
            assert "epoch 1 of job run is superseded: owner has epoch 2" in error["message"]
        assert (await plane.client.get(f"{old}/usage")).status_code == 200
        assert (await plane.client.get(old)).json()["state"] == "paused"
        assert (await plane.client.post(f"{old}/resume")).json()["state"] == "running"
        ran = await plane.client.post(f"{old}/commands/run", json={"argv": ["true"]})
        assert ran.json()["exit_code"] == 0
        await moved(plane, "reap")


async def test_what_is_reaped_says_for_whom_and_why(tmp_path: Any) -> None:
    async with simulated(Node(tmp_path)) as plane:
        await hold(plane)
        await create(plane)
        [item] = await moved(plane, "reap")
        said = item["sandbox"]["stop_reason"], item["sandbox"]["stop_detail"]
        assert said == ("reaped", "epoch 1 of job run: owner asked")
        assert (await plane.client.get(f"/v1/sandboxes/{item['id']}")).json() == item["sandbox"]


async def test_what_may_not_be_created_is_not_forked() -> None:
    async with control_plane([FakeEdge()]) as plane:

        async def fork(sandbox: str) -> dict[str, Any]:
            answer = await plane.client.post(f"/v1/sandboxes/{sandbox}/fork", json={"count": 2})
            error: dict[str, Any] = answer.json()["error"]
            return error

        passed_on = {"kind": "route"}  # the fake has none
        await hold(plane, on_superseded="pause")
        old = (await create(plane)).json()["id"]
        free = (await create(plane, job=None)).json()["id"]
        assert (await fork(old))["details"] == passed_on
        await hold(plane, on_superseded="pause")
        refused = await fork(old)
        assert (refused["code"], refused["details"]["reason"]) == ("conflict", "superseded")
        assert (await fork((await create(plane)).json()["id"]))["details"] == passed_on
        await plane.client.delete("/v1/jobs/run/lease?epoch=2")
        assert (await fork(old))["details"]["reason"] == "superseded"
        assert (await fork(free))["details"] == passed_on


async def test_a_fork_needs_the_right_to_create() -> None:
    async with control_plane([FakeEdge()]) as plane:
        sandbox = (await create(plane)).json()["id"]
        key, root = mint_key(), ProjectId("root")
        rights = OWNER - {Permission.SANDBOX_CREATE}
        agent = Principal(PrincipalId("a"), "a", "person", root, (Grant(root, rights),))
        await plane.directory.add_principal(agent)
        await plane.directory.add_key(digest_of(key), agent.id, "test")
        place = f"/v1/sandboxes/{sandbox}"
        used = await plane.client.get(f"{place}/headers", headers=bearer(key))
        assert used.status_code == 200
        refused = await plane.client.post(f"{place}/fork", json={}, headers=bearer(key))
        assert refused.status_code == 403
        assert refused.json()["error"]["details"]["permission"] == "sandbox:create"


@pytest.mark.parametrize("key", ["", "k"])
async def test_an_epoch_that_is_over_is_not_taken_to_another_node(key: str) -> None:
    class Slow(FakeEdge):
        """Full, which is told when the job has changed hands."""

        @override
        async def create(self, request: CreateOnEdge) -> SandboxView:
            asked.append(request.spec.epoch)
            await hold(plane)
            raise CapacityUnavailable("full")

    asked: list[int] = []
    async with control_plane([Slow("n001"), Slow("n002")]) as plane:
        await hold(plane)
        refused = await create(plane, key)
        assert refused.status_code == 409
        assert refused.json()["error"]["details"]["reason"] == "superseded"
        assert asked == [1]
