"""Whole trees, up and down, and archives that try to get out."""

from __future__ import annotations

import io
import stat
import tarfile
from collections.abc import Iterable
from pathlib import Path

import pytest

from dsec import DsecError, InvalidRequest, NotFound, PermissionDenied, Sandbox, Unavailable
from tests.contract.expect import refusal
from tests.contract.server import Server

Entry = tuple[str, str, str | bytes]
"""Name, kind (file, dir, link, hard), content or target."""


def tar(entries: Iterable[Entry], *, uid: int = 0, mode: int = 0o644) -> bytes:
    """An archive."""
    kinds = {"dir": tarfile.DIRTYPE, "link": tarfile.SYMTYPE, "hard": tarfile.LNKTYPE}
    packed = io.BytesIO()
    with tarfile.open(
        fileobj=packed, mode="w", format=tarfile.PAX_FORMAT, errors="surrogateescape"
    ) as archive:
        for name, kind, what in entries:
            member = tarfile.TarInfo(name)
            member.mode, member.uid, member.gid = mode, uid, uid
            member.type = kinds.get(kind, tarfile.REGTYPE)
            if isinstance(what, str):
                member.linkname = what
                archive.addfile(member)
            else:
                member.size = len(what)
                member.mode = 0o755 if kind == "dir" else mode
                archive.addfile(member, io.BytesIO(what))
    return packed.getvalue()


async def members(sandbox: Sandbox, path: str) -> dict[str, tarfile.TarInfo]:
    """What a tree is as a tar stream, by name."""
    data = b"".join([chunk async for chunk in sandbox.files.get_tar(path)])
    with tarfile.open(fileobj=io.BytesIO(data), errors="surrogateescape") as archive:
        return {member.name.removeprefix("./"): member for member in archive}


async def test_a_tree_makes_the_round_trip(sandbox: Sandbox, tmp_path: Path) -> None:
    here = tmp_path / "here"
    (here / "sub" / "empty").mkdir(parents=True)
    (here / "run").write_bytes(b"#!/bin/sh\n")
    (here / "run").chmod(0o750)
    (here / "sub" / "big").write_bytes(bytes(range(256)) * 8192)
    (here / "sub" / "odd é\n name").write_bytes(b"x")
    (here / "sub" / "link").symlink_to("big")
    (here / "sub" / "same").hardlink_to(here / "run")
    await sandbox.files.upload_tree(here, "/tmp/there")
    back = tmp_path / "back"
    await sandbox.files.download_tree("/tmp/there", back)
    assert _picture(back) == _picture(here)


@pytest.mark.parametrize("size", [10, 8 << 20], ids=["at once", "in the middle"])
async def test_a_tree_that_cannot_be_read_is_refused_or_breaks_off(
    server: Server, sandbox: Sandbox, tmp_path: Path, size: int
) -> None:
    await sandbox.files.mkdir("/tmp/there")
    await sandbox.files.write("/tmp/there/a", bytes(size))
    await sandbox.files.write("/tmp/there/b", b"", mode=0o600)
    logged = len(server.log.read_bytes())
    known = PermissionDenied if size == 10 else (PermissionDenied, Unavailable)
    with pytest.raises(known, match=r"permission|Permission|trajectory"):
        await sandbox.files.download_tree("/tmp/there", tmp_path / "back", user="user")
    [entry] = [entry async for entry in sandbox.trajectory(ops=["tree.read"])]
    assert entry.outcome == "permission_denied"
    assert b"Traceback" not in server.log.read_bytes()[logged:]


def _picture(root: Path) -> dict[str, tuple[int, bytes | str]]:
    seen: dict[str, tuple[int, bytes | str]] = {}
    for path in sorted(root.rglob("*")):
        status = path.lstat()
        kind = stat.S_IFMT(status.st_mode)
        name = str(path.relative_to(root))
        if path.is_symlink():
            seen[name] = kind, str(path.readlink())
        elif path.is_dir():
            seen[name] = kind, b""
        else:
            seen[name] = status.st_mode, path.read_bytes()
    return seen


async def test_an_empty_directory_makes_the_round_trip(sandbox: Sandbox, tmp_path: Path) -> None:
    (tmp_path / "here").mkdir()
    await sandbox.files.upload_tree(tmp_path / "here", "/tmp/there")
    assert await sandbox.files.list("/tmp/there") == []
    await sandbox.files.download_tree("/tmp/there", tmp_path / "back")
    assert list((tmp_path / "back").iterdir()) == []


async def test_hard_links_stay_linked(sandbox: Sandbox) -> None:
    await sandbox.files.put_tar("/tmp/t", tar([("a", "file", b"12345"), ("b", "hard", "a")]))
    assert await sandbox.files.read("/tmp/t/b") == b"12345"
    await sandbox.run_shell("echo more >> /tmp/t/a")
    assert await sandbox.files.read("/tmp/t/b") == b"12345more\n"
    kinds = sorted(member.type for member in (await members(sandbox, "/tmp/t")).values()
                   if not member.isdir())  # fmt: skip
    assert kinds == [tarfile.REGTYPE, tarfile.LNKTYPE]


