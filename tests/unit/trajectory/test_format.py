from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import BinaryIO

import pytest

from dsec.trajectory import reader, writer
from dsec.trajectory.format import HEADER, MAGIC, Begun, Ended, Entry, Inherited, entry_at, frame
from dsec.trajectory.index import load
from dsec.trajectory.inherit import inherit
from dsec.trajectory.reader import NONE, Going, read
from dsec.wire.sandbox import Captured

ENTRIES: list[Entry] = [
    Begun(1, 10.0, "create", caller="me", args={"spec": {"image": "debian"}}),
    Ended(1, 11.0, "ok"),
    Begun(2, 12.0, "command", "c1", "me", b"d1", {"argv": ["true"]}),
    Begun(3, 12.5, "file.write", "key", "me", b"d2", {"path": "/x"}),
    Ended(3, 12.6, "ok", {"path": "/x"}, digest=b"\1" * 32, size_bytes=5),
    Ended(2, 13.0, "ok", {"exit_code": 0}, Captured(head=b"hi\n"), Captured()),
]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    writer.create(tmp_path / "t", ENTRIES)
    return tmp_path / "t"


def test_what_was_written_is_read_in_the_order_of_beginnings(path: Path) -> None:
    create, command, write = read(path)
    assert (create.seq, create.op, create.caller, create.ended_at) == (1, "create", "me", 11.0)
    assert command.stdout is not None
    assert (command.id, command.result, command.stdout.head) == ("c1", {"exit_code": 0}, b"hi\n")
    assert write.args["body"] == {"size_bytes": 5, "sha256": "01" * 32}


def test_a_part_is_read(path: Path) -> None:
    assert [entry.seq for entry in read(path, since=2)] == [2, 3]
    assert [entry.seq for entry in read(path, until=2)] == [1, 2]
    assert [entry.seq for entry in read(path, ops=["command"])] == [2]
    assert list(read(path, since=4)) == []


def test_one_that_is_written_to_is_read_as_far_as_it_goes(path: Path) -> None:
    entries = read(path)
    assert next(entries).seq == 1
    writer.append(path, frame(Begun(4, 14.0, "pause")))
    assert [entry.seq for entry in entries] == [2, 3]
    last = list(read(path))[-1]
    assert (last.op, last.ended_at, last.outcome) == ("pause", None, "")


def test_what_cannot_be_going_on_was_interrupted(path: Path) -> None:
    for seq in (4, 5, 6):
        writer.append(path, frame(Begun(seq, 14.0, "command", f"c{seq}")))

    def outcomes(going: Going) -> list[str]:
        return [entry.outcome for entry in read(path, since=3, going=going)]

    assert outcomes(Going()) == ["ok", "", "", ""]
    assert outcomes(NONE) == ["ok", *["interrupted"] * 3]
    assert outcomes(Going(after=5, commands={4})) == ["ok", "", "interrupted", ""]


def test_a_file_cut_off_anywhere_keeps_its_whole_frames(path: Path) -> None:
    whole = path.read_bytes()
    edges = [len(MAGIC)]
    for entry in ENTRIES:
        edges.append(edges[-1] + len(frame(entry)))
    assert edges[-1] == len(whole)
    for size in range(len(whole) + 1):
        path.write_bytes(whole[:size])
        begun = sum(
            isinstance(e, Begun) and end <= size for e, end in zip(ENTRIES, edges[1:], strict=True)
        )
        assert len(list(read(path))) == begun
        index = load(path)
        kept = max([edge for edge in edges if edge <= size], default=len(MAGIC))
        assert index.size == path.stat().st_size == kept
        assert index.last == begun
        writer.append(path, frame(Begun(9, 20.0, "resume")))
        assert list(read(path))[-1].seq == 9


