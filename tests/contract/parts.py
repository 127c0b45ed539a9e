"""What environments are made of, published for one test and removed after it."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dsec import DSecClient, DSecContainerRunArgs, GitTree, LayerView, NotFound, SandboxTree
from dsec.wire.public_v1 import ImageView, LayerKind
from tests.tars import Tar

Source = Path | GitTree | SandboxTree | Tar | Mapping[str, bytes]
"""What a layer is made from; the last two are made into a tar."""
_numbers = itertools.count(1)


def tar_of(files: Mapping[str, bytes]) -> Tar:
    """A tar of files, without entries for their directories."""
    tar = Tar()
    for name, content in files.items():
        tar.add(name, content=content)
    return tar


@dataclass
class Parts:
    """Publishes and imports; `close` removes all of it."""

    client: DSecClient
    place: Path
    backend: str
    layers: list[tuple[LayerKind, str]] = field(default_factory=list)
    images: list[str] = field(default_factory=list)

    def file(self, data: bytes) -> Path:
        """A file of these bytes."""
        path = self.place / f"archive-{next(_numbers)}"
        path.write_bytes(data)
        return path

    def name(self) -> str:
        """A name nobody else has."""
        return f"part{next(_numbers)}"

    async def layer(
        self, kind: LayerKind, source: Source, name: str | None = None, **given: Any
    ) -> LayerView:
        """Publish a version."""
        if isinstance(source, Mapping):
            source = tar_of(source)
        if isinstance(source, Tar):
            source = self.file(source.data())
        made = await self.client.layers.publish(kind, name or self.name(), source, **given).wait()
        self.layers.append((kind, made.name))
        return made

    async def workspace(self, source: Source, name: str | None = None, **given: Any) -> LayerView:
        return await self.layer("workspace", source, name, **given)

    async def toolkit(self, source: Source, name: str | None = None, **given: Any) -> LayerView:
        return await self.layer("toolkit", source, name, **given)

    async def image(self, path: Path) -> ImageView:
        """Import an archive."""
        made = await self.client.images.import_archive(path, self.name()).wait()
        self.images.append(made.name)
        return made

    def over(self, image: str, *toolkits: LayerView, **given: Any) -> DSecContainerRunArgs:
        """Arguments for a sandbox of an image and layers."""
        backend: Any = self.backend
        names = [toolkit.name for toolkit in toolkits]
        return DSecContainerRunArgs(image, toolkits=names, backend=backend, **given)

    async def close(self) -> None:
        """Remove everything; sandboxes have stopped."""
        for kind, name in self.layers:
            try:
                await self.client.layers.remove(kind, name)
            except NotFound:
                continue
        for image in self.images:
            await self.client.images.remove(image)
