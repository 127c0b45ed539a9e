"""The client: where sandboxes, nodes and images are asked for."""

from __future__ import annotations

import builtins
from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import TracebackType
from typing import Self

import msgspec
from typing_extensions import override

from dsec.base.errors import Unsupported
from dsec.sdk._async.branch import START_S, Branch, branch
from dsec.sdk._async.call import Caller
from dsec.sdk._async.environments import Environments
from dsec.sdk._async.images import Images
from dsec.sdk._async.jobs import Jobs
from dsec.sdk._async.layers import Layers
from dsec.sdk._async.replay import Replay, made
from dsec.sdk._async.sandbox import Batch, Sandbox
from dsec.sdk._async.snapshots import Snapshots
from dsec.sdk._async.state import Trajectory
from dsec.sdk._async.store import SharedStore
from dsec.sdk._async.transport import Transport, network
from dsec.sdk._config import find_credentials
from dsec.sdk._http import parse_address, segment
from dsec.sdk._ids import given_key
from dsec.sdk.models import DSecContainerRunArgs, sandbox_spec
from dsec.sdk.replaying import first_spec
from dsec.wire.public_v1 import CreateBatch, NodeView, SandboxList, Version
from dsec.wire.sandbox import SandboxView

API = "v1"
CREATE_TIMEOUT_S = START_S
UNREACHABLE_S = 60.0
OPEN_UNREACHABLE_S = 5.0
PAGE = 500


