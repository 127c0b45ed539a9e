"""Everything that can be made to go wrong in the simulation, in one object a test holds."""

from __future__ import annotations

from dataclasses import dataclass, field

import anyio

from dsec.base.errors import InternalError, StartFailed, Unavailable
from dsec.kit.recall import Recall

LAUNCH_STEPS = ("cgroups", "socket", "clone", "mounts", "ready")
"""What a launch goes through, in order; any may be made to fail, or to wait."""

_UNCHANGED = {
    "freeze": "some of it does not stand still",
    "thaw": "it does not go on",
    "resize": "its limits could not be changed",
    "network": "its network rules could not be changed",
}


@dataclass(kw_only=True)
class Faults:
    """Set what the next operations meet; each failure is spent by the one it hits.

    What befalls a sandbox that lives (a broken channel, death) is done to it: `SimHost.drop_channel`,
    `SimHost.kill`.
    """

    fail_launch_at: str = ""
    """A step of LAUNCH_STEPS: the next launch fails there, with nothing left."""
    fail_launches: int = 1
    """How many launches meet `fail_launch_at`."""
    launch_delay_s: float = 0.0
    """Time every launch takes."""
    connect_delay_s: float = 0.0
    """Time every connect takes."""
    fail_connects: int = 0
    """So many connects find nobody answering, though the sandbox lives."""
    fail_freezes: int = 0
    """So many freezes do not make it stand still."""
    fail_thaws: int = 0
    """So many thaws leave it standing still."""
    fail_resizes: int = 0
    """So many resizes do not change anything."""
    fail_networks: int = 0
    """So many changes of network rules do not change anything."""
    fail_cleans: int = 0
    """So many cleans cannot remove something."""
    gates: dict[str, anyio.Event] = field(default_factory=dict)
    """Steps (LAUNCH_STEPS, `connect`, `kill`, `clean`, `freeze`, `thaw`, `reclaim`, `resize`,
    `network`) that wait until their gate opens."""

    def hold(self, step: str) -> anyio.Event:
        """Make a step wait; setting the event lets it go on."""
        self.gates[step] = gate = anyio.Event()
        return gate

    async def pass_step(self, step: str) -> None:
        """Go through a step of a launch.

        Raises:
            StartFailed: it has been told to fail here.
        """
        await self.pass_gate(step)
        if self.fail_launch_at == step and self.fail_launches > 0:
            self.fail_launches -= 1
            if not self.fail_launches:
                self.fail_launch_at, self.fail_launches = "", 1
            raise StartFailed(f"simulated failure at step {step}", step=step, path="", errno=5)

    async def pass_gate(self, step: str) -> None:
        """Wait while the step is held."""
        if gate := self.gates.get(step):
            await gate.wait()

    async def pass_gate_unless(self, step: str, recall: Recall) -> None:
        """Wait while the step is held and not called off; the loop's thread alone calls it off."""
        with anyio.CancelScope() as scope, recall.ending(scope.cancel):
            await self.pass_gate(step)

    async def pass_change(self, step: str) -> None:
        """Go through a `freeze`, `thaw`, `resize` or `network`.

        Raises:
            InternalError: it has been told to fail.
        """
        await self.pass_gate(step)
        name = f"fail_{step}s"
        if (left := getattr(self, name)) > 0:
            setattr(self, name, left - 1)
            raise InternalError(f"simulated: {_UNCHANGED[step]}")

    async def pass_connect(self) -> None:
        """Go through a connect.

        Raises:
            Unavailable: it has been told to fail.
        """
        await self.pass_gate("connect")
        await anyio.sleep(self.connect_delay_s)
        if self.fail_connects > 0:
            self.fail_connects -= 1
            raise Unavailable("simulated: nobody answers")
