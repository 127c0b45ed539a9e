"""Everything a principal may be allowed to do, as `scope:action`."""

from __future__ import annotations

import enum


class Permission(enum.StrEnum):
    """A right; it holds in the project it was granted in and in all projects below."""

    SANDBOX_CREATE = "sandbox:create"
    SANDBOX_READ = "sandbox:read"
    """See that it exists, its state, usage and processes; not what is inside."""
    SANDBOX_OPERATE = "sandbox:operate"
    """Commands, sessions, files, ports."""
    SANDBOX_STOP = "sandbox:stop"
    SANDBOX_PRIVILEGE = "sandbox:privilege"
    """Make sandboxes that may use more of the kernel than others: `loose`, and calls allowed by name.
    The host is shared by all projects, so it counts in the root alone."""
    IMAGE_READ = "image:read"
    IMAGE_WRITE = "image:write"
    """Sandboxes of all projects start from the same images, so it counts in the root alone."""
    NODE_READ = "node:read"


OWNER = frozenset(Permission)
READER = frozenset({Permission.SANDBOX_READ, Permission.IMAGE_READ, Permission.NODE_READ})
