"""The public API's routes that are not about one sandbox: one file per noun, and their table."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from starlette.requests import Request
from starlette.responses import Response

from dsec.apiserver.rest_v1.environments import EnvironmentsRest
from dsec.apiserver.rest_v1.images import ImagesRest
from dsec.apiserver.rest_v1.jobs import JobsRest
from dsec.apiserver.rest_v1.layers import LayersRest
from dsec.apiserver.rest_v1.platform import PlatformRest
from dsec.apiserver.rest_v1.sandboxes import SandboxesRest
from dsec.apiserver.rest_v1.snapshots import SnapshotsRest
from dsec.apiserver.rest_v1.store import StoreRest
from dsec.control.edges import Edges
from dsec.control.environments import Environments
from dsec.control.images import Images
from dsec.control.jobs import Jobs
from dsec.control.layers import Layers
from dsec.control.leases import Leases
from dsec.control.nodes import Nodes
from dsec.control.sandboxes import Sandboxes
from dsec.control.shared_store import SharedStore
from dsec.control.snapshots import Snapshots
from dsec.kit.http import Route, json_response
from dsec.kit.table import row


@dataclass(frozen=True, slots=True)
class UseCases:
    """What the routes call."""

    sandboxes: Sandboxes
    nodes: Nodes
    images: Images
    layers: Layers
    environments: Environments
    store: SharedStore
    snapshots: Snapshots
    jobs: Jobs
    leases: Leases


def use_cases(edges: Edges, sandboxes: Sandboxes, jobs: Jobs, leases: Leases) -> UseCases:
    """All of them over one fleet."""
    return UseCases(
        sandboxes=sandboxes,
        nodes=Nodes(edges),
        images=Images(edges),
        layers=Layers(edges),
        environments=Environments(edges),
        store=SharedStore(edges),
        snapshots=Snapshots(edges),
        jobs=jobs,
        leases=leases,
    )


def routes(cases: UseCases, edges: Edges, version: str) -> list[Route]:
    """The table."""
    return [
        *PlatformRest(cases.nodes, version).routes(),
        *SandboxesRest(cases.sandboxes, edges).routes(),
        *ImagesRest(cases.images).routes(),
        *LayersRest(cases.layers).routes(),
        *EnvironmentsRest(cases.environments).routes(),
        *StoreRest(cases.store).routes(),
        *SnapshotsRest(cases.snapshots).routes(),
        *JobsRest(cases.jobs, cases.leases).routes(),
    ]


def openapi_route(description: Mapping[str, object]) -> Route:
    """The route that serves the description of all routes, itself left out."""
    answer = json_response(description)

    async def get_openapi(_request: Request) -> Response:
        """This description."""
        return answer

    return row("GET", "/openapi.json", get_openapi, public=True)
