"""Layers, environments and the store, as the client asks for them."""

from __future__ import annotations

import io
import tarfile
import tempfile
from pathlib import Path
from typing import Any

import pytest

from dsec import (
    Conflict,
    DSecClient,
    DSecContainerRunArgs,
    GitTree,
    InvalidRequest,
    LayerReady,
    LintRule,
    NotFound,
    SandboxTree,
)
from dsec.base.errors import DsecError
from dsec.sdk.models import sandbox_spec
from dsec.sync import DSecClient as BlockingClient
from dsec.wire.public_v1 import (
    CollectReport,
    EnvironmentRef,
    ImageProgress,
    ImageReady,
    ImageView,
    LayerView,
    LintReport,
    StoreView,
    TraceView,
)
from dsec.wire.sandbox import FileInfo, StreamError
from tests.unit.sdk.fake import LOST, SANDBOX, FakePlatform, Reply, error, json, lines
from tests.unit.sdk.served import served
from tests.unit.sdk.test_git import commit, git

pytestmark = pytest.mark.anyio
PUBLISH = "/v1/layers/publish"


def layer(name: str, **changes: Any) -> LayerView:
    return LayerView(kind="toolkit", name=name, digest="sha256:0", **changes)


def accepts(platform: FakePlatform) -> None:
    ready = lines(ImageProgress(step="take in"), LayerReady(layer=layer("rg:1")))
    platform.on("POST", PUBLISH, ready)


def members(platform: FakePlatform, call: int = -1) -> dict[str, tarfile.TarInfo]:
    body = platform.calls("POST", PUBLISH)[call].body
    with tarfile.open(fileobj=io.BytesIO(body)) as tar:
        return {member.name: member for member in tar}


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    root = tmp_path / "tree"
    (root / "bin").mkdir(parents=True)
    (root / "bin" / "rg").write_text("#!/bin/sh\n")
    return root


async def test_a_directory_is_published(
    platform: FakePlatform, client: DSecClient, tree: Path
) -> None:
    accepts(platform)
    events = client.layers.publish("toolkit", "rg:1", tree, at="/opt/rg", description="é")
    said = [event async for event in events]
    assert isinstance(said[0], ImageProgress)
    assert isinstance(said[1], LayerReady)
    (call,) = platform.calls("POST", PUBLISH)
    assert call.query == {"kind": "toolkit", "name": "rg:1", "description": "é"}
    assert sorted(members(platform)) == ["opt/rg", "opt/rg/bin", "opt/rg/bin/rg"]
    assert {member.uid for member in members(platform).values()} == {0}


@pytest.mark.parametrize(("kind", "prefix"), [("workspace", "workspace/"), ("toolkit", "")])
async def test_each_kind_has_its_place(
    platform: FakePlatform, client: DSecClient, tree: Path, kind: Any, prefix: str
) -> None:
    accepts(platform)
    await client.layers.publish(kind, "x:1", str(tree), owner="7:8").wait()
    found = members(platform)
    assert f"{prefix}bin/rg" in found
    assert {(member.uid, member.gid) for member in found.values()} == {(7, 8)}


async def test_without_a_version_the_next_number(
    platform: FakePlatform, client: DSecClient, tree: Path
) -> None:
    accepts(platform)
    there = [layer(name) for name in ("rg:v9", "rg:v10", "rg:new", "rg:v1x", "jq:v77", "a/rg:v50")]
    platform.on("GET", "/v1/layers", json([]), json(there))
    for name in ("rg", "rg", "host:5000/rg:v1"):
        await client.layers.publish("toolkit", name, tree).wait()
    named = [call.query["name"] for call in platform.calls("POST", PUBLISH)]
    assert named == ["rg:v1", "rg:v11", "host:5000/rg:v1"]


async def test_a_publication_that_breaks_off_is_begun_again(
    platform: FakePlatform, client: DSecClient, tree: Path
) -> None:
    ready = lines(LayerReady(layer=layer("rg:v1")))
    half = lines(ImageProgress(step="take in"), broken=True)
    platform.on("GET", "/v1/layers", json([]))
    platform.on("POST", PUBLISH, LOST, half, ready)
    made = await client.layers.publish("toolkit", "rg", tree).wait()
    assert made.name == "rg:v1"
    assert [sorted(members(platform, call)) for call in (1, 2)] == [["bin", "bin/rg"]] * 2
    assert len(platform.calls("GET", "/v1/layers")) == 1


