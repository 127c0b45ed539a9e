# Generated from ../_async by tools/unasync.py; do not edit.
"""Images: what sandboxes are started from."""

from __future__ import annotations

import builtins
from collections.abc import Iterator
from pathlib import Path

import msgspec
from typing_extensions import override

from dsec.base.errors import InternalError, Unavailable
from dsec.sdk import _blocking
from dsec.sdk._answers import stream_error
from dsec.sdk._http import ConnectionFailed, Request
from dsec.sdk._sync.call import Body, Caller, EventStream, Lines
from dsec.wire.public_v1 import ImageProgress, ImageReady, ImageView, PullImage
from dsec.wire.sandbox import Heartbeat, StreamError

ImageEvent = ImageProgress | ImageReady
_EVENT: msgspec.json.Decoder[ImageProgress | ImageReady | Heartbeat | StreamError] = (
    msgspec.json.Decoder(ImageProgress | ImageReady | Heartbeat | StreamError)
)


class ImageEvents(EventStream[ImageEvent]):
    """ImageProgress as it goes, then ImageReady. An import that breaks off is begun again."""

    def __init__(
        self, caller: Caller, request: Request, body: Body | None = None
    ) -> None:
        self._caller = caller
        self._request = request
        self._body = body
        self._patience = caller.patience()
        self._lines: Lines | None = None
        self._ended = False

    @override
    def __next__(self) -> ImageEvent:
        """The next event.

        Raises:
            DsecError: the import failed.
        """
        while not self._ended:
            try:
                line = self._line()
            except ConnectionFailed as exc:
                self._detach()
                self._caller.lost(exc, self._request, self._patience)
                continue
            event = self._take(line)
            if event is not None:
                return event
        self._detach()
        raise StopIteration

    def _line(self) -> bytes:
        if self._lines is None:
            response = self._caller.open(self._request, self._patience, self._body)
            self._lines = Lines(response, self._patience)
        line = self._lines.next()
        if not line:
            raise ConnectionFailed("the stream ended before the import did", sent=True)
        return line

    def _take(self, line: bytes) -> ImageEvent | None:
        try:
            event = _EVENT.decode(line)
        except msgspec.ValidationError:
            return None
        except msgspec.DecodeError as exc:
            raise InternalError(f"a line of the stream is not JSON: {exc}") from None
        match event:
            case StreamError():
                self.close()
                raise stream_error(event)
            case ImageReady():
                self._ended = True
                self._detach()
                return event
            case ImageProgress():
                return event
            case Heartbeat():
                return None

    def _detach(self) -> None:
        lines, self._lines = self._lines, None
        if lines is not None:
            lines.close()

    @override
    def close(self) -> None:
        """Stop listening."""
        self._ended = True
        self._detach()

    def wait(self) -> ImageView:
        """Read on to the end; the image."""
        with self:
            for event in self:
                if isinstance(event, ImageReady):
                    return event.image
        raise Unavailable("the import ended without an image")


class Images:
    """The platform's images; `client.images`."""

    def __init__(self, caller: Caller) -> None:
        self._caller = caller

    def list(self) -> builtins.list[ImageView]:
        """Every image there is."""
        return self._caller.call(
            self._caller.request("GET", "/v1/images"), builtins.list[ImageView]
        )

    def remove(self, name: str) -> None:
        """Remove an image. One that a sandbox runs from stays, until that has stopped.

        Raises:
            NotFound: there is none of that name.
        """
        self._caller.do(self._caller.request("DELETE", "/v1/images", {"name": name}))

    def pull(
        self, reference: str, name: str | None = None, *, tls_verify: bool = True
    ) -> ImageEvents:
        """Import from an OCI registry; iterate over it, or `.wait()`."""
        body = PullImage(reference=reference, name=name, tls_verify=tls_verify)
        return ImageEvents(
            self._caller, self._caller.request("POST", "/v1/images/pull", body=body)
        )

    def build(
        self,
        distribution: str = "debian",
        name: str | None = None,
        packages: builtins.list[str] | None = None,
        suite: str | None = None,
    ) -> ImageEvents:
        """Build a distribution image over the node's own package mirror."""
        # As a mapping: which distributions there are is for the server to say.
        body: dict[str, object] = {
            "distribution": distribution,
            "packages": packages or [],
        }
        body |= {"name": name} if name else {}
        body |= {"suite": suite} if suite else {}
        return ImageEvents(
            self._caller, self._caller.request("POST", "/v1/images/build", body=body)
        )

    def import_archive(self, path: str | Path, name: str) -> ImageEvents:
        """Import a local archive: an OCI layout, a `docker save`, or a root file system (tar)."""
        request = self._caller.upload(
            "POST",
            "/v1/images/import",
            {"name": name},
            repeatable=True,
            kind="application/octet-stream",
        )

        def body() -> Iterator[bytes]:
            return _blocking.read_file(Path(path))

        return ImageEvents(self._caller, request, body)
