"""Files, archives and watches of `aether serve`."""

from __future__ import annotations

import hashlib
import io
import os
import stat
import subprocess
import tarfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from dsec.wire.frames import Kind
from tests.kernel.serving import Client, Refused, Serving, Stream, eventually, refused, serving

pytestmark = pytest.mark.needs_root


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    with serving(tmp_path_factory.mktemp("serve")) as server:
        yield server


@pytest.fixture
def client(server: Serving) -> Iterator[Client]:
    client = server.client()
    yield client
    client.close()
    eventually(lambda: not list(server.group.glob("files-*")) if server.group else True)


@pytest.fixture
def place(tmp_path: Path) -> Path:
    # Others may get here: pytest closes its own directories.
    for parent in (tmp_path, tmp_path.parent, tmp_path.parent.parent):
        parent.chmod(0o755)
    return tmp_path


def read(client: Client, path: object, **args: Any) -> bytes:
    result, events, data = client.open("read", path=os.fsencode(str(path)), **args).finish()
    got = data.get(0, b"")
    assert result == {"bytes": len(got)}
    assert events[0]["kind"]
    return got


def write(client: Client, path: object, data: bytes, **args: Any) -> dict[str, Any]:
    name = path if isinstance(path, bytes) else str(path)
    stream = client.open("write", path=name, **args)
    stream.send(data)
    if not stream.over:
        stream.end()
    info: dict[str, Any] = stream.result()
    return info


@pytest.mark.parametrize("size", [0, 1, 65536, 1 << 20, 20 << 20])
def test_write_and_read(client: Client, place: Path, size: int) -> None:
    data = os.urandom(size)
    digest = hashlib.sha256(data).hexdigest()
    info = write(client, place / "file", data, sha256=digest)
    assert (info["sha256"], info["size_bytes"], info["kind"]) == (digest, size, "file")
    assert (place / "file").read_bytes() == data
    assert read(client, place / "file") == data


def test_parts(client: Client, place: Path) -> None:
    write(client, place / "file", b"0123456789")
    assert read(client, place / "file", offset=3) == b"3456789"
    assert read(client, place / "file", offset=3, length=2) == b"34"
    assert read(client, place / "file", offset=30) == b""
    write(client, place / "file", b"ab", append=True)
    assert read(client, place / "file", offset=9) == b"9ab"


def test_two_gigabytes_stream_through(client: Client, server: Serving, place: Path) -> None:
    with (place / "big").open("wb") as file:
        file.truncate(2 << 30)
    stream = client.open("read", path=str(place / "big"))
    assert stream.event()["size_bytes"] == 2 << 30
    total = 0
    while (frame := stream.next()).kind is Kind.DATA:
        total += len(frame.payload)
    assert total == 2 << 30
    assert server.rss_kib() < 8 * 1024
    (place / "big").unlink()


def test_modes_and_owners(client: Client, place: Path) -> None:
    assert write(client, place / "new", b"x")["mode"] == 0o644
    assert write(client, place / "script", b"x", mode=0o4755)["mode"] == 0o4755
    (place / "old").write_bytes(b"old")
    (place / "old").chmod(0o640)
    os.chown(place / "old", 1234, 50)
    info = write(client, place / "old", b"new")
    assert (info["mode"], info["uid"], info["gid"]) == (0o640, 1234, 50)
    info = client.call("stat", path="/")
    assert (info["user"], info["group"], info["kind"]) == ("root", "root", "dir")


def test_links_are_written_through(client: Client, place: Path) -> None:
    (place / "target").write_bytes(b"old")
    (place / "link").symlink_to("target")
    (place / "dangling").symlink_to("made")
    (place / "loop").symlink_to("loop")
    write(client, place / "link", b"new")
    write(client, place / "dangling", b"made")
    assert (place / "link").is_symlink()
    assert (place / "target").read_bytes() == b"new"
    assert (place / "made").read_bytes() == b"made"
    with pytest.raises(Refused):
        write(client, place / "loop", b"x")


