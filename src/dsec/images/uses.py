"""This node's declaration, in the store, of the layers its sandboxes stand on.

It is kept ahead of what they do: a layer is declared before its document is read and before
anything is mounted. A declaration counts for a week (`collecting.USE_LASTS_S`); it is renewed
daily. It is known by an identity drawn once per state directory, not by the node's short name.
"""

from __future__ import annotations

import contextlib
import logging
import uuid
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path

import anyio

from dsec.base.clock import Clock
from dsec.base.errors import NotFound, PermissionDenied, Unavailable
from dsec.images import disk
from dsec.images.collecting import Use
from dsec.images.records import decode, encode
from dsec.images.store.interface import BlobStore

logger = logging.getLogger("dsec.images.uses")

WRITE_DEADLINE_S = 10.0
RENEW_S = 86400.0
FORBIDDEN_S = 3600.0
"""A store that may not be written is not asked again so long: whoever runs it keeps what it holds."""


class Uses:
    """One per edge."""

    def __init__(self, store: BlobStore, root: Path, node: str, clock: Clock) -> None:
        self._store = store
        self._file = root.absolute() / "identity"
        self._scratch = root.absolute() / "tmp"
        self._node = node
        self._clock = clock
        self._name = ""
        self._declared: frozenset[str] = frozenset()
        self._wanted: set[str] = set()
        self._adopted = False
        self._written_at = 0.0
        self._forbidden_until = 0.0
        self._turn = anyio.Lock()

    def open(self) -> None:
        """Learn or draw the identity. Blocking."""
        try:
            self._name = self._file.read_text().strip()
        except FileNotFoundError:
            self._name = f"{self._node}-{uuid.uuid4().hex}"
            disk.write_atomically(self._file, self._name.encode(), self._scratch)

    async def adopt(self) -> None:
        """Take over what an earlier run declared: its sandboxes may live on. Once.

        Raises:
            Unavailable: the store does not answer; what was declared is kept until it does.
        """
        async with self._turn:
            await self._adopt()

    async def _adopt(self) -> None:
        if self._adopted:
            return
        with self._deadline("reading what this node uses"):
            with contextlib.suppress(NotFound):
                body = await self._store.get_document("use", self._name)
                known = decode(body, Use, f"use {self._name} in {self._store.url}")
                self._wanted.update(known.layers)
                self._declared = self._declared.union(known.layers)
        self._adopted = True

    async def declare(self, layers: Collection[str]) -> set[str]:
        """Have these layers kept in the store. Callers at the same time share one write.

        Returns:
            Those that were not declared before: until now they may have been collected.

        Raises:
            Unavailable: the store does not answer.
        """
        self._wanted.update(layers)
        fresh = set(layers) - self._declared
        if fresh:
            async with self._turn:
                if not self._declared.issuperset(layers):
                    await self._write()
        return fresh

    async def settle(self, needed: Iterable[str]) -> None:
        """Only these are still needed; renews a declaration that is a day old.

        Raises:
            Unavailable: the store does not answer; it is tried again the next time.
        """
        async with self._turn:
            self._wanted = set(needed)
            stale = self._clock.now() - self._written_at > RENEW_S
            if self._declared != self._wanted or (stale and self._wanted):
                await self._write()

    async def _write(self) -> None:
        if self._clock.now() < self._forbidden_until:
            return
        # After a start the old declaration is unknown until the store has answered once: a write
        # before that would wipe out what sandboxes that live on need.
        await self._adopt()
        layers, now = frozenset(self._wanted), self._clock.now()
        use = Use(node=self._node, at=now, layers=sorted(layers))
        try:
            with self._deadline("declaring what this node uses"):
                await self._store.put_document("use", self._name, encode(use), [])
        except PermissionDenied as error:
            self._forbidden_until = now + FORBIDDEN_S
            logger.warning("what this node uses is not declared", extra={"why": error.message})
        self._declared, self._written_at = layers, now

    @contextlib.contextmanager
    def _deadline(self, what: str) -> Iterator[None]:
        try:
            with anyio.fail_after(WRITE_DEADLINE_S):
                yield
        except TimeoutError:
            raise Unavailable(f"{what} took over {WRITE_DEADLINE_S:g} s") from None
