"""An edge with its backend, as it is put together here and in `dsec edge`."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import anyio
from starlette.types import ASGIApp

from dsec.base.clock import Clock
from dsec.base.errors import DsecError, InvalidRequest
from dsec.base.states import FINAL
from dsec.kit.http import Route
from dsec.main.parts import node_name, version
from dsec.main.settings import Settings
from dsec.wire.edge_v1 import EdgeApi, ListFilter
from dsec.wire.public_v1 import Capability

if TYPE_CHECKING:
    from dsec.edge.backends.interface import Backend
    from dsec.edge.config import EdgeConfig
    from dsec.edge.images import Images
    from dsec.edge.network.services import Services
    from dsec.images.store.interface import BlobStore

STOP_TIMEOUT_S = 30.0


@dataclass(frozen=True, slots=True)
class Node:
    """An edge that runs."""

    api: EdgeApi
    app: ASGIApp
    routes: Sequence[Route]
    """What `app` serves below `/v1/sandboxes/{id}`."""


@asynccontextmanager
async def open_edge(settings: Settings, clock: Clock) -> AsyncIterator[Node]:
    """Start an edge; on entry everything an earlier run left is settled.

    Raises:
        InvalidRequest: the run directory's path is too long, or the helper's binary is missing.
        Conflict: another process uses the images.
    """
    from dsec.edge.config import EdgeConfig
    from dsec.edge.privileges import Privileges
    from dsec.edge.server import EDGE_ROUTES, make_edge_app
    from dsec.edge.service import EdgeService

    config = EdgeConfig(
        node=node_name(settings.state),
        state=settings.state / "edge",
        run=settings.run,
        version=version(),
        services=_services(settings),
        privileges=Privileges(
            loose=settings.allow_loose, syscalls=frozenset(settings.allow_syscalls)
        ),
    )
    async with _images(settings, clock) as (images, store):
        edge = EdgeService(
            replace(config, store=store),
            _backends(settings, config, images, clock),
            images,
            clock,
            capabilities=await _capabilities(settings),
        )
        async with edge.running() as service:
            yield Node(service, make_edge_app(service, clock), EDGE_ROUTES)


async def _capabilities(settings: Settings) -> list[Capability]:
    if settings.backend == "sim":
        return []
    from dsec.edge.doctor import examine

    return await examine(settings.state)


def _services(settings: Settings) -> Services:
    from dsec.edge.network.services import Services, services_of

    if settings.backend == "sim" and not settings.services_file:
        from dsec.main.simulation import SERVICES

        return Services.of(SERVICES)
    return Services(services_of(settings.services_file))


def _backends(
    settings: Settings, config: EdgeConfig, images: Images, clock: Clock
) -> list[Backend]:
    if settings.backend == "sim":
        from dsec.edge.sim import SimHost
        from dsec.main.simulation import SimBackend, StandIn

        host = SimHost()
        return [SimBackend(clock, host=host), StandIn(clock, host=host)]
    from dsec.edge.backends.container import ContainerBackend, ContainerConfig
    from dsec.main.network_parts import network_of

    here = ContainerConfig(
        node=config.node,
        state=config.state,
        aether=aether_binary(settings),
        network=network_of(settings, config),
    )
    return [ContainerBackend(here, images.environments, clock)]


@asynccontextmanager
async def _images(
    settings: Settings, clock: Clock
) -> AsyncIterator[tuple[Images, BlobStore | None]]:
    if settings.backend == "sim":
        from dsec.main.simulation import SimImages

        yield SimImages(clock), None
        return
    from dsec.images.service import ImageService
    from dsec.main.environment_parts import open_shared

    async with (
        open_shared(settings) as shared,
        ImageService(settings.state / "images", settings.run, clock=clock, shared=shared) as images,
    ):
        yield images, shared.store


def aether_binary(settings: Settings) -> Path:
    """The helper's binary.

    Raises:
        InvalidRequest: there is none.
    """
    package = Path(__file__).parents[1]
    built = sorted(package.parents[1].glob("native/target/*-linux-*/release/aether"))
    candidates = [Path(settings.aether)] if settings.aether else [package / "bin/aether", *built]
    for candidate in candidates:
        if os.access(candidate, os.X_OK):
            return candidate
    if settings.aether:
        raise InvalidRequest(f"the helper {settings.aether} is not there, or no program")
    looked = ", ".join(map(str, candidates))
    raise InvalidRequest(f"the helper `aether` is missing; looked for {looked}; build native/")


async def stop_all(api: EdgeApi) -> None:
    """Stop every sandbox of an edge; one that will not stop holds the others up not at all."""

    async def stop(sandbox: str) -> None:
        with anyio.move_on_after(STOP_TIMEOUT_S):
            try:
                await api.stop(sandbox)
            except DsecError:
                return  # the edge has logged why; its next start takes care of it

    async with anyio.create_task_group() as group:
        for view in await api.list_sandboxes(ListFilter()):
            if view.state not in FINAL:
                group.start_soon(stop, view.id)