async def test_a_version_does_not_change(
    platform: FakePlatform, client: DSecClient, tree: Path
) -> None:
    late = StreamError(code="conflict", message="another content", http_status=409)
    platform.on("POST", PUBLISH, error(Conflict("another content")), lines(late))
    for _ in range(2):
        with pytest.raises(Conflict, match="another content"):
            await client.layers.publish("toolkit", "rg:1", tree).wait()


async def test_a_tar_goes_as_it_is(
    platform: FakePlatform, client: DSecClient, tmp_path: Path
) -> None:
    accepts(platform)
    archive = tmp_path / "rg.tar.gz"
    archive.write_bytes(b"\x1f\x8b...")
    await client.layers.publish("workspace", "rg:1", archive).wait()
    assert platform.calls("POST", PUBLISH)[0].body == b"\x1f\x8b..."
    for moved in ({"at": "/x"}, {"owner": "0:0"}):
        with pytest.raises(InvalidRequest, match="is a tar"):
            await client.layers.publish("toolkit", "rg:1", archive, **moved).wait()


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(scratch))
    where = tmp_path / "repository"
    where.mkdir()
    git(where, "init", "--quiet", "--initial-branch=main")
    commit(where, "now")
    return where


async def test_a_commit_is_published_and_nothing_is_left_here(
    platform: FakePlatform, client: DSecClient, repository: Path, tmp_path: Path
) -> None:
    accepts(platform)
    await client.layers.publish("workspace", "w:1", GitTree(repository)).wait()
    found = members(platform)
    assert {"workspace/answer.txt", "workspace/.git/HEAD", "workspace/.git/index"} < set(found)
    assert {member.mtime for member in found.values()} == {1700000000}
    await client.layers.publish("toolkit", "t:1", GitTree(repository), at="/opt/t").wait()
    assert sorted(members(platform)) == ["opt/t", "opt/t/answer.txt"]
    platform.on("POST", PUBLISH, error(Conflict("no")))
    with pytest.raises(Conflict):
        await client.layers.publish("workspace", "w:1", GitTree(repository)).wait()
    platform.on("POST", PUBLISH, lines(ImageProgress(step="a"), ImageProgress(step="b")))
    async with client.layers.publish("workspace", "w:1", GitTree(repository)) as events:
        assert isinstance(await anext(events), ImageProgress)
    assert list((tmp_path / "scratch").iterdir()) == []


def inside(platform: FakePlatform) -> None:
    """A sandbox with a directory to take."""
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as tar:
        info = tarfile.TarInfo("f")
        info.size, info.uid = 600_000, 1000
        tar.addfile(info, io.BytesIO(b"z" * info.size))
    data = out.getvalue()
    there = FileInfo(path="/repo", kind="dir", mode=0o750, uid=1000, gid=1001, mtime=5.5)
    platform.sandbox("GET", "/files/stat", json(there))
    platform.sandbox("GET", "/tree", Reply(200, [data[:70_000], data[70_000:]]))


def check_piped(platform: FakePlatform) -> None:
    found = members(platform)
    assert sorted(found) == ["workspace", "workspace/f"]
    top, file = found["workspace"], found["workspace/f"]
    assert (top.mode, top.uid, top.gid, top.mtime) == (0o750, 1000, 1001, 5)
    assert (file.uid, file.size) == (1000, 600_000)


async def test_a_sandboxs_directory_is_piped_through(
    platform: FakePlatform, client: DSecClient
) -> None:
    accepts(platform)
    inside(platform)
    await client.layers.publish("workspace", "w:1", SandboxTree(SANDBOX, "/repo")).wait()
    check_piped(platform)
    assert platform.calls("GET", "/tree")[0].query == {"path": "/repo"}


async def test_the_blocking_client_pipes_too(platform: FakePlatform, tree: Path) -> None:
    accepts(platform)
    inside(platform)
    with served(platform) as url, BlockingClient(url, "k3y") as client:
        client.layers.publish("workspace", "w:1", SandboxTree(SANDBOX, "/repo")).wait()
        check_piped(platform)
        client.layers.publish("toolkit", "rg:1", tree).wait()
        assert sorted(members(platform)) == ["bin", "bin/rg"]


@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_over_a_network_it_is_piped_too(platform: FakePlatform) -> None:
    accepts(platform)
    inside(platform)
    with served(platform) as url:
        async with DSecClient(url, "k3y") as client:
            await client.layers.publish("workspace", "w:1", SandboxTree(SANDBOX, "/repo")).wait()
    check_piped(platform)


