"""What programs in a sandbox are told of their limits, by the helper alone: no edge, no trust."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from dsec.wire.launch import CgroupDir, LaunchSpec, Meters
from tests.kernel.launching import (
    Box,
    Launcher,
    Node,
    aether,
    aether_that_fails,
    cgroup_mount,
    end,
    launcher,
    layer,
    node,
    probe,
    wait_until,
)

__all__ = ["aether", "aether_that_fails", "launcher", "layer", "node", "probe"]
pytestmark = pytest.mark.needs_root
MIB = 1 << 20
ONLINE = "/sys/devices/system/cpu/online"


@pytest.fixture
def memory(node: Node) -> Iterator[Path]:
    """A directory of the memory hierarchy, for this test's sandboxes."""
    place = cgroup_mount("cgroup", "memory") / node.v2.name
    place.mkdir()
    yield place
    for child in place.iterdir():
        if child.is_dir():
            child.rmdir()
    place.rmdir()


def truthful(node: Node, memory: Path, limit_mib: int = 64) -> LaunchSpec:
    """A sandbox with a limit of memory and a share of time, that is shown both.

    Its share is in a plain file: no control group is needed to be told of one.
    """
    spec = node.spec()
    group = memory / spec.id
    writes = [("memory.limit_in_bytes", str(limit_mib * MIB))]
    spec.cgroups.append(CgroupDir(path=str(group), writes=writes))
    spec.work_v1.append(f"{group}/tasks")
    share = Path(spec.socket).with_name("share")
    share.write_text("50000 100000\n")
    spec.meters = Meters(
        memory_limit=f"{group}/memory.limit_in_bytes",
        memory_usage=f"{group}/memory.usage_in_bytes",
        memory_stat=f"{group}/memory.stat",
        cpu_time=str(Path(spec.work_v2) / "cpu.stat"),
        cpu_limit=str(share),
    )
    return spec


def meminfo(box: Box) -> dict[str, int]:
    lines = (line.split() for line in box.read("/proc/meminfo").splitlines())
    return {words[0].rstrip(":"): int(words[1]) for words in lines}


def test_the_limit_is_the_memory_there_is(node: Node, launcher: Launcher, memory: Path) -> None:
    spec = truthful(node, memory)
    box = Box(spec, launcher.launch(spec))
    told = meminfo(box)
    assert told["MemTotal"] == 64 * 1024
    assert 0 < told["MemFree"] <= told["MemAvailable"] <= told["MemTotal"]
    (memory / spec.id / "memory.limit_in_bytes").write_text(str(128 * MIB))
    wait_until(lambda: meminfo(box)["MemTotal"] == 128 * 1024, lambda: meminfo(box))
    end(box, launcher, node)


def test_there_are_as_many_processors_as_its_share_asks_for(
    node: Node, launcher: Launcher, memory: Path
) -> None:
    spec = truthful(node, memory)
    box = Box(spec, launcher.launch(spec))
    assert (processors(box), box.read(ONLINE)) == ({1}, "0\n")
    assert spec.meters is not None
    Path(spec.meters.cpu_limit).write_text("150000 100000\n")
    two = min(2, len(os.sched_getaffinity(0)))
    wait_until(lambda: processors(box) == {two}, lambda: processors(box))
    assert len(os.sched_getaffinity(box.pid)) == len(os.sched_getaffinity(0))
    end(box, launcher, node)


def processors(box: Box) -> set[int]:
    """How many there are, by all that tells."""
    listed = [line.split()[0] for line in box.read("/proc/cpuinfo").splitlines() if line]
    counted = [line.split()[0] for line in box.read("/proc/stat").splitlines()]
    allowed = box.read("/proc/self/status").split("Cpus_allowed:")[1].split()[0]
    return {
        listed.count("processor"),
        sum(name.startswith("cpu") for name in counted) - 1,
        int(allowed.replace(",", ""), 16).bit_count(),
    }


def test_time_begins_with_the_sandbox(node: Node, launcher: Launcher, memory: Path) -> None:
    for _ in range(2):  # each its own
        spec = truthful(node, memory)
        earlier, begun = time.time(), time.clock_gettime(time.CLOCK_BOOTTIME)
        box = Box(spec, launcher.launch(spec))
        up, idle = map(float, box.read("/proc/uptime").split())
        assert 0 <= up <= time.clock_gettime(time.CLOCK_BOOTTIME) - begun
        assert 0 <= idle <= up
        # What is said of processes goes by the same clock.
        started = int(box.read("/proc/1/stat").rpartition(")")[2].split()[19]) / 100
        assert started <= up
        (line,) = (s for s in box.read("/proc/stat").splitlines() if s.startswith("btime"))
        assert int(earlier) - 1 <= int(line.split()[1]) <= time.time()
        end(box, launcher, node)


