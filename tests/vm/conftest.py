"""Guests: started once for all tests here. What is below `inside` runs in one and nowhere else."""

from __future__ import annotations

import faulthandler
import os
import platform
import shutil

import pytest

from tests.vm import guest, kernel

collect_ignore = [] if os.environ.get("DSEC_GUEST") else ["inside"]
SUITES = (
    "tests.vm.inside.test_unified",
    "tests.vm.inside.test_life",
    "tests.kernel.test_cgroups",
    "tests.kernel.test_pausing",
)
"""Modules of tests that run in a guest with one cgroup v2 hierarchy."""


@pytest.fixture(scope="session")
def unified() -> guest.Run:
    """A guest with one v2 hierarchy and swap, in which all of SUITES have run."""
    if platform.machine() != "x86_64":
        pytest.skip("guests are made for x86-64 alone so far")
    if kernel.find() is None or shutil.which(guest.QEMU) is None:
        pytest.skip(
            "no QEMU or no kernel for guests: ./dev test fetches them where the mirror has them"
        )
    # It has a limit of its own; what waits for it is not stuck.
    faulthandler.cancel_dump_traceback_later()
    return guest.run([f"{name.replace('.', '/')}.py" for name in SUITES])
