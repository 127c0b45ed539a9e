"""What profiles refuse, and what a sandbox's tamper report tells of it."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import anyio
import pytest

from dsec import (
    DSecClient,
    Sandbox,
    SandboxGone,
    Security,
    TamperReport,
    Unsupported,
)
from tests.contract import image
from tests.contract.capabilities import needs
from tests.contract.conftest import MakeArgs
from tests.contract.server import Server

STRICT, LOOSE = Security(profile="strict"), Security(profile="loose")
AT_THE_AGENT = "kill -CONT 1"


async def succeeds(sandbox: Sandbox, line: str) -> bool:
    return (await sandbox.run_shell(line, timeout=20)).exit_code == 0


async def test_where_nothing_was_tried_there_is_nothing_to_tell(sandbox: Sandbox) -> None:
    await sandbox.exec(["/probe", "echo"])
    report = await sandbox.tamper()
    assert report == TamperReport(
        at=report.at, counted=report.counted, simulated=report.simulated, detail=report.detail
    )
    assert report.counted != report.simulated
    assert bool(report.detail) == report.simulated


async def test_a_paused_one_stays_paused(client: DSecClient, sandbox: Sandbox) -> None:
    await sandbox.pause()
    assert "does not run" in (await sandbox.tamper()).detail
    assert (await client.get(sandbox.id)).view.state == "paused"


async def test_one_that_is_over_has_no_report(client: DSecClient, args: MakeArgs) -> None:
    sandbox = await client.run_container(args())
    await sandbox.stop()
    with pytest.raises(SandboxGone):
        await sandbox.tamper()


async def test_the_profile_is_reported_and_kept(client: DSecClient, args: MakeArgs) -> None:
    asked = Security(profile="strict", no_new_privs=True)
    async with await client.run_container(args(security=asked)) as sandbox:
        assert sandbox.view.security == asked
        assert (await client.get(sandbox.id)).view.security == asked


@needs("snapshots")
async def test_a_fork_has_its_parents_profile(client: DSecClient, args: MakeArgs) -> None:
    async with await client.run_container(args(security=STRICT)) as parent:
        [child] = await parent.fork(1)
        async with child:
            assert child.view.security == STRICT
            assert not await succeeds(child, "chroot / /bin/true")


@pytest.mark.parametrize("asked", [LOOSE, Security(allow=["mount"])])
async def test_more_than_the_node_allows_is_refused(
    client: DSecClient, args: MakeArgs, asked: Security
) -> None:
    with pytest.raises(Unsupported, match="operator does not allow"):
        await client.run_container(args(security=asked))


@needs("isolation")
@pytest.mark.needs_root
@pytest.mark.adversarial
async def test_each_profile_refuses_its_own(client: DSecClient, args: MakeArgs) -> None:
    async with (
        await client.run_container(args()) as plain,
        await client.run_container(args(security=STRICT)) as strict,
    ):
        assert await succeeds(plain, "chroot / /bin/true")
        assert not await succeeds(strict, "chroot / /bin/true")
        [call] = (await strict.tamper()).denied_calls
        assert (call.name, call.count) == ("chroot", 1)
        assert (await plain.tamper()).denied_calls == []


@needs("isolation")
@pytest.mark.needs_root
@pytest.mark.adversarial
async def test_refused_calls_are_told_and_recorded(client: DSecClient, args: MakeArgs) -> None:
    async with await client.run_container(args()) as sandbox:
        assert not await succeeds(sandbox, "mount -t tmpfs none /tmp")
        assert not await succeeds(sandbox, AT_THE_AGENT)
        assert not await succeeds(sandbox, AT_THE_AGENT)
        report = await sandbox.tamper()
        assert {call.name for call in report.denied_calls} == {"mount"}
        [signal] = report.agent_signals
        assert (signal.name, signal.argument, signal.count) == ("kill", 18, 2)
        assert signal.first_at <= signal.last_at <= report.at
    [told] = [entry async for entry in client.trajectory(sandbox.id, ops=["tamper"])]
    assert [call["name"] for call in told.result["agent_signals"]] == ["kill"]


@needs("isolation")
@pytest.mark.needs_root
@pytest.mark.adversarial
async def test_changed_system_files_are_told(client: DSecClient, args: MakeArgs) -> None:
    async with await client.run_container(args()) as sandbox:
        assert await succeeds(sandbox, "echo x > /new; echo x > /bin/new; echo >> /etc/passwd")
        assert await succeeds(sandbox, "rm /bin/vi; cp /bin/busybox /bin/cat.new; rm /bin/cat; "
                                       "/bin/busybox mv /bin/cat.new /bin/cat")  # fmt: skip
        report = await sandbox.tamper()
        changed = {(entry.path, entry.change) for entry in report.system_files}
        assert changed == {
            ("/etc/passwd", "modified"), ("/bin/vi", "removed"), ("/bin/cat", "modified"),
        }  # fmt: skip
        assert report.system_files_count == 3
    [told] = [entry async for entry in client.trajectory(sandbox.id, ops=["tamper"])]
    assert told.result["system_files_count"] == 3


@needs("isolation")
@pytest.mark.needs_root
async def test_limits_that_were_hit_are_told(client: DSecClient, args: MakeArgs) -> None:
    async with await client.run_container(args(pids_limit=16)) as sandbox:
        await sandbox.run_shell("yes | head -c 3000000", timeout=20)
        await sandbox.run_shell("for i in $(seq 40); do sleep 9 & done", timeout=20)
        report = await sandbox.tamper()
        assert report.pids_limit_hits > 0
        assert report.flooded_streams == 1
        assert report.dropped_bytes == 3_000_000 - (1 << 20)


@needs("isolation")
@pytest.mark.needs_root
async def test_the_command_shows_names_that_obey_no_one(
    server: Server, client: DSecClient, args: MakeArgs, tmp_path: Path
) -> None:
    async with await client.run_container(args()) as sandbox:
        await sandbox.run_shell("rm /bin/vi", timeout=20)
        assert not await succeeds(sandbox, AT_THE_AGENT)
        said = await server.dsec("tamper", sandbox.id, cwd=tmp_path)
        text = said.stdout.decode()
        assert said.returncode == 0, said.stderr
        assert "/bin/vi" in text
        assert "kill" in text
        assert text.replace("\n", "").isprintable()
        told = await server.dsec("tamper", sandbox.id, "--json", cwd=tmp_path)
        assert json.loads(told.stdout)["agent_signals"][0]["argument"] == 18


@pytest.fixture
def permissive(backend: str, tmp_path: Path) -> Iterator[Server]:
    """A node whose operator allows more."""
    archive = tmp_path / "contract.tar"
    image.build(archive)
    up = Server(backend, settings='allow_loose = true\nallow_syscalls = ["chroot"]\n')
    try:
        up.start()
        anyio.run(_import, up, archive)
        yield up
    finally:
        up.stop()
        up.remove()


async def _import(up: Server, archive: Path) -> None:
    async with up.client() as client:
        await client.images.import_archive(archive, image.NAME).wait()


@pytest.fixture
async def permitted(permissive: Server) -> AsyncIterator[DSecClient]:
    async with permissive.client() as client:
        yield client


@needs("isolation")
@pytest.mark.needs_root
async def test_what_the_operator_allows_is_given(permitted: DSecClient, args: MakeArgs) -> None:
    allowed = Security(profile="strict", allow=["chroot"])
    async with (
        await permitted.run_container(args(security=LOOSE)) as loose,
        await permitted.run_container(args(security=allowed)) as strict,
    ):
        assert await succeeds(loose, AT_THE_AGENT)
        assert await succeeds(loose, "unshare --user --mount --map-root-user mount -t tmpfs x /tmp")
        assert await succeeds(strict, "chroot / /bin/true")
        assert not await succeeds(strict, AT_THE_AGENT)
