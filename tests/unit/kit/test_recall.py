"""Work that is called off: before, in the middle of a step, and after."""

from __future__ import annotations

import threading

from dsec.kit.recall import Recall


def test_a_step_under_way_is_ended_and_one_that_is_over_is_not() -> None:
    recall, ended = Recall(), threading.Event()
    with recall.ending(ended.set):
        caller = threading.Thread(target=recall.call)
        caller.start()
        assert ended.wait(60)
        caller.join()
    ended.clear()
    recall.call()
    assert not ended.is_set()


def test_what_was_called_off_before_does_not_begin() -> None:
    recall, ended = Recall(), threading.Event()
    recall.call()
    with recall.ending(ended.set):
        assert ended.is_set()
