"""Every failure has a stable code, whatever way it is asked for."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from dsec import Sandbox
from dsec.base.errors import ERRORS
from tests.contract.server import Server

S = "/v1/sandboxes/{id}"
FAILURES: list[tuple[str, str, dict[str, Any], int, str]] = [
    ("GET", "/v1/nothing", {}, 404, "not_found"),
    ("GET", "/v1/sandboxes/nonsense", {}, 404, "not_found"),
    ("GET", S + "/nothing", {}, 404, "not_found"),
    ("POST", S + "/commands/run", {"json": {}}, 400, "invalid_request"),
    ("POST", S + "/commands/run", {"json": {"argv": "true"}}, 400, "invalid_request"),
    ("POST", S + "/commands/run", {"json": {"argv": [], "shell": ""}}, 400, "invalid_request"),
    ("POST", S + "/commands/run", {"json": {"argv": ["x"], "nonsense": 1}}, 400,
     "invalid_request"),
    ("POST", S + "/commands/run", {"json": {"argv": ["x"], "timeout_s": -1}}, 400,
     "invalid_request"),
    ("POST", S + "/commands/run", {"content": b"not json"}, 400, "invalid_request"),
    ("POST", S + "/commands/run", {"json": {"argv": ["/missing"]}}, 404, "not_found"),
    ("POST", S + "/commands", {"json": {"argv": ["/etc/passwd"]}}, 403, "permission_denied"),
    ("GET", S + "/commands/unknown", {}, 404, "not_found"),
    ("GET", S + "/commands/unknown/result", {}, 404, "not_found"),
    ("GET", S + "/commands/unknown/events", {}, 404, "not_found"),
    ("DELETE", S + "/commands/unknown", {}, 404, "not_found"),
    ("POST", S + "/commands/unknown/signal", {"params": {"signal": "TERM"}}, 404, "not_found"),
    ("DELETE", S + "/sessions/unknown", {}, 404, "not_found"),
    ("GET", S + "/files", {"params": {"path": "/missing"}}, 404, "not_found"),
    ("GET", S + "/files", {}, 400, "invalid_request"),
    ("GET", S + "/files", {"params": {"path": ""}}, 400, "invalid_request"),
    ("GET", S + "/files", {"params": {"path": "/etc/passwd", "offset": "x"}}, 400,
     "invalid_request"),
    ("GET", S + "/files/watch", {"params": {"path": "/missing"}}, 404, "not_found"),
    ("GET", S + "/tree", {"params": {"path": "/missing"}}, 404, "not_found"),
    ("POST", S + "/files/mkdir", {"params": {"path": "/etc"}}, 409, "conflict"),
    ("PUT", S + "/files", {"params": {"path": "/missing/f"}, "content": b"x"}, 404,
     "not_found"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("method", "path", "given", "status", "code"),
    FAILURES,
    ids=[f"{n}-{f[0]}-{f[1].removeprefix(S)}" for n, f in enumerate(FAILURES)],
)
async def test_a_failure_has_its_status_and_code(
    server: Server,
    sandbox: Sandbox,
    method: str,
    path: str,
    given: dict[str, Any],
    status: int,
    code: str,
) -> None:
    async with httpx.AsyncClient(base_url=server.url) as http:
        http.headers = httpx.Headers({"Authorization": f"Bearer {server.key}"})
        answer = await http.request(method, path.format(id=sandbox.id), **given)
    assert answer.headers["content-type"].startswith("application/json")
    error = answer.json()["error"]
    assert (answer.status_code, error["code"]) == (status, code), error
    assert error["message"]
    assert error["request_id"] == answer.headers["x-request-id"]
    assert ERRORS[code].http_status == status
    assert error["retryable"] is ERRORS[code].retryable


async def test_a_stranger_is_unauthenticated(server: Server, sandbox: Sandbox) -> None:
    async with httpx.AsyncClient(base_url=server.url) as http:
        for headers in ({}, {"Authorization": "Bearer wrong"}, {"X-API-KEY": "wrong"}):
            for path in ("/v1/sandboxes", f"/v1/sandboxes/{sandbox.id}/files?path=/etc/passwd"):
                answer = await http.get(path, headers=headers)
                assert answer.status_code == 401
                assert answer.json()["error"]["code"] == "unauthenticated"


async def test_the_version_and_the_description_need_no_key(server: Server) -> None:
    async with httpx.AsyncClient(base_url=server.url) as http:
        assert (await http.get("/v1/version")).json()["api"] == "v1"
        assert (await http.get("/openapi.json")).json()["openapi"].startswith("3.1")


async def test_a_key_works_in_either_header(server: Server) -> None:
    async with httpx.AsyncClient(base_url=server.url) as http:
        for headers in ({"Authorization": f"Bearer {server.key}"}, {"X-API-KEY": server.key}):
            assert (await http.get("/v1/sandboxes", headers=headers)).status_code == 200


async def test_a_request_id_is_echoed(server: Server) -> None:
    async with httpx.AsyncClient(base_url=server.url) as http:
        answer = await http.get("/v1/version", headers={"X-Request-Id": "abc123"})
        assert answer.headers["x-request-id"] == "abc123"


async def test_an_error_never_shows_the_hosts_paths(server: Server, sandbox: Sandbox) -> None:
    async with httpx.AsyncClient(base_url=server.url) as http:
        answer = await http.get(
            f"/v1/sandboxes/{sandbox.id}/files",
            params={"path": "/missing"},
            headers={"Authorization": f"Bearer {server.key}"},
        )
    assert str(server.base) not in answer.text
