"""Network rules of simulated sandboxes: checked, kept, changed, and what a crash leaves."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from dsec.base.errors import Conflict, InternalError, InvalidRequest, SandboxGone, Unsupported
from dsec.base.states import SandboxState
from dsec.edge.backends.interface import NetworkOf
from dsec.edge.network.policy import Service
from dsec.edge.network.services import Services
from dsec.edge.retelling import Part
from dsec.edge.service import EdgeService
from dsec.edge.sim import SimBackend
from dsec.edge.sim.backend import UNREACHABLE
from dsec.wire.sandbox import NetworkChange, NetworkView, Resize
from tests.unit.edge.dying import Death, Killed
from tests.unit.edge.node import Node, request

SERVICES = {
    "pypi": Service(name="pypi", keys=("tcp://index.test:443",), source="told"),
    "npm": Service(name="npm", source="npm is not installed"),
}
RULES = {"pypi": True, "10.0.0.0/8": False}
OTHER = {"*.example.org:443": True}


@pytest.fixture
def node(node: Node) -> Node:
    """A node that knows services."""
    node.services = Services.of(SERVICES)
    return node


async def made(edge: EdgeService, **spec: object) -> str:
    return (await edge.create(request(**spec))).id


async def change(edge: EdgeService, sandbox: str, rules: dict[str, bool]) -> NetworkView:
    return await edge.set_network(sandbox, NetworkChange(rules=rules))


async def test_rules_are_kept_and_replaced(node: Node) -> None:
    async with node.edge() as edge:
        sandbox = await made(edge, network_rules=RULES)
        first = NetworkView(enabled=True, rules=RULES, detail=UNREACHABLE)
        assert await edge.network(sandbox) == first
        assert node.host.rules == {sandbox: RULES}
        assert (await change(edge, sandbox, OTHER)).rules == OTHER
        assert node.host.rules == {sandbox: OTHER}
        await change(edge, sandbox, {})
        assert (await change(edge, sandbox, RULES)).rules == RULES, "nothing allowed is no end"
        await edge.stop(sandbox)
        assert not node.host.rules


@pytest.mark.parametrize("key", ["10.0.0.1/8", "nosuch", "https://example.org"])
async def test_a_wrong_rule_is_refused_before_anything_is_made(node: Node, key: str) -> None:
    wanted = request(network_rules={key: True})
    async with node.edge() as edge:
        with pytest.raises(InvalidRequest) as caught:
            await edge.create(wanted)
        assert key in caught.value.message
        assert not edge.remembers(wanted.id)
        assert not list((node.root / "state" / "sandboxes").iterdir())
        sandbox = await made(edge, network_rules=RULES)
        with pytest.raises(InvalidRequest):
            await change(edge, sandbox, {"pypi": True, key: True})
        assert node.host.rules == {sandbox: RULES}


async def test_a_service_that_is_not_here_can_only_be_denied(node: Node) -> None:
    async with node.edge() as edge:
        with pytest.raises(Unsupported, match="npm is not installed"):
            await made(edge, network_rules={"npm": True})
        view = await edge.create(request(network_rules={"pypi": True, "npm": False}))
        assert any("npm denies nothing" in words for words in view.warnings)


async def test_one_that_was_made_without_a_network_has_none_for_life(node: Node) -> None:
    async with node.edge() as edge:
        for rules in ({}, {"pypi": False}):
            sandbox = await made(edge, network_rules=rules)
            with pytest.raises(Conflict, match="network=true"):
                await change(edge, sandbox, {"pypi": True})
            assert await edge.network(sandbox) == NetworkView(rules=rules)
        sandbox = await made(edge, network=True)
        assert (await edge.network(sandbox)).enabled
        assert (await change(edge, sandbox, RULES)).rules == RULES


async def test_a_backend_without_networks_says_so(node: Node) -> None:
    backend: Any = _Plain(SimBackend(node.clock, host=node.host))
    assert isinstance(SimBackend(), NetworkOf)
    assert not isinstance(backend, NetworkOf)
    async with node.edge(backends=[backend]) as edge:
        sandbox = await made(edge, network_rules=RULES)
        assert await edge.network(sandbox) == NetworkView(rules=RULES)
        with pytest.raises(Unsupported, match="no network for sandboxes"):
            await change(edge, sandbox, OTHER)


class _Plain:
    """A backend with all that a backend must have and nothing that it may."""

    def __init__(self, inner: SimBackend) -> None:
        self._inner = inner

    def __getattr__(self, name: str) -> Any:
        if name in {"network", "apply_network"}:
            raise AttributeError(name)
        return getattr(self._inner, name)


async def test_what_is_said_of_the_rules_follows_them(node: Node) -> None:
    async with node.edge() as edge:
        rules = {"pypi": True, "npm": False}
        sandbox = await made(edge, network_rules=rules)
        before = (await edge.get(sandbox)).warnings
        await change(edge, sandbox, OTHER)
        after = (await edge.get(sandbox)).warnings
        assert not any("npm" in words or "pypi" in words for words in after)
        assert any("*.example.org:443" in words for words in after)
        await edge.resize(sandbox, Resize(memory_mb=512))
        assert (await edge.get(sandbox)).warnings == after
        await change(edge, sandbox, rules)
        assert (await edge.get(sandbox)).warnings == before
        assert (await edge.get(sandbox)).limits.memory_mb == 512


async def test_what_fails_changes_nothing(node: Node) -> None:
    async with node.host.running():
        async with node.edge() as edge:
            sandbox = await made(edge, network_rules=RULES)
            node.faults.fail_networks = 1
            with pytest.raises(InternalError, match="could not be changed"):
                await change(edge, sandbox, OTHER)
            assert node.host.rules == {sandbox: RULES}
        async with node.edge() as edge:
            assert (await edge.network(sandbox)).rules == RULES


async def test_a_paused_one_is_changed_and_stays_paused(node: Node) -> None:
    async with node.edge() as edge:
        sandbox = await made(edge, network_rules=RULES)
        await edge.pause(sandbox)
        await change(edge, sandbox, OTHER)
        assert (await edge.network(sandbox)).rules == OTHER
        assert (await edge.get(sandbox)).state is SandboxState.PAUSED


async def test_one_that_is_over_is_gone(node: Node) -> None:
    async with node.edge() as edge:
        sandbox = await made(edge, network_rules=RULES)
        await edge.stop(sandbox)
        for ask in (edge.network(sandbox), change(edge, sandbox, OTHER)):
            with pytest.raises(SandboxGone):
                await ask


async def test_limits_and_rules_are_both_kept_over_a_restart(node: Node) -> None:
    async with node.host.running():
        async with node.edge() as edge:
            sandbox = await made(edge, network_rules=RULES)
            await edge.resize(sandbox, Resize(memory_mb=512))
            await change(edge, sandbox, OTHER)
            await edge.resize(sandbox, Resize(pids=64))
        node.host.rules[sandbox] = {}
        async with node.edge() as edge:
            view = await edge.get(sandbox)
            assert (view.limits.memory_mb, view.limits.pids) == (512, 64)
            assert (await edge.network(sandbox)).rules == OTHER, "they were not made to hold again"
            assert (await change(edge, sandbox, RULES)).rules == RULES


@pytest.mark.parametrize("write", [1, 2, 3, 4])
async def test_an_edge_killed_after_any_write_tells_the_truth(node: Node, write: int) -> None:
    async with node.host.running():
        sandbox = await _killed_while_changing(node, write)
        async with node.edge() as edge:
            told = (await edge.network(sandbox)).rules
            assert told == (RULES if write == 1 else OTHER)
            assert node.host.rules == {sandbox: told}


async def test_rules_that_cannot_be_had_again_are_those_of_before(node: Node) -> None:
    async with node.host.running():
        sandbox = await _killed_while_changing(node, 2)
        node.faults.fail_networks = 1
        async with node.edge() as edge:
            assert (await edge.network(sandbox)).rules == RULES
            assert node.host.rules == {sandbox: RULES}


async def _killed_while_changing(node: Node, write: int) -> str:
    """A sandbox whose edge died at some write while it was to be given other rules."""
    death, sandboxes = Death(), list[str]()

    async def live() -> None:
        async with node.edge(after_write=death) as edge:
            sandboxes.append(await made(edge, network_rules=RULES))
            death.left = write
            await change(edge, sandboxes[0], OTHER)

    with pytest.raises(BaseExceptionGroup) as caught:
        await live()
    assert caught.group_contains(Killed)
    return sandboxes[0]


async def test_over_http_and_in_the_trajectory(node: Node) -> None:
    async with node.edge() as edge, node.client(edge) as client:
        sandbox = await made(edge, network_rules=RULES)
        url = f"/v1/sandboxes/{sandbox}/network"
        shown = msgspec.json.decode((await client.get(url)).content, type=NetworkView)
        assert (shown.enabled, shown.rules) == (True, RULES)
        headers = {"idempotency-key": "k"}
        first = await client.put(url, json={"rules": OTHER}, headers=headers)
        again = await client.put(url, json={"rules": OTHER}, headers=headers)
        assert first.json()["rules"] == again.json()["rules"] == OTHER
        assert again.headers["x-recorded"] == "true"
        answer = await client.put(url, json={"rules": {"10.0.0.1/8": True}})
        assert (answer.status_code, answer.json()["error"]["code"]) == (400, "invalid_request")
        assert (await client.put(url, json={"rules": {"a.test": 1}})).status_code == 400
        told = [e async for e in edge.trajectory(sandbox, Part(1, None, ["network"]), "")]
        assert [entry.outcome for entry in told] == ["ok", "invalid_request", "invalid_request"]
        assert told[0].args == {"rules": OTHER}
        assert told[0].result["rules"] == OTHER


async def test_services_are_told_with_the_node(node: Node) -> None:
    async with node.edge() as edge:
        found = {entry.name: entry for entry in (await edge.describe()).capabilities}
        assert found["service:pypi"].detail == "tcp://index.test:443 (told)"
        assert not found["service:npm"].available