def test_a_damaged_frame_is_the_end(path: Path) -> None:
    whole = bytearray(path.read_bytes())
    second = len(MAGIC) + len(frame(ENTRIES[0]))
    for at in range(second, second + len(frame(ENTRIES[1]))):
        damaged = whole.copy()
        damaged[at] ^= 0x55
        path.write_bytes(damaged)
        assert [entry.seq for entry in read(path)] == [1]
        assert next(iter(read(path))).ended_at is None


def test_zeros_are_no_frames(path: Path) -> None:
    size = path.stat().st_size
    os.truncate(path, size + 100)
    assert len(list(read(path))) == 3
    assert load(path).size == path.stat().st_size == size


def test_a_length_without_end_is_the_end(path: Path) -> None:
    size = path.stat().st_size
    with path.open("ab") as file:
        file.write(HEADER.pack(1 << 31, 0) + b"x" * 5000)
    assert len(list(read(path))) == 3
    assert load(path).size == size


def test_entries_larger_than_a_read_are_whole(tmp_path: Path) -> None:
    path = tmp_path / "t"
    large = [Begun(n, 1.0, "x", args={"data": b"z" * 700_000}) for n in range(1, 6)]
    writer.create(path, large)
    assert [len(entry.args["data"]) for entry in read(path)] == [700_000] * 5
    with pytest.raises(ValueError, match="an entry of"):
        frame(Begun(1, 1.0, "x", args={"data": b"z" * (5 << 20)}))


