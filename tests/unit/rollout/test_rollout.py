"""One rollout and many, on a platform in memory."""

from __future__ import annotations

import anyio
import pytest

from dsec.base.clock import SystemClock
from dsec.base.errors import (
    CapacityUnavailable,
    DsecError,
    InternalError,
    NotFound,
    SandboxGone,
    Unavailable,
)
from dsec.rollout import rollout
from dsec.rollout.outcomes import Outcome
from dsec.rollout.records import Event, RolloutResult
from dsec.rollout.rollout import Job, roll_out
from dsec.rollout.suite import plan_jobs, run_jobs, run_suite
from dsec.rollout.tasks import (
    FinishCall,
    Pin,
    ReadCall,
    ReplaceCall,
    ShellCall,
    Task,
    TaskLimits,
    WriteCall,
)
from tests.unit.rollout.fakes import BAD, FakeClient, FakeSandbox, Ran
from tests.unit.rollout.samples import DISTRIBUTIONS, SHA, make_agent, make_task


async def run(client: FakeClient, task: Task | None = None) -> RolloutResult:
    task = task or make_task()
    events: list[Event] = []
    return await roll_out(
        client,
        Job(rollout_id="r1.sample.0", task=task, agent=task.agents[0]),
        image="debian",
        distributions=DISTRIBUTIONS,
        clock=SystemClock(),
        on_event=events.append,
    )


async def test_solved() -> None:
    client = FakeClient()
    result = await run(client)
    assert (result.outcome, result.reward, result.as_expected) == ("solved", 1.0, True)
    assert [sandbox.role for sandbox in client.sandboxes] == ["agent", "verify"]
    assert [sandbox.stopped for sandbox in client.sandboxes] == [1, 1]
    assert len(result.create_s) == 2
    assert result.peak_memory_bytes == 3 << 20
    assert set(result.phases_s) == {"create", "setup", "agent", "collect", "verify", "stop"}


async def test_agent_never_sees_the_verifier_and_only_its_tree_is_carried_over() -> None:
    client = FakeClient()
    writes = WriteCall(path="/elsewhere/reward.txt", content="1")
    inside = WriteCall(path="new.py", content="x = 1")
    await run(client, make_task(make_agent(writes, inside)))
    agent, verify = client.sandboxes
    assert not any(path.startswith("/verify") for path in agent.files.kept)
    assert verify.files.kept["/task/tree/new.py"] == b"x = 1"
    assert "/elsewhere/reward.txt" not in verify.files.kept
    assert {"/verify/verify.py", "/verify/grading.py"} <= set(verify.files.kept)


async def test_both_sandboxes_are_offline_bounded_and_outlive_their_phases() -> None:
    client = FakeClient()
    await run(client)
    for sandbox in client.sandboxes:
        assert sandbox.args.network_rules == {}
        assert sandbox.args.memory_limit_mb == 256
        assert sandbox.args.pids_limit == 128
        assert sandbox.args.max_lifetime_s is not None
        assert sandbox.args.max_lifetime_s >= 60 + 120 + 30 or sandbox.role == "verify"
        assert sandbox.args.labels["rollout"] == "r1.sample.0"


async def test_command_ids_come_from_rollout_and_step() -> None:
    client = FakeClient()
    await run(client, make_task(make_agent(ShellCall(command="a"), ShellCall(command="b"))))
    agent, verify = client.sandboxes
    assert agent.command_ids == ["r1.sample.0.ssetup", "r1.sample.0.a0", "r1.sample.0.a1"]
    assert verify.command_ids == ["r1.sample.0.vsetup", "r1.sample.0.vverify"]


async def test_failed() -> None:
    result = await run(FakeClient(answers={"verdict": Ran(stdout=BAD)}))
    assert (result.outcome, result.reward) == ("failed", 0.0)
    assert result.checks[0].detail == "no"


