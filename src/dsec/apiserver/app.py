"""Puts the apiserver together from its parts."""

from __future__ import annotations

from collections.abc import Sequence

import anyio
from starlette.types import ASGIApp

from dsec.apiserver.auth import Authenticator
from dsec.apiserver.gateway import Gateway
from dsec.apiserver.rest_v1 import openapi_route, routes, use_cases
from dsec.base.clock import Clock
from dsec.control.edges import Edges
from dsec.control.jobs import Jobs
from dsec.control.leases import Leases
from dsec.control.ownership import Ownership
from dsec.control.reaping import Reaper
from dsec.control.sandboxes import Sandboxes
from dsec.control.stores import Stores
from dsec.kit.http import Route, make_app
from dsec.kit.openapi import describe

TITLE = "DSec"


class Apiserver:
    """The application and what has to run beside it."""

    def __init__(
        self,
        edges: Edges,
        stores: Stores,
        clock: Clock,
        version: str,
        edge_routes: Sequence[Route] = (),
    ) -> None:
        """Make one.

        Args:
            edges: the fleet.
            stores: what is kept.
            clock: for all of them and for the log.
            version: of this program.
            edge_routes: the table of what is passed through, for the description alone.
        """
        self.edges = edges
        ownership = Ownership(edges)
        self.reaper = Reaper(edges, stores.book, clock)
        self.leases = Leases(stores.book, clock, self.reaper.expect)
        self.sandboxes = Sandboxes(edges, stores.claims, ownership, self.leases, clock)
        jobs = Jobs(edges, stores.book)
        self.routes = routes(use_cases(edges, self.sandboxes, jobs, self.leases), edges, version)
        self.description = describe([*self.routes, *edge_routes], TITLE, version)
        table = [*self.routes, openapi_route(self.description)]
        public = [route.path for route in table if route.public]
        authenticator = Authenticator(stores.directory, clock)

        def guarded(here: ASGIApp) -> ASGIApp:
            return Gateway(here, authenticator, ownership, edges, public, self.sandboxes.check_fork)

        self.app = make_app(table, clock, wrap=guarded)

    async def run(self) -> None:
        """All that goes on beside the requests, for ever."""
        async with anyio.create_task_group() as group:
            group.start_soon(self.edges.run)
            group.start_soon(self.reaper.run)
            group.start_soon(self.sandboxes.forget_old_claims)
            group.start_soon(self.leases.forget_old)
