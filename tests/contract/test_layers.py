"""Workspaces and toolkits as named, versioned things: published, listed, used, removed."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import anyio
import httpx
import pytest

from dsec import (
    Conflict,
    DSecClient,
    DsecError,
    ImageProgress,
    InvalidRequest,
    LayerReady,
    NotFound,
    SandboxTree,
)
from tests.contract import image
from tests.contract.capabilities import needs
from tests.contract.conftest import MakeArgs
from tests.contract.expect import eventually, refusal
from tests.contract.parts import Parts, tar_of
from tests.contract.server import Server
from tests.tars import Tar

pytestmark = [needs("layers")]

LONGEST_TAG = "v" * 100


def packed(data: bytes, packer: str) -> bytes:
    if not packer:
        return data
    return subprocess.run([packer, "-c"], input=data, capture_output=True, check=True).stdout


# -- ways in -----------------------------------------------------------------------------------


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A directory with a file each of two users, a link and a program."""
    place = tmp_path / "tree"
    (place / "sub/empty").mkdir(parents=True)
    (place / "sub/f").write_text("f")
    (place / "run").write_text("#!/bin/sh\necho ran\n")
    (place / "run").chmod(0o755)
    (place / "link").symlink_to("sub/f")
    (place / "same").hardlink_to(place / "sub/f")
    os.chown(place / "run", 1000, 1000)
    os.utime(place / "sub/f", (1_234_567_890, 1_234_567_890))
    return place


@pytest.mark.parametrize(
    ("kind", "at", "found"),
    [
        ("workspace", None, "/workspace"),
        ("toolkit", None, ""),
        ("workspace", "/srv/task", "/srv/task"),
        ("toolkit", "/opt/agent", "/opt/agent"),
    ],
)
async def test_a_directory_goes_to_its_place(
    client: DSecClient, args: MakeArgs, parts: Parts, tree: Path, kind: str, at: str, found: str
) -> None:
    made = await parts.layer(kind, tree, at=at, description="a tree")  # type: ignore[arg-type]
    assert (made.kind, made.description) == (kind, "a tree")
    assert made.digest.startswith("sha256:")
    assert made.size_bytes == len("f") + len("#!/bin/sh\necho ran\n")
    given = {"workspace": made.name} if kind == "workspace" else {"toolkits": [made.name]}
    async with await client.run_container(args(**given)) as sandbox:
        assert (await sandbox.exec([f"{found}/run"])).stdout == "ran\n"
        shown = await sandbox.run_shell(
            f"cd {found}/ && stat -c '%n %h %u %g %Y' run link same sub/f"
        )
        lines = [line.rsplit(" ", 1) for line in shown.stdout.splitlines()]
        assert [line[0] for line in lines] == [
            "run 1 0 0",
            "link 1 0 0",
            "same 2 0 0",
            "sub/f 2 0 0",
        ]
        assert lines[-1][1] == "1234567890"
        assert (await sandbox.files.stat(f"{found}/link", follow=False)).target == "sub/f"
        assert await sandbox.files.list(f"{found}/sub/empty") == []


@pytest.mark.parametrize(
    ("owner", "wanted"), [(None, "0 0"), ("1000:7", "1000 7"), ("keep", "1000 1000")]
)
async def test_owners_are_as_asked_for(
    client: DSecClient, args: MakeArgs, parts: Parts, tree: Path, owner: str, wanted: str
) -> None:
    made = await parts.workspace(tree, owner=owner)
    async with await client.run_container(args(workspace=made.name)) as sandbox:
        shown = await sandbox.run_shell("stat -c '%u %g' /workspace/run")
        assert shown.stdout.strip() == wanted


@pytest.mark.parametrize("owner", ["nobody", "1:", "-1:0", "1:2:3", ""])
async def test_a_bad_owner_is_refused(parts: Parts, tree: Path, owner: str) -> None:
    with refusal(InvalidRequest):
        await parts.workspace(tree, owner=owner)


@pytest.mark.parametrize("packer", ["", "gzip", "xz", "zstd"])
async def test_a_tar_may_be_packed(
    client: DSecClient, args: MakeArgs, parts: Parts, packer: str
) -> None:
    data = Tar().add("opt/f", content=b"f" * 5000, uid=1000, mode=0o600).data()
    plain = await parts.toolkit(parts.file(data))
    made = await parts.toolkit(parts.file(packed(data, packer)))
    assert (made.digest, made.entries) == (plain.digest, plain.entries)
    async with await client.run_container(args(toolkits=[made.name])) as sandbox:
        info = await sandbox.files.stat("/opt/f")
        assert (info.size_bytes, info.uid, info.mode) == (5000, 1000, 0o600)


