"""Sandboxes: create one or many, list. What is done to one is passed through to its edge."""

from __future__ import annotations

import hashlib
import logging
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import anyio
import anyio.abc
import msgspec

from dsec.base.clock import Clock
from dsec.base.errors import (
    CapacityUnavailable,
    Conflict,
    DeadlineExceeded,
    DsecError,
    NotFound,
    SandboxGone,
    StorageFull,
    Unavailable,
    Unsupported,
)
from dsec.base.ids import NodeId, ProjectId, SandboxId, mint_sandbox_id, node_of
from dsec.control.access import Caller
from dsec.control.claims import Claims
from dsec.control.edges import Edge, Edges
from dsec.control.forgetting import forget_hourly
from dsec.control.leases import Leases, checked_key
from dsec.control.ownership import Ownership
from dsec.control.privileges import require_security
from dsec.control.snapshots import require_image
from dsec.iam.permissions import Permission
from dsec.kit.flights import Flights
from dsec.kit.http import error_body
from dsec.placement.choose import Refusal, choose
from dsec.store.records import Claim
from dsec.wire.edge_v1 import CreateOnEdge
from dsec.wire.public_v1 import BatchItem, CreateBatch
from dsec.wire.sandbox import SandboxSpec, SandboxView

logger = logging.getLogger("dsec.control")

CREATE_TIMEOUT_S = 300.0
BATCH_AT_ONCE = 32
"""Creations of one batch in flight; a batch of thousands must not starve single creations."""
CLAIMS_KEPT_S = 2 * 86400.0


@dataclass(eq=False)
class Creation:
    """One creation on its way, with what has refused it so far."""

    project: ProjectId
    spec: SandboxSpec
    key: str = ""
    """As claimed: the caller's, and what else makes it another creation."""
    digest: bytes = b""
    """Of what the caller asked for."""
    principal: str = ""
    """Who asks."""
    minted: set[SandboxId] = field(default_factory=set)
    """Ids this creation drew: nobody can have asked an edge for them before."""
    tried: set[NodeId] = field(default_factory=set)
    refusal: DsecError | None = None


