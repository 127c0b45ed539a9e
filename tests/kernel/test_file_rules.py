"""File rules against root inside: each attack works first without the rule that stops it."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from dsec.wire.launch import LaunchFileRule, LaunchReply
from tests.kernel.launching import (
    Box,
    Launcher,
    Layers,
    Node,
    aether,
    end,
    launcher,
    layer,
    layers,
    node,
    probe,
)

__all__ = ["aether", "launcher", "layer", "layers", "node", "probe"]
pytestmark = [pytest.mark.needs_root, pytest.mark.adversarial]

SECRET = "the answer is 42"
Under = Callable[..., Box]
Refused = Callable[..., LaunchReply]


def furnish(tree: Path) -> None:
    """A secret in a file, tools of a grader, and a shell to attack them with."""
    shutil.copy("/usr/bin/busybox", tree / "bin/busybox")
    for name in ("proc", "sys", "dev", "tmp", "data/deep", "tests/unit"):
        (tree / name).mkdir(parents=True)
    (tree / "data/deep/answers").write_text(SECRET)
    (tree / "tests/unit/check").write_text(SECRET)
    (tree / "tests/run").write_text("#!/bin/busybox sh\necho ran\n")
    (tree / "tests/run").chmod(0o755)
    (tree / "way").symlink_to("data/deep")
    (tree / "one").write_text(SECRET)
    os.link(tree / "one", tree / "other")


@pytest.fixture
def furnished(layers: Layers) -> Path:
    return layers.make(furnish)


@pytest.fixture
def under(node: Node, launcher: Launcher, furnished: Path) -> Iterator[Under]:
    """Starts sandboxes with rules: path -> access."""
    boxes: list[Box] = []

    def start(**rules: str) -> Box:
        spec = node.spec(layers=[str(furnished)], files=listed(rules))
        boxes.append(Box(spec, launcher.launch(spec)))
        return boxes[-1]

    yield start
    for box in boxes:
        end(box, launcher, node)


@pytest.fixture
def refused(node: Node, launcher: Launcher, furnished: Path) -> Refused:
    def start(**rules: str) -> LaunchReply:
        spec = node.spec(layers=[str(furnished)], files=listed(rules))
        reply = launcher.launch(spec)
        assert reply.pid == 0
        assert not node.left(spec)
        return reply

    return start


def listed(rules: dict[str, str]) -> list[LaunchFileRule]:
    """`data__deep`: /data/deep."""
    found = ((f"/{name.replace('__', '/')}", access) for name, access in rules.items())
    return [LaunchFileRule(path=path, access=access) for path, access in found]


def shell(box: Box, line: str, user: str = "root") -> tuple[int, str]:
    path = (
        "export PATH=/bin; for a in ls cat cp mv rm ln dd mkdir chmod chown find mount umount tar"
    )
    aliases = f'{path} touch sh unshare chroot grep; do alias $a="busybox $a"; done\n{line}'
    return box.run("/bin/busybox", "sh", "-c", aliases, user=user)


READS = {
    "it is read": "cat /data/deep/answers",
    "it is made readable": "chmod 777 /data/deep/answers; cat /data/deep/answers",
    "it is made one's own": "chown 0:0 /data/deep/answers; cat /data/deep/answers",
    "it is copied": "cp /data/deep/answers /tmp/copy; cat /tmp/copy",
    "it is given another name": "ln /data/deep/answers /data/deep/alias; cat /data/deep/alias",
    "it is renamed": "mv /data/deep/answers /data/deep/moved; cat /data/deep/moved",
    "what it is in is renamed": "mv /data/deep /data/gone; cat /data/gone/answers",
    "what that is in is renamed": "mv /data /gone; cat /gone/deep/answers",
    "by a link": "ln -s /data/deep/answers /tmp/way; cat /tmp/way",
    "by a link to what it is in": "ln -s /data /tmp/way; cat /tmp/way/deep/answers",
    "from the directory it is in": "cd /data/deep; cat answers",
    "by a descriptor": "exec 3</data/deep/answers; cat <&3",
    "by /proc/self/fd": "exec 3</data/deep; cat /proc/self/fd/3/answers",
    "by a process's root": "cat /proc/self/root/data/deep/answers",
    "by a process's directory": "cd /data/deep; cat /proc/self/cwd/answers",
    "in an archive": "tar -cf /tmp/all /data; cat /tmp/all",
    "by finding it": "find / -xdev -name answers -exec busybox cat {} ';'",
    "by a root of one's own": "cd /data; chroot . /../bin/busybox cat deep/answers; cat deep/answers",
    "by opening it for both": "exec 3<>/data/deep/answers; cat <&3",
}
WITHOUT_ROOM = {
    # What busybox's mv does when the kernel says EXDEV: it copies. Here it is the rename itself.
    "by mounting it": "mount --bind /data /tmp; cat /tmp/deep/answers",
    "by taking the cover off": "umount /data/deep/answers; cat /data/deep/answers",
    "by taking it off lazily": "umount -l /data/deep; umount -l /data; cat /data/deep/answers",
    "in a namespace of one's own": "unshare -rm sh -c 'umount /data/deep/answers; cat /data/deep/answers'",
}


@pytest.mark.parametrize("attack", [*READS.values()], ids=[*READS])
def test_a_denied_file_is_read_by_no_route(under: Under, attack: str) -> None:
    assert SECRET in shell(under(), attack)[1]
    box = under(data__deep__answers="deny")
    assert SECRET not in shell(box, attack)[1]


@pytest.mark.parametrize("attack", [*READS.values()], ids=[*READS])
def test_a_denied_directory_is_read_by_no_route(under: Under, attack: str) -> None:
    assert SECRET not in shell(under(data__deep="deny"), attack)[1]


@pytest.mark.parametrize("attack", [*WITHOUT_ROOM.values()], ids=[*WITHOUT_ROOM])
def test_what_covers_it_stays(under: Under, attack: str) -> None:
    # Without a rule the last of these commands reads it, whatever the others are answered.
    assert (
        SECRET in shell(under(), attack.replace("/tmp/deep", "/data/deep"))[1]
        or "unshare" in attack
    )
    assert SECRET not in shell(under(data__deep__answers="deny"), attack)[1]


def test_denied_is_said_to_root_too(under: Under) -> None:
    box = under(data__deep__answers="deny", tests="deny")
    for line in ("cat /data/deep/answers", "ls /tests", "cat /tests/run", "/tests/run"):
        for user in ("root", "user"):
            code, said = shell(box, line, user)
            assert code != 0, line
            assert "ermission denied" in said, line


def test_nothing_of_it_is_in_what_was_written(under: Under) -> None:
    box = under(data__deep__answers="deny")
    attack = "echo mine > /data/deep/answers; mv /data/deep /data/x; cp -r /data /tmp/all; true"
    shell(box, attack)
    written = [path for path in Path(box.spec.upper).rglob("*") if path.is_file()]
    assert all(SECRET not in path.read_text() for path in written)
    assert all("mine" not in path.read_text() for path in written)


def test_what_is_denied_and_missing_cannot_be_made(under: Under) -> None:
    make = "mkdir -p /late/er; echo x > /late/er/file; cat /late/er/file"
    assert shell(under(), make) == (0, "x\n")
    box = under(late__er__file="deny")
    for attack in (
        make,
        "rm -rf /late; " + make,
        "mv /late /later; " + make,
        "mv /late/er/file /late/er/other; " + make,
    ):
        assert "x\n" not in shell(box, attack)[1].replace("x: ", ""), attack


WRITES = {
    "it is written": "echo bad > /tests/unit/check",
    "it is removed": "rm -f /tests/unit/check; echo bad > /tests/unit/check",
    "it is replaced": "echo bad > /tmp/bad; mv -f /tmp/bad /tests/unit/check",
    "what it is in is replaced": "mv /tests /away; mkdir -p /tests/unit; echo bad > /tests/unit/check",
    "what it is in is removed": "rm -rf /tests; mkdir -p /tests/unit; echo bad > /tests/unit/check",
    "by another name": "ln /tests/unit/check /tests/b || ln /tests/unit/check /b; echo bad > /b; "
    "echo bad > /tests/b",
    "by a link in its place": "echo bad > /tmp/bad; ln -sf /tmp/bad /tests/unit/check",
    "by a descriptor": "exec 3</tests; echo bad > /proc/self/fd/3/unit/check",
    "by another mount of it": "mount --bind / /tmp; echo bad > /tests/unit/check",
    "by making it writable": "mount -o remount,rw,bind /tests/unit; echo bad > /tests/unit/check",
}


@pytest.mark.parametrize("attack", [*WRITES.values()], ids=[*WRITES])
@pytest.mark.parametrize("what", ["tests", "tests__unit", "tests__unit__check"])
def test_what_is_read_only_says_what_it_said(under: Under, attack: str, what: str) -> None:
    free = under()
    shell(free, attack)
    changed = shell(free, "cat /tests/unit/check /tests/b /b")[1]
    assert "bad" in changed
    box = under(**{what: "read_only"})
    shell(box, attack)
    assert shell(box, "cat /tests/unit/check") == (0, SECRET)


def test_what_is_not_ruled_is_as_ever(under: Under) -> None:
    box = under(data__deep__answers="deny", tests__unit="read_only")
    work = "echo a > /data/deep/b && mv /data/deep/b /data/c && mv /data/c /tmp/c && cat /tmp/c"
    assert shell(box, work) == (0, "a\n")
    assert shell(box, "mkdir /data/new && mv /data/new /data/newer && rm -r /data/newer") == (0, "")
    assert shell(box, "echo b > /tests/run && cat /tests/run") == (0, "b\n")


def test_no_program_runs_from_there(under: Under) -> None:
    assert shell(under(), "/tests/run") == (0, "ran\n")
    box = under(tests="no_exec")
    assert shell(box, "/tests/run")[0] == 126
    assert shell(box, "cp /bin/busybox /tests/b; /tests/b echo ran")[0] == 126
    assert shell(box, "mv /tests /free; /free/run")[0] != 0
    assert shell(box, "cat /tests/unit/check") == (0, SECRET)


def test_rules_lie_in_one_another(under: Under) -> None:
    box = under(tests="read_only", tests__unit="no_exec", tests__unit__check="deny")
    assert shell(box, "cat /tests/unit/check")[0] != 0
    assert shell(box, "echo x > /tests/unit/x")[0] != 0
    assert shell(box, "/tests/run") == (0, "ran\n")
    assert shell(under(tests="read_only", tests__none="deny"), "echo x > /tests/none")[0] != 0


@pytest.mark.parametrize(
    ("rules", "words"),
    [
        ({"way": "deny"}, "behind a symbolic link"),
        ({"way__answers": "deny"}, "behind a symbolic link"),
        ({"one": "deny"}, "hard links"),
        ({"none": "read_only"}, "nothing of that name"),
        ({"none__no": "no_exec"}, "nothing of that name"),
        ({"one__no": "deny"}, "no directory"),
    ],
)
def test_what_cannot_hold_is_refused(refused: Refused, rules: dict[str, str], words: str) -> None:
    reply = refused(**rules)
    assert words in reply.message
    assert f"/{[*rules][-1].split('__')[0]}" in reply.message


def test_names_within_a_denied_directory_are_no_others(
    node: Node, launcher: Launcher, layers: Layers
) -> None:
    def change(tree: Path) -> None:
        furnish(tree)
        os.link(tree / "data/deep/answers", tree / "data/deep/same")

    layer, files = str(layers.make(change)), listed({"data__deep": "deny"})
    spec = node.spec(layers=[layer], files=files)
    end(Box(spec, launcher.launch(spec)), launcher, node)
    reply = launcher.launch(node.spec(layers=[layer], files=listed({"data__deep__same": "deny"})))
    assert "hard links" in reply.message
