"""Environments: an image, a workspace and toolkits seen as one file system by a sandbox."""

from __future__ import annotations

import subprocess
from collections.abc import Mapping
from pathlib import Path

import anyio
import pytest

from dsec import DSecClient, ImageProgress, InvalidRequest, LayerView, Sandbox, StorageFull
from tests.contract import image
from tests.contract.capabilities import needs
from tests.contract.conftest import MakeArgs
from tests.contract.expect import refusal
from tests.contract.parts import Parts
from tests.contract.server import Server
from tests.tars import Tar

pytestmark = [needs("layers")]

MIB = 1 << 20
HOLE = 3 << 30


async def contents(sandbox: Sandbox, *paths: str) -> dict[str, str | None]:
    """What files hold; None for what is not there."""
    found: dict[str, str | None] = {}
    for path in paths:
        there = await sandbox.files.exists(path)
        found[path] = (await sandbox.files.read(path)).decode() if there else None
    return found


async def looked(
    client: DSecClient, args: MakeArgs, files: Mapping[str, str | None], **given: object
) -> None:
    """A fresh sandbox has files with these contents (None: does not have them)."""
    async with await client.run_container(args(**given)) as sandbox:
        assert await contents(sandbox, *files) == files


def names(*layers: LayerView) -> list[str]:
    return [layer.name for layer in layers]


# -- what is seen ------------------------------------------------------------------------------


async def test_all_parts_are_seen(client: DSecClient, args: MakeArgs, parts: Parts) -> None:
    work = await parts.workspace({"workspace/task.txt": b"task", "etc/from-work": b"w"})
    one = await parts.toolkit({"opt/one/run": b"1", "opt/shared/one": b"s1"})
    two = await parts.toolkit({"opt/two/run": b"2", "opt/shared/two": b"s2"})
    wanted = {
        "/etc/passwd": image.PASSWD,
        "/workspace/task.txt": "task",
        "/etc/from-work": "w",
        "/opt/one/run": "1",
        "/opt/two/run": "2",
        "/opt/shared/one": "s1",
        "/opt/shared/two": "s2",
    }
    await looked(client, args, wanted, workspace=work.name, toolkits=names(one, two))


async def test_the_last_toolkit_is_on_top(client: DSecClient, args: MakeArgs, parts: Parts) -> None:
    work = await parts.workspace({"a": b"work", "b": b"work", "etc/group": b"work"})
    one = await parts.toolkit({"a": b"one", "c": b"one"})
    two = await parts.toolkit({"a": b"two", "c": b"two"})
    below = {"/b": "work", "/etc/group": "work"}
    for order, top in (((one, two), "two"), ((two, one), "one")):
        wanted = {"/a": top, "/c": top, **below}
        await looked(client, args, wanted, workspace=work.name, toolkits=names(*order))
    await looked(client, args, {"/a": "work", "/c": None}, workspace=work.name)
    await looked(client, args, {"/a": "one", "/b": None}, toolkits=names(one))


async def test_a_toolkit_overrides_a_file_of_the_image(
    client: DSecClient, args: MakeArgs, parts: Parts
) -> None:
    tar = Tar().add("bin/uname", content=b"#!/bin/sh\necho other system\n", mode=0o755)
    tools = await parts.toolkit(tar)
    async with await client.run_container(args(toolkits=names(tools))) as sandbox:
        assert (await sandbox.exec(["/bin/uname"])).stdout == "other system\n"
        assert (await sandbox.exec(["/bin/busybox", "uname"])).stdout == "Linux\n"


async def test_a_whiteout_hides_what_is_below_and_not_what_is_above(
    client: DSecClient, args: MakeArgs, parts: Parts
) -> None:
    work = await parts.workspace({"d/kept": b"w", "d/gone": b"w", "whole/deep/f": b"w"})
    hides = Tar().add("d/.wh.gone").add("etc/.wh.group").add(".wh.whole").add("d/.wh.never-was")
    one = await parts.toolkit(hides)
    two = await parts.toolkit({"d/gone": b"back", "whole/new": b"new"})
    seen = {"/d/kept": "w", "/d/gone": None, "/etc/group": None, "/whole/deep/f": None}
    given = {"workspace": work.name}
    await looked(client, args, seen, toolkits=names(one), **given)
    async with await client.run_container(args(toolkits=names(one), **given)) as sandbox:
        listed = (await sandbox.run_shell("ls -aR /d /etc; ls -a /")).stdout
        assert ".wh." not in listed
        assert "whole" not in listed
        assert (await sandbox.run_shell("echo new > /d/gone && cat /d/gone")).stdout == "new\n"
    seen |= {"/d/gone": "back", "/whole/new": "new"}
    await looked(client, args, seen, toolkits=names(one, two), **given)
    # Below the whiteout, the same toolkit is hidden by it.
    seen |= {"/d/gone": None, "/whole/new": None}
    await looked(client, args, seen, toolkits=names(two, one), **given)


