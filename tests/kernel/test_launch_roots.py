"""`aether launch` on hostile roots: each starts, nothing outside is touched, what is the sandbox's own stays."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.kernel.launching import (
    MASKED,
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
)
from tests.kernel.odd_roots import NAMES, SHAPES, Outside, loop, put_aside

__all__ = ["aether", "aether_that_fails", "box", "launcher", "layer", "layers", "node", "probe"]
pytestmark = [pytest.mark.needs_root, pytest.mark.adversarial]


@pytest.fixture
def outside(node: Node) -> Outside:
    return Outside(node.home / "outside")


def started(
    node: Node, launcher: Launcher, layers: Layers, change: Callable[[Path], object]
) -> Box:
    spec = node.spec(layers=[str(layers.make(change)), str(node.layer)])
    return Box(spec, launcher.launch(spec))


def host_view(box: Box, path: str) -> os.stat_result:
    """What is at a path inside; its last part is not followed, as a link would lead into the host."""
    return Path(f"/proc/{box.pid}/root/{path}").lstat()


def covered(box: Box) -> set[str]:
    """Where there are mounts."""
    return {line.split()[4] for line in box.read("/proc/self/mountinfo").splitlines()}


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", ["proc", "sys", "dev"])
def test_what_stands_where_something_is_mounted_gives_way(
    node: Node, launcher: Launcher, layers: Layers, outside: Outside, name: str, shape: str
) -> None:
    def change(tree: Path) -> None:
        SHAPES[shape](tree / name, outside)

    box = started(node, launcher, layers, change)
    assert stat.S_ISDIR(host_view(box, name).st_mode)
    existing = {path for path in MASKED if Path(path).exists()}
    assert {"/proc", "/sys", "/dev", "/dev/shm", "/dev/pts", *existing} <= covered(box)
    assert box.probe("stat", "/dev/null") == {"/dev/null": "0:0:666"}
    end(box, launcher, node)
    assert outside.untouched()


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", ["etc", "tmp"])
def test_what_stands_where_nothing_is_mounted_stays(
    node: Node, launcher: Launcher, layers: Layers, outside: Outside, name: str, shape: str
) -> None:
    made: list[tuple[int, str]] = []

    def change(tree: Path) -> None:
        place = put_aside(tree / name)
        SHAPES[shape](place, outside)
        target = str(place.readlink()) if place.is_symlink() else ""
        made.append((stat.S_IFMT(place.lstat().st_mode), target))

    box = started(node, launcher, layers, change)
    place = Path(f"/proc/{box.pid}/root/{name}")
    target = str(place.readlink()) if place.is_symlink() else ""
    assert made == [(stat.S_IFMT(place.lstat().st_mode), target)]
    assert box.read("/proc/sys/kernel/hostname") == f"{box.spec.hostname}\n"
    end(box, launcher, node)
    assert outside.untouched()


@pytest.mark.parametrize("target", ["/usr/etc", "usr/etc", "../../../usr/etc", "hop"])
def test_names_are_written_where_a_link_leads_inside(
    node: Node, launcher: Launcher, layers: Layers, target: str
) -> None:
    def change(tree: Path) -> None:
        (tree / "usr/etc").mkdir(parents=True)
        (tree / "hop").symlink_to("/usr/../usr/etc")
        put_aside(tree / "etc").symlink_to(target)

    box = started(node, launcher, layers, change)
    for directory in ("/etc", "/usr/etc"):
        assert box.read(f"{directory}/hostname") == f"{box.spec.hostname}\n"
        assert box.read(f"{directory}/machine-id") == f"{box.spec.machine_id}\n"
    assert stat.S_ISLNK(host_view(box, "etc").st_mode)
    end(box, launcher, node)


@pytest.mark.parametrize("target", ["/dev/shm", "/proc/sys/kernel", "/proc/1/root", "/proc/self"])
def test_names_are_not_written_into_what_is_mounted(
    node: Node, launcher: Launcher, layers: Layers, target: str
) -> None:
    def change(tree: Path) -> None:
        put_aside(tree / "etc").symlink_to(target)

    box = started(node, launcher, layers, change)
    assert box.read("/proc/sys/kernel/hostname") == f"{box.spec.hostname}\n"
    names = ("/dev/shm/hosts", "/dev/shm/hostname", "/hostname", "/proc/self/hosts")
    assert set(box.probe("stat", *names).values()) == {"ENOENT"}
    end(box, launcher, node)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    "lead",
    [loop, lambda place: place.symlink_to("x" * 300), lambda place: place.symlink_to("no/x")],
)
def test_a_name_that_leads_nowhere_is_replaced(
    node: Node, launcher: Launcher, layers: Layers, name: str, lead: Callable[[Path], None]
) -> None:
    box = started(node, launcher, layers, lambda tree: lead(tree / "etc" / name))
    assert stat.S_ISREG(host_view(box, f"etc/{name}").st_mode)
    assert box.read(f"/etc/{name}").strip()
    end(box, launcher, node)


@pytest.mark.parametrize("name", NAMES)
def test_a_name_that_leads_out_of_the_root_touches_nothing(
    node: Node, launcher: Launcher, layers: Layers, outside: Outside, name: str
) -> None:
    def change(tree: Path) -> None:
        (tree / "etc" / name).symlink_to(f"{'../' * 40}{outside.home}/{name}")

    box = started(node, launcher, layers, change)
    assert stat.S_ISREG(host_view(box, f"etc/{name}").st_mode)
    end(box, launcher, node)
    assert outside.untouched()


OWN: dict[str, tuple[Callable[[Path], object], Callable[[int], bool]]] = {
    "pipe": (os.mkfifo, stat.S_ISFIFO),
    "directory": (Path.mkdir, stat.S_ISDIR),
    "link": (lambda place: place.symlink_to("/empty"), stat.S_ISLNK),
    "link-into-proc": (lambda place: place.symlink_to("/proc/sys/kernel/hostname"), stat.S_ISLNK),
    "link-to-a-pipe": (lambda place: place.symlink_to("/pipe"), stat.S_ISLNK),
}


@pytest.mark.parametrize("kind", OWN)
def test_a_name_that_is_something_else_stays(
    node: Node, launcher: Launcher, layers: Layers, kind: str
) -> None:
    make, is_kind = OWN[kind]

    def change(tree: Path) -> None:
        (tree / "empty").touch()
        os.mkfifo(tree / "pipe")
        for name in NAMES:
            make(tree / "etc" / name)

    box = started(node, launcher, layers, change)
    assert all(is_kind(host_view(box, f"etc/{name}").st_mode) for name in NAMES)
    assert box.read("/empty") == ""
    assert box.read("/proc/sys/kernel/hostname") == f"{box.spec.hostname}\n"
    end(box, launcher, node)
