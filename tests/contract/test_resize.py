"""Limits change while a sandbox lives, hold at once, and are what programs inside are told."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from dsec import Conflict, DSecClient, InvalidRequest, Sandbox, Unsupported
from tests.contract.capabilities import needs
from tests.contract.conftest import MakeArgs
from tests.contract.expect import PROBE, eventually

MIB = 1 << 20
CAP_SYS_RESOURCE = 24
ONLINE = "/sys/devices/system/cpu/online"


async def test_more_memory_is_to_be_had_at_once_and_less_holds(
    client: DSecClient, args: MakeArgs
) -> None:
    async with await client.run_container(args(memory_limit_mb=64)) as sandbox:
        assert (await sandbox.exec([PROBE, "alloc", "96"])).oom_killed
        assert (await sandbox.resize(memory_mb=128)).limits.memory_mb == 128
        assert (await sandbox.exec([PROBE, "alloc", "96"])).ok
        await sandbox.resize(memory_mb=64)
        assert (await sandbox.exec([PROBE, "alloc", "96"])).oom_killed
        assert (await sandbox.usage()).memory_limit_bytes == 64 * MIB


async def test_what_runs_goes_on_through_it(client: DSecClient, args: MakeArgs) -> None:
    async with await client.run_container(args(memory_limit_mb=64, pids_limit=64)) as sandbox:
        command = await sandbox.start([PROBE, "spin", "1"], timeout=30)
        view = await sandbox.resize(memory_mb=96, cpu_cores=2, pids=32, qos="be")
        assert (view.limits.cpu_cores, view.limits.pids, view.qos) == (2, 32, "be")
        view = await sandbox.resize(cpu_cores=1, qos="ls")
        assert (view.limits.memory_mb, view.limits.cpu_cores, view.qos) == (96, 1, "ls")
        assert (await command.wait()).exit_code == 0


async def test_fewer_processes_are_all_there_can_be(client: DSecClient, args: MakeArgs) -> None:
    async with await client.run_container(args(pids_limit=128)) as sandbox:
        await sandbox.resize(pids=32)
        command = await sandbox.start([PROBE, "forkbomb", "100"], timeout=20)

        async def bombs() -> int:
            return sum("forkbomb" in process.argv for process in await sandbox.processes())

        async def full() -> bool:
            return await bombs() >= 25

        await eventually(full, "the bomb has filled its limit")
        assert await bombs() <= 32
        await command.kill()


@needs("kernel-files")
async def test_less_memory_than_is_used_is_refused_with_numbers(
    client: DSecClient, args: MakeArgs
) -> None:
    async with await client.run_container(args(memory_limit_mb=128)) as sandbox:
        await sandbox.run_shell("dd if=/dev/zero of=/dev/shm/held bs=1M count=48 2>/dev/null")
        with pytest.raises(Conflict) as caught:
            await sandbox.resize(memory_mb=32, pids=64)
        assert caught.value.details["asked_mb"] == 32
        assert int(str(caught.value.details["used_mb"])) >= 48
        limits = (await client.get(sandbox.id)).view.limits
        assert (limits.memory_mb, limits.pids) == (128, 1024)
        assert (await sandbox.exec([PROBE, "alloc", "64"])).ok
        await sandbox.run_shell("rm /dev/shm/held")
        assert (await sandbox.resize(memory_mb=32)).limits.memory_mb == 32


@needs("kernel-files")
async def test_cached_files_are_no_reason_to_refuse(client: DSecClient, args: MakeArgs) -> None:
    async with await client.run_container(args(memory_limit_mb=128)) as sandbox:
        await sandbox.run_shell("dd if=/dev/zero of=/tmp/read bs=1M count=64 2>/dev/null; sync")
        assert (await sandbox.resize(memory_mb=32)).limits.memory_mb == 32


async def test_a_paused_one_is_resized_without_waking_it(
    client: DSecClient, args: MakeArgs
) -> None:
    async with await client.run_container(args(memory_limit_mb=64)) as sandbox:
        await sandbox.pause()
        view = await sandbox.resize(memory_mb=128)
        assert (view.state, view.limits.memory_mb) == ("paused", 128)
        assert (await sandbox.exec([PROBE, "alloc", "96"])).ok


async def test_more_memory_than_the_node_has_is_refused(sandbox: Sandbox) -> None:
    with pytest.raises(InvalidRequest, match="the node has"):
        await sandbox.resize(memory_mb=4 << 20)


async def test_more_processors_than_the_node_has_are_warned_of(
    sandbox: Sandbox, backend: str
) -> None:
    view = await sandbox.resize(cpu_cores=1000)
    assert view.limits.cpu_cores == 1000
    said = sum("cpu_cores" in words for words in view.warnings)
    assert said == (backend == "container"), "simulated ones have processors without end"


async def told(sandbox: Sandbox) -> dict[str, str]:
    """What programs inside find out about their machine."""
    script = """
        echo nproc $(nproc)
        echo online $(cat /sys/devices/system/cpu/online)
        echo listed $(grep -c ^processor /proc/cpuinfo)
        echo counted $(grep -c '^cpu[0-9]' /proc/stat)
        echo total $(awk '/^MemTotal/ {print $2}' /proc/meminfo)
        echo available $(awk '/^MemAvailable/ {print $2}' /proc/meminfo)
        echo swaps $(wc -l </proc/swaps)
    """
    result = await sandbox.run_shell(script)
    assert result.ok, result.stderr
    return dict(line.split(" ", 1) for line in result.stdout.splitlines())


@needs("kernel-files")
async def test_programs_inside_are_told_their_limits(client: DSecClient, args: MakeArgs) -> None:
    async with await client.run_container(args(memory_limit_mb=96, cpu_cores_limit=1)) as sandbox:
        facts = await told(sandbox)
        assert facts["nproc"] == facts["listed"] == facts["counted"] == "1"
        assert (facts["online"], facts["total"], facts["swaps"]) == ("0", str(96 << 10), "0")
        assert 0 < int(facts["available"]) <= 96 << 10


@needs("kernel-files")
async def test_and_of_a_change_also_those_that_run(client: DSecClient, args: MakeArgs) -> None:
    async with await client.run_container(args(memory_limit_mb=96, cpu_cores_limit=1)) as sandbox:
        await sandbox.run_shell("mkfifo /tmp/go")
        waiting = await sandbox.start(["/bin/sh", "-c", "read x </tmp/go; nproc"], timeout=30)
        await sandbox.resize(memory_mb=160, cpu_cores=1.5)
        facts = await told(sandbox)
        two = min(2, len(os.sched_getaffinity(0)))
        assert facts["nproc"] == facts["listed"] == facts["counted"] == str(two)
        assert (facts["online"], facts["total"]) == ("0-1" if two == 2 else "0", str(160 << 10))
        await sandbox.run_shell("echo x >/tmp/go")
        assert (await waiting.wait()).stdout == f"{two}\n"
        await sandbox.resize(cpu_cores=0.5)
        assert (await told(sandbox))["nproc"] == "1"


@needs("kernel-files")
async def test_what_it_uses_is_no_longer_available(client: DSecClient, args: MakeArgs) -> None:
    async with await client.run_container(args(memory_limit_mb=128)) as sandbox:
        before = int((await told(sandbox))["available"])
        await sandbox.run_shell("dd if=/dev/zero of=/dev/shm/held bs=1M count=48 2>/dev/null")
        after = int((await told(sandbox))["available"])
        assert 40 << 10 < before - after < 60 << 10


@needs("kernel-files", "shell")
@pytest.mark.adversarial
async def test_who_asks_all_the_time_holds_up_nobody(client: DSecClient, args: MakeArgs) -> None:
    """Many that read without end: commands run, a pause stands still, a stop ends them all."""
    reading = "while :; do cat /proc/meminfo /proc/stat /proc/loadavg; done >/dev/null"
    async with await client.run_container(args(pids_limit=64)) as sandbox:
        for _ in range(6):
            await sandbox.start(["/bin/sh", "-c", reading], user="user")
        for _ in range(3):
            assert (await told(sandbox))["nproc"] == "1"
            await sandbox.pause()
        assert (await sandbox.exec([PROBE, "echo", "alive"])).stdout == "alive\n"


@needs("kernel-files")
@pytest.mark.adversarial
async def test_what_is_told_cannot_be_forged(sandbox: Sandbox) -> None:
    proc = [f"/proc/{name}" for name in ("meminfo", "cpuinfo", "stat", "uptime", "loadavg")]
    for path in (*proc, ONLINE):
        script = (
            f"echo x >{path} || chmod 777 {path} || rm {path} || mv {path} /tmp || umount {path}"
        )
        result = await sandbox.run_shell(f"({script}) 2>/dev/null")
        assert not result.ok, path
    facts = await told(sandbox)
    assert facts["total"] == str(sandbox.view.limits.memory_mb << 10)


@needs("enforced-disk")
async def test_a_disk_grows_with_what_is_on_it_or_says_why_not(
    client: DSecClient, args: MakeArgs
) -> None:
    fill = "dd if=/dev/zero of=/tmp/fill bs=64k 2>/dev/null; stat -c %s /tmp/fill"
    async with await client.run_container(args(disk_limit_mb=32)) as sandbox:
        await sandbox.files.write("/root/kept", "kept")
        if not _may_grow():
            with pytest.raises(Unsupported, match="CAP_SYS_RESOURCE"):
                await sandbox.resize(disk_mb=64, memory_mb=512)
        else:
            await sandbox.resize(disk_mb=64)
        size_mb = 64 if _may_grow() else 32
        limits = (await client.get(sandbox.id)).view.limits
        assert (limits.disk_mb, limits.memory_mb) == (size_mb, 2048)
        assert (size_mb - 2) * MIB <= int((await sandbox.run_shell(fill)).stdout)
        assert int((await sandbox.run_shell(fill)).stdout) <= (size_mb + 4) * MIB
        assert await sandbox.files.read_text("/root/kept") == "kept"


def _may_grow() -> bool:
    status = Path("/proc/self/status").read_text()
    held = int(status.split("CapEff:")[1].split()[0], 16)
    return bool(held >> CAP_SYS_RESOURCE & 1)


async def test_a_disk_is_never_made_smaller(client: DSecClient, args: MakeArgs) -> None:
    async with await client.run_container(args(disk_limit_mb=32)) as sandbox:
        with pytest.raises(InvalidRequest, match="smaller"):
            await sandbox.resize(disk_mb=16)


async def test_a_disk_without_a_limit_gets_none(sandbox: Sandbox) -> None:
    with pytest.raises(InvalidRequest, match="without a limit"):
        await sandbox.resize(disk_mb=64)