async def test_an_opaque_directory_hides_all_below(
    client: DSecClient, args: MakeArgs, parts: Parts
) -> None:
    work = await parts.workspace({"d/sub/old": b"w", "d/old": b"w", "e/old": b"w"})
    clears = Tar().dirs("d").add("d/.wh..wh..opq").add("d/mine", content=b"m")
    clears.dirs("d/sub").add("d/sub/mine", content=b"m")
    one = await parts.toolkit(clears)
    two = await parts.toolkit({"d/above": b"a"})
    wanted = {
        "/d/mine": "m",
        "/d/sub/mine": "m",
        "/d/above": "a",
        "/d/old": None,
        "/d/sub/old": None,
        "/e/old": "w",
    }
    await looked(client, args, wanted, workspace=work.name, toolkits=names(one, two))


async def test_kinds_replace_each_other(client: DSecClient, args: MakeArgs, parts: Parts) -> None:
    work = Tar().dirs("x", "y").add("x/in", content=b"x").add("f", content=b"file")
    work.symlink("l", "x").add("y/in", content=b"y")
    tools = Tar().add("x", content=b"now a file").dirs("f").add("f/in", content=b"now a directory")
    tools.symlink("y", "f").dirs("l").add("l/in", content=b"no link")
    below, above = await parts.workspace(work), await parts.toolkit(tools)
    wanted: dict[str, str | None] = {
        "/x": "now a file",
        "/f/in": "now a directory",
        "/y/in": "now a directory",
        "/l/in": "no link",
    }
    await looked(client, args, wanted, workspace=below.name, toolkits=names(above))


@pytest.mark.parametrize("way", ["a tar of files alone", "a directory put at a place"])
async def test_directories_above_stay_what_they_are(
    client: DSecClient, args: MakeArgs, parts: Parts, tmp_path: Path, way: str
) -> None:
    """A layer that names only what is below them changes nothing about directories."""
    places = ["home/user", "root", "tmp"]
    if way == "a tar of files alone":
        made = [await parts.toolkit({f"{place}/new/f": b"" for place in places})]
    else:
        (tmp_path / "tree").mkdir()
        (tmp_path / "tree/f").touch()
        made = [await parts.toolkit(tmp_path / "tree", at=f"/{place}/new") for place in places]
    async with await client.run_container(args(toolkits=names(*made))) as sandbox:
        result = await sandbox.run_shell("stat -c '%n %a %u' / /home /home/user /root /tmp")
        assert result.stdout.splitlines() == [
            "/ 755 0",
            "/home 755 0",
            "/home/user 755 1000",
            "/root 700 0",
            "/tmp 1777 0",
        ]
        assert await sandbox.files.exists("/tmp/new/f")


# -- who may change what -----------------------------------------------------------------------

SPOIL = (
    "echo spoiled > /etc/passwd; echo more >> /workspace/a; rm -rf /opt/tool /bin/ls; "
    "chmod 0 /workspace/b; mv /workspace/c /workspace/d; ln /workspace/e /workspace/e2; "
    "truncate -s 0 /workspace/f; chown 1000 /workspace; touch -d @0 /workspace/e"
)
PICTURE = "cd / && tar -c etc/passwd workspace opt bin/ls bin/busybox | sha256sum"


async def test_what_a_sandbox_writes_is_its_own(
    client: DSecClient, args: MakeArgs, parts: Parts
) -> None:
    work = await parts.workspace(
        {f"workspace/{name}": name.encode() * 100_000 for name in "abcef"} | {"workspace/d/x": b""}
    )
    tools = await parts.toolkit({"opt/tool": b"tool"})
    given = args(workspace=work.name, toolkits=names(tools))
    async with (
        await client.run_container(given) as one,
        await client.run_container(given) as two,
    ):
        before = (await two.run_shell(PICTURE)).check().stdout
        await one.run_shell(SPOIL)
        assert (await one.run_shell(PICTURE)).stdout != before
        assert (await two.run_shell(PICTURE)).stdout == before
        await two.files.write("/workspace/mine", b"two")
        assert not await one.files.exists("/workspace/mine")
        async with await client.run_container(given) as three:
            assert (await three.run_shell(PICTURE)).stdout == before
    assert (await client.layers.get("workspace", work.name)).digest == work.digest