class Sandboxes:
    """The use cases."""

    def __init__(
        self,
        edges: Edges,
        claims: Claims,
        ownership: Ownership,
        leases: Leases,
        clock: Clock,
        rng: random.Random | None = None,
    ) -> None:
        self._edges = edges
        self._claims = claims
        self._ownership = ownership
        self._leases = leases
        self._clock = clock
        self._rng = rng or random.Random()  # noqa: S311 - load, not secrets
        self._flights = Flights()

    async def create(self, caller: Caller, spec: SandboxSpec, key: str = "") -> SandboxView:
        """Create a sandbox and wait until it runs.

        Args:
            caller: who asks; the sandbox belongs to the caller's project.
            spec: what is wanted.
            key: the idempotency key: the same key gives the same sandbox.

        Raises:
            PermissionDenied: the caller may not create sandboxes.
            Conflict: the key was used for a different request, or the specification's epoch is not
                the one in force of its job.
            CapacityUnavailable: every node refused; nothing was started.
            NotFound, Unsupported, StartFailed, Unavailable, DeadlineExceeded: as the edge says.
        """
        caller.require(Permission.SANDBOX_CREATE, caller.project)
        require_image(caller, spec.image)
        require_security(caller, spec.security)
        key = checked_key(key)
        stamped = await self._leases.stamp(caller.project, spec)
        creation = Creation(
            caller.project,
            stamped,
            _key_of(stamped, key),
            _digest(spec),
            principal=caller.principal.id,
        )
        if not key:
            return await self._create_anew(creation)
        # Within this process one at a time; the claims hold between processes.
        async with self._flights.alone((creation.project, creation.key)):
            return await self._create_claimed(creation)

    async def check_fork(self, caller: Caller, sandbox: SandboxId) -> None:
        """Allow sandboxes to be made of one, as creating them would be.

        Raises:
            NotFound: there is none. PermissionDenied: the caller may not create sandboxes there.
            Conflict: its epoch is not the one in force of its job. Unavailable: its edge is away.
        """
        await self._ownership.require(caller, Permission.SANDBOX_CREATE, sandbox)
        view = await self._ownership.look(sandbox)
        require_security(caller, view.security)
        if view.job:
            await self._leases.epoch_in_force(ProjectId(view.project), view.job, view.epoch)

    async def _create_anew(self, creation: Creation) -> SandboxView:
        while True:
            sandbox = self._place(creation)
            try:
                return await self._create_on_edge(creation, sandbox)
            except DsecError as exc:
                self._note_refusal(creation, sandbox, exc)

    async def _create_claimed(self, creation: Creation) -> SandboxView:
        claim = await self._claim(creation)
        while True:
            try:
                view = await self._create_on_edge(creation, claim.sandbox)
            except DsecError as exc:
                if claim.settled:
                    raise
                claim = await self._move(creation, claim, exc)
                continue
            if claim.settled or await self._settle(creation, claim.sandbox):
                return view
            # Another process found this node full and moved the key: there must be one sandbox.
            await self._edges.of(claim.sandbox).api.stop(claim.sandbox)
            claim = await self._found(creation)

    async def _claim(self, creation: Creation) -> Claim:
        try:
            wanted = Claim(self._place(creation), creation.digest)
        except DsecError:
            # Nowhere to put a new one, but this may be a repeat.
            found = await self._claims.find(creation.project, creation.key)
            if found is None:
                raise
            claim = found
        else:
            claim = await self._claims.claim(creation.project, creation.key, wanted)
        if claim.digest != creation.digest:
            raise Conflict("the idempotency key was used for a different request", kind="key")
        return claim

    async def _move(self, creation: Creation, claim: Claim, exc: DsecError) -> Claim:
        if node_of(claim.sandbox) in creation.tried:
            raise exc
        self._note_refusal(creation, claim.sandbox, exc)
        other = self._place(creation)
        moved = await self._claims.move(creation.project, creation.key, claim.sandbox, other)
        return moved or await self._found(creation)

    async def _settle(self, creation: Creation, sandbox: SandboxId) -> bool:
        if not self._claims.shared:
            return True  # only we move claims, and under this key nobody else is at it
        return await self._claims.settle(creation.project, creation.key, sandbox)

    async def _found(self, creation: Creation) -> Claim:
        claim = await self._claims.find(creation.project, creation.key)
        if claim is None:
            raise Conflict("the idempotency key was forgotten while it was used", kind="key")
        return claim

    def _place(self, creation: Creation) -> SandboxId:
        """Choose a node and draw an id there."""
        choice = choose(
            self._edges.views(), creation.spec, self._edges.overlay, self._rng, creation.tried
        )
        if not isinstance(choice, Refusal):
            sandbox = mint_sandbox_id(choice)
            creation.minted.add(sandbox)
            return sandbox
        if choice.kind == "unsupported":
            raise Unsupported(f"no node has the {creation.spec.backend} backend")
        if choice.kind == "away":
            raise Unavailable(f"no node can be reached: {choice.explain()}")
        assert creation.refusal is not None  # noqa: S101 - "tried" means that one refused
        raise creation.refusal

    def _note_refusal(self, creation: Creation, sandbox: SandboxId, exc: DsecError) -> None:
        """Remember a refusal another node may not repeat; raise any other."""
        if not _nothing_started(exc, first=sandbox in creation.minted):
            raise exc
        creation.tried.add(node_of(sandbox))
        creation.refusal = exc

    async def _create_on_edge(self, creation: Creation, sandbox: SandboxId) -> SandboxView:
        if creation.refusal is not None and (job := creation.spec.job):
            # Time has passed, and others' epochs are looked for only as long as one attempt takes.
            await self._leases.epoch_in_force(creation.project, job, creation.spec.epoch)
        edge = self._edges.of(sandbox)
        self._edges.placed(node_of(sandbox))
        request = CreateOnEdge(
            id=sandbox,
            project=creation.project,
            spec=creation.spec,
            principal=creation.principal,
        )
        try:
            with anyio.fail_after(CREATE_TIMEOUT_S):
                if self._ownership.knows(sandbox):
                    return await self._made_before(edge, sandbox)
                view = await edge.api.create(request)
        except TimeoutError:
            raise DeadlineExceeded(f"creating {sandbox} took over {CREATE_TIMEOUT_S} s") from None
        self._ownership.learn(sandbox, creation.project)
        return view

    async def _made_before(self, edge: Edge, sandbox: SandboxId) -> SandboxView:
        """Answer a repeat.

        The edge may have forgotten a sandbox that is over; asked to create it by its id, it would
        make a second one of that name.
        """
        try:
            return await edge.api.get(sandbox)
        except NotFound:
            raise SandboxGone(f"{sandbox} is over, and long ago", reason="forgotten") from None

    @asynccontextmanager
    async def create_batch(
        self, caller: Caller, batch: CreateBatch, key: str = ""
    ) -> AsyncIterator[AsyncIterator[BatchItem]]:
        """Create many alike; within the context, items come as each is ready.

        Leaving the context early gives up those not ready yet.

        Raises:
            PermissionDenied: the caller may not create sandboxes.
        """
        caller.require(Permission.SANDBOX_CREATE, caller.project)
        numbers = iter(range(batch.count))
        # A slow reader holds the workers up: it cannot use more sandboxes than it reads about.
        send, receive = anyio.create_memory_object_stream[BatchItem](BATCH_AT_ONCE)

        async def worker(done: anyio.abc.ObjectSendStream[BatchItem]) -> None:
            async with done:
                for index in numbers:
                    await done.send(await self._batch_item(caller, batch.spec, index, key))

        async with anyio.create_task_group() as group, receive:
            async with send:
                for _ in range(min(BATCH_AT_ONCE, batch.count)):
                    group.start_soon(worker, send.clone())
            yield receive
            group.cancel_scope.cancel()

    async def _batch_item(
        self, caller: Caller, spec: SandboxSpec, index: int, key: str
    ) -> BatchItem:
        try:
            view = await self.create(caller, spec, f"{key}.{index}" if key else "")
        except DsecError as exc:
            return BatchItem(index=index, error=error_body(exc).error)
        return BatchItem(index=index, sandbox=view)

    async def forget_old_claims(self) -> None:
        """Drop idempotency keys nobody will repeat any more, once an hour, for ever."""
        await forget_hourly(
            "old idempotency keys", self._claims.forget_before, self._clock, CLAIMS_KEPT_S
        )


def _key_of(spec: SandboxSpec, key: str) -> str:
    """The key to claim. A new epoch begins with nothing: what an older one made under it is reaped.

    No header holds a line feed, so that no caller's key is taken for one of these.
    """
    return f"{key}\n{spec.epoch}" if key and spec.epoch else key


_DEFAULTS: dict[str, object] = msgspec.to_builtins(SandboxSpec(image="-"))


def _digest(spec: SandboxSpec) -> bytes:
    """Of what was asked for, without defaults: a newer server knows more of them."""
    said: dict[str, object] = msgspec.to_builtins(spec)
    asked = {name: value for name, value in said.items() if value != _DEFAULTS.get(name)}
    return hashlib.sha256(msgspec.json.encode(asked, order="deterministic")).digest()


def _nothing_started(exc: DsecError, *, first: bool) -> bool:
    """Whether there is surely no such sandbox, and another node may do what this one did not.

    An edge that answers knows. One that was not reached is no proof, unless this was the `first`
    time anybody asked it for that id.
    """
    match exc:
        case CapacityUnavailable() | StorageFull():
            return True
        case NotFound():
            return exc.details.get("kind") == "image"
        case Unavailable():
            return first and exc.details.get("sent") is False
        case _:
            return False
