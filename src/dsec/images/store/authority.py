"""What a registry wants to see as Authorization: Basic, or a token got from another server."""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Literal

import anyio
import msgspec
from msgspec import Struct
from yarl import URL

from dsec.base.clock import Clock
from dsec.base.errors import PermissionDenied, Unavailable
from dsec.images.store.credentials import Credentials

Action = Literal["pull", "push", "delete"]
"""What a token is good for; one is kept for each."""

_LIFETIME_S = 60.0
"""Of a token that does not say, by the token protocol."""
_EARLY_S = 5.0
_PARAMETER = re.compile(r'([a-zA-Z_]+)\s*=\s*"((?:[^"\\]|\\.)*)"')


class _Token(Struct):
    token: str = ""
    access_token: str = ""
    expires_in: float = _LIFETIME_S


@dataclass(frozen=True, slots=True)
class Challenge:
    """A WWW-Authenticate header."""

    scheme: str
    """In small letters."""
    parameters: dict[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenRequest:
    """How to ask for a token: by GET, or by POST if there is a form."""

    url: URL
    authorization: str = ""
    form: dict[str, str] | None = None


FetchToken = Callable[[TokenRequest], Awaitable[bytes]]
"""Asks the token server. Raises PermissionDenied or Unavailable."""


def parse_challenge(header: str) -> Challenge:
    """Read a WWW-Authenticate header; the first scheme that is known counts."""
    found = re.search(r"\b(bearer|basic)\b", header, re.IGNORECASE)
    if not found:
        return Challenge("", {})
    pairs = _PARAMETER.findall(header[found.end() :])
    return Challenge(found[1].lower(), {key.lower(): value for key, value in pairs})


def token_request(challenge: Challenge, credentials: Credentials, registry: URL) -> TokenRequest:
    """How to get the token a challenge asks for.

    Raises:
        PermissionDenied: the token server would get a password in the clear that the registry
            would not.
    """
    realm = URL(challenge.parameters.get("realm", ""))
    if realm.scheme not in ("http", "https") or not realm.host:
        raise PermissionDenied(f"{registry.host} names no server for tokens")
    if registry.scheme == "https" and realm.scheme != "https":
        raise PermissionDenied(f"{registry.host} wants credentials sent in the clear")
    asked = {k: v for k in ("service", "scope") if (v := challenge.parameters.get(k))}
    if credentials.identity_token:
        grant = {"grant_type": "refresh_token", "client_id": "dsec"}
        return TokenRequest(
            url=realm, form={**asked, **grant, "refresh_token": credentials.identity_token}
        )
    return TokenRequest(url=realm.update_query(asked), authorization=credentials.basic)


class Authority:
    """What is sent to one repository, learned from its challenges."""

    def __init__(self, registry: URL, fetch: FetchToken, clock: Clock) -> None:
        self._registry = registry
        self._fetch = fetch
        self._clock = clock
        self._held: dict[Action, tuple[str, float]] = {}
        self._lock = anyio.Lock()

    def header(self, action: Action) -> str:
        """The value of the Authorization header; empty if none is known to be needed."""
        value, until = self._held.get(action, ("", 0.0))
        return value if self._clock.monotonic() < until else ""

    async def learn(
        self, action: Action, sent: str, challenge: str, credentials: Credentials
    ) -> bool:
        """Prepare another header after a 401; one task asks while the others wait for it.

        Args:
            action: what was to be done.
            sent: the header that was refused.
            challenge: the answer's WWW-Authenticate.
            credentials: to be used.

        Returns:
            Whether there is another header to try.

        Raises:
            PermissionDenied: the token server refuses. Unavailable: it does not answer.
        """
        async with self._lock:
            if (now := self.header(action)) and now != sent:
                return True  # another task got it meanwhile
            value, lifetime_s = await self._ask(parse_challenge(challenge), credentials)
            self._held[action] = (value, self._clock.monotonic() + lifetime_s)
            return value not in ("", sent)

    async def _ask(self, challenge: Challenge, credentials: Credentials) -> tuple[str, float]:
        if challenge.scheme == "basic":
            return credentials.basic, float("inf")
        if challenge.scheme != "bearer":
            return "", 0.0
        data = await self._fetch(token_request(challenge, credentials, self._registry))
        try:
            token = msgspec.json.decode(data, type=_Token, strict=False)
        except msgspec.MsgspecError as error:
            raise Unavailable(f"the token server of {self._registry.host}: {error}") from error
        value = token.token or token.access_token
        return f"Bearer {value}" if value else "", max(token.expires_in, _LIFETIME_S) - _EARLY_S
