"""Writes that keep the kernel busy for long: in a process of their own, which can be killed over it.

The kernel looks for signals while it works, and a thread of this program cannot be sent one alone.
"""

from __future__ import annotations

import os
from pathlib import Path

from dsec.kit.recall import Recall
from dsec.linux import pidfd
from dsec.linux.spawn import spawn


def write_long(helper: Path, file: Path, text: str, recall: Recall, patience_s: float) -> None:
    """Write until the kernel is done, it is called off, or its time is over. Blocks.

    What the kernel thinks of the write is not told: look at what has become of it.

    Args:
        helper: the native helper's binary; it ends with this program.
        file: one of the kernel's, that is there.
        text: what to write.
        recall: calls it off.
        patience_s: its time.

    Raises:
        OSError: the helper cannot be started.
    """
    child = spawn([str(helper), "write", str(file), text, str(os.getpid())], {})
    try:
        with recall.ending(lambda: pidfd.kill(child.descriptor)):
            pidfd.wait_end(child.descriptor, patience_s)
    finally:
        child.reap(0)