def test_nothing_is_changed_when_it_fails(client: Client, place: Path) -> None:
    (place / "file").write_bytes(b"old")
    with pytest.raises(Refused) as caught:
        write(client, place / "file", b"new", sha256="0" * 64)
    assert caught.value.code == "conflict"
    stream = client.open("write", path=str(place / "file"))
    stream.send(b"half")
    stream.cancel()
    with pytest.raises(Refused) as caught:
        stream.result()
    assert caught.value.code == "cancelled"
    eventually(lambda: sorted(p.name for p in place.iterdir()) == ["file"])
    assert (place / "file").read_bytes() == b"old"


def test_a_full_disk(client: Client, server: Serving, place: Path) -> None:
    # Not by a command of its own: none may mount.
    inside = ["nsenter", "--mount", f"--target={server.pid}"]
    mount = ["mount", "-t", "tmpfs", "-o", "size=1m", "none", str(place)]
    subprocess.run([*inside, *mount], check=True)
    try:
        write(client, place / "file", b"old")
        with pytest.raises(Refused) as caught:
            write(client, place / "file", bytes(3 << 20))
        assert caught.value.code == "storage_full"
        assert read(client, place / "file") == b"old"
        listed = client.open("listdir", path=str(place)).finish()[1]
        assert [e["path"] for e in listed[0]["entries"]] == [os.fsencode(place / "file")]
    finally:
        subprocess.run([*inside, "umount", str(place)], check=True)


def test_parents_and_refusals(client: Client, place: Path) -> None:
    path = place / "a/b/c"
    with pytest.raises(Refused) as caught:
        write(client, path, b"x")
    assert (caught.value.code, caught.value.kind) == ("not_found", "path")
    write(client, path, b"x", parents=True)
    assert path.read_bytes() == b"x"
    for bad in (place, place / "a/"):
        with pytest.raises(Refused) as caught:
            write(client, bad, b"x")
        assert caught.value.code == "invalid_request"
    assert refused(client, "read", path=str(place))[0] == "invalid_request"
    assert refused(client, "read", path=str(place / "no")) == ("not_found", "path")
    assert refused(client, "read", path="a\0b")[0] == "invalid_request"
    assert refused(client, "read", path="/dev/zero")[0] == "invalid_request"
    assert read(client, "/dev/zero", length=300_000) == bytes(300_000)
    assert b"MemTotal:" in read(client, "/proc/meminfo")
    assert refused(client, "stat", path="x" * 300)[0] == "invalid_request"


def test_users_own_permissions(client: Client, server: Serving, place: Path) -> None:
    (place / "secret").write_bytes(b"s")
    (place / "secret").chmod(0o600)
    (place / "open").mkdir()
    (place / "open").chmod(0o777)
    assert (
        refused(client, "read", path=str(place / "secret"), user="nobody")[0] == "permission_denied"
    )
    with pytest.raises(Refused) as caught:
        write(client, place / "secret", b"x", user="nobody")
    assert caught.value.code == "permission_denied"
    with pytest.raises(Refused) as caught:
        write(client, place / "new", b"x", user="nobody")
    assert caught.value.code == "permission_denied"
    info = write(client, place / "open/mine", b"x", user="nobody")
    assert (info["uid"], info["user"]) == (65534, "nobody")
    shared = place / "open/shared"
    shared.write_bytes(b"roots")
    shared.chmod(0o666)
    assert write(client, shared, b"x", user="nobody")["uid"] == 0
    shared.chmod(0o644)
    with pytest.raises(Refused) as caught:
        write(client, shared, b"y", user="nobody")
    assert caught.value.code == "permission_denied"
    assert shared.read_bytes() == b"x"
    os.mkfifo(place / "fifo")
    (place / "fifo").chmod(0o666)
    waiting = client.open("read", path=str(place / "fifo"), length=1, user="nobody")
    eventually(lambda: len(server.members()) == 1)
    (worker,) = server.members()
    eventually(lambda: "Uid:\t65534" in Path(f"/proc/{worker}/status").read_text())
    status = Path(f"/proc/{worker}/status").read_text()
    waiting.cancel()
    assert "CapEff:\t0000000000000000" in status
    assert "CapPrm:\t0000000000000000" in status
    assert "Groups:\t65534" in status
    assert refused(client, "stat", path="/", user="zed") == ("not_found", "user")


ODD = [b"sp ace", b"new\nline", b"\xff\xfe", "é".encode(), b"-rf", b"'\"", b"x" * 255, b"\\", b"*"]


