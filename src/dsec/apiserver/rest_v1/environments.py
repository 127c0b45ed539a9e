"""Routes about environments: an image, a workspace and toolkits together."""

from __future__ import annotations

from functools import partial

from starlette.requests import Request

from dsec.apiserver.gateway import caller_of
from dsec.apiserver.rest_v1.bodies import MAX_SPEC_BYTES
from dsec.control.environments import Environments
from dsec.kit.http import LateJson, Route, read_body, read_query
from dsec.kit.table import row
from dsec.wire.environment_queries import TraceQuery
from dsec.wire.public_v1 import LintReport, LintRequest, TraceView


class EnvironmentsRest:
    """Handlers and their table."""

    def __init__(self, environments: Environments) -> None:
        self._environments = environments

    async def lint_environment(self, request: Request) -> LateJson:
        """Look an environment over for what spoils an evaluation."""
        body = await read_body(request, LintRequest, MAX_SPEC_BYTES)
        return LateJson(partial(self._environments.lint, caller_of(request), body))

    async def get_trace(self, request: Request) -> LateJson:
        """What a run read of an environment, as last recorded."""
        wanted = read_query(request, TraceQuery)
        return LateJson(partial(self._environments.trace, caller_of(request), wanted))

    def routes(self) -> list[Route]:
        """The table."""
        path = "/v1/environments"
        return [
            row("POST", f"{path}/lint", self.lint_environment, LintRequest, None, LintReport),
            row("GET", f"{path}/trace", self.get_trace, None, TraceQuery, TraceView),
        ]
