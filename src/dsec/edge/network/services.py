"""Named services of a node: what `pypi` means here is where this node's own pip looks, and so on.

The operator's file says what is not to be found that way; for a name it has, nothing is looked for:

    [services]
    pypi = ["tcp://mirror.example.org:443"]
    wiki = ["tcp://wiki.example.org:443", "tcp://192.0.2.7:8080"]
    npm = []                        # none here
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import anyio

from dsec.base.errors import InvalidRequest
from dsec.edge.network.discovery import FINDERS, Found, Host, key_of
from dsec.edge.network.grammar import is_service, read_key
from dsec.edge.network.policy import Service
from dsec.kit.blocking import in_thread
from dsec.kit.config import load_config
from dsec.wire.public_v1 import Capability

ADVICE = "set up the tool on this node, or name the service in `services_file`"

NOT_YET = Capability(
    name="services",
    available=True,
    needed_for="network rules that name a service",
    detail="looked for when a rule first names one; `dsec doctor` shows them",
)
Table = Mapping[str, Service]


@dataclass(frozen=True, slots=True, kw_only=True)
class ServicesFile:
    """The operator's file."""

    services: dict[str, list[str]] = field(default_factory=dict)


class Services:
    """The services of a node, looked for when a rule first names one.

    Not at the start: tools that have to be asked take a second or so, and an edge that comes back is
    waited for.
    """

    def __init__(self, look: Callable[[], Table]) -> None:
        """Of what `look` finds; it may block."""
        self._look = look
        self._table: Table | None = None
        self._turn = anyio.Lock()

    @classmethod
    def of(cls, table: Table) -> Services:
        """Services that are known."""
        services = cls(lambda: table)
        services._table = table
        return services

    async def table(self) -> Table:
        """All of them, those included that are not to be had; waits until they are found."""
        async with self._turn:
            if self._table is None:
                self._table = await in_thread("scan", self._look)
            return self._table

    def capabilities(self) -> list[Capability]:
        """What each is, or why it is not to be had; one word for all before they are looked for."""
        return [NOT_YET] if self._table is None else capabilities(self._table)


def capabilities(table: Table) -> list[Capability]:
    """What each service is, or why it is not to be had."""
    return [_capability(service) for _, service in sorted(table.items())]


def _capability(service: Service) -> Capability:
    there = bool(service.keys)
    return Capability(
        name=f"service:{service.name}",
        available=there,
        needed_for=f"the network rule `{service.name}`",
        detail=f"{' '.join(service.keys)} ({service.source})" if there else service.source,
        advice="" if there else ADVICE,
    )


def services_of(path: str, host: Host | None = None) -> Callable[[], Table]:
    """How to find a node's services; the operator's file is read at once.

    Args:
        path: of that file; "" = there is none.
        host: whose tools count; None = this machine.

    Raises:
        InvalidRequest: the file is wrong; the message says where.
    """
    return partial(find_services, read_file(Path(path)) if path else {}, host or Host())


def read_file(path: Path) -> dict[str, Service]:
    """The operator's services.

    Raises:
        InvalidRequest: it cannot be read, or an entry is wrong.
    """
    told = load_config(path, ServicesFile).services
    return {name: _told(path, name, keys) for name, keys in told.items()}


def _told(path: Path, name: str, keys: list[str]) -> Service:
    if not is_service(name):
        raise InvalidRequest(
            f"{path}: {name!r} is no name for a service: letters, digits and hyphens"
        )
    for key in keys:
        try:
            inner = read_key(key).service
        except InvalidRequest as exc:
            raise InvalidRequest(f"{path}: {name}: {exc.message}") from None
        if inner:
            raise InvalidRequest(f"{path}: {name}: {key!r} is a service itself")
    return Service(
        name=name, keys=tuple(keys), source=str(path) if keys else f"{path} says there is none"
    )


def find_services(told: Table, host: Host) -> dict[str, Service]:
    """Those the operator named, and what the tools of the node say of the others. Blocks."""
    wanted = {name: finder for name, finder in FINDERS.items() if name not in told}
    with ThreadPoolExecutor(max_workers=len(FINDERS), thread_name_prefix="services") as threads:
        found = threads.map(lambda name: _find(name, wanted[name], host), wanted)
        return {**dict(zip(wanted, found, strict=True)), **told}


def _find(name: str, finder: Callable[[Host], Found], host: Host) -> Service:
    try:
        found = finder(host)
    except (LookupError, OSError) as exc:
        return Service(name=name, source=str(exc.args[0] if exc.args else exc))
    keys = tuple(dict.fromkeys(key for url in found.urls if (key := _usable(url))))
    if not keys:
        return Service(name=name, source="no address of the Web in its settings")
    return Service(name=name, keys=keys, source=", ".join(dict.fromkeys(found.sources)))


def _usable(url: str) -> str:
    try:
        read_key(key := key_of(url))
    except InvalidRequest:
        return ""
    return key
