"""A sandbox's network, looked at and given other rules while it lives.

What enforces them is the backend's.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING

import msgspec

from dsec.base.errors import Conflict, Unsupported
from dsec.edge import changing
from dsec.edge.backends.interface import NetworkOf
from dsec.edge.network.grammar import is_service
from dsec.edge.network.policy import caveats, parse
from dsec.edge.record import SandboxRecord, changeable
from dsec.wire.sandbox import NetworkView, SandboxSpec

if TYPE_CHECKING:
    from dsec.edge.backends.interface import Backend
    from dsec.edge.lifecycle.journal import Journal
    from dsec.edge.lifecycle.owner import Owner
    from dsec.edge.network.services import Services

ABOUT = "network_rules: "
"""What warnings about rules begin with."""


def connected(spec: SandboxSpec) -> SandboxSpec:
    """The specification with what it says of a network said outright: it keeps that for life."""
    if spec.network or not any(spec.network_rules.values()):
        return spec
    return msgspec.structs.replace(spec, network=True)


async def check(rules: Mapping[str, bool], services: Services) -> list[str]:
    """Check rules before anything is done by them; what they do not do, in words.

    Raises:
        InvalidRequest: a rule is wrong. Unsupported: this node knows no such service.
    """
    table = await services.table() if any(map(is_service, rules)) else {}
    return caveats(parse(rules, table), table)


async def check_all(spec: SandboxSpec, services: Services) -> list[str]:
    """Check the rules of a specification and of its phases; raises and answers as `check`."""
    for phase in spec.phases:
        await check(phase.network_rules or {}, services)
    return await check(spec.network_rules, services)


async def look(backend: Backend, record: SandboxRecord) -> NetworkView:
    """What the network of a sandbox is, and what it was denied."""
    if record.spec.network and isinstance(backend, NetworkOf):
        return await backend.network(record)
    return NetworkView(rules=record.spec.network_rules)


async def change(owner: Owner, rules: dict[str, bool], services: Services) -> None:
    """Give a live sandbox other rules in place of all it has. All of them or none.

    Raises:
        SandboxGone: it is over. InvalidRequest: a rule is wrong. Conflict: it was made without a
        network. Unsupported: its host has none for sandboxes, or knows no such service.
    """
    said = await check(rules, services)
    await changing.asked(owner, partial(_change, rules, said))


async def _change(
    rules: dict[str, bool],
    said: list[str],
    backend: Backend,
    journal: Journal,
    record: SandboxRecord,
) -> SandboxRecord:
    if not isinstance(backend, NetworkOf):
        raise Unsupported(f"this node has no network for sandboxes of backend {backend.name}")
    if not record.spec.network:
        raise Conflict(
            f"{record.id} was made without a network, and can be given none: create one with "
            "network_rules that allow something, or with network=true",
            kind="network",
        )
    kept = [words for words in record.warnings if not words.startswith(ABOUT)]
    wanted = msgspec.structs.replace(changeable(record), network_rules=rules)
    base = msgspec.structs.replace(record, warnings=kept)
    words = changing.warnings(backend, base, wanted) + said
    wanted = msgspec.structs.replace(wanted, warnings=words)
    return await changing.bring(journal, record, wanted, backend.apply_network)
