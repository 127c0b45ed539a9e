"""Files: every byte and every name, whole or not at all."""

from __future__ import annotations

import hashlib
import os
import random
from collections.abc import AsyncIterator
from pathlib import Path

import anyio
import httpx
import pytest

from dsec import Conflict, InvalidRequest, NotFound, PermissionDenied, RequestError, Sandbox
from tests.contract.capabilities import needs
from tests.contract.expect import PROBE, refusal
from tests.contract.server import Server

MIB = 1 << 20
NAMES = ["a b", "a\nb", "é日本", "😀", "'\"\\", "-n", "a%2Fb?&=#", "\udcff\udc80x", "~", "x" * 255]


@pytest.mark.parametrize("data", [b"", b"x", bytes(range(256)), b"\r\n\x00"], ids=repr)
async def test_what_is_written_is_read(sandbox: Sandbox, data: bytes) -> None:
    info = await sandbox.files.write("/tmp/f", data)
    assert info.size_bytes == len(data)
    assert await sandbox.files.read("/tmp/f") == data


async def test_fifty_megabytes_make_the_round_trip(sandbox: Sandbox, tmp_path: Path) -> None:
    local = tmp_path / "big"
    local.write_bytes(random.Random(50).randbytes(50 * MIB))
    await sandbox.files.write("/tmp/big", local)
    digest, size = hashlib.sha256(), 0
    async for chunk in sandbox.files.stream("/tmp/big"):
        digest.update(chunk)
        size += len(chunk)
    assert size == 50 * MIB
    assert digest.digest() == hashlib.sha256(local.read_bytes()).digest()


async def test_text_is_utf8(sandbox: Sandbox) -> None:
    await sandbox.files.write("/tmp/f", "é日本")
    assert await sandbox.files.read("/tmp/f") == "é日本".encode()
    assert await sandbox.files.read_text("/tmp/f") == "é日本"


async def test_a_file_can_be_written_from_an_iterator(sandbox: Sandbox) -> None:
    async def pieces() -> AsyncIterator[bytes]:
        for n in range(1000):
            yield b"%06d" % n

    await sandbox.files.write("/tmp/f", pieces())
    assert await sandbox.files.read("/tmp/f") == b"".join(b"%06d" % n for n in range(1000))


async def test_a_broken_upload_changes_nothing(sandbox: Sandbox) -> None:
    async def broken() -> AsyncIterator[bytes]:
        yield b"half"
        raise OSError("the source broke")

    await sandbox.files.write("/tmp/f", b"old")
    with pytest.raises(OSError, match="the source broke"):
        await sandbox.files.write("/tmp/f", broken())
    assert await sandbox.files.read("/tmp/f") == b"old"
    with anyio.fail_after(10):  # the other side hears of the break a moment later
        while [info.name for info in await sandbox.files.list("/tmp")] != ["f"]:  # noqa: ASYNC110
            await anyio.sleep(0.02)


async def test_a_wrong_digest_changes_nothing(sandbox: Sandbox, server: Server) -> None:
    await sandbox.files.write("/tmp/f", b"old")
    async with httpx.AsyncClient(base_url=server.url) as http:
        answer = await http.put(
            f"/v1/sandboxes/{sandbox.id}/files",
            params={"path": "/tmp/f", "sha256": "00" * 32},
            content=b"new",
            headers={"Authorization": f"Bearer {server.key}"},
        )
    assert (answer.status_code, answer.json()["error"]["code"]) == (409, "conflict")
    assert await sandbox.files.read("/tmp/f") == b"old"
    assert [info.name for info in await sandbox.files.list("/tmp")] == ["f"]


async def test_append_adds_to_the_end(sandbox: Sandbox) -> None:
    for piece in (b"one", b"", b"two"):
        await sandbox.files.write("/tmp/f", piece, append=True)
    assert await sandbox.files.read("/tmp/f") == b"onetwo"


async def test_replacing_keeps_owner_and_mode(sandbox: Sandbox) -> None:
    await sandbox.files.write("/tmp/f", b"old", user="user", mode=0o640)
    await sandbox.files.write("/tmp/f", b"new")
    info = await sandbox.files.stat("/tmp/f")
    assert (info.mode, info.uid, info.gid, info.size_bytes) == (0o640, 1000, 1000, 3)


async def test_replacing_is_a_new_file_and_not_atomic_is_the_same(sandbox: Sandbox) -> None:
    await sandbox.files.write("/tmp/f", b"a longer old text")
    await sandbox.files.write("/tmp/f", b"new", atomic=False)
    assert await sandbox.files.read("/tmp/f") == b"new"