class DSecClient:
    """A connection to the platform.

    Args:
        api_url: else DSEC_API_URL, else what `dsec up` wrote down, else http://127.0.0.1:7420.
        api_key: else DSEC_API_KEY, else what `dsec up` wrote down for that address.
        unreachable_s: how long a call goes on trying while nothing answers.
        transport: another way to the API than a network; for tests.
    """

    def __init__(
        self,
        api_url: str | None = None,
        api_key: str | None = None,
        *,
        unreachable_s: float = UNREACHABLE_S,
        transport: Transport | None = None,
    ) -> None:
        self._credentials = find_credentials(api_url, api_key)
        address = parse_address(self._credentials.api_url)
        self._transport = transport or network(address)
        self._unreachable_s = unreachable_s
        self._caller = Caller(
            self._transport, self._credentials.api_key, str(address), unreachable_s
        )
        self.images = Images(self._caller)
        self.layers = Layers(self._caller)
        self.environments = Environments(self._caller)
        self.store = SharedStore(self._caller)
        self.snapshots = Snapshots(self._caller)
        self.jobs = Jobs(self._caller)

    @override
    def __repr__(self) -> str:
        return f"<DSecClient {self._credentials.api_url}>"

    @property
    def api_url(self) -> str:
        """Where the API is."""
        return self._credentials.api_url

    async def open(self, *, unreachable_s: float = OPEN_UNREACHABLE_S) -> Self:
        """See that the platform is there and speaks our version of the API.

        Args:
            unreachable_s: how long to go on trying while nothing answers.

        Raises:
            Unavailable: nothing answers there.
            Unsupported: it speaks another version; or this is not asyncio.
        """
        try:
            await self._greet(unreachable_s)
        except BaseException:
            await self.close()  # nobody leaves an `async with` that was not entered
            raise
        return self

    async def _greet(self, unreachable_s: float) -> None:
        version = await self.version(unreachable_s=unreachable_s)
        if version.api != API:
            raise Unsupported(
                f"{self.api_url} speaks API {version.api}, this SDK speaks {API}",
                server_version=version.version,
            )

    async def version(self, *, unreachable_s: float = OPEN_UNREACHABLE_S) -> Version:
        """The server's version; needs no key."""
        patience = self._caller.patience(unreachable_s=min(unreachable_s, self._unreachable_s))
        return await self._caller.call(
            self._caller.request("GET", "/v1/version"), Version, patience
        )

    async def close(self) -> None:
        """Close every connection. Sandboxes go on."""
        await self._caller.aclose()

    async def __aenter__(self) -> Self:
        return await self.open()

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        exc: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.close()

    async def run_container(
        self,
        args: DSecContainerRunArgs,
        timeout: float = CREATE_TIMEOUT_S,
        *,
        idempotency_key: str | None = None,
    ) -> Sandbox:
        """Start a sandbox; returns when it takes commands.

        Args:
            args: what it is to be.
            timeout: seconds; waiting for room on a full platform counts.
            idempotency_key: a repeated call with the same key gets the same sandbox.

        Raises:
            InvalidRequest: a value of `args` is wrong.
            NotFound: no such image.
            CapacityUnavailable: no node could take it in time; nothing was started.
            StartFailed: it never ran; `details` say why.
            DeadlineExceeded: not within `timeout`; if it does start, nobody will use it, and it
                stops by its idle time.
        """
        # Capacity and quota may free up until the deadline; unreachable is unreachable.
        patience = self._caller.patience(timeout, max(timeout, self._unreachable_s))
        request = self._caller.request(
            "POST",
            "/v1/sandboxes",
            body=sandbox_spec(args),
            key=given_key(idempotency_key),
        )
        view = await self._caller.call(request, SandboxView, patience)
        return Sandbox(self._caller, view)

    def run_containers(
        self,
        args: DSecContainerRunArgs,
        count: int,
        timeout: float = 600.0,
        *,
        idempotency_key: str | None = None,
    ) -> Batch:
        """Start many alike. Iterate over the answer: each as it is ready, or why it is not.

        Args:
            args: what each is to be.
            count: how many, up to 10,000.
            timeout: seconds for all of them.
            idempotency_key: a repeated call with the same key gets the same sandboxes.
        """
        request = self._caller.request(
            "POST",
            "/v1/sandboxes:batch",
            body=CreateBatch(spec=sandbox_spec(args), count=count),
            key=given_key(idempotency_key),
        )
        return Batch(self._caller, request, count, self._caller.patience(timeout))

    async def restore(
        self,
        name: str,
        args: DSecContainerRunArgs | None = None,
        timeout: float = CREATE_TIMEOUT_S,
        *,
        idempotency_key: str | None = None,
    ) -> Sandbox:
        """Start a sandbox that begins with the files of a snapshot of your project.

        Args:
            name: of the snapshot.
            args: what it is to be; its image is the snapshot's, whatever it says. None: the usual.
            timeout: seconds, as for `run_container`.
            idempotency_key: as for `run_container`.

        Raises:
            NotFound: there is no such snapshot.
            PermissionDenied: it was packed with residue, by somebody else.
        """
        image = (await self.snapshots.get(name)).image
        wanted = args or DSecContainerRunArgs(container_image=image)
        return await self.run_container(
            replace(wanted, container_image=image), timeout, idempotency_key=idempotency_key
        )

    async def get(self, sandbox_id: str) -> Sandbox:
        """A handle on a sandbox.

        Raises:
            NotFound: there is none of that id, or it is somebody else's.
        """
        request = self._caller.request("GET", f"/v1/sandboxes/{segment(sandbox_id)}")
        return Sandbox(self._caller, await self._caller.call(request, SandboxView))

    def trajectory(
        self,
        sandbox_id: str,
        since: int = 1,
        until: int | None = None,
        ops: Sequence[str] = (),
    ) -> Trajectory:
        """What has happened in a sandbox, to iterate over; see `Sandbox.trajectory`.

        For one that is over and forgotten by all but its record.
        """
        path = f"/v1/sandboxes/{segment(sandbox_id)}/trajectory"
        return Trajectory(self._caller, path, since, until, ops)

    async def list(
        self,
        labels: Mapping[str, str] | None = None,
        states: Sequence[str] | None = None,
        limit: int | None = None,
        job: str | None = None,
    ) -> builtins.list[SandboxView]:
        """Your sandboxes, newest first.

        Args:
            labels: only those with all of these.
            states: only those in one of these, e.g. ["running"].
            limit: no more than these many; None: all.
            job: only those of this job.
        """
        found: builtins.list[SandboxView] = []
        after = ""
        while limit is None or len(found) < limit:
            page = await self._caller.call(
                self._caller.request(
                    "GET",
                    "/v1/sandboxes",
                    {
                        "label": [f"{key}={value}" for key, value in (labels or {}).items()],
                        "job": job or None,
                        "state": [str(state) for state in states or []],
                        "limit": PAGE if limit is None else min(PAGE, limit - len(found)),
                        "next": after or None,
                    },
                ),
                SandboxList,
            )
            found += page.sandboxes
            after = page.next
            if not after:
                break
        return found

    async def replay(
        self,
        sandbox_id: str,
        *,
        image: str | None = None,
        snapshot: str | None = None,
        until: int | None = None,
        timeout: float = CREATE_TIMEOUT_S,
    ) -> Replay[Sandbox]:
        """Do again, in a fresh sandbox, what was recorded of another one, which may be over.

        Iterate over the answer to do the steps, then `compare()`. Commands and changes of files are
        done again, one after the other; what is not says why.

        Args:
            sandbox_id: whose trajectory.
            image: begin with this image instead of the recorded one.
            snapshot: begin with this snapshot; of one of the same sandbox, with what came after it.
            until: `seq` of the last entry to do again; None: all.
            timeout: seconds for the fresh sandbox to start.

        Raises:
            NotFound: nothing is known of the sandbox, or how it was made.
        """
        entries = [entry async for entry in self.trajectory(sandbox_id, until=until)]
        spec = first_spec(entries)
        if snapshot is not None:
            packed = await self.snapshots.get(snapshot)
            image = packed.image
            if packed.sandbox == sandbox_id:
                entries = [entry for entry in entries if entry.seq > packed.step]
        if image is not None:
            spec = msgspec.structs.replace(spec, image=image)
        if snapshot is not None:  # its workspace and toolkits are in it
            spec = msgspec.structs.replace(spec, workspace=None, toolkits=[])
        return Replay(Sandbox, self._caller, await made(self._caller, spec, timeout), entries)

    async def branch(
        self,
        sandbox_id: str,
        step: int,
        *,
        labels: Mapping[str, str] | None = None,
        strict: bool = True,
        timeout: float = CREATE_TIMEOUT_S,
    ) -> Branch[Sandbox]:
        """A new sandbox as another one, which may be over, was after a step of its trajectory.

        It begins with the nearest snapshot of that sandbox (or of one it was forked from) at or
        before the step that you may restore, else as that sandbox began; what was recorded from
        there to the step is done again under the same ids, as by `replay`. Processes that went on
        at that step are not in it, nor is residue if the snapshot is without (`Branch.cleaned`). Its own trajectory: the entries up to the snapshot are inherited
        if you packed it and the new sandbox is on that node; then come its creation and the steps
        that were done again, as its own.

        Args:
            sandbox_id: whose trajectory.
            step: `seq` of the last entry to be in it.
            labels: instead of the sandbox's.
            strict: where outcome or output are not as recorded, or a step cannot be done again, stop
                the new sandbox and raise. False: keep it; `Branch.divergences` say what is different.
            timeout: seconds for the new sandbox to start.

        Raises:
            NotFound: nothing is known of the sandbox, or how it was made.
            InvalidRequest: it has no such step.
            Conflict: it diverged; nothing of it is left.
        """
        return await branch(
            Sandbox,
            self._caller,
            sandbox_id,
            step,
            labels=labels,
            strict=strict,
            timeout=timeout,
        )

    async def nodes(self) -> builtins.list[NodeView]:
        """The nodes: what each can do and how full it is."""
        return await self._caller.call(
            self._caller.request("GET", "/v1/nodes"), builtins.list[NodeView]
        )
