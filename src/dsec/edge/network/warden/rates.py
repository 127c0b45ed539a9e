"""How much a sandbox may ask for, and what in a name looks like smuggled data. Pure.

Made on a sandbox's first question: an idle one has none of it.
"""

from __future__ import annotations

import math
from collections import Counter, OrderedDict

from dsec.edge.network.warden.settings import Limits

_MINUTE_S = 60.0
_MAX_WILDCARDS = 64
"""Counted apart; a sandbox with more of them in use shares the oldest's count."""


class Bucket:
    """Tokens that come back with time."""

    __slots__ = ("_at", "_burst", "_left", "_per_s")

    def __init__(self, per_s: float, burst: float, now: float) -> None:
        """Begin full."""
        self._per_s, self._burst = per_s, burst
        self._left, self._at = burst, now

    def take(self, now: float) -> bool:
        """Take one token, if there is one."""
        self._left = min(self._burst, self._left + (now - self._at) * self._per_s)
        self._at = now
        if self._left < 1:
            return False
        self._left -= 1
        return True


class Questions:
    """What one sandbox has asked lately."""

    __slots__ = ("_limits", "_refusals", "_tokens", "_wildcards", "waiting")

    def __init__(self, limits: Limits, now: float) -> None:
        """Begin with nothing asked."""
        self._limits = limits
        self._tokens = Bucket(limits.questions_per_s, limits.questions_burst, now)
        self._refusals = Bucket(limits.questions_per_s, limits.questions_burst, now)
        self._wildcards: OrderedDict[str, OrderedDict[str, float]] = OrderedDict()
        self.waiting = 0

    def may_ask(self, now: float) -> bool:
        """Whether one more question is within the rate."""
        return self._tokens.take(now) and self.waiting < self._limits.questions_at_once

    def may_be_refused(self, now: float) -> bool:
        """Whether a question over the rate still gets an answer; beyond, silence is cheaper."""
        return self._refusals.take(now)

    def may_ask_below(self, wildcard: str, name: str, now: float) -> bool:
        """Whether this name is within what may be asked below one wildcard in a minute."""
        asked = self._wildcards.setdefault(wildcard, OrderedDict())
        self._wildcards.move_to_end(wildcard)
        if len(self._wildcards) > _MAX_WILDCARDS:
            self._wildcards.popitem(last=False)
        while asked and next(iter(asked.values())) <= now - _MINUTE_S:
            asked.popitem(last=False)
        if name in asked:
            return True
        if len(asked) >= self._limits.wildcard_names_per_minute:
            return False
        asked[name] = now
        return True


def entropy_bits(text: str) -> float:
    """Shannon's entropy of a text's characters times its length, in bits."""
    total = len(text)
    return -sum(n * math.log2(n / total) for n in Counter(text).values()) if total else 0.0


def looks_smuggled(name: str, wildcard: str, limits: Limits) -> bool:
    """Whether what a name has below its wildcard could carry a message out."""
    below = name.removesuffix(wildcard[1:])
    if any(len(label) > limits.wildcard_label_chars for label in below.split(".")):
        return True
    return entropy_bits(below) > limits.wildcard_name_bits
