"""API keys: what one looks like and the only form in which it is stored."""

from __future__ import annotations

import hashlib
import re
import secrets

from dsec.base.errors import Unauthenticated

_KEY = re.compile(r"(?:dsec|e2b)_[0-9a-f]{40}", re.ASCII)


def mint_key() -> str:
    """Make a key: `dsec_` and 160 random bits in hexadecimal."""
    return f"dsec_{secrets.token_hex(20)}"


def well_formed(key: str) -> bool:
    """Whether a text has the form of a key; `e2b_` is what E2B's own clients insist on."""
    return _KEY.fullmatch(key) is not None


def digest_of(key: str) -> bytes:
    """SHA-256 of a key.

    Keys are 160 random bits, so a plain digest cannot be searched, and looking one up by digest
    gives a guesser no timing to learn from.

    Raises:
        Unauthenticated: it is no key at all.
    """
    if not well_formed(key):
        raise Unauthenticated("the API key is not valid")
    return hashlib.sha256(key.encode()).digest()
