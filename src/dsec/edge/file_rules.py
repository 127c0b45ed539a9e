"""File rules that could not mean what they say, refused before anything is made. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import PurePosixPath

import msgspec

from dsec.base.errors import InvalidRequest, Unsupported
from dsec.wire.phases import FileRule
from dsec.wire.sandbox import Pack, SandboxSpec

NOT_THE_ENVIRONMENTS = ("/proc", "/sys", "/dev")
"""What a sandbox has there is the platform's, and the same for all."""


def check(spec: SandboxSpec) -> None:
    """Check its file rules, and those of its phases.

    Raises:
        InvalidRequest: a path is not a plain one, or a rule lies in what is denied anyway.
        Unsupported: its profile lets programs make mounts of their own.
    """
    everywhere = [spec.files, *(phase.files or [] for phase in spec.phases)]
    if any(everywhere) and spec.security.profile == "loose":
        raise Unsupported("files: not with security.profile loose, which allows mounts inside")
    for rules in everywhere:
        _check_one_by_one(rules)


def without_denied(wanted: Pack, rules: Sequence[FileRule]) -> Pack:
    """Leave out of a snapshot what is denied: whoever restores it has no such rules."""
    paths = [rule.path.rstrip("/") for rule in rules if rule.access == "deny"]
    left_out = [glob for path in paths for glob in (path, f"{path}/**")]
    return msgspec.structs.replace(wanted, exclude=[*wanted.exclude, *left_out])


def _check_one_by_one(rules: Sequence[FileRule]) -> None:
    closed = {PurePosixPath(rule.path) for rule in rules if rule.access == "deny"}
    for rule in rules:
        path = PurePosixPath(rule.path)
        if not _plain(rule.path) or path == PurePosixPath("/"):
            raise InvalidRequest(f"files: {rule.path!r} is no absolute path without '.' and '..'")
        if any(path.is_relative_to(place) for place in NOT_THE_ENVIRONMENTS):
            raise InvalidRequest(f"files: {rule.path!r} is the platform's, not the environment's")
        if above := closed & {*path.parents}:
            raise InvalidRequest(f"files: {rule.path!r} lies in {min(above)}, which is denied")


def _plain(path: str) -> bool:
    parts = path[1:].rstrip("/").split("/")
    return path.startswith("/") and not {"", ".", ".."} & {*parts}
