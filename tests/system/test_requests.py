"""Requests as they should not be, and edges that are not there."""

from __future__ import annotations

import anyio
import pytest

from dsec.base.errors import Unavailable
from dsec.base.ids import NodeId, mint_sandbox_id
from dsec.control import edges as edges_module
from dsec.control import ownership
from tests.system.fake_edge import FakeEdge
from tests.system.plane import control_plane

pytestmark = pytest.mark.anyio
SPEC = {"image": "debian"}


@pytest.mark.parametrize(
    ("body", "says"),
    [
        (b"", "image"),
        (b"{", "not valid"),
        (b"[]", "object"),
        (b'{"image": "debian"', "not valid"),
        (b'{"image": ""}', "image"),
        (b'{"image": 7}', "image"),
        (b'{"image": "debian", "ttl_running_stop": -1}', "ttl_running_stop"),
        (b'{"image": "debian", "max_lifetime_s": 0}', "max_lifetime_s"),
        (b'{"image": "debian", "limits": {"memory_mb": -5}}', "memory_mb"),
        (b'{"image": "debian", "limits": {"cpu_cores": 1e999}}', "not valid"),
        (b'{"image": "debian", "surprise": 1}', "surprise"),
        (b'{"image": "\xff"}', "not valid"),
        (b"[" * 100_000, "not valid"),
    ],
)
async def test_a_bad_body_is_the_callers_fault(body: bytes, says: str) -> None:
    async with control_plane([FakeEdge()]) as plane:
        answer = await plane.client.post("/v1/sandboxes", content=body)
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert error["code"] == "invalid_request"
    assert says in error["message"]
    assert error["request_id"] == answer.headers["x-request-id"]


async def test_a_body_over_the_limit_is_refused_before_it_is_read() -> None:
    async with control_plane([FakeEdge()]) as plane:
        big = b'{"image": "' + b"a" * (1 << 20) + b'"}'
        answer = await plane.client.post("/v1/sandboxes", content=big)
    assert answer.status_code == 413
    assert answer.json()["error"]["code"] == "payload_too_large"


@pytest.mark.parametrize(
    "query",
    [
        "limit=0",
        "limit=-1",
        "limit=x",
        "limit=1001",
        "limit=1&limit=2",
        "label=x",
        "state=happy",
        "who=me",
        "next=%25",
        "next=AAAA",
    ],
)
async def test_a_bad_query_is_the_callers_fault(query: str) -> None:
    async with control_plane([FakeEdge()]) as plane:
        answer = await plane.client.get(f"/v1/sandboxes?{query}")
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["code"] == "invalid_request"


async def test_a_key_over_the_limit_is_refused() -> None:
    async with control_plane([FakeEdge()]) as plane:
        answer = await plane.client.post(
            "/v1/sandboxes", json=SPEC, headers={"Idempotency-Key": "k" * 201}
        )
    assert answer.status_code == 400


@pytest.mark.parametrize(
    "path", ["/", "/v1", "/v1/", "/v1/nodes/", "/v2/sandboxes", "/v1/sandboxes/", "/edge/v1/node"]
)
async def test_an_unknown_route_is_a_typed_error(path: str) -> None:
    async with control_plane([FakeEdge()]) as plane:
        answer = await plane.client.get(path)
    assert answer.status_code == 404
    assert answer.json()["error"]["details"] == {"kind": "route"}


async def test_a_wrong_method_is_a_typed_error() -> None:
    async with control_plane([FakeEdge()]) as plane:
        answer = await plane.client.put("/v1/images")
    assert answer.status_code == 405
    assert answer.json()["error"]["code"] == "request_error"
    assert answer.json()["error"]["details"] == {"allow": "DELETE, GET"}


@pytest.mark.parametrize(
    "name", ["x", "sbx", "..", "sbxn001aaaaaaaaaaaaaaaa%00", "SBXn001aaaaaaaaaaaaaaaa", "%2e%2e"]
)
async def test_what_is_no_id_is_no_sandbox(name: str) -> None:
    async with control_plane([FakeEdge()]) as plane:
        answer = await plane.client.get(f"/v1/sandboxes/{name}/files")
    assert answer.status_code == 404


