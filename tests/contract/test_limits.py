"""Limits hold, and what meets them is told."""

from __future__ import annotations

import json

import pytest

from dsec import DSecClient, DsecError, InvalidRequest, Sandbox, StorageFull
from tests.contract.capabilities import needs
from tests.contract.conftest import MakeArgs
from tests.contract.expect import PROBE, eventually

MIB = 1 << 20


async def test_too_much_memory_is_an_oom_kill_and_the_sandbox_lives(
    client: DSecClient, args: MakeArgs
) -> None:
    async with await client.run_container(args(memory_limit_mb=64)) as sandbox:
        result = await sandbox.exec([PROBE, "alloc", "256"])
        assert (result.oom_killed, result.exit_code) == (True, 137)
        after = await sandbox.exec([PROBE, "echo", "alive"])
        assert (after.stdout, after.oom_killed) == ("alive\n", False)
        assert (await sandbox.usage()).oom_kills >= 1


async def test_memory_within_the_limit_is_to_be_had(client: DSecClient, args: MakeArgs) -> None:
    async with await client.run_container(args(memory_limit_mb=128)) as sandbox:
        result = await sandbox.exec([PROBE, "alloc", "64"])
        assert (result.ok, result.oom_killed) == (True, False)


async def test_an_ordinary_kill_is_no_oom_kill(sandbox: Sandbox) -> None:
    result = await sandbox.run_shell("kill -9 $$")
    assert (result.exit_code, result.oom_killed) == (137, False)


async def test_a_child_killed_for_memory_is_told(client: DSecClient, args: MakeArgs) -> None:
    async with await client.run_container(args(memory_limit_mb=64)) as sandbox:
        result = await sandbox.run_shell("/probe alloc 256; echo $?")
        assert result.stdout == "137\n"


async def test_a_fork_bomb_is_contained(client: DSecClient, args: MakeArgs) -> None:
    async with await client.run_container(args(pids_limit=64)) as sandbox:
        command = await sandbox.start([PROBE, "forkbomb", "5000"], timeout=20)

        async def full() -> bool:
            return len(await sandbox.processes()) >= 50

        await eventually(full, "the bomb has filled its limit")
        assert len(await sandbox.processes()) <= 65
        assert await sandbox.files.exists("/etc/passwd")
        await command.kill()
        assert (await sandbox.exec([PROBE, "echo", "alive"])).stdout == "alive\n"


async def test_one_sandboxes_bomb_is_not_anothers(
    client: DSecClient, args: MakeArgs, sandbox: Sandbox
) -> None:
    async with await client.run_container(args(pids_limit=32)) as other:
        bomb = await other.start([PROBE, "forkbomb", "1000"], timeout=20)
        assert (await sandbox.exec([PROBE, "echo", "fine"])).stdout == "fine\n"
        await bomb.kill()


async def test_ten_thousand_variables_arrive(sandbox: Sandbox) -> None:
    env = {f"V{n}": str(n) for n in range(10_000)}
    said = (await sandbox.exec([PROBE, "env"], env=env)).stdout.splitlines()
    assert {f"V{n}={n}" for n in range(10_000)} <= set(said)


async def test_a_hundred_kilobyte_argument_arrives(sandbox: Sandbox) -> None:
    text = "x" * 100_000
    result = await sandbox.exec([PROBE, "echo", text])
    assert result.stdout == text + "\n"


async def test_a_megabyte_of_arguments_works_or_says_why(sandbox: Sandbox) -> None:
    words = ["x" * 1000] * 1000
    try:
        result = await sandbox.exec([PROBE, "args", *words], output_limit_bytes=4 * MIB)
    except DsecError as error:
        assert error.code in ("invalid_request", "payload_too_large")
    else:
        assert result.stdout == "1000:" + ("x" * 1000 + "\n1000:") * 999 + "x" * 1000 + "\n"


@needs("kernel-limits")
async def test_an_argument_the_kernel_cannot_take_is_a_typed_error(sandbox: Sandbox) -> None:
    with pytest.raises(DsecError) as caught:
        await sandbox.exec([PROBE, "echo", "x" * MIB])
    assert caught.value.code in ("invalid_request", "payload_too_large")


async def test_huge_output_uses_no_more_than_its_limit(sandbox: Sandbox) -> None:
    before = (await sandbox.usage()).memory_bytes
    result = await sandbox.exec([PROBE, "flood", str(200 * MIB)], output_limit_bytes=MIB)
    assert result.stdout_dropped == 199 * MIB
    assert (await sandbox.usage()).memory_bytes - before < 32 * MIB


async def test_processes_are_told(sandbox: Sandbox) -> None:
    command = await sandbox.start([PROBE, "sleep", "2468"], user="user")

    async def told() -> bool:
        return any("2468" in p.argv for p in await sandbox.processes())

    await eventually(told, "the sleeper is listed")
    found = await sandbox.processes()
    sleeper = next(p for p in found if "2468" in p.argv)
    assert (sleeper.uid, sleeper.argv) == (1000, [PROBE, "sleep", "2468"])
    assert 1 in [p.pid for p in found]
    assert sleeper.pid > 1
    await command.kill()