async def test_what_is_written_has_a_limit_and_what_is_below_does_not_count(
    client: DSecClient, args: MakeArgs, parts: Parts
) -> None:
    tools = await parts.toolkit({"opt/big": b"0123456789abcdef" * (3 * MIB)})
    wanted = args(toolkits=names(tools), disk_limit_mb=32)
    async with await client.run_container(wanted) as sandbox:
        assert (await sandbox.files.stat("/opt/big")).size_bytes == 48 * MIB
        assert (await sandbox.run_shell("dd if=/dev/zero of=/a bs=1M count=8")).ok
        assert not (await sandbox.run_shell("cp /opt/big /copy")).ok
        with refusal(StorageFull):
            await sandbox.files.write("/b", bytes(40 * MIB))
        # Changing a file of a layer copies it: that does not fit either, and changes nothing.
        assert not (await sandbox.run_shell("echo x >> /opt/big")).ok
        assert (await sandbox.files.stat("/opt/big")).size_bytes == 48 * MIB


# -- attributes --------------------------------------------------------------------------------

XATTRS = r"""
#include <stdio.h>
#include <sys/xattr.h>
int main(int count, char **argument) {
  char value[4096];
  ssize_t size = lgetxattr(argument[1], argument[2], value, sizeof value);
  if (size < 0) { perror("lgetxattr"); return 1; }
  for (ssize_t at = 0; at < size; at++) printf("%02x", (unsigned char)value[at]);
  return 0;
}
"""


