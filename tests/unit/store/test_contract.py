"""What the rooms above expect of a store, held against SQLite and its twin in memory."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import anyio
import pytest

from dsec.base.errors import NotFound
from dsec.base.ids import PrincipalId, ProjectId, SandboxId
from dsec.control.claims import Claims
from dsec.control.leases import LeaseBook
from dsec.iam.directory import Directory
from dsec.iam.permissions import OWNER, READER, Permission
from dsec.iam.principals import Grant, Principal
from dsec.iam.projects import ROOT, Project
from dsec.store.claims import SqlClaims
from dsec.store.database import open_sqlite
from dsec.store.keys import SqlDirectory
from dsec.store.leases import SqlLeases
from dsec.store.memory import MemoryClaims, MemoryDirectory, MemoryLeases
from dsec.store.records import Claim

pytestmark = pytest.mark.anyio

ROOT_PROJECT = Project(ROOT, None, "root")
TEAM = ProjectId("team")
DIGEST = b"d" * 32
A, B, C = (SandboxId(f"sbx{letter}") for letter in "abc")


class FixedClock:
    def __init__(self) -> None:
        self.at = 1000.0

    def now(self) -> float:
        return self.at

    def monotonic(self) -> float:
        return self.at


@dataclass
class Store:
    directory: Directory
    claims: Claims
    book: LeaseBook
    clock: FixedClock


@asynccontextmanager
async def opened(kind: str, folder: Path) -> AsyncIterator[Store]:
    clock = FixedClock()
    if kind == "memory":
        yield Store(MemoryDirectory(clock), MemoryClaims(clock), MemoryLeases(), clock)
        return
    async with open_sqlite(folder / "control.db") as database:
        claims = SqlClaims(database, clock)
        yield Store(SqlDirectory(database, clock), claims, SqlLeases(database), clock)


@pytest.fixture(params=["memory", "sqlite"])
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def principal(name: str = "ada") -> Principal:
    grants = (
        Grant(ROOT, READER),
        Grant(TEAM, frozenset({Permission.SANDBOX_CREATE})),
    )
    return Principal(PrincipalId(name), name, "agent", ROOT, grants)


async def filled(store: Store) -> None:
    await store.directory.add_project(ROOT_PROJECT)
    await store.directory.add_project(Project(TEAM, ROOT, "team"))
    await store.directory.add_principal(principal())


async def test_a_key_leads_to_its_principal(kind: str, tmp_path: Path) -> None:
    async with opened(kind, tmp_path) as store:
        await filled(store)
        await store.directory.add_key(DIGEST, PrincipalId("ada"), "laptop", expires_at=2000.0)
        facts = await store.directory.find_key(DIGEST)
        assert facts is not None
        assert facts.principal == principal()
        assert facts.usable(1999.0)
        assert not facts.usable(2000.0)
        assert await store.directory.find_key(b"x" * 32) is None


async def test_an_owner_is_an_owner(kind: str, tmp_path: Path) -> None:
    async with opened(kind, tmp_path) as store:
        await filled(store)
        owner = Principal(PrincipalId("own"), "own", "person", TEAM, (Grant(TEAM, OWNER),))
        await store.directory.add_principal(owner)
        await store.directory.add_key(DIGEST, owner.id, "")
        facts = await store.directory.find_key(DIGEST)
        assert facts is not None
        assert facts.principal == owner


async def test_a_revoked_key_is_known_and_useless(kind: str, tmp_path: Path) -> None:
    async with opened(kind, tmp_path) as store:
        await filled(store)
        await store.directory.add_key(DIGEST, PrincipalId("ada"), "")
        await store.directory.revoke_key(DIGEST)
        facts = await store.directory.find_key(DIGEST)
        assert facts is not None
        assert not facts.usable(0.0)
        with pytest.raises(NotFound):
            await store.directory.revoke_key(b"x" * 32)


async def test_adding_twice_is_harmless(kind: str, tmp_path: Path) -> None:
    async with opened(kind, tmp_path) as store:
        for _ in range(2):
            await filled(store)
            await store.directory.add_key(DIGEST, PrincipalId("ada"), "")
        tree = await store.directory.tree()
        assert list(tree.chain(TEAM)) == [TEAM, ROOT]


async def test_nothing_hangs_in_the_air(kind: str, tmp_path: Path) -> None:
    async with opened(kind, tmp_path) as store:
        with pytest.raises(NotFound):
            await store.directory.add_project(Project(TEAM, ROOT, "team"))
        with pytest.raises(NotFound):
            await store.directory.add_principal(principal())
        with pytest.raises(NotFound):
            await store.directory.add_key(DIGEST, PrincipalId("ada"), "")


async def test_the_first_claim_holds(kind: str, tmp_path: Path) -> None:
    async with opened(kind, tmp_path) as store:
        first, second = Claim(A, DIGEST), Claim(B, b"e" * 32)
        assert await store.claims.find(ROOT, "k") is None
        assert await store.claims.claim(ROOT, "k", first) == first
        assert await store.claims.claim(ROOT, "k", second) == first
        assert await store.claims.claim(TEAM, "k", second) == second
        assert await store.claims.find(ROOT, "k") == first


async def test_of_many_claims_at_once_one_holds(kind: str, tmp_path: Path) -> None:
    async with opened(kind, tmp_path) as store:
        held: list[Claim] = []

        async def claim(number: int) -> None:
            held.append(
                await store.claims.claim(ROOT, "k", Claim(SandboxId(f"sbx{number}"), DIGEST))
            )

        async with anyio.create_task_group() as group:
            for number in range(50):
                group.start_soon(claim, number)
        assert len(set(held)) == 1


async def test_a_claim_moves_until_it_is_settled(kind: str, tmp_path: Path) -> None:
    async with opened(kind, tmp_path) as store:
        await store.claims.claim(ROOT, "k", Claim(A, DIGEST))
        assert await store.claims.move(ROOT, "k", A, B) == Claim(B, DIGEST)
        assert await store.claims.move(ROOT, "k", A, C) == Claim(B, DIGEST)
        assert not await store.claims.settle(ROOT, "k", A)
        assert await store.claims.settle(ROOT, "k", B)
        assert await store.claims.settle(ROOT, "k", B)
        assert await store.claims.move(ROOT, "k", B, C) == Claim(B, DIGEST, settled=True)
        assert await store.claims.move(ROOT, "unknown", B, C) is None


async def test_old_claims_are_forgotten(kind: str, tmp_path: Path) -> None:
    async with opened(kind, tmp_path) as store:
        await store.claims.claim(ROOT, "old", Claim(A, DIGEST))
        store.clock.at = 2000.0
        await store.claims.claim(ROOT, "new", Claim(B, DIGEST))
        assert await store.claims.forget_before(1500.0) == 1
        assert await store.claims.find(ROOT, "old") is None
        assert await store.claims.find(ROOT, "new") is not None


async def test_what_was_stored_is_there_after_a_restart(tmp_path: Path) -> None:
    for _ in range(2):
        async with opened("sqlite", tmp_path) as store:
            await filled(store)
            held = await store.claims.claim(ROOT, "k", Claim(A, DIGEST))
            assert held == Claim(A, DIGEST)
