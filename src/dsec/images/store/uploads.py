"""Uploading a blob to a registry in parts, and going on where a part was lost."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

import anyio
from yarl import URL

from dsec.base.errors import InvalidRequest, NotFound, Unavailable
from dsec.images.store.exchange import Answer, Ask, Exchange
from dsec.images.store.options import StoreOptions
from dsec.images.store.source import Source

_KEPT = 64
"""Broken uploads that are remembered."""
_RANGE = re.compile(r"(?:bytes[= ])?0-(\d+)")
_OCTETS = {"Content-Type": "application/octet-stream"}


@dataclass(frozen=True, slots=True)
class Upload:
    """An upload the registry knows of."""

    url: URL
    """Where the next part goes; each answer names another."""
    offset: int
    """Bytes the registry has."""


class Uploads:
    """Uploads to one repository. A broken one is remembered while the store is open."""

    def __init__(self, exchange: Exchange, options: StoreOptions) -> None:
        self._exchange = exchange
        self._options = options
        self._broken: dict[str, URL] = {}

    async def send(self, source: Source, digest: str, on_progress: Callable[[int], None]) -> None:
        """Send a file; the registry checks its digest.

        Raises:
            InvalidRequest: the file has another digest.
            Unavailable, PermissionDenied, StorageFull: the registry's refusal.
        """
        if resumed := await self._resume(digest):
            try:
                return await self._go_on(resumed, source, digest, on_progress)
            except (InvalidRequest, NotFound):
                pass  # what was there is of no use: once more from the start
        try:
            await self._go_on(await self._begin(), source, digest, on_progress)
        except NotFound as error:
            raise Unavailable(f"{self._exchange.root.host} forgot the upload") from error

    async def _go_on(
        self, upload: Upload, source: Source, digest: str, on_progress: Callable[[int], None]
    ) -> None:
        try:
            while upload.offset < source.size_bytes:
                on_progress(upload.offset)
                upload = await self._part(upload, source)
            await self._finish(upload, digest)
        except (Unavailable, anyio.get_cancelled_exc_class()):
            self._remember(digest, upload.url)
            raise
        on_progress(source.size_bytes)

    async def _part(self, upload: Upload, source: Source) -> Upload:
        """Send the next part, asking the registry how far it got after each failure."""
        pause_s = self._options.pause_s
        for _ in range(self._options.attempts - 1):
            try:
                return await self._send_part(upload, source)
            except Unavailable:
                await anyio.sleep(pause_s)
                pause_s *= 2
                upload = await self._where(upload.url)
        return await self._send_part(upload, source)

    async def _send_part(self, upload: Upload, source: Source) -> Upload:
        if upload.offset >= source.size_bytes:
            return upload  # a part whose answer was lost had arrived
        part = await source.part_at(upload.offset)
        end = upload.offset + len(part)
        answer = await self._exchange.ask_once(
            Ask(
                method="PATCH",
                url=upload.url,
                headers={**_OCTETS, "Content-Range": f"{upload.offset}-{end - 1}"},
                body=part,
                good=frozenset({202}),
                limit_bytes=1 << 16,
            ),
            self._options.upload_timeout_s,
        )
        return Upload(self._location(answer), end)

    async def _begin(self) -> Upload:
        answer = await self._exchange.ask(
            Ask(
                method="POST",
                url=self._exchange.root / "blobs/uploads/",
                body=b"",
                good=frozenset({202}),
                limit_bytes=1 << 16,
            )
        )
        return Upload(self._location(answer), 0)

    async def _resume(self, digest: str) -> Upload | None:
        if (url := self._broken.pop(digest, None)) is None:
            return None
        try:
            return await self._where(url)
        except NotFound:
            return None

    async def _where(self, url: URL) -> Upload:
        answer = await self._exchange.ask(
            Ask(method="GET", url=url, good=frozenset({200, 204}), limit_bytes=1 << 16)
        )
        found = _RANGE.fullmatch(answer.headers.get("Range", ""))
        last = int(found[1]) if found else 0
        # `0-0` is what registries say of an upload with nothing in it.
        return Upload(self._location(answer), last + 1 if last else 0)

    async def send_bytes(self, data: bytes, digest: str) -> None:
        """Send a small blob as a whole.

        Raises:
            Unavailable, PermissionDenied, StorageFull: the registry's refusal.
        """
        await self._finish(await self._begin(), digest, data)

    async def _finish(self, upload: Upload, digest: str, data: bytes = b"") -> None:
        ask = Ask(
            method="PUT",
            url=upload.url.update_query(digest=digest),
            headers=_OCTETS,
            body=data,
            good=frozenset({201, 204}),
            limit_bytes=1 << 16,
        )
        await self._exchange.ask_once(ask, self._options.upload_timeout_s)

    def _location(self, answer: Answer) -> URL:
        if not (location := answer.headers.get("Location")):
            raise Unavailable(f"{self._exchange.root.host} does not say where an upload goes")
        return answer.resolve(location)

    def _remember(self, digest: str, url: URL) -> None:
        self._broken[digest] = url
        while len(self._broken) > _KEPT:
            del self._broken[next(iter(self._broken))]
