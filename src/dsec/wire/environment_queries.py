"""Query strings about layers and environments: the same from client to apiserver and on to edges."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta, Struct, field

from dsec.wire.phases import Name
from dsec.wire.public_v1 import EnvironmentRef, LayerKind, LayerName


class LayersQuery(Struct, kw_only=True, forbid_unknown_fields=True):
    """Which layers; no kind = both."""

    kind: LayerKind | None = None


class LayerQuery(Struct, kw_only=True, forbid_unknown_fields=True):
    """One layer, `name:version`; without a version, the newest."""

    kind: LayerKind
    name: LayerName


class PublishQuery(LayerQuery, kw_only=True, forbid_unknown_fields=True):
    """What the layer in the body is to be called."""

    description: Annotated[str, Meta(max_length=1000)] = ""


class TraceQuery(Struct, kw_only=True, forbid_unknown_fields=True):
    """Which trace of which environment; `toolkit` may be repeated, in order."""

    image: Annotated[str, Meta(min_length=1, max_length=512)]
    workspace: LayerName | None = None
    toolkit: LayerName | list[LayerName] = field(default_factory=list)
    trace: Annotated[str, Meta(max_length=128)] = ""

    def environment(self) -> EnvironmentRef:
        """What was asked about."""
        given = self.toolkit
        toolkits = [given] if isinstance(given, str) else given
        return EnvironmentRef(image=self.image, workspace=self.workspace, toolkits=toolkits)


class SnapshotsQuery(Struct, kw_only=True, forbid_unknown_fields=True):
    """Whose snapshots."""

    project: Annotated[str, Meta(min_length=1, max_length=256)]


class SnapshotQuery(SnapshotsQuery, kw_only=True, forbid_unknown_fields=True):
    """One of them."""

    name: Name


class CollectQuery(Struct, kw_only=True, forbid_unknown_fields=True):
    """Whether only to say what would be removed."""

    dry_run: bool = False
