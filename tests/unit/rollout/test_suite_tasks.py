"""The tasks that are shipped, and how wrong ones are refused."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from dsec.base.errors import InvalidRequest
from dsec.rollout.suite import plan_check, plan_jobs
from dsec.rollout.tasks import ReplaceCall, ShellCall, Task, lint, load_suite, load_task
from tests.unit.rollout.samples import make_agent, make_task

SUITE = Path(__file__).resolve().parents[3] / "examples" / "tasks"
TASKS = load_suite(SUITE)


def test_suite_has_enough_tasks_of_different_packages() -> None:
    assert len({task.source.package for task in TASKS}) == len(TASKS) >= 10
    assert {task.difficulty for task in TASKS} == {"easy", "medium", "hard"}


@pytest.mark.parametrize("task", TASKS, ids=lambda task: task.name)
def test_task_is_complete(task: Task) -> None:
    assert task.agents[0].expected == "solved"
    assert task.source.fixed_in
    for pin in task.pins:
        assert re.fullmatch("[0-9a-f]{64}", pin.sha256)
    compile(task.verify["verify.py"], "verify.py", "exec")
    # A replacement that would not apply shows only in a sandbox; one that changes nothing here.
    for agent in task.agents:
        assert all(c.old != c.new for c in agent.calls if isinstance(c, ReplaceCall))


def test_agents_fail_in_many_ways() -> None:
    agents = [agent for task in TASKS for agent in task.agents]
    assert {agent.expected for agent in agents} == {"solved", "failed", "agent_timeout"}
    wanted = {
        call.expect for agent in agents for call in agent.calls if isinstance(call, ShellCall)
    }
    assert {"ok", "failed", "timed_out", "truncated"} <= wanted


def test_command_ids_fit() -> None:
    jobs = [*plan_jobs(TASKS, 100, "r123456"), *plan_check(TASKS, "r123456")]
    ids = [job.rollout_id for job in jobs]
    assert len(set(ids)) == len(ids)
    assert all(re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_.:-]{0,56}", rollout_id) for rollout_id in ids)


def test_agents_take_turns_and_tasks_alternate() -> None:
    one = make_task(make_agent(name="a"), make_agent(name="b"), name="one")
    two = make_task(make_agent(name="c"), name="two")
    jobs = plan_jobs([one, two], 3, "r")
    assert [(job.task.name, job.agent.name) for job in jobs] == [
        ("one", "a"), ("two", "c"), ("one", "b"), ("two", "c"), ("one", "a"), ("two", "c"),
    ]  # fmt: skip


def test_check_runs_every_agent_and_one_that_does_nothing() -> None:
    agents = [job.agent for job in plan_check([make_task(make_agent(name="a"))], "r")]
    assert [(agent.name, agent.expected) for agent in agents] == [
        ("pristine", "failed"),
        ("a", "solved"),
    ]


def test_lint_names_what_is_wrong() -> None:
    task = make_task(make_agent(expected="infrastructure"), name="sample")
    said = " ".join(lint(task, "elsewhere"))
    for word in ("directory", "expected to solve", "break the platform"):
        assert word in said
    assert "expected to fail" in " ".join(lint(make_task(make_agent()), "sample"))


def write_task(directory: Path, text: str, agents: dict[str, str]) -> Path:
    place = directory / "sample"
    (place / "agents").mkdir(parents=True)
    (place / "verify").mkdir()
    (place / "verify" / "verify.py").write_text("pass")
    (place / "task.toml").write_text(text)
    for name, recorded in agents.items():
        (place / "agents" / f"{name}.toml").write_text(recorded)
    return place


HEAD = f"""
format = 1
name = "sample"
title = "t"
difficulty = "easy"
problem = "{"p" * 40}"
[source]
package = "p"
version = "1.0"
sha256 = "{"0" * 64}"
"""
AGENTS = {
    "solves": 'expected = "solved"\nnote = ""\n[[call]]\ntool = "shell"\ncommand = "true"\n',
    "fails": 'expected = "failed"\nnote = ""\ncall = []\n',
}


def test_load_task(tmp_path: Path) -> None:
    task = load_task(write_task(tmp_path, HEAD, AGENTS))
    assert [agent.name for agent in task.agents] == ["solves", "fails"]
    assert task.agents[0].calls == [ShellCall(command="true")]
    assert task.verify == {"verify.py": b"pass"}
    assert task.limits.memory_mb == 256
    assert [task.name for task in load_suite(tmp_path)] == ["sample"]
    assert [task.name for task in load_suite(tmp_path / "sample")] == ["sample"]


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("format = 1", "format = 2", "format"),
        ('"1.0"', '"latest"', "version"),
        ("0" * 64, "0" * 63, "sha256"),
        ("difficulty", "difficult", "difficult"),
        ('package = "p"', 'package = "p"\nimport_path = "../x"', "import_path"),
        ('"sample"', '"other"', "directory"),
        ("title", "[[", "task.toml"),
    ],
)
def test_wrong_task_is_refused(tmp_path: Path, old: str, new: str, said: str) -> None:
    place = write_task(tmp_path, HEAD.replace(old, new), AGENTS)
    with pytest.raises(InvalidRequest, match=said):
        load_task(place)


@pytest.mark.parametrize(
    "call",
    ['tool = "dance"', 'tool = "shell"', 'tool = "shell"\ncommand = "x"\nexpect = "well"'],
)
def test_wrong_call_is_refused(tmp_path: Path, call: str) -> None:
    recorded = f'expected = "solved"\nnote = ""\n[[call]]\n{call}\n'
    place = write_task(tmp_path, HEAD, {**AGENTS, "solves": recorded})
    with pytest.raises(InvalidRequest, match=r"solves\.toml"):
        load_task(place)


def test_no_tasks(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match="no task"):
        load_suite(tmp_path)
