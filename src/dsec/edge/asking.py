"""What is asked for at a creation, said outright, and what of it cannot be had. Pure."""

from __future__ import annotations

from msgspec.structs import replace

from dsec.edge import file_rules, networking, phases
from dsec.edge.backends.interface import Backend, Enforces
from dsec.edge.forking import Origin
from dsec.wire.edge_v1 import CreateOnEdge
from dsec.wire.sandbox import SandboxSpec


def asked(request: CreateOnEdge, origin: Origin | None) -> tuple[CreateOnEdge, str]:
    """The request as it is meant, and the phase it begins in.

    A fork is in its parent's phase, with what is in force there.
    """
    spec, phase = request.spec, origin.phase if origin else ""
    if not phase:
        spec = phases.resolved(spec)
        phase = spec.phases[0].name if spec.phases else ""
    return replace(request, spec=networking.connected(spec)), phase


def check_rules(backend: Backend, spec: SandboxSpec) -> None:
    """Check file rules and phases.

    Raises:
        InvalidRequest: they contradict themselves.
        Unsupported: the backend does not enforce a part; all such parts are named.
    """
    file_rules.check(spec)
    enforced = backend.enforces() if isinstance(backend, Enforces) else frozenset[str]()
    phases.check(spec, enforced)
