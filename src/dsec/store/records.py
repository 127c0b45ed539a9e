"""What the store hands out that no room below it has a word for."""

from __future__ import annotations

from dataclasses import dataclass

from dsec.base.ids import SandboxId


@dataclass(frozen=True, slots=True)
class Claim:
    """An idempotency key and the sandbox it stands for.

    `digest` is of the request first sent under the key. Once `settled`, the key stands for this
    sandbox for good; before that it may be moved to another node, under another id.
    """

    sandbox: SandboxId
    digest: bytes
    settled: bool = False
