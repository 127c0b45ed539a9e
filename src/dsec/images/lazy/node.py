"""The node's filler as the edge holds it: started when it is first needed, found if it runs."""

from __future__ import annotations

import logging

import anyio

from dsec.base.errors import DsecError, Unavailable
from dsec.images.lazy.anchored import is_anchored
from dsec.images.lazy.client import FillerClient
from dsec.images.lazy.config import FillerConfig
from dsec.images.lazy.holder import is_held
from dsec.images.lazy.places import Places
from dsec.images.lazy.starting import ensure_filler
from dsec.kit.blocking import in_thread

logger = logging.getLogger("dsec.images.filler")

END_TIMEOUT_S = 20.0
PAUSE_S = 0.02


class NodeFiller:
    """One per edge. The process it stands for outlives the edge."""

    def __init__(self, config: FillerConfig) -> None:
        self._config = config
        self._client = FillerClient(config.socket)
        self._places = Places(config.home)
        self._started = anyio.Event()
        self._turn = anyio.Lock()

    @property
    def started(self) -> bool:
        """Whether it has been needed yet."""
        return self._started.is_set()

    async def wait_started(self) -> None:
        """Until it has been needed."""
        await self._started.wait()

    async def client(self) -> FillerClient:
        """A way to speak to it.

        Raises:
            Unavailable: it cannot be started; the message has its last words.
        """
        if not self._started.is_set():
            async with self._turn:
                if not self._started.is_set():
                    # Bounded, and not given up halfway: nobody would know of the process.
                    with anyio.CancelScope(shield=True):
                        await ensure_filler(self._config)
                        self._started.set()
        return self._client

    async def warm(self) -> None:
        """Have it run before it is needed, so that nobody waits for its start.

        Raises nothing: whoever needs it is told why it cannot be started.
        """
        try:
            await self.client()
        except DsecError as error:
            logger.warning("the filler does not start", extra={"why": error.message})

    async def revive(self) -> bool:
        """Have it run again if it is gone; whether it is another one now.

        Raises:
            Unavailable: it cannot be started.
        """
        async with self._turn:
            return await ensure_filler(self._config)

    async def find(self) -> bool:
        """Whether one runs already, left by an earlier edge; then it is used from now on.

        Raises:
            Unavailable: it runs and does not answer.
        """
        if not await in_thread("disk", self._is_there):
            return False
        started = await self.revive()
        self._started.set()
        return not started

    def _is_there(self) -> bool:
        """Also by what it left: a keeper can take over an anchor's group."""
        return is_held(self._places.lock) or is_anchored(self._places.anchor)

    async def shutdown(self) -> None:
        """End it and wait until it is gone. Who still stands on its data reads EIO from then on.

        Raises:
            Unavailable: it does not answer, or does not end in time.
        """
        await self.revive()  # its worker may be on its way up again
        await self._client.shutdown()
        with anyio.move_on_after(END_TIMEOUT_S):
            while await in_thread("disk", is_held, self._places.lock):  # noqa: ASYNC110 - another process
                await anyio.sleep(PAUSE_S)
            return
        raise Unavailable(f"the filler does not end within {END_TIMEOUT_S:g} s")

    async def aclose(self) -> None:
        """Give up the connection; the process goes on."""
        await self._client.aclose()
