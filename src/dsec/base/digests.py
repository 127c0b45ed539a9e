"""Digests of content: `sha256:` and 64 lower-case hex digits."""

from __future__ import annotations

import hashlib
import re

from dsec.base.errors import InvalidRequest

PATTERN = r"sha256:[0-9a-f]{64}"
_PREFIX = "sha256:"
_DIGEST = re.compile(PATTERN)


def digest_of(content: bytes) -> str:
    """The digest of some bytes."""
    return _PREFIX + hashlib.sha256(content).hexdigest()


def check_digest(text: str) -> str:
    """Refuse what is no digest; one that is may become a file's name.

    Raises:
        InvalidRequest: it is something else.
    """
    if not _DIGEST.fullmatch(text):
        raise InvalidRequest(f"{text[:100]!r} is not a digest: sha256: and 64 hex digits")
    return text


def hex_of(digest: str) -> str:
    """The 64 digits of a digest.

    Raises:
        InvalidRequest: it is none.
    """
    return check_digest(digest).removeprefix(_PREFIX)
