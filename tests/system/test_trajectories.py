"""Trajectories of sandboxes whose nodes are away or gone: told by others, to the same people."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import httpx
import pytest

from dsec.base.errors import DataUnavailable, Unavailable
from dsec.base.ids import NodeId, mint_sandbox_id
from dsec.control import trajectories
from tests.system.fake_edge import FakeEdge
from tests.system.plane import Plane, bearer, control_plane

pytestmark = pytest.mark.anyio
SPEC = {"image": "debian"}


class Fleet:
    """Two nodes; what happens to the first is told by the second."""

    def __init__(self, plane: Plane, first: FakeEdge, second: FakeEdge) -> None:
        self.plane = plane
        self.first = first
        self.second = second

    async def made(self) -> str:
        """A sandbox of the team's on the first node, known to the control plane."""
        self.second.full()
        made = await self.plane.client.post("/v1/sandboxes", json=SPEC, headers=self.as_("team"))
        assert made.status_code == 201, made.text
        return str(made.json()["id"])

    def stranger(self) -> str:
        """One of the first node's that this control plane has never heard of."""
        return mint_sandbox_id(NodeId("n001"))

    async def told(self, sandbox: str, who: str = "team", **headers: str) -> httpx.Response:
        url = f"/v1/sandboxes/{sandbox}/trajectory"
        return await self.plane.client.get(url, headers=self.as_(who) | headers)

    async def goes_away(self) -> None:
        self.first.away = Unavailable("the edge is away")
        await self.plane.edges.refresh()

    def as_(self, who: str) -> dict[str, str]:
        return bearer(getattr(self.plane.keys, who))


@pytest.fixture
async def fleet() -> AsyncIterator[Fleet]:
    first, second = FakeEdge("n001"), FakeEdge("n002")
    async with control_plane([first, second]) as plane:
        yield Fleet(plane, first, second)


@asynccontextmanager
async def without_the_first() -> AsyncIterator[Fleet]:
    second = FakeEdge("n002")
    async with control_plane([second]) as plane:
        yield Fleet(plane, FakeEdge("n001"), second)


def refusal(response: httpx.Response, sandbox: str) -> tuple[int, dict[str, object]]:
    """What it says, but for what differs with each request."""
    error = response.json()["error"]
    error.pop("request_id", None)
    return response.status_code, error | {"message": error["message"].replace(sandbox, "it")}


async def test_a_node_that_answers_tells_its_own(fleet: Fleet) -> None:
    sandbox = await fleet.made()
    fleet.second.sent[sandbox] = "foreign"
    told = await fleet.told(sandbox, **{"X-Dsec-Project": "foreign"})
    assert told.json() == {"told_by": "n001", "allowed": "team"}
    assert (await fleet.told(sandbox, "foreign")).status_code == 404


@pytest.mark.parametrize("known", [True, False])
async def test_another_node_tells_of_one_that_is_away(fleet: Fleet, known: bool) -> None:
    sandbox = await fleet.made() if known else fleet.stranger()
    fleet.second.sent[sandbox] = "team"
    await fleet.goes_away()
    told = await fleet.told(sandbox)
    assert told.json() == {"told_by": "n002", "allowed": "team"}
    assert (await fleet.told(sandbox, "owner")).status_code == 200


@pytest.mark.parametrize("known", [True, False])
async def test_others_hear_what_they_hear_of_a_living_one(fleet: Fleet, known: bool) -> None:
    alive = await fleet.made()
    foreign = refusal(await fleet.told(alive, "foreign"), alive)
    denied = refusal(await fleet.told(alive, "reader"), alive)
    assert (foreign[0], denied[0]) == (404, 403)
    sandbox = alive if known else fleet.stranger()
    fleet.second.sent[sandbox] = "team"
    await fleet.goes_away()
    assert refusal(await fleet.told(sandbox, "foreign"), sandbox) == foreign
    assert refusal(await fleet.told(sandbox, "reader"), sandbox) == denied


async def test_a_document_does_not_outweigh_what_the_node_has_said(fleet: Fleet) -> None:
    sandbox = await fleet.made()
    fleet.second.sent[sandbox] = "foreign"
    await fleet.goes_away()
    assert (await fleet.told(sandbox, "foreign")).status_code == 404
    told = await fleet.told(sandbox)
    assert (told.status_code, told.json()["error"]["code"]) == (503, "data_unavailable")


