"""A root that its sandbox has turned inside out is packed, restored and forked like any other."""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import Any

import pytest

from tests.kernel.odd_roots import SHAPES, Outside, put_aside
from tests.kernel.test_edge import Edge, aether, anyio_backend, edge, store
from tests.kernel.test_edge_snapshots import down_to, fork, layers, pack, remove

__all__ = ["aether", "anyio_backend", "edge", "store"]
pytestmark = [pytest.mark.needs_root, pytest.mark.anyio, pytest.mark.adversarial]

MOUNTED, OWN = ("proc", "sys", "dev"), ("etc", "tmp")


def turn(upper: Path, shape: str, outside: Outside) -> int:
    """What root inside could write, and besides what it cannot while something is mounted there."""
    owner = upper.stat().st_uid
    for name in (*MOUNTED, *OWN):
        SHAPES[shape](put_aside(upper / name), outside)
    for directory, directories, files in os.walk(upper):
        for name in directories + files:
            os.lchown(Path(directory, name), owner, owner)
    return stat.S_IFMT((upper / "etc").lstat().st_mode)


async def about(edge: Edge, sandbox: str, path: str) -> dict[str, Any]:
    place = f"/v1/sandboxes/{sandbox}/files/stat?path={path}&follow=false"
    answer = await edge.http.get(place)
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


@pytest.mark.parametrize("shape", SHAPES)
async def test_it_is_restored_and_forked(edge: Edge, tmp_path: Path, shape: str) -> None:
    before, outside = await layers(edge), Outside(tmp_path / "outside")
    sandbox = await edge.create()
    kind = turn(edge.home / "state/sandboxes" / sandbox / "upper", shape, outside)
    await pack(edge, sandbox, "odd")
    (child,) = await fork(edge, sandbox, count=1)
    made = [child["id"], await edge.create(image="snapshots/p/odd")]
    for name in made:
        assert (await edge.run(name, "exit", "7"))["exit_code"] == 7
        kinds = [(await about(edge, name, f"/{place}"))["kind"] for place in MOUNTED]
        assert kinds == ["dir"] * len(MOUNTED)
        if kind != stat.S_IFSOCK:  # a snapshot has none
            own = [(await about(edge, name, f"/{place}"))["kind"] for place in OWN]
            assert own == [KINDS[kind]] * len(OWN)
    for name in (sandbox, *made):
        await edge.stop(name)
    await remove(edge, "odd")
    await down_to(edge, before)
    assert outside.untouched()


KINDS = {stat.S_IFLNK: "symlink", stat.S_IFREG: "file", stat.S_IFIFO: "fifo"}
