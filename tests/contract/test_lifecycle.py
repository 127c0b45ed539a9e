"""A sandbox's life: created, found, listed, idle, over."""

from __future__ import annotations

import secrets
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack

import anyio
import httpx
import pytest

from dsec import (
    DSecClient,
    DsecError,
    InvalidRequest,
    NotFound,
    Sandbox,
    SandboxGone,
    Unauthenticated,
    Unsupported,
)
from tests.contract import image
from tests.contract.conftest import MakeArgs
from tests.contract.expect import PROBE, eventually, refusal
from tests.contract.server import Server


@pytest.fixture
async def closing() -> AsyncIterator[AsyncExitStack]:
    """Closes what a failing test has left open."""
    async with AsyncExitStack() as stack:
        yield stack


async def test_the_papers_listing_runs(
    server: Server, args: MakeArgs, closing: AsyncExitStack
) -> None:
    client = server.client()
    await client.open()
    closing.push_async_callback(client.close)
    wanted = args(
        memory_limit_mb=4096,
        cpu_cores_limit=4,
        ttl_running_stop=300,
        network_rules={"npm": False, "pypi": True},
        init_user="root",
    )
    sandbox = await client.run_container(wanted, timeout=120)
    result = await sandbox.run_shell("echo hello world")
    assert result.stdout == "hello world\n"
    await sandbox.stop()
    await client.close()


async def test_a_created_sandbox_is_what_was_asked_for(client: DSecClient, args: MakeArgs) -> None:
    wanted = args(memory_limit_mb=64, cpu_cores_limit=0.5, pids_limit=32, labels={"a": "b"})
    async with await client.run_container(wanted) as sandbox:
        view = sandbox.view
        assert view.state == "running"
        assert (view.limits.memory_mb, view.limits.cpu_cores, view.limits.pids) == (64, 0.5, 32)
        assert (view.labels, view.image) == ({"a": "b"}, image.NAME)
        assert abs(view.created_at - time.time()) < 60


async def test_a_simulation_says_so_in_its_warnings(backend: str, sandbox: Sandbox) -> None:
    assert any("simulated" in warning for warning in sandbox.warnings) == (backend == "sim")


async def test_get_is_a_handle_on_the_same_sandbox(client: DSecClient, sandbox: Sandbox) -> None:
    await sandbox.files.write("/tmp/mark", b"here")
    again = await client.get(sandbox.id)
    assert again.view.state == "running"
    assert await again.files.read("/tmp/mark") == b"here"


@pytest.mark.parametrize("name", ["sbx00000000000000000000", "nonsense"])
async def test_an_unknown_sandbox_is_not_found(client: DSecClient, name: str) -> None:
    with refusal(NotFound, kind="sandbox"):
        await client.get(name)


async def test_list_filters_by_label(client: DSecClient, args: MakeArgs) -> None:
    job = secrets.token_hex(4)
    async with (
        await client.run_container(args(labels={"job": job, "n": "1"})) as one,
        await client.run_container(args(labels={"job": job, "n": "2"})) as two,
    ):
        both = await client.list(labels={"job": job})
        assert [view.id for view in both] == [two.id, one.id]
        assert [v.id for v in await client.list(labels={"job": job, "n": "1"})] == [one.id]
        assert await client.list(labels={"job": "none such"}) == []


async def test_list_filters_by_state(client: DSecClient, args: MakeArgs) -> None:
    job = secrets.token_hex(4)
    async with (
        await client.run_container(args(labels={"job": job})) as ended,
        await client.run_container(args(labels={"job": job})) as living,
    ):
        await ended.stop()
        running = await client.list(labels={"job": job}, states=["running"])
        assert [view.id for view in running] == [living.id]
        stopped = await client.list(labels={"job": job}, states=["stopped"])
        assert [view.id for view in stopped] == [ended.id]


async def test_list_pages_hold_every_sandbox_once(client: DSecClient, args: MakeArgs) -> None:
    job = secrets.token_hex(4)
    batch = client.run_containers(args(labels={"job": job}), count=5)
    made = [item async for item in batch if isinstance(item, Sandbox)]
    some = await client.list(labels={"job": job}, limit=2)
    assert len(some) == 2
    listed = [view.id for view in await client.list(labels={"job": job})]
    assert sorted(listed) == sorted(sandbox.id for sandbox in made)
    for sandbox in made:
        await sandbox.stop()


async def test_the_same_key_creates_one_sandbox(client: DSecClient, args: MakeArgs) -> None:
    key = secrets.token_hex(8)
    async with await client.run_container(args(), idempotency_key=key) as one:
        two = await client.run_container(args(), idempotency_key=key)
        assert one.id == two.id


async def test_the_same_key_at_once_creates_one_sandbox(client: DSecClient, args: MakeArgs) -> None:
    key, made = secrets.token_hex(8), []

    async def create() -> None:
        made.append(await client.run_container(args(), idempotency_key=key))

    async with anyio.create_task_group() as group:
        for _ in range(8):
            group.start_soon(create)
    assert len({sandbox.id for sandbox in made}) == 1
    await made[0].stop()


