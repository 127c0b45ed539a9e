"""The edge's end of a warden's control connection: requests by number, and what comes unasked."""

from __future__ import annotations

from collections.abc import Callable
from itertools import count

import anyio
from anyio.abc import ByteStream

from dsec.base.errors import DsecError, Unavailable, error_from
from dsec.edge.network.warden.messages import (
    ANSWERS,
    Denied,
    Done,
    Failed,
    Frames,
    Request,
    framed,
)

OnDenied = Callable[[Denied], None]
_GONE = (
    OSError,
    anyio.EndOfStream,
    anyio.IncompleteRead,
    anyio.BrokenResourceError,
    anyio.ClosedResourceError,
)


class _Waiting:
    """A request on its way."""

    __slots__ = ("answer", "done")

    def __init__(self) -> None:
        self.done = anyio.Event()
        self.answer: Done | DsecError | None = None

    def finish(self, answer: Done | DsecError) -> None:
        self.answer = answer
        self.done.set()

    async def result(self) -> Done:
        await self.done.wait()
        if isinstance(self.answer, Done):
            return self.answer
        raise self.answer or Unavailable("the warden gave no answer")


class Connection:
    """Speaks to one warden."""

    def __init__(self, stream: ByteStream, on_denied: OnDenied) -> None:
        self._stream = stream
        self._frames = Frames(stream)
        self._on_denied = on_denied
        self._sending = anyio.Lock()
        self._numbers = count(1)
        self._waiting: dict[int, _Waiting] = {}
        self.over = False
        """Whether the warden is gone."""

    async def ask(self, request: Request, patience_s: float) -> Done:
        """Send a request, numbered here, and wait for its answer.

        Args:
            request: what to ask.
            patience_s: for all of it.

        Raises:
            DsecError: the warden's answer. Unavailable: it is gone, or takes too long and is ended.
        """
        if self.over:
            raise Unavailable("the warden is gone")
        request.id = next(self._numbers)
        waiting = self._waiting[request.id] = _Waiting()
        try:
            with anyio.fail_after(patience_s):
                async with self._sending:
                    await self._stream.send(framed(request))
                return await waiting.result()
        except TimeoutError:
            await self.end()
            raise Unavailable(f"the warden took longer than {patience_s:g} s") from None
        except _GONE as exc:
            raise Unavailable("the warden is gone") from exc
        finally:
            self._waiting.pop(request.id, None)

    async def end(self) -> None:
        """Have the warden end: it does when its control connection is closed."""
        await anyio.aclose_forcefully(self._stream)

    async def receive(self) -> None:
        """Hand out what comes, until the connection ends."""
        try:
            while True:
                self._take(await self._frames.receive(ANSWERS))
        except (*_GONE, Unavailable):
            return
        finally:
            self.over = True
            for waiting in self._waiting.values():
                waiting.finish(Unavailable("the warden is gone"))

    def _take(self, message: Done | Failed | Denied) -> None:
        if isinstance(message, Denied):
            self._on_denied(message)
        elif (waiting := self._waiting.get(message.id)) is not None:
            if isinstance(message, Failed):
                waiting.finish(error_from(message.code, message.message))
            else:
                waiting.finish(message)
