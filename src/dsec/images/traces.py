"""Boot traces: which chunks a run read first, kept by environment and task, shared by the store.

A trace is known by the digest of the environment it was recorded on and a name: a task's, or "".
One of the image alone serves every environment on that image which has none of its own.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
from collections.abc import Iterable, Iterator
from pathlib import Path

import anyio
from msgspec import Struct

from dsec.base.errors import DsecError, NotFound
from dsec.images import disk
from dsec.images.records import Environment, decode, digest_of_all, encode
from dsec.images.store.interface import BlobStore
from dsec.kit.blocking import in_thread
from dsec.wire.filler import Recording

logger = logging.getLogger("dsec.images.traces")

ABSENT_S = 60.0
"""A trace that was not there is looked for again after so long: another node may have recorded it."""
REST_S = 30.0
"""A store that did not answer is not asked for traces so long."""
LOOK_DEADLINE_S = 2.0
"""A trace only helps: a slow store must not hold a creation up for it."""


class Trace(Struct, kw_only=True, frozen=True):
    """A document of kind `trace`, and `traces/<hex>.json`."""

    environment: list[str]
    """Layers, bottom first."""
    name: str
    recorded_at: float
    recording: Recording


def trace_key(layers: Iterable[str], name: str) -> str:
    """What a trace is known by in a store."""
    return f"{digest_of_all(list(layers))}/{name}"


class Traces:
    """The traces a node knows, those of the store included."""

    def __init__(self, root: Path, store: BlobStore | None) -> None:
        self._root = root.absolute() / "traces"
        self._scratch = root.absolute() / "tmp"
        self._store = store
        self._known: dict[str, Trace] = {}
        self._absent: dict[str, float] = {}
        """Looked for in the store and not found, and when."""
        self._rest_until = 0.0

    def open(self) -> None:
        """Make the directory. Blocking."""
        self._root.mkdir(parents=True, exist_ok=True)

    async def exact(self, environment: Environment, name: str) -> Trace | None:
        """The trace of just this environment and name, if there is one."""
        return await self._find(trace_key(environment.layers, name))

    async def best(self, environment: Environment, name: str) -> Trace | None:
        """The most telling trace for a run that is about to begin."""
        for key in _candidates(environment, name):
            if trace := await self._find(key):
                return trace
        return None

    async def _find(self, key: str) -> Trace | None:
        if key in self._known:
            return self._known[key]
        trace = await in_thread("disk", self._read, key) or await self._ask_store(key)
        if trace is not None:
            self._known[key] = trace
        return trace

    def _file(self, key: str) -> Path:
        return self._root / f"{hashlib.sha256(key.encode()).hexdigest()}.json"

    def _read(self, key: str) -> Trace | None:
        file = self._file(key)
        with contextlib.suppress(FileNotFoundError):
            return decode(file.read_bytes(), Trace, str(file))
        return None

    async def _ask_store(self, key: str) -> Trace | None:
        now = anyio.current_time()
        lately = self._absent.get(key, -ABSENT_S) + ABSENT_S > now
        if self._store is None or lately or now < self._rest_until:
            return None
        try:
            with anyio.fail_after(LOOK_DEADLINE_S):
                body = await self._store.get_document("trace", key)
            return decode(body, Trace, f"trace {key} in {self._store.url}")
        except NotFound:
            self._absent[key] = now
        except (DsecError, TimeoutError) as error:
            self._rest_until = anyio.current_time() + REST_S
            logger.warning("no trace could be had", extra={"trace": key, "why": str(error)})
        return None

    async def save(self, environment: Environment, name: str, recording: Recording) -> Trace:
        """Keep a trace here and put it into the store, for the image alone too if it has none.

        A store that does not take it is no error: the node has it.

        Raises:
            StorageFull: no room on the node.
        """
        trace = Trace(
            environment=environment.layers,
            name=name,
            recorded_at=recording.started_at,
            recording=recording,
        )
        await self._put(trace_key(environment.layers, name), trace)
        alone = trace_key(environment.parts[0].layers, "")
        if await self._find(alone) is None:
            await self._put(alone, trace)
        return trace

    async def _put(self, key: str, trace: Trace) -> None:
        body = encode(trace)
        with disk.full_disk_named(self._root):
            await in_thread("disk", disk.write_atomically, self._file(key), body, self._scratch)
        self._known[key] = trace
        if self._store is None:
            return
        try:
            await self._store.put_document("trace", key, body, [])
        except DsecError as error:
            logger.warning("a trace was not shared", extra={"trace": key, "why": error.message})


def _candidates(environment: Environment, name: str) -> Iterator[str]:
    """Keys to look under, the most telling first, each once."""
    image = environment.parts[0].layers
    keys = [
        trace_key(environment.layers, name),
        trace_key(environment.layers, ""),
        trace_key(image, name),
        trace_key(image, ""),
    ]
    yield from dict.fromkeys(keys)
