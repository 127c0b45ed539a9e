"""Nothing that one sandbox sends ends the warden, which is there for all."""

from __future__ import annotations

import contextlib
import logging
import traceback
from collections.abc import Iterator

logger = logging.getLogger("dsec.warden")


@contextlib.contextmanager
def survived(what: str) -> Iterator[None]:
    """Note a failure that nobody foresaw, and go on without it.

    Its kind and place are logged and none of its words: they may hold a secret, or a sandbox's bytes.

    Args:
        what: was being done.
    """
    try:
        yield
    except Exception as exc:  # noqa: BLE001 - see above
        frames = traceback.extract_tb(exc.__traceback__)
        places = [f"{frame.name}:{frame.lineno}" for frame in frames]
        # No traceback: it ends in the exception's words.
        logger.error(  # noqa: TRY400
            "failed", extra={"what": what, "kind": type(exc).__name__, "at": places}
        )