@pytest.mark.parametrize("name", ODD, ids=range(len(ODD)))
def test_odd_names(client: Client, place: Path, name: bytes) -> None:
    path = os.fsencode(place) + b"/" + name
    assert write(client, path, b"x")["path"] == path
    assert client.call("stat", path=path)["path"] == path
    entries = client.open("listdir", path=str(place)).finish()[1][0]["entries"]
    assert [e["path"] for e in entries] == [path]
    assert client.call("move", path=path, to=path[:-1] + b"Z")["path"] == path[:-1] + b"Z"
    assert client.call("remove", path=path[:-1] + b"Z") == {"removed": 1}


def wrote(client: Client, path: Path, data: bytes) -> bool:
    """Whether somebody read the FIFO by now."""
    try:
        write(client, path, data)
    except Refused:
        return False
    return True


def test_a_fifo_blocks_nobody(client: Client, place: Path) -> None:
    os.mkfifo(place / "fifo")
    waiting = client.open("read", path=str(place / "fifo"), length=100)
    writing = client.open("write", path=str(place / "fifo2"), atomic=False)
    began = time.monotonic()
    assert client.run("true")["exit_code"] == 0
    assert client.call("stat", path=str(place / "fifo"))["kind"] == "fifo"
    assert time.monotonic() - began < 0.5
    waiting.cancel()
    with pytest.raises(Refused) as caught:
        waiting.result()
    assert caught.value.code == "cancelled"
    writing.end()
    writing.result()
    with pytest.raises(Refused) as caught:
        write(client, place / "fifo", b"nobody reads", atomic=False)
    assert caught.value.code == "invalid_request"
    through = client.open("read", path=str(place / "fifo"), length=3)
    eventually(lambda: wrote(client, place / "fifo", b"abcdef"))
    assert through.finish()[2][0] == b"abc"
    eventually(lambda: len(client.call("processes")) == 1)


def test_a_killed_worker_is_an_error(client: Client) -> None:
    stream = client.open("read", path="/dev/zero", length=1 << 40, credit=False)
    stream.event()
    workers = [p["pid"] for p in client.call("processes") if p["pid"] != 1]
    client.run("kill", "-9", *map(str, workers))
    stream.credit(1 << 30)
    with pytest.raises(Refused) as caught:
        stream.result()
    assert caught.value.code == "internal_error"


def test_listing(client: Client, place: Path) -> None:
    for i in range(3000):
        (place / f"f{i}").touch()
    (place / "d/e/f").mkdir(parents=True)
    (place / "d/link").symlink_to("/etc")
    result, events, _ = client.open("listdir", path=str(place)).finish()
    entries = [e for event in events for e in event["entries"]]
    assert result == {"count": 3001}
    assert len({e["path"] for e in entries}) == 3001
    result, events, _ = client.open("listdir", path=str(place / "d"), depth=5).finish()
    found = {e["path"].decode()[len(str(place)) :]: e["kind"] for e in events[0]["entries"]}
    assert found == {"/d/e": "dir", "/d/e/f": "dir", "/d/link": "symlink"}
    target = next(e["target"] for e in events[0]["entries"] if e["kind"] == "symlink")
    assert target == b"/etc"
    assert refused(client, "listdir", path=str(place / "f1"))[0] == "invalid_request"
    assert refused(client, "listdir", path=str(place / "no")) == ("not_found", "path")


def test_directories_and_moves(client: Client, place: Path) -> None:
    assert client.call("mkdir", path=str(place / "a"), mode=0o700)["mode"] == 0o700
    assert refused(client, "mkdir", path=str(place / "a"))[0] == "conflict"
    assert client.call("mkdir", path=str(place / "a"), parents=True)["kind"] == "dir"
    client.call("mkdir", path=str(place / "b/c/d"), parents=True)
    (place / "one").write_text("1")
    (place / "two").write_text("2")
    move = {"path": str(place / "one"), "to": str(place / "two")}
    assert refused(client, "move", **move, overwrite=False)[0] == "conflict"
    client.call("move", **move)
    assert (place / "two").read_text() == "1"
    assert refused(client, "move", **move) == ("not_found", "path")
    assert client.call("stat", path=str(place / "two"), follow=True)["size_bytes"] == 1


