"""What a node's operator lets sandboxes have beyond what is everybody's. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from dsec.base.errors import Unsupported
from dsec.wire.sandbox import Security


@dataclass(frozen=True, kw_only=True)
class Privileges:
    """Nothing, unless the operator says so."""

    loose: bool = False
    """The profile of that name."""
    syscalls: frozenset[str] = frozenset()
    """Calls that may be allowed by name."""

    def check(self, asked: Security) -> None:
        """Take it, or refuse.

        Raises:
            Unsupported: this node does not give that; the message names the field.
        """
        if asked.profile == "loose" and not self.loose:
            raise Unsupported(
                "security.profile: this node's operator does not allow loose (allow_loose)"
            )
        if refused := sorted({*asked.allow} - self.syscalls):
            raise Unsupported(
                f"security.allow: this node's operator does not allow {', '.join(refused)} "
                "(allow_syscalls)"
            )
