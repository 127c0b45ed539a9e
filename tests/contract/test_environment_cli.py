"""Environments by the command line: layer, env, and run with a workspace and toolkits."""

from __future__ import annotations

import functools
import json
import subprocess
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from dsec import DSecClient
from tests.contract import image
from tests.contract.capabilities import needs
from tests.contract.parts import Parts
from tests.contract.server import Server

pytestmark = [needs("layers")]

Said = subprocess.CompletedProcess[bytes]
Dsec = Callable[..., Awaitable[Said]]


@pytest.fixture
def dsec(server: Server, tmp_path: Path) -> Dsec:
    """Run the command, with the server's own key."""
    return functools.partial(server.dsec, cwd=tmp_path)


def document(said: Said) -> Any:
    """The one JSON document of a run that went well."""
    assert said.returncode == 0, said.stderr.decode()
    assert said.stdout.isascii()
    return json.loads(said.stdout)


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    (tmp_path / "tree").mkdir()
    (tmp_path / "tree/hello").write_text("#!/bin/sh\necho hello from a toolkit\n")
    (tmp_path / "tree/hello").chmod(0o755)
    return tmp_path / "tree"


async def test_a_layers_life(dsec: Dsec, parts: Parts, tree: Path) -> None:
    parts.layers.append(("toolkit", "tools:1.0"))
    publish = ("layer", "publish", "toolkit", "tools:1.0", tree, "--at", "/opt", "--json")
    made = document(await dsec(*publish, "--description", "two\nlines"))
    assert (made["kind"], made["name"], made["description"]) == (
        "toolkit",
        "tools:1.0",
        "two\nlines",
    )
    assert document(await dsec(*publish))["digest"] == made["digest"]
    (listed,) = document(await dsec("layer", "ls", "--json"))
    assert listed["digest"] == made["digest"]
    assert document(await dsec("layer", "ls", "workspace", "--json")) == []
    assert (
        document(await dsec("layer", "show", "toolkit", "tools", "--json"))["name"] == "tools:1.0"
    )
    table = (await dsec("layer", "ls")).stdout.decode()
    assert "tools" in table
    assert "1.0" in table
    said = await dsec("layer", "rm", "toolkit", "tools:1.0")
    assert said.returncode == 0, said.stderr
    assert document(await dsec("layer", "ls", "--json")) == []


async def test_mistakes_have_their_exit_status_and_say_what_to_do(
    dsec: Dsec, parts: Parts, tree: Path, client: DSecClient
) -> None:
    await parts.toolkit({"a": b"1"}, "tools:1.0")
    taken = await dsec("layer", "publish", "toolkit", "tools:1.0", tree)
    unknown = await dsec("layer", "show", "toolkit", "toolz")
    gone = await dsec("layer", "rm", "toolkit", "tools:2.0")
    bad = await dsec("layer", "publish", "toolkit", "no good", tree)
    kind = await dsec("layer", "publish", "image", "x", tree)
    missing = await dsec("run", "--rm", "--toolkit", "toolz", image.NAME, "--", "true")
    both = await dsec("layer", "publish", "toolkit", "x", tree, "--git", str(tree))
    neither = await dsec("layer", "publish", "toolkit", "x")
    owner = await dsec("layer", "publish", "toolkit", "x", tree, "--owner", "me")
    nowhere = await dsec("layer", "publish", "toolkit", "x", "nowhere")
    runs = [taken, unknown, gone, bad, kind, missing, both, neither, owner]
    assert [one.returncode for one in runs[:6]] == [73, 66, 66, 64, 2, 66]
    assert [one.returncode for one in runs[6:]] in (
        [2, 2, 2],
        [64, 64, 64],
        [64, 64, 2],
        [2, 2, 64],
    )
    assert nowhere.returncode in (2, 64, 66)
    for one in [*runs, nowhere]:
        assert one.stdout == b""
        assert one.stderr
        assert b"Traceback" not in one.stderr
    assert b"publish" in taken.stderr
    assert b"tools" in unknown.stderr
    assert b"tools" in missing.stderr
    assert [layer.name for layer in await client.layers.list()] == ["tools:1.0"]


