"""The description of the public API holds together, and the checked-in copy is fresh."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import pytest

from dsec.main.gen import FILE, public_openapi
from tests.system.fake_edge import FakeEdge
from tests.system.plane import control_plane

METHODS = {"get", "put", "post", "patch", "delete"}


@pytest.fixture(scope="module")
def description() -> dict[str, Any]:
    found = json.loads(public_openapi())
    assert isinstance(found, dict)
    return found


def operations(description: dict[str, Any]) -> Iterator[tuple[str, str, dict[str, Any]]]:
    for path, methods in description["paths"].items():
        for method, operation in methods.items():
            yield path, method, operation


def references(node: object) -> Iterator[str]:
    if isinstance(node, dict):
        if "$ref" in node:
            yield node["$ref"]
        for value in node.values():
            yield from references(value)
    elif isinstance(node, list):
        for value in node:
            yield from references(value)


def test_the_copy_is_fresh() -> None:
    assert FILE.read_bytes() == public_openapi(), "run python -m dsec.main.gen"


def test_every_reference_leads_somewhere(description: dict[str, Any]) -> None:
    schemas = description["components"]["schemas"]
    used = {ref.removeprefix("#/components/schemas/") for ref in references(description)}
    assert used <= set(schemas)
    assert all(re.fullmatch(r"[\w.-]+", name) for name in schemas)


def test_operations_have_names_of_their_own(description: dict[str, Any]) -> None:
    names = [operation["operationId"] for _, _, operation in operations(description)]
    assert len(names) == len(set(names))
    assert all(operation["summary"] for _, _, operation in operations(description))


def test_parameters_are_complete(description: dict[str, Any]) -> None:
    for path, method, operation in operations(description):
        assert method in METHODS
        given = [(p["in"], p["name"]) for p in operation["parameters"]]
        assert len(given) == len(set(given))
        in_path = {name for place, name in given if place == "path"}
        assert in_path == set(re.findall(r"\{(\w+)\}", path))
        assert all("schema" in p for p in operation["parameters"])


def test_answers_are_described(description: dict[str, Any]) -> None:
    for path, method, operation in operations(description):
        assert set(operation["responses"]) > {"default"}, (path, method)
        for status, answer in operation["responses"].items():
            assert answer["description"]
            assert ("content" in answer) == (status != "204")


def test_what_needs_no_key_says_so(description: dict[str, Any]) -> None:
    free = {p for p, _, operation in operations(description) if operation.get("security") == []}
    assert free == {"/v1/version", "/healthz"}


def test_queries_are_parameters(description: dict[str, Any]) -> None:
    listed = description["paths"]["/v1/sandboxes"]["get"]["parameters"]
    assert {p["name"] for p in listed} == {"label", "state", "job", "limit", "next"}
    assert not any(name.endswith("Query") for name in description["components"]["schemas"])


@pytest.mark.anyio
async def test_the_server_serves_it_to_anyone() -> None:
    async with control_plane([FakeEdge()]) as plane:
        plane.client.headers.pop("authorization")
        answer = await plane.client.get("/openapi.json")
    assert "/v1/sandboxes" in answer.json()["paths"]
