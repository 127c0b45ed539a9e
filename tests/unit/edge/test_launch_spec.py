from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import msgspec

from dsec.edge.backends.launch_spec import (
    PATH,
    CommandLimits,
    HostFacts,
    launch_spec,
    machine_id,
    processors_of,
)
from dsec.edge.record import SandboxRecord
from dsec.images.records import DirectoryMark, Environment
from dsec.images.records import view as image_view
from dsec.linux.cgroup.interface import Layout
from dsec.wire.launch import LaunchSpec, Meters
from dsec.wire.sandbox import Limits, SandboxSpec
from tests.unit.edge.node import image

WORK = "work"
HOST = HostFacts(nofile_max=20_000, fuse=True)
LAYOUT = Layout(base="dsec-n001", v2="/cg", v2_controllers=["memory", "cpu", "pids"])


def record_of(spec: SandboxSpec, **of_image: Any) -> SandboxRecord:
    shown = msgspec.structs.replace(image_view(image("debian")), **of_image)
    return SandboxRecord(
        id="sbxn0010000000000000000",
        project="p",
        spec=spec,
        environment=Environment(image=shown),
        created_at=0.0,
        uid_base=1 << 20,
        directory="/state/sandboxes/s",
        socket="/run/s",
    )


def made(spec: SandboxSpec, *, mends: Sequence[DirectoryMark] = (), **of_image: Any) -> LaunchSpec:
    record = record_of(spec, **of_image)
    return launch_spec(record, ["/l/2", "/l/1"], LAYOUT, CommandLimits(), HOST, mends)


def test_the_specification_comes_before_the_image_and_that_before_defaults() -> None:
    plain = made(SandboxSpec(image="debian"))
    assert (plain.user, plain.workdir, plain.env) == ("root", "/", {"PATH": PATH})
    assert plain.hostname == plain.id
    assert re.fullmatch("[0-9a-f]{32}", plain.machine_id)
    assert plain.machine_id == machine_id(plain.id) != machine_id("another")
    of_image: dict[str, Any] = {"user": "app", "workdir": "/srv", "env": {"PATH": "/x", "A": "1"}}
    imaged = made(SandboxSpec(image="debian"), **of_image)
    assert (imaged.user, imaged.workdir, imaged.env) == ("app", "/srv", {"PATH": "/x", "A": "1"})
    asked = SandboxSpec(
        image="debian", init_user="me", workdir="/home", env={"A": "2"}, hostname="box"
    )
    chosen = made(asked, **of_image)
    assert (chosen.user, chosen.workdir, chosen.hostname) == ("me", "/home", "box")
    assert chosen.env == {"PATH": "/x", "A": "2"}


def test_limits_become_groups_and_descriptors_stay_below_the_hosts() -> None:
    got = made(SandboxSpec(image="debian", limits=Limits(memory_mb=64, cpu_cores=2, pids=9)))
    assert got.cgroups[2].writes == [
        ("memory.max", str(64 << 20)),
        ("cpu.max", "200000 100000"),
        ("pids.max", "9"),
    ]
    assert got.rlimits == {"nofile": (20_000, 20_000), "core": (0, 0)}


def test_it_is_shown_what_its_groups_hold_it_to() -> None:
    spec = made(SandboxSpec(image="debian"))
    top = "/cg/dsec-n001/sbxn0010000000000000000"
    assert spec.meters == Meters(
        memory_limit=f"{top}/{WORK}/memory.max",
        memory_usage=f"{top}/{WORK}/memory.current",
        memory_stat=f"{top}/{WORK}/memory.stat",
        cpu_time=f"{top}/cpu.stat",
        cpu_limit=f"{top}/{WORK}/cpu.max",
    )


def test_a_sandbox_is_moved_to_as_many_processors_as_it_may_use() -> None:
    def count(cores: float) -> int:
        spec = SandboxSpec(image="debian", limits=Limits(cpu_cores=cores))
        return len(processors_of(record_of(spec), [0, 2, 4, 6]))

    assert [count(cores) for cores in (0.1, 1, 1.5, 4, 64)] == [1, 1, 2, 4, 4]


def test_best_effort_runs_when_nobody_else_does() -> None:
    group = made(SandboxSpec(image="debian", qos="be")).cgroups[2]
    assert ("cpu.weight", "1") in group.writes


def test_what_tells_of_the_host_is_hidden() -> None:
    got = made(SandboxSpec(image="debian"))
    assert {"/proc/kallsyms", "/proc/kcore", "/sys/firmware", "/sys/kernel/debug"} <= set(
        got.masked_paths
    )
    assert "/proc/sys" in got.readonly_paths
    assert "CAP_SYS_ADMIN" not in got.capabilities
    assert "CAP_MKNOD" not in got.capabilities


def test_layers_keep_their_order() -> None:
    assert made(SandboxSpec(image="debian")).layers == ["/l/2", "/l/1"]
    assert replace(CommandLimits(), max_running=1).max_running == 1


def test_mends_are_handed_on() -> None:
    assert made(SandboxSpec(image="debian")).mends == []
    mend = DirectoryMark(path="/tmp", mode=0o1777, uid=1, gid=2)
    assert made(SandboxSpec(image="debian"), mends=[mend]).mends == [("/tmp", 0o1777, 1, 2)]


def test_with_a_limit_it_writes_to_a_disk_of_its_own() -> None:
    plain = made(SandboxSpec(image="debian"))
    assert plain.upper == "/state/sandboxes/s/upper"
    limited = made(SandboxSpec(image="debian", limits=Limits(disk_mb=64)))
    assert limited.upper == "/state/sandboxes/s/disk/upper"
    assert limited.work == "/state/sandboxes/s/disk/work"
