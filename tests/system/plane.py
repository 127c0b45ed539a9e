"""A whole control plane in one process, over an in-process HTTP transport."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

import httpx

from dsec.apiserver.app import Apiserver
from dsec.base.clock import SystemClock
from dsec.base.ids import PrincipalId, ProjectId
from dsec.control.edges import Edge, Edges
from dsec.control.stores import Stores
from dsec.iam.keys import digest_of, mint_key
from dsec.iam.permissions import OWNER, READER
from dsec.iam.principals import Grant, Principal
from dsec.iam.projects import ROOT, Project
from dsec.store.memory import MemoryClaims, MemoryDirectory, MemoryLeases
from tests.system.fake_edge import FakeEdge

BASE = "http://dsec"


@dataclass
class Keys:
    """One key per role: the root's owner, a reader, the owner of each of two sibling projects."""

    owner: str
    reader: str
    team: str
    foreign: str
    nobody: str = "dsec_" + "0" * 40


@dataclass
class Plane:
    server: Apiserver
    edges: Edges
    fakes: list[FakeEdge]
    keys: Keys
    client: httpx.AsyncClient
    directory: MemoryDirectory
    claims: MemoryClaims
    book: MemoryLeases


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


async def make_keys(directory: MemoryDirectory) -> Keys:
    team, foreign = ProjectId("team"), ProjectId("foreign")
    await directory.add_project(Project(ROOT, None, "root"))
    for project in (team, foreign):
        await directory.add_project(Project(project, ROOT, project))
    made: dict[str, str] = {}
    for name, home, rights in (
        ("owner", ROOT, OWNER),
        ("reader", ROOT, READER),
        ("team", team, OWNER),
        ("foreign", foreign, OWNER),
    ):
        principal = PrincipalId(name)
        await directory.add_principal(
            Principal(principal, name, "person", home, (Grant(home, rights),))
        )
        made[name] = mint_key()
        await directory.add_key(digest_of(made[name]), principal, "test")
    return Keys(**made)


@asynccontextmanager
async def control_plane(
    fakes: list[FakeEdge], links: list[Edge] | None = None
) -> AsyncIterator[Plane]:
    clock = SystemClock()
    directory, claims, book = MemoryDirectory(clock), MemoryClaims(clock), MemoryLeases()
    edges = Edges(links or [Edge(fake, fake.app) for fake in fakes], clock)
    server = Apiserver(edges, Stores(directory, claims, book), clock, "0.0.0")
    await edges.refresh()
    keys = await make_keys(directory)
    transport = httpx.ASGITransport(server.app)
    async with httpx.AsyncClient(
        transport=transport, base_url=BASE, headers=bearer(keys.owner)
    ) as client:
        yield Plane(server, edges, fakes, keys, client, directory, claims, book)
