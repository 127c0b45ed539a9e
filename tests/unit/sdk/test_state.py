from __future__ import annotations

from collections.abc import Callable
from typing import Any

import anyio
import pytest

from dsec import (
    CapacityUnavailable,
    Conflict,
    DSecClient,
    DSecContainerRunArgs,
    InvalidRequest,
    NotFound,
    Sandbox,
    SandboxGone,
    Unavailable,
)
from dsec.base.ids import SandboxId, child_id
from dsec.base.states import SandboxState
from dsec.sdk.models import job_and_epoch, sandbox_spec
from dsec.wire.public_v1 import BatchItem, ErrorBody, JobItem, JobView
from dsec.wire.sandbox import (
    DiffEntry,
    Heartbeat,
    Limits,
    NetworkView,
    Pause,
    Recorded,
    SnapshotView,
    StreamError,
)
from tests.unit.sdk.fake import (
    LOST,
    SANDBOX,
    FakePlatform,
    Reply,
    Seen,
    error,
    json,
    lines,
    sandbox,
)

SNAPSHOT = SnapshotView(
    name="built", image="snapshots/p/built", digest="sha256:aa", parent="debian", sandbox=SANDBOX
)


def keys(seen: list[Seen]) -> set[str]:
    return {call.headers["idempotency-key"] for call in seen}


async def test_pause_and_resume(platform: FakePlatform, box: Sandbox) -> None:
    paused = sandbox(state=SandboxState.PAUSED, pause=Pause(at=2.0, swapped_bytes=7))
    platform.sandbox("POST", "/pause", LOST, error(Unavailable("edge restarts")), json(paused))
    platform.sandbox("POST", "/resume", json(sandbox()))
    assert (await box.pause()).pause == paused.pause
    assert box.view.state is SandboxState.PAUSED
    assert (await box.resume()).state is SandboxState.RUNNING
    assert len(keys(platform.calls("POST", "/pause"))) == 1
    assert len(keys(platform.calls("POST", "/pause") + platform.calls("POST", "/resume"))) == 2


async def test_resize_says_only_what_changes(platform: FakePlatform, box: Sandbox) -> None:
    platform.sandbox("PATCH", "", LOST, json(sandbox(limits=Limits(memory_mb=512), qos="be")))
    view = await box.resize(memory_mb=512, cpu_cores=2, qos="be")
    assert (view.limits.memory_mb, box.view.qos) == (512, "be")
    calls = platform.calls("PATCH", SANDBOX)
    changes = {name: value for name, value in calls[0].json().items() if value is not None}
    assert changes == {"memory_mb": 512, "cpu_cores": 2.0, "qos": "be"}
    assert len(keys(calls)) == 1


async def test_network(platform: FakePlatform, box: Sandbox) -> None:
    view = NetworkView(enabled=True, address4="192.0.2.7", rules={"pypi": True})
    platform.sandbox("GET", "/network", json(view))
    platform.sandbox("PUT", "/network", LOST, json(view))
    assert await box.network() == view
    assert await box.set_network({"pypi": True}) == view
    calls = platform.calls("PUT", "/network")
    assert calls[0].json() == {"rules": {"pypi": True}}
    assert len(keys(calls)) == 1
    refusal = Conflict("made without a network", kind="network")
    platform.sandbox("PUT", "/network", error(refusal))
    with pytest.raises(Conflict, match="without a network"):
        await box.set_network({})
    assert sandbox_spec(DSecContainerRunArgs(container_image="x", network=True)).network


async def test_pack_and_diff(platform: FakePlatform, box: Sandbox) -> None:
    platform.sandbox("POST", "/pack", LOST, Reply(200, [b"\n", json(SNAPSHOT).chunks[0]]))
    entry = DiffEntry(path="/a", change="added", kind="file", size_bytes=3)
    platform.sandbox("GET", "/diff", json([entry]))
    assert (await box.pack("built", exclude=["/tmp/**"], description="d")) == SNAPSHOT
    calls = platform.calls("POST", "/pack")
    assert len(keys(calls)) == 1
    assert calls[0].json() == {
        "name": "built",
        "description": "d",
        "exclude": ["/tmp/**"],
        "clean": True,
    }
    assert await box.diff() == [entry]
    late = Reply(200, [b"\n", error(Conflict("there is one")).chunks[0]])
    platform.sandbox("POST", "/pack", late)
    with pytest.raises(Conflict):
        await box.pack("built")


