"""What a sandbox must not be able to see or do, as root inside it."""

from __future__ import annotations

import json
import os
from pathlib import Path

import anyio
import pytest

from dsec import DSecClient, Sandbox
from tests.contract.capabilities import needs
from tests.contract.conftest import MakeArgs
from tests.contract.expect import PROBE, eventually
from tests.contract.server import Server
from tests.pristine import pristine_node, snapshot

pytestmark = [needs("isolation"), pytest.mark.needs_root, pytest.mark.adversarial]

FORBIDDEN_CAPABILITIES = {
    "NET_ADMIN": 12,
    "SYS_MODULE": 16,
    "SYS_RAWIO": 17,
    "SYS_PTRACE": 19,
    "SYS_ADMIN": 21,
    "SYS_BOOT": 22,
    "SYS_NICE": 23,
    "SYS_RESOURCE": 24,
    "SYS_TIME": 25,
    "MKNOD": 27,
    "SYSLOG": 34,
    "PERFMON": 38,
    "BPF": 39,
    "CHECKPOINT_RESTORE": 40,
}


async def sh(sandbox: Sandbox, line: str, **more: object) -> tuple[int, str]:
    """Status and all that was said."""
    result = await sandbox.run_shell(f"exec 2>&1; {line}", timeout=20, **more)  # type: ignore[arg-type]
    return result.exit_code, result.stdout


async def test_root_inside_is_nobody_outside(sandbox: Sandbox) -> None:
    await sandbox.start([PROBE, "sleep", "13579"])

    async def running() -> list[int]:
        return [pid for pid in _host_pids() if b"13579" in _host_file(pid, "cmdline")]

    await eventually(running, "the sleeper runs on the host")
    uids = [int(uid) for pid in await running() for uid in _uids(pid)]
    assert uids
    assert min(uids) >= 100_000


def _uids(pid: int) -> list[str]:
    """Real, effective, saved and file system user of a process, as the host sees them."""
    lines = _host_file(pid, "status").decode().splitlines()
    return next((line.split()[1:] for line in lines if line.startswith("Uid:")), [])


def _host_pids() -> list[int]:
    return [int(path.name) for path in Path("/proc").iterdir() if path.name.isdigit()]


def _host_file(pid: int, name: str) -> bytes:
    try:
        return Path(f"/proc/{pid}/{name}").read_bytes()
    except OSError:
        return b""


async def test_host_processes_are_not_to_be_seen(sandbox: Sandbox, server: Server) -> None:
    _, said = await sh(sandbox, "ls /proc")
    inside = {int(name) for name in said.split() if name.isdigit()}
    assert 1 in inside
    assert len(inside) < 10
    _, said = await sh(sandbox, "cat /proc/*/cmdline")
    assert "dsec.main" not in said


async def test_pid_one_cannot_be_killed(sandbox: Sandbox) -> None:
    for number in (1, 9, 11, 15, 19):
        await sh(sandbox, f"kill -{number} 1")
    assert (await sandbox.exec([PROBE, "echo", "alive"])).stdout == "alive\n"


async def test_killing_everything_leaves_the_sandbox_usable(sandbox: Sandbox) -> None:
    await sandbox.run_shell("kill -9 -1", timeout=20)
    assert (await sandbox.exec([PROBE, "echo", "alive"])).stdout == "alive\n"


@pytest.mark.parametrize("name", ["fd", "fd/0", "root", "cwd", "mem", "environ", "exe", "maps"])
async def test_pid_one_cannot_be_looked_into(sandbox: Sandbox, name: str) -> None:
    code, said = await sh(sandbox, f"ls /proc/1/{name}/ && cat /proc/1/{name}")
    assert code != 0, said


async def test_pid_one_cannot_be_written_to(sandbox: Sandbox) -> None:
    for name in ("mem", "oom_score_adj", "timerslack_ns"):
        await sh(sandbox, f"echo 1000 > /proc/1/{name}")
    assert (await sandbox.exec([PROBE, "echo", "alive"])).stdout == "alive\n"


