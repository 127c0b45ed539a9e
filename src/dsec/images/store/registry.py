"""A store in a repository of an OCI registry: blobs as they are, documents as artifacts.

The registry checks every blob's digest, lists none, and collects what no document names.
"""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Callable, Sequence
from http import HTTPStatus
from pathlib import Path

import anyio
import msgspec
from msgspec import Struct
from yarl import URL

from dsec.base.clock import Clock, SystemClock
from dsec.base.errors import (
    Conflict,
    DataUnavailable,
    DsecError,
    NotFound,
    Unavailable,
    Unsupported,
)
from dsec.images.store import artifacts, layout
from dsec.images.store.deadlines import persevere
from dsec.images.store.exchange import Answer, Ask, Exchange
from dsec.images.store.interface import (
    MAX_DOCUMENT_BYTES,
    BlobRef,
    DocumentKind,
    FoundBlob,
    nothing,
)
from dsec.images.store.options import StoreOptions
from dsec.images.store.refusals import refused
from dsec.images.store.source import opened
from dsec.images.store.uploads import Uploads

_TAGS_AT_ONCE = 1000
_NAMES_AT_ONCE = 16
"""Manifests read in parallel for a listing."""
_MAX_PAGE_BYTES = 16 << 20
_MAX_PAGES = 1000
"""Of one listing: a registry could lead on for ever."""
_NEXT = re.compile(r'<([^>]*)>\s*;[^,]*rel="?next"?', re.IGNORECASE)
_RANGE = re.compile(r"bytes (\d+)-(\d+)/")
_MANIFEST = {"Accept": artifacts.MANIFEST_TYPE}


class _Tags(Struct):
    tags: list[str] | None = None


