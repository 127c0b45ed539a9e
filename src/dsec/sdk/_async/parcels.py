"""The content of a layer, ready to be sent as often as it takes."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, replace
from pathlib import Path

from dsec.base.errors import InvalidRequest, NotFound
from dsec.sdk import _aio, _git, _layer_tar
from dsec.sdk._async.call import Body, Caller
from dsec.sdk._async.files import Files
from dsec.sdk._http import segment
from dsec.sdk._layer_tar import Manner
from dsec.sdk.sources import GitTree, History, SandboxTree, Source
from dsec.wire.public_v1 import LayerKind

ROOT_OWNED = (0, 0)
HOMES: dict[LayerKind, str] = {"workspace": "/workspace", "toolkit": "/"}
"""Where the content goes if nothing is said."""
HISTORIES: dict[LayerKind, History] = {"workspace": "commit", "toolkit": "none"}


@dataclass(frozen=True, slots=True)
class Publication:
    """What is published, as it was asked for."""

    kind: LayerKind
    name: str
    source: Source
    at: str | None
    description: str
    owner: str | None


@dataclass(frozen=True, slots=True)
class Parcel:
    """A body, and what is to be taken away when it has been sent."""

    body: Body
    discard: Callable[[], None] = lambda: None


async def parcel(caller: Caller, wanted: Publication) -> Parcel:
    """Make the source of a publication ready.

    Args:
        caller: of the calls that read a sandbox.
        wanted: what is to be published.

    Raises:
        NotFound: there is no such file, repository, commit, sandbox.
        InvalidRequest: a value is wrong.
        Unsupported: there is no git here.
    """
    at = HOMES[wanted.kind] if wanted.at is None else wanted.at
    _layer_tar.prefix_of(at)
    owner = None if wanted.owner is None else _layer_tar.parse_owner(wanted.owner)
    match wanted.source:
        case GitTree() as tree:
            history = tree.history or HISTORIES[wanted.kind]
            return await _of_commit(replace(tree, history=history), at, owner or ROOT_OWNED)
        case SandboxTree() as tree:
            return await _of_sandbox(caller, tree, at, Manner(owner))
        case str() | Path() as path:
            kept = ROOT_OWNED if wanted.owner is None else owner
            unmoved = wanted.at is None and wanted.owner is None
            return await _of_path(Path(path), at, Manner(kept), unmoved=unmoved)


async def _of_path(path: Path, at: str, manner: Manner, *, unmoved: bool) -> Parcel:
    if await _aio.in_thread(path.is_dir):
        return Parcel(_packed(path, at, manner))
    if not await _aio.in_thread(path.is_file):
        raise NotFound(f"no local file or directory {path}", kind="local_path")
    if not unmoved:
        raise InvalidRequest(f"{path} is a tar: what is in it has its place and owner")
    return Parcel(lambda: _aio.read_file(path))


def _packed(root: Path, at: str, manner: Manner) -> Body:
    def body() -> AsyncIterator[bytes]:
        return _aio.iterate_blocking(_layer_tar.pack_layer(root, at, manner))

    return body


async def _of_commit(source: GitTree, at: str, owner: tuple[int, int]) -> Parcel:
    checkout = await _aio.in_thread(lambda: _git.check_out(source))
    manner = Manner(owner, mtime=checkout.committed_at, plain_modes=True)
    return Parcel(_packed(checkout.directory, at, manner), checkout.remove)


async def _of_sandbox(caller: Caller, source: SandboxTree, at: str, manner: Manner) -> Parcel:
    """A sandbox's tree, piped through: nothing of it is kept here."""
    files = Files(caller, f"/v1/sandboxes/{segment(source.sandbox)}")
    info = await files.stat(source.path, user=source.user)
    if not info.is_dir:
        raise InvalidRequest(f"{source.path} is a {info.kind}, not a directory")
    top = _layer_tar.directory(at, info.mode, manner.owner or (info.uid, info.gid), info.mtime)

    async def body() -> AsyncIterator[bytes]:
        if top:
            yield top
        async with files.get_tar(source.path, user=source.user) as stream:
            moved = _layer_tar.rebase(_aio.pulling(stream), at, manner)
            async for data in _aio.iterate_blocking(moved):
                yield data

    return Parcel(body)