async def test_a_command_inherits_three_descriptors(sandbox: Sandbox) -> None:
    result = await sandbox.exec(["ls", "-l", "/proc/self/fd"])
    numbers = [
        int(line.split(" -> ")[0].split()[-1])
        for line in result.stdout.splitlines()
        if " -> " in line
    ]
    # Its own look at the directory is the one above two.
    assert sorted(numbers)[:3] == [0, 1, 2]
    assert len(numbers) <= 4, result.stdout


async def test_a_sessions_command_inherits_no_control_descriptor(sandbox: Sandbox) -> None:
    async with await sandbox.open_session() as session:
        said = (await session.run("ls /proc/self/fd")).stdout
    assert len(said.split()) <= 4, said


async def test_the_host_name_is_the_one_asked_for(client: DSecClient, args: MakeArgs) -> None:
    async with await client.run_container(args(hostname="my-box")) as sandbox:
        assert (await sandbox.exec(["hostname"])).stdout == "my-box\n"
        assert "my-box" in (await sandbox.files.read_text("/etc/hosts"))
    assert os.uname().nodename != "my-box"


async def test_changing_the_host_name_does_not_reach_the_host(sandbox: Sandbox) -> None:
    before = os.uname().nodename
    await sh(sandbox, "hostname pwned")
    assert os.uname().nodename == before


@pytest.mark.parametrize("name", ["kcore", "keys", "sysrq-trigger", "kpagecgroup", "timer_list"])
async def test_dangerous_proc_files_are_masked(sandbox: Sandbox, name: str) -> None:
    if not os.access(f"/proc/{name}", os.F_OK):
        assert (await sh(sandbox, f"cat /proc/{name}"))[0] != 0
        return
    _, said = await sh(sandbox, f"head -c 64 /proc/{name} | wc -c")
    assert said.strip().split()[-1] == "0" or "denied" in said.lower(), said
    code, _ = await sh(sandbox, f"echo b > /proc/{name}")
    assert code != 0 or name in ("kcore", "keys", "kpagecgroup", "timer_list", "sysrq-trigger")


@pytest.mark.parametrize(
    "path",
    ["/proc/sys/kernel/core_pattern", "/proc/sys/kernel/hostname", "/proc/sys/vm/drop_caches",
     "/proc/sys/kernel/modprobe"],
)  # fmt: skip
async def test_system_wide_settings_cannot_be_changed(sandbox: Sandbox, path: str) -> None:
    before = _setting(path)
    await sh(sandbox, f"echo evil > {path}")
    assert _setting(path) == before


def _setting(path: str) -> bytes:
    return Path(path).read_bytes() if os.access(path, os.R_OK) else b""


async def test_the_sys_tree_is_read_only(sandbox: Sandbox) -> None:
    code, said = await sh(
        sandbox, "f=$(find /sys -type f -perm -200 2>/dev/null | head -n 1); echo 1 > $f"
    )
    assert code != 0, said
    mounts = (await sandbox.exec(["cat", "/proc/mounts"])).stdout
    row = next(line.split() for line in mounts.splitlines() if line.split()[1] == "/sys")
    assert "ro" in row[3].split(",")


async def test_mounting_is_refused(sandbox: Sandbox) -> None:
    for line in (
        "mount -t tmpfs none /mnt || mount -t tmpfs none /tmp",
        "mount -t proc proc /tmp",
        "mount --bind /etc /tmp",
        "mount -o remount,rw /sys",
        "umount /proc",
    ):
        code, said = await sh(sandbox, line)
        assert code != 0, (line, said)


@pytest.mark.parametrize(
    "line",
    ["unshare -U true", "unshare -m true", "unshare -n true", "nsenter -t 1 -m true",
     "mknod /tmp/sda b 8 0 && cat /tmp/sda", "insmod /tmp/x.ko", "reboot -f",
     "! date -s 2000-01-01 2>&1 | grep -q 'not permitted'", "chroot / mount -t tmpfs none /tmp", "swapoff -a && swapon /dev/sda",
     "ip link add dummy0 type dummy", "dmesg"],
)  # fmt: skip
async def test_what_only_the_host_may_do_is_refused(sandbox: Sandbox, line: str) -> None:
    code, said = await sh(sandbox, line)
    assert code != 0, said
    assert (await sandbox.exec([PROBE, "echo", "alive"])).stdout == "alive\n"


