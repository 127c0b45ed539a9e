"""The terminal's display draws what it was told."""

from __future__ import annotations

import io
from typing import Literal

from dsec.rollout.live import LiveDisplay
from dsec.rollout.records import Event, RolloutResult
from dsec.rollout.report import summarize
from tests.unit.rollout.samples import make_result, make_task


def make_event(
    kind: Literal["started", "call", "ended"], result: RolloutResult | None = None
) -> Event:
    return Event(kind=kind, rollout_id="r", task="sample", agent="solves", text="x", result=result)


def test_live_display() -> None:
    out = io.StringIO()
    result = make_result(outcome="failed")
    with LiveDisplay([make_task()], 1, out) as display:
        display.note("p 1: [cached]")
        display.event(make_event("started"))
        display.event(make_event("call"))
        display.event(make_event("ended", result))
    display.report(summarize([result], 1))
    shown = out.getvalue()
    for text in ("[cached]", "sample", "failed", "rollouts per minute", "0.00"):
        assert text in shown
