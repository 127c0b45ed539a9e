from __future__ import annotations

import pytest

from dsec import (
    CapacityUnavailable,
    DeadlineExceeded,
    DSecClient,
    DSecContainerRunArgs,
    DsecError,
    InvalidRequest,
    NotFound,
    QuotaExceeded,
    RateLimited,
    Sandbox,
    SandboxGone,
    Unauthenticated,
    Unavailable,
    Unsupported,
)
from dsec.sdk.asgi import AsgiTransport
from dsec.wire.public_v1 import BatchItem, ErrorBody, SandboxList, Version
from tests.unit.sdk.fake import LOST, SANDBOX, FakePlatform, Reply, error, json, lines, sandbox

DEBIAN = DSecContainerRunArgs("debian")


async def test_the_listing_of_the_paper(platform: FakePlatform) -> None:
    from tests.unit.sdk.fake import result

    platform.on("POST", "/v1/sandboxes", json(sandbox(), 201))
    platform.sandbox("POST", "/commands/run", json(result(b"hello world\n")))
    async with AsgiTransport(platform) as transport:
        client = DSecClient(transport=transport)
        await client.open()
        args = DSecContainerRunArgs(
            container_image="registry.example/sphinx-9658:official",
            memory_limit_mb=4096,
            cpu_cores_limit=4,
            ttl_running_stop=300,
            network_rules={"npm": False, "pypi": True},
            init_user="root",
        )
        box = await client.run_container(args, timeout=120)
        answer = await box.run_shell("echo hello world")
        await box.stop()
        await client.close()
    assert (answer.stdout, answer.exit_code, answer.ok) == ("hello world\n", 0, True)
    sent = platform.calls("POST", "/v1/sandboxes")[0].json()
    assert sent["limits"] == {
        "memory_mb": 4096,
        "cpu_cores": 4.0,
        "pids": 1024,
        "disk_mb": None,
    }
    assert sent["network_rules"] == {"npm": False, "pypi": True}
    assert sent["ttl_running_stop"] == 300
    assert sent["init_user"] == "root"


async def test_a_create_is_sent_again_with_the_same_key(
    platform: FakePlatform, client: DSecClient
) -> None:
    platform.on(
        "POST",
        "/v1/sandboxes",
        LOST,
        error(Unavailable("restarting")),
        error(RateLimited("slowly"), retry_after="0.01"),
        error(CapacityUnavailable("full")),
        Reply(502, [b"<html>bad gateway</html>"]),
        Reply(201, [b'{"id":'], broken=True),
        json(sandbox(), 201),
    )
    box = await client.run_container(DEBIAN)
    assert box.id == SANDBOX
    keys = {call.headers["idempotency-key"] for call in platform.calls("POST", "/v1/sandboxes")}
    assert len(keys) == 1
    assert len(platform.calls("POST", "/v1/sandboxes")) == 7


@pytest.mark.parametrize(
    "refusal",
    [InvalidRequest("memory"), QuotaExceeded("no more"), NotFound("no image"), Unauthenticated("")],
)
async def test_what_another_attempt_would_not_change_is_raised_at_once(
    platform: FakePlatform, client: DSecClient, refusal: DsecError
) -> None:
    platform.on("POST", "/v1/sandboxes", error(refusal))
    with pytest.raises(type(refusal)) as caught:
        await client.run_container(DEBIAN)
    assert caught.value.message == refusal.message
    assert len(platform.calls("POST", "/v1/sandboxes")) == 1


async def test_patience_ends(platform: FakePlatform, client: DSecClient) -> None:
    platform.on("POST", "/v1/sandboxes", error(CapacityUnavailable("full")))
    with pytest.raises(CapacityUnavailable, match="full"):
        await client.run_container(DEBIAN, timeout=0.05)
    platform.on("POST", "/v1/sandboxes", Reply(200, hang=True))
    with pytest.raises(DeadlineExceeded, match="may or may not"):
        await client.run_container(DEBIAN, timeout=0.05)


