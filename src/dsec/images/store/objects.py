"""A store in a bucket: S3 and what speaks like it (and, by the same library, GCS and Azure).

An object appears whole or not at all, so a blob that is there is complete. obstore does the
protocol, the signing and the connections, on threads of its own in Rust; here are only our names,
our errors and our time limits.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, TypeVar

import obstore
from obstore.exceptions import (
    AlreadyExistsError,
    BaseError,
    PermissionDeniedError,
    UnauthenticatedError,
)

from dsec.base.errors import (
    Conflict,
    DsecError,
    NotFound,
    PermissionDenied,
    StorageFull,
    Unavailable,
)
from dsec.images.store import layout
from dsec.images.store.deadlines import persevere, while_it_moves, within
from dsec.images.store.interface import (
    MAX_DOCUMENT_BYTES,
    BlobRef,
    DocumentKind,
    FoundBlob,
    nothing,
)
from dsec.images.store.options import StoreOptions
from dsec.images.store.refusals import is_full, told
from dsec.images.store.source import Source, opened

if TYPE_CHECKING:
    from obstore import ObjectMeta, PutMode
    from obstore.store import ClientConfig, ObjectStore, RetryConfig

T = TypeVar("T")

_LISTED_AT_ONCE = 1000
_UPLOADS_AT_ONCE = 3


class Connect(Protocol):
    """Makes obstore's client of a bucket; connecting itself happens when it is used."""

    def __call__(self, client: ClientConfig, retry: RetryConfig) -> ObjectStore:
        """With these time limits."""
        ...