def test_a_host_is_not_in_the_time_of_its_sandboxes(node: Node, launcher: Launcher) -> None:
    before = Path("/proc/self/ns/time").readlink()
    spec = node.spec()
    box = Box(spec, launcher.launch(spec))
    assert Path(f"/proc/{box.pid}/ns/time").readlink() != before
    assert Path(f"/proc/{launcher.process.pid}/ns/time").readlink() == before
    end(box, launcher, node)


def test_the_load_is_its_own(node: Node, launcher: Launcher, memory: Path) -> None:
    spec = truthful(node, memory)
    assert spec.meters is not None
    used = Path(spec.socket).with_name("used")
    used.write_text("user_usec 0\nsystem_usec 0\n")
    spec.meters.cpu_time = str(used)
    box = Box(spec, launcher.launch(spec))
    averages, processes, last = loads(box)
    assert averages == [0, 0, 0]
    running, there = map(int, processes.split("/"))
    assert 1 <= running <= there <= 16
    assert last < 1000  # of its own ids, not the host's
    used.write_text("user_usec 600000000\nsystem_usec 0\n")
    (one, five, fifteen), _, _ = loads(box)
    assert one > five > fifteen > 0
    again, _, later = loads(box)  # nothing was used since
    assert again[0] <= one
    assert later > last
    end(box, launcher, node)


def loads(box: Box) -> tuple[list[float], str, int]:
    *averages, processes, last = box.read("/proc/loadavg").split()
    return [float(average) for average in averages], processes, int(last)


def test_without_meters_nothing_is_mounted(node: Node, launcher: Launcher) -> None:
    spec = node.spec()
    box = Box(spec, launcher.launch(spec))
    assert " fuse " not in box.read("/proc/self/mountinfo")
    assert meminfo(box)["MemTotal"] == _host_memory_kb()
    end(box, launcher, node)


def _host_memory_kb() -> int:
    return int(Path("/proc/meminfo").read_text().split()[1])


def test_everybody_may_read_and_nobody_write(node: Node, launcher: Launcher, memory: Path) -> None:
    spec = truthful(node, memory)
    box = Box(spec, launcher.launch(spec))
    code, output = box.run("/bin/probe", "cat", "/proc/meminfo", user="user")
    assert code == 0
    assert "MemTotal:          65536 kB" in output
    for path in ("/proc/meminfo", "/proc/stat", ONLINE):
        said = box.probe("write", path, "x")
        assert said["write"] != "0", (path, said)
    shown = [line for line in box.read("/proc/self/mountinfo").splitlines() if " fuse " in line]
    assert [line.split()[4] for line in shown] == [
        "/proc/meminfo",
        "/proc/cpuinfo",
        "/proc/stat",
        ONLINE,
        "/proc/uptime",
        "/proc/loadavg",
    ]
    assert all(line.split()[5].startswith("ro,nosuid,nodev,noexec") for line in shown)
    end(box, launcher, node)


@pytest.mark.adversarial
def test_neither_device_nor_control_files_are_to_be_had_inside(
    node: Node, launcher: Launcher, memory: Path
) -> None:
    spec = truthful(node, memory)
    box = Box(spec, launcher.launch(spec))
    assert box.probe("cat", "/dev/fuse") == {"open": "ENOENT"}
    assert box.probe("attack")["fds_of_1"] == "EACCES"
    held = {entry.readlink().name for entry in Path(f"/proc/{box.pid}/fd").iterdir()}
    assert {"fuse", "memory.stat", "cpu.stat", "share"} <= held
    assert "fuse" not in str(box.probe("list", "/proc/self/fd"))
    end(box, launcher, node)


def test_a_killed_sandbox_takes_its_file_system_along(
    node: Node, launcher: Launcher, memory: Path
) -> None:
    before = connections()
    spec = truthful(node, memory)
    box = Box(spec, launcher.launch(spec))
    (added,) = connections() - before
    assert meminfo(box)["MemTotal"] == 64 * 1024
    end(box, launcher, node)
    wait_until(lambda: added not in connections(), lambda: added)


def connections() -> set[str]:
    """Devices of all FUSE file systems of this host, by what is mounted of each anywhere."""
    found = set()
    for table in Path("/proc").glob("[0-9]*/mountinfo"):
        with contextlib.suppress(OSError):
            lines = table.read_text().splitlines()
            found |= {line.split()[2] for line in lines if " - fuse limits " in line}
    return found


@pytest.mark.parametrize("step", ["open meters", "show truth"])
def test_a_step_that_fails_leaves_nothing(
    node: Node, aether_that_fails: Path, memory: Path, step: str
) -> None:
    launcher = Launcher(aether_that_fails, AETHER_FAIL_AT=step)
    spec = truthful(node, memory)
    reply = launcher.launch(spec)
    assert (reply.pid, reply.step) == (0, step), reply
    assert node.left(spec) == []
    assert launcher.close() == 0