async def test_forks_come_as_they_are_ready_and_none_twice(
    platform: FakePlatform, box: Sandbox
) -> None:
    first = BatchItem(index=1, sandbox=sandbox("sbx1"))
    platform.sandbox(
        "POST",
        "/fork",
        lines(Heartbeat(), first, broken=True),
        lines(first, StreamError(code="unavailable", message="restarts", http_status=503)),
        lines(first),
        lines(first, BatchItem(index=0, sandbox=sandbox("sbx0"))),
    )
    children = await box.fork(2, labels={"a": "b"})
    assert [child.id for child in children] == ["sbx1", "sbx0"]
    bodies = [call.json() for call in platform.calls("POST", "/fork")]
    assert len(bodies) == 4
    assert bodies[0] == bodies[3]
    assert (bodies[0]["count"], bodies[0]["labels"]) == (2, {"a": "b"})
    assert keys(platform.calls("POST", "/fork")) == {bodies[0]["key"]}


async def test_a_fork_that_fails_leaves_no_sandbox_nobody_knows(
    platform: FakePlatform, box: Sandbox
) -> None:
    full = ErrorBody(code="capacity_unavailable", message="full")
    items = BatchItem(index=1, error=full), BatchItem(index=0, sandbox=sandbox("sbx0"))
    platform.sandbox("POST", "/fork", lines(*items))
    with pytest.raises(CapacityUnavailable) as caught:
        await box.fork(2, key="mine")
    assert caught.value.details["index"] == 1
    assert not stopped(platform)
    with pytest.raises(CapacityUnavailable):
        await box.fork(2)
    assert stopped(platform) == children(platform)
    async with box.forks(2) as forks:
        kinds = [type(child).__name__ async for child in forks]
    assert kinds == ["CapacityUnavailable", "Sandbox"]


async def test_a_fork_whose_answer_breaks_off_leaves_no_sandbox(
    platform: FakePlatform, box: Sandbox
) -> None:
    """The one not told of may have been made as well; that stopping fails does not hide the cause."""
    gone = StreamError(code="sandbox_gone", message="the parent is over", http_status=410)
    platform.sandbox("POST", "/fork", lines(BatchItem(index=0, sandbox=sandbox("sbx0")), gone))
    with pytest.raises(SandboxGone, match="the parent is over"):
        await box.fork(3)
    assert stopped(platform) == children(platform)
    assert len(stopped(platform)) == 3


async def test_a_cancelled_fork_leaves_no_sandbox(platform: FakePlatform, box: Sandbox) -> None:
    told = lines(BatchItem(index=0, sandbox=sandbox("sbx0")), hang=True)
    platform.sandbox("POST", "/fork", told)
    with anyio.move_on_after(0.1):
        await box.fork(20)
    assert stopped(platform) == children(platform)
    assert len(stopped(platform)) == 20


async def test_an_empty_fork_or_batch_is_the_servers_to_refuse(
    platform: FakePlatform, client: DSecClient, box: Sandbox
) -> None:
    refusal = error(InvalidRequest("count: expected >= 1", place="count"))
    platform.sandbox("POST", "/fork", refusal)
    platform.on("POST", "/v1/sandboxes:batch", refusal)
    with pytest.raises(InvalidRequest):
        await box.fork(0)
    with pytest.raises(InvalidRequest):
        async for _ in client.run_containers(DSecContainerRunArgs("debian"), 0):
            pass


