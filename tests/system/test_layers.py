"""Layers, environments and the store over several nodes."""

from __future__ import annotations

import pytest

from dsec.base.errors import DataUnavailable, Unavailable, Unsupported
from dsec.wire.edge_v1 import CreateOnEdge
from dsec.wire.public_v1 import ImageView, LayerView
from dsec.wire.sandbox import SandboxSpec
from tests.system.fake_edge import FakeEdge
from tests.system.plane import Plane, bearer, control_plane

pytestmark = pytest.mark.anyio
TAR = bytes(10240)


async def publish(plane: Plane, name: str, kind: str = "toolkit") -> None:
    query = {"kind": kind, "name": name}
    answer = await plane.client.post("/v1/layers/publish", params=query, content=TAR)
    assert '"ready"' in answer.text, answer.text


async def test_a_layer_is_published_once_and_found_wherever_it_is() -> None:
    away, here = FakeEdge("n001"), FakeEdge("n002")
    async with control_plane([away, here]) as plane:
        away.away = Unavailable("gone")
        await plane.edges.refresh()
        await publish(plane, "rg:1")
        assert list(here.published) == [("toolkit", "rg:1")]
        assert not away.published
        shown = await plane.client.get("/v1/layers/show?kind=toolkit&name=rg")
        assert shown.json()["name"] == "rg:1"


async def test_users_on_all_nodes_are_counted_and_versions_stand_in_order() -> None:
    one, two = FakeEdge("n001"), FakeEdge("n002")
    async with control_plane([one, two]) as plane:
        for name in ("rg:9", "rg:10", "jq:1"):
            await publish(plane, name)
        two.published |= one.published
        one.use("toolkit", "rg:10")
        two.use("toolkit", "rg:10")
        listed = (await plane.client.get("/v1/layers")).json()
        assert [view["name"] for view in listed] == ["jq:1", "rg:9", "rg:10"]
        assert [view.get("used_by", 0) for view in listed] == [0, 0, 2]
        shown = (await plane.client.get("/v1/layers/show?kind=toolkit&name=rg")).json()
        assert (shown["name"], shown["used_by"]) == ("rg:10", 2)
        kept = await plane.client.delete("/v1/layers?kind=toolkit&name=rg:10")
        assert (kept.status_code, kept.json()["error"]["code"]) == (409, "conflict")
        assert (await plane.client.delete("/v1/layers?kind=toolkit&name=rg:9")).status_code == 204
        assert ("toolkit", "rg:9") not in one.published | two.published


async def test_what_one_node_has_not_is_asked_of_the_next() -> None:
    one, two = FakeEdge("n001"), FakeEdge("n002")
    two.image_names.append("mine")
    one.record("debian", "", 9.0)
    two.record("debian", "", 8.0)
    two.record("mine", "t", 8.0)
    async with control_plane([one, two]) as plane:
        ask = plane.client.get
        lint = await plane.client.post("/v1/environments/lint", json={"image": "mine"})
        assert lint.json()["environment"]["image"] == "mine"
        absent = await plane.client.post("/v1/environments/lint", json={"image": "none"})
        assert absent.json()["error"]["details"] == {"kind": "image"}
        assert "ready" in (await plane.client.post("/v1/images/push?name=mine")).text
        assert (await ask("/v1/environments/trace?image=mine&trace=t")).json()["trace"] == "t"
        assert (await ask("/v1/environments/trace?image=debian")).json()["recorded_at"] == 9.0
        assert (await ask("/v1/environments/trace?image=mine")).status_code == 404


async def test_a_store_that_nodes_share_is_collected_once() -> None:
    fakes = [FakeEdge(f"n00{number}") for number in (1, 2, 3)]
    async with control_plane(fakes) as plane:
        done = (await plane.client.post("/v1/store/collect?dry_run=true")).json()
        assert (done["blobs"], sum(len(fake.collections) for fake in fakes)) == (2, 1)
        fakes[1].store_url = "s3://other"
        done = (await plane.client.post("/v1/store/collect")).json()
        assert (done["blobs"], done["bytes"]) == (4, 24)
        assert len((await plane.client.get("/v1/store")).json()) == 3
        for fake in fakes:
            fake.store_url = ""
        refused = await plane.client.post("/v1/store/collect")
        assert refused.json()["error"]["code"] == "unsupported"