async def test_an_error_of_a_newer_server_falls_back_to_its_family(
    platform: FakePlatform, client: DSecClient
) -> None:
    platform.on(
        "GET",
        "/v1/nodes",
        json({"error": {"code": "sandbox_evaporated", "message": "x", "details": {"a": 1}}}, 410),
    )
    with pytest.raises(DsecError) as caught:
        await client.nodes()
    assert caught.value.http_status == SandboxGone.http_status
    assert caught.value.details["a"] == 1


async def test_batches_give_each_once_even_if_the_stream_breaks(
    platform: FakePlatform, client: DSecClient
) -> None:
    boxes = [BatchItem(index=i, sandbox=sandbox(f"sbx{i}")) for i in range(3)]
    refused = BatchItem(index=3, error=ErrorBody(code="capacity_unavailable", message="full"))
    platform.on(
        "POST",
        "/v1/sandboxes:batch",
        lines(boxes[1], {"type": "heartbeat"}, broken=True),
        lines(boxes[1], boxes[0], refused),
        lines(boxes[1], boxes[0], refused, boxes[2]),
    )
    got = [item async for item in client.run_containers(DEBIAN, count=4)]
    assert [item.id if isinstance(item, Sandbox) else item.code for item in got] == [
        "sbx1",
        "sbx0",
        "capacity_unavailable",
        "sbx2",
    ]
    sent = platform.calls("POST", ":batch")
    assert len({call.headers["idempotency-key"] for call in sent}) == 1
    assert sent[0].json()["count"] == 4


async def test_listing_follows_pages(platform: FakePlatform, client: DSecClient) -> None:
    platform.on(
        "GET",
        "/v1/sandboxes",
        json(SandboxList(sandboxes=[sandbox("a"), sandbox("b")], next="b")),
        json(SandboxList(sandboxes=[sandbox("c")])),
    )
    views = await client.list(labels={"job": "7 & 8", "x": "y"}, states=["running"])
    assert [view.id for view in views] == ["a", "b", "c"]
    first, second = platform.calls("GET", "/v1/sandboxes")
    assert first.raw_query.startswith(b"label=job%3D7%20%26%208&label=x%3Dy&state=running")
    assert second.query["next"] == "b"


async def test_open_refuses_another_api(platform: FakePlatform) -> None:
    platform.on("GET", "/v1/version", json(Version(version="9", api="v9")))
    async with AsgiTransport(platform) as transport:
        with pytest.raises(Unsupported, match="v9"):
            await DSecClient(transport=transport).open()


async def test_the_key_is_sent_and_never_shown(platform: FakePlatform, client: DSecClient) -> None:
    assert platform.seen[0].headers["authorization"] == "Bearer k3y"
    assert "k3y" not in repr(client) + repr(vars(client)) + str(client)


async def test_images_report_progress_and_then_the_image(
    platform: FakePlatform, client: DSecClient
) -> None:
    image = {"name": "debian", "digest": "sha256:1", "layers": ["a"]}
    platform.on(
        "POST",
        "/v1/images/pull",
        lines({"type": "progress", "step": "layer 1", "done": 5, "total": 10}, broken=True),
        lines(
            {"type": "heartbeat"},
            {"type": "sparkles"},
            {"type": "progress", "step": "layer 1", "done": 10, "total": 10},
            {"type": "ready", "image": image},
        ),
    )
    events = [event async for event in client.images.pull("docker.io/debian")]
    assert [type(event).__name__ for event in events] == [
        "ImageProgress",
        "ImageProgress",
        "ImageReady",
    ]
    platform.on(
        "POST",
        "/v1/images/build",
        lines({"type": "error", "code": "storage_full", "message": "no room", "http_status": 507}),
    )
    with pytest.raises(DsecError, match="no room"):
        await client.images.build("debian", packages=["git"]).wait()