async def test_what_is_used_is_not_removed(dsec: Dsec, parts: Parts, client: DSecClient) -> None:
    tool = await parts.toolkit({"a": b"1"})
    async with await client.run_container(parts.over(image.NAME, tool)) as sandbox:
        said = await dsec("layer", "rm", "toolkit", tool.name)
        assert said.returncode == 73
        assert sandbox.id.encode() in said.stderr
        assert b"stop" in said.stderr, "what to do about it"
        shown = document(await dsec("layer", "show", "toolkit", tool.name, "--json"))
        assert shown["used_by"] == 1


async def test_run_in_an_environment(dsec: Dsec, parts: Parts, tree: Path) -> None:
    work = await parts.workspace({"workspace/in": b"from the workspace\n"})
    tool = await parts.toolkit(tree, at="/opt")
    given = ("--workspace", work.name, "--toolkit", tool.name)
    script = "/opt/hello && cat /workspace/in && exit 7"
    said = await dsec("run", "--rm", *given, image.NAME, "--", "sh", "-c", script)
    assert said.stdout == b"hello from a toolkit\nfrom the workspace\n", said.stderr
    assert said.returncode == 7


async def test_toolkits_are_laid_in_the_order_given(dsec: Dsec, parts: Parts) -> None:
    one, two = await parts.toolkit({"top": b"one"}), await parts.toolkit({"top": b"two"})
    for order in ((one, two), (two, one)):
        given = [word for layer in order for word in ("--toolkit", layer.name)]
        said = await dsec("run", "--rm", *given, image.NAME, "--", "cat", "/top")
        assert said.stdout == (b"two" if order[-1] is two else b"one"), said.stderr


async def test_lint(dsec: Dsec, parts: Parts, tmp_path: Path) -> None:
    bad = await parts.workspace({"workspace/a": b"return frobnicate(x)\n", "srv/core.7": b"x"})
    (tmp_path / "answers").write_text("return frobnicate(x)\n\n")
    (tmp_path / "ours.toml").write_text(
        '[[rule]]\nid = "no-cores"\nseverity = "warning"\nmessage = "a core"\npath = "/**/core.*"\n'
    )
    given: tuple[str | Path, ...] = ("env", "lint", image.NAME, "--json")
    clean = await dsec(*given)
    assert (clean.returncode, json.loads(clean.stdout)["findings"]) == (0, [])
    given += ("--workspace", bad.name, "--answers", tmp_path / "answers")
    found = await dsec(*given)
    assert found.returncode == 1
    (finding,) = json.loads(found.stdout)["findings"]
    assert (finding["rule"], finding["path"]) == ("answer-in-environment", "/workspace/a")
    assert (await dsec(*given, "--fail-on", "never")).returncode == 0
    assert (await dsec(*given, "--disable", "answer-in-environment")).returncode == 0
    ours = (*given[:6], "--rules", tmp_path / "ours.toml")
    assert (await dsec(*ours)).returncode == 0
    assert (await dsec(*ours, "--fail-on", "warning")).returncode == 1
    table = (await dsec(*given[:3], *given[4:])).stdout.decode()
    assert "answer-in-environment" in table
    (tmp_path / "ours.toml").write_text("[[rule]]\nid = 7\n")
    broken = await dsec(*ours)
    assert broken.returncode in (2, 64)
    assert b"Traceback" not in broken.stderr


async def test_nothing_recorded_is_not_found(dsec: Dsec, parts: Parts) -> None:
    tool = await parts.toolkit({"a": b"1"})
    said = await dsec("env", "stat", image.NAME, "--toolkit", tool.name)
    assert said.returncode == 66
    assert b"dsec env trace" in said.stderr, "how to record one"