class RegistryStore:
    """One repository. Everything of the store lies in it, so that references resolve."""

    def __init__(
        self,
        scheme: str,
        base: str,
        repository: str,
        options: StoreOptions | None = None,
        clock: Clock | None = None,
    ) -> None:
        """Remember where it is; nothing is sent.

        Args:
            scheme: `oci` or `oci+http`, for `url`.
            base: `https://host[:port]`, or with http.
            repository: its path.
            options: time limits.
            clock: for the lifetime of tokens.
        """
        self._options = options or StoreOptions()
        self._url = f"{scheme}://{base.partition('://')[2]}/{repository}"
        self._exchange = Exchange(base, repository, self._options, clock or SystemClock())
        self._uploads = Uploads(self._exchange, self._options)
        self._blobs = f"{self._exchange.root}/blobs/sha256:"
        self._empty = anyio.Lock()

    @property
    def url(self) -> str:
        """As it was opened."""
        return self._url

    async def put_blob(
        self, file: Path, digest: str, on_progress: Callable[[int], None] = nothing
    ) -> None:
        """Upload in parts. A broken upload is gone on with while the store stays open."""
        if await self.has_blob(digest):
            return
        async with opened(file, digest, self._options.part_bytes) as source:
            await self._uploads.send(source, digest, on_progress)
            await self._verify(digest, source.size_bytes)

    async def has_blob(self, digest: str) -> bool:
        """Ask for the blob's head."""
        try:
            await self._exchange.ask(Ask(method="HEAD", url=self._blob(digest)))
        except NotFound:
            return False
        return True

    async def read_blob(self, digest: str, offset: int, length: int) -> bytes:
        """Ask for a range."""
        if length == 0:
            return await self._nothing_of(digest)
        last = offset + length - 1
        ask = Ask(
            method="GET",
            url=self._blob(digest),
            headers={"Range": f"bytes={offset}-{last}"},
            good=frozenset({206}),
            limit_bytes=length,
        )
        try:
            answer = await self._exchange.ask(ask)
        except NotFound:
            raise _no_blob(digest) from None
        found = _RANGE.match(answer.headers.get("Content-Range", ""))
        if len(answer.body) != length or not found or int(found[1]) != offset:
            raise Unavailable(f"{self._url} sent other bytes of {digest} than were asked for")
        return answer.body

    def list_blobs(self) -> AsyncIterator[FoundBlob]:
        """Not to be had from a registry.

        Raises:
            Unsupported: always.
        """
        raise Unsupported("a registry lists no blobs; it collects garbage itself")

    async def delete_blob(self, digest: str) -> None:
        """Not to be had from a registry.

        Raises:
            Unsupported: always.
        """
        raise Unsupported(f"a registry collects garbage itself; {digest} is its business")

    async def put_document(
        self,
        kind: DocumentKind,
        name: str,
        body: bytes,
        blobs: Sequence[BlobRef],
        *,
        absent: bool = False,
    ) -> None:
        """Upload the body and a manifest that names it and the blobs.

        Raises:
            NotFound: (kind blob) one of the blobs is not in the store.
        """
        layout.check_body(body)
        if absent and await self._says(kind, name, body):
            return
        tag = artifacts.tag_of(kind, name)
        own = BlobRef(layout.digest_of(body), len(body))
        async with self._empty:
            await self._have(artifacts.EMPTY_REF, artifacts.EMPTY)
        await self._have(own, body)
        await self._put_manifest(tag, artifacts.manifest(kind, name, own, blobs))
        if absent:  # there is no request that would not replace; so see who was last
            await self._says(kind, name, body)

    async def _says(self, kind: DocumentKind, name: str, body: bytes) -> bool:
        """Whether there is such a document.

        Raises:
            Conflict: there is one, and it says something else.
        """
        try:
            found = await self.get_document(kind, name)
        except NotFound:
            return False
        if found != body:
            raise Conflict(f"{kind} {name!r} is in the store already", kind=kind)
        return True

    async def get_document(self, kind: DocumentKind, name: str) -> bytes:
        """Read the manifest, then the body it names, and check that."""
        tag = artifacts.tag_of(kind, name)
        try:
            artifact, _ = await self._manifest(tag)
        except NotFound:
            raise NotFound(f"there is no document {name!r} in the store", kind="document") from None
        ref = artifact.layers[0]
        if ref.size > MAX_DOCUMENT_BYTES:
            raise DataUnavailable(f"the document {name!r} has {ref.size} bytes")
        body = await self.read_blob(ref.digest, 0, ref.size)
        if artifact.name != name or layout.digest_of(body) != ref.digest:
            raise DataUnavailable(f"the document {name!r} is damaged in the store")
        return body

    async def list_documents(self, kind: DocumentKind) -> AsyncIterator[str]:
        """Names from the manifests of all tags of the kind, some at a time."""
        async for tags in self._pages():
            ours = [tag for tag in tags if artifacts.is_tag_of(kind, tag)]
            for start in range(0, len(ours), _NAMES_AT_ONCE):
                for name in await self._names(ours[start : start + _NAMES_AT_ONCE]):
                    yield name

    async def _pages(self) -> AsyncIterator[list[str]]:
        url = (self._exchange.root / "tags/list").with_query(n=_TAGS_AT_ONCE)
        for _ in range(_MAX_PAGES):
            try:
                tags, following = await self._tags(url)
            except NotFound:
                return  # a repository nothing was put into yet
            yield tags
            if following is None:
                return
            url = following
        raise Unavailable(f"{self._url} lists tags without an end")

    async def delete_document(self, kind: DocumentKind, name: str) -> None:
        """Delete the manifest; its digest is this document's alone, as the name is in it.

        Raises:
            Unsupported: the registry does not allow it.
        """
        try:
            _, digest = await self._manifest(artifacts.tag_of(kind, name))
            answer = await self._exchange.ask(
                Ask(
                    method="DELETE",
                    url=self._exchange.root / "manifests" / digest,
                    good=frozenset({200, 202, 204, 405}),
                    limit_bytes=1 << 16,
                )
            )
        except NotFound:
            return
        if answer.status == HTTPStatus.METHOD_NOT_ALLOWED:
            raise Unsupported(f"{self._url} does not let documents be deleted")

    def blob_path(self, digest: str) -> Path | None:
        """None: it is not on this host."""
        del digest
        return None

    async def aclose(self) -> None:
        """Close the connections."""
        await self._exchange.aclose()

    def _blob(self, digest: str) -> URL:
        # Put together as text: this is done for every read.
        return URL(f"{self._blobs}{layout.hex_of(digest)}", encoded=True)

    async def _verify(self, digest: str, size_bytes: int) -> None:
        answer = await self._exchange.ask(Ask(method="HEAD", url=self._blob(digest)))
        if answer.headers.get("Content-Length", str(size_bytes)) != str(size_bytes):
            raise Unavailable(f"{self._url} kept {digest} in part only")

    async def _nothing_of(self, digest: str) -> bytes:
        if not await self.has_blob(digest):
            raise _no_blob(digest)
        return b""

    async def _have(self, ref: BlobRef, data: bytes) -> None:
        if not await self.has_blob(ref.digest):
            await self._uploads.send_bytes(data, ref.digest)

    async def _put_manifest(self, tag: str, data: bytes) -> None:
        """Send a manifest.

        A blob that another sends at this moment may seem to be missing: that passes.
        """
        ask = Ask(
            method="PUT",
            url=self._exchange.root / "manifests" / tag,
            headers={"Content-Type": artifacts.MANIFEST_TYPE},
            body=data,
            good=frozenset({200, 201, 202, 400, 404}),
            limit_bytes=1 << 16,
        )

        async def attempt() -> None:
            answer = await self._exchange.attempt(ask)
            if answer.status >= HTTPStatus.BAD_REQUEST:
                raise _refused_manifest(answer, self._url)

        try:
            await persevere(self._options, f"{self._url}: writing a document", attempt)
        except _LacksBlob as error:
            raise NotFound(error.message, kind="blob") from None

    async def _manifest(self, tag: str) -> tuple[artifacts.Artifact, str]:
        answer = await self._exchange.ask(
            Ask(
                method="GET",
                url=self._exchange.root / "manifests" / tag,
                headers=_MANIFEST,
                limit_bytes=artifacts.MAX_MANIFEST_BYTES,
            )
        )
        return artifacts.read_manifest(answer.body, tag), layout.digest_of(answer.body)

    async def _tags(self, url: URL) -> tuple[list[str], URL | None]:
        """A page of tags and where the next one is."""
        answer = await self._exchange.ask(Ask(method="GET", url=url, limit_bytes=_MAX_PAGE_BYTES))
        try:
            tags = msgspec.json.decode(answer.body, type=_Tags).tags or []
        except msgspec.MsgspecError as error:
            raise Unavailable(f"{self._url} lists no tags: {error}") from error
        following = _NEXT.search(answer.headers.get("Link", ""))
        return tags, answer.resolve(following[1]) if following else None

    async def _names(self, tags: Sequence[str]) -> list[str]:
        """The names of some documents, read in parallel; what was deleted meanwhile is left out."""
        names: list[str] = []
        failures: list[DsecError] = []

        async def read(tag: str) -> None:
            try:
                names.append((await self._manifest(tag))[0].name)
            except NotFound:
                return
            except DsecError as error:
                failures.append(error)

        async with anyio.create_task_group() as tasks:
            for tag in tags:
                tasks.start_soon(read, tag)
        if failures:
            raise failures[0]
        return names


def _no_blob(digest: str) -> NotFound:
    return NotFound(f"there is no blob {digest} in the store", kind="blob")


class _LacksBlob(Unavailable):
    """The registry does not know a blob that a manifest names; perhaps not yet."""


def _refused_manifest(answer: Answer, url: str) -> DsecError:
    said = answer.body.decode("utf-8", "replace")
    if "BLOB_UNKNOWN" in said:
        return _LacksBlob(f"{url} lacks a blob the document needs")
    return refused(answer.status, f"{url}: writing a document", said)
