"""An edge that is killed at some write of its journal."""

from __future__ import annotations


class Killed(BaseException):
    """The edge dies here."""


class Death:
    """Kills the edge after so many more writes of its journal."""

    def __init__(self) -> None:
        self.left = -1

    def __call__(self, _number: int) -> None:
        self.left -= 1
        if self.left == 0:
            raise Killed
