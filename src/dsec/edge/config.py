"""What an edge is told about its node."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from dsec.edge.admission import AdmissionLimits
from dsec.edge.network.services import Services
from dsec.edge.privileges import Privileges
from dsec.edge.uid_runs import FIRST
from dsec.images.store.interface import BlobStore

MAX_SOCKET_PATH = 107
"""sun_path holds 108 bytes with its NUL."""


@dataclass(frozen=True, kw_only=True)
class EdgeConfig:
    """One node's edge."""

    node: str
    state: Path
    """Journals and the sandboxes' writable layers; on one file system, private to root."""
    run: Path
    """Sockets; a short path, since a socket's may have 107 bytes."""
    limits: AdmissionLimits = field(default_factory=AdmissionLimits)
    first_uid: int = FIRST
    version: str = ""
    """Of the program, for `describe`."""
    store: BlobStore | None = None
    """Shared with other nodes; trajectories of ended sandboxes go there."""
    services: Services = field(default_factory=lambda: Services.of({}))
    """What network rules may name here."""
    privileges: Privileges = field(default_factory=Privileges)
    """What sandboxes may have beyond what is everybody's."""
