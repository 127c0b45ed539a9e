"""What was denied: like ones counted together, told in small portions, never more than bounded.

One task tells, and only when there is something to tell: nothing is polled.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import anyio

from dsec.base.clock import Clock
from dsec.edge.network.warden.messages import Denied
from dsec.edge.network.warden.settings import Limits
from dsec.wire.sandbox import DenialReason, DeniedTraffic

MAX_NAME_CHARS = 255
_MAX_SANDBOXES = 8192
_Kind = tuple[DenialReason, str, str, int, str]


class Denials:
    """Collects for all sandboxes."""

    def __init__(self, limits: Limits, clock: Clock) -> None:
        """Begin with nothing to tell."""
        self._limits = limits
        self._clock = clock
        self._kinds: dict[tuple[str, str], dict[_Kind, DeniedTraffic]] = {}
        self._some = anyio.Event()

    def note(
        self,
        sandbox: tuple[str, str],
        reason: DenialReason,
        *,
        protocol: str = "dns",
        address: str = "",
        port: int = 0,
        name: str = "",
    ) -> None:
        """Count a denial.

        Args:
            sandbox: its id and IPv4 address.
            reason: why.
            protocol: `dns` or `tcp`.
            address: what it wanted to reach.
            port: likewise.
            name: likewise; from the sandbox, so any text.
        """
        if len(self._kinds) >= _MAX_SANDBOXES and sandbox not in self._kinds:
            return
        kinds = self._kinds.setdefault(sandbox, {})
        kind: _Kind = (reason, protocol, address, port, name[:MAX_NAME_CHARS])
        if kind not in kinds and len(kinds) >= self._limits.denials_kinds:
            kind = (reason, protocol, "", 0, "")
        self._count(kinds, kind)
        self._some.set()

    def _count(self, kinds: dict[_Kind, DeniedTraffic], kind: _Kind) -> None:
        now = self._clock.now()
        if (event := kinds.get(kind)) is not None:
            event.count += 1
            event.last_at = now
            return
        reason, protocol, address, port, name = kind
        kinds[kind] = DeniedTraffic(
            reason=reason,
            first_at=now,
            last_at=now,
            protocol=protocol,
            address=address,
            port=port,
            name=name,
        )

    def take(self) -> list[Denied]:
        """All there is to tell; nothing is left."""
        taken, self._kinds = self._kinds, {}
        self._some = anyio.Event()
        return [
            Denied(sandbox=sandbox, address4=address4, events=list(kinds.values()))
            for (sandbox, address4), kinds in taken.items()
        ]

    async def tell(self, send: Callable[[Denied], Awaitable[None]]) -> None:
        """Tell what there is, for ever; waits between two tellings, and while there is nothing."""
        while True:
            await self._some.wait()
            for message in self.take():
                await send(message)
            await anyio.sleep(self._limits.denials_every_s)