async def test_a_document_opens_nothing_but_the_record(fleet: Fleet) -> None:
    sandbox = await fleet.made()
    another = fleet.stranger()
    fleet.second.sent[another] = "foreign"
    assert (await fleet.told(another, "foreign")).status_code == 200
    fleet.first.sandboxes[another] = fleet.first.sandboxes[sandbox]  # it is there after all
    url = f"/v1/sandboxes/{another}/headers"
    assert (await fleet.plane.client.get(url, headers=fleet.as_("foreign"))).status_code == 404


async def test_of_a_node_that_is_away_what_was_not_sent_comes_back_with_it(fleet: Fleet) -> None:
    sandbox = await fleet.made()
    await fleet.goes_away()
    told = await fleet.told(sandbox)
    error = told.json()["error"]
    assert (told.status_code, error["code"], error["details"]["node"]) == (
        503,
        "unavailable",
        "n001",
    )
    assert "not in the store" in error["message"]
    assert "when the node is back" in error["message"]
    assert (await fleet.told(sandbox, "foreign")).status_code == 404
    fleet.first.away = None
    assert (await fleet.told(sandbox)).json()["told_by"] == "n001"


async def test_a_store_that_does_not_answer_is_not_an_empty_one(fleet: Fleet) -> None:
    sandbox = await fleet.made()
    fleet.second.store_failure = Unavailable("the store is away")
    await fleet.goes_away()
    told = await fleet.told(sandbox)
    assert told.status_code == 503
    assert "cannot be seen: the store is away" in told.json()["error"]["message"]
    fleet.second.store_failure = DataUnavailable("the document is damaged")
    told = await fleet.told(sandbox)
    assert (told.status_code, told.json()["error"]["code"]) == (503, "data_unavailable")


async def test_a_node_that_hangs_does_not_keep_the_others_from_telling(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(trajectories, "ASK_TIMEOUT_S", 0.01)
    hanging, telling = FakeEdge("n002"), FakeEdge("n003")
    async with control_plane([hanging, telling]) as plane:
        fleet = Fleet(plane, FakeEdge("n001"), telling)
        sandbox = fleet.stranger()
        telling.sent[sandbox] = "team"
        hanging.hang = True
        assert (await fleet.told(sandbox)).json()["told_by"] == "n003"
        del telling.sent[sandbox]
        told = await fleet.told(sandbox)
        assert told.status_code == 503  # the one that hangs may have it
        assert "does not say in time" in told.json()["error"]["message"]


async def test_with_all_nodes_away_nothing_is_said_of_the_store(fleet: Fleet) -> None:
    sandbox = await fleet.made()
    fleet.second.away = Unavailable("away")
    await fleet.goes_away()
    told = await fleet.told(sandbox)
    assert told.status_code == 503
    assert "no other node answers" in told.json()["error"]["message"]


async def test_one_that_its_node_has_forgotten(fleet: Fleet) -> None:
    sandbox = await fleet.made()
    del fleet.first.sandboxes[sandbox]
    told = await fleet.told(sandbox)
    assert told.status_code == 404
    assert "n001" in told.json()["error"]["message"]
    fleet.first.sent[sandbox] = "team"
    assert (await fleet.told(sandbox)).json() == {"told_by": "n001", "allowed": "team"}
    assert (await fleet.told(sandbox, "foreign")).status_code == 404


async def test_a_node_that_was_removed() -> None:
    async with without_the_first() as fleet:
        sandbox, unsent = fleet.stranger(), fleet.stranger()
        fleet.second.sent[sandbox] = "team"
        assert (await fleet.told(sandbox)).json()["told_by"] == "n002"
        missing = refusal(await fleet.told(unsent), unsent)
        assert missing[0] == 404
        assert refusal(await fleet.told(sandbox, "foreign"), sandbox) == missing


@pytest.mark.parametrize("project", ["nowhere", "../team", ""])
async def test_a_project_nobody_has_is_nobodys(project: str) -> None:
    async with without_the_first() as fleet:
        sandbox = fleet.stranger()
        fleet.second.sent[sandbox] = project
        for who in ("team", "foreign", "owner"):
            assert (await fleet.told(sandbox, who)).status_code == 404
