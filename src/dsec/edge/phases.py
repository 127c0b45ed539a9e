"""Phases as declared: what each comes to, and what cannot be had of them. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import permutations

from msgspec.structs import replace

from dsec.base.errors import Conflict, InvalidRequest, NotFound, Unsupported
from dsec.wire.phases import FileRule, Phase
from dsec.wire.sandbox import SandboxSpec


def resolved(spec: SandboxSpec) -> SandboxSpec:
    """Every phase says all of it, and the specification what its first phase does.

    Where a phase names a user, no program gives more rights than its caller has: a user from whom
    root was taken could else have it back from a set-id program left there before.
    """
    if not spec.phases:
        return spec
    phases = [_whole(phase, spec) for phase in spec.phases]
    allows = any(any((phase.network_rules or {}).values()) for phase in phases)
    security = spec.security
    if any(phase.user for phase in phases):
        security = replace(security, no_new_privs=True)
    spec = replace(spec, phases=phases, security=security, network=spec.network or allows)
    return in_phase(spec, phases[0])


def in_phase(spec: SandboxSpec, phase: Phase) -> SandboxSpec:
    """The specification as it is in a (whole) phase."""
    return replace(
        spec,
        network_rules=phase.network_rules or {},
        files=phase.files or [],
        qos=phase.qos or spec.qos,
        ttl_running_stop=phase.ttl_running_stop,
    )


def without_secrets(spec: SandboxSpec) -> SandboxSpec:
    """What may be told of a specification: of secrets, their names."""
    hidden = [replace(phase, secrets=dict.fromkeys(phase.secrets, "")) for phase in spec.phases]
    return replace(spec, phases=hidden)


def by_name(spec: SandboxSpec, name: str) -> Phase:
    """One of its phases.

    Raises:
        NotFound: it has none of that name.
    """
    for phase in spec.phases:
        if phase.name == name:
            return phase
    names = ", ".join(phase.name for phase in spec.phases) or "none"
    raise NotFound(f"no phase {name}; there are: {names}", kind="phase", phase=name)


def next_phase(spec: SandboxSpec, current: str, name: str) -> Phase:
    """The phase to enter.

    Args:
        spec: of the sandbox.
        current: the phase it is in.
        name: of the one asked for.

    Raises:
        NotFound: there is none of that name. Conflict: it is in its final phase.
    """
    wanted = by_name(spec, name)
    if name != current and by_name(spec, current).final:
        raise Conflict(f"the sandbox is in {current}, which is final", kind="phase")
    return wanted


def ends_processes(before: Phase, wanted: Phase) -> bool:
    """Whether what runs is ended as one phase follows another."""
    return _differ(before, wanted) or bool(wanted.end_processes)


def check(spec: SandboxSpec, enforced: frozenset[str]) -> None:
    """Check whole phases against what a backend enforces: `Enforces.enforces`.

    Raises:
        InvalidRequest: a name stands twice, or processes are to stay that must not.
        Unsupported: parts cannot be enforced here; all of them are named.
    """
    names = [phase.name for phase in spec.phases]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise InvalidRequest(f"phases: {', '.join(twice)} stands there twice")
    for before, wanted in permutations(spec.phases, 2):
        if wanted.end_processes is False and _differ(before, wanted):
            raise InvalidRequest(
                f"phases: {wanted.name} has other files, secrets or another user than {before.name}, "
                "and what ran before would keep what it has: end_processes cannot be false"
            )
    if lacking := [words for words, part in _parts(spec) if part not in enforced]:
        raise Unsupported(f"not enforced by backend {spec.backend} here: {', '.join(lacking)}")


def _parts(spec: SandboxSpec) -> Iterable[tuple[str, str]]:
    """What it asks for, in words, and what has to be enforced for that."""
    if spec.files and not spec.phases:
        yield "files", "files"
    for phase in spec.phases:
        asked = {
            "network_rules": any((phase.network_rules or {}).values()),
            "files": bool(phase.files),
            "user": bool(phase.user),
            "secrets": bool(phase.secrets),
            "end_processes": bool(phase.end_processes),
        }
        for part in (name for name, wanted in asked.items() if wanted):
            yield f"{part} of phase {phase.name}", part


def _differ(before: Phase, wanted: Phase) -> bool:
    return _inside(before) != _inside(wanted)


def _inside(phase: Phase) -> tuple[list[FileRule], dict[str, str], str | None]:
    return phase.files or [], phase.secrets, phase.user


def _whole(phase: Phase, spec: SandboxSpec) -> Phase:
    rules, ttl = phase.network_rules, phase.ttl_running_stop
    return replace(
        phase,
        network_rules=spec.network_rules if rules is None else rules,
        files=spec.files if phase.files is None else phase.files,
        qos=phase.qos or spec.qos,
        ttl_running_stop=spec.ttl_running_stop if ttl is None else ttl,
    )
