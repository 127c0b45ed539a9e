"""Who needs what of the store: a sandbox or an import under way, by digest.

They live in memory and are told again at start-up by those who know. Threads may call anything
here at once; `lock` is held over a change that must not meet a new pin.
"""

from __future__ import annotations

import contextlib
import threading
from collections import defaultdict
from collections.abc import Iterable, Iterator

from dsec.base.errors import Conflict


class Pins:
    """Digests and their owners."""

    def __init__(self, noun: str) -> None:
        self.lock = threading.RLock()
        self._noun = noun
        self._owners: defaultdict[str, set[str]] = defaultdict(set)
        self._watchers: list[set[str]] = []

    def pin(self, digests: Iterable[str], owner: str) -> None:
        """Say that `owner` needs these (here already or about to be)."""
        with self.lock:
            for digest in digests:
                self._owners[digest].add(owner)
                for seen in self._watchers:
                    seen.add(digest)

    @contextlib.contextmanager
    def watching(self) -> Iterator[set[str]]:
        """What is pinned while the context lasts, if only for a moment: a set that grows."""
        seen: set[str] = set()
        with self.lock:
            self._watchers.append(seen)
        try:
            yield seen
        finally:
            with self.lock:
                self._watchers = [other for other in self._watchers if other is not seen]

    def unpin(self, owner: str) -> None:
        """Say that `owner` needs none any more."""
        with self.lock:
            for digest in self.of(owner):
                self._owners[digest].discard(owner)
                if not self._owners[digest]:
                    del self._owners[digest]

    def by(self, digest: str) -> frozenset[str]:
        """Who needs it."""
        with self.lock:
            return frozenset(self._owners.get(digest, ()))

    def of(self, owner: str) -> frozenset[str]:
        """What `owner` needs."""
        with self.lock:
            return frozenset(d for d, owners in self._owners.items() if owner in owners)

    def all(self) -> frozenset[str]:
        """What anybody needs."""
        with self.lock:
            return frozenset(self._owners)

    def check_none(self, digest: str) -> None:
        """Refuse if somebody needs it.

        Raises:
            Conflict: naming some of them.
        """
        if owners := self.by(digest):
            some = ", ".join(sorted(owners)[:5])
            raise Conflict(f"{self._noun} {digest} is used by {some}")