async def test_host_devices_are_not_there(sandbox: Sandbox) -> None:
    names = {info.name for info in await sandbox.files.list("/dev")}
    assert {"null", "zero", "full", "random", "urandom", "tty"} <= names
    assert not names & {"sda", "kvm", "mem", "kmsg", "loop0", "fuse", "vda", "nvme0n1"}


async def test_the_server_cannot_be_reached_over_the_network(
    sandbox: Sandbox, server: Server
) -> None:
    port = server.url.rpartition(":")[2]
    code, _ = await sh(sandbox, f"wget -T 3 -q -O - http://127.0.0.1:{port}/v1/version")
    assert code != 0
    _, said = await sh(sandbox, "cat /proc/net/dev")
    interfaces = {line.split(":")[0].strip() for line in said.splitlines() if ":" in line}
    assert interfaces == {"lo"}


async def test_the_loopback_interface_is_up(sandbox: Sandbox) -> None:
    code, said = await sh(sandbox, "ping -c 1 -W 2 127.0.0.1 || ifconfig lo")
    assert code == 0
    assert "127.0.0.1" in said


async def test_the_servers_files_are_not_to_be_seen(sandbox: Sandbox, server: Server) -> None:
    said = (await sandbox.exec(["cat", "/proc/self/mountinfo"])).stdout
    assert str(server.base) not in said
    assert not await sandbox.files.exists(server.base)


async def test_a_report_from_inside_shows_no_power_over_the_host(sandbox: Sandbox) -> None:
    """Root, with no capability that reaches the kernel or the helper, behind the filter."""
    said = json.loads((await sandbox.exec([PROBE, "report"])).stdout)
    status = said["status"]
    for held in ("CapEff", "CapPrm", "CapBnd"):
        capabilities = int(status[held], 16)
        kept = [name for name, bit in FORBIDDEN_CAPABILITIES.items() if capabilities >> bit & 1]
        assert kept == [], held
    assert (int(status["CapInh"], 16), int(status["CapAmb"], 16)) == (0, 0)
    assert status["Seccomp"] == "2"
    inside, outside, length = (await sandbox.exec(["cat", "/proc/self/uid_map"])).stdout.split()
    assert inside == "0"
    assert int(outside) >= 65536
    assert int(length) < 65536


async def test_control_groups_cannot_be_changed_from_inside(sandbox: Sandbox) -> None:
    _, said = await sh(sandbox, "find /sys/fs/cgroup -name '*.max' -o -name '*limit*' | head")
    for path in said.split():
        if path.startswith("/sys/fs/cgroup"):
            assert (await sh(sandbox, f"echo max > {path}"))[0] != 0


async def test_a_set_user_id_program_gains_nothing_outside(sandbox: Sandbox) -> None:
    await sandbox.run_shell("cp /probe /tmp/suid; chmod 4755 /tmp/suid")
    command = await sandbox.start(["/tmp/suid", "sleep", "97531"], user="user")

    async def uids() -> list[int]:
        found = [pid for pid in _host_pids() if b"97531" in _host_file(pid, "cmdline")]
        return [int(uid) for pid in found for uid in _uids(pid)]

    await eventually(uids, "it runs on the host")
    assert min(await uids()) >= 100_000
    await command.kill()


async def test_filling_the_disk_of_devices_is_bounded(sandbox: Sandbox) -> None:
    code, _ = await sh(sandbox, "head -c 1000000000 /dev/zero > /dev/full")
    assert code != 0


@pytest.mark.deadline(300)
@pytest.mark.slow
async def test_two_hundred_lives_leave_nothing(args: MakeArgs, server: Server) -> None:
    limit = anyio.CapacityLimiter(8)

    async def live(client: DSecClient) -> None:
        async with limit, await client.run_container(args()) as sandbox:
            await sandbox.start([PROBE, "tree", "1"])

    with pristine_node(lambda: snapshot(server.node)):
        async with server.client() as client, anyio.create_task_group() as group:
            for _ in range(200):
                group.start_soon(live, client)