async def test_an_empty_id_is_an_id_and_not_none(
    platform: FakePlatform, client: DSecClient, box: Sandbox
) -> None:
    refusal = error(InvalidRequest("command id '' must be 1 to 64 letters"))
    platform.sandbox("POST", "/commands/run", refusal)
    platform.sandbox("POST", "/commands", refusal)
    platform.sandbox("POST", "/sessions", refusal)
    for call in (
        box.exec(["true"], command_id=""),
        box.run_shell("true", command_id=""),
        box.start(["true"], command_id=""),
        box.open_session(session_id=""),
    ):
        with pytest.raises(InvalidRequest):
            await call
    sent = [call.json() for call in platform.seen if call.method == "POST"]
    assert [body.get("command_id", body.get("session_id")) for body in sent] == ["", "", "", ""]
    with pytest.raises(InvalidRequest, match="key is empty"):
        await client.run_container(DSecContainerRunArgs("debian"), idempotency_key="")


async def test_a_fork_that_is_refused_asks_for_nothing_more(
    platform: FakePlatform, box: Sandbox
) -> None:
    platform.sandbox("POST", "/fork", error(InvalidRequest("too many")))
    with pytest.raises(InvalidRequest):
        await box.fork(100_000_000)
    assert not stopped(platform)


def stopped(platform: FakePlatform) -> set[str]:
    return {call.path.rpartition("/")[2] for call in platform.calls("DELETE", "")}


def children(platform: FakePlatform) -> set[str]:
    asked = platform.calls("POST", "/fork")[-1].json()
    return {child_id(SandboxId(SANDBOX), asked["key"], n) for n in range(asked["count"])}


async def test_a_trajectory_goes_on_where_it_broke(platform: FakePlatform, box: Sandbox) -> None:
    entries = [Recorded(seq=n, op="command", at=float(n)) for n in range(2, 6)]
    platform.sandbox(
        "GET",
        "/trajectory",
        lines(entries[0], Heartbeat(), entries[1], broken=True),
        lines(entries[2], StreamError(code="unavailable", message="again", http_status=503)),
        lines(entries[3]),
    )
    async with box.trajectory(2, 9, ["command", "pause"]) as trajectory:
        assert [entry.seq async for entry in trajectory] == [2, 3, 4, 5]
    queries = [call.query for call in platform.calls("GET", "/trajectory")]
    assert [query["since"] for query in queries] == ["2", "4", "5"]
    assert b"op=command&op=pause" in platform.calls("GET", "/trajectory")[2].raw_query
    assert {query["until"] for query in queries} == {"9"}


async def test_a_trajectory_that_is_not_there(platform: FakePlatform, box: Sandbox) -> None:
    gone = StreamError(code="sandbox_gone", message="forgotten", http_status=410)
    platform.sandbox("GET", "/trajectory", lines(gone))
    with pytest.raises(SandboxGone):
        [entry async for entry in box.trajectory()]


async def test_snapshots(platform: FakePlatform, client: DSecClient) -> None:
    entry = DiffEntry(path="/a", change="removed", kind="file")
    platform.on("GET", "/v1/snapshots", json([SNAPSHOT]))
    platform.on("GET", "/v1/snapshots/built", json(SNAPSHOT))
    platform.on("GET", "/v1/snapshots/built/diff", json([entry]))
    platform.on("DELETE", "/v1/snapshots/built", LOST, Reply(204))
    assert await client.snapshots.list() == [SNAPSHOT]
    assert await client.snapshots.get("built") == SNAPSHOT
    assert await client.snapshots.diff("built") == [entry]
    await client.snapshots.remove("built")
    with pytest.raises(InvalidRequest, match="not an id"):
        await client.snapshots.get("../nodes")
    with pytest.raises(NotFound):
        await client.snapshots.get("other")


async def test_restore_takes_the_snapshots_image(
    platform: FakePlatform, client: DSecClient
) -> None:
    platform.on("GET", "/v1/snapshots/built", json(SNAPSHOT))
    platform.on("POST", "/v1/sandboxes", json(sandbox(image=SNAPSHOT.image), 201))
    await client.restore("built")
    args = DSecContainerRunArgs("ignored", memory_limit_mb=64)
    await client.restore("built", args, idempotency_key="k")
    plain, given = platform.calls("POST", "/v1/sandboxes")
    assert {call.json()["image"] for call in (plain, given)} == {SNAPSHOT.image}
    assert given.json()["limits"]["memory_mb"] == 64
    assert given.headers["idempotency-key"] == "k"


