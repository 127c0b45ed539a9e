"""`aether launch` against the real kernel: what fails leaves nothing, and launchers come and go."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests.kernel.launching import (
    Box,
    Launcher,
    Layers,
    Node,
    aether,
    aether_that_fails,
    box,
    end,
    launcher,
    layer,
    layers,
    node,
    probe,
    remove_cgroup,
    wait_until,
)

__all__ = ["aether", "aether_that_fails", "box", "launcher", "layer", "layers", "node", "probe"]
pytestmark = pytest.mark.needs_root


# Failures leave nothing


def steps_of(micros: dict[str, int]) -> list[str]:
    return [step for step in micros if step not in {"total", "receive mounts"}]


def test_every_step_can_fail_and_leaves_nothing(node: Node, aether_that_fails: Path) -> None:
    launcher = Launcher(aether_that_fails)
    mends = [("/bin", 0o700, 0, 0)]
    spec = node.spec(mends=mends)
    box = Box(spec, launcher.launch(spec))
    end(box, launcher, node)
    assert launcher.close() == 0
    steps = steps_of(box.micros)
    assert len(steps) > 25
    assert "mend directory" in steps
    for step in steps:
        launcher = Launcher(aether_that_fails, AETHER_FAIL_AT=step)
        spec = node.spec(mends=mends)
        reply = launcher.launch(spec)
        assert (reply.pid, reply.step, reply.errno) == (0, step, 5), reply
        assert step in reply.message
        assert node.left(spec) == [], step
        before = sorted(Path(f"/proc/{launcher.process.pid}/fd").iterdir())
        assert launcher.launch(spec).step == step
        assert sorted(Path(f"/proc/{launcher.process.pid}/fd").iterdir()) == before
        assert launcher.close() == 0


def test_a_silent_child_is_given_up(node: Node, aether_that_fails: Path) -> None:
    launcher = Launcher(aether_that_fails, AETHER_STALL_AT="enter root")
    spec = node.spec()
    reply = launcher.launch(spec)
    assert (reply.pid, reply.step) == (0, "await ready")
    assert "silent" in reply.message
    assert node.left(spec) == []
    assert launcher.close() == 0


def link(name: str, target: str) -> Callable[[Path], None]:
    return lambda tree: (tree / name).symlink_to(target)


def test_a_masked_path_behind_a_link_is_refused(
    node: Node, launcher: Launcher, layers: Layers
) -> None:
    layer = layers.make(link("elsewhere", "/etc"))
    spec = node.spec(layers=[str(layer)], masked_paths=["/elsewhere/passwd"])
    reply = launcher.launch(spec)
    assert (reply.pid, reply.step, reply.path) == (0, "mask", "/elsewhere/passwd")
    assert node.left(spec) == []


@pytest.mark.parametrize(
    ("changes", "step", "errno"),
    [
        ({"uid_base": 0}, "check", 0),
        ({"layers": []}, "check", 0),
        ({"upper": "relative"}, "check", 0),
        ({"capabilities": ["CAP_ALL"]}, "confine", 22),
        ({"seccomp": "lenient"}, "confine", 22),
        ({"rlimits": {"nofile": (1, 1 << 40)}}, "confine", 1),
        ({"layers": ["/no/such/layer"]}, "copy layer", 2),
        ({"work_v1": ["/no/such/tasks"]}, "open groups", 2),
        ({"agent_v2": "/no/such/group"}, "clone", 2),
        ({"socket": "/no/such/directory/socket"}, "listen", 2),
    ],
)
def test_what_is_wrong_is_said(
    node: Node, launcher: Launcher, changes: dict[str, Any], step: str, errno: int
) -> None:
    spec = node.spec(**changes)
    reply = launcher.launch(spec)
    assert (reply.pid, reply.step, reply.errno) == (0, step, errno), reply
    assert [path for path in node.left(spec) if path.startswith("/")] == []


def test_a_cgroup_in_use_is_not_taken_over(node: Node, launcher: Launcher) -> None:
    spec = node.spec()
    (node.v2 / spec.id / "busy").mkdir(parents=True)
    reply = launcher.launch(spec)
    assert (reply.pid, reply.step, reply.errno) == (0, "make cgroup", 17)
    assert (node.v2 / spec.id / "busy").exists()
    (node.v2 / spec.id / "busy").rmdir()
    box = Box(spec, launcher.launch(spec))
    end(box, launcher, node)


def test_an_upper_directory_of_the_edge_survives_a_failure(node: Node, launcher: Launcher) -> None:
    spec = node.spec(agent_v2="/no/such/group")
    Path(spec.upper).mkdir()
    (Path(spec.upper) / "kept").write_text("x")
    assert launcher.launch(spec).pid == 0
    assert (Path(spec.upper) / "kept").exists()


def test_a_used_work_directory_is_refused(node: Node, launcher: Launcher) -> None:
    spec = node.spec()
    box = Box(spec, launcher.launch(spec))
    assert box.probe("write", "/kept", "x") == {"write": "0"}
    box.channel.close()
    os.kill(box.pid, signal.SIGKILL)
    launcher.wait_exit(spec.id)
    for group in reversed(spec.cgroups):
        remove_cgroup(Path(group.path))
    Path(spec.socket).unlink()
    reply = launcher.launch(spec)
    assert (reply.pid, reply.step) == (0, "mount overlay"), reply
    again = msgspec.structs.replace(spec, work=spec.work + "-2")
    box = Box(again, launcher.launch(again))
    assert box.read("/kept") == "x"
    end(box, launcher, node)


def test_a_request_that_is_not_one_is_answered(launcher: Launcher) -> None:
    reply = launcher.ask(msgspec.msgpack.encode({"id": 0, "spec": {"id": "x"}}))
    assert (reply.step, reply.pid) == ("read request", 0)
    assert "hostname" in reply.message


def test_descriptor_3_must_be_a_stream_socket(aether: Path) -> None:
    done = subprocess.run([aether, "launch"], capture_output=True, text=True, check=False)
    assert done.returncode == 65
    assert "descriptor 3" in done.stderr


def test_plan_is_shown_without_doing_anything(node: Node, aether: Path) -> None:
    spec = node.spec()
    # By descriptor: nobody may not walk to a checkout in a closed home.
    with aether.open("rb") as binary:
        done = subprocess.run(
            ["aether", "launch", "--plan"],
            executable=f"/proc/self/fd/{binary.fileno()}",
            pass_fds=[binary.fileno()],
            input=msgspec.msgpack.encode(spec),
            capture_output=True,
            check=True,
            user=65534,
        )
    lines = done.stdout.decode().splitlines()
    assert f"host    listen on {spec.socket}" in lines
    assert "inside  mount proc on /proc" in lines
    assert node.left(spec) == []


# Launchers come and go


def test_sandboxes_outlive_a_killed_launcher(node: Node, aether: Path) -> None:
    launcher = Launcher(aether)
    spec = node.spec()
    box = Box(spec, launcher.launch(spec))
    launcher.process.kill()
    launcher.process.wait()
    launcher.edge.close()
    assert box.probe("ids")["uid"] == "0"
    box.channel.close()
    os.kill(box.pid, signal.SIGKILL)
    wait_until(lambda: not Path(spec.agent_v2, "cgroup.procs").read_text(), lambda: box.pid)
    node.clear(spec)


def test_sandboxes_outlive_a_launcher_whose_edge_is_gone(node: Node, aether: Path) -> None:
    launcher = Launcher(aether)
    spec = node.spec()
    box = Box(spec, launcher.launch(spec))
    assert launcher.close() == 0
    assert box.probe("ids")["uid"] == "0"
    box.channel.close()
    os.kill(box.pid, signal.SIGKILL)
    wait_until(lambda: not Path(spec.agent_v2, "cgroup.procs").read_text(), lambda: box.pid)
    node.clear(spec)


def test_nothing_of_the_edge_is_in_a_sandboxs_memory(node: Node, launcher: Launcher) -> None:
    first = node.spec(env={"TOKEN": "secret-of-the-first-" + "sandbox"})
    one = Box(first, launcher.launch(first))
    second = node.spec()
    two = Box(second, launcher.launch(second))
    memory = memory_of(two.pid)
    assert b"secret-of-the-first" not in memory
    assert b"SECRET_OF_THE_EDGE" not in memory
    assert second.socket.encode() in memory  # it was searched where it matters
    end(one, launcher, node)
    end(two, launcher, node)


def memory_of(pid: int) -> bytes:
    pieces = []
    with Path(f"/proc/{pid}/mem").open("rb", buffering=0) as memory:
        for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
            span, rights, *_ = line.split()
            if rights.startswith("rw"):
                first, last = (int(edge, 16) for edge in span.split("-"))
                memory.seek(first)
                pieces.append(memory.read(last - first))
    return b"".join(pieces)


def test_many_launches_leave_the_host_as_it_was(node: Node, launcher: Launcher) -> None:
    def descriptors() -> int:
        return len(list(Path(f"/proc/{launcher.process.pid}/fd").iterdir()))

    def once() -> None:
        spec = node.spec()
        reply = launcher.launch(spec)
        assert reply.pid, reply
        os.kill(reply.pid, signal.SIGKILL)
        assert launcher.wait_exit(spec.id) == signal.SIGKILL
        node.clear(spec)

    once()
    before = descriptors()
    for _ in range(199):
        once()
    assert descriptors() == before
