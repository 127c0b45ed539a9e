"""Files of the simulated aether, at the level of frames."""

from __future__ import annotations

import hashlib
import io
import tarfile

import pytest

from dsec.wire.frames import Kind
from tests.unit.sim.client import Client, Failed, connected


async def read(client: Client, path: bytes, **more: object) -> bytes:
    call = await client.open("read", path=path, **more)
    await call.result()
    return bytes(call.received.get(0, b""))


async def test_write_then_read() -> None:
    async with connected() as client:
        info = await client.send_all("write", b"abc", path=b"/tmp/a \xff\n", mode=0o640)
        assert info["sha256"] == hashlib.sha256(b"abc").hexdigest()
        assert (info["mode"], info["size_bytes"]) == (0o640, 3)
        assert await read(client, b"/tmp/a \xff\n", offset=1, length=1) == b"b"


async def test_a_wrong_digest_changes_nothing() -> None:
    async with connected() as client:
        await client.send_all("write", b"old", path="/tmp/a")
        with pytest.raises(Failed) as caught:
            await client.send_all("write", b"new", path="/tmp/a", sha256="00" * 32)
        assert caught.value.code == "conflict"
        assert await read(client, b"/tmp/a") == b"old"


async def test_replacing_keeps_owner_and_mode() -> None:
    async with connected() as client:
        await client.send_all("write", b"old", path="/tmp/a", user="user", mode=0o600)
        info = await client.send_all("write", b"new", path="/tmp/a")
        assert (info["uid"], info["mode"]) == (1000, 0o600)


@pytest.mark.parametrize(
    ("method", "arguments", "code"),
    [
        ("read", {"path": "/missing"}, "not_found"),
        ("read", {"path": "/tmp"}, "invalid_request"),
        ("read", {"path": "/root/x", "user": "user"}, "permission_denied"),
        ("write", {"path": "/tmp"}, "invalid_request"),
        ("write", {"path": "/missing/a"}, "not_found"),
        ("write", {"path": "/etc/passwd", "user": "user"}, "permission_denied"),
        ("mkdir", {"path": "/tmp"}, "conflict"),
        ("listdir", {"path": "/etc/passwd"}, "invalid_request"),
        ("remove", {"path": "/tmp/missing"}, "not_found"),
        ("remove", {"path": "/home"}, "conflict"),
        ("move", {"path": "/etc/passwd", "to": "/etc/group", "overwrite": False}, "conflict"),
        ("move", {"path": "/home", "to": "/home/user/x"}, "invalid_request"),
        ("stat", {"path": ""}, "invalid_request"),
        ("stat", {"path": b"/a\0b"}, "invalid_request"),
        ("watch", {"path": "/missing"}, "not_found"),
    ],
)
async def test_failures_have_codes(method: str, arguments: dict[str, object], code: str) -> None:
    async with connected() as client:
        with pytest.raises(Failed) as caught:
            await client.send_all(method, b"", **arguments)
        assert caught.value.code == code


async def test_links_are_followed_to_write_and_not_to_remove() -> None:
    async with connected() as client:
        await client.call("mkdir", path="/tmp/d/e", parents=True)
        await client.send_all("tar_in", archive(link=("l", "/tmp/d")), path="/tmp")
        await client.send_all("write", b"x", path="/tmp/l/f")
        assert (await client.call("remove", path="/tmp/l", recursive=True))["removed"] == 1
        assert await read(client, b"/tmp/d/f") == b"x"
        assert (await client.call("remove", path="/tmp/d", recursive=True))["removed"] == 3


async def test_a_link_loop_is_an_error() -> None:
    async with connected() as client:
        await client.send_all("tar_in", archive(link=("l", "l")), path="/tmp")
        with pytest.raises(Failed) as caught:
            await read(client, b"/tmp/l")
        assert caught.value.code == "invalid_request"


async def test_listing_has_a_depth() -> None:
    async with connected() as client:
        await client.send_all("write", b"", path="/tmp/a/b/c", parents=True)
        for depth, count in ((1, 1), (2, 2), (9, 3)):
            call = await client.open("listdir", path="/tmp", depth=depth)
            assert (await call.result())["count"] == count
            assert call.events[0]["entries"][-1]["path"].startswith(b"/tmp/a")


async def test_watching_reports_changes() -> None:
    async with connected() as client:
        call = await client.open("watch", path="/tmp")
        await call.until(Kind.EVENT)
        await client.send_all("write", b"1", path="/tmp/a")
        await client.send_all("write", b"2", path="/tmp/a")
        await client.call("move", path="/tmp/a", to="/tmp/b")
        await client.call("remove", path="/tmp/b")
        await client.call("mkdir", path="/tmp/c/d", parents=True)
        while len(call.events) < 7:
            await call.until(Kind.EVENT)
        seen = [(event["path"], event["event"]) for event in call.events[1:]]
        assert seen == [
            (b"a", "create"),
            (b"a", "write"),
            (b"a", "rename"),
            (b"b", "rename"),
            (b"b", "remove"),
            (b"c", "create"),
        ]


async def test_a_tree_survives_the_round_trip() -> None:
    async with connected() as client:
        packed = archive(
            files={"d/f": b"12345", "d/odd \udcff\n": b""}, link=("d/s", "f"), hard=("d/h", "d/f")
        )
        assert (await client.send_all("tar_in", packed, path="/tmp/t"))["entries"] == 4
        call = await client.open("tar_out", path="/tmp/t")
        assert (await call.result())["entries"] == 5
        with tarfile.open(
            fileobj=io.BytesIO(bytes(call.received[0])), errors="surrogateescape"
        ) as out:
            kinds = {member.name: member.type for member in out}
        assert kinds["d/h"] == tarfile.LNKTYPE
        assert kinds["d/s"] == tarfile.SYMTYPE
        assert "d/odd \udcff\n" in kinds


@pytest.mark.parametrize("name", ["../evil", "/evil", "d/../../evil", "out/evil"])
async def test_unpacking_stays_inside(name: str) -> None:
    async with connected() as client:
        await client.send_all("tar_in", archive(link=("out", "/etc")), path="/tmp/t")
        await client.send_all("tar_in", archive(files={name: b"x"}), path="/tmp/t")
        for outside in ("/evil", "/etc/evil", "/tmp/evil"):
            with pytest.raises(Failed):
                await client.call("stat", path=outside)


def archive(
    *,
    files: dict[str, bytes] | None = None,
    link: tuple[str, str] | None = None,
    hard: tuple[str, str] | None = None,
) -> bytes:
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w", errors="surrogateescape") as out:
        for name, data in (files or {}).items():
            member = tarfile.TarInfo(name)
            member.size = len(data)
            out.addfile(member, io.BytesIO(data))
        for pair, kind in ((link, tarfile.SYMTYPE), (hard, tarfile.LNKTYPE)):
            if pair:
                member = tarfile.TarInfo(pair[0])
                member.type, member.linkname = kind, pair[1]
                out.addfile(member)
    return packed.getvalue()