async def test_nobody_is_left_out_of_a_collection() -> None:
    one, two = FakeEdge("n001"), FakeEdge("n002")
    async with control_plane([one, two]) as plane:

        async def store() -> None:
            raise Unavailable("gone")

        two.store = store  # type: ignore[assignment, method-assign]
        refused = await plane.client.post("/v1/store/collect")
        assert refused.status_code == 503
        assert not one.collections
        assert len((await plane.client.get("/v1/store")).json()) == 1


async def test_a_rule_of_the_callers_is_checked() -> None:
    async with control_plane([FakeEdge()]) as plane:
        body = {"image": "debian", "rules": [{"id": "No Good", "message": "x"}]}
        answer = await plane.client.post("/v1/environments/lint", json=body)
        assert answer.status_code == 400
        assert "rules" in answer.json()["error"]["message"]


async def test_who_only_looks_may_list_but_not_search_contents() -> None:
    async with control_plane([FakeEdge()]) as plane:
        await publish(plane, "rg:1")
        reader = bearer(plane.keys.reader)
        assert len((await plane.client.get("/v1/layers", headers=reader)).json()) == 1
        body = {"image": "debian"}
        lint = await plane.client.post("/v1/environments/lint", json=body, headers=reader)
        assert lint.status_code == 403


async def test_nothing_is_removed_anywhere_while_one_node_uses_it() -> None:
    one, two = FakeEdge("n001"), FakeEdge("n002")
    async with control_plane([one, two]) as plane:
        await publish(plane, "rg:1")
        two.published |= one.published
        spec = SandboxSpec(image="debian", toolkits=["rg:1"])
        await two.create(CreateOnEdge(id="s1", project="p", spec=spec))
        refused = await plane.client.delete("/v1/layers?kind=toolkit&name=rg:1")
        assert (refused.status_code, refused.json()["error"]["code"]) == (409, "conflict")
        assert ("toolkit", "rg:1") in one.published
        await two.stop("s1")

        async def away(*_: object) -> LayerView:
            raise Unavailable("gone")

        two.layer = away  # type: ignore[assignment, method-assign]
        assert (await plane.client.delete("/v1/layers?kind=toolkit&name=rg:1")).status_code == 503
        assert ("toolkit", "rg:1") in one.published


async def test_an_image_a_sandbox_of_any_node_uses_stays_on_all() -> None:
    one, two = FakeEdge("n001"), FakeEdge("n002")
    async with control_plane([one, two]) as plane:
        await two.create(CreateOnEdge(id="s1", project="p", spec=SandboxSpec(image="debian")))
        refused = await plane.client.delete("/v1/images?name=debian")
        assert (refused.status_code, refused.json()["error"]["code"]) == (409, "conflict")
        assert one.image_names == two.image_names == ["debian"]
        await two.stop("s1")
        assert (await plane.client.delete("/v1/images?name=debian")).status_code == 204
        assert one.image_names == two.image_names == []


async def test_a_store_that_keeps_a_name_is_reported_when_all_nodes_have_forgotten_it() -> None:
    one, two = FakeEdge("n001"), FakeEdge("n002")
    async with control_plane([one, two]) as plane:
        forget = one.remove_image

        async def remove_image(name: str) -> None:
            await forget(name)
            raise Unsupported("the registry does not let documents be deleted")

        one.remove_image = remove_image  # type: ignore[method-assign]
        answer = await plane.client.delete("/v1/images?name=debian")
        assert (answer.status_code, answer.json()["error"]["code"]) == (422, "unsupported")
        assert one.image_names == two.image_names == []


async def test_data_that_cannot_be_had_is_not_a_node_that_is_away() -> None:
    one = FakeEdge("n001")
    async with control_plane([one]) as plane:

        async def images() -> list[ImageView]:
            raise DataUnavailable("the store lost it")

        one.images = images  # type: ignore[method-assign]
        answer = await plane.client.get("/v1/images")
        assert answer.json()["error"]["code"] == "data_unavailable"