def test_remove_never_follows(client: Client, place: Path) -> None:
    (place / "keep").mkdir()
    (place / "keep/file").touch()
    (place / "gone/deep").mkdir(parents=True)
    (place / "gone/link").symlink_to(place / "keep")
    assert refused(client, "remove", path=str(place / "gone"))[0] == "conflict"
    assert client.call("remove", path=str(place / "gone"), recursive=True) == {"removed": 3}
    (place / "link").symlink_to(place / "keep")
    assert client.call("remove", path=str(place / "link"), recursive=True) == {"removed": 1}
    assert (place / "keep/file").exists()
    assert refused(client, "remove", path=str(place / "gone")) == ("not_found", "path")
    deep = place / "deep"
    deep.mkdir()
    client.run(shell=f"cd {deep}; for i in $(seq 300); do mkdir d; cd d; done")
    assert client.call("remove", path=str(deep), recursive=True) == {"removed": 301}


def watch_until(stream: Stream, wanted: tuple[bytes, str]) -> list[tuple[bytes, str]]:
    seen = []
    while True:
        event = stream.event(5)
        seen.append((event["path"], event["event"]))
        if seen[-1] == wanted:
            return seen


def test_watch(client: Client, place: Path) -> None:
    (place / "sub").mkdir()
    stream = client.open("watch", path=str(place), recursive=True)
    assert stream.event() == {"watching": True}
    (place / "file").write_text("x")
    watch_until(stream, (b"file", "create"))
    watch_until(stream, (b"file", "write"))
    (place / "file").chmod(0o600)
    watch_until(stream, (b"file", "chmod"))
    (place / "file").rename(place / "sub/moved")
    watch_until(stream, (b"file", "rename"))
    watch_until(stream, (b"sub/moved", "create"))
    (place / "sub/moved").unlink()
    watch_until(stream, (b"sub/moved", "remove"))
    (place / "x/y/z").mkdir(parents=True)
    (place / "x/y/z/new").write_text("1")
    watch_until(stream, (b"x/y/z/new", "create"))
    time.sleep(0.1)
    (place / "x/y/z/new").write_text("22")
    watch_until(stream, (b"x/y/z/new", "write"))
    (place / "x").rename(place / "w")
    (place / "w/y/z/new").write_text("333")
    watch_until(stream, (b"w/y/z/new", "write"))
    (place / os.fsdecode(b"\xff")).touch()
    watch_until(stream, (b"\xff", "create"))
    stream.cancel()
    with pytest.raises(Refused) as caught:
        stream.result()
    assert caught.value.code == "cancelled"
    eventually(lambda: len(client.call("processes")) == 1)


def test_watch_of_one_file_and_its_end(client: Client, place: Path) -> None:
    (place / "file").write_text("x")
    stream = client.open("watch", path=str(place / "file"))
    stream.event()
    (place / "file").write_text("y")
    watch_until(stream, (b"", "write"))
    (place / "file").unlink()
    result, events, _ = stream.finish()
    assert result is None
    assert {"path": b"", "event": "remove"} in events
    assert refused(client, "watch", path=str(place / "no")) == ("not_found", "path")


def test_a_slow_watcher_is_told_of_an_overflow(client: Client, place: Path) -> None:
    stream = client.open("watch", path=str(place))
    stream.event()
    workers = [str(p["pid"]) for p in client.call("processes") if p["pid"] != 1]
    client.run("kill", "-STOP", *workers)
    for i in range(20_000):
        (place / f"{i % 100}").write_text(str(i))
    client.run("kill", "-CONT", *workers)
    watch_until(stream, (b"", "overflow"))


def tree(place: Path) -> Path:
    root = place / "root"
    (root / "sub/empty").mkdir(parents=True)
    (root / "file").write_bytes(os.urandom(100_000))
    (root / "file").chmod(0o640)
    os.chown(root / "file", 1234, 50)
    os.link(root / "file", root / "sub/hard")
    (root / "link").symlink_to("sub/../file")
    (root / "absolute").symlink_to("/etc/passwd")
    (root / ("n" * 200)).mkdir()
    (root / ("n" * 200) / ("m" * 200)).write_bytes(b"long")
    (root / ("t" * 50)).symlink_to("u" * 150)
    (root / os.fsdecode(b"\xff\xfe")).write_bytes(b"odd")
    (root / "sub/odd \u00e9\n name").write_bytes(b"two lines")
    (root / "sub/to a line").symlink_to("odd \u00e9\n name")
    (root / "empty").touch()
    (root / "suid").touch()
    (root / "suid").chmod(0o4755)
    os.mkfifo(root / "fifo")
    (root / "sub").chmod(0o500)
    for path in [*root.rglob("*"), root]:
        os.utime(path, (1e9, 1e9), follow_symlinks=False)
    return root