@pytest.mark.parametrize("act", ["pause", "resume", "reap"])
async def test_a_whole_job(platform: FakePlatform, client: DSecClient, act: str) -> None:
    items = [
        JobItem(id="sbx1", sandbox=sandbox("sbx1")),
        JobItem(id="sbx2", error=ErrorBody(code="unavailable", message="its node is away")),
        JobItem(id="", error=ErrorBody(code="unavailable", message="node n3 does not answer")),
        JobItem(id="", error=ErrorBody(code="unavailable", message="node n4 does not answer")),
    ]
    platform.on(
        "POST", f"/v1/jobs/j/{act}", LOST, lines(items[0], broken=True), lines(*items, Heartbeat())
    )
    call: Callable[[str], Any] = getattr(client.jobs, act)
    assert await call("j") == items


async def test_leases(platform: FakePlatform, client: DSecClient) -> None:
    job = JobView(job="j", project="p", epoch=3, expires_at=9.0)
    platform.on("GET", "/v1/jobs", json([job]))
    platform.on("GET", "/v1/jobs/j", json(job))
    platform.on("PUT", "/v1/jobs/j/lease", LOST, json(job))
    platform.on("DELETE", "/v1/jobs/j/lease", Reply(204))
    assert await client.jobs.list() == [job]
    assert await client.jobs.get("j") == job
    held = await client.jobs.lease("j", ttl_s=60, on_lapse="reap", on_superseded="pause")
    await client.jobs.release("j", held.epoch)
    first, again = platform.calls("PUT", "/lease")
    assert first.json() == {
        "epoch": 0,
        "ttl_s": 60.0,
        "on_lapse": "reap",
        "on_superseded": "pause",
    }
    assert first.body == again.body
    assert platform.calls("DELETE", "/lease")[0].query == {"epoch": "3"}


async def test_sandboxes_of_a_job_are_listed(platform: FakePlatform, client: DSecClient) -> None:
    platform.on("GET", "/v1/sandboxes", json({"sandboxes": []}))
    await client.list(job="j")
    assert platform.calls("GET", "/v1/sandboxes")[0].query["job"] == "j"


def test_run_arguments_say_job_and_epoch(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = sandbox_spec(DSecContainerRunArgs("debian"))
    assert (spec.job, spec.epoch, spec.idle_action, spec.qos) == (None, 0, "stop", "ls")
    monkeypatch.setenv("DSEC_JOB", "held")
    monkeypatch.setenv("DSEC_EPOCH", "4")
    args = DSecContainerRunArgs("debian", step="7", group="a", idle_action="pause", qos="be")
    spec = sandbox_spec(args)
    assert (spec.job, spec.epoch, spec.step, spec.group) == ("held", 4, "7", "a")
    assert (spec.idle_action, spec.qos) == ("pause", "be")


@pytest.mark.parametrize(
    ("job", "epoch", "found"),
    [
        (None, None, ("held", 4)),
        ("held", None, ("held", 4)),
        ("other", None, ("other", 0)),
        ("", None, (None, 0)),
        (None, 0, ("held", 0)),
        ("other", 9, ("other", 9)),
    ],
)
def test_a_held_epoch_is_that_of_its_own_job(
    job: str | None, epoch: int | None, found: tuple[str | None, int]
) -> None:
    args = DSecContainerRunArgs("debian", job=job, epoch=epoch)
    assert job_and_epoch(args, {"DSEC_JOB": "held", "DSEC_EPOCH": "4"}) == found


def test_an_epoch_that_is_no_number() -> None:
    with pytest.raises(InvalidRequest, match="DSEC_EPOCH"):
        job_and_epoch(DSecContainerRunArgs("debian"), {"DSEC_JOB": "j", "DSEC_EPOCH": "-1"})
