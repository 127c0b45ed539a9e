"""The store of the benchmarks: a real server with its files kept between runs, behind a slow link.

An S3 server (s3s-fs), or Debian's docker-registry. Both ways under comparison read from it through
the same link: layers loaded on demand, and whole compressed layers as a registry keeps them.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import subprocess
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Literal

import anyio
import obstore
from obstore.store import S3Store

from bench.harness import say
from bench.link import LinkProcess, link_to
from dsec.images.store import layout
from dsec.images.store.interface import BlobStore
from dsec.images.store.opening import open_store
from dsec.kit.blocking import in_thread

Kind = Literal["s3", "oci"]
LATENCY_MS = 5.0
MBIT = 1000.0
ROOT = Path(__file__).parents[1]
BUILT = ROOT / ".cache/s3s/bin/s3s-fs"
BUCKET = "bench"
KEY, SECRET, REGION = "DSECBENCH", "dsec-bench-secret", "us-east-1"
VALID = timedelta(hours=6)
START_S = 20.0
_REGISTRY = """
version: 0.1
log: {{level: info}}
storage:
  filesystem: {{rootdirectory: {place}/blobs}}
  delete: {{enabled: true}}
http: {{addr: "127.0.0.1:0"}}
"""


def usual_kind() -> Kind:
    """S3 if there is such a server, else the registry that Debian has."""
    return "s3" if _s3_binary() else "oci"


def _s3_binary() -> str | None:
    return str(BUILT) if BUILT.exists() else shutil.which("s3s-fs")


@dataclass(frozen=True, slots=True)
class StoreServer:
    """A running server."""

    kind: Kind
    place: Path
    """Where its files are."""
    port: int
    link: LinkProcess

    def url(self, *, by_link: bool) -> str:
        """The store's URL for a node: through the link, or past it to fill the store."""
        port = self.link.port if by_link else self.port
        if self.kind == "s3":
            return f"s3://{BUCKET}/store?endpoint=http://127.0.0.1:{port}&region={REGION}"
        return f"oci+http://127.0.0.1:{port}/store"

    def blob_url(self, digest: str) -> str:
        """Where any HTTP client gets a whole blob through the link, for some hours."""
        if self.kind == "oci":
            return f"http://127.0.0.1:{self.link.port}/v2/store/blobs/{digest}"
        bucket = S3Store(
            BUCKET,
            config={"endpoint": f"http://127.0.0.1:{self.link.port}", "region": REGION},
            client_options={"allow_http": True},
        )
        return str(obstore.sign(bucket, "GET", f"store/{layout.blob_key(digest)}", VALID))

    async def keep(self, file: Path, digest: str) -> None:
        """Put a file that never changes into the store; where the server allows, at no disk."""
        async with self.past_link() as store:
            await store.put_blob(file, digest)
        if self.kind == "s3":  # an object of s3s-fs is a file of its name
            await in_thread("disk", self._share, file, layout.blob_key(digest))

    def _share(self, file: Path, key: str) -> None:
        place = self.place / "buckets" / BUCKET / "store" / key
        place.unlink()
        place.hardlink_to(file)

    @contextlib.asynccontextmanager
    async def past_link(self) -> AsyncIterator[BlobStore]:
        """The store, to fill it and look into it."""
        store = open_store(self.url(by_link=False))
        try:
            yield store
        finally:
            await store.aclose()


@contextlib.asynccontextmanager
async def store_server(place: Path, kind: Kind) -> AsyncIterator[StoreServer]:
    """Serve what lies in a directory, behind a link of 5 ms and 1 Gb/s.

    Credentials are put into this process's environment, for all that is started from it.
    """
    os.environ |= {"AWS_ACCESS_KEY_ID": KEY, "AWS_SECRET_ACCESS_KEY": SECRET}
    with _serving(_s3(place) if kind == "s3" else _registry(place), place) as child:
        port = await _port(child, place / "log")
        with link_to(port, LATENCY_MS, MBIT) as link:
            say(f"store: {kind}, behind {LATENCY_MS:g} ms and {MBIT:g} Mb/s")
            yield StoreServer(kind, place, port, link)


def _s3(place: Path) -> list[str]:
    binary = _s3_binary()
    if binary is None:
        raise RuntimeError("there is no s3s-fs; take --store oci")
    (place / "buckets" / BUCKET).mkdir(parents=True, exist_ok=True)
    argv = [binary, "--host", "127.0.0.1", "--port", "0", "--access-key", KEY]
    return [*argv, "--secret-key", SECRET, str(place / "buckets")]


def _registry(place: Path) -> list[str]:
    place.mkdir(parents=True, exist_ok=True)
    (place / "config.yml").write_text(_REGISTRY.format(place=place))
    return ["docker-registry", "serve", str(place / "config.yml")]


@contextlib.contextmanager
def _serving(argv: list[str], place: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Run a server until the context ends."""
    env = {**os.environ, "RUST_LOG": "s3s_fs=info", "NO_COLOR": "1"}
    with (place / "log").open("wb") as out:
        child = subprocess.Popen(argv, stdout=out, stderr=subprocess.STDOUT, env=env)
    try:
        yield child
    finally:
        child.terminate()
        try:
            child.wait(10)
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()


async def _port(child: subprocess.Popen[bytes], log: Path) -> int:
    with anyio.move_on_after(START_S):
        while child.poll() is None:
            said = await in_thread("disk", log.read_text)
            if found := re.search(r"(?:http://|listening on )127\.0\.0\.1:(\d+)", said):
                return int(found[1])
            await anyio.sleep(0.02)
    raise RuntimeError(f"{child.args!r} does not serve; see {log}")