def snapshot(root: Path) -> dict[bytes, tuple[object, ...]]:
    found: dict[bytes, tuple[object, ...]] = {}
    for path in root.rglob("*"):
        info = path.lstat()
        kind = stat.S_IFMT(info.st_mode)
        content: object = path.readlink() if path.is_symlink() else None
        if kind == stat.S_IFREG:
            content = path.read_bytes()
        name = os.fsencode(path.relative_to(root))
        found[name] = (info.st_mode, info.st_uid, info.st_gid, int(info.st_mtime), content)
    return found


def test_archives_there_and_back(client: Client, place: Path) -> None:
    root = tree(place)
    result, _, data = client.open("tar_out", path=str(root)).finish()
    assert result == {"entries": 15}
    stream = client.open("tar_in", path=str(place / "copy"))
    stream.send(data[0])
    stream.end()
    assert stream.result() == {"entries": 15}
    assert snapshot(place / "copy") == snapshot(root)
    assert (place / "copy/file").samefile(place / "copy/sub/hard")
    # And what others read and write.
    with tarfile.open(fileobj=io.BytesIO(data[0])) as archive:
        assert len(archive.getmembers()) == 15
        archive.extractall(place / "python", filter="fully_trusted")
    assert snapshot(place / "python").keys() == snapshot(root).keys()
    for form in (tarfile.PAX_FORMAT, tarfile.GNU_FORMAT):
        buffer = io.BytesIO()
        with tarfile.open(fileobj=buffer, mode="w", format=form) as archive:
            archive.add(root, ".")
        stream = client.open("tar_in", path=str(place / f"in{form}"))
        stream.send(buffer.getvalue())
        stream.end()
        stream.result()
        assert snapshot(place / f"in{form}") == snapshot(root)
    one = client.open("tar_out", path=str(root / "file")).finish()
    assert one[0] == {"entries": 1}


def until_refused(stream: Stream) -> tuple[str, bytes]:
    """The error a stream ends with, and what had come of it."""
    data = b""
    while (frame := stream.next()).kind is Kind.DATA:
        data += frame.payload
    assert frame.kind is Kind.ERROR, frame
    return msgspec.msgpack.decode(frame.payload)["code"], data


@pytest.mark.parametrize("size", [10, 1 << 20])
def test_of_an_archive_that_fails_nothing_more_goes_out(
    client: Client, place: Path, size: int
) -> None:
    (place / "a").write_bytes(b"a" * size)
    (place / "b").touch(mode=0o600)
    code, data = until_refused(client.open("tar_out", path=str(place), user="nobody"))
    assert code == "permission_denied"
    assert bool(data) is (size > 10)  # of what is little nothing had gone out
    assert not data.endswith(bytes(1024))  # as a whole archive does


def test_archives_as_another_user(client: Client, place: Path) -> None:
    root = tree(place)
    place.chmod(0o777)
    for path in (root / "suid", root / "file", root / "fifo"):
        path.unlink()
    _, _, data = client.open("tar_out", path=str(root)).finish()
    stream = client.open("tar_in", path=str(place / "copy"), user="nobody")
    stream.send(data[0])
    stream.end()
    stream.result()
    assert {p.lstat().st_uid for p in (place / "copy").rglob("*")} == {65534}


def hostile(*members: tuple[str, str, str]) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        for kind, name, target in members:
            info = tarfile.TarInfo(name)
            info.type = {
                "file": tarfile.REGTYPE,
                "dir": tarfile.DIRTYPE,
                "sym": tarfile.SYMTYPE,
                "link": tarfile.LNKTYPE,
                "dev": tarfile.CHRTYPE,
            }[kind]
            info.linkname = target
            data = b"evil" if kind == "file" else b""
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))
    return buffer.getvalue()


