"""What a shell may complete: names the platform knows. Whatever goes wrong, it completes nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress

from typer import Context

from dsec.base.errors import DsecError
from dsec.base.states import FINAL, SandboxState
from dsec.sdk.sync import DSecClient

MOST = 200
LIVE = [state.value for state in SandboxState if state not in FINAL]


def _named(
    incomplete: str, look: Callable[[DSecClient], Iterator[tuple[str, str]]]
) -> list[tuple[str, str]]:
    found: list[tuple[str, str]] = []
    with suppress(DsecError, OSError), DSecClient(unreachable_s=0) as dsec:
        found = [pair for pair in look(dsec) if pair[0].startswith(incomplete)]
    return found


def sandboxes(incomplete: str) -> list[tuple[str, str]]:
    """Ids of sandboxes that are not over, each with its image."""
    return _named(
        incomplete, lambda dsec: ((v.id, v.image) for v in dsec.list(states=LIVE, limit=MOST))
    )


def snapshots(incomplete: str) -> list[tuple[str, str]]:
    """Names of snapshots, each with what it says of itself."""
    return _named(incomplete, lambda dsec: ((v.name, v.description) for v in dsec.snapshots.list()))


def entries(ctx: Context, incomplete: str) -> list[tuple[str, str]]:
    """Numbers of the entries of the sandbox named before, each with its operation."""
    sandbox = str(ctx.params.get("sandbox") or "")
    return _named(
        incomplete, lambda dsec: ((str(e.seq), e.op) for e in dsec.trajectory(sandbox, until=MOST))
    )


def rules(incomplete: str) -> list[tuple[str, str]]:
    """Services that nodes know by name, for network rules, each with what it stands for."""
    return sorted(set(_named(incomplete, _services)))


def _services(dsec: DSecClient) -> Iterator[tuple[str, str]]:
    for node in dsec.nodes():
        for entry in node.capabilities:
            kind, _, name = entry.name.partition(":")
            if kind == "service" and entry.available:
                yield name, entry.detail


def jobs(incomplete: str) -> list[tuple[str, str]]:
    """Names of jobs, each with how many sandboxes it has."""
    return _named(
        incomplete, lambda dsec: ((v.job, f"{v.sandboxes} sandboxes") for v in dsec.jobs.list())
    )
