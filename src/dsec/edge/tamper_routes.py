"""The route of a sandbox's tamper report."""

from __future__ import annotations

from functools import partial

from starlette.requests import Request

from dsec.edge.handlers import Handlers
from dsec.kit.http import LateJson, Route
from dsec.kit.table import row
from dsec.wire.sandbox import TamperReport

TAMPER = "/v1/sandboxes/{id}/tamper"


class TamperApi(Handlers):
    """Handlers."""

    async def tamper(self, request: Request) -> LateJson:
        """What was tried in it and did not work, and which system files it has changed."""
        return LateJson(partial(self.service.tamper, request.path_params["id"]))


def tamper_routes(api: TamperApi) -> list[Route]:
    """The table."""
    return [row("GET", TAMPER, api.tamper, None, None, TamperReport)]
