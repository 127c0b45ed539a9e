# Generated from ../_async by tools/unasync.py; do not edit.
"""Environments: what an image, a workspace and toolkits make together."""

from __future__ import annotations

from collections.abc import Sequence

from dsec.sdk._sync.call import Caller
from dsec.wire.public_v1 import LintReport, LintRequest, LintRule, TraceView

LINT_WITHIN_S = 900.0


class Environments:
    """Environments looked at from outside; `client.environments`."""

    def __init__(self, caller: Caller) -> None:
        self._caller = caller

    def lint(
        self,
        image: str,
        *,
        workspace: str | None = None,
        toolkits: Sequence[str] = (),
        answers: Sequence[str] = (),
        rules: Sequence[LintRule] = (),
        disabled: Sequence[str] = (),
    ) -> LintReport:
        """Look an environment over for what spoils an evaluation.

        Args:
            image: its image.
            workspace: its workspace, if it has one.
            toolkits: its toolkits, the lowest first.
            answers: texts that must not be found in it.
            rules: rules of your own.
            disabled: ids of rules not to apply.

        Raises:
            NotFound: no such image or layer.
        """
        body = LintRequest(
            image=image,
            workspace=workspace,
            toolkits=[*toolkits],
            answers=[*answers],
            rules=[*rules],
            disabled=[*disabled],
        )
        request = self._caller.request(
            "POST", "/v1/environments/lint", body=body, patience_s=LINT_WITHIN_S
        )
        return self._caller.call(request, LintReport)

    def trace(
        self,
        image: str,
        *,
        workspace: str | None = None,
        toolkits: Sequence[str] = (),
        trace: str = "",
    ) -> TraceView:
        """What a run read of an environment, as last recorded.

        Args:
            image: its image.
            workspace: its workspace, if it has one.
            toolkits: its toolkits, the lowest first.
            trace: name of the trace, e.g. a task's; "": the environment's own.

        Raises:
            NotFound: no such image or layer, or nothing was recorded.
        """
        request = self._caller.request(
            "GET",
            "/v1/environments/trace",
            {
                "image": image,
                "workspace": workspace,
                "toolkit": [*toolkits],
                "trace": trace or None,
            },
        )
        return self._caller.call(request, TraceView)
