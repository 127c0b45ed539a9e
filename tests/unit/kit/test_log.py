"""The log takes whatever it is given."""

from __future__ import annotations

import json
import logging

from dsec.kit.log import JsonLines


def test_a_strange_name_is_a_line_like_any_other() -> None:
    record = logging.makeLogRecord({"msg": "no file", "levelname": "INFO", "path": "/\udcff"})
    line = JsonLines().format(record)
    line.encode()
    assert json.loads(line)["path"] == "/\udcff"