class ObjectsStore:
    """Blobs and documents as objects under a prefix (names: `layout.py`)."""

    def __init__(self, url: str, connect: Connect, options: StoreOptions) -> None:
        """Make two clients: reads are repeated here, all else by the library."""
        self._url = url
        self._options = options
        self._reading = connect(*_limits(options.timeout_s, options.connect_timeout_s, 1))
        self._writing = connect(
            *_limits(options.upload_timeout_s, options.connect_timeout_s, options.attempts)
        )

    @property
    def url(self) -> str:
        """As it was opened; there is no secret in it."""
        return self._url

    async def put_blob(
        self, file: Path, digest: str, on_progress: Callable[[int], None] = nothing
    ) -> None:
        """Upload in parts; the bucket has the object only after the last. A broken one begins anew.

        Parts of an upload that was broken off stay in the bucket unseen, until its life-cycle rule
        for incomplete uploads removes them.
        """
        key = layout.blob_key(digest)
        if await self.has_blob(digest):
            return
        with while_it_moves(self._options.stalled_s, f"uploading to {self._url}") as moved:

            def progressed(done: int) -> None:
                moved()
                on_progress(done)

            async with opened(file, digest, self._options.part_bytes, progressed) as source:
                await self._upload(key, source)
                await self._verify(key, source.size_bytes)

    async def has_blob(self, digest: str) -> bool:
        """Ask for the object's head."""
        key = layout.blob_key(digest)
        try:
            await self._ask(lambda: obstore.head_async(self._reading, key))
        except FileNotFoundError:
            return False
        return True

    async def read_blob(self, digest: str, offset: int, length: int) -> bytes:
        """Ask for a range."""
        key = layout.blob_key(digest)
        if length == 0:
            return await self._nothing_of(digest)

        async def attempt() -> bytes:
            data = await obstore.get_range_async(self._reading, key, start=offset, length=length)
            if len(data) != length:
                raise Unavailable(f"{self._url} sent {len(data)} bytes instead of {length}")
            return data.to_bytes()

        try:
            return await self._ask(attempt)
        except FileNotFoundError:
            raise _no_blob(digest) from None

    async def list_blobs(self) -> AsyncIterator[FoundBlob]:
        """All objects below `blobs/`, a thousand at a time."""
        async for item in self._list("blobs"):
            if digest := layout.digest_at(item[0]):
                yield FoundBlob(digest, item[1], item[2])

    async def delete_blob(self, digest: str) -> None:
        """Delete the object."""
        await self._delete(layout.blob_key(digest))

    async def put_document(
        self,
        kind: DocumentKind,
        name: str,
        body: bytes,
        blobs: Sequence[BlobRef],
        *,
        absent: bool = False,
    ) -> None:
        """Write an object; what it refers to is for readers to know."""
        del blobs
        layout.check_body(body)
        key, data = layout.document_key(kind, name), layout.wrap(name, body)
        try:
            await within(
                self._options.stalled_s, self._url, lambda: self._put(key, data, absent=absent)
            )
        except AlreadyExistsError:
            # It may be ours: the answer was lost and the library asked again.
            if await self.get_document(kind, name) != body:
                raise Conflict(f"{kind} {name!r} is in the store already", kind=kind) from None

    async def get_document(self, kind: DocumentKind, name: str) -> bytes:
        """Read an object and check it against its header."""
        key = layout.document_key(kind, name)
        try:
            return layout.unwrap(await self._ask(lambda: self._get(key)), name)
        except FileNotFoundError:
            raise NotFound(f"there is no document {name!r} in the store", kind="document") from None

    async def list_documents(self, kind: DocumentKind) -> AsyncIterator[str]:
        """Names as the keys tell them; hashed ones from within."""
        async for key, size_bytes, _ in self._list(layout.kind_key(kind)):
            try:
                name = layout.name_in_key(key)
                yield name if name is not None else await self._name_within(key, size_bytes)
            except (ValueError, FileNotFoundError):
                continue  # not ours, or deleted meanwhile

    async def delete_document(self, kind: DocumentKind, name: str) -> None:
        """Delete the object."""
        await self._delete(layout.document_key(kind, name))

    def blob_path(self, digest: str) -> Path | None:
        """None: it is not on this host."""
        del digest
        return None

    async def aclose(self) -> None:
        """The library closes its connections when it is collected."""

    async def _upload(self, key: str, source: Source) -> None:
        if source.size_bytes <= source.part_bytes:
            await self._put(key, await source.whole())
        else:
            await self._put(key, source)
        source.sent()

    async def _put(self, key: str, data: bytes | Source, *, absent: bool = False) -> None:
        """Write an object.

        Raises:
            AlreadyExistsError: `absent`, and there is one; for a caller to look at.
        """
        try:
            if isinstance(data, bytes):
                mode: PutMode = "create" if absent else "overwrite"
                await obstore.put_async(self._writing, key, data, use_multipart=False, mode=mode)
                return
            await obstore.put_async(
                self._writing,
                key,
                data,
                chunk_size=data.part_bytes,
                max_concurrency=_UPLOADS_AT_ONCE,
            )
        except AlreadyExistsError:
            raise
        except FileNotFoundError as error:
            raise Unavailable(f"{self._url}: there is no such bucket") from error
        except BaseError as error:
            raise self._as_ours(error) from error

    async def _verify(self, key: str, size_bytes: int) -> None:
        meta = await self._ask(lambda: obstore.head_async(self._reading, key))
        if meta["size"] != size_bytes:
            await self._delete(key)
            raise Unavailable(f"{self._url} kept {meta['size']} of {size_bytes} bytes")

    async def _nothing_of(self, digest: str) -> bytes:
        if not await self.has_blob(digest):
            raise _no_blob(digest)
        return b""

    async def _name_within(self, key: str, size_bytes: int) -> str:
        length = min(size_bytes, layout.HEADER_BYTES)
        start = await self._ask(
            lambda: obstore.get_range_async(self._reading, key, start=0, length=length)
        )
        return layout.header_of(start.to_bytes()).name

    async def _get(self, key: str) -> bytes:
        answer = await obstore.get_async(self._reading, key)
        limit = layout.HEADER_BYTES + MAX_DOCUMENT_BYTES
        if answer.meta["size"] > limit:
            raise Unavailable(f"a document of {answer.meta['size']} bytes in {self._url}")
        return (await answer.bytes_async()).to_bytes()

    async def _delete(self, key: str) -> None:
        async def attempt() -> None:
            try:
                await obstore.delete_async(self._reading, key)
            except FileNotFoundError:
                return

        await self._ask(attempt)

    async def _list(self, prefix: str) -> AsyncIterator[tuple[str, int, float]]:
        """Key, size and time of all objects below a prefix.

        Repeated by the library, page by page: a listing that failed here could not go on.
        """
        pages = aiter(obstore.list(self._writing, prefix, chunk_size=_LISTED_AT_ONCE))
        while found := await within(self._options.stalled_s, self._url, lambda: self._page(pages)):
            for item in found:
                yield item["path"], item["size"], item["last_modified"].timestamp()

    async def _page(self, pages: AsyncIterator[Sequence[ObjectMeta]]) -> Sequence[ObjectMeta]:
        try:
            return await pages.__anext__()  # anext() does not take what the library returns
        except StopAsyncIteration:
            return ()
        except BaseError as error:
            raise self._as_ours(error) from error

    async def _ask(self, work: Callable[[], Awaitable[T]]) -> T:
        """A request, repeated while that may help.

        Raises:
            FileNotFoundError: for a caller to name what is missing.
        """

        async def attempt() -> T:
            try:
                return await work()
            except BaseError as error:
                raise self._as_ours(error) from error

        return await persevere(self._options, self._url, attempt)

    def _as_ours(self, error: BaseError) -> DsecError:
        said = told(str(error))
        if isinstance(error, PermissionDeniedError | UnauthenticatedError):
            return PermissionDenied(f"{self._url} refuses: {said}")
        if is_full(str(error)):
            return StorageFull(f"{self._url} is full: {said}")
        return Unavailable(f"{self._url}: {said}")


def _limits(
    timeout_s: float, connect_timeout_s: float, attempts: int
) -> tuple[ClientConfig, RetryConfig]:
    client: ClientConfig = {
        "allow_http": True,
        "timeout": timedelta(seconds=timeout_s),
        "connect_timeout": timedelta(seconds=connect_timeout_s),
    }
    retry: RetryConfig = {
        "max_retries": attempts - 1,
        "retry_timeout": timedelta(seconds=timeout_s * attempts),
    }
    return client, retry


def _no_blob(digest: str) -> NotFound:
    return NotFound(f"there is no blob {digest} in the store", kind="blob")
