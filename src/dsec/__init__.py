"""DSec: sandboxes for AI agents. The names here are the SDK (libdsec).

They are loaded when first used: the platform's own processes import their rooms, not the SDK. The
imports a reader and a type checker see are in `__init__.pyi`; a test holds the two together.
"""

from __future__ import annotations

import importlib

_HOMES = {
    "dsec.base.errors": (
        "CapacityUnavailable",
        "Conflict",
        "DataUnavailable",
        "DeadlineExceeded",
        "DsecError",
        "InternalError",
        "Interrupted",
        "InvalidRequest",
        "LimitError",
        "NotFound",
        "PayloadTooLarge",
        "PermissionDenied",
        "QuotaExceeded",
        "RateLimited",
        "RequestError",
        "SandboxError",
        "SandboxGone",
        "StartFailed",
        "StorageFull",
        "Unauthenticated",
        "Unavailable",
        "Unsupported",
    ),
    "dsec.sdk": (
        "Branch",
        "Command",
        "CommandFailed",
        "DSecClient",
        "DSecContainerRunArgs",
        "ExecResult",
        "FileInfo",
        "GitTree",
        "Sandbox",
        "SandboxTree",
        "Session",
        "Steps",
        "TextDecoder",
    ),
    "dsec.wire.public_v1": (
        "CollectReport",
        "ImageProgress",
        "ImageReady",
        "ImageView",
        "JobItem",
        "JobView",
        "LayerReady",
        "LayerView",
        "LintReport",
        "LintRule",
        "NodeView",
        "StoreView",
        "TraceView",
    ),
    "dsec.wire.phases": ("FileRule", "Phase"),
    "dsec.wire.sandbox": (
        "CommandView",
        "DiffEntry",
        "Exited",
        "Gap",
        "NetworkView",
        "Output",
        "Process",
        "PtySize",
        "Recorded",
        "SandboxView",
        "Security",
        "SnapshotView",
        "Started",
        "TamperReport",
        "Usage",
    ),
}
_HOME = {name: home for home, names in _HOMES.items() for name in names}

__all__ = sorted(_HOME)  # noqa: PLE0605 - spelled out in __init__.pyi


def __getattr__(name: str) -> object:
    home = _HOME.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value: object = getattr(importlib.import_module(home), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOME})
