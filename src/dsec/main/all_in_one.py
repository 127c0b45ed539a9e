"""`dsec up`: apiserver and edge in one process, on one event loop."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable

import anyio

from dsec.main import credentials, state_dir
from dsec.main.edge_parts import open_edge, stop_all
from dsec.main.listen import bind_tcp, serve, until_signal, url_of
from dsec.main.parts import CLOCK, lone_errors, open_store, version
from dsec.main.settings import Settings

Announce = Callable[[str], None]


def run(settings: Settings, announce: Announce) -> None:
    """Serve until SIGTERM or SIGINT.

    Args:
        settings: what to serve, and where.
        announce: told, in words, once requests are answered.

    Raises:
        Conflict: the port is taken, or another server uses the state directory.
        InvalidRequest: a directory or address cannot be used.
    """
    with (
        state_dir.hold(settings.state, settings.run) as held,
        bind_tcp(settings.host, settings.port) as listener,
        lone_errors(),
    ):
        held.announce(url_of(listener))
        anyio.run(_main, settings, listener, announce, backend_options={"use_uvloop": True})


async def _main(settings: Settings, listener: socket.socket, announce: Announce) -> None:
    from dsec.apiserver.app import Apiserver
    from dsec.control.edges import Edge, Edges

    stop = anyio.Event()
    async with (
        open_store(settings) as stores,
        open_edge(settings, CLOCK) as node,
        anyio.create_task_group() as group,
    ):
        edges = Edges([Edge(node.api, node.app)], CLOCK)
        server = Apiserver(edges, stores, CLOCK, version(), node.routes)
        await edges.refresh()
        url = url_of(listener)
        key = await credentials.ensure_admin(stores.directory, settings.state, url)
        place = await credentials.publish(os.environ, url, key)
        group.start_soon(until_signal, stop)
        group.start_soon(server.run)
        announce(f"DSec serves at {url}; {_where_key(place, settings)}")
        await serve(server.app, listener, stop)
        if settings.stop_sandboxes:
            await stop_all(node.api)
        group.cancel_scope.cancel()


def _where_key(place: object, settings: Settings) -> str:
    if place is None:
        kept = settings.state / credentials.FILE
        return f"the key is in {kept}: the user's own file speaks of another server"
    return f"address and key are in {place}"