async def test_a_sandboxs_directory_becomes_a_workspace(
    client: DSecClient, args: MakeArgs, parts: Parts
) -> None:
    base = await parts.workspace({"workspace/given": b"given", "workspace/gone": b"g"})
    prepare = (
        "cd /workspace && echo made > made && rm gone && chown 1000:1000 made && chmod 4750 made && "
        "ln made linked && ln -s made sym && mkdir -p d/e && mkfifo d/pipe && chown 1000 ."
    )
    async with await client.run_container(args(workspace=base.name)) as sandbox:
        (await sandbox.run_shell(prepare)).check()
        made = await parts.workspace(SandboxTree(sandbox.id, "/workspace"))
        moved = await parts.toolkit(SandboxTree(sandbox.id, "/workspace"), at="/opt/kept")
    wanted = args(workspace=made.name, toolkits=[moved.name])
    async with await client.run_container(wanted) as sandbox:
        for place in ("/workspace", "/opt/kept"):
            shown = await sandbox.run_shell(f"cd {place} && stat -c '%n %a %u %h' . made && ls")
            expected = [". 755 1000 3", "made 4750 1000 2", "d", "given", "linked", "made", "sym"]
            assert [line for line in shown.stdout.splitlines() if line[0] != "."] == expected[1:]
            assert shown.stdout.splitlines()[0].startswith(". 755 1000")
            assert await sandbox.files.read(f"{place}/sym") == b"made\n"
        assert not await sandbox.files.exists("/workspace/gone")


async def test_a_sandbox_or_place_that_is_not_there_is_not_found(
    client: DSecClient, args: MakeArgs, parts: Parts
) -> None:
    with refusal(NotFound):
        await parts.workspace(SandboxTree("sbxnone1234567890", "/"))
    async with await client.run_container(args()) as sandbox:
        with refusal(NotFound):
            await parts.workspace(SandboxTree(sandbox.id, "/nowhere"))
    assert await client.layers.list() == []


BROKEN = {
    "no tar": b"this is no tar" * 100,
    "cut short": tar_of({"a": bytes(100_000)}).data()[:50_000],
    "cut gzip": packed(tar_of({"a": bytes(100_000)}).data(), "gzip")[:-20],
    "outside": Tar().add("../../evil", content=b"x").data(),
    "linked outside": Tar()
    .symlink("s", "/etc")
    .add("s/evil", content=b"x")
    .link("h", "../x")
    .data(),
    "dangling hard link": Tar().link("h", "nowhere").data(),
}


@pytest.mark.adversarial
@pytest.mark.parametrize("how", BROKEN)
async def test_a_broken_tar_is_refused_and_nothing_is_kept(
    client: DSecClient, parts: Parts, how: str
) -> None:
    with refusal(InvalidRequest):
        await parts.toolkit(parts.file(BROKEN[how]))
    assert await client.layers.list() == []


async def test_a_source_that_is_not_there_is_said_before_anything_is_sent(
    client: DSecClient, tmp_path: Path
) -> None:
    with pytest.raises((DsecError, FileNotFoundError), match="nowhere"):
        await client.layers.publish("toolkit", "x:v1", tmp_path / "nowhere").wait()
    assert await client.layers.list() == []


async def test_progress_ends_with_the_layer(client: DSecClient, parts: Parts) -> None:
    path = parts.file(tar_of({"a": bytes(1 << 20)}).data())
    events = [event async for event in client.layers.publish("toolkit", "seen:v1", path)]
    parts.layers.append(("toolkit", "seen:v1"))
    assert isinstance(events[-1], LayerReady)
    assert events[-1].layer.name == "seen:v1"
    assert events[:-1]
    assert all(isinstance(event, ImageProgress) and event.step for event in events[:-1])


async def test_a_publication_left_early_publishes_nothing(
    client: DSecClient, server: Server, parts: Parts, tmp_path: Path
) -> None:
    (tmp_path / "large").mkdir()
    with (tmp_path / "large/f").open("wb") as file:
        file.truncate(8 << 30)

    async def taken_in() -> bool:
        return any((server.state / "images/tmp").iterdir())

    async def nothing() -> bool:
        return not await taken_in()

    async with anyio.create_task_group() as group:
        events = client.layers.publish("toolkit", "left:v1", tmp_path / "large")
        group.start_soon(events.wait)
        await eventually(taken_in, "the layer is being sent")
        group.cancel_scope.cancel()
    await eventually(nothing, "what was taken in is gone")
    assert await client.layers.list() == []
    # Nothing of it is in the way of another try, or gets into it.
    same = await parts.toolkit({"a": b"1"})
    made = await parts.toolkit({"a": b"1"}, "left:v1")
    assert made.digest == same.digest


