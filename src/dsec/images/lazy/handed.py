"""What a keeper gives its worker, and the worker finds in its environment."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Self

from dsec.base.errors import InternalError

VARIABLE = "DSEC_FILLER_FDS"


@dataclass(frozen=True, slots=True)
class Handed:
    """What a worker inherits."""

    kernel: int
    """The FUSE connection, mounted and greeted, or the fanotify group."""
    generation: int
    """How many workers had it before."""
    parent: int
    """The keeper."""
    pulse: int | None = None
    """Where to beat (`pulse.py`); a keeper that was started by an earlier version listens nowhere."""

    def encode(self) -> str:
        """As the environment has it."""
        text = f"kernel={self.kernel},generation={self.generation},parent={self.parent}"
        return text if self.pulse is None else f"{text},pulse={self.pulse}"

    @classmethod
    def decode(cls, environ: Mapping[str, str]) -> Self:
        """Read it.

        Raises:
            InternalError: the keeper has not started this process.
        """
        pairs = dict(part.partition("=")[::2] for part in environ.get(VARIABLE, "").split(","))
        try:
            kernel, generation, parent = (int(pairs[k]) for k in ("kernel", "generation", "parent"))
            pulse = int(pairs["pulse"]) if "pulse" in pairs else None
        except (KeyError, ValueError) as error:
            raise InternalError(f"{VARIABLE} is not what a keeper gives its worker") from error
        return cls(kernel, generation, parent, pulse)
