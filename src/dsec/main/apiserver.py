"""`dsec apiserver`: the apiserver alone; its edges run elsewhere."""

from __future__ import annotations

import os
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import anyio

from dsec.base.errors import InvalidRequest
from dsec.control.edges import Edge, Edges
from dsec.main import credentials, state_dir
from dsec.main.all_in_one import Announce
from dsec.main.listen import bind_tcp, serve, until_signal, url_of
from dsec.main.parts import CLOCK, lone_errors, open_store, read_secret, version
from dsec.main.settings import EdgeAddress, Settings


def run(settings: Settings, announce: Announce) -> None:
    """Serve until SIGTERM or SIGINT.

    Raises:
        Conflict: the port is taken, or another server uses the state directory.
        InvalidRequest: no edges are configured, or something configured cannot be used.
    """
    if not settings.edges:
        raise InvalidRequest("no [[edges]] in the settings: there is nothing to serve")
    with (
        state_dir.hold(settings.state) as held,
        bind_tcp(settings.host, settings.port) as listener,
        lone_errors(),
    ):
        held.announce(url_of(listener))
        anyio.run(_main, settings, listener, announce, backend_options={"use_uvloop": True})


async def _main(settings: Settings, listener: socket.socket, announce: Announce) -> None:
    from dsec.apiserver.app import Apiserver
    from dsec.edge.server import EDGE_ROUTES

    stop = anyio.Event()
    async with (
        open_store(settings) as stores,
        reach(settings.edges) as reached,
        anyio.create_task_group() as group,
    ):
        edges = Edges(reached, CLOCK)
        server = Apiserver(edges, stores, CLOCK, version(), EDGE_ROUTES)
        await edges.refresh()
        url = url_of(listener)
        key = await credentials.ensure_admin(stores.directory, settings.state, url)
        await credentials.publish(os.environ, url, key)
        group.start_soon(until_signal, stop)
        group.start_soon(server.run)
        announce(f"DSec apiserver at {url}, {len(edges.all())} of {len(reached)} edges answer")
        await serve(server.app, listener, stop)
        group.cancel_scope.cancel()


@asynccontextmanager
async def reach(addresses: list[EdgeAddress]) -> AsyncIterator[list[Edge]]:
    """Ways to edges in other processes.

    Raises:
        InvalidRequest: an address is neither a URL nor a socket, or its secret cannot be read.
    """
    from dsec.control.forward import Forward
    from dsec.control.remote import EdgeLink, HttpEdge

    links: list[EdgeLink] = []
    for address in addresses:
        if bool(address.url) == bool(address.unix_socket):
            raise InvalidRequest("an edge needs either url or unix_socket")
        links.append(
            EdgeLink(
                address.url or "http://edge",
                address.unix_socket,
                read_secret(address.token_file),
            )
        )
    try:
        yield [Edge(HttpEdge(link), Forward(link), link.address) for link in links]
    finally:
        for link in links:
            await link.close()
