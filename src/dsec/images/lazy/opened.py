"""What is open, written down: a worker that is started again shows the kernel the same devices.

In the run directory, with the boot it belongs to: after a reboot nobody has anything open.
"""

from __future__ import annotations

from pathlib import Path

import msgspec
from msgspec import Struct, field

from dsec.images.lazy.recording import RecordingRecord
from dsec.linux.files import boot_id
from dsec.wire.filler import OpenData


class Opened(Struct, kw_only=True, frozen=True):
    """One device."""

    request: OpenData
    shown: bool
    """Under its own name; otherwise only for recordings."""


class OpenList(Struct, kw_only=True, frozen=True):
    """`open.json`."""

    boot_id: str
    data: list[Opened] = field(default_factory=list)
    recordings: list[RecordingRecord] = field(default_factory=list)


def read_list(file: Path) -> OpenList:
    """What was open; nothing if the file is of another boot, missing or damaged. Blocks."""
    boot = boot_id()
    try:
        found = msgspec.json.decode(file.read_bytes(), type=OpenList)
    except (OSError, msgspec.MsgspecError):
        return OpenList(boot_id=boot)
    return found if found.boot_id == boot else OpenList(boot_id=boot)


def write_list(file: Path, opened: OpenList) -> None:
    """Replace the file; unsynced, since it does not outlive the boot. Blocks."""
    temporary = file.with_name(f"{file.name}.write")
    temporary.write_bytes(msgspec.json.encode(opened))
    temporary.replace(file)
