"""The route of a sandbox's phase."""

from __future__ import annotations

from functools import partial

from starlette.requests import Request

from dsec.edge.handlers import Handlers
from dsec.kit.http import LateJson, Route, read_body
from dsec.kit.table import row
from dsec.wire.phases import PhaseChange
from dsec.wire.sandbox import SandboxView

PHASE = "/v1/sandboxes/{id}/phase"


class PhaseApi(Handlers):
    """Handlers."""

    async def enter(self, request: Request) -> LateJson:
        """Enter another of its phases: all of it is in force on return, or nothing has changed."""
        change = await read_body(request, PhaseChange)
        return LateJson(partial(self.service.enter_phase, request.path_params["id"], change))


def phase_routes(api: PhaseApi) -> list[Route]:
    """The table."""
    return [row("POST", PHASE, api.enter, PhaseChange, None, SandboxView)]
