"""A program with some of the work: run as a process of its own, to be killed.

    python fire_client.py URL KEY SANDBOX RESULTS CLIENTS ID ...

Started again it does all of it again, under the same ids: what was done is answered from the record.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import anyio

from dsec import DSecClient, DsecError

PAUSE_S = 0.05


def line_of(ident: str) -> str:
    """A command that cannot be done twice without showing it, with an answer that cannot be guessed."""
    status = int(ident.rpartition("-")[2]) % 7
    return (
        f"u=$(cat /proc/sys/kernel/random/uuid); echo {ident} $u >> /tmp/ran; "
        f"echo $u; echo {ident} >&2; exit {status}"
    )


async def work(url: str, key: str, sandbox: str, results: Path, idents: list[str]) -> None:
    async with DSecClient(api_url=url, api_key=key) as client:
        for ident in idents:
            result = await _insist(client, sandbox, ident)
            with results.open("a") as file:
                file.write(json.dumps([ident, *result]) + "\n")


async def _insist(client: DSecClient, sandbox: str, ident: str) -> tuple[str, str, int]:
    while True:
        try:
            box = await client.get(sandbox)
            result = await box.run_shell(line_of(ident), command_id=ident)
        except DsecError as exc:
            sys.stderr.write(f"{ident} {type(exc).__name__} {exc.message}\n")
            await anyio.sleep(PAUSE_S)
        else:
            return result.stdout.strip(), result.stderr.strip(), result.exit_code


async def main() -> None:
    url, key, sandbox, results, clients, *idents = sys.argv[1:]
    async with anyio.create_task_group() as group:
        for number in range(int(clients)):
            mine = idents[number :: int(clients)]
            group.start_soon(work, url, key, sandbox, Path(results), mine)


if __name__ == "__main__":
    anyio.run(main)