async def test_an_unknown_image_is_not_found(client: DSecClient, args: MakeArgs) -> None:
    with refusal(NotFound, kind="image"):
        await client.run_container(args(container_image="no-such-image"))


@pytest.mark.parametrize(
    "wrong",
    [
        {"memory_limit_mb": 0},
        {"pids_limit": -1},
        {"cpu_cores_limit": 0},
        {"ttl_running_stop": -1},
        {"hostname": "not a name"},
        {"container_image": ""},
    ],
    ids=lambda wrong: next(iter(wrong)),
)
async def test_senseless_limits_are_refused(
    client: DSecClient, args: MakeArgs, wrong: dict[str, object]
) -> None:
    with refusal(InvalidRequest):
        await client.run_container(args(**wrong))


async def test_an_unknown_field_is_refused(server: Server, backend: str) -> None:
    body = {"image": image.NAME, "backend": backend, "memory": "lots"}
    async with httpx.AsyncClient(base_url=server.url) as http:
        headers = {"Authorization": f"Bearer {server.key}", "Idempotency-Key": "x1"}
        answer = await http.post("/v1/sandboxes", json=body, headers=headers)
    assert answer.status_code == 400
    assert answer.json()["error"]["code"] == "invalid_request"
    assert "memory" in answer.json()["error"]["message"]


async def test_a_backend_that_is_not_here_is_unsupported(
    client: DSecClient, args: MakeArgs
) -> None:
    wanted = args()
    object.__setattr__(wanted, "backend", "fncall")
    with pytest.raises(DsecError) as caught:
        await client.run_container(wanted, timeout=5)
    assert caught.value.code in ("unsupported", "capacity_unavailable")


async def test_a_network_that_cannot_be_had_is_told(client: DSecClient, args: MakeArgs) -> None:
    # Never silently dropped: refused, or said in so many words.
    try:
        sandbox = await client.run_container(args(network_rules={"pypi": True}))
    except Unsupported as error:
        assert "pypi" in error.message
        return
    async with sandbox:
        assert any("pypi" in warning for warning in sandbox.warnings)


async def test_no_key_no_sandbox(server: Server, args: MakeArgs) -> None:
    async with type(server.client())(api_url=server.url, api_key="dsec_wrong") as stranger:
        with refusal(Unauthenticated):
            await stranger.list()


async def test_sandboxes_have_files_of_their_own(
    client: DSecClient, args: MakeArgs, sandbox: Sandbox
) -> None:
    async with await client.run_container(args()) as other:
        await sandbox.files.write("/tmp/secret", b"mine")
        assert not await other.files.exists("/tmp/secret")
        await other.files.write("/etc/group", b"root:x:0:\n")
        assert b"user" in await sandbox.files.read("/etc/group")


async def test_sandboxes_have_processes_of_their_own(
    client: DSecClient, args: MakeArgs, sandbox: Sandbox
) -> None:
    await sandbox.start([PROBE, "sleep", "1234"])
    async with await client.run_container(args()) as other:
        assert not any("1234" in process.argv for process in await other.processes())


async def test_stop_is_harmless_twice(client: DSecClient, args: MakeArgs) -> None:
    sandbox = await client.run_container(args())
    for _ in range(2):
        view = await sandbox.stop()
        assert (view.state, view.stop_reason) == ("stopped", "requested")


async def test_stop_at_once_from_many_sides_is_one_stop(client: DSecClient, args: MakeArgs) -> None:
    sandbox = await client.run_container(args())
    async with anyio.create_task_group() as group:
        for _ in range(5):
            group.start_soon(sandbox.stop)
    assert (await sandbox.refresh()).state == "stopped"


async def test_stopping_ends_a_waiting_command_with_sandbox_gone(
    client: DSecClient, args: MakeArgs
) -> None:
    sandbox = await client.run_container(args())
    command = await sandbox.start([PROBE, "sleep", "1000"])
    async with anyio.create_task_group() as group:

        async def wait() -> None:
            with refusal(SandboxGone, reason="requested"):
                await command.wait()

        group.start_soon(wait)
        group.start_soon(_follow_until_gone, sandbox)
        await anyio.wait_all_tasks_blocked()
        await sandbox.stop()


async def _follow_until_gone(sandbox: Sandbox) -> None:
    with refusal(SandboxGone):
        command = await sandbox.start([PROBE, "ignore-term"])
        async for _ in command.events():
            pass


async def test_everything_on_an_ended_sandbox_is_sandbox_gone(
    client: DSecClient, args: MakeArgs
) -> None:
    sandbox = await client.run_container(args())
    await sandbox.stop()
    for ask in (
        lambda: sandbox.exec(["true"]),
        lambda: sandbox.start(["true"]),
        sandbox.commands,
        sandbox.open_session,
        sandbox.processes,
        sandbox.usage,
        lambda: sandbox.files.read("/etc/passwd"),
        lambda: sandbox.files.write("/tmp/x", b""),
        lambda: sandbox.files.list("/"),
        lambda: sandbox.connect_port(80),
    ):
        with refusal(SandboxGone, reason="requested"):
            await ask()


