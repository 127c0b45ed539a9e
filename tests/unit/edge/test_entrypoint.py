"""The image's own program: as Docker has it, arguments take the place of Cmd."""

from __future__ import annotations

import pytest

from dsec.base.errors import InvalidRequest
from dsec.edge.commands import checked
from dsec.wire.public_v1 import ImageView
from dsec.wire.sandbox import CommandSpec

IMAGE = ImageView(name="i", digest="d", layers=[], entrypoint=["/init", "-v"], cmd=["serve"])
BARE = ImageView(name="bare", digest="d", layers=[])


@pytest.mark.parametrize(
    ("argv", "runs"),
    [(None, ["/init", "-v", "serve"]), (["x", "y"], ["/init", "-v", "x", "y"])],
)
def test_arguments_take_the_place_of_cmd(argv: list[str] | None, runs: list[str]) -> None:
    spec = checked(CommandSpec(argv=argv, entrypoint=True), IMAGE)
    assert spec.argv == runs
    assert checked(spec, IMAGE).argv == runs


def test_without_being_asked_for_the_entrypoint_is_left_out() -> None:
    assert checked(CommandSpec(argv=["x"]), IMAGE).argv == ["x"]


@pytest.mark.parametrize("spec", [CommandSpec(entrypoint=True), CommandSpec()])
def test_an_image_without_a_program_of_its_own_is_told(spec: CommandSpec) -> None:
    with pytest.raises(InvalidRequest):
        checked(spec, BARE)


def test_the_entrypoint_is_no_shell() -> None:
    with pytest.raises(InvalidRequest, match="not with shell"):
        checked(CommandSpec(shell="x", entrypoint=True), IMAGE)
