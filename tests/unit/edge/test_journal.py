from __future__ import annotations

import os
import stat
from pathlib import Path

import msgspec
import pytest

from dsec.base.states import SandboxState, StopReason
from dsec.edge.lifecycle.journal import Journal
from dsec.edge.record import Changed, SandboxRecord
from dsec.images.records import Environment, EnvironmentPart
from dsec.images.records import view as image_view
from dsec.wire.sandbox import Limits, SandboxSpec, SandboxView
from tests.unit.edge.node import image

ID = "sbxn0de0000000000000000"


@pytest.fixture
def journal(tmp_path: Path) -> Journal:
    made = Journal(tmp_path)
    made.prepare()
    return made


def record(journal: Journal, sandbox: str = ID) -> SandboxRecord:
    return SandboxRecord(
        id=sandbox,
        project="p",
        spec=SandboxSpec(image="debian", labels={"a": "b"}),
        environment=Environment(image=image_view(image("debian"))),
        created_at=5.0,
        uid_base=1 << 20,
        directory=str(journal.directory(sandbox)),
        socket="/run/x",
    )


def ending(sandbox: str = ID, at: float = 9.0) -> SandboxView:
    return SandboxView(
        id=sandbox,
        node="n0de",
        backend="container",
        image="debian",
        state=SandboxState.STOPPED,
        created_at=1.0,
        limits=Limits(),
        ended_at=at,
        stop_reason=StopReason.IDLE,
    )


def test_what_was_written_is_read_back(journal: Journal) -> None:
    facts = record(journal)
    journal.create(facts)
    journal.mark(ID, "done", "launch")
    journal.mark_all(ID, [("begun", "connect", ""), ("done", "connect", "")])
    (story,) = journal.stories()
    assert story.record == facts
    assert story.launched
    assert story.stopping is None
    assert story.steps[0] == ("begun", "launch", "")


def test_a_record_of_before_environments_names_an_image(journal: Journal) -> None:
    facts = record(journal)
    journal.create(facts)
    plain = msgspec.to_builtins(facts)
    plain["image"] = plain.pop("environment")["image"]
    (facts.path / "record.json").write_bytes(msgspec.json.encode(plain))
    (story,) = journal.stories()
    layers = image("debian").layers
    assert layers
    assert story.record is not None
    assert story.record.environment == Environment(
        image=facts.image, parts=[EnvironmentPart(label="image", layers=layers)]
    )
    assert msgspec.structs.replace(story.record, environment=facts.environment) == facts


def test_limits_of_before_other_things_could_change_are_read(journal: Journal) -> None:
    spec = SandboxSpec(image="debian", network_rules={"pypi": True})
    journal.create(facts := msgspec.structs.replace(record(journal), spec=spec))
    before = {"limits": {"memory_mb": 64}, "qos": "ls"}
    old = {"limits": {"memory_mb": 128}, "qos": "be", "warnings": ["w"], "before": before}
    (facts.path / "limits.json").write_bytes(msgspec.json.encode(old))
    (story,) = journal.stories()
    now = msgspec.structs.replace(spec, limits=Limits(memory_mb=128), qos="be")
    assert story.record == msgspec.structs.replace(facts, spec=now, warnings=["w"])
    assert story.changed is not None
    assert story.changed.before is not None
    assert story.changed.before.over(facts).spec.network_rules == spec.network_rules
    newer = Changed(limits=Limits(memory_mb=256), qos="be", network_rules={})
    journal.change(ID, newer)
    (story,) = journal.stories()
    assert story.changed == newer


def test_a_record_of_neither_kind_is_none(journal: Journal) -> None:
    journal.create(facts := record(journal))
    (facts.path / "record.json").write_bytes(b'{"id": "x"}')
    (story,) = journal.stories()
    assert story.record is None
    assert journal.unreadable(ID)


@pytest.mark.parametrize("words", ["", "epoch 3 of job run: ada asked"])
def test_the_reason_of_a_removal_is_kept(journal: Journal, words: str) -> None:
    journal.create(record(journal))
    journal.mark(ID, "begun", "kill", f"lifetime {words}")
    [story] = journal.stories()
    assert (story.stopping, story.stop_detail) == (StopReason.LIFETIME, words)


def test_a_line_cut_off_by_a_crash_is_no_line(journal: Journal) -> None:
    journal.create(record(journal))
    with (journal.directory(ID) / "journal").open("a") as file:
        file.write("don")
    (story,) = journal.stories()
    assert story.steps == [("begun", "launch", "")]
    assert not story.launched


def test_text_cannot_forge_a_line(journal: Journal) -> None:
    journal.create(record(journal))
    journal.mark(ID, "undone", "launch", "bad\ndone connect")
    assert not journal.stories()[0].launched


def test_a_record_that_is_not_whole_is_none(journal: Journal) -> None:
    directory = journal.directory(ID)
    directory.mkdir()
    assert journal.stories()[0].record is None
    assert not journal.unreadable(ID)
    (directory / "record.json").write_text("{")
    assert journal.stories()[0].record is None
    assert journal.unreadable(ID)


def test_an_ending_outlives_the_directory(journal: Journal) -> None:
    journal.create(record(journal))
    (journal.directory(ID) / "upper").mkdir()
    journal.forget(ending())
    journal.forget(ending())
    assert not journal.directory(ID).exists()
    assert journal.endings() == [ending()]
    journal.empty_trash()
    assert list(journal.trash.iterdir()) == []
    journal.unremember([ID])
    assert journal.endings() == []


def test_endings_are_oldest_first_and_damaged_ones_go(journal: Journal) -> None:
    other = ID.replace("0000", "1111")
    journal.forget(ending(at=7.0))
    journal.forget(ending(other, at=3.0))
    (journal.ended / "bad.json").write_text("?")
    assert [view.id for view in journal.endings()] == [other, ID]
    assert not (journal.ended / "bad.json").exists()


def test_the_same_id_twice_is_refused(journal: Journal) -> None:
    journal.create(record(journal))
    with pytest.raises(FileExistsError):
        journal.create(record(journal))


def test_marks_of_a_sandbox_given_up_are_no_error(journal: Journal) -> None:
    journal.mark(ID, "done", "launch")
    assert journal.stories() == []


def test_all_of_it_is_private(journal: Journal) -> None:
    journal.create(record(journal))
    for path in (journal.sandboxes, journal.ended, journal.trash, journal.directory(ID)):
        assert stat.S_IMODE(path.stat().st_mode) == 0o700


def test_a_tree_without_end_is_removed_too(tmp_path: Path) -> None:
    """What a sandbox may leave behind: as deep as it likes."""
    journal = Journal(tmp_path)
    journal.prepare()
    (journal.trash / "a").mkdir()
    (journal.trash / "b").mkdir()
    here = os.open(journal.trash / "a", os.O_RDONLY)
    for _ in range(3000):
        os.mkdir("d", dir_fd=here)
        below = os.open("d", os.O_RDONLY, dir_fd=here)
        os.close(here)
        here = below
    os.close(here)
    journal.empty_trash()
    assert list(journal.trash.iterdir()) == []
