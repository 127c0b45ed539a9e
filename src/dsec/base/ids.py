"""Ids as distinct types. A sandbox's id encodes its node, so that no table maps one to the other.

Lower-case letters and digits only: an id is also a DNS label, a cgroup and a directory name.
"""

from __future__ import annotations

import hashlib
import re
import secrets
from typing import NewType

from dsec.base.errors import InvalidRequest, NotFound

NodeId = NewType("NodeId", str)
SandboxId = NewType("SandboxId", str)
CommandId = NewType("CommandId", str)
SessionId = NewType("SessionId", str)
ProjectId = NewType("ProjectId", str)
PrincipalId = NewType("PrincipalId", str)

_ALPHABET = "0123456789abcdefghjkmnpqrstvwxyz"  # Crockford's base 32: nothing looks alike
_NODE = re.compile(r"[0-9a-hjkmnp-tv-z]{4}")
_SANDBOX = re.compile(r"sbx([0-9a-hjkmnp-tv-z]{4})[0-9a-hjkmnp-tv-z]{16}")
_CALLER_CHOSEN = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.:-]{0,63}")


def _random(length: int) -> str:
    return "".join(secrets.choice(_ALPHABET) for _ in range(length))


def node_id(text: str) -> NodeId:
    """Check a node id: four characters of the id alphabet.

    Raises:
        InvalidRequest: it is not one.
    """
    if not _NODE.fullmatch(text):
        raise InvalidRequest(f"node id {text!r} is not four characters of {_ALPHABET}")
    return NodeId(text)


def mint_sandbox_id(node: NodeId) -> SandboxId:
    """Make a new sandbox id on a node: `sbx`, the node, 80 random bits."""
    return SandboxId(f"sbx{node}{_random(16)}")


def derive_sandbox_id(node: NodeId, *of: str) -> SandboxId:
    """The sandbox id on a node that stands for some texts: always the same for the same ones."""
    digest = hashlib.sha256("\0".join(of).encode()).digest()
    return SandboxId(f"sbx{node}{''.join(_ALPHABET[byte % 32] for byte in digest[:16])}")


def child_id(parent: SandboxId, key: str, index: int) -> SandboxId:
    """The id of a child of a fork under a key: it lives on its parent's node."""
    return derive_sandbox_id(node_of(parent), parent, key, str(index))


def sandbox_id(text: str) -> SandboxId:
    """Check a sandbox id.

    Raises:
        NotFound: it cannot name any sandbox.
    """
    if not _SANDBOX.fullmatch(text):
        raise NotFound(f"no sandbox {text[:64]!r}: not a sandbox id", kind="sandbox")
    return SandboxId(text)


def node_of(sandbox: SandboxId) -> NodeId:
    """The node a sandbox lives on, read from its id."""
    return NodeId(sandbox[3:7])


def mint_command_id() -> CommandId:
    """Make a command id for a caller that gave none."""
    return CommandId(f"cmd{_random(16)}")


def command_id(text: str) -> CommandId:
    """Check a caller's command id, which is also its idempotency key.

    Raises:
        InvalidRequest: not 1 to 64 of letters, digits and `_.:-`, beginning with one of the first.
    """
    if not _CALLER_CHOSEN.fullmatch(text):
        raise InvalidRequest(
            f"command id {text[:80]!r} must be 1 to 64 letters, digits or any of _ . : -"
        )
    return CommandId(text)


MAX_KEY_LENGTH = 200


def idempotency_key(text: str) -> str:
    """Check a caller's idempotency key.

    Raises:
        InvalidRequest: it is empty, or over 200 characters.
    """
    if not text:
        raise InvalidRequest("the idempotency key is empty: give one, or leave it out")
    if len(text) > MAX_KEY_LENGTH:
        raise InvalidRequest(f"the idempotency key is over {MAX_KEY_LENGTH} characters")
    return text


def mint_session_id() -> SessionId:
    """Make a session id for a caller that gave none."""
    return SessionId(f"ses{_random(12)}")


def session_id(text: str) -> SessionId:
    """Check a caller's session id; same rule as `command_id`.

    Raises:
        InvalidRequest: it breaks the rule.
    """
    if not _CALLER_CHOSEN.fullmatch(text):
        raise InvalidRequest(
            f"session id {text[:80]!r} must be 1 to 64 letters, digits or any of _ . : -"
        )
    return SessionId(text)
