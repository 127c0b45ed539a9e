"""Verbs about what sandboxes may reach: network show, network set."""

from __future__ import annotations

from typing import Annotated

import typer

from dsec.base.clock import SystemClock
from dsec.base.errors import InvalidRequest
from dsec.base.quantity import format_size
from dsec.cli import parsing
from dsec.cli.boundary import client, verb
from dsec.cli.options import Allow, Deny, Json, SandboxId
from dsec.cli.output import Cell, age, note, print_json, print_table
from dsec.wire.sandbox import DeniedTraffic, NetworkView


@verb
async def show(sandbox: SandboxId, *, json: Json = False) -> None:
    """Show what a sandbox may reach, its traffic, and what it was denied, the latest last.

    Example: dsec network show sbx...
    """
    async with client() as dsec:
        view = await (await dsec.get(sandbox)).network()
    if json:
        print_json(view)
        return
    _show_facts(view)
    if view.rules:
        typer.echo("")
        rules = sorted(view.rules.items())
        print_table(["RULE", "SAYS"], [[rule, _says(allowed)] for rule, allowed in rules])
    if view.denied:
        now = SystemClock().now()
        typer.echo("")
        columns = ["DENIED", "PROTOCOL", "ADDRESS", "NAME", "COUNT", "FIRST", "LAST"]
        print_table(columns, [_denied_row(entry, now) for entry in view.denied])


def _show_facts(view: NetworkView) -> None:
    addresses = " ".join(filter(None, (view.address4, view.address6)))
    facts: list[tuple[str, Cell]] = [
        ("network", "yes" if view.enabled else ("none: made without one", "yellow")),
        ("addresses", addresses),
        ("sent", _traffic(view.sent_packets, view.sent_bytes)),
        ("received", _traffic(view.received_packets, view.received_bytes)),
        ("denied", f"{view.denied_packets} packets"),
    ]
    print_table(["FACT", "VALUE"], [list(fact) for fact in facts])
    if view.detail:
        note(view.detail)


def _traffic(packets: int, size_bytes: int) -> str:
    return f"{packets} packets, {format_size(size_bytes)}"


def _says(allowed: bool) -> Cell:
    return ("allowed", "green") if allowed else ("denied", "red")


def _denied_row(entry: DeniedTraffic, now: float) -> list[Cell]:
    address = f"[{entry.address}]" if ":" in entry.address else entry.address
    return [
        (entry.reason, "red"),
        entry.protocol,
        f"{address}:{entry.port}" if entry.port else entry.address,
        entry.name,
        str(entry.count),
        age(now - entry.first_at),
        age(now - entry.last_at),
    ]


@verb
async def set_rules(
    sandbox: SandboxId,
    *,
    allow: Allow = None,
    deny: Deny = None,
    none: Annotated[bool, typer.Option("--none", help="Allow nothing.")] = False,
    json: Json = False,
) -> None:
    """Replace all network rules of a sandbox; what they forbid is cut at once.

    A rule is PLACE: an address or network, a name (example.org), all names below one (*.example.org), a
    service of the node (pypi), or * for everywhere. With tcp://, udp:// or icmp:// before it, and :PORT
    or :PORT-PORT behind it, it is about that alone; else about tcp and udp, and of addresses icmp. The
    most specific rule that fits decides, and of two as specific the denial; what no rule allows is
    denied.

    Examples:
      dsec network set sbx... --allow pypi --allow '*.example.org:443'

      dsec network set sbx... --allow 'tcp://10.0.0.0/8' --deny 10.1.0.0/16

      dsec network set sbx... --none
    """
    if none == bool(allow or deny):
        raise InvalidRequest("say --allow and --deny rules, which replace all it has, or --none")
    async with client() as dsec:
        box = await dsec.get(sandbox)
        view = await box.set_network(parsing.network(allow or [], deny or []))
    if json:
        print_json(view)
        return
    if view.detail:
        note(f"{box.id}: {view.detail}")
    typer.echo(box.id)
