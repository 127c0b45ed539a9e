# Generated from ../_async by tools/unasync.py; do not edit.
"""Jobs: the sandboxes of one run together, and the lease that holds them."""

from __future__ import annotations

import builtins

import msgspec

from dsec.sdk._http import Request, segment
from dsec.sdk._sync.call import Caller
from dsec.sdk._sync.lines import LineStream
from dsec.wire.public_v1 import JobItem, JobView, LeasePolicy, LeaseRequest

PATH = "/v1/jobs"
LONG_S = 600.0
_ITEM: msgspec.json.Decoder[JobItem] = msgspec.json.Decoder(JobItem)


class Jobs:
    """The jobs of your project; `client.jobs`. A sandbox is of the job in its run arguments."""

    def __init__(self, caller: Caller) -> None:
        self._caller = caller

    def list(self) -> builtins.list[JobView]:
        """Jobs with a lease, or with sandboxes that are not over."""
        request = self._caller.request("GET", PATH)
        return self._caller.call(request, builtins.list[JobView])

    def get(self, job: str) -> JobView:
        """One of them.

        Raises:
            NotFound: it has neither lease nor sandboxes.
        """
        request = self._caller.request("GET", f"{PATH}/{segment(job)}")
        return self._caller.call(request, JobView)

    def pause(self, job: str) -> builtins.list[JobItem]:
        """Pause every sandbox of a job; how each stands, or why not. Harmless twice."""
        return [item for item in self.each("pause", job)]

    def resume(self, job: str) -> builtins.list[JobItem]:
        """Resume every sandbox of a job; how each stands, or why not. Harmless twice."""
        return [item for item in self.each("resume", job)]

    def reap(self, job: str) -> builtins.list[JobItem]:
        """Stop every sandbox of a job; how each stands, or why not. Harmless twice."""
        return [item for item in self.each("reap", job)]

    def each(self, act: str, job: str) -> LineStream[JobItem]:
        """Like `pause`, `resume` and `reap` (`act`), each sandbox as it is done."""
        path = f"{PATH}/{segment(job)}/{segment(act)}"

        def request() -> Request:
            return self._caller.request("POST", path, patience_s=LONG_S)

        return LineStream(self._caller, request, _ITEM, _told_by)

    def lease(
        self,
        job: str,
        *,
        epoch: int = 0,
        ttl_s: float = 300.0,
        on_lapse: LeasePolicy = "pause",
        on_superseded: LeasePolicy = "reap",
    ) -> JobView:
        """Take a job's lease, or renew it.

        Args:
            job: its name.
            epoch: 0: take the next one, superseding whoever holds it; else the one to renew.
            ttl_s: seconds until it lapses, unless renewed.
            on_lapse: what becomes of the job's sandboxes then: "pause" or "reap".
            on_superseded: what becomes of those of older epochs.

        Raises:
            Conflict: the epoch is superseded; `details` say by which.
        """
        body = LeaseRequest(
            epoch=epoch,
            ttl_s=float(ttl_s),
            on_lapse=on_lapse,
            on_superseded=on_superseded,
        )
        request = self._caller.request(
            "PUT", f"{PATH}/{segment(job)}/lease", body=body, key=self._caller.new_key()
        )
        return self._caller.call(request, JobView)

    def release(self, job: str, epoch: int) -> None:
        """Give a lease back: nothing lapses, the sandboxes stay as they are. Harmless twice.

        Raises:
            Conflict: the epoch is superseded.
        """
        path = f"{PATH}/{segment(job)}/lease"
        self._caller.do(self._caller.request("DELETE", path, {"epoch": epoch}))


def _told_by(item: JobItem) -> str:
    """A node that does not answer is an item without a sandbox; there may be several."""
    return item.id or (item.error.message if item.error else "")
