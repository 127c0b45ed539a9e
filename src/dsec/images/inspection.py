"""Looking at environments from outside: what spoils an evaluation, what a run read."""

from __future__ import annotations

import contextlib
import uuid
from collections.abc import AsyncIterator
from typing import TypeVar

from msgspec import structs

from dsec.base.clock import Clock
from dsec.base.errors import NotFound
from dsec.images.devices import Devices
from dsec.images.environments import Environments
from dsec.images.layers import LayerStore
from dsec.images.lint.child import JobPart, LintJob, TraceJob
from dsec.images.lint.indexes import node_indexes
from dsec.images.lint.run import run_lint, run_view
from dsec.images.records import Environment
from dsec.images.traces import Trace, Traces
from dsec.images.turns import Turns
from dsec.kit.blocking import in_thread
from dsec.wire.public_v1 import EnvironmentRef, LintReport, LintRequest, TraceView

R = TypeVar("R", bound=EnvironmentRef)
_TRACE_PATIENCE_S = 5.0
"""Less than the control plane waits for a node."""


class Inspection:
    """Of one node's environments. Much work for whoever asks, so one lint and one trace at a time."""

    def __init__(
        self,
        environments: Environments,
        layers: LayerStore,
        devices: Devices,
        traces: Traces,
        clock: Clock,
    ) -> None:
        self._environments = environments
        self._layers = layers
        self._devices = devices
        self._traces = traces
        self._clock = clock
        self._lints = Turns("looking environments over")
        self._views = Turns("reading traces", _TRACE_PATIENCE_S)

    async def lint(self, request: LintRequest) -> LintReport:
        """Look an environment over, in a child process.

        Raises:
            NotFound: a part of it is not known. InvalidRequest: an own rule is bad.
            RateLimited: others are being looked over.
            PayloadTooLarge: it has too many names.
            DataUnavailable: the store does not give its data. DeadlineExceeded.
        """
        environment = await self._environments.compose(request)
        async with self._lints.turn(), self._held(environment, "lint"):
            async with contextlib.AsyncExitStack() as stack:
                return await run_lint(await self._lint_job(request, environment, stack))

    async def _lint_job(
        self, request: LintRequest, environment: Environment, stack: contextlib.AsyncExitStack
    ) -> LintJob:
        image = await self._environments.image(environment.image.name)
        parts = self._parts(environment)
        for part, digest in zip(parts, environment.layers, strict=True):
            part.devices = await self._ready(digest, stack)
        return LintJob(
            request=_resolved(request, environment),
            parts=parts,
            config=image.config,
            indexes=await in_thread("disk", node_indexes),
            now_s=self._clock.now(),
            layers=len(image.layers) + len(environment.parts) - 1,
        )

    async def _ready(self, digest: str, stack: contextlib.AsyncExitStack) -> list[str]:
        """A layer's devices, which stay open until the stack is left."""
        record = await in_thread("disk", self._layers.get, digest)
        paths = await stack.enter_async_context(self._devices.ready(record.devices))
        return [str(path) for path in paths]

    def _parts(self, environment: Environment) -> list[JobPart]:
        """What is mounted, bottom first, without its devices."""
        return [
            JobPart(label=part.label, meta=str(self._layers.meta(digest)))
            for part in environment.parts
            for digest in part.layers
        ]

    async def trace(self, wanted: EnvironmentRef, name: str) -> TraceView:
        """What a run read of an environment, as recorded; told by files in a child process.

        Raises:
            NotFound: a part of it, or (kind trace) a trace of this name, is not known.
            RateLimited: others are being read.
            PayloadTooLarge: it has too many names.
        """
        environment = await self._environments.compose(wanted)
        trace = await self._traces.exact(environment, name)
        if trace is None:
            called = f"trace {name!r}" if name else "trace"
            raise NotFound(
                f"nobody has recorded a {called} of this environment yet: create a sandbox with "
                "record_trace, or use `dsec env trace`",
                kind="trace",
                name=name,
            )
        async with self._views.turn(), self._held(environment, "trace"):
            return await run_view(self._trace_job(wanted, environment, trace))

    def _trace_job(
        self, wanted: EnvironmentRef, environment: Environment, trace: Trace
    ) -> TraceJob:
        return TraceJob(
            environment=_resolved(wanted, environment),
            parts=self._parts(environment),
            trace=trace.name,
            recorded_at=trace.recorded_at,
            recording=trace.recording,
        )

    @contextlib.asynccontextmanager
    async def _held(self, environment: Environment, why: str) -> AsyncIterator[None]:
        """Have an environment's layers here, and keep them."""
        owner = f"{why}-{uuid.uuid4().hex}"
        try:
            await self._environments.hold(environment, owner)
            yield
        finally:
            await self._environments.release(owner)


def _resolved(wanted: R, environment: Environment) -> R:
    """With versions: a report is kept, and a name alone means another one tomorrow."""
    return structs.replace(
        wanted, workspace=environment.workspace or None, toolkits=environment.toolkits
    )
