"""The `dsec` command: the CLI's own verbs, and those that start and stop servers."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer

from dsec.base.errors import Unsupported
from dsec.main.settings import Settings, settle

STOP_TIMEOUT_S = 60.0

ConfigFile = Annotated[Path | None, typer.Option("--config", help="Settings, a TOML file.")]
Host = Annotated[str | None, typer.Option(help="Address to listen on (127.0.0.1).")]
Port = Annotated[int | None, typer.Option(help="Port to listen on (7420).", min=0, max=65535)]
StateDir = Annotated[str | None, typer.Option(help="What survives a restart (/var/lib/dsec).")]
RunDir = Annotated[str | None, typer.Option(help="Sockets (/run/dsec).")]
Backend = Annotated[str | None, typer.Option(help="container or sim (container).")]
Detach = Annotated[bool, typer.Option("--detach", "-d", help="Return once it serves.")]
StopSandboxes = Annotated[
    bool | None, typer.Option("--stop-sandboxes", help="At the end, stop all sandboxes.")
]
StoreUrl = Annotated[
    str | None,
    typer.Option(
        "--store", help="Shared environments: a directory, s3://bucket/prefix, oci://host/path."
    ),
]
StoreDirect = Annotated[
    bool | None,
    typer.Option("--store-direct", help="Mount data from the store's own file system."),
]
CacheMb = Annotated[
    int | None,
    typer.Option(help="Disk for data loaded on demand, MiB (a fifth of the disk).", min=0),
]

Server = Callable[[Settings, Callable[[str], None]], None]


def up(
    config: ConfigFile = None,
    host: Host = None,
    port: Port = None,
    state_dir: StateDir = None,
    run_dir: RunDir = None,
    backend: Backend = None,
    store: StoreUrl = None,
    cache_mb: CacheMb = None,
    *,
    store_direct: StoreDirect = None,
    stop_sandboxes: StopSandboxes = None,
    detach: Detach = False,
) -> None:
    """Start DSec on this machine: API and sandboxes in one process."""
    from dsec.main.all_in_one import run

    flags = {
        "host": host,
        "port": port,
        "state_dir": state_dir,
        "run_dir": run_dir,
        "backend": backend,
        "store": store,
        "store_direct": store_direct,
        "cache_mb": cache_mb,
        "stop_sandboxes": stop_sandboxes,
    }
    _serve(run, settle(config, flags), detach=detach)


def apiserver(
    config: ConfigFile = None,
    host: Host = None,
    port: Port = None,
    state_dir: StateDir = None,
    *,
    detach: Detach = False,
) -> None:
    """Start the API alone; its edges are named in the settings."""
    from dsec.main.apiserver import run

    flags = {"host": host, "port": port, "state_dir": state_dir}
    _serve(run, settle(config, flags), detach=detach)


def edge(
    config: ConfigFile = None,
    listen: Annotated[str | None, typer.Option(help="Unix socket path, or host:port.")] = None,
    token_file: Annotated[str | None, typer.Option(help="Secret, needed over TCP.")] = None,
    state_dir: StateDir = None,
    run_dir: RunDir = None,
    backend: Backend = None,
    store: StoreUrl = None,
    cache_mb: CacheMb = None,
    *,
    store_direct: StoreDirect = None,
    stop_sandboxes: StopSandboxes = None,
    detach: Detach = False,
) -> None:
    """Start an edge alone: sandboxes for an API in another process."""
    from dsec.main.edge import run

    flags = {
        "edge_listen": listen,
        "edge_token_file": token_file,
        "state_dir": state_dir,
        "run_dir": run_dir,
        "backend": backend,
        "store": store,
        "store_direct": store_direct,
        "cache_mb": cache_mb,
        "stop_sandboxes": stop_sandboxes,
    }
    _serve(run, settle(config, flags), detach=detach)


def down(config: ConfigFile = None, state_dir: StateDir = None) -> None:
    """Stop the server of a state directory; its sandboxes live on unless it was told otherwise."""
    from dsec.main.state_dir import stop_holder

    holder = stop_holder(settle(config, {"state_dir": state_dir}).state, STOP_TIMEOUT_S)
    typer.echo(f"stopped process {holder.pid}")


def doctor(
    config: ConfigFile = None,
    state_dir: StateDir = None,
    *,
    json: Annotated[
        bool, typer.Option("--json", help="One JSON document instead of a table.")
    ] = False,
) -> None:
    """Show what this machine can do, and what to do about the rest. Best run as root."""
    import anyio

    from dsec.cli.output import print_json, print_table
    from dsec.edge.doctor import examine
    from dsec.edge.network.services import capabilities, services_of

    settings = settle(config, {"state_dir": state_dir})
    services = services_of(settings.services_file)
    settings.state.mkdir(mode=0o700, parents=True, exist_ok=True)
    found = [*anyio.run(examine, settings.state), *capabilities(services())]
    if json:
        print_json(found)
    else:
        rows = [
            (
                ("yes", "green") if entry.available else ("no", "red"),
                entry.name,
                entry.needed_for,
                entry.detail if entry.available else entry.advice or entry.detail,
            )
            for entry in found
        ]
        print_table(["", "CAPABILITY", "NEEDED FOR", "DETAIL OR ADVICE"], rows)
    if any(entry.needed_for == "containers" and not entry.available for entry in found):
        raise typer.Exit(Unsupported.exit_status)


def _serve(run: Server, settings: Settings, *, detach: bool) -> None:
    from dsec.kit import log

    def configured(announce: Callable[[str], None]) -> None:
        log.configure(settings.log_level)
        run(settings, announce)

    if not detach:
        configured(lambda text: typer.echo(text, err=True))
        return
    from dsec.main.detach import in_background

    typer.echo(in_background(configured, settings.state / "server.log"))


def _answering(command: Callable[..., None]) -> Callable[..., None]:
    """A command whose errors are a line on standard error and an exit status."""

    @functools.wraps(command)
    def wrapped(*args: object, **kwargs: object) -> None:
        from dsec.cli.boundary import guarded

        raise typer.Exit(guarded(lambda: command(*args, **kwargs)))

    return wrapped


def add_commands(app: typer.Typer) -> None:
    """Add the verbs that the CLI's room cannot have: it sees the SDK alone."""
    for command in (up, down, doctor, apiserver, edge):
        app.command(rich_help_panel="Servers")(_answering(command))


def main() -> None:
    """Entry point."""
    from dsec.cli.app import app

    add_commands(app)
    app()


if __name__ == "__main__":
    main()
