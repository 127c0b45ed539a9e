"""Failures of the simulated aether, in the words of spec/frames.md."""

from __future__ import annotations

import errno as numbers
import os


class AetherError(Exception):
    """What becomes an ERROR frame."""

    def __init__(
        self, code: str, message: str, *, path: bytes = b"", errno: int = 0, kind: str = ""
    ) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.path = path
        self.errno = errno
        self.kind = kind

    def as_map(self) -> dict[str, object]:
        """The payload of the frame."""
        body: dict[str, object] = {"code": self.code, "message": self.message}
        if self.path:
            body["path"] = self.path
        if self.errno:
            body["errno"] = self.errno
        if self.kind:
            body["kind"] = self.kind
        return body


_CODES = {
    numbers.ENOENT: "not_found",
    numbers.EACCES: "permission_denied",
    numbers.EPERM: "permission_denied",
    numbers.EEXIST: "conflict",
    numbers.ENOTEMPTY: "conflict",
    numbers.ENOSPC: "storage_full",
}
"""Every other errno is the request's fault: `invalid_request`."""


def file_error(errno: int, path: bytes) -> AetherError:
    """A failed file operation."""
    code = _CODES.get(errno, "invalid_request")
    name = os.fsdecode(path)
    return AetherError(
        code,
        f"{name}: {os.strerror(errno)}",
        path=path,
        errno=errno,
        kind="path" if code == "not_found" else "",
    )


def invalid(message: str) -> AetherError:
    """A wrong value in a request."""
    return AetherError("invalid_request", message)


def not_found(kind: str, message: str) -> AetherError:
    """Something named does not exist."""
    return AetherError("not_found", message, kind=kind)
