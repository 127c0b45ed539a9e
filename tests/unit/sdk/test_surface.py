"""What users import, pinned: a change here is a change of the API."""

from __future__ import annotations

import ast
import subprocess
import sys
import tomllib
from pathlib import Path

import dsec
from dsec import sdk
from dsec import sync as blocking
from dsec.sdk import sync

ROOT = Path(__file__).resolve().parents[3]
NAMES = [
    "Branch",
    "CapacityUnavailable",
    "CollectReport",
    "Command",
    "CommandFailed",
    "CommandView",
    "Conflict",
    "DSecClient",
    "DSecContainerRunArgs",
    "DataUnavailable",
    "DeadlineExceeded",
    "DiffEntry",
    "DsecError",
    "ExecResult",
    "Exited",
    "FileInfo",
    "FileRule",
    "Gap",
    "GitTree",
    "ImageProgress",
    "ImageReady",
    "ImageView",
    "InternalError",
    "Interrupted",
    "InvalidRequest",
    "JobItem",
    "JobView",
    "LayerReady",
    "LayerView",
    "LimitError",
    "LintReport",
    "LintRule",
    "NetworkView",
    "NodeView",
    "NotFound",
    "Output",
    "PayloadTooLarge",
    "PermissionDenied",
    "Phase",
    "Process",
    "PtySize",
    "QuotaExceeded",
    "RateLimited",
    "Recorded",
    "RequestError",
    "Sandbox",
    "SandboxError",
    "SandboxGone",
    "SandboxTree",
    "SandboxView",
    "Security",
    "Session",
    "SnapshotView",
    "StartFailed",
    "Started",
    "Steps",
    "StorageFull",
    "StoreView",
    "TamperReport",
    "TextDecoder",
    "TraceView",
    "Unauthenticated",
    "Unavailable",
    "Unsupported",
    "Usage",
]
METHODS = {
    "DSecClient": "api_url branch close environments get images layers list jobs nodes open replay restore run_container run_containers snapshots store"
    " trajectory version",
    "Sandbox": "branch command commands connect_port diff enter_phase exec files fork forks forward id network open_session pack"
    " pause processes refresh resize resume run_shell sessions set_network start steps stop tamper trajectory usage view"
    " warnings",
    "Steps": "next recorded",
    "Snapshots": "diff get list remove",
    "Jobs": "each get lease list pause reap release resume",
    "Command": "close_stdin events id kill refresh resize signal view wait write write_from",
    "Session": "close id run view",
    "Files": "exists get_tar list mkdir move put_tar read read_text remove stat stream upload_tree"
    " download_tree watch write",
    "Images": "build import_archive list pull push remove",
    "Layers": "get list next_version publish remove",
    "Environments": "lint trace",
    "SharedStore": "collect show",
}
INSTANCE = {
    "environments",
    "files",
    "images",
    "jobs",
    "layers",
    "sandbox",
    "snapshots",
    "store",
    "view",
}


def test_names() -> None:
    assert dsec.__all__ == NAMES
    assert all(getattr(dsec, name) for name in NAMES)
    stub = ast.parse((ROOT / "src/dsec/__init__.pyi").read_text())
    imported = {
        a.name for node in stub.body if isinstance(node, ast.ImportFrom) for a in node.names
    }
    assert imported == set(NAMES)


def _members(kind: type) -> set[str]:
    """Its own, and those of a base that has no name in the SDK."""
    bases = [base for base in kind.__bases__ if base.__name__ == "StateCalls"]
    return {*vars(kind), *(name for base in bases for name in vars(base))}


def test_methods_are_the_same_with_and_without_await() -> None:
    for name, methods in METHODS.items():
        for home in (sdk, sync):
            public = {m for m in _members(getattr(home, name)) if not m.startswith("_")}
            assert public | INSTANCE == set(methods.split()) | INSTANCE, name


def test_the_version_is_the_projects() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["version"] == sdk.VERSION


def test_the_blocking_client_is_as_generated() -> None:
    check = [sys.executable, str(ROOT / "tools/unasync.py"), "--check"]
    done = subprocess.run(check, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_importing_it_loads_little() -> None:
    code = "import sys, dsec; a = set(sys.modules); dsec.DSecClient; print(*a, '|', *sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=True,
        env={"PYTHONPATH": str(ROOT / "src")},
    )
    bare, full = (set(part.split()) for part in done.stdout.split("|"))
    assert not [name for name in bare if name.startswith(("dsec.", "anyio", "msgspec"))]
    heavy = {"rich", "typer", "sqlalchemy", "starlette", "uvicorn", "httpx", "trio", "pydantic"}
    heavy |= {"aiohttp", "urllib3", "websockets"}
    assert not heavy & full


def test_the_blocking_names() -> None:
    assert set(blocking.__all__) < set(NAMES)
    assert all(getattr(blocking, name) is getattr(sync, name) for name in blocking.__all__)
