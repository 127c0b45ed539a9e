"""JSON lines on standard error: one line per request and per change of state.

Context (request, sandbox) travels in context variables, so a line deep below names both.
"""

from __future__ import annotations

import contextvars
import json
import logging
import sys
import time
from typing import Final

import msgspec
from typing_extensions import override

request_id: contextvars.ContextVar[str] = contextvars.ContextVar("request_id", default="")
sandbox_id: contextvars.ContextVar[str] = contextvars.ContextVar("sandbox_id", default="")

_STANDARD: Final = frozenset(vars(logging.makeLogRecord({})))


class JsonLines(logging.Formatter):
    """A record as one JSON object; text from a sandbox stays inside its string."""

    @override
    def format(self, record: logging.LogRecord) -> str:
        """Render one record."""
        line: dict[str, object] = {
            "at": time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
            + f".{int(record.msecs):03}Z",
            "level": record.levelname.lower(),
            "log": record.name,
            "msg": record.getMessage(),
        }
        for name, var in (("request_id", request_id), ("sandbox_id", sandbox_id)):
            if value := var.get():
                line[name] = value
        line |= {key: value for key, value in vars(record).items() if key not in _STANDARD}
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        try:
            return msgspec.json.encode(line, enc_hook=str).decode()
        except UnicodeEncodeError:  # the name of a file that is not UTF-8
            return json.dumps(line, default=str)


def configure(level: str = "INFO") -> None:
    """Send this process's log to standard error as JSON lines."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonLines())
    logging.basicConfig(level=level, handlers=[handler], force=True)
