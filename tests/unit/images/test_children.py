"""What a child of this program loses, and what it says."""

from __future__ import annotations

import os
import sys

import pytest

from dsec.base.errors import NotFound
from dsec.images.children import NOBODY, refusal
from dsec.linux.process import run

SAYS = "import os, resource as r, sys; "
CONFINE = "from dsec.images.children import *; confine(Bounds(memory_bytes=1 << 30, cpu_s=7)); "


def said_by(code: str) -> str:
    return run([sys.executable, "-c", SAYS + code], timeout_s=60).stdout.decode().strip()


def test_a_refusal_is_the_same_error_on_the_other_side() -> None:
    error = refusal(NotFound("no \udcff here")).error()
    assert isinstance(error, NotFound)
    assert error.message == "no \\udcff here"


def test_it_has_bounds_and_lets_others_go_first() -> None:
    limits = "[r.getrlimit(x) for x in (r.RLIMIT_AS, r.RLIMIT_CORE, r.RLIMIT_CPU)]"
    mine = os.nice(0)
    expected = [(1 << 30, 1 << 30), (0, 0), (7, 12)]
    assert said_by(f"{CONFINE} print({limits}, os.nice(0))") == f"{expected} {min(19, mine + 10)}"


@pytest.mark.needs_root
def test_it_becomes_nobody_for_good() -> None:
    code = "from dsec.images.children import *; become_nobody(); "
    told = said_by(code + "print(os.getresuid(), os.getresgid(), os.getgroups())")
    assert told == f"{(NOBODY,) * 3} {(NOBODY,) * 3} []"
    back = code + "\ntry: os.setresuid(0, 0, 0)\nexcept PermissionError: print('no')"
    assert said_by(back) == "no"
