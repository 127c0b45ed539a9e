"""`watch`: changes below a directory as they happen."""

from __future__ import annotations

import errno

from dsec.edge.sim.errors import file_error
from dsec.edge.sim.file_methods import Files, PathArgs
from dsec.edge.sim.filesystem import READ, Directory
from dsec.edge.sim.pipes import Mailbox
from dsec.edge.sim.wire import Stream

WAITING_EVENTS = 16_384
"""As inotify's default queue; beyond it one `overflow` takes the place of what was lost."""


class WatchArgs(PathArgs, kw_only=True):
    """Arguments of `watch`."""

    recursive: bool | None = False


async def watch(files: Files, stream: Stream, args: WatchArgs) -> None:
    """Report changes until the stream is cancelled."""
    who = files.who(args.user)
    node, place = files.fs.find(args.raw, who=who)
    if not isinstance(node, Directory):
        raise file_error(errno.ENOTDIR, args.raw)
    files.fs.check(node, who, READ, args.raw)
    prefix = place.path.rstrip(b"/") + b"/"
    waiting: Mailbox[tuple[bytes, str]] = Mailbox()
    lost = False

    def heard(path: bytes, event: str) -> None:
        nonlocal lost
        relative = path.removeprefix(prefix)
        if relative == path or (b"/" in relative and not args.recursive):
            return
        if len(waiting) < WAITING_EVENTS:
            waiting.put((relative, event))
        else:
            lost = True

    stop = files.fs.watch(heard)
    try:
        await stream.event({"watching": True})
        async for relative, event in waiting:
            await stream.event({"path": relative, "event": event})
            if lost and not waiting:
                lost = False
                await stream.event({"path": b"", "event": "overflow"})
    finally:
        stop()