@pytest.mark.parametrize(
    "ran",
    [
        Ran(exit_code=1, stdout=BAD, stderr="Traceback"),
        Ran(exit_code=137, stdout=BAD, timed_out=True),
        Ran(stdout=BAD, truncated=True),
        Ran(stdout=""),
    ],
)
async def test_broken_verifier_gives_no_reward(ran: Ran) -> None:
    result = await run(FakeClient(answers={"verdict": ran}))
    assert (result.outcome, result.reward) == ("verifier", None)


async def test_agent_timeout() -> None:
    client = FakeClient()
    task = make_task(make_agent(ShellCall(command="sleep"), timeout_s=0.01))
    result = await run(client, task)
    assert (result.outcome, result.reward) == ("agent_timeout", None)
    assert [sandbox.stopped for sandbox in client.sandboxes] == [1]


PLACES: list[tuple[str, DsecError | TimeoutError]] = [
    ("create agent", CapacityUnavailable("full")),
    ("write /task/sdist", Unavailable("lost")),
    ("agent setup", SandboxGone("lost", reason="lost")),
    ("agent shell", SandboxGone("lost", reason="lost")),
    ("agent shell", NotFound("gone", kind="sandbox")),
    ("get_tar", Unavailable("lost")),
    ("create verify", InternalError("bug")),
    ("put_tar", Unavailable("lost")),
    ("mkdir", TimeoutError()),
    ("verify setup", SandboxGone("lost", reason="expired")),
    ("write /verify", Unavailable("lost")),
    ("verdict", SandboxGone("lost", reason="lost")),
]


@pytest.mark.parametrize(("place", "error"), PLACES)
async def test_platform_failing_anywhere_is_infrastructure(
    place: str, error: DsecError | TimeoutError
) -> None:
    client = FakeClient(errors={place: error})
    result = await run(client)
    assert (result.outcome, result.reward) == ("infrastructure", None)
    assert client.running == 0
    assert all(sandbox.stopped == 1 for sandbox in client.sandboxes)


async def test_setup_that_fails_is_not_the_agents_fault() -> None:
    lacks = Ran(exit_code=90, stderr="the image lacks python3")
    result = await run(FakeClient(answers={"agent setup": lacks}))
    assert result.outcome == "infrastructure"
    assert "lacks python3" in result.detail


async def test_failing_stop_is_counted_and_does_not_change_the_outcome() -> None:
    result = await run(FakeClient(errors={"stop": Unavailable("x"), "usage": Unavailable("x")}))
    assert (result.outcome, result.unstopped, result.peak_memory_bytes) == ("solved", 2, 0)


async def test_tool_errors_are_the_agents_and_it_goes_on() -> None:
    agent = make_agent(
        ReadCall(path="none", expect="failed"),
        ReplaceCall(path="none", old="a", new="b", expect="failed"),
        WriteCall(path="f", content="aa b"),
        ReplaceCall(path="f", old="a", new="b", expect="failed"),
        ReplaceCall(path="f", old="b", new="c"),
        ReadCall(path="f"),
        FinishCall(answer="done"),
        ShellCall(command="never"),
    )
    client = FakeClient()
    result = await run(client, make_task(agent))
    assert result.outcome == "solved"
    assert result.surprises == []
    ended = [call.ended for call in result.calls]
    assert ended == ["failed", "failed", "ok", "failed", "ok", "ok"]
    assert client.sandboxes[1].files.kept["/task/tree/f"] == b"aa c"


@pytest.mark.parametrize(
    ("ran", "ended"),
    [
        (Ran(), "ok"),
        (Ran(exit_code=3), "failed"),
        (Ran(exit_code=137, oom_killed=True), "failed"),
        (Ran(exit_code=137, timed_out=True, truncated=True), "timed_out"),
        (Ran(truncated=True), "truncated"),
    ],
)
async def test_how_calls_end(ran: Ran, ended: str) -> None:
    result = await run(FakeClient(answers={"agent shell": ran}))
    assert [call.ended for call in result.calls] == [ended]


async def test_call_that_ends_otherwise_than_recorded_is_a_surprise() -> None:
    task = make_task(make_agent(ShellCall(command="x", expect="timed_out")))
    result = await run(FakeClient(), task)
    assert result.outcome == "solved"
    assert not result.as_expected
    assert "step 0" in result.surprises[0]


