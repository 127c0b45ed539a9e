"""Whether a thread has waited in the kernel, or only for its turn on a processor."""

from __future__ import annotations

import resource


def waits() -> int:
    """How often the calling thread has given up its processor by itself: to wait for something."""
    return resource.getrusage(resource.RUSAGE_THREAD).ru_nvcsw