# -- versions ----------------------------------------------------------------------------------


async def test_versions_do_not_change(client: DSecClient, parts: Parts) -> None:
    first = await parts.toolkit({"a": b"1"}, "fixed:1.0")
    again = await parts.toolkit({"a": b"1"}, "fixed:1.0")
    assert (again.digest, again.created_at) == (first.digest, first.created_at)
    with refusal(Conflict):
        await parts.toolkit({"a": b"2"}, "fixed:1.0")
    (listed,) = await client.layers.list()
    assert listed.digest == first.digest


async def test_other_attributes_are_another_content(client: DSecClient, parts: Parts) -> None:
    await parts.toolkit(Tar().add("a", content=b"1"), "fixed:1.0")
    for changed in ({"mode": 0o600}, {"uid": 5}, {"mtime": 5}, {"xattrs": {"user.a": b"b"}}):
        with refusal(Conflict):
            await parts.toolkit(Tar().add("a", content=b"1", **changed), "fixed:1.0")


async def test_the_next_version_is_taken_and_the_newest_used(
    client: DSecClient, args: MakeArgs, parts: Parts
) -> None:
    name = parts.name()
    made = [await parts.toolkit({"n": b"%d" % n}, name) for n in range(1, 12)]
    assert [one.name for one in made] == [f"{name}:v{n}" for n in range(1, 12)]
    assert [one.name for one in await client.layers.list("toolkit")] == [one.name for one in made]
    assert await client.layers.next_version("toolkit", name) == f"{name}:v12"
    assert (await client.layers.get("toolkit", name)).name == f"{name}:v11"
    async with await client.run_container(args(toolkits=[name])) as sandbox:
        assert await sandbox.files.read("/n") == b"11"
    await client.layers.remove("toolkit", f"{name}:v11")
    async with await client.run_container(args(toolkits=[name])) as sandbox:
        assert await sandbox.files.read("/n") == b"10"
        assert sandbox.view.toolkits == [f"{name}:v10"]


async def test_the_newest_is_the_last_published_whatever_it_is_called(
    client: DSecClient, parts: Parts
) -> None:
    for version in ("2.0", "1.9.1", "rc"):
        await parts.toolkit({"n": version.encode()}, f"agent:{version}")
    assert (await client.layers.get("toolkit", "agent")).name == "agent:rc"


async def test_two_who_publish_one_version_at_once(client: DSecClient, parts: Parts) -> None:
    """One content wins; who has another is told so, and not that all is well."""
    contents = (b"one", b"other")
    digests = {content: (await parts.toolkit({"a": content})).digest for content in contents}
    for number in range(12):
        name = f"race:v{number}"
        made: list[bytes] = []
        async with anyio.create_task_group() as group:
            for content in contents * 2:
                group.start_soon(_race, parts, name, content, digests[content], made)
        assert len(set(made)) == 1, f"{made} were all accepted as {name}"
        assert (await client.layers.get("toolkit", name)).digest == digests[made[0]]


async def _race(parts: Parts, name: str, content: bytes, digest: str, made: list[bytes]) -> None:
    try:
        layer = await parts.toolkit({"a": content}, name)
    except Conflict:
        return
    assert layer.digest == digest
    made.append(content)


async def test_kinds_have_names_of_their_own(client: DSecClient, parts: Parts) -> None:
    await parts.workspace({"a": b"w"}, "both:v1")
    await parts.toolkit({"a": b"t"}, "both:v1")
    assert len(await client.layers.list()) == 2
    assert [one.kind for one in await client.layers.list("workspace")] == ["workspace"]
    await client.layers.remove("workspace", "both:v1")
    with refusal(NotFound):
        await client.layers.get("workspace", "both:v1")
    assert (await client.layers.get("toolkit", "both")).kind == "toolkit"


# -- use and removal ---------------------------------------------------------------------------


async def test_what_is_used_is_not_removed(
    client: DSecClient, args: MakeArgs, parts: Parts
) -> None:
    work = await parts.workspace({"workspace/a": b"a"})
    tool = await parts.toolkit({"b": b"b"})
    wanted = args(workspace=work.name, toolkits=[tool.name])
    async with await client.run_container(wanted) as sandbox:
        for made in (work, tool):
            assert (await client.layers.get(made.kind, made.name)).used_by == 1
            with pytest.raises(Conflict) as caught:
                await client.layers.remove(made.kind, made.name)
            assert sandbox.id in str(caught.value)
            assert caught.value.details.get("advice")
        assert await sandbox.files.read("/workspace/a") == b"a"
        # The same content under another name is nobody's.
        other = await parts.toolkit({"b": b"b"})
        assert other.digest == tool.digest
        await client.layers.remove("toolkit", other.name)
        assert await sandbox.files.read("/b") == b"b"
    for made in (work, tool):
        assert (await client.layers.get(made.kind, made.name)).used_by == 0
        await client.layers.remove(made.kind, made.name)
        with refusal(NotFound):
            await client.layers.get(made.kind, made.name)
    with refusal(NotFound):
        await client.run_container(wanted)