async def test_links_stay_links_wherever_they_lead(sandbox: Sandbox) -> None:
    links = {"in": "a", "up": "../../etc/passwd", "abs": "/etc/passwd", "none": "missing"}
    await sandbox.files.put_tar("/tmp/t", tar([(n, "link", t) for n, t in links.items()]))
    for name, target in links.items():
        info = await sandbox.files.stat(f"/tmp/t/{name}", follow=False)
        assert (info.kind, info.target) == ("symlink", target)
    packed = await members(sandbox, "/tmp/t")
    assert {n: packed[n].linkname for n in links} == links


async def test_modes_and_owners_are_kept(sandbox: Sandbox) -> None:
    await sandbox.files.put_tar(
        "/tmp/t", tar([("f", "file", b""), ("s", "file", b"")], uid=1000, mode=0o4751)
    )
    info = await sandbox.files.stat("/tmp/t/f")
    assert (info.mode, info.uid, info.gid) == (0o4751, 1000, 1000)
    packed = (await members(sandbox, "/tmp/t"))["f"]
    assert (packed.mode, packed.uid, packed.gid) == (0o4751, 1000, 1000)


async def test_a_tree_put_for_a_user_belongs_to_the_user(sandbox: Sandbox) -> None:
    await sandbox.files.put_tar("/tmp/t", tar([("f", "file", b"")], uid=0), user="user")
    assert (await sandbox.files.stat("/tmp/t/f")).uid == 1000


@pytest.mark.parametrize("name", ["a b", "a\nb", "é", "\udcff\udc80", "x" * 255, "d/" * 60 + "f"])
async def test_odd_names_survive_in_archives(sandbox: Sandbox, name: str) -> None:
    await sandbox.files.put_tar("/tmp/t", tar([(name, "file", b"odd")]))
    assert await sandbox.files.read(f"/tmp/t/{name}") == b"odd"
    assert name in await members(sandbox, "/tmp/t")


ESCAPES = {
    "dots": [("../evil", "file", b"x")],
    "dots below": [("d", "dir", b""), ("d/../../evil", "file", b"x")],
    "absolute": [("/evil", "file", b"x")],
    "through a link": [("out", "link", "/"), ("out/evil", "file", b"x")],
    "through a relative link": [("out", "link", "../.."), ("out/evil", "file", b"x")],
    "through a link to etc": [("out", "link", "/etc"), ("out/evil", "file", b"x")],
    "link over a directory": [
        ("d", "dir", b""), ("d", "link", "/etc"), ("d/evil", "file", b"x"),
    ],
    "hard link to outside": [("mine", "hard", "/etc/passwd"), ("mine", "file", b"evil")],
    "hard link by dots": [("mine", "hard", "../../etc/passwd"), ("mine", "file", b"evil")],
    "file over a link": [("l", "link", "/etc/passwd"), ("l", "file", b"evil")],
}  # fmt: skip


@pytest.mark.parametrize("entries", ESCAPES.values(), ids=ESCAPES.keys())
async def test_an_archive_cannot_get_out_of_its_directory(
    sandbox: Sandbox, entries: list[Entry]
) -> None:
    await sandbox.files.mkdir("/tmp/base/t", parents=True)
    try:
        await sandbox.files.put_tar("/tmp/base/t", tar(entries))
    except DsecError as error:
        assert error.code in ("invalid_request", "not_found", "conflict", "permission_denied")
    for outside in ("/evil", "/etc/evil", "/tmp/evil", "/tmp/base/evil"):
        assert not await sandbox.files.exists(outside)
    assert b"evil" not in await sandbox.files.read("/etc/passwd")


async def test_what_is_no_archive_is_refused(sandbox: Sandbox) -> None:
    with refusal(InvalidRequest):
        await sandbox.files.put_tar("/tmp/t", b"this is no tar stream" * 100)


async def test_half_an_archive_is_refused(sandbox: Sandbox) -> None:
    whole = tar([("f", "file", bytes(100_000))])
    with refusal(InvalidRequest):
        await sandbox.files.put_tar("/tmp/t", whole[:50_000])


async def test_a_missing_tree_is_not_found(sandbox: Sandbox) -> None:
    with refusal(NotFound):
        await members(sandbox, "/tmp/missing")


async def test_a_downloaded_tree_cannot_get_out_either(sandbox: Sandbox, tmp_path: Path) -> None:
    entries: list[Entry] = [("out", "link", str(tmp_path)), ("f", "file", b"x")]
    await sandbox.files.put_tar("/tmp/t", tar(entries))
    target = tmp_path / "target"
    await sandbox.files.download_tree("/tmp/t", target)
    assert (target / "f").read_bytes() == b"x"
    assert not (target / "out").is_symlink()


async def test_two_thousand_small_files_go_up_at_once(sandbox: Sandbox) -> None:
    count = await sandbox.files.put_tar(
        "/tmp/t", tar([(f"d{n % 20}/f{n}", "file", b"%d" % n) for n in range(2000)])
    )
    assert count == 2000
    assert await sandbox.files.read("/tmp/t/d7/f1987") == b"1987"


async def test_a_tree_is_merged_into_what_is_there(sandbox: Sandbox) -> None:
    await sandbox.files.write("/tmp/t/old", b"old", parents=True)
    await sandbox.files.put_tar("/tmp/t", tar([("new", "file", b"new"), ("old", "file", b"2")]))
    assert await sandbox.files.read("/tmp/t/old") == b"2"
    assert await sandbox.files.read("/tmp/t/new") == b"new"
