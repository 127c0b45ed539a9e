"""How long a store may take, and how often it is asked again."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreOptions:
    """Bounds on every call to a store."""

    timeout_s: float = 10.0
    """Of one attempt, from the first byte sent to the last received."""
    connect_timeout_s: float = 3.0
    """Of connecting, within the attempt."""
    attempts: int = 3
    """Of one request over HTTP; directories are asked once."""
    pause_s: float = 0.1
    """Before the second attempt; it doubles with each."""
    upload_timeout_s: float = 60.0
    """Of one part of an upload; an upload goes on for as long as its parts succeed."""
    part_bytes: int = 8 << 20
    """Sent at once; S3 wants at least 5 MiB."""
    connections: int = 64
    """Held open to one store over HTTP."""

    @property
    def longest_s(self) -> float:
        """When a call that is no upload has certainly ended."""
        return self.timeout_s * self.attempts + self.pause_s * ((1 << self.attempts - 1) - 1)

    @property
    def stalled_s(self) -> float:
        """An upload whose next part has not begun for so long has failed."""
        return self.upload_timeout_s * self.attempts + self.longest_s
