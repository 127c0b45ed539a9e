"""What a store's refusal over HTTP means for the caller; never with a secret in it."""

from __future__ import annotations

import re

from dsec.base.errors import (
    DsecError,
    InvalidRequest,
    PermissionDenied,
    StorageFull,
    Unavailable,
)

_FULL = re.compile(
    r"quota ?exceeded|exceed\w* .{0,40}quota|no space left|insufficient ?storage|storage ?full"
    r"|disk (is )?full|status code: 507",
    re.IGNORECASE,
)
_QUERY = re.compile(r"\?\S+")
_TOLD_CHARACTERS = 300
_TOO_MANY = 429


def is_full(said: str) -> bool:
    """Whether a server's words mean that it has no room."""
    return bool(_FULL.search(said))


def told(said: str) -> str:
    """A server's (or library's) words for a message: one line, short, without query strings.

    Signed URLs carry their signature in the query.
    """
    return _QUERY.sub("?...", " ".join(said.split("Debug source")[0].split()))[:_TOLD_CHARACTERS]


def refused(status: int, what: str, said: str) -> DsecError:
    """The error for an HTTP status that is not what was hoped for.

    Args:
        status: 400 and up, or one that makes no sense here.
        what: was asked of whom.
        said: the answer's body, or its start.
    """
    message = f"{what}: HTTP {status} {told(said)}".rstrip()
    if status == 507 or (status != _TOO_MANY and is_full(said)):
        return StorageFull(message)
    match status:
        case 401 | 403:
            return PermissionDenied(message)
        case 400 | 413:
            return InvalidRequest(message)
        case _:
            return Unavailable(message)
