"""What a sandbox may reach: rules as they are given, kept, replaced and refused."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

import anyio
import pytest

from dsec import Conflict, DSecClient, InvalidRequest, Sandbox
from tests.contract import image
from tests.contract.capabilities import needs
from tests.contract.conftest import MakeArgs
from tests.contract.server import Server

PAGE = Path(__file__).parents[2] / "docs" / "howto" / "network.md"
RULES = {"pypi": True, "*.example.org:443": True, "10.0.0.0/8": False}


async def test_a_sandbox_has_no_network_unless_asked_for(sandbox: Sandbox) -> None:
    view = await sandbox.network()
    assert (view.enabled, view.rules, view.denied) == (False, {}, [])


@needs("network")
async def test_rules_are_those_of_its_creation_until_they_are_replaced(
    client: DSecClient, args: MakeArgs
) -> None:
    async with await client.run_container(args(network_rules=RULES)) as sandbox:
        view = await sandbox.network()
        assert (view.enabled, view.rules) == (True, RULES)
        changed = await sandbox.set_network({"tcp://192.0.2.0/24:8000-9000": True})
        assert changed.rules == {"tcp://192.0.2.0/24:8000-9000": True}
        assert (await sandbox.set_network({})).rules == {}
        assert (await sandbox.network()).enabled
        told = [entry async for entry in client.trajectory(sandbox.id, ops=["network"])]
        assert [entry.args["rules"] for entry in told] == [changed.rules, {}]


@needs("network")
async def test_a_network_may_be_asked_for_before_anything_is_allowed(
    client: DSecClient, args: MakeArgs
) -> None:
    async with await client.run_container(args(network=True)) as sandbox:
        assert (await sandbox.network()).enabled
        assert (await sandbox.set_network(RULES)).rules == RULES


@needs("network")
async def test_one_made_without_a_network_is_given_none(sandbox: Sandbox) -> None:
    with pytest.raises(Conflict, match="network_rules"):
        await sandbox.set_network(RULES)


@needs("network")
async def test_a_paused_one_is_given_rules_without_waking_it(
    client: DSecClient, args: MakeArgs
) -> None:
    async with await client.run_container(args(network_rules=RULES)) as sandbox:
        await sandbox.pause()
        await sandbox.set_network({"192.0.2.1": True})
        assert (await sandbox.network()).rules == {"192.0.2.1": True}
        assert (await client.get(sandbox.id)).view.state == "paused"


@pytest.mark.parametrize(
    ("key", "right"),
    [
        ("10.0.0.1/8", "10.0.0.0/8"),
        ("https://example.org", "tcp://"),
        ("no-such-service", "no such service"),
        ("example.org:0", "1 to 65535"),
    ],
)
async def test_a_wrong_rule_is_refused_and_told(
    client: DSecClient, args: MakeArgs, key: str, right: str
) -> None:
    with pytest.raises(InvalidRequest) as caught:
        await client.run_container(args(network_rules={key: True}))
    assert key in caught.value.message
    assert right in caught.value.message


async def test_the_node_lists_its_services(client: DSecClient, args: MakeArgs) -> None:
    with pytest.raises(InvalidRequest):  # whoever names one waits until they are found
        await client.run_container(args(network_rules={"no-such-service": True}))
    (node,) = await client.nodes()
    services = {entry.name for entry in node.capabilities if entry.name.startswith("service:")}
    assert {"service:pypi", "service:npm", "service:debian"} <= services


@needs("network")
async def test_the_command_shows_and_sets(
    client: DSecClient, args: MakeArgs, server: Server, tmp_path: Path
) -> None:
    async with await client.run_container(args(network=True)) as sandbox:
        done = await server.dsec(
            "network", "set", sandbox.id, "--allow", "pypi", "--deny", "10.0.0.0/8", cwd=tmp_path
        )
        assert (done.returncode, done.stdout.decode()) == (0, f"{sandbox.id}\n")
        shown = (await server.dsec("network", "show", sandbox.id, cwd=tmp_path)).stdout.decode()
        assert ["10.0.0.0/8", "denied"] in [line.split() for line in shown.splitlines()]


@needs("network")
async def test_the_program_of_the_page_runs(server: Server, tmp_path: Path) -> None:
    (program,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    program = program.replace('"debian"', f'"{image.NAME}", backend="{server.backend}"')
    env = {**os.environ, "DSEC_API_URL": server.url, "DSEC_API_KEY": server.key}
    env |= {"HOME": str(tmp_path), "TMPDIR": str(tmp_path)}
    done = await anyio.run_process([sys.executable, "-c", program], env=env, check=False)
    assert done.returncode == 0, done.stderr.decode()
    assert f"It prints `{done.stdout.decode().strip()}`." in PAGE.read_text()
