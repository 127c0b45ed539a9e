"""The keeper's files, for edge, keeper and worker."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Places:
    """The keeper's files."""

    home: Path
    """`<run>/filler`."""

    @property
    def lock(self) -> Path:
        """Held by the keeper; says who it is."""
        return self.home / "lock"

    @property
    def log(self) -> Path:
        """Output of keeper and worker."""
        return self.home / "log"

    @property
    def data(self) -> Path:
        """Where devices are shown by FUSE."""
        return self.home / "data"

    @property
    def config(self) -> Path:
        """What the edge wants the filler to be."""
        return self.home / "config.json"

    @property
    def anchor(self) -> Path:
        """Where the anchor of a fanotify group listens for the next keeper."""
        return self.home / "anchor"
