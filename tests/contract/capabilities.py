"""Which behaviours do not apply to which backend, and why. Printed at the end of every run.

A test names what it needs with `@needs("...")`. What is not listed here must work everywhere; a
test that cannot run is a failure, never a silent skip.
"""

from __future__ import annotations

import pytest

BACKENDS = ("sim", "container")

NOT_APPLICABLE: dict[str, dict[str, str]] = {
    "sim": {
        "isolation": "nothing runs, so there is nothing to isolate from the host",
        "restart": "simulated sandboxes live in the server's memory and end with it",
        "shell": "the simulation has a tiny shell without loops, functions or substitution",
        "kernel-files": "there is no /proc, /sys or FIFO in the simulated file system",
        "kernel-limits": "argument size limits are the kernel's; the simulation has none",
        "enforced-disk": "simulated files have no limit of their own; the sandbox's warnings say so",
        "layers": "simulated sandboxes have no file system that layers could be laid over",
        "snapshots": "simulated files are no layer that could be packed",
        "phases": "nothing runs, so no rule about files, users or secrets could be enforced",
        "enforced-cpu": "nothing computes, so no processor time is used",
    },
    "container": {
        "network": "this node's containers have no network yet; their warnings say so",
    },
}


def needs(*capabilities: str) -> pytest.MarkDecorator:
    """Mark a test as applying only where these are to be had."""
    known = {name for table in NOT_APPLICABLE.values() for name in table}
    unknown = set(capabilities) - known
    if unknown:
        raise ValueError(f"not in the table of capabilities: {sorted(unknown)}")
    return pytest.mark.needs(*capabilities)


def missing(backend: str, capabilities: tuple[str, ...]) -> str | None:
    """Why a test does not apply to a backend; None if it does."""
    table = NOT_APPLICABLE[backend]
    reasons = [f"{name}: {table[name]}" for name in capabilities if name in table]
    return "; ".join(reasons) or None
