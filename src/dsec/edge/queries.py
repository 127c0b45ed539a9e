"""Query strings of the operations on a sandbox, and how they become aether's arguments."""

from __future__ import annotations

import signal as signals
from typing import Annotated, Any

from msgspec import UNSET, Meta, Struct, UnsetType

from dsec.base.errors import InvalidRequest
from dsec.kit.http import path_bytes

Mode = Annotated[str, Meta(pattern=r"^0?[0-7]{1,4}$")]
Size = Annotated[int, Meta(ge=0, le=1 << 62)]
User = Annotated[str, Meta(min_length=1, max_length=256)]
Digest = Annotated[str, Meta(pattern=r"^[0-9a-fA-F]{64}$")]


class Query(Struct, kw_only=True, forbid_unknown_fields=True):
    """What all have in common."""

    def arguments(self) -> dict[str, Any]:
        """What was given, as aether wants it: paths as bytes, modes as numbers."""
        given = {name: getattr(self, name) for name in self.__struct_fields__}
        args = {name: value for name, value in given.items() if value is not UNSET}
        for name in ("path", "to"):
            if name in args:
                args[name] = path_bytes(args[name])
        if "mode" in args:
            args["mode"] = int(args["mode"], 8)
        return args


class OnPath(Query, kw_only=True):
    """One path, as one user."""

    path: str
    user: User | UnsetType = UNSET


class ReadQuery(OnPath, kw_only=True):
    """Which part of a file."""

    offset: Size | UnsetType = UNSET
    length: Size | UnsetType = UNSET


class WriteQuery(OnPath, kw_only=True):
    """How to write a file. `mode` is octal."""

    mode: Mode | UnsetType = UNSET
    atomic: bool | UnsetType = UNSET
    parents: bool | UnsetType = UNSET
    sha256: Digest | UnsetType = UNSET
    append: bool | UnsetType = UNSET


class RecursiveQuery(OnPath, kw_only=True):
    """A path, or all below it."""

    recursive: bool | UnsetType = UNSET


class StatQuery(OnPath, kw_only=True):
    """A path, or what a symbolic link there leads to."""

    follow: bool | UnsetType = UNSET


class ListQuery(OnPath, kw_only=True):
    """A directory, so many levels deep."""

    depth: Annotated[int, Meta(ge=1, le=1000)] | UnsetType = UNSET


class MkdirQuery(OnPath, kw_only=True):
    """A directory to make. `mode` is octal."""

    mode: Mode | UnsetType = UNSET
    parents: bool | UnsetType = UNSET


class MoveQuery(OnPath, kw_only=True):
    """From where to where."""

    to: str
    overwrite: bool | UnsetType = UNSET


class OffsetsQuery(Query, kw_only=True):
    """Where to begin in each stream; not given = from now."""

    stdout_from: Size | None = None
    stderr_from: Size | None = None


class InputQuery(Query, kw_only=True):
    """Whether standard input ends after this, and where in all of it this begins.

    With `offset`, bytes that were taken before are skipped, so that they may be sent again.
    """

    eof: bool = False
    offset: Size | None = None


class RunQuery(Query, kw_only=True):
    """`input`: its standard input is a pipe, fed by `stdin` calls while it runs."""

    input: bool = False


class SignalQuery(Query, kw_only=True):
    """A signal by name (with or without SIG) or number."""

    signal: Annotated[str, Meta(min_length=1, max_length=20)]

    def number(self) -> int:
        """Its number.

        Raises:
            InvalidRequest: there is no such signal.
        """
        digits = self.signal.isascii() and self.signal.isdigit()  # isdigit alone takes "²"
        if digits and 1 <= int(self.signal) <= 64:
            return int(self.signal)
        name = f"SIG{self.signal.upper().removeprefix('SIG')}"
        found = signals.Signals.__members__.get(name)
        if found is None:
            raise InvalidRequest(f"signal {self.signal!r} is neither a name nor 1 to 64")
        return int(found)


class ResizeQuery(Query, kw_only=True):
    """A terminal's new size in characters."""

    rows: Annotated[int, Meta(ge=1, le=10000)]
    cols: Annotated[int, Meta(ge=1, le=10000)]


class NameQuery(Query, kw_only=True):
    """An image's name."""

    name: Annotated[str, Meta(min_length=1, max_length=512)]
