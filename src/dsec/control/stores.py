"""What the control plane keeps, whoever keeps it."""

from __future__ import annotations

from dataclasses import dataclass

from dsec.control.claims import Claims
from dsec.control.leases import LeaseBook
from dsec.iam.directory import Directory


@dataclass(frozen=True, slots=True)
class Stores:
    """All of it."""

    directory: Directory
    """Principals, projects, keys."""
    claims: Claims
    """Idempotency keys."""
    book: LeaseBook
    """Leases of jobs."""
