"""The page about networks says what the rules do."""

from __future__ import annotations

import ast
import ipaddress
import json
import re
from pathlib import Path
from typing import get_args

import pytest

from dsec.edge.network import policy
from dsec.edge.network.discovery import FINDERS
from dsec.edge.network.policy import Policy, Service, Span, decides, flatten, parse
from dsec.edge.network.services import read_file
from dsec.wire.sandbox import DenialReason

PAGE = (Path(__file__).parents[4] / "docs" / "howto" / "network.md").read_text()
SERVICES = {name: Service(name=name, keys=(f"{name}.test:443",)) for name in FINDERS}


def rows(heading: str) -> list[list[str]]:
    """Of the tables below a heading, without the first two lines of each."""
    section = PAGE.partition(f"## {heading}\n")[2].partition("\n## ")[0]
    tables = re.findall(r"(?:^\|.*\|\n)+", section, re.MULTILINE)
    return [
        [cell.strip() for cell in line.strip("|").split("|")]
        for table in tables
        for line in table.splitlines()[2:]
    ]


RULES = rows("Rules")


@pytest.mark.parametrize("key", [row[0].strip("`") for row in RULES if len(row) == 2])
def test_each_key_of_the_page_is_one(key: str) -> None:
    assert parse({key: True}, SERVICES).rules == {key: True}


@pytest.mark.parametrize("row", [row for row in RULES if len(row) == 3], ids=lambda row: row[1])
def test_each_example_of_the_page_is_true(row: list[str]) -> None:
    policy = parse(json.loads(row[0].strip("`")), {})
    place, _, port = row[1].strip("`").rpartition(":")
    allowed = any(
        span.protocol == "tcp" and span.low <= int(port) <= span.high
        for span in _spans(policy, place)
    )
    assert allowed is (row[2] == "allowed")


def _spans(policy: Policy, place: str) -> tuple[Span, ...]:
    if not place[0].isdigit():
        return decides(policy.names, place)
    address = ipaddress.IPv4Address(place)
    table = {n: s for n, s in flatten(policy).items() if n.version == 4 and address in n}
    return table[max(table, key=lambda network: network.prefixlen)]


def test_limits_services_and_reasons_are_all_named() -> None:
    assert f"At most {policy.MAX_RULES:,}" in PAGE
    assert f"at most {policy.MAX_SPANS} separate ranges" in PAGE
    assert all(f"`{name}`" in PAGE for name in FINDERS)
    named = set(re.findall(r"`(\w+)`", " ".join(row[0] for row in rows("What was denied"))))
    assert named == set(get_args(DenialReason))


def test_the_operators_file_is_one(tmp_path: Path) -> None:
    (text,) = re.findall(r"```toml\n(.*?)```", PAGE, re.DOTALL)
    file = tmp_path / "services.toml"
    file.write_text(text)
    assert {name: bool(service.keys) for name, service in read_file(file).items()} == {
        "pypi": True,
        "wiki": True,
        "npm": False,
    }


def test_the_program_is_python() -> None:
    (program,) = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    ast.parse(program)
