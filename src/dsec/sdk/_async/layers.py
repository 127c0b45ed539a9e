"""Layers: workspaces and toolkits, laid over an image when a sandbox is created."""

from __future__ import annotations

import builtins
import re
from dataclasses import replace

import msgspec
from typing_extensions import override

from dsec.base.errors import Unavailable
from dsec.sdk import _aio
from dsec.sdk._async.call import Caller
from dsec.sdk._async.parcels import Parcel, Publication, parcel
from dsec.sdk._async.progress import ProgressStream
from dsec.sdk._http import Request
from dsec.sdk.sources import Source
from dsec.wire.public_v1 import ImageProgress, LayerKind, LayerReady, LayerView
from dsec.wire.sandbox import Heartbeat, StreamError

LayerEvent = ImageProgress | LayerReady
_EVENT: msgspec.json.Decoder[ImageProgress | LayerReady | Heartbeat | StreamError] = (
    msgspec.json.Decoder(ImageProgress | LayerReady | Heartbeat | StreamError)
)
DISCARD_S = 30.0
_NUMBERED = re.compile("v([0-9]{1,9})")


class LayerEvents(ProgressStream[LayerReady]):
    """ImageProgress as it goes, then LayerReady. A publication that breaks off is begun again."""

    def __init__(self, caller: Caller, layers: Layers, wanted: Publication) -> None:
        request = caller.upload(
            "POST",
            "/v1/layers/publish",
            {"kind": wanted.kind, "name": wanted.name, "description": wanted.description or None},
            repeatable=True,
            kind="application/x-tar",
        )
        super().__init__(caller, _EVENT, request)
        self._layers = layers
        self._wanted = wanted
        self._parcel: Parcel | None = None

    @override
    async def _ask(self) -> Request:
        if self._parcel is None:
            await self._prepare()
        return self._work

    async def _prepare(self) -> None:
        wanted = self._wanted
        name = wanted.name
        if not _version(name):
            name = await self._layers.next_version(wanted.kind, name)
        query = {**self._work.query, "name": name}
        self._parcel = await parcel(self._caller, wanted)
        self._work, self._body = replace(self._work, query=query), self._parcel.body

    @override
    async def __anext__(self) -> ImageProgress | LayerReady:
        """The next event.

        Raises:
            Conflict: the version exists with another content.
            DsecError: the publication failed.
        """
        try:
            event = await super().__anext__()
        except BaseException:
            await self._discard()
            raise
        if isinstance(event, LayerReady):
            await self._discard()
        return event

    @override
    async def aclose(self) -> None:
        """Stop listening."""
        await super().aclose()
        await self._discard()

    async def _discard(self) -> None:
        done, self._parcel = self._parcel, None
        if done is not None:
            with _aio.finishing(DISCARD_S):
                await _aio.in_thread(done.discard)

    async def wait(self) -> LayerView:
        """Read on to the end; the layer."""
        async with self:
            async for event in self:
                if isinstance(event, LayerReady):
                    return event.layer
        raise Unavailable("the publication ended without a layer")


class Layers:
    """The platform's workspaces and toolkits; `client.layers`."""

    def __init__(self, caller: Caller) -> None:
        self._caller = caller

    async def list(self, kind: LayerKind | None = None) -> builtins.list[LayerView]:
        """Every version there is, of one kind or both; of each name the oldest first."""
        request = self._caller.request("GET", "/v1/layers", {"kind": kind})
        return await self._caller.call(request, builtins.list[LayerView])

    async def get(self, kind: LayerKind, name: str) -> LayerView:
        """One version; without one in the name, the newest.

        Raises:
            NotFound: there is none of that name.
        """
        request = self._caller.request("GET", "/v1/layers/show", {"kind": kind, "name": name})
        return await self._caller.call(request, LayerView)

    async def remove(self, kind: LayerKind, name: str) -> None:
        """Forget a version.

        Raises:
            NotFound: there is none of that name.
            Conflict: a sandbox uses it.
        """
        query = {"kind": kind, "name": name}
        await self._caller.do(self._caller.request("DELETE", "/v1/layers", query))

    async def next_version(self, kind: LayerKind, name: str) -> str:
        """`name:v1`, or the first number above those there are."""
        numbers = [
            int(match[1])
            for view in await self.list(kind)
            if view.name.rpartition(":")[0] == name
            and (match := _NUMBERED.fullmatch(_version(view.name)))
        ]
        return f"{name}:v{max(numbers, default=0) + 1}"

    def publish(
        self,
        kind: LayerKind,
        name: str,
        source: Source,
        *,
        at: str | None = None,
        description: str = "",
        owner: str | None = None,
    ) -> LayerEvents:
        """Publish a version; iterate over it, or `await .wait()`.

        A version never changes: the same content once more is harmless, another is refused.

        Args:
            kind: "workspace" or "toolkit".
            name: `name:version`; without a version it gets the next `v<number>`.
            source: a local directory or tar file, a GitTree, or a SandboxTree.
            at: absolute path in the environment the content is put at; None: a workspace is at
                /workspace, a toolkit at /. The entries of a tar file have their places.
            description: a line for people.
            owner: `UID:GID` of everything, or `keep`; None: 0:0, but of a tar file or a sandbox as
                it is there.
        """
        wanted = Publication(kind, name, source, at, description, owner)
        return LayerEvents(self._caller, self, wanted)


def _version(name: str) -> str:
    return name.rpartition("/")[2].partition(":")[2]
