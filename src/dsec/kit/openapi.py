"""A table of routes as an OpenAPI description."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from dsec.kit.http import Route
from dsec.wire.public_v1 import ErrorAnswer


def describe(routes: Sequence[Route], title: str, version: str) -> dict[str, object]:
    """The OpenAPI 3.1 description of a table of routes."""
    asked = [s for r in routes for s in (r.body, r.query) if s is not None]
    shapes = [*asked, *(s for r in routes for s in _answers(r)), ErrorAnswer]
    schemas, components = msgspec.json.schema_components(
        shapes, ref_template="#/components/schemas/{name}"
    )
    by_shape = dict(zip(map(repr, shapes), schemas, strict=True))
    queries = {
        route.query: _component(by_shape[repr(route.query)]) for route in routes if route.query
    }
    # A query is no body: its fields are parameters, so as a whole it is left out.
    fields = {query: components.pop(name) for query, name in queries.items()}
    paths: dict[str, dict[str, object]] = {}
    for route in routes:
        described = _operation(route, by_shape, fields)
        paths.setdefault(route.path, {})[route.method.lower()] = described
    return {
        "openapi": "3.1.0",
        "info": {"title": title, "version": version},
        "components": {
            "schemas": components,
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
        "security": [{"key": []}],
        "paths": paths,
    }


def _answers(route: Route) -> tuple[object, ...]:
    if route.answer is None:
        return ()
    return route.answer if isinstance(route.answer, tuple) else (route.answer,)


def _operation(
    route: Route, by_shape: dict[str, dict[str, object]], fields: Mapping[type, object]
) -> dict[str, object]:
    of_answer = [by_shape[repr(shape)] for shape in _answers(route)]
    content: dict[str, object] = {}
    if of_answer:
        content["schema"] = of_answer[0] if len(of_answer) == 1 else {"anyOf": of_answer}
    answer: dict[str, object] = {"description": route.summary}
    if route.status != 204:
        answer["content"] = {route.media_type: content}
    operation: dict[str, object] = {
        "operationId": getattr(route.handler, "__name__", route.path),
        "summary": route.summary,
        "parameters": [*_path_parameters(route.path), *_query_parameters(route, fields)],
        "responses": {
            str(route.status): answer,
            "default": {
                "description": "an error of the table in docs/reference/errors.md",
                "content": {"application/json": {"schema": by_shape[repr(ErrorAnswer)]}},
            },
        },
    }
    if route.body is not None:
        operation["requestBody"] = {
            "required": True,
            "content": {"application/json": {"schema": by_shape[repr(route.body)]}},
        }
    if route.public:
        operation["security"] = []
    return operation


def _path_parameters(path: str) -> list[dict[str, object]]:
    names = [part[1:-1].split(":")[0] for part in path.split("/") if part.startswith("{")]
    return [
        {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
        for name in names
    ]


def _query_parameters(route: Route, fields: Mapping[type, object]) -> list[dict[str, object]]:
    schema = fields[route.query] if route.query else None
    if not isinstance(schema, dict):
        return []
    required = schema.get("required", [])
    return [
        {"name": name, "in": "query", "required": name in required, "schema": shape}
        for name, shape in schema.get("properties", {}).items()
    ]


def _component(schema: Mapping[str, object]) -> str:
    """The name a schema is referred to by; two shapes of one name get longer ones."""
    return str(schema["$ref"]).rsplit("/", 1)[-1]