async def test_a_tree_that_breaks_off_is_never_published(
    platform: FakePlatform, client: DSecClient
) -> None:
    accepts(platform)
    inside(platform)
    platform.sandbox("GET", "/tree", Reply(200, [b"f" + bytes(99)], broken=True))
    with pytest.raises(DsecError):
        await client.layers.publish("workspace", "w:1", SandboxTree(SANDBOX, "/repo")).wait()
    platform.sandbox("GET", "/files/stat", json(FileInfo(path="/repo", kind="file")))
    with pytest.raises(InvalidRequest, match="is a file"):
        await client.layers.publish("workspace", "w:1", SandboxTree(SANDBOX, "/repo")).wait()


async def test_mistakes_are_found_before_anything_is_sent(
    platform: FakePlatform, client: DSecClient, tree: Path
) -> None:
    for source, options, wrong in (
        (tree / "nowhere", {}, NotFound),
        (tree, {"at": "relative"}, InvalidRequest),
        (tree, {"owner": "root"}, InvalidRequest),
        (SandboxTree("../nodes", "/"), {}, InvalidRequest),
    ):
        with pytest.raises(wrong):
            await client.layers.publish("toolkit", "rg:1", source, **options).wait()
    assert platform.calls("POST", PUBLISH) == []


async def test_looking_and_removing(platform: FakePlatform, client: DSecClient) -> None:
    platform.on("GET", "/v1/layers", json([layer("rg:1")]))
    platform.on("GET", "/v1/layers/show", json(layer("rg:1", used_by=2)))
    platform.on("DELETE", "/v1/layers", Reply(204), error(NotFound("gone", kind="toolkit")))
    assert [view.name for view in await client.layers.list()] == ["rg:1"]
    await client.layers.list("toolkit")
    assert [c.query for c in platform.calls("GET", "/v1/layers")] == [{}, {"kind": "toolkit"}]
    assert (await client.layers.get("toolkit", "rg")).used_by == 2
    await client.layers.remove("toolkit", "rg:1")
    assert platform.calls("DELETE", "/v1/layers")[0].query == {"kind": "toolkit", "name": "rg:1"}
    with pytest.raises(NotFound):
        await client.layers.remove("toolkit", "rg:1")


async def test_environments(platform: FakePlatform, client: DSecClient) -> None:
    environment = EnvironmentRef(image="debian", workspace="w:1", toolkits=["a", "b"])
    report = LintReport(environment=environment, findings=[])
    platform.on("POST", "/v1/environments/lint", json(report))
    rule = LintRule(id="mine", message="no", path="/x/**")
    got = await client.environments.lint(
        "debian", workspace="w:1", toolkits=["a", "b"], answers=["42"], rules=[rule], disabled=["x"]
    )
    assert got == report
    sent = platform.calls("POST", "/lint")[0].json()
    assert (sent["toolkits"], sent["answers"], sent["disabled"]) == (["a", "b"], ["42"], ["x"])
    assert sent["rules"][0]["path"] == "/x/**"
    view = TraceView(environment=environment, trace="t", recorded_at=1.0, parts=[], reads=[])
    platform.on("GET", "/v1/environments/trace", json(view))
    asked = {"workspace": "w:1", "toolkits": ["a", "b"], "trace": "t"}
    assert await client.environments.trace("debian", **asked) == view  # type: ignore[arg-type]
    raw = platform.calls("GET", "/trace")[0].raw_query
    assert raw == b"image=debian&workspace=w%3A1&toolkit=a&toolkit=b&trace=t"


async def test_the_store(platform: FakePlatform, client: DSecClient) -> None:
    platform.on("GET", "/v1/store", json([StoreView(node="n001", url="file:///x")]))
    report = CollectReport(dry_run=True, blobs=1, bytes=2, kept_blobs=3)
    platform.on("POST", "/v1/store/collect", json(report))
    assert (await client.store.show())[0].url == "file:///x"
    assert await client.store.collect(dry_run=True) == report
    await client.store.collect()
    asked = [call.query["dry_run"] for call in platform.calls("POST", "/collect")]
    assert asked == ["true", "false"]
    image = ImageView(name="debian", digest="", layers=[])
    platform.on("POST", "/v1/images/push", lines(ImageReady(image=image)))
    assert await client.images.push("debian").wait() == image


def test_what_a_sandbox_is_composed_of() -> None:
    spec = sandbox_spec(
        DSecContainerRunArgs(
            "debian", workspace="w", toolkits=("a", "b"), disk_limit_mb=64, trace="t"
        )
    )
    assert (spec.workspace, spec.toolkits, spec.limits.disk_mb) == ("w", ["a", "b"], 64)
    assert (spec.trace, spec.record_trace) == ("t", False)
    with pytest.raises(InvalidRequest, match="a list of names"):
        sandbox_spec(DSecContainerRunArgs("debian", toolkits="abc"))
