"""The journaled facts of one sandbox: what is needed to reach it, and to remove it, after a crash."""

from __future__ import annotations

from pathlib import Path

import msgspec
from msgspec import Raw, Struct, field

from dsec.base.states import SandboxState
from dsec.edge.phases import by_name, in_phase
from dsec.images.records import Environment, EnvironmentPart
from dsec.wire.phases import QosClass
from dsec.wire.public_v1 import ImageView
from dsec.wire.sandbox import Limits, SandboxSpec, SandboxView


class SandboxRecord(Struct, frozen=True, kw_only=True):
    """Written before anything of the sandbox is made; never changed afterwards."""

    id: str
    project: str
    spec: SandboxSpec
    environment: Environment
    """As it was resolved: a name may mean another content tomorrow."""
    created_at: float
    uid_base: int
    """First host id of its own run of 65,536; never shared with another live sandbox."""
    directory: str
    """Its own directory on the node; the journal is in it, and all that a backend stores."""
    socket: str
    """Where aether listens, for backends that use a Unix socket."""
    warnings: list[str] = field(default_factory=list)
    """What was asked for and is not to be had here."""
    created_by: str = ""
    """The principal who asked for it."""
    parent: str = ""
    """The sandbox it was forked from."""
    history: str = ""
    """File with the trajectory it begins with; read once, when its directory is made."""
    inherited: int = 0
    """Entries of that file that are its own too."""
    phase: str = ""
    """The one it is in, if its specification has any; its specification is as in that one."""
    unclean: bool = False
    """It stands on what another left behind: forked, or restored from a snapshot with residue."""

    @property
    def image(self) -> ImageView:
        """The image of its environment."""
        return self.environment.image

    @property
    def path(self) -> Path:
        """Its own directory."""
        return Path(self.directory)

    def view(self, node: str, state: SandboxState) -> SandboxView:
        """What is shown of it, as far as it is written here."""
        spec = self.spec
        return SandboxView(
            id=self.id,
            node=node,
            backend=spec.backend,
            image=spec.image,
            image_digest=self.image.digest,
            workspace=self.environment.workspace,
            toolkits=self.environment.toolkits,
            state=state,
            created_at=self.created_at,
            limits=spec.limits,
            ttl_running_stop=spec.ttl_running_stop,
            max_lifetime_s=spec.max_lifetime_s,
            labels=spec.labels,
            project=self.project,
            warnings=[*self.warnings],
            parent=self.parent,
            idle_action=spec.idle_action,
            qos=spec.qos,
            job=spec.job or "",
            step=spec.step,
            group=spec.group,
            epoch=spec.epoch,
            security=spec.security,
            phase=self.phase,
        )


class Changed(Struct, frozen=True, kw_only=True):
    """What has come in place of a part of a record; a record itself never changes."""

    limits: Limits
    qos: QosClass
    network_rules: dict[str, bool] | None = None
    """None: the record's; it was written when they could not change."""
    phase: str = ""
    """"": it has none, or it was written when there were none."""
    warnings: list[str] = field(default_factory=list)
    before: Changed | None = None
    """What it had, until these are known to hold."""

    def over(self, record: SandboxRecord) -> SandboxRecord:
        """The record with these."""
        rules = record.spec.network_rules if self.network_rules is None else self.network_rules
        name = self.phase or record.phase
        spec = in_phase(record.spec, by_name(record.spec, name)) if name else record.spec
        spec = msgspec.structs.replace(spec, limits=self.limits, qos=self.qos, network_rules=rules)
        return msgspec.structs.replace(record, spec=spec, phase=name, warnings=self.warnings)


def changeable(record: SandboxRecord) -> Changed:
    """What a record says now of what can change."""
    spec = record.spec
    return Changed(
        limits=spec.limits,
        qos=spec.qos,
        network_rules=spec.network_rules,
        phase=record.phase,
        warnings=record.warnings,
    )


def read_record(data: bytes) -> SandboxRecord:
    """A record as the journal has it; those of before environments name an image alone.

    Raises:
        MsgspecError: it makes no sense.
    """
    facts = msgspec.json.decode(data, type=dict[str, Raw])
    if "environment" not in facts and "image" in facts:
        image = msgspec.json.decode(facts["image"], type=ImageView)
        whole = EnvironmentPart(label="image", layers=image.layers)
        facts["environment"] = Raw(msgspec.json.encode(Environment(image=image, parts=[whole])))
    return msgspec.json.decode(msgspec.json.encode(facts), type=SandboxRecord)
