"""Keys: found in headers, remembered for a while, over when they are over."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from dsec.apiserver.auth import REMEMBERED_S, Authenticator
from dsec.base.errors import Unauthenticated
from dsec.base.ids import PrincipalId
from dsec.iam.keys import digest_of, mint_key
from dsec.iam.permissions import OWNER
from dsec.iam.principals import Grant, KeyFacts, Principal
from dsec.iam.projects import ROOT, Project
from dsec.store.memory import MemoryDirectory

pytestmark = pytest.mark.anyio
Headers = Sequence[tuple[bytes, bytes]]


class HandClock:
    at = 1000.0

    def now(self) -> float:
        return self.at

    def monotonic(self) -> float:
        return self.at


class Counting(MemoryDirectory):
    looks = 0

    async def find_key(self, digest: bytes) -> KeyFacts | None:  # type: ignore[explicit-override]
        self.looks += 1
        return await super().find_key(digest)


async def filled(clock: HandClock, expires_at: float | None = None) -> tuple[Counting, str]:
    directory = Counting(clock)
    await directory.add_project(Project(ROOT, None, "root"))
    admin = Principal(PrincipalId("a"), "a", "person", ROOT, (Grant(ROOT, OWNER),))
    await directory.add_principal(admin)
    key = mint_key()
    await directory.add_key(digest_of(key), admin.id, "", expires_at)
    return directory, key


@pytest.mark.parametrize("name", [b"authorization", b"x-api-key"])
async def test_a_key_is_looked_up_once_in_a_while(name: bytes) -> None:
    clock = HandClock()
    directory, key = await filled(clock)
    auth = Authenticator(directory, clock)
    value = key.encode() if name == b"x-api-key" else b"bearer " + key.encode()
    for _ in range(10):
        assert (await auth.caller([(b"host", b"x"), (name, value)])).principal.name == "a"
    assert directory.looks == 1
    clock.at += REMEMBERED_S + 1
    await auth.caller([(name, value)])
    assert directory.looks == 2


async def test_a_key_that_expires_while_it_is_remembered() -> None:
    clock = HandClock()
    directory, key = await filled(clock, expires_at=1002.0)
    auth = Authenticator(directory, clock)
    headers = [(b"x-api-key", key.encode())]
    await auth.caller(headers)
    clock.at = 1002.0
    with pytest.raises(Unauthenticated):
        await auth.caller(headers)


async def test_a_revoked_key_is_over_when_its_time_is_up() -> None:
    clock = HandClock()
    directory, key = await filled(clock)
    auth = Authenticator(directory, clock)
    headers = [(b"x-api-key", key.encode())]
    await auth.caller(headers)
    await directory.revoke_key(digest_of(key))
    clock.at += REMEMBERED_S + 1
    with pytest.raises(Unauthenticated):
        await auth.caller(headers)


@pytest.mark.parametrize(
    "headers",
    [
        [],
        [(b"authorization", b"")],
        [(b"authorization", b"Basic eDp5")],
        [(b"authorization", b"Bearer ")],
        [(b"authorization", b"Bearer \xff\xfe")],
        [(b"x-api-key", b"")],
        [(b"x-api-key", b"dsec_" + b"0" * 40)],
    ],
)
async def test_what_is_no_key(headers: Headers) -> None:
    clock = HandClock()
    directory, _ = await filled(clock)
    with pytest.raises(Unauthenticated):
        await Authenticator(directory, clock).caller(headers)
