"""Who may make sandboxes that have more than others."""

from __future__ import annotations

from dsec.control.access import Caller
from dsec.iam.permissions import Permission
from dsec.wire.sandbox import Security


def require_security(caller: Caller, asked: Security) -> None:
    """Allow a sandbox to be made with it, or raise; whether its node does too is the node's.

    Raises:
        PermissionDenied: it asks for more than the caller may give.
    """
    if asked.widened:
        caller.require_everywhere(Permission.SANDBOX_PRIVILEGE)
