# Generated from ../_async by tools/unasync.py; do not edit.
"""Calls about a sandbox's state: pause, limits, snapshots, and what has happened in it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec
from typing_extensions import override

from dsec.sdk._http import Request
from dsec.sdk._sync.call import Caller, EventStream
from dsec.sdk._sync.lines import LineStream
from dsec.wire.phases import PhaseChange, QosClass
from dsec.wire.sandbox import (
    DiffEntry,
    NetworkChange,
    NetworkView,
    Pack,
    Recorded,
    Resize,
    SandboxView,
    SnapshotView,
    TamperReport,
)

LONG_S = 600.0
"""Of a call that is done when memory is reclaimed, or files are copied."""
_RECORDED: msgspec.json.Decoder[Recorded] = msgspec.json.Decoder(Recorded)


class Trajectory(EventStream[Recorded]):
    """What has happened in a sandbox, in order; a connection that breaks goes on where it was."""

    def __init__(
        self,
        caller: Caller,
        path: str,
        since: int,
        until: int | None,
        ops: Sequence[str],
    ) -> None:
        self._caller = caller
        self._path = path
        self._since = since
        self._until = until
        self._ops = [*ops]
        self._lines = LineStream(
            caller, self._request, _RECORDED, lambda entry: entry.seq
        )

    def _request(self) -> Request:
        query = {"since": self._since, "until": self._until, "op": self._ops}
        return self._caller.request("GET", self._path, query)

    @override
    def __next__(self) -> Recorded:
        """The next entry.

        Raises:
            DsecError: the sandbox is not known any more, or the platform stays unreachable.
        """
        entry = self._lines.__next__()
        self._since = entry.seq + 1
        return entry

    @override
    def close(self) -> None:
        """Stop reading."""
        self._lines.close()


class StateCalls:
    """What a `Sandbox` can be asked about its state."""

    def __init__(self, caller: Caller, view: SandboxView) -> None:
        self._caller = caller
        self._path = f"/v1/sandboxes/{view.id}"
        self.view = view
        """As it was last heard of; `refresh()` asks again."""

    def pause(self) -> SandboxView:
        """Freeze it and take back its memory; what is asked of it next resumes it. Harmless twice.

        Raises:
            SandboxGone: it is over.
            Unsupported: its host cannot freeze it.
        """
        return self._turn("pause")

    def resume(self) -> SandboxView:
        """Have it go on where it was paused. Harmless twice.

        Raises:
            SandboxGone: it is over.
            CapacityUnavailable: its node has no room for it now.
        """
        return self._turn("resume")

    def _turn(self, verb: str) -> SandboxView:
        request = self._caller.request(
            "POST",
            f"{self._path}/{verb}",
            key=self._caller.new_key(),
            patience_s=LONG_S,
        )
        self.view = self._caller.call(request, SandboxView)
        return self.view

    def resize(
        self,
        *,
        memory_mb: int | None = None,
        cpu_cores: float | None = None,
        pids: int | None = None,
        disk_mb: int | None = None,
        qos: QosClass | None = None,
    ) -> SandboxView:
        """Give it other limits while it runs; what is left out stays.

        Args:
            memory_mb: memory in MiB.
            cpu_cores: CPU time, in cores.
            pids: processes and threads at once.
            disk_mb: what it may write, in MiB; only upwards, and only of one made with a limit.
            qos: "ls", latency-sensitive, or "be", best-effort.

        Raises:
            Conflict: it uses more than that now; nothing has changed.
            Unsupported: its host cannot change that of a running one.
        """
        cores = None if cpu_cores is None else float(cpu_cores)
        body = Resize(
            memory_mb=memory_mb, cpu_cores=cores, pids=pids, disk_mb=disk_mb, qos=qos
        )
        request = self._caller.request(
            "PATCH", self._path, body=body, key=self._caller.new_key()
        )
        self.view = self._caller.call(request, SandboxView)
        return self.view

    def network(self) -> NetworkView:
        """Its network: rules, traffic, and what was denied. A paused one stays so.

        Raises:
            SandboxGone: it is over.
        """
        return self._caller.call(
            self._caller.request("GET", self._network), NetworkView
        )

    def set_network(self, rules: Mapping[str, bool]) -> NetworkView:
        """Give it other network rules in place of all it has; what they forbid is cut at once.

        Args:
            rules: as `network_rules` of `DSecContainerRunArgs`; {} allows nothing.

        Raises:
            InvalidRequest: a rule is wrong; nothing has changed.
            Conflict: it was made without a network.
            Unsupported: its host has no network for sandboxes, or knows no such service.
        """
        body, key = NetworkChange(rules=dict(rules)), self._caller.new_key()
        request = self._caller.request("PUT", self._network, body=body, key=key)
        return self._caller.call(request, NetworkView)

    def enter_phase(self, name: str) -> SandboxView:
        """Have it enter one of its phases; all of that is in force on return.

        What runs is ended if the phase has other files, secrets or another user.

        Raises:
            NotFound: it has no such phase.
            Conflict: its phase is final, or a file rule cannot hold; it is in the phase it was in, but
                what ran may have been ended.
        """
        body, key = PhaseChange(name=name), self._caller.new_key()
        path = f"{self._path}/phase"
        request = self._caller.request(
            "POST", path, body=body, key=key, patience_s=LONG_S
        )
        self.view = self._caller.call(request, SandboxView)
        return self.view

    def tamper(self) -> TamperReport:
        """What was tried in it and did not work, and which of its system files were changed.

        A paused one stays so. All names come from inside: data, not to be trusted or printed as is.

        Raises:
            SandboxGone: it is over; its trajectory has the report if there was anything to tell.
        """
        return self._caller.call(
            self._caller.request("GET", f"{self._path}/tamper", patience_s=LONG_S),
            TamperReport,
        )

    @property
    def _network(self) -> str:
        return f"{self._path}/network"

    def pack(
        self,
        name: str,
        *,
        exclude: Sequence[str] = (),
        clean: bool = True,
        description: str = "",
    ) -> SnapshotView:
        """Take a snapshot of what it has written, running or paused; `client.restore(name)`.

        Args:
            name: of the snapshot, in your project.
            exclude: globs over absolute paths that are left out; `**` crosses directories.
            clean: leave residue out: caches, histories, logs, keys, build-only paths. One taken
                with it can be restored by you alone.
            description: for whoever looks.

        Raises:
            Conflict: there is a snapshot of that name.
            StorageFull: no room for it; nothing is left of it.
        """
        body = Pack(name=name, description=description, exclude=[*exclude], clean=clean)
        request = self._caller.request(
            "POST",
            f"{self._path}/pack",
            body=body,
            key=self._caller.new_key(),
            patience_s=LONG_S,
        )
        return self._caller.call(request, SnapshotView)

    def diff(self) -> list[DiffEntry]:
        """What it has written so far, by path."""
        request = self._caller.request("GET", f"{self._path}/diff", patience_s=LONG_S)
        return self._caller.call(request, list[DiffEntry])

    def trajectory(
        self, since: int = 1, until: int | None = None, ops: Sequence[str] = ()
    ) -> Trajectory:
        """What has happened in it, in order, to iterate over; also when it is over.

        Args:
            since: `seq` of the first entry.
            until: `seq` of the last; None: all there is now.
            ops: only these operations, e.g. ["command", "file.write"].
        """
        return Trajectory(self._caller, f"{self._path}/trajectory", since, until, ops)
