# Generated from ../_async by tools/unasync.py; do not edit.
"""Images: what sandboxes are started from."""

from __future__ import annotations

import builtins
from collections.abc import Iterator
from pathlib import Path

import msgspec

from dsec.base.errors import Unavailable
from dsec.sdk import _blocking
from dsec.sdk._http import Request
from dsec.sdk._sync.call import Body, Caller
from dsec.sdk._sync.progress import ProgressStream
from dsec.wire.public_v1 import ImageProgress, ImageReady, ImageView, PullImage
from dsec.wire.sandbox import Heartbeat, StreamError

ImageEvent = ImageProgress | ImageReady
_EVENT: msgspec.json.Decoder[ImageProgress | ImageReady | Heartbeat | StreamError] = (
    msgspec.json.Decoder(ImageProgress | ImageReady | Heartbeat | StreamError)
)


class ImageEvents(ProgressStream[ImageReady]):
    """ImageProgress as it goes, then ImageReady. An import that breaks off is begun again."""

    def __init__(
        self, caller: Caller, request: Request, body: Body | None = None
    ) -> None:
        super().__init__(caller, _EVENT, request, body)

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

    def push(self, name: str) -> ImageEvents:
        """Put an image into the store that nodes share; iterate over it, or `.wait()`."""
        return ImageEvents(
            self._caller,
            self._caller.request("POST", "/v1/images/push", {"name": name}),
        )