async def test_a_sandbox_of_a_node_nobody_knows_is_no_sandbox() -> None:
    async with control_plane([FakeEdge()]) as plane:
        answer = await plane.client.get(f"/v1/sandboxes/{mint_sandbox_id(NodeId('zzzz'))}")
    assert answer.status_code == 404
    assert answer.json()["error"]["details"] == {"kind": "sandbox"}


async def test_a_request_keeps_its_id() -> None:
    async with control_plane([FakeEdge()]) as plane:
        kept = await plane.client.get("/v1/version", headers={"X-Request-Id": "a1.b-2"})
        assert kept.headers["x-request-id"] == "a1.b-2"
        made = await plane.client.get("/v1/version", headers=[("X-Request-Id", "a b")])
        assert made.headers["x-request-id"].isalnum()


async def test_a_sandbox_whose_edge_is_away_is_unavailable() -> None:
    edge = FakeEdge()
    async with control_plane([edge]) as plane:
        edge.away = Unavailable("away")
        answer = await plane.client.get(f"/v1/sandboxes/{mint_sandbox_id(NodeId('n001'))}")
    assert answer.status_code == 503
    assert answer.json()["error"]["retryable"] is True


async def test_an_edge_that_hangs_makes_nobody_else_hang(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(edges_module, "DESCRIBE_TIMEOUT_S", 0.05)
    monkeypatch.setattr(ownership, "LOOK_TIMEOUT_S", 0.05)
    hanging, well = FakeEdge("n001"), FakeEdge("n002")
    async with control_plane([hanging, well]) as plane:
        hanging.hang = True
        with anyio.fail_after(5):
            nodes = (await plane.client.get("/v1/nodes")).json()
            lost = await plane.client.get(f"/v1/sandboxes/{mint_sandbox_id(NodeId('n001'))}")
            made = await plane.client.post("/v1/sandboxes", json=SPEC)
    assert [node.get("healthy", True) for node in nodes] == [False, True]
    assert lost.status_code == 503
    assert made.json()["node"] == "n002"


async def test_without_any_edge_creation_is_unavailable() -> None:
    edge = FakeEdge()
    edge.away = Unavailable("away")
    async with control_plane([edge]) as plane:
        answer = await plane.client.post("/v1/sandboxes", json=SPEC)
        assert answer.json()["error"]["code"] == "unavailable"
        lost = await plane.client.get(f"/v1/sandboxes/{mint_sandbox_id(NodeId('n001'))}")
        assert lost.status_code == 503
        edge.away = None
        await plane.edges.refresh()
        assert (await plane.client.post("/v1/sandboxes", json=SPEC)).status_code == 201


async def test_two_edges_of_one_name_are_not_mixed_up() -> None:
    first, second = FakeEdge("n001"), FakeEdge("n001")
    async with control_plane([first, second]) as plane:
        nodes = (await plane.client.get("/v1/nodes")).json()
        assert len(nodes) == 1
        await plane.client.post("/v1/sandboxes", json=SPEC)
    assert (first.created, second.created) == (1, 0)


async def test_images_go_through() -> None:
    async with control_plane([FakeEdge(), FakeEdge("n002")]) as plane:
        pulled = await plane.client.post("/v1/images/pull", json={"reference": "alpine"})
        assert [line for line in pulled.text.splitlines() if '"ready"' in line]
        listed = (await plane.client.get("/v1/images")).json()
        assert [image["name"] for image in listed] == ["alpine", "debian"]
        removed = await plane.client.delete("/v1/images?name=alpine")
        assert (removed.status_code, removed.content) == (204, b"")
        assert (await plane.client.delete("/v1/images?name=alpine")).status_code == 404
        missing = await plane.client.post("/v1/images/pull", json={"reference": "missing"})
        assert missing.status_code == 404
        broken = await plane.client.post("/v1/images/pull", json={"reference": "broken"})
        assert broken.status_code == 200
        assert '"type":"error","code":"not_found"' in broken.text.splitlines()[-1]
        imported = await plane.client.post("/v1/images/import?name=mine", content=b"x" * 100_000)
        assert '"size_bytes":100000' in imported.text
