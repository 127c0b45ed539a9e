"""From a request's headers to a caller: digest, look up, remember for a few seconds."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable

from dsec.base.clock import Clock
from dsec.base.errors import Unauthenticated
from dsec.control.access import Caller
from dsec.iam.directory import Directory
from dsec.iam.keys import digest_of
from dsec.iam.principals import KeyFacts

REMEMBERED_S = 5.0
"""A revoked key may be used for this long."""
REMEMBERED_KEYS = 4096


class Authenticator:
    """Knows callers by their keys. A check costs a digest and a dictionary look-up."""

    def __init__(self, directory: Directory, clock: Clock) -> None:
        self._directory = directory
        self._clock = clock
        self._known: OrderedDict[bytes, tuple[KeyFacts, Caller, float]] = OrderedDict()

    async def caller(self, headers: Iterable[tuple[bytes, bytes]]) -> Caller:
        """Who sent a request with these headers.

        Raises:
            Unauthenticated: no key, or one nobody issued, or one that is over.
        """
        digest = digest_of(_key_in(headers))
        known = self._known.get(digest)
        if known is None or known[2] < self._clock.monotonic():
            known = await self._look_up(digest)
        facts, caller, _ = known
        if not facts.usable(self._clock.now()):
            raise Unauthenticated("the API key is not valid")
        return caller

    async def _look_up(self, digest: bytes) -> tuple[KeyFacts, Caller, float]:
        self._known.pop(digest, None)
        facts = await self._directory.find_key(digest)
        if facts is None:
            raise Unauthenticated("the API key is not valid")
        caller = Caller(facts.principal, await self._directory.tree())
        known = (facts, caller, self._clock.monotonic() + REMEMBERED_S)
        self._known[digest] = known
        if len(self._known) > REMEMBERED_KEYS:
            self._known.popitem(last=False)
        return known


def _key_in(headers: Iterable[tuple[bytes, bytes]]) -> str:
    key = ""
    for name, value in headers:
        if name == b"authorization" and value[:7].lower() == b"bearer ":
            return value[7:].strip().decode("latin-1")
        if name == b"x-api-key":
            key = value.strip().decode("latin-1")
    if not key:
        raise Unauthenticated("an API key is needed: Authorization: Bearer KEY")
    return key
