"""Puts the apiserver together from its parts."""

from __future__ import annotations

from collections.abc import Sequence

from starlette.types import ASGIApp

from dsec.apiserver.auth import Authenticator
from dsec.apiserver.gateway import Gateway
from dsec.apiserver.rest_v1 import openapi_route, routes, use_cases
from dsec.base.clock import Clock
from dsec.control.claims import Claims
from dsec.control.edges import Edges
from dsec.control.ownership import Ownership
from dsec.control.sandboxes import Sandboxes
from dsec.iam.directory import Directory
from dsec.kit.http import Route, make_app
from dsec.kit.openapi import describe

TITLE = "DSec"


class Apiserver:
    """The application and what has to run beside it."""

    def __init__(
        self,
        edges: Edges,
        directory: Directory,
        claims: Claims,
        clock: Clock,
        version: str,
        edge_routes: Sequence[Route] = (),
    ) -> None:
        """Make one.

        Args:
            edges: the fleet.
            directory: principals, projects, keys.
            claims: idempotency keys.
            clock: for both and for the log.
            version: of this program.
            edge_routes: the table of what is passed through, for the description alone.
        """
        self.edges = edges
        ownership = Ownership(edges)
        self.sandboxes = Sandboxes(edges, claims, ownership, clock)
        self.routes = routes(use_cases(edges, self.sandboxes), edges, version)
        self.description = describe([*self.routes, *edge_routes], TITLE, version)
        table = [*self.routes, openapi_route(self.description)]
        public = [route.path for route in table if route.public]
        authenticator = Authenticator(directory, clock)

        def guarded(here: ASGIApp) -> ASGIApp:
            return Gateway(here, authenticator, ownership, edges, public)

        self.app = make_app(table, clock, wrap=guarded)