def test_a_full_disk_leaves_no_half_of_an_entry(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    size, write = path.stat().st_size, os.write

    def half(file: int, data: bytes) -> int:
        if len(data) <= 5:
            raise OSError(28, "No space left on device")
        return write(file, data[: len(data) - 5])

    monkeypatch.setattr(os, "write", half)
    with pytest.raises(OSError, match="No space"):
        writer.append(path, frame(Begun(4, 14.0, "pause")))
    assert path.stat().st_size == size


def test_an_index_finds_by_id(path: Path) -> None:
    index = load(path)
    place = index.find("command", "c1")
    assert place is not None
    assert (place.seq, bool(place.ended_at)) == (2, True)
    assert index.find("file.move", "key") == index.find("file.write", "key") != None  # noqa: E711
    assert index.find("command", "key") is None
    assert index.running == []
    assert len(index) == 2


def test_ids_of_what_was_refused_are_free_and_of_what_is_unknown_are_taken(path: Path) -> None:
    for seq, outcome in ((4, "not_found"), (5, "unavailable")):
        writer.append(path, frame(Begun(seq, 1.0, "file.move", f"k{seq}")))
        writer.append(path, frame(Ended(seq, 2.0, outcome)))
    writer.append(path, frame(Begun(6, 1.0, "command", "c2")))
    index = load(path)
    assert index.find("file.move", "k4") is None
    unknown = index.find("file.move", "k5")
    assert unknown is not None
    assert not unknown.ended_at
    assert index.running == ["c2"]
    assert index.is_open(6)
    assert not index.is_open(5)


@pytest.mark.parametrize("until", [1, 2, 3, 100])
def test_a_child_begins_with_its_parents(path: Path, until: int) -> None:
    child = path.with_name("child")
    known = inherit(path, until, child)
    assert known == min(until, 3)
    taken = list(read(child))
    assert [(entry.seq, entry.inherited) for entry in taken] == [
        (n, True) for n in range(1, known + 1)
    ]
    assert [entry.result for entry in taken] == [entry.result for entry in read(path, until=known)]
    writer.append(child, frame(Begun(known + 1, 20.0, "create")))
    assert [entry.inherited for entry in read(child)] == [True] * known + [False]
    assert load(child).last == known + 1
    assert child.stat().st_mode & 0o777 == 0o600


def test_what_a_child_has_recorded_follows_what_it_inherits(path: Path) -> None:
    child = path.with_name("child")
    writer.create(child, [Begun(1, 20.0, "create"), Ended(1, 21.0, "ok")])
    assert inherit(path, 2, child) == 2
    assert inherit(path, 2, child) == 2
    ops = [(entry.seq, entry.op, entry.inherited) for entry in read(child)]
    assert ops == [(1, "create", True), (2, "command", True), (3, "create", False)]


def test_a_grandchild_inherits_all(path: Path) -> None:
    child, grandchild = path.with_name("child"), path.with_name("grandchild")
    inherit(path, 3, child)
    writer.append(child, frame(Begun(4, 20.0, "create")))
    assert inherit(child, 4, grandchild) == 4
    assert all(entry.inherited for entry in read(grandchild))


def test_what_ran_in_the_parent_does_not_run_in_the_child(path: Path) -> None:
    writer.append(path, frame(Begun(4, 14.0, "command", "c2")))
    child = path.with_name("child")
    inherit(path, 4, child)
    index = load(child)
    assert index.running == []
    assert index.find("command", "c2") is None
    assert index.find("command", "c1") is not None


def test_a_child_is_whole_or_not_there(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "copy_file_range", full)
    with pytest.raises(OSError, match="No space"):
        inherit(path, 3, path.with_name("child"))
    assert [file.name for file in path.parent.iterdir()] == ["t"]


def test_what_is_added_while_an_index_is_read_is_not_cut_off(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, cut = tmp_path / "t", writer.cut
    writer.create(path, [Begun(1, 1.0, "pause")])
    added = frame(Ended(1, 2.0, "ok"))

    def late(file: BinaryIO, end: int) -> int:
        writer.append(path, added)
        writer.append(path, added + frame(Begun(2, 3.0, "resume")))
        with path.open("ab") as torn:
            torn.write(added[:-1])
        return cut(file, end)

    monkeypatch.setattr(writer, "cut", late)
    index = load(path)
    assert index.size == path.stat().st_size
    assert [entry.op for entry in read(path)] == ["pause", "resume"]


def test_two_who_add_at_once_know_where_theirs_is(tmp_path: Path) -> None:
    path = tmp_path / "t"
    writer.create(path)

    def add(number: int) -> list[tuple[int, int]]:
        numbers = range(number, number + 300)
        return [(n, writer.append(path, frame(Begun(n, 1.0, "x" * (n % 50))))) for n in numbers]

    with ThreadPoolExecutor(3) as threads:
        places = [place for some in threads.map(add, (0, 300, 600)) for place in some]
    with path.open("rb") as file:
        found = [(n, entry_at(file, offset)) for n, offset in places]
    assert all(isinstance(entry, Begun) and entry.seq == n for n, entry in found)


def test_a_long_one_is_read_part_by_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, seen = tmp_path / "t", []
    begun = [Begun(seq, 1.0, "pause") for seq in (1, 2, 3, 5, 4, 6, 40, 41)]
    ended = [Ended(seq, 2.0, "ok") for seq in (41, 1, 5, 3)]
    writer.create(path, [Inherited(2), *begun[:4], *ended[1:3], *begun[4:], ended[0], ended[3]])

    class Places(reader._Places):
        def __init__(self, file: BinaryIO, first: int, until: int | None) -> None:
            super().__init__(file, first, until)
            seen.append(len(self._begun))

    monkeypatch.setattr(reader, "_Places", Places)
    whole = list(read(path))
    assert [entry.seq for entry in whole] == [1, 2, 3, 4, 5, 6, 40, 41]
    assert [entry.seq for entry in whole if entry.outcome] == [1, 3, 5, 41]
    assert [entry.seq for entry in whole if entry.inherited] == [1, 2]
    monkeypatch.setattr(reader, "WINDOW", 3)
    seen.clear()
    assert list(read(path)) == whole
    assert seen == [3, 3, 2]
    assert [entry.seq for entry in read(path, 2, 40)] == [2, 3, 4, 5, 6, 40]
    assert [entry.seq for entry in read(path, 1 << 62)] == []
