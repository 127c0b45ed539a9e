"""What a server can be told, by file or by flags; `deploy/dsec.toml` is a commented example."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

import msgspec

from dsec.base.errors import InvalidRequest
from dsec.kit.config import load_config

BackendName = Literal["container", "sim"]


@dataclass(frozen=True, slots=True, kw_only=True)
class EdgeAddress:
    """How the apiserver reaches an edge in another process. One of `url` and `unix_socket`."""

    url: str = ""
    unix_socket: str = ""
    token_file: str = ""
    """A file with the secret that edge wants; needed over TCP."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Settings of all processes; each reads what concerns it."""

    host: str = "127.0.0.1"
    port: int = 7420
    """0 = any free port."""
    state_dir: str = ""
    """What must survive a restart; empty = /var/lib/dsec, or a user's own state directory."""
    run_dir: str = ""
    """Sockets; empty = /run/dsec, or a user's own run-time directory."""
    backend: BackendName = "container"
    aether: str = ""
    """The helper's binary; empty = `DSEC_AETHER`, else the one that came with this package, or was
    built beside it."""
    bpf: str = ""
    """Directory of the compiled eBPF programs; empty = `DSEC_BPF`, else likewise."""
    log_level: Literal["DEBUG", "INFO", "WARNING", "ERROR"] = "INFO"
    stop_sandboxes: bool = False
    """Stop all sandboxes when the server stops; else they live on until it comes back."""
    edges: list[EdgeAddress] = field(default_factory=list)
    """Of `dsec apiserver` only."""
    edge_listen: str = ""
    """Of `dsec edge` only: path of a Unix socket, or host:port."""
    edge_token_file: str = ""
    store: str = ""
    """Where environments are shared: a directory, `s3://bucket/prefix`, `oci://registry/path`;
    empty = each node keeps its own."""
    store_direct: bool = False
    """The store is a file system mounted on every node: data is mounted from there, and published
    uncompressed for that; nothing is cached or verified on the node."""
    store_timeout_s: float = 10.0
    """For one request to the store; it is tried three times."""
    cache_mb: int = 0
    """What data loaded on demand may take of the disk; 0 = a fifth of the file system."""
    front: Literal["fuse", "fanotify"] = "fuse"
    """How the kernel asks for data that is not here yet. fuse fails closed. fanotify copies less, but
    whoever has data mounted reads zeros after its keeper, worker and anchor were killed at once."""
    services_file: str = ""
    """A TOML file with what network rules mean by name (`pypi`, `npm`, ...) where this node's own tools
    do not say it; empty = they do."""
    network_slots: int = 0
    """Network namespaces kept ready for the next sandboxes that may reach something; 0 = none may."""
    network_pool4: str = ""
    """Where their addresses come from, e.g. 100.96.0.0/16; empty = a part of that which is free."""
    network_pool6: str = ""
    network_resolvers: list[str] = field(default_factory=list)
    """Whom names are asked of that sandboxes may reach; empty = whom this node itself asks."""
    network_never: list[str] = field(default_factory=list)
    """Networks no sandbox reaches whatever its rules say, beside this node, its sandboxes, and
    link-local, loopback and multicast addresses: those of the control plane."""
    allow_loose: bool = False
    """Take sandboxes of the security profile `loose`, from those who may ask for it."""
    allow_syscalls: list[str] = field(default_factory=list)
    """System calls that those may have allowed by name."""
    record_traces: bool = True
    """Write down what the first sandbox of an environment reads, and fetch it ahead for others."""

    @property
    def state(self) -> Path:
        """The state directory."""
        return Path(self.state_dir)

    @property
    def run(self) -> Path:
        """The run-time directory."""
        return Path(self.run_dir)


def settle(
    config: Path | None, flags: Mapping[str, object], environ: Mapping[str, str] | None = None
) -> Settings:
    """Settings from a file, overridden by flags that were given, the rest by default.

    Args:
        config: a TOML file, or None.
        flags: by the names of `Settings`; None means not given.
        environ: for a user's own directories, and `DSEC_AETHER`.

    Raises:
        InvalidRequest: the file or a flag is not right.
    """
    env = os.environ if environ is None else environ
    settings = load_config(config, Settings) if config else Settings()
    given = {name: value for name, value in flags.items() if value is not None}
    try:
        settings = msgspec.convert(msgspec.to_builtins(settings) | given, Settings)
    except msgspec.ValidationError as exc:
        raise InvalidRequest(f"a flag is wrong: {exc}") from exc
    state, run = _default_dirs(env)
    return replace(
        settings,
        state_dir=_absolute(settings.state_dir or str(state)),
        run_dir=_absolute(settings.run_dir or str(run)),
        aether=_absolute(settings.aether or env.get("DSEC_AETHER", "")),
        bpf=_absolute(settings.bpf or env.get("DSEC_BPF", "")),
        edge_token_file=_absolute(settings.edge_token_file),
        store=settings.store if "://" in settings.store else _absolute(settings.store),
        services_file=_absolute(settings.services_file),
        edges=[_absolute_edge(address) for address in settings.edges],
    )


def _absolute(path: str) -> str:
    """A path that means the same after a server in the background has gone to `/`."""
    return str(Path(path).absolute()) if path else ""


def _absolute_edge(address: EdgeAddress) -> EdgeAddress:
    return replace(
        address,
        unix_socket=_absolute(address.unix_socket),
        token_file=_absolute(address.token_file),
    )


def _default_dirs(env: Mapping[str, str]) -> tuple[Path, Path]:
    if os.geteuid() == 0:
        return Path("/var/lib/dsec"), Path("/run/dsec")
    home = Path(env.get("HOME") or Path.home())
    state = Path(env.get("XDG_STATE_HOME") or home / ".local" / "state") / "dsec"
    runtime = env.get("XDG_RUNTIME_DIR")
    return state, Path(runtime) / "dsec" if runtime else state / "run"