async def test_an_ended_sandbox_still_says_why_it_ended(client: DSecClient, args: MakeArgs) -> None:
    sandbox = await client.run_container(args())
    await sandbox.stop()
    view = (await client.get(sandbox.id)).view
    assert (view.state, view.stop_reason) == ("stopped", "requested")
    assert view.ended_at is not None
    assert view.ended_at >= view.created_at


async def test_an_idle_sandbox_is_stopped(client: DSecClient, args: MakeArgs) -> None:
    sandbox = await client.run_container(args(ttl_running_stop=0.5))
    await _over(sandbox)
    assert sandbox.view.stop_reason == "idle"
    with refusal(SandboxGone, reason="idle"):
        await sandbox.exec(["true"])


async def test_a_waited_for_command_keeps_a_sandbox_alive(
    client: DSecClient, args: MakeArgs
) -> None:
    async with await client.run_container(args(ttl_running_stop=0.5)) as sandbox:
        assert (await sandbox.exec([PROBE, "sleep", "2"])).ok


async def test_a_command_nobody_waits_for_keeps_a_sandbox_alive(
    client: DSecClient, args: MakeArgs
) -> None:
    async with await client.run_container(args(ttl_running_stop=0.5)) as sandbox:
        begun = time.monotonic()
        await sandbox.start([PROBE, "sleep", "2"])
        await _over(sandbox)
        assert sandbox.view.stop_reason == "idle"
        assert time.monotonic() - begun > 2


async def test_use_puts_off_the_idle_stop(client: DSecClient, args: MakeArgs) -> None:
    async with await client.run_container(args(ttl_running_stop=1.0)) as sandbox:
        end = time.monotonic() + 2.5
        while time.monotonic() < end:
            assert await sandbox.files.exists("/etc/passwd")
            await anyio.sleep(0.1)


async def test_a_lifetime_ends_a_busy_sandbox(client: DSecClient, args: MakeArgs) -> None:
    sandbox = await client.run_container(args(max_lifetime_s=0.5))
    with refusal(SandboxGone, reason="lifetime"):
        await sandbox.exec([PROBE, "sleep", "1000"])
    await _over(sandbox)
    assert sandbox.view.stop_reason == "lifetime"


async def _over(sandbox: Sandbox) -> None:
    async def ended() -> bool:
        # Looking must not count as use.
        return (await sandbox.refresh()).state == "stopped"

    await eventually(ended, "the sandbox has stopped")


async def test_a_batch_is_as_many_as_asked_for(client: DSecClient, args: MakeArgs) -> None:
    job = secrets.token_hex(4)
    made = [item async for item in client.run_containers(args(labels={"job": job}), count=12)]
    sandboxes = [item for item in made if isinstance(item, Sandbox)]
    assert len({sandbox.id for sandbox in sandboxes}) == 12
    async with anyio.create_task_group() as group:
        for sandbox in sandboxes:
            group.start_soon(_runs_and_stops, sandbox)
    assert await client.list(labels={"job": job}, states=["running"]) == []


async def _runs_and_stops(sandbox: Sandbox) -> None:
    assert (await sandbox.exec([PROBE, "echo", sandbox.id])).stdout == sandbox.id + "\n"
    await sandbox.stop()


async def test_a_batch_with_the_same_key_is_the_same_batch(
    client: DSecClient, args: MakeArgs
) -> None:
    key = secrets.token_hex(8)
    ids = []
    for _ in range(2):
        batch = client.run_containers(args(), count=3, idempotency_key=key)
        ids.append({item.id async for item in batch if isinstance(item, Sandbox)})
    assert ids[0] == ids[1]
    for name in ids[0]:
        await (await client.get(name)).stop()


async def test_a_batch_of_an_unknown_image_says_so(client: DSecClient, args: MakeArgs) -> None:
    try:
        batch = client.run_containers(args(container_image="no-such-image"), count=2)
        items = [item async for item in batch]
    except NotFound:
        return
    assert len(items) == 2
    assert all(isinstance(item, NotFound) for item in items)


async def test_leaving_the_context_stops_the_sandbox(client: DSecClient, args: MakeArgs) -> None:
    async with await client.run_container(args()) as sandbox:
        pass
    assert (await client.get(sandbox.id)).view.state == "stopped"


async def test_nodes_and_images_are_told(client: DSecClient, backend: str) -> None:
    nodes = await client.nodes()
    assert len(nodes) == 1
    assert backend in nodes[0].backends
    assert nodes[0].healthy
    names = [each.name.partition(":")[0] for each in await client.images.list()]
    assert image.NAME in names