@pytest.fixture(scope="session")
def xattr_reader(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """A static program that prints an extended attribute."""
    place = tmp_path_factory.mktemp("reader") / "xattr"
    command = ["gcc", "-static", "-O1", "-xc", "-", "-o", str(place)]
    subprocess.run(command, input=XATTRS.encode(), check=True, capture_output=True)
    return place.read_bytes()


async def test_attributes_are_kept(
    client: DSecClient, args: MakeArgs, parts: Parts, xattr_reader: bytes
) -> None:
    tar = Tar().add("bin/xattr", content=xattr_reader, mode=0o755)
    tar.add("a/private", mode=0o640, uid=1234, gid=5678, mtime=1_234_567_890.25, content=b"x")
    tar.add("a/setuid", mode=0o6755).add("a/old", mtime=0)
    tar.add("a/sticky", b"5", mode=0o1777)
    tar.symlink("a/link", "private", uid=77)
    tar.add("a/noted", xattrs={"user.note": b"\x00\xff"})
    tar.add(
        "a/capable", xattrs={"security.capability": bytes.fromhex("01000002002000" + "00" * 13)}
    )
    tools = await parts.toolkit(tar)
    async with await client.run_container(args(toolkits=names(tools))) as sandbox:
        shown = await sandbox.run_shell("cd /a && stat -c '%n %f %u %g %Y' *")
        assert shown.stdout.splitlines() == [
            "capable 81a4 0 0 1500000000",
            "link a1ff 77 0 1500000000",
            "noted 81a4 0 0 1500000000",
            "old 81a4 0 0 0",
            "private 81a0 1234 5678 1234567890",
            "setuid 8ded 0 0 1500000000",
            "sticky 43ff 0 0 1500000000",
        ]
        assert (await sandbox.files.stat("/a/private")).mtime == 1_234_567_890.25
        note = await sandbox.exec(["/bin/xattr", "/a/noted", "user.note"])
        assert note.stdout == "00ff"
        capable = await sandbox.exec(["/bin/xattr", "/a/capable", "security.capability"])
        assert capable.stdout.startswith("0100000200200000")


async def test_hard_links_of_a_layer_are_one_file(
    client: DSecClient, args: MakeArgs, parts: Parts
) -> None:
    tar = Tar().add("a/one", content=b"linked").link("a/two", "a/one").link("b/three", "a/one")
    tools = await parts.toolkit(tar)
    async with await client.run_container(args(toolkits=names(tools))) as sandbox:
        shown = await sandbox.run_shell("stat -c '%h %i' /a/one /a/two /b/three")
        first, second, third = shown.stdout.splitlines()
        assert first == second == third
        assert first.startswith("3 ")
        assert await sandbox.files.read("/b/three") == b"linked"


async def test_names_may_be_odd(client: DSecClient, args: MakeArgs, parts: Parts) -> None:
    odd = ["new\nline", " x ", "n" * 255, "☃" * 85, "-rf", "back\\slash", "caf\udce9"]
    tar = Tar()
    for name in odd:
        tar.add(f"odd/{name}", content=name.encode("utf-8", "surrogateescape"))
    tools = await parts.toolkit(tar)
    async with await client.run_container(args(toolkits=names(tools))) as sandbox:
        listed = await sandbox.files.list("/odd")
        assert len(listed) == len(odd)
        for name in odd:
            content = await sandbox.files.read(f"/odd/{name}")
            assert content == name.encode("utf-8", "surrogateescape")


# -- sizes -------------------------------------------------------------------------------------


async def test_a_layer_of_many_files(client: DSecClient, args: MakeArgs, parts: Parts) -> None:
    files = {f"many/{n % 100}/{n}": b"%d" % n for n in range(20_000)}
    made = await parts.toolkit(files)
    assert made.entries >= 20_000
    async with await client.run_container(args(toolkits=names(made))) as sandbox:
        counted = await sandbox.run_shell("find /many -type f | wc -l")
        assert counted.stdout.strip() == "20000"
        assert await sandbox.files.read("/many/99/19999") == b"19999"


def used_bytes(place: Path) -> int:
    """What a directory takes on the disk."""
    done = subprocess.run(["du", "-s", "-B1", place], capture_output=True, text=True, check=True)
    return int(done.stdout.split()[0])


@pytest.mark.parametrize("form", ["directory", "tar"])
async def test_holes_cost_little(
    client: DSecClient, args: MakeArgs, parts: Parts, server: Server, tmp_path: Path, form: str
) -> None:
    source = with_hole(tmp_path / "tree", form)
    before = used_bytes(server.state)
    name = f"{parts.name()}:v1"
    parts.layers.append(("toolkit", name))
    sent = 0
    async for event in client.layers.publish("toolkit", name, source):
        if isinstance(event, ImageProgress) and event.step == "receiving":
            sent = max(sent, event.done)
    made = await client.layers.get("toolkit", name)
    assert used_bytes(server.state) - before < 64 * MIB
    assert made.size_bytes == HOLE + 3
    async with await client.run_container(args(toolkits=names(made))) as sandbox:
        assert (await sandbox.files.stat("/sparse")).size_bytes == HOLE + 3
        assert await sandbox.files.read("/sparse", offset=HOLE - 2) == b"\0\0end"
    assert sent < 64 * MIB, "the hole was sent as zeros"


def with_hole(tree: Path, form: str) -> Path:
    """A directory or tar with a file of which nearly all is a hole."""
    tree.mkdir()
    with (tree / "sparse").open("wb") as file:
        file.seek(HOLE)
        file.write(b"end")
    if form == "directory":
        return tree
    tar = tree.with_suffix(".tar")
    argv = ["tar", "--format=posix", "--sparse", "-cf", str(tar), "-C", str(tree), "sparse"]
    subprocess.run(argv, check=True)
    return tar


async def test_a_deep_tree(client: DSecClient, args: MakeArgs, parts: Parts) -> None:
    deep = "/".join(["d" * 20] * 150)
    made = await parts.toolkit({f"{deep}/end": b"far"})
    async with await client.run_container(args(toolkits=names(made))) as sandbox:
        assert await sandbox.files.read(f"/{deep}/end") == b"far"


async def test_an_empty_layer_changes_nothing(
    client: DSecClient, args: MakeArgs, parts: Parts
) -> None:
    made = await parts.toolkit({})
    assert (made.size_bytes, made.entries) in ((0, 0), (0, 1))
    wanted = args(toolkits=names(made))
    async with (
        await client.run_container(wanted) as sandbox,
        await client.run_container(args()) as plain,
    ):
        look = "find / -xdev | sort | sha256sum; stat -c '%a %u' /"
        assert (await sandbox.run_shell(look)).stdout == (await plain.run_shell(look)).stdout


# -- how many ----------------------------------------------------------------------------------


async def published(
    into: dict[str, bytes], parts: Parts, number: int, limit: anyio.CapacityLimiter
) -> None:
    content = b"%d" % number
    async with limit:
        made = await parts.toolkit({"top": content, f"t{number}": b""})
    into[made.name] = content


async def test_thirty_two_toolkits_and_no_more(
    client: DSecClient, args: MakeArgs, parts: Parts
) -> None:
    tops: dict[str, bytes] = {}
    limit = anyio.CapacityLimiter(4)
    async with anyio.create_task_group() as group:
        for number in range(33):
            group.start_soon(published, tops, parts, number, limit)
    work = await parts.workspace({"top": b"work"})
    with refusal(InvalidRequest):
        await client.run_container(args(workspace=work.name, toolkits=list(tops)))
    wanted = list(tops)[:32]
    given = args(workspace=work.name, toolkits=wanted)
    async with await client.run_container(given) as sandbox:
        assert await sandbox.files.read("/top") == tops[wanted[-1]]
        assert (await sandbox.run_shell("ls -d /t[0-9]* | wc -l")).stdout.strip() == "32"
        assert sandbox.view.toolkits == wanted


async def test_the_same_toolkit_twice_counts_where_it_is_uppermost(
    client: DSecClient, args: MakeArgs, parts: Parts
) -> None:
    """As the same tree unpacked twice would be; the kernel itself refuses one layer twice."""
    made, other = await parts.toolkit({"a": b"1"}), await parts.toolkit({"a": b"2", "b": b"2"})
    short = made.name.partition(":")[0]
    for first in (made.name, short):
        twice = args(toolkits=[first, other.name, made.name])
        async with await client.run_container(twice) as sandbox:
            assert await contents(sandbox, "/a", "/b") == {"/a": "1", "/b": "2"}


async def test_two_names_of_the_same_content_may_be_used_together(
    client: DSecClient, args: MakeArgs, parts: Parts
) -> None:
    one, two = await parts.toolkit({"a": b"1"}), await parts.toolkit({"a": b"1"})
    other = await parts.toolkit({"a": b"2"})
    assert one.digest == two.digest
    await looked(client, args, {"/a": "1"}, toolkits=names(one, other, two))
    work = await parts.workspace({"a": b"1"})
    await looked(client, args, {"/a": "1"}, workspace=work.name, toolkits=names(other, one))


async def test_many_sandboxes_at_once_stand_on_one_layer(
    client: DSecClient, args: MakeArgs, parts: Parts
) -> None:
    made = await parts.workspace({"workspace/f": b"shared"})
    open_now: list[Sandbox] = []
    try:
        async for item in client.run_containers(args(workspace=made.name), count=8):
            assert isinstance(item, Sandbox), item
            open_now.append(item)
        assert [await one.files.read("/workspace/f") for one in open_now] == [b"shared"] * 8
        assert (await client.layers.get("workspace", made.name)).used_by == 8
    finally:
        async with anyio.create_task_group() as group:
            for one in open_now:
                group.start_soon(one.stop)


# -- views and upgrades ------------------------------------------------------------------------


async def test_the_view_says_what_was_resolved(
    client: DSecClient, args: MakeArgs, parts: Parts
) -> None:
    work = await parts.workspace({"a": b""}, "task-7")
    tool = await parts.toolkit({"b": b""}, "agent:2.0")
    other = await parts.toolkit({"c": b""}, "grader")
    assert (work.name, tool.name, other.name) == ("task-7:v1", "agent:2.0", "grader:v1")
    wanted = args(workspace="task-7", toolkits=["agent", "grader:v1"])
    async with await client.run_container(wanted) as sandbox:
        (listed,) = [view for view in await client.list() if view.id == sandbox.id]
        for view in (sandbox.view, listed):
            assert (view.workspace, view.toolkits) == ("task-7:v1", ["agent:2.0", "grader:v1"])


async def test_an_upgrade_changes_no_running_sandbox(
    client: DSecClient, args: MakeArgs, parts: Parts
) -> None:
    name = parts.name()
    await parts.toolkit({"opt/v": b"one"}, f"{name}:1.0")
    async with await client.run_container(args(toolkits=[name])) as old:
        await parts.toolkit({"opt/v": b"two"}, f"{name}:1.1")
        assert await old.files.read("/opt/v") == b"one"
        await old.refresh()
        assert old.view.toolkits == [f"{name}:1.0"]
        async with await client.run_container(args(toolkits=[name])) as new:
            assert new.view.toolkits == [f"{name}:1.1"]
            assert await new.files.read("/opt/v") == b"two"
        pinned = args(toolkits=[f"{name}:1.0"])
        async with await client.run_container(pinned) as sandbox:
            assert await sandbox.files.read("/opt/v") == b"one"
        assert await old.files.read("/opt/v") == b"one"


async def test_a_repeated_request_gets_the_version_it_got_first(
    client: DSecClient, args: MakeArgs, parts: Parts
) -> None:
    name = parts.name()
    await parts.toolkit({"v": b"one"}, f"{name}:1")
    key = f"key-{name}"
    wanted = args(toolkits=[name])
    async with await client.run_container(wanted, idempotency_key=key) as sandbox:
        await parts.toolkit({"v": b"two"}, f"{name}:2")
        again = await client.run_container(wanted, idempotency_key=key)
        assert again.id == sandbox.id
        assert again.view.toolkits == [f"{name}:1"]
