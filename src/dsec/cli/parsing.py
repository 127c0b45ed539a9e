"""What people write on a command line, as values."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Sequence
from typing import cast, get_args

from dsec.base.errors import InvalidRequest
from dsec.base.quantity import MIB, parse_size_bytes
from dsec.wire.phases import QosClass
from dsec.wire.sandbox import IdleAction, SeccompProfile

LONGEST_S = 30 * 86400.0
_DURATION = re.compile(r"(?:(\d+)d)?(?:(\d+)h)?(?:(\d+)m)?(?:(\d+(?:\.\d+)?)s?)?", re.ASCII)


def pairs(items: Sequence[str], what: str) -> dict[str, str]:
    """`KEY=VALUE` items.

    Raises:
        InvalidRequest: one has no `=`.
    """
    found: dict[str, str] = {}
    for item in items:
        key, equals, value = item.partition("=")
        if not equals or not key:
            raise InvalidRequest(f"{what} {item!r} must be KEY=VALUE")
        found[key] = value
    return found


def environment(items: Sequence[str]) -> dict[str, str]:
    """`KEY=VALUE`, or `KEY` for the value it has here.

    Raises:
        InvalidRequest: it has none here, or no name.
    """
    return pairs([_with_value(item) for item in items], "variable")


def _with_value(item: str) -> str:
    if not item or "=" in item:
        return item
    if item not in os.environ:
        raise InvalidRequest(f"variable {item!r} has no value here: say {item}=VALUE")
    return f"{item}={os.environ[item]}"


def memory_mb(text: str) -> int:
    """`512M`, `4G`; a plain number is MiB.

    Raises:
        InvalidRequest: it is no size.
    """
    size = int(text) if text.isascii() and text.isdecimal() else parse_size_bytes(text) // MIB
    if size < 1:
        raise InvalidRequest(f"{text!r} is less than 1 MiB")
    return size


def cores(number: float) -> float:
    """A number of cores.

    Raises:
        InvalidRequest: it is none, as `nan` is.
    """
    if not math.isfinite(number):
        raise InvalidRequest(f"--cpus: {number} is not a number of cores")
    return number


def one_of(allowed: Sequence[str], text: str, what: str) -> str:
    """A word of a list.

    Raises:
        InvalidRequest: it is not in it.
    """
    if text not in allowed:
        raise InvalidRequest(f"{what}: {text!r} is none of {', '.join(allowed)}")
    return text


def seconds(text: str) -> float | None:
    """`90`, `90s`, `5m`, `1h30m`, `2d`; `none` is None.

    Raises:
        InvalidRequest: it is no time span.
    """
    if text.lower() in {"none", "never"}:
        return None
    match = _DURATION.fullmatch(text.strip().lower())
    if not match or not text.strip():
        raise InvalidRequest(f"{text!r} is not a time such as 90s, 5m, 1h30m or none")
    days, hours, minutes, rest = (float(part or 0) for part in match.groups())
    total = ((days * 24 + hours) * 60 + minutes) * 60 + rest
    if total <= 0:
        raise InvalidRequest(f"{text!r} must be more than nothing; for no limit say none")
    return total


def at_most(text: str) -> float:
    """A time as `seconds` has it; `none` is as long as anything may take.

    Raises:
        InvalidRequest: it is no time span.
    """
    return seconds(text) or LONGEST_S


def must_end(text: str, option: str) -> float:
    """A time as `seconds` has it, of what cannot be for ever.

    Raises:
        InvalidRequest: it is no time span, or `none`.
    """
    found = seconds(text)
    if found is None:
        raise InvalidRequest(f"{option}: it cannot be {text}: say a time such as 90s, 5m, 1h30m")
    return found


def idle_action(text: str) -> IdleAction:
    """`stop` or `pause`.

    Raises:
        InvalidRequest: it is neither.
    """
    return cast("IdleAction", one_of(get_args(IdleAction), text, "--idle"))


def qos_class(text: str) -> QosClass:
    """`ls` or `be`.

    Raises:
        InvalidRequest: it is neither.
    """
    return cast("QosClass", one_of(get_args(QosClass), text, "--qos"))


def security_profile(text: str) -> SeccompProfile:
    """`default`, `strict` or `loose`.

    Raises:
        InvalidRequest: it is none of them.
    """
    return cast("SeccompProfile", one_of(get_args(SeccompProfile), text, "--security"))


def network(allow: Sequence[str], deny: Sequence[str]) -> dict[str, bool]:
    """Rules from two options; a name in both is denied."""
    return dict.fromkeys(allow, True) | dict.fromkeys(deny, False)


def command(words: Sequence[str]) -> list[str]:
    """The command after the name it is for, with or without `--` between them.

    Raises:
        InvalidRequest: options of ours stand where the command should.
    """
    if words and words[0] == "--":
        return list(words[1:])
    if words and words[0].startswith("-"):
        raise InvalidRequest(
            f"{words[0]!r} would be the command; options stand before the image or sandbox"
        )
    return list(words)
