"""Routes about jobs and their leases."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta, Struct
from starlette.requests import Request
from starlette.responses import Response

from dsec.apiserver.gateway import caller_of
from dsec.apiserver.rest_v1.silence import silent_header
from dsec.base.errors import NotFound
from dsec.control.jobs import Jobs, job_view
from dsec.control.leases import Leases
from dsec.kit.http import Ndjson, Route, json_response, key_of, read_body, read_query
from dsec.kit.table import NDJSON, row
from dsec.wire.phases import Name
from dsec.wire.public_v1 import JobItem, JobView, LeaseRequest
from dsec.wire.sandbox import Heartbeat, StreamError


class ReleaseQuery(Struct, kw_only=True, forbid_unknown_fields=True):
    """Which lease to give back."""

    epoch: Annotated[int, Meta(ge=1)]


class JobsRest:
    """Handlers and their table."""

    def __init__(self, jobs: Jobs, leases: Leases) -> None:
        self._jobs = jobs
        self._leases = leases

    async def list_jobs(self, request: Request) -> Response:
        """Jobs of the caller's project, by name."""
        listed = await self._jobs.list(caller_of(request))
        return json_response(listed.jobs, headers=silent_header(listed.silent))

    async def show_job(self, request: Request) -> Response:
        """One job: its lease and how many sandboxes it has."""
        listed = await self._jobs.show(caller_of(request), _job(request))
        return json_response(listed.jobs[0], headers=silent_header(listed.silent))

    async def pause_job(self, request: Request) -> Ndjson:
        """Pause all sandboxes of a job; each is reported when it is paused."""
        return Ndjson(self._jobs.move(caller_of(request), _job(request), "pause"))

    async def resume_job(self, request: Request) -> Ndjson:
        """Resume all sandboxes of a job; each is reported when it runs."""
        return Ndjson(self._jobs.move(caller_of(request), _job(request), "resume"))

    async def reap_job(self, request: Request) -> Ndjson:
        """Stop all sandboxes of a job; each is reported when nothing of it is left."""
        return Ndjson(self._jobs.move(caller_of(request), _job(request), "reap"))

    async def hold_lease(self, request: Request) -> Response:
        """Take a job's lease, which begins a new epoch, or renew it."""
        job, wanted = _job(request), await read_body(request, LeaseRequest)
        lease = await self._leases.hold(caller_of(request), job, wanted, key_of(request))
        return json_response(job_view(lease.project, job, lease, []))

    async def release_lease(self, request: Request) -> Response:
        """Give a job's lease back; its sandboxes go on without one."""
        epoch = read_query(request, ReleaseQuery).epoch
        await self._leases.release(caller_of(request), _job(request), epoch)
        return Response(status_code=204)

    def routes(self) -> list[Route]:
        """The table."""
        job = "/v1/jobs/{job}"
        items = (JobItem, Heartbeat, StreamError)
        moves = (("pause", self.pause_job), ("resume", self.resume_job), ("reap", self.reap_job))
        return [
            row("GET", "/v1/jobs", self.list_jobs, answer=list[JobView]),
            row("GET", job, self.show_job, answer=JobView),
            *(
                row("POST", f"{job}/{verb}", handler, answer=items, media_type=NDJSON)
                for verb, handler in moves
            ),
            row("PUT", f"{job}/lease", self.hold_lease, LeaseRequest, answer=JobView),
            row("DELETE", f"{job}/lease", self.release_lease, query=ReleaseQuery, status=204),
        ]


def _job(request: Request) -> str:
    name: str = request.path_params["job"]
    try:
        return msgspec.convert(name, Name)
    except msgspec.ValidationError:
        raise NotFound(f"no job {name[:128]!r}: not a name", kind="job") from None
