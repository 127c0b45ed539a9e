from __future__ import annotations

from typing import Any

from dsec.trajectory.diff import diff
from dsec.wire.sandbox import Captured, Recorded


def ran(seq: int, ident: str, line: str, out: bytes = b"", **result: Any) -> Recorded:
    return Recorded(
        seq=seq,
        op="command",
        id=ident,
        at=float(seq),
        args={"shell": line},
        outcome="ok",
        result={"exit_code": 0, "pid": seq, **result},
        stdout=Captured(head=out),
        stderr=Captured(),
    )


def test_equal_runs_are_the_same_whatever_their_times_and_pids() -> None:
    left = [ran(1, "a", "true"), ran(2, "b", "echo 1", b"1\n")]
    right = [ran(5, "a", "true"), ran(9, "b", "echo 1", b"1\n")]
    assert [step.kind for step in diff(left, right)] == ["same", "same"]


def test_two_sandboxes_that_end_alike_are_the_same() -> None:
    def ended(sandbox: str, at: float) -> Recorded:
        view = {"id": sandbox, "created_at": at, "ended_at": at + 1, "state": "stopped"}
        return Recorded(seq=1, op="stop", at=at, outcome="ok", result=view)

    assert [step.kind for step in diff([ended("a", 1.0)], [ended("b", 5.0)])] == ["same"]


def test_without_common_ids_order_decides() -> None:
    left = [ran(1, "a", "true"), ran(2, "b", "date", b"1\n")]
    right = [ran(1, "x", "true"), ran(2, "y", "date", b"2\n")]
    steps = list(diff(left, right))
    assert [(step.kind, step.what) for step in steps] == [("same", []), ("differs", ["stdout"])]


def test_what_differs_is_named() -> None:
    (step,) = diff([ran(1, "a", "x", exit_code=0, n=1)], [ran(1, "a", "y", exit_code=1, n=2)])
    assert step.what == ["args", "exit_code", "result.n"]


def test_what_only_one_has_is_told_in_its_place() -> None:
    left = [ran(1, "a", "1"), ran(2, "b", "2"), ran(3, "c", "3")]
    right = [ran(1, "a", "1"), ran(2, "n", "new"), ran(3, "c", "3"), ran(4, "d", "4")]
    kinds = [step.kind for step in diff(left, right)]
    assert kinds == ["same", "only_left", "only_right", "same", "only_right"]


def test_nothing_against_something() -> None:
    assert [step.kind for step in diff([], [ran(1, "a", "x")])] == ["only_right"]
    assert [step.kind for step in diff([ran(1, "a", "x")], [])] == ["only_left"]
