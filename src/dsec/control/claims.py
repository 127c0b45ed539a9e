"""What creation asks of the store: which sandbox an idempotency key stands for."""

from __future__ import annotations

from typing import Protocol

from dsec.base.ids import ProjectId, SandboxId
from dsec.store.records import Claim


class Claims(Protocol):
    """Idempotency keys by project."""

    @property
    def shared(self) -> bool:
        """Whether other processes use them too, so that a claim may be moved behind our back."""
        ...

    async def find(self, project: ProjectId, key: str) -> Claim | None:
        """The claim under a key."""
        ...

    async def claim(self, project: ProjectId, key: str, wanted: Claim) -> Claim:
        """Claim a key; the claim that holds is the answer, be it an earlier one."""
        ...

    async def move(
        self, project: ProjectId, key: str, refused: SandboxId, to: SandboxId
    ) -> Claim | None:
        """Point a key that is not settled from a refused id to another; the claim that holds."""
        ...

    async def settle(self, project: ProjectId, key: str, sandbox: SandboxId) -> bool:
        """Fix a key to its sandbox for good; False if it was moved elsewhere meanwhile."""
        ...

    async def forget_before(self, moment: float) -> int:
        """Drop claims older than a moment, in seconds since the epoch; how many."""
        ...
