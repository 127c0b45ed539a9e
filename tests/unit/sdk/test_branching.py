"""Where a branch may begin."""

from __future__ import annotations

from typing import Any

import pytest

from dsec import Conflict, DSecClient, InvalidRequest, NotFound, PermissionDenied
from dsec.sdk.branching import check_reaches, divergences, missing, starts
from dsec.sdk.replaying import Replayed
from dsec.trajectory.diff import Step
from dsec.wire.sandbox import Captured, Recorded, SnapshotView
from tests.unit.sdk.fake import SANDBOX, FakePlatform, Seen, error, json, lines, result, sandbox

PARENT = "sbx0000000000000000000p"


def entry(seq: int, op: str = "command", **args: Any) -> Recorded:
    return Recorded(seq=seq, op=op, at=float(seq), ended_at=seq + 0.5, outcome="ok", args=args)


def created(seq: int, image: str = "debian", parent: str = "", **spec: Any) -> Recorded:
    facts = {"spec": {"image": image, **spec}, "image_digest": "d"}
    return entry(seq, "create", **facts, **({"parent": parent} if parent else {}))


def packed(name: str, step: int, sandbox: str = SANDBOX, **more: Any) -> SnapshotView:
    image = f"snapshots/p/{name}"
    fields: dict[str, Any] = {"digest": "d", "parent": "debian", "sandbox": sandbox, "step": step}
    return SnapshotView(name=name, image=image, **(fields | more))


def begun(found: list[Any]) -> list[tuple[int, str]]:
    return [(start.step, start.snapshot) for start in found]


LIFE = [created(1, workspace="w:1"), entry(2), entry(3), entry(4)]


def test_the_nearest_before_the_step_comes_first() -> None:
    snapshots = [packed("a", 2), packed("late", 5), packed("b", 4), packed("other", 3, PARENT)]
    found = starts(LIFE, snapshots, SANDBOX)
    assert begun(found) == [(4, "b"), (2, "a"), (1, "")]
    assert (found[0].spec.image, found[0].spec.workspace) == ("snapshots/p/b", None)
    assert (found[2].spec.image, found[2].spec.workspace) == ("debian", "w:1")


def test_of_the_same_step_the_one_with_everything_comes_first() -> None:
    snapshots = [packed("clean", 3), packed("whole", 3, cleaned=False), packed("first", 1)]
    found = starts(LIFE, [*snapshots, packed("ambiguous", 4, conflict=True)], SANDBOX)
    assert begun(found) == [(3, "whole"), (3, "clean"), (1, ""), (1, "first")]
    assert [start.cleaned for start in found] == [False, True, False, True]


def test_a_fork_goes_back_to_its_parents() -> None:
    fork = [created(1), entry(2), entry(3), created(4, parent=PARENT, labels={"n": "child"})]
    snapshots = [packed("shared", 3, PARENT), packed("after", 4, PARENT)]
    found = starts([*fork, entry(5)], snapshots, SANDBOX)
    assert begun(found) == [(3, "shared"), (1, "")]
    assert found[1].spec.labels == {"n": "child"}
    assert starts(fork, [], SANDBOX, labels={"a": "b"})[0].spec.labels == {"a": "b"}


def test_a_restored_one_begins_again_with_what_it_was_restored_from() -> None:
    life = [created(1), entry(2), created(3, image="snapshots/p/x"), entry(4)]
    found = starts(life, [], SANDBOX)
    assert [(start.step, start.spec.image) for start in found] == [
        (3, "snapshots/p/x"),
        (1, "debian"),
    ]


def test_a_step_that_is_not_there() -> None:
    for step in (0, 5):
        with pytest.raises(InvalidRequest):
            check_reaches(LIFE, step)
    with pytest.raises(NotFound):
        check_reaches([], 1)
    with pytest.raises(NotFound):
        starts(LIFE[1:], [], SANDBOX)


def test_what_was_not_recorded_is_told() -> None:
    assert missing(LIFE, 1, 4) == ""
    assert missing([LIFE[0], LIFE[3]], 1, 4) == "not on record: 2, 3"


def test_divergences_in_order() -> None:
    steps = [
        Step(kind="same", left=entry(2), right=entry(2)),
        Step(kind="differs", left=entry(5), right=entry(5), what=["exit_code", "stdout"]),
        Step(kind="only_left", left=entry(6)),
    ]
    assert [*divergences(steps, [Replayed(entry(3), "so")])] == [
        "step 3 was not done again: so",
        "step 5 (command) differs in exit_code, stdout",
        "step 6 (command) was not recorded this time",
    ]


FRESH = "sbx0000000000000000000f"


def said(seq: int, out: bytes) -> Recorded:
    made = entry(seq, shell="x")
    made.id, made.result, made.stdout = f"cmd{seq}", {"exit_code": 0}, Captured(head=out)
    return made


def platform_with(platform: FakePlatform, again: bytes) -> list[str]:
    """Entries 1 to 4 on record, a snapshot at 3 of somebody else, and what comes of the 2nd to 4th."""
    images: list[str] = []

    def create(seen: Seen) -> Any:
        images.append(seen.json()["image"])
        if images[-1].startswith("snapshots/"):
            return error(PermissionDenied("somebody else's"))
        return json(sandbox(FRESH), 201)

    before = [created(1), *(said(seq, b"1") for seq in (2, 3, 4))]
    platform.sandbox("GET", "/trajectory", lines(*before))
    platform.on("GET", "/v1/snapshots", json([packed("theirs", 3)]))
    platform.on("POST", "/v1/sandboxes", create)
    platform.on("POST", f"/v1/sandboxes/{FRESH}/commands/run", json(result()))
    platform.on("DELETE", f"/v1/sandboxes/{FRESH}", json(sandbox(FRESH)))
    now = [created(1), *(said(seq, again) for seq in (2, 3, 4))]
    platform.on("GET", f"/v1/sandboxes/{FRESH}/trajectory", lines(*now))
    return images


async def test_what_may_not_be_restored_is_passed_over(
    platform: FakePlatform, client: DSecClient
) -> None:
    images = platform_with(platform, b"1")
    branch = await client.branch(SANDBOX, 4)
    assert images == ["snapshots/p/theirs", "debian"]
    assert (branch.sandbox.id, branch.snapshot, branch.start) == (FRESH, "", 1)
    assert branch.divergences == []
    ran = platform.calls("POST", f"/v1/sandboxes/{FRESH}/commands/run")
    assert [call.json()["command_id"] for call in ran] == ["cmd2", "cmd3", "cmd4"]
    assert platform.calls("DELETE", f"/v1/sandboxes/{FRESH}") == []


async def test_one_that_diverges_is_stopped_at_the_first_step(
    platform: FakePlatform, client: DSecClient
) -> None:
    platform_with(platform, b"other")
    with pytest.raises(Conflict, match=r"step 2 \(command\) differs in stdout"):
        await client.branch(SANDBOX, 4)
    assert len(platform.calls("POST", f"/v1/sandboxes/{FRESH}/commands/run")) == 1
    assert len(platform.calls("DELETE", f"/v1/sandboxes/{FRESH}")) == 1


async def test_one_that_diverges_is_kept_if_it_may(
    platform: FakePlatform, client: DSecClient
) -> None:
    platform_with(platform, b"other")
    branch = await client.branch(SANDBOX, 4, strict=False)
    assert [words.split()[1] for words in branch.divergences] == ["2", "3", "4"]
    assert platform.calls("DELETE", f"/v1/sandboxes/{FRESH}") == []