@pytest.mark.parametrize("mode", [0o600, 0o755, 0o4755, 0o000])
async def test_the_mode_is_what_was_asked_for(sandbox: Sandbox, mode: int) -> None:
    await sandbox.files.write("/tmp/f", b"", mode=mode)
    assert (await sandbox.files.stat("/tmp/f")).mode == mode


async def test_the_mode_is_0644_unless_said(sandbox: Sandbox) -> None:
    await sandbox.files.write("/tmp/f", b"")
    assert (await sandbox.files.stat("/tmp/f")).mode == 0o644


async def test_files_belong_to_whom_they_are_written_for(sandbox: Sandbox) -> None:
    await sandbox.files.write("/tmp/f", b"", user="user")
    await sandbox.files.mkdir("/tmp/d", user="user")
    for name in ("/tmp/f", "/tmp/d"):
        info = await sandbox.files.stat(name)
        assert (info.uid, info.gid, info.user, info.group) == (1000, 1000, "user", "user")


async def test_a_missing_parent_is_not_found_or_made(sandbox: Sandbox) -> None:
    with refusal(NotFound, kind="path"):
        await sandbox.files.write("/tmp/a/b/c", b"x")
    await sandbox.files.write("/tmp/a/b/c", b"x", parents=True)
    assert await sandbox.files.read("/tmp/a/b/c") == b"x"


async def test_a_directory_cannot_be_written_or_read_as_a_file(sandbox: Sandbox) -> None:
    with pytest.raises((InvalidRequest, Conflict)):
        await sandbox.files.write("/tmp", b"x")
    with refusal(InvalidRequest):
        await sandbox.files.read("/tmp")


async def test_a_file_in_the_way_is_an_error(sandbox: Sandbox) -> None:
    with pytest.raises(RequestError):
        await sandbox.files.write("/etc/passwd/x", b"x")
    with pytest.raises(RequestError):
        await sandbox.files.write("/etc/passwd/x/y", b"x", parents=True)


@pytest.mark.parametrize("path", ["/tmp/missing", "/missing/x"])
async def test_a_missing_file_is_not_found(sandbox: Sandbox, path: str) -> None:
    for ask in (sandbox.files.read, sandbox.files.stat, sandbox.files.remove):
        with refusal(NotFound, kind="path"):
            await ask(path)
    assert not await sandbox.files.exists(path)


@pytest.mark.parametrize("path", ["", "/a\0b"])
async def test_a_path_that_cannot_be_is_refused(sandbox: Sandbox, path: str) -> None:
    with refusal(InvalidRequest):
        await sandbox.files.stat(path)


async def test_another_users_files_are_protected(sandbox: Sandbox) -> None:
    await sandbox.files.write("/tmp/secret", b"x", mode=0o600)
    for ask in (
        lambda: sandbox.files.read("/tmp/secret", user="user"),
        lambda: sandbox.files.write("/tmp/secret", b"y", user="user"),
        lambda: sandbox.files.write("/etc/new", b"y", user="user"),
        lambda: sandbox.files.remove("/tmp/secret", user="user"),
        lambda: sandbox.files.list("/root", user="user"),
        lambda: sandbox.files.move("/tmp/secret", "/tmp/mine", user="user"),
    ):
        with refusal(PermissionDenied):
            await ask()
    assert await sandbox.files.read("/tmp/secret") == b"x"


async def test_an_unknown_user_of_a_file_is_not_found(sandbox: Sandbox) -> None:
    with refusal(NotFound, kind="user"):
        await sandbox.files.read("/etc/passwd", user="ghost")


async def test_links_are_followed_when_reading_and_writing(sandbox: Sandbox) -> None:
    await _link(sandbox, "target", "/tmp/link")
    await sandbox.files.write("/tmp/target", b"old")
    assert await sandbox.files.read("/tmp/link") == b"old"
    await sandbox.files.write("/tmp/link", b"new")
    assert await sandbox.files.read("/tmp/target") == b"new"
    info = await sandbox.files.stat("/tmp/link", follow=False)
    assert (info.kind, info.target) == ("symlink", "target")


async def _link(sandbox: Sandbox, target: str, name: str) -> None:
    from tests.contract.test_trees import tar

    packed = tar([(Path(name).name, "link", target)])
    await sandbox.files.put_tar(Path(name).parent, packed)


async def test_a_link_to_nowhere_exists_and_cannot_be_read(sandbox: Sandbox) -> None:
    await _link(sandbox, "/missing", "/tmp/link")
    assert await sandbox.files.exists("/tmp/link")
    with refusal(NotFound):
        await sandbox.files.read("/tmp/link")


