"""Settings: a TOML file becomes frozen dataclasses; a key nobody reads is refused, not ignored."""

from __future__ import annotations

import dataclasses
import tomllib
import typing
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from dsec.base.errors import InvalidRequest

T = TypeVar("T")


def load_config(path: Path, shape: type[T]) -> T:
    """Read a file of settings.

    Raises:
        InvalidRequest: it cannot be read, is not TOML, or a key in it is unknown or wrong.
    """
    try:
        text = path.read_text()
    except OSError as exc:
        raise InvalidRequest(f"cannot read {path}: {exc.strerror}") from exc
    return parse_config(text, shape, str(path))


def parse_config(text: str, shape: type[T], source: str = "settings") -> T:
    """Check settings given as TOML text.

    Args:
        text: the TOML.
        shape: a frozen dataclass; its fields may be dataclasses, or lists of them.
        source: names the text in errors.

    Raises:
        InvalidRequest: it is not TOML, or a key in it is unknown or wrong.
    """
    try:
        values = tomllib.loads(text)
        _refuse_unknown(values, shape, "")
        return msgspec.convert(values, shape)
    except (tomllib.TOMLDecodeError, msgspec.ValidationError) as exc:
        raise InvalidRequest(f"{source}: {exc}") from exc
    except InvalidRequest as exc:
        raise InvalidRequest(f"{source}: {exc.message}") from None


def _refuse_unknown(values: Mapping[str, Any], shape: type, place: str) -> None:
    hints = typing.get_type_hints(shape)
    names = [field.name for field in dataclasses.fields(shape)]
    for key, value in values.items():
        if key not in names:
            raise InvalidRequest(f"unknown key {place}{key}; known: {', '.join(sorted(names))}")
        inner = _dataclass_in(hints[key])
        if inner is None:
            continue
        for item in value if isinstance(value, list) else [value]:
            if isinstance(item, Mapping):
                _refuse_unknown(item, inner, f"{place}{key}.")


def _dataclass_in(hint: object) -> type | None:
    """The dataclass a hint speaks of: itself, in a list, or beside None."""
    if isinstance(hint, type) and dataclasses.is_dataclass(hint):
        return hint
    found = (_dataclass_in(arg) for arg in typing.get_args(hint))
    return next((inner for inner in found if inner is not None), None)
