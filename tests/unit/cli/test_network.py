from __future__ import annotations

import json as js

import pytest

from dsec import Conflict
from dsec.cli import completing
from dsec.wire.public_v1 import Capability, NodeView
from dsec.wire.sandbox import DeniedTraffic, NetworkView, Recorded
from tests.unit.cli.conftest import Dsec
from tests.unit.sdk.fake import SANDBOX, FakePlatform, error, json, lines

VIEW = NetworkView(
    enabled=True,
    address4="192.0.2.7",
    address6="2001:db8::7",
    rules={"pypi": True, "10.0.0.0/8": False},
    sent_packets=3,
    sent_bytes=2048,
    denied_packets=9,
    denied=[
        DeniedTraffic(
            reason="rule", first_at=1.0, last_at=2.0, count=7, protocol="tcp", address="10.0.0.1",
            port=22,
        ),
        DeniedTraffic(
            reason="name", first_at=1.0, last_at=2.0, protocol="dns", name="evil\x1b[31m.test"
        ),
        DeniedTraffic(
            reason="never", first_at=1.0, last_at=2.0, protocol="udp", address="fe80::1", port=53
        ),
    ],
)  # fmt: skip


def test_show(platform: FakePlatform, dsec: Dsec) -> None:
    platform.sandbox("GET", "/network", json(VIEW))
    done = dsec("network", "show", SANDBOX)
    assert (done.exit_code, done.stderr) == (0, "")
    shown = [line.split() for line in done.stdout.splitlines()]
    assert ["addresses", "192.0.2.7", "2001:db8::7"] in shown
    assert ["sent", "3", "packets,", "2.0", "KiB"] in shown
    assert ["10.0.0.0/8", "denied"] in shown
    assert ["pypi", "allowed"] in shown
    rows = [line[:5] for line in shown if line[:1] in (["rule"], ["name"], ["never"])]
    assert rows == [
        ["rule", "tcp", "10.0.0.1:22", "7", rows[0][4]],
        ["name", "dns", "evil\\x1b[31m.test", "1", rows[1][4]],
        ["never", "udp", "[fe80::1]:53", "1", rows[2][4]],
    ]
    assert js.loads(dsec("network", "show", SANDBOX, "--json").stdout)["denied"][0]["count"] == 7


def test_show_of_one_without(platform: FakePlatform, dsec: Dsec) -> None:
    platform.sandbox("GET", "/network", json(NetworkView(detail="simulated")))
    done = dsec("network", "show", SANDBOX)
    assert "none: made without one" in done.stdout
    assert "RULE" not in done.stdout
    assert "DENIED" not in done.stdout
    assert done.stderr == "simulated\n"


def test_set(platform: FakePlatform, dsec: Dsec) -> None:
    platform.sandbox("PUT", "/network", json(VIEW))
    done = dsec("network", "set", SANDBOX, "--allow", "pypi", "--deny", "10.0.0.0/8")
    assert (done.exit_code, done.stdout) == (0, f"{SANDBOX}\n")
    sent = platform.calls("PUT", "/network")[0].json()
    assert sent == {"rules": {"pypi": True, "10.0.0.0/8": False}}
    assert dsec("network", "set", "--none", SANDBOX, "--json").exit_code == 0
    assert platform.calls("PUT", "/network")[1].json() == {"rules": {}}
    for words in ([], ["--none", "--allow", "pypi"]):
        done = dsec("network", "set", SANDBOX, *words)
        assert (done.exit_code, "--none" in done.stderr) == (64, True)
    platform.sandbox("PUT", "/network", error(Conflict("made without a network", kind="network")))
    done = dsec("network", "set", SANDBOX, "--none")
    assert (done.exit_code, "without a network" in done.stderr) == (73, True)


def test_the_grammar_is_in_the_help(dsec: Dsec) -> None:
    said = dsec("network", "set", "--help").stdout
    for words in ("PLACE", "*.example.org", "icmp://", ":PORT-PORT", "the denial"):
        assert words in said, "markup of the help has eaten it"


def test_a_change_is_short_in_a_trajectory(platform: FakePlatform, dsec: Dsec) -> None:
    args = {"rules": {"pypi": True, "npm": False}}
    entry = Recorded(seq=1, op="network", at=1.0, ended_at=2.0, outcome="ok", args=args)
    platform.sandbox("GET", "/trajectory", lines(entry))
    assert "rules=+pypi -npm" in dsec("trace", SANDBOX).stdout


@pytest.mark.usefixtures("url")
def test_services_are_completed(platform: FakePlatform) -> None:
    known = [
        Capability(name="service:pypi", available=True, detail="tcp://a.test:443"),
        Capability(name="service:perl", available=False),
        Capability(name="bpf", available=True),
    ]
    nodes = [NodeView(id=name, version="1", backends=[], capabilities=known) for name in "ab"]
    platform.on("GET", "/v1/nodes", json(nodes))
    assert completing.rules("p") == [("pypi", "tcp://a.test:443")]
    assert completing.rules("x") == []