async def test_links_in_a_circle_are_an_error(sandbox: Sandbox) -> None:
    await _link(sandbox, "link", "/tmp/link")
    with pytest.raises(RequestError):
        await sandbox.files.read("/tmp/link")


@pytest.mark.parametrize("name", NAMES, ids=ascii)
async def test_any_name_linux_allows_works(sandbox: Sandbox, name: str) -> None:
    path = f"/tmp/{name}"
    await sandbox.files.write(path, name.encode("utf-8", "surrogateescape"))
    assert await sandbox.files.read(path) == os.fsencode(name)
    listed = await sandbox.files.list("/tmp")
    assert [Path(info.path).name for info in listed] == [name]
    assert (await sandbox.files.stat(listed[0].path)).size_bytes == len(os.fsencode(name))
    await sandbox.files.move(path, path[:-1] + "z")
    assert await sandbox.files.remove(path[:-1] + "z") == 1


async def test_a_name_that_is_too_long_is_refused(sandbox: Sandbox) -> None:
    with refusal(InvalidRequest):
        await sandbox.files.write("/tmp/" + "x" * 256, b"")


@pytest.mark.parametrize(
    ("path", "kind"), [("/etc/passwd", "file"), ("/tmp", "dir"), ("/dev/null", "char")]
)
async def test_stat_tells_kinds_apart(sandbox: Sandbox, path: str, kind: str) -> None:
    info = await sandbox.files.stat(path)
    assert (info.kind, info.path) == (kind, path)
    assert (info.is_dir, info.is_file) == (kind == "dir", kind == "file")


@needs("kernel-files")
async def test_stat_tells_a_fifo_and_a_socket_apart(sandbox: Sandbox) -> None:
    await sandbox.exec(["mkfifo", "/tmp/fifo"])
    assert (await sandbox.files.stat("/tmp/fifo")).kind == "fifo"


async def test_times_are_told(sandbox: Sandbox) -> None:
    await sandbox.files.write("/tmp/a", b"")
    one = (await sandbox.files.stat("/tmp/a")).mtime
    await anyio.sleep(0.05)
    await sandbox.files.write("/tmp/a", b"more")
    assert (await sandbox.files.stat("/tmp/a")).mtime > one


async def test_listing_goes_as_deep_as_asked(sandbox: Sandbox) -> None:
    await sandbox.files.write("/tmp/a/b/c", b"", parents=True)
    for depth, wanted in ((1, {"a"}), (2, {"a", "a/b"}), (9, {"a", "a/b", "a/b/c"})):
        listed = await sandbox.files.list("/tmp", depth=depth)
        assert {str(Path(info.path).relative_to("/tmp")) for info in listed} == wanted


async def test_listing_does_not_follow_links(sandbox: Sandbox) -> None:
    await _link(sandbox, "/", "/tmp/root")
    listed = await sandbox.files.list("/tmp", depth=5)
    assert [(info.name, info.kind) for info in listed] == [("root", "symlink")]


async def test_five_thousand_files_are_listed(sandbox: Sandbox) -> None:
    from tests.contract.test_trees import tar

    await sandbox.files.put_tar("/tmp/many", tar([(f"f{n}", "file", b"") for n in range(5000)]))
    assert len(await sandbox.files.list("/tmp/many")) == 5000


async def test_listing_a_file_is_refused(sandbox: Sandbox) -> None:
    with refusal(InvalidRequest):
        await sandbox.files.list("/etc/passwd")


async def test_a_directory_that_exists_is_a_conflict(sandbox: Sandbox) -> None:
    await sandbox.files.mkdir("/tmp/d")
    with refusal(Conflict):
        await sandbox.files.mkdir("/tmp/d")
    await sandbox.files.mkdir("/tmp/d", parents=True)
    await sandbox.files.mkdir("/tmp/e/f/g", parents=True)
    assert (await sandbox.files.stat("/tmp/e/f/g")).is_dir


async def test_moving_replaces_only_when_told(sandbox: Sandbox) -> None:
    await sandbox.files.write("/tmp/a", b"a")
    await sandbox.files.write("/tmp/b", b"b")
    with refusal(Conflict):
        await sandbox.files.move("/tmp/a", "/tmp/b", overwrite=False)
    assert await sandbox.files.read("/tmp/b") == b"b"
    await sandbox.files.move("/tmp/a", "/tmp/b", overwrite=True)
    assert await sandbox.files.read("/tmp/b") == b"a"
    assert not await sandbox.files.exists("/tmp/a")