async def test_tree_too_large_is_the_agents_fault() -> None:
    agent = make_agent(WriteCall(path="big", content="x" * (1 << 20)))
    result = await run(FakeClient(), make_task(agent, limits=TaskLimits(tree_mb=1)))
    assert (result.outcome, result.reward) == ("failed", 0.0)
    assert "larger than 1 MiB" in result.detail


async def test_tree_removed_is_the_agents_fault() -> None:
    result = await run(FakeClient(errors={"get_tar": NotFound("x", kind="path")}))
    assert result.outcome == "failed"


async def test_requirements_are_unpacked_in_both_sandboxes() -> None:
    needs = [Pin(package="q", version="1", sha256=SHA, import_path="src")]
    client = FakeClient()
    await run(client, make_task(requires=needs))
    agent, verify = client.sandboxes
    assert {"/task/sdist-0", "/task/sdist-1"} <= set(agent.files.kept)
    assert "/task/sdist-0" in verify.files.kept


async def test_cancelled_rollout_stops_its_sandbox() -> None:
    client = FakeClient()
    async with anyio.create_task_group() as group:
        group.start_soon(run, client, make_task(make_agent(ShellCall(command="sleep"))))
        await client.asleep.wait()
        group.cancel_scope.cancel()
    assert [sandbox.stopped for sandbox in client.sandboxes] == [1]


async def test_no_more_in_flight_than_asked_for() -> None:
    client = FakeClient()
    jobs = plan_jobs([make_task()], 20, "r1")
    done = await run_jobs(client, jobs, image="debian", distributions=DISTRIBUTIONS, in_flight=3)
    assert 1 < client.most <= 3
    assert len(done.results) == 20
    assert {result.rollout_id for result in done.results} == {job.rollout_id for job in jobs}


async def test_suite_reports_and_tells() -> None:
    events: list[Event] = []
    client = FakeClient()
    report = await run_suite(
        client,
        [make_task(make_agent(), make_agent(name="fails", expected="failed"))],
        image="debian",
        distributions=DISTRIBUTIONS,
        per_task=4,
        on_event=events.append,
    )
    assert report.outcomes == {"solved": 4}
    assert len(report.mismatches) == 2
    assert report.sandboxes_created == 8
    assert report.tool_calls == 4
    assert [event.kind for event in events].count("started") == 4
    outcomes: list[Outcome] = [event.result.outcome for event in events if event.result]
    assert outcomes == ["solved"] * 4


async def test_one_rollout_without_a_platform_does_not_stop_the_others() -> None:
    client = FakeClient(errors={"create": CapacityUnavailable("full")})
    report = await run_suite(
        client, [make_task()], image="debian", distributions=DISTRIBUTIONS, per_task=5
    )
    assert report.outcomes == {"infrastructure": 5}
    assert report.tasks[0].mean_reward is None


async def test_a_bug_in_one_rollout_is_its_outcome(monkeypatch: pytest.MonkeyPatch) -> None:
    client = FakeClient()

    async def run_shell(*_: object, **__: object) -> None:
        raise ZeroDivisionError("a bug")

    monkeypatch.setattr(FakeSandbox, "run_shell", run_shell)
    result = await run(client)
    assert (result.outcome, result.reward) == ("infrastructure", None)
    assert result.detail == "setup: ZeroDivisionError: a bug"
    assert client.sandboxes[0].stopped == 1


async def test_what_an_agent_reads_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rollout, "READ_LIMIT_BYTES", 10)
    client = FakeClient()
    calls = (
        WriteCall(path="long", content="a" * 11),
        ReadCall(path="long"),
        ReplaceCall(path="long", old="a" * 11, new="b"),
        ShellCall(command=""),
    )
    result = await run(client, make_task(make_agent(*calls)))
    assert [call.ended for call in result.calls][:3] == ["ok", "truncated", "failed"]
    assert result.calls[1].output_bytes == 11
