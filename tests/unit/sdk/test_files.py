from __future__ import annotations

import hashlib
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from dsec import InternalError, NotFound, Sandbox, StorageFull, Unavailable
from dsec.wire.sandbox import FileInfo
from tests.unit.sdk.fake import LOST, FakePlatform, Reply, Seen, error, json, lines

HEAD = {"x-file-mtime": "1.5", "x-file-size": "6"}


def written(seen: Seen) -> Reply:
    digest = hashlib.sha256(seen.body).hexdigest()
    return json(FileInfo(path="/a", kind="file", size_bytes=len(seen.body), sha256=digest))


async def test_names_are_bytes(platform: FakePlatform, box: Sandbox) -> None:
    weird = "/a b/ü&=?#%\n\udcff"
    raw = "/a b/ü&=?#%\n".encode() + b"\xff"
    info = FileInfo(path="/a b/?", path_b64=raw, kind="file")
    platform.sandbox("GET", "/files/stat", json(info))
    found = await box.files.stat(weird)
    assert found.path == weird
    call = platform.calls("GET", "/stat")[0]
    assert call.raw_query.startswith(b"path=/a%20b/%C3%BC%26%3D%3F%23%25%0A%FF&")
    await box.files.stat(raw)
    await box.files.stat(Path("/x"))
    assert [c.query["path"] for c in platform.calls("GET", "/stat")] == [weird, weird, "/x"]


async def test_reading_goes_on_where_the_connection_broke(
    platform: FakePlatform, box: Sandbox
) -> None:
    platform.sandbox(
        "GET",
        "/files",
        LOST,
        Reply(200, [b"ab", b"c"], HEAD, broken=True),
        error(Unavailable("x")),
        Reply(200, [b"def"], HEAD),
    )
    assert await box.files.read("/a", offset=10, length=6) == b"abcdef"
    last = platform.calls("GET", "/files")[-1].query
    assert (last["offset"], last["length"]) == ("13", "3")


async def test_a_file_that_changed_meanwhile_is_an_error(
    platform: FakePlatform, box: Sandbox
) -> None:
    platform.sandbox(
        "GET",
        "/files",
        Reply(200, [b"ab"], HEAD, broken=True),
        Reply(200, [b"XX"], HEAD | {"x-file-mtime": "9"}),
    )
    with pytest.raises(Unavailable, match="changed"):
        await box.files.read("/a")


async def test_what_can_be_read_again_is_sent_again(
    platform: FakePlatform, box: Sandbox, tmp_path: Path
) -> None:
    local = tmp_path / "local"
    local.write_bytes(b"z" * 600_000)
    for data, size in ((b"abc", 3), ("ä", 2), (local, 600_000)):
        platform.sandbox("PUT", "/files", LOST, error(Unavailable("x")), written)
        info = await box.files.write("/a", data, mode=0o755, parents=True)
        assert info.size_bytes == size
    call = platform.calls("PUT", "/files")[0]
    assert call.query["mode"] == "755"
    assert call.query["sha256"] == hashlib.sha256(b"abc").hexdigest()


async def test_an_iterator_is_not(platform: FakePlatform, box: Sandbox) -> None:
    async def chunks() -> AsyncIterator[bytes]:
        yield b"a"
        yield b""
        yield b"bc"

    def plain() -> Iterator[bytes]:
        yield b"abc"

    for data in (chunks(), plain(), [b"a", b"bc"]):
        platform.sandbox("PUT", "/files", written)
        assert (await box.files.write("/a", data)).size_bytes == 3
    platform.sandbox("PUT", "/files", LOST, written)
    with pytest.raises(Unavailable):
        await box.files.write("/a", chunks())


async def test_changes_carry_a_key_that_each_attempt_repeats(
    platform: FakePlatform, box: Sandbox
) -> None:
    info, refusal = json(FileInfo(path="/d", kind="dir")), error(Unavailable("edge restarts"))
    platform.sandbox("PUT", "/files", LOST, refusal, json(FileInfo(path="/a", kind="file")))
    platform.sandbox("POST", "/files/mkdir", LOST, refusal, info)
    platform.sandbox("POST", "/files/move", LOST, refusal, info)
    platform.sandbox("DELETE", "/files", LOST, refusal, json({"removed": 1}))
    platform.sandbox("PUT", "/tree", LOST, refusal, json({"entries": 1}))
    await box.files.write("/a", b"appended", append=True)
    await box.files.mkdir("/d")
    await box.files.move("/d", "/e")
    await box.files.remove("/e")
    await box.files.put_tar("/e", b"tar")
    keys = [seen.headers["idempotency-key"] for seen in platform.seen if seen.method != "GET"]
    assert [len(set(keys[at : at + 3])) for at in range(0, 15, 3)] == [1] * 5
    assert len(set(keys)) == 5


