"""Looking at environments from outside: what spoils an evaluation, what a run read."""

from __future__ import annotations

import uuid
from collections.abc import Sequence

from dsec.base.clock import Clock
from dsec.base.errors import NotFound
from dsec.images.devices import Devices
from dsec.images.environments import Environments
from dsec.images.erofs.read import read_image
from dsec.images.layers import LayerStore
from dsec.images.lint.child import Job, JobPart
from dsec.images.lint.run import run_lint
from dsec.images.overlaid import Part
from dsec.images.records import Environment, ImageRecord
from dsec.images.traces import Trace, Traces
from dsec.images.tracing import trace_view
from dsec.kit.blocking import in_thread
from dsec.wire.public_v1 import EnvironmentRef, LintReport, LintRequest, TraceView


class Inspection:
    """Of one node's environments."""

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

    async def lint(self, request: LintRequest) -> LintReport:
        """Look an environment over, in a child process.

        Raises:
            NotFound: a part of it is not known. InvalidRequest: an own rule is bad.
            DataUnavailable: the store does not give its data. DeadlineExceeded.
        """
        wanted = EnvironmentRef(
            image=request.image, workspace=request.workspace, toolkits=request.toolkits
        )
        environment = await self._environments.compose(wanted)
        image = await self._environments.image(environment.image.name)
        owner = f"lint-{uuid.uuid4().hex}"
        try:
            await self._environments.hold(environment, owner)
            return await run_lint(await self._job(request, environment, image))
        finally:
            await self._environments.release(owner)

    async def _job(self, request: LintRequest, environment: Environment, image: ImageRecord) -> Job:
        return Job(
            request=request,
            parts=[
                await self._job_part(part.label, digest)
                for part in environment.parts
                for digest in part.layers
            ],
            config=image.config,
            now_s=self._clock.now(),
            layers=len(image.layers) + len(environment.parts) - 1,
        )

    async def _job_part(self, label: str, digest: str) -> JobPart:
        record = await in_thread("disk", self._layers.get, digest)
        paths = await self._devices.paths(record.devices)
        return JobPart(
            label=label, meta=str(self._layers.meta(digest)), devices=[str(path) for path in paths]
        )

    async def trace(self, wanted: EnvironmentRef, name: str) -> TraceView:
        """What a run read of an environment, as recorded.

        Raises:
            NotFound: a part of it, or (kind trace) a trace of this name, is not known.
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
        await self._environments.hold(environment, owner := f"trace-{uuid.uuid4().hex}")
        try:
            return await in_thread("build", self._view, wanted, environment, trace)
        finally:
            await self._environments.release(owner)

    def _view(self, wanted: EnvironmentRef, environment: Environment, trace: Trace) -> TraceView:
        return trace_view(
            wanted, trace.name, trace.recorded_at, self._parts(environment), trace.recording
        )

    def _parts(self, environment: Environment) -> Sequence[Part]:
        return [
            Part(part.label, read_image(self._layers.meta(digest)))
            for part in environment.parts
            for digest in part.layers
        ]
