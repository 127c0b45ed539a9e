"""Real servers for stores, on loopback and in a directory of the test's own."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.conftest import ALLOWED_SKIPS

ROOT = Path(__file__).parents[2]
S3_KEY, S3_SECRET = "DSECTESTKEY", "dsec-test-secret"
BUCKET = "environments"

_REGISTRY = """
version: 0.1
log: {{level: info}}
storage:
  filesystem: {{rootdirectory: {place}/blobs}}
  delete: {{enabled: true}}
http: {{addr: "127.0.0.1:0"}}
"""


@contextmanager
def registry_server(place: Path) -> Iterator[str]:
    """Debian's docker-registry; yields host:port."""
    place.mkdir(parents=True, exist_ok=True)
    (place / "config.yml").write_text(_REGISTRY.format(place=place))
    argv = ["docker-registry", "serve", str(place / "config.yml")]
    with _serving(argv, place / "log", r"listening on (127\.0\.0\.1:\d+)") as address:
        yield address


@contextmanager
def s3_server(place: Path, node_id: str) -> Iterator[str]:
    """s3s-fs, which checks signatures; yields host:port. Its absence is a listed skip."""
    binary = _s3_binary(node_id)
    (place / BUCKET).mkdir(parents=True, exist_ok=True)
    argv = [
        *(str(binary), "--host", "127.0.0.1", "--port", "0"),
        *("--access-key", S3_KEY, "--secret-key", S3_SECRET, str(place)),
    ]
    with _serving(argv, place / "log", r"running at http://(127\.0\.0\.1:\d+)") as address:
        yield address


def _s3_binary(node_id: str) -> Path:
    built = ROOT / ".cache/s3s/bin/s3s-fs"
    found = str(built) if built.exists() else shutil.which("s3s-fs")
    if found:
        return Path(found)
    for prefix, reason in ALLOWED_SKIPS.items():
        if node_id.startswith(prefix):
            pytest.skip(reason)
    pytest.fail("no s3s-fs (./dev test builds it); a skip would be listed in tests/conftest.py")


@contextmanager
def _serving(argv: list[str], log: Path, ready: str) -> Iterator[str]:
    """Run a server until the context ends; what it prints goes on being read from a file."""
    env = {**os.environ, "RUST_LOG": "info", "NO_COLOR": "1"}
    with log.open("wb") as out:
        child = subprocess.Popen(argv, stdout=out, stderr=subprocess.STDOUT, env=env)
    try:
        yield _address(child, log, ready)
    finally:
        child.kill()
        child.wait()


def _address(child: subprocess.Popen[bytes], log: Path, ready: str) -> str:
    while child.poll() is None:
        if found := re.search(ready, log.read_text(errors="replace")):
            return found[1]
    raise AssertionError(f"{child.args!r} ended: {log.read_text(errors='replace')}")
