"""Ids of operations: what makes sending one twice harmless."""

from __future__ import annotations

import secrets

from typing_extensions import override

from dsec.base.ids import command_id, idempotency_key, mint_command_id, mint_session_id

DIGITS = 6


def given_key(key: str | None) -> str:
    """A caller's idempotency key; a new one if that is None.

    Raises:
        InvalidRequest: it is empty, or too long.
    """
    return secrets.token_hex(16) if key is None else idempotency_key(key)


class Ids:
    """Ids nobody has used before."""

    chosen = False
    """Whether the caller knows them beforehand, and so can come back for what they stand for."""

    def command(self) -> str:
        """For a command."""
        return mint_command_id()

    def session(self) -> str:
        """For a session."""
        return mint_session_id()

    def key(self) -> str:
        """For anything else: its `Idempotency-Key`."""
        return secrets.token_hex(16)


class Numbered(Ids):
    """`step-000001`, `step-000002`, ...: the same program gives the same operations the same ids."""

    chosen = True

    def __init__(self, prefix: str, first: int = 1) -> None:
        """Number from `first` on.

        Raises:
            InvalidRequest: `prefix` cannot begin an id.
        """
        self._prefix = prefix
        self._next = first
        command_id(self._name(first))

    def _name(self, number: int) -> str:
        return f"{self._prefix}-{number:0{DIGITS}d}"

    @property
    def next(self) -> int:
        """The number the next operation gets."""
        return self._next

    @override
    def command(self) -> str:
        """For a command."""
        return self.key()

    @override
    def session(self) -> str:
        """For a session: that of the operation that opens it, which comes next."""
        return self._name(self._next)

    @override
    def key(self) -> str:
        """For anything else."""
        self._next += 1
        return self._name(self._next - 1)


class Given(Ids):
    """The id that was set, once; without one, a new one."""

    chosen = True

    def __init__(self) -> None:
        self.next = ""

    @override
    def key(self) -> str:
        """For anything but commands and sessions."""
        given, self.next = self.next, ""
        return given or super().key()