async def test_a_write_that_arrived_wrong_is_an_error(platform: FakePlatform, box: Sandbox) -> None:
    platform.sandbox("PUT", "/files", json(FileInfo(path="/a", kind="file", sha256="00")))
    with pytest.raises(InternalError, match="not what was sent"):
        await box.files.write("/a", b"abc")
    platform.sandbox("PUT", "/files", error(StorageFull("quota")))
    with pytest.raises(StorageFull):
        await box.files.write("/a", b"abc")


async def test_exists(platform: FakePlatform, box: Sandbox) -> None:
    platform.sandbox("GET", "/files/stat", error(NotFound("no", kind="path")))
    assert not await box.files.exists("/a")
    platform.sandbox("GET", "/files/stat", error(NotFound("no", kind="sandbox")))
    with pytest.raises(NotFound):
        await box.files.exists("/a")
    platform.sandbox("GET", "/files/stat", json(FileInfo(path="/a", kind="dir")))
    assert await box.files.exists("/a")


async def test_the_rest(platform: FakePlatform, box: Sandbox) -> None:
    info = FileInfo(path="/d/f", kind="file", size_bytes=1, mode=0o644)
    platform.sandbox("GET", "/files/list", json([info]))
    platform.sandbox("POST", "/files/mkdir", json(FileInfo(path="/d", kind="dir")))
    platform.sandbox("POST", "/files/move", json(info))
    platform.sandbox("DELETE", "/files", json({"removed": 3}))
    assert [f.name for f in await box.files.list("/d", depth=2)] == ["f"]
    assert (await box.files.mkdir("/d", parents=True)).is_dir
    assert (await box.files.move("/x", "/d/f", overwrite=True)).is_file
    assert await box.files.remove("/d", recursive=True) == 3
    assert platform.calls("DELETE", "/files")[0].query == {"path": "/d", "recursive": "true"}


async def test_watching_begins_when_the_block_does_and_tells_of_gaps(
    platform: FakePlatform, box: Sandbox
) -> None:
    started = {"type": "watching"}
    platform.sandbox(
        "GET",
        "/files/watch",
        lines(started, {"type": "watch", "path": "a", "event": "create"}, broken=True),
        LOST,
        lines(started, {"type": "watch", "path": "b", "event": "write"}, hang=True),
    )
    async with box.files.watch("/d", recursive=True) as events:
        got = [(await anext(events)) for _ in range(3)]
    assert [(event.path, event.event) for event in got] == [
        ("a", "create"),
        ("", "overflow"),
        ("b", "write"),
    ]


async def test_trees_go_up_and_come_down(
    platform: FakePlatform, box: Sandbox, tmp_path: Path
) -> None:
    source = tmp_path / "source"
    (source / "sub/empty").mkdir(parents=True)
    (source / "sub/run.sh").write_bytes(b"#!/bin/sh\n" * 100_000)
    (source / "sub/run.sh").chmod(0o755)
    (source / "link").symlink_to("sub/run.sh")
    (source / "n\udcffme").write_text("x")
    (source / "none").touch()
    sent: list[bytes] = []

    def keep(seen: Seen) -> Reply:
        sent.append(seen.body)
        return json({"entries": 6})

    platform.sandbox("PUT", "/tree", LOST, keep)
    steps: list[str] = []
    assert await box.files.upload_tree(source, "/w", progress=lambda p: steps.append(p.path)) == 6
    assert "sub/run.sh" in steps
    platform.sandbox(
        "GET", "/tree", Reply(200, [sent[0][i : i + 7777] for i in range(0, len(sent[0]), 7777)])
    )
    target = tmp_path / "target"
    done = await box.files.download_tree("/w", target)
    assert (done.entries, done.skipped) == (6, [])
    assert (target / "sub/run.sh").read_bytes() == b"#!/bin/sh\n" * 100_000
    assert (target / "sub/run.sh").stat().st_mode & 0o777 == 0o755
    assert (target / "link").readlink() == Path("sub/run.sh")
    assert (target / "n\udcffme").read_text() == "x"
    assert (target / "sub/empty").is_dir()


async def test_a_download_that_breaks_off_is_an_error(
    platform: FakePlatform, box: Sandbox, tmp_path: Path
) -> None:
    named = {"x-request-id": "r1"}
    platform.sandbox("GET", "/tree", Reply(200, [b"x" * 100], named, broken=True))
    with pytest.raises(Unavailable, match=r"trajectory.* log of request r1"):
        await box.files.download_tree("/w", tmp_path)
    platform.sandbox("GET", "/tree", Reply(200, [b"x" * 1024]))
    with pytest.raises(Unavailable, match="tar"):
        await box.files.download_tree("/w", tmp_path)


async def test_ports_carry_bytes_both_ways(box: Sandbox) -> None:
    stream = await box.connect_port(8000)
    await stream.send(b"ping")
    assert await stream.receive() == b"ping"
    await stream.send_eof()
    assert await stream.receive() == b""
    await stream.aclose()
