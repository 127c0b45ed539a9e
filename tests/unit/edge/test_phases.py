"""Phases of simulated sandboxes: what they come to, all of it or nothing, and what a crash leaves."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import msgspec
import pytest

from dsec.base.errors import Conflict, InternalError, InvalidRequest, Unsupported
from dsec.base.states import SandboxState
from dsec.edge import entering, file_rules, phases
from dsec.edge.retelling import Part
from dsec.edge.service import EdgeService
from dsec.edge.sim import SimBackend
from dsec.edge.sim.aether import SimAether
from dsec.wire.phases import FileAccess, FileRule, Phase, PhaseChange
from dsec.wire.sandbox import Pack, SandboxSpec, SandboxView, Security
from tests.unit.edge.dying import Death, Killed
from tests.unit.edge.node import Node, request

OPEN, SHUT = {"10.0.0.0/8": True}, {"10.0.0.0/8": False}
ALL = frozenset({"network_rules", "files", "user", "secrets", "end_processes"})
STANDING = [
    Phase(name="setup", network_rules=OPEN),
    Phase(name="agent", network_rules=SHUT, qos="be", ttl_running_stop=60),
]
ENDING = [STANDING[0], msgspec.structs.replace(STANDING[1], user="agent", secrets={"T": "hush"})]


class Enforcing(SimBackend):
    """Says that it enforces all of it."""

    def enforces(self) -> frozenset[str]:
        return ALL


class Aethers(list[dict[str, Any]]):
    """What simulated aethers were told of phases."""

    breaking = False
    """The next is told over a connection that breaks."""


@pytest.fixture
def entered(monkeypatch: pytest.MonkeyPatch) -> Aethers:
    """Simulated aethers hear of phases."""
    told = Aethers()
    methods = SimAether._table_of_methods

    async def phase(aether: SimAether, _stream: object, arguments: Mapping[str, Any]) -> None:
        told.append(dict(arguments))
        if told.breaking:
            told.breaking = False
            aether.drop_connection()

    async def done(_stream: object, _arguments: object) -> None:
        told.append({})

    def table(aether: SimAether) -> Mapping[str, Any]:
        return {**methods(aether), "phase": partial(phase, aether), "phase_done": done}

    monkeypatch.setattr(SimAether, "_table_of_methods", table)
    return told


def backends(node: Node) -> list[Enforcing]:
    return [Enforcing(node.clock, host=node.host, faults=node.faults)]


async def enter(edge: EdgeService, sandbox: str, name: str) -> SandboxView:
    return await edge.enter_phase(sandbox, PhaseChange(name=name))


def facts(view: SandboxView) -> tuple[object, ...]:
    return view.phase, view.qos, view.ttl_running_stop


SETUP, AGENT = ("setup", "ls", 1800.0), ("agent", "be", 60.0)


async def test_all_of_a_phase_is_in_force(node: Node, entered: Aethers) -> None:
    async with node.edge(backends=backends(node)) as edge:
        sandbox = (await edge.create(request(phases=ENDING, env={"A": "1"}))).id
        assert facts(await edge.get(sandbox)) == SETUP
        assert node.host.rules == {sandbox: OPEN}
        assert facts(await enter(edge, sandbox, "agent")) == AGENT
        assert node.host.rules == {sandbox: SHUT}
        told, after = entered
        assert (told["user"], told["only_user"], told["files"]) == ("agent", True, [])
        assert (told["env"]["A"], told["env"]["T"], after) == ("1", "hush", {})
        assert facts(await enter(edge, sandbox, "setup")) == SETUP
        assert "T" not in entered[2]["env"]
        assert not entered[2]["only_user"]


async def test_a_paused_one_is_woken(node: Node) -> None:
    async with node.edge(backends=backends(node)) as edge:
        sandbox = (await edge.create(request(phases=STANDING))).id
        await edge.pause(sandbox)
        view = await enter(edge, sandbox, "agent")
        assert (view.phase, view.state) == ("agent", SandboxState.RUNNING)


@pytest.mark.parametrize("declared", [STANDING, ENDING], ids=["standing", "ending"])
@pytest.mark.parametrize("gate", ["network", "resize"])
async def test_one_that_cannot_be_had_changes_nothing(
    node: Node, entered: Aethers, declared: list[Phase], gate: str
) -> None:
    async with node.edge(backends=backends(node)) as edge:
        sandbox = (await edge.create(request(phases=declared))).id
        setattr(node.faults, f"fail_{gate}s", 1)
        with pytest.raises(InternalError):
            await enter(edge, sandbox, "agent")
        assert facts(await edge.get(sandbox)) == SETUP
        assert node.host.rules == {sandbox: OPEN}
        assert not node.host.sandboxes[sandbox].frozen
        assert not entered or entered[-1] == {}, "it was left between phases"
        assert facts(await enter(edge, sandbox, "agent")) == AGENT


@pytest.mark.parametrize("declared", [STANDING, ENDING], ids=["standing", "ending"])
@pytest.mark.parametrize("write", range(1, 7))
async def test_an_edge_killed_after_any_write_tells_the_truth(
    node: Node, entered: Aethers, declared: list[Phase], write: int
) -> None:
    async with node.host.running():
        sandbox = await _killed_while_entering(node, declared, write)
        entered.clear()
        async with node.edge(backends=backends(node)) as edge:
            view = await edge.get(sandbox)
            assert facts(view) in (SETUP, AGENT)
            assert view.state is SandboxState.RUNNING
            assert node.host.rules == {sandbox: OPEN if view.phase == "setup" else SHUT}
            assert not node.host.sandboxes[sandbox].frozen
            assert not entered or entered[-1] == {}
            again = len(entered)
        async with node.edge(backends=backends(node)) as edge:
            assert (await edge.get(sandbox)).phase == view.phase
            assert len(entered) == again, "what runs was ended by a restart"


async def _killed_while_entering(node: Node, declared: list[Phase], write: int) -> str:
    death, sandboxes = Death(), list[str]()

    async def live() -> None:
        async with node.edge(after_write=death, backends=backends(node)) as edge:
            sandboxes.append((await edge.create(request(phases=declared))).id)
            death.left = write
            await enter(edge, sandboxes[0], "agent")
            raise Killed  # it had fewer writes

    with pytest.raises(BaseException) as caught:  # noqa: PT011 - alone, or in a group
        await live()
    error = caught.value
    assert isinstance(error, Killed) or (
        isinstance(error, BaseExceptionGroup) and caught.group_contains(Killed)
    )
    return sandboxes[0]


async def test_a_connection_that_breaks_leaves_none_between_phases(
    node: Node, entered: Aethers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(entering, "ENTER_DEADLINE_S", 2.0)
    async with node.edge(backends=backends(node)) as edge:
        sandbox = (await edge.create(request(phases=ENDING))).id
        entered.breaking = True
        with pytest.raises(InternalError):
            await enter(edge, sandbox, "agent")
        view = await edge.get(sandbox)
        assert entered[-1] == {}
        assert node.host.rules == {sandbox: OPEN if view.phase == "setup" else SHUT}
        assert facts(await enter(edge, sandbox, "agent")) == AGENT


async def test_secrets_are_not_in_the_trajectory(node: Node, entered: Aethers) -> None:
    async with node.edge(backends=backends(node)) as edge:
        sandbox = (await edge.create(request(phases=ENDING))).id
        await enter(edge, sandbox, "agent")
        told = [entry async for entry in edge.trajectory(sandbox, Part(1, None, []), "")]
        assert entered[0]["env"]["T"] == "hush"
        assert "hush" not in repr(told)
        assert told[0].args["spec"]["phases"][1]["secrets"] == {"T": ""}


async def test_a_final_phase_is_the_last(node: Node) -> None:
    final = [msgspec.structs.replace(STANDING[0], final=True), STANDING[1]]
    async with node.edge(backends=backends(node)) as edge:
        sandbox = (await edge.create(request(phases=final))).id
        with pytest.raises(Conflict, match="final"):
            await enter(edge, sandbox, "agent")
        assert (await enter(edge, sandbox, "setup")).phase == "setup"


async def test_a_backend_that_enforces_nothing_names_all_of_it(node: Node) -> None:
    files = [FileRule(path="/a", access="deny")]
    asked = [*ENDING, Phase(name="more", files=files, end_processes=True)]
    async with node.edge() as edge:
        with pytest.raises(Unsupported) as refused:
            await edge.create(request(phases=asked))
        for part in ("network_rules of phase setup", "user of phase agent", "secrets of phase agent",
                     "files of phase more", "end_processes of phase more"):  # fmt: skip
            assert part in refused.value.message
        with pytest.raises(Unsupported, match="files"):
            await edge.create(request(files=files))


def test_a_phase_says_all_of_it() -> None:
    spec = SandboxSpec(image="i", network_rules=OPEN, qos="be", phases=[Phase(name="a"), *ENDING])
    whole = phases.resolved(spec)
    assert whole.phases[0].network_rules == OPEN
    assert (whole.phases[0].qos, whole.phases[0].ttl_running_stop) == ("be", 1800.0)
    assert whole.phases[0].files == []
    assert whole.network
    assert whole.security.no_new_privs, "root could be had back from a set-id program"
    assert phases.resolved(whole) == whole
    assert phases.resolved(SandboxSpec(image="i")) == SandboxSpec(image="i")


def test_processes_may_stay_only_where_nothing_inside_changes() -> None:
    whole = phases.resolved(SandboxSpec(image="i", phases=STANDING)).phases
    assert not phases.ends_processes(*whole)
    assert phases.ends_processes(*phases.resolved(SandboxSpec(image="i", phases=ENDING)).phases)
    stay = [STANDING[0], msgspec.structs.replace(ENDING[1], end_processes=False)]
    with pytest.raises(InvalidRequest, match="cannot be false"):
        phases.check(phases.resolved(SandboxSpec(image="i", phases=stay)), ALL)


@pytest.mark.parametrize(
    ("rules", "words"),
    [
        ({"/": "deny"}, "no absolute path"),
        ({"//a": "deny"}, "no absolute path"),
        ({"/a/./b": "deny"}, "no absolute path"),
        ({"/a/../b": "read_only"}, "no absolute path"),
        ({"/dev": "deny"}, "platform's"),
        ({"/proc/self": "no_exec"}, "platform's"),
        ({"/a": "deny", "/a/b/c": "no_exec"}, "lies in /a"),
    ],
)
def test_rules_that_could_not_mean_it(rules: dict[str, FileAccess], words: str) -> None:
    listed = [FileRule(path=path, access=access) for path, access in rules.items()]
    with pytest.raises(InvalidRequest, match=words):
        file_rules.check(SandboxSpec(image="i", files=listed))
    with pytest.raises(InvalidRequest, match=words):
        file_rules.check(SandboxSpec(image="i", phases=[Phase(name="a", files=listed)]))


def test_rules_go_with_no_mounts_inside() -> None:
    rules = [FileRule(path="/a", access="deny"), FileRule(path="/b/", access="read_only")]
    file_rules.check(SandboxSpec(image="i", files=rules))
    with pytest.raises(Unsupported, match="loose"):
        file_rules.check(SandboxSpec(image="i", files=rules, security=Security(profile="loose")))


def test_a_snapshot_is_without_what_is_denied() -> None:
    rules = [FileRule(path="/a/b/", access="deny"), FileRule(path="/c", access="read_only")]
    wanted = file_rules.without_denied(Pack(name="p", exclude=["/x"]), rules)
    assert wanted.exclude == ["/x", "/a/b", "/a/b/**"]


@pytest.mark.parametrize("path", ["a", "/a*", "/a[b]", "/a?", "/a{b}", "/a\0", ""])
def test_paths_are_plain(path: str) -> None:
    body = msgspec.json.encode({"path": path, "access": "deny"})
    with pytest.raises(msgspec.ValidationError):
        msgspec.json.decode(body, type=FileRule)
