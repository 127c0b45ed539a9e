"""`./dev demo`: the main job from nothing — a server, an image, real tasks in real sandboxes, a table.

Uses the server that runs on this machine if one does; else starts its own on a free port, with the
usual state directory, so that the image built now is there for `dsec up` later, and stops it again.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator, Sequence

import anyio

from dsec.base.errors import DsecError
from dsec.base.quantity import format_duration
from dsec.main.parts import CLOCK

IMAGE = "debian"
PROBE_TIMEOUT_S = 3.0
STOP_TIMEOUT_S = 60.0


def main(argv: Sequence[str] | None = None) -> int:
    """Run it; returns the exit status."""
    from dsec.cli.boundary import report
    from dsec.rollout import demo

    begun = CLOCK.monotonic()
    arguments = list(sys.argv[1:] if argv is None else argv)
    try:
        with _server():
            anyio.run(_ensure_image)
            status = demo.main(["--image", IMAGE, *arguments])
    except DsecError as error:
        return report(error)
    except KeyboardInterrupt:
        return 130
    _say(f"done in {format_duration(CLOCK.monotonic() - begun)}")
    return status


@contextlib.contextmanager
def _server() -> Iterator[None]:
    if anyio.run(_answers):
        _say("using the server that runs here")
        yield
        return
    from dsec.main import credentials
    from dsec.main.all_in_one import run
    from dsec.main.detach import in_background
    from dsec.main.settings import settle
    from dsec.main.state_dir import stop_holder

    settings = settle(None, {"port": 0, "stop_sandboxes": True, "log_level": "WARNING"})
    # Local clients go on finding their own server: this one writes its address elsewhere.
    os.environ["XDG_CONFIG_HOME"] = str(settings.state / "demo")
    log = settings.state / "demo" / "server.log"
    _say(f"starting a server; its log is {log}")
    in_background(lambda announce: run(settings, announce), log)
    try:
        yield
    finally:
        _say("stopping the server and what is left of its sandboxes")
        stop_holder(settings.state, STOP_TIMEOUT_S)
        credentials.user_file(os.environ).unlink(missing_ok=True)


async def _answers() -> bool:
    from dsec.sdk import DSecClient

    with anyio.move_on_after(PROBE_TIMEOUT_S), contextlib.suppress(DsecError):
        async with DSecClient():
            return True
    return False


async def _ensure_image() -> None:
    """Build the image over the system's own package mirror, unless the node has it."""
    from dsec.cli.images import follow
    from dsec.sdk import DSecClient

    async with DSecClient() as client:
        if any(image.name.split(":")[0] == IMAGE for image in await client.images.list()):
            return
        _say("building the Debian image: about a minute, once")
        await follow(client.images.build(IMAGE), json=False)


def _say(text: str) -> None:
    sys.stderr.write(f"==> {text}\n")


if __name__ == "__main__":
    sys.exit(main())