async def test_a_removed_version_can_be_published_anew(
    client: DSecClient, args: MakeArgs, parts: Parts
) -> None:
    await parts.toolkit({"a": b"1"}, "again:v1")
    await client.layers.remove("toolkit", "again:v1")
    await parts.toolkit({"a": b"2"}, "again:v1")
    async with await client.run_container(args(toolkits=["again"])) as sandbox:
        assert await sandbox.files.read("/a") == b"2"


async def test_removing_needs_a_version(client: DSecClient, parts: Parts) -> None:
    await parts.toolkit({"a": b"1"}, "several:v1")
    with refusal(InvalidRequest):
        await client.layers.remove("toolkit", "several")
    with refusal(NotFound):
        await client.layers.remove("toolkit", "several:v2")


# -- names -------------------------------------------------------------------------------------


async def test_an_unknown_name_is_not_found_and_near_ones_are_named(
    client: DSecClient, args: MakeArgs, parts: Parts
) -> None:
    await parts.toolkit({"a": b"1"}, "ripgrep:14.1")
    await parts.workspace({"a": b"1"}, "sphinx-9658:v1")
    with pytest.raises(NotFound, match=r"toolkit.*riprep") as caught:
        await client.run_container(args(toolkits=["riprep"]))
    assert "ripgrep" in f"{caught.value} {caught.value.details}"
    with pytest.raises(NotFound, match=r"workspace.*sphinx-9568") as caught:
        await client.run_container(args(workspace="sphinx-9568"))
    assert "sphinx-9658" in f"{caught.value} {caught.value.details}"
    with pytest.raises(NotFound, match=r"ripgrep:14\.2") as caught:
        await client.layers.get("toolkit", "ripgrep:14.2")
    assert "14.1" in f"{caught.value} {caught.value.details}".replace("ripgrep:14.2", "")
    with pytest.raises(NotFound) as caught:
        await client.run_container(args(container_image="contrcat"))
    assert image.NAME in f"{caught.value} {caught.value.details}"


async def test_nothing_is_started_when_a_part_is_missing(
    client: DSecClient, args: MakeArgs
) -> None:
    before = [view.id for view in await client.list()]
    with refusal(NotFound):
        await client.run_container(args(toolkits=["nonesuch"], labels={"half": "made"}))
    assert [view.id for view in await client.list()] == before


BAD_NAMES = [
    "",
    ":v1",
    "a:",
    "a:b:c",
    "a b",
    "../a",
    "/a",
    "a/",
    "a\nb",
    "a\0b",
    "x" * 300,
    "a:v 1",
]


@pytest.mark.parametrize("name", BAD_NAMES)
async def test_a_bad_name_is_refused(
    client: DSecClient, args: MakeArgs, parts: Parts, name: str
) -> None:
    with pytest.raises(InvalidRequest) as caught:
        await parts.toolkit({"a": b""}, name or ":")
    assert "image" not in caught.value.message, "a layer's name was asked for"
    with refusal(InvalidRequest):
        await client.run_container(args(toolkits=[name]))
    with refusal(InvalidRequest):
        await client.run_container(args(workspace=name))
    with refusal(InvalidRequest):
        await client.layers.get("workspace", name)


@pytest.mark.parametrize(
    "name", ["a", "a.b_c-9", "team/tool:1.0", "x:2024.01.01-rc.1_z", f"long:{LONGEST_TAG}"]
)
async def test_a_good_name_is_taken(client: DSecClient, parts: Parts, name: str) -> None:
    made = await parts.toolkit({"a": b""}, name)
    assert made.name == (name if ":" in name else f"{name}:v1")
    assert (await client.layers.get("toolkit", name)).name == made.name


async def test_a_kind_there_is_not_is_refused(server: Server) -> None:
    async with httpx.AsyncClient(base_url=server.url) as http:
        http.headers = httpx.Headers({"Authorization": f"Bearer {server.key}"})
        for kind in ("image", "Toolkit", "", "layer"):
            given = {"kind": kind, "name": "a:v1"}
            for method, path in (("POST", "/publish"), ("GET", "/show"), ("DELETE", "")):
                answer = await http.request(method, f"/v1/layers{path}", params=given)
                assert answer.status_code == 400, (method, kind, answer.text)
                error = answer.json()["error"]
                assert error["code"] == "invalid_request"
                assert "kind" in error["message"]