async def test_usage_is_sane(client: DSecClient, args: MakeArgs) -> None:
    async with await client.run_container(args(memory_limit_mb=256)) as sandbox:
        await sandbox.exec([PROBE, "echo"])
        usage = await sandbox.usage()
        assert usage.memory_limit_bytes == 256 * MIB
        assert 0 < usage.memory_bytes < 256 * MIB
        assert usage.memory_peak_bytes >= usage.memory_bytes or usage.memory_peak_bytes == 0
        assert 0 <= usage.pids < 64
        assert usage.oom_kills == 0


FILL = "dd if=/dev/zero of=/tmp/fill bs=64k"


@needs("enforced-disk")
async def test_a_full_disk_is_an_error_and_the_sandbox_lives(
    client: DSecClient, args: MakeArgs
) -> None:
    async with await client.run_container(args(disk_limit_mb=64)) as sandbox:
        await sandbox.files.write("/root/kept", "kept")
        result = await sandbox.run_shell(FILL)
        assert result.exit_code != 0
        assert "No space left" in result.stderr
        size = (await sandbox.files.stat("/tmp/fill")).size_bytes
        assert 63 * MIB <= size <= 67 * MIB
        with pytest.raises(StorageFull):
            await sandbox.files.write("/tmp/more", bytes(4 * MIB))
        assert await sandbox.files.read_text("/root/kept") == "kept"
        assert (await sandbox.exec([PROBE, "echo", "alive"])).stdout == "alive\n"


@needs("enforced-disk")
async def test_deleting_makes_room_again(client: DSecClient, args: MakeArgs) -> None:
    async with await client.run_container(args(disk_limit_mb=64)) as sandbox:
        for _ in range(2):
            assert (await sandbox.run_shell(FILL)).exit_code != 0
            assert (await sandbox.usage()).disk_bytes >= 63 * MIB
            assert (await sandbox.run_shell("rm /tmp/fill")).ok
            assert (await sandbox.usage()).disk_bytes < 2 * MIB


@needs("enforced-disk")
async def test_the_smallest_disk_works(client: DSecClient, args: MakeArgs) -> None:
    async with await client.run_container(args(disk_limit_mb=16)) as sandbox:
        assert (await sandbox.run_shell("echo x > /etc/x && cat /etc/x")).stdout == "x\n"
        assert (await sandbox.usage()).disk_limit_bytes == 16 * MIB


@needs("enforced-disk")
async def test_one_sandboxes_full_disk_is_not_anothers(
    client: DSecClient, args: MakeArgs, sandbox: Sandbox
) -> None:
    async with await client.run_container(args(disk_limit_mb=16)) as full:
        assert (await full.run_shell(FILL)).exit_code != 0
        assert (await sandbox.run_shell("dd if=/dev/zero of=/tmp/a bs=1M count=32")).ok


@needs("enforced-disk")
async def test_a_setuid_program_works_on_its_disk(client: DSecClient, args: MakeArgs) -> None:
    async with await client.run_container(args(disk_limit_mb=64)) as sandbox:
        await sandbox.run_shell("cp /probe /tmp/suid && chmod 4755 /tmp/suid")
        said = json.loads((await sandbox.exec(["/tmp/suid", "report"], user="user")).stdout)
        assert said["status"]["Uid"].split()[:2] == ["1000", "0"]


async def test_a_disk_without_a_limit_says_so(sandbox: Sandbox) -> None:
    assert sandbox.view.limits.disk_mb is None
    assert (await sandbox.usage()).disk_limit_bytes == 0


async def test_a_disk_too_small_to_be_one_is_refused(client: DSecClient, args: MakeArgs) -> None:
    for size in (0, 15):
        with pytest.raises(InvalidRequest, match="disk_mb"):
            await client.run_container(args(disk_limit_mb=size))


@needs("enforced-cpu")
async def test_processor_time_is_counted_and_limited(client: DSecClient, args: MakeArgs) -> None:
    async with await client.run_container(args(cpu_cores_limit=0.25)) as sandbox:
        before = (await sandbox.usage()).cpu_s
        await sandbox.exec([PROBE, "spin", "2"], timeout=30)
        used = (await sandbox.usage()).cpu_s - before
        assert 0.1 < used < 1.0


async def test_limits_of_a_new_sandbox_are_the_documented_ones(sandbox: Sandbox) -> None:
    limits = sandbox.view.limits
    assert (limits.memory_mb, limits.cpu_cores, limits.pids) == (2048, 1.0, 1024)
    assert (sandbox.view.ttl_running_stop, sandbox.view.max_lifetime_s) == (1800, 86400)