@pytest.mark.parametrize(
    "members",
    [
        [("file", "../evil", "")],
        [("file", "/{place}/evil", "")],
        [("file", "a/../../evil", "")],
        [("sym", "out", ".."), ("file", "out/evil", "")],
        [("sym", "out", "{place}"), ("file", "out/evil", "")],
        [("sym", "a", "."), ("sym", "a/b", ".."), ("file", "b/evil", "")],
        [("link", "hard", "../victim"), ("file", "hard", "")],
        [("link", "hard", "/{place}/victim")],
        [("sym", "out", ".."), ("link", "hard", "out/victim")],
        [("sym", "out", ".."), ("dir", "out", "")],
        [("sym", "out", ".."), ("dir", "out/evil", "")],
        [("sym", "proc", "/proc/self/root"), ("file", "proc/{place}/evil", "")],
    ],
    ids=range(12),
)
def test_archives_cannot_leave(
    client: Client, place: Path, members: list[tuple[str, str, str]]
) -> None:
    (place / "victim").write_text("safe")
    place.chmod(0o711)
    filled = [tuple(part.replace("{place}", str(place)) for part in m) for m in members]
    stream = client.open("tar_in", path=str(place / "in"))
    stream.send(hostile(*filled))  # type: ignore[arg-type]
    if not stream.over:
        stream.end()
    with pytest.raises(Refused) as caught:
        stream.result()
    assert caught.value.code in {"invalid_request", "not_found"}
    assert sorted(p.name for p in place.iterdir()) == ["in", "victim"]
    assert (place / "victim").read_text() == "safe"
    assert (place / "victim").stat().st_nlink == 1
    assert place.stat().st_mode & 0o777 == 0o711


def test_links_in_an_archive_may_be_replaced(client: Client, place: Path) -> None:
    (place / "victim").write_text("safe")
    stream = client.open("tar_in", path=str(place / "in"))
    stream.send(hostile(("sym", "a", "../victim"), ("file", "a", "")))
    stream.end()
    assert stream.result() == {"entries": 2}
    assert (place / "in/a").read_bytes() == b"evil"
    assert (place / "victim").read_text() == "safe"


def test_what_is_no_archive(client: Client, place: Path) -> None:
    for data in (os.urandom(5000), b"x" * 512, hostile(("dev", "null", ""))):
        stream = client.open("tar_in", path=str(place / "in"))
        stream.send(data)
        if not stream.over:
            stream.end()
        with pytest.raises(Refused) as caught:
            stream.result()
        assert caught.value.code in {"invalid_request", "unsupported"}


def test_processes(client: Client) -> None:
    client.call("start", command_id="seen", argv=["sleep", "61"], user="nobody")
    found = next(p for p in client.call("processes") if p["argv"] == ["sleep", "61"])
    assert (found["uid"], found["ppid"]) == (65534, 1)
    assert found["state"] in {"S", "R", "D"}
    assert found["rss_bytes"] > 0
    client.call("kill", command_id="seen")


def test_the_workers_own_memory_and_program_are_not_files_to_read(
    client: Client, place: Path
) -> None:
    for name in ("maps", "exe", "environ", "root/etc/passwd", "fd/0", "task/../maps"):
        (place / "link").symlink_to(f"/proc/self/{name}")
        for path in (f"/proc/self/{name}", str(place / "link")):
            with pytest.raises(Refused) as caught:
                client.open("read", path=path, length=100).finish()
            assert caught.value.code in {"permission_denied", "invalid_request"}, path
        (place / "link").unlink()
    assert client.open("read", path="/proc/meminfo").finish()[2][0]


def test_an_archive_cut_short_leaves_no_part_of_a_file(client: Client, place: Path) -> None:
    whole = io.BytesIO()
    with tarfile.open(fileobj=whole, mode="w") as archive:
        member = tarfile.TarInfo("cut")
        member.size = 100_000
        archive.addfile(member, io.BytesIO(bytes(100_000)))
    (place / "cut").write_bytes(b"old")
    stream = client.open("tar_in", path=str(place))
    stream.send(whole.getvalue()[:50_000])
    stream.end()
    with pytest.raises(Refused) as caught:
        stream.result()
    assert caught.value.code == "invalid_request"
    assert [(p.name, p.read_bytes()) for p in place.iterdir()] == [("cut", b"old")]