async def test_a_directory_moves_with_what_is_in_it(sandbox: Sandbox) -> None:
    await sandbox.files.write("/tmp/a/f", b"x", parents=True)
    await sandbox.files.move("/tmp/a", "/tmp/b")
    assert await sandbox.files.read("/tmp/b/f") == b"x"
    with pytest.raises(RequestError):
        await sandbox.files.move("/tmp/b", "/tmp/b/inside")


async def test_moving_what_is_missing_is_not_found(sandbox: Sandbox) -> None:
    with refusal(NotFound):
        await sandbox.files.move("/tmp/missing", "/tmp/b")


async def test_a_full_directory_is_removed_only_when_told(sandbox: Sandbox) -> None:
    await sandbox.files.write("/tmp/d/f", b"", parents=True)
    with pytest.raises((Conflict, InvalidRequest)):
        await sandbox.files.remove("/tmp/d")
    assert await sandbox.files.remove("/tmp/d", recursive=True) == 2
    assert not await sandbox.files.exists("/tmp/d")


async def test_removing_does_not_follow_links(sandbox: Sandbox) -> None:
    await sandbox.files.write("/tmp/keep/f", b"x", parents=True)
    await sandbox.files.mkdir("/tmp/d")
    await _link(sandbox, "/tmp/keep", "/tmp/d/link")
    await sandbox.files.remove("/tmp/d", recursive=True)
    assert await sandbox.files.read("/tmp/keep/f") == b"x"


@pytest.mark.parametrize(
    ("offset", "length", "wanted"),
    [(0, 3, b"012"), (7, None, b"789"), (3, 4, b"3456"), (8, 10, b"89"), (10, 5, b""),
     (99, 1, b""), (4, 0, b"")],
)  # fmt: skip
async def test_a_range_is_read(
    sandbox: Sandbox, offset: int, length: int | None, wanted: bytes
) -> None:
    await sandbox.files.write("/tmp/f", b"0123456789")
    assert await sandbox.files.read("/tmp/f", offset=offset, length=length) == wanted


async def test_a_negative_range_is_refused(sandbox: Sandbox) -> None:
    with refusal(InvalidRequest):
        await sandbox.files.read("/etc/passwd", offset=-1)


async def test_of_two_writers_one_wins_and_nothing_is_mixed(sandbox: Sandbox) -> None:
    size = 2 * MIB
    async with anyio.create_task_group() as group:
        for letter in b"abcd":
            group.start_soon(sandbox.files.write, "/tmp/f", bytes([letter]) * size)
    data = await sandbox.files.read("/tmp/f")
    assert len(data) == size
    assert len(set(data)) == 1


async def test_a_reader_sees_the_old_file_or_the_new_one(sandbox: Sandbox) -> None:
    size = 256 * 1024
    await sandbox.files.write("/tmp/f", b"a" * size)

    async def write() -> None:
        for letter in b"bcdefgh":
            await sandbox.files.write("/tmp/f", bytes([letter]) * size)

    async with anyio.create_task_group() as group:
        group.start_soon(write)
        for _ in range(20):
            data = await sandbox.files.read("/tmp/f")
            assert (len(data), len(set(data))) == (size, 1)


async def test_files_and_commands_see_the_same(sandbox: Sandbox) -> None:
    await sandbox.files.write("/tmp/in", b"from outside")
    assert (await sandbox.exec(["cat", "/tmp/in"])).stdout == "from outside"
    await sandbox.run_shell("echo from inside > /tmp/out")
    assert await sandbox.files.read("/tmp/out") == b"from inside\n"


async def test_a_relative_path_begins_in_the_working_directory(sandbox: Sandbox) -> None:
    await sandbox.files.write("relative", b"x")
    assert await sandbox.files.read("/relative") == b"x"


@needs("kernel-files")
async def test_a_device_is_read_up_to_the_length_asked_for(sandbox: Sandbox) -> None:
    assert await sandbox.files.read("/dev/zero", length=1000) == bytes(1000)


@needs("kernel-files")
async def test_a_fifo_nobody_writes_does_not_wedge_the_sandbox(sandbox: Sandbox) -> None:
    await sandbox.exec(["mkfifo", "/tmp/fifo"])
    async with anyio.create_task_group() as group:
        group.start_soon(_read_quietly, sandbox, "/tmp/fifo")
        await anyio.sleep(0.2)
        for _ in range(3):
            assert (await sandbox.exec([PROBE, "echo", "x"])).stdout == "x\n"
            await sandbox.files.write("/tmp/f", b"x")
        group.cancel_scope.cancel()


async def _read_quietly(sandbox: Sandbox, path: str) -> None:
    with pytest.raises(RequestError):
        await sandbox.files.read(path, length=1)
