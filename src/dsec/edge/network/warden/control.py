"""The warden at work: told by its control connection, gone with it."""

from __future__ import annotations

import contextlib
import logging
import resource
from ipaddress import ip_network
from pathlib import Path

import anyio
import anyio.abc
import msgspec
from anyio.abc import ByteStream

from dsec.base.clock import Clock
from dsec.base.errors import DsecError, InternalError, InvalidRequest, Unavailable
from dsec.edge.network.never import never
from dsec.edge.network.warden import places
from dsec.edge.network.warden.denials import Denials
from dsec.edge.network.warden.dialing import Dialer, trust
from dsec.edge.network.warden.dns_server import DnsServer
from dsec.edge.network.warden.guests import Guests, KernelNames
from dsec.edge.network.warden.lookups import Lookups
from dsec.edge.network.warden.messages import (
    REQUESTS,
    Answer,
    Assign,
    Configure,
    Done,
    Failed,
    Forget,
    Frames,
    HeldName,
    Refill,
    Request,
    framed,
)
from dsec.edge.network.warden.places import DestinationOf, Places, destination_of
from dsec.edge.network.warden.proxy import Proxy
from dsec.edge.network.warden.resolver import Resolver
from dsec.edge.network.warden.settings import Limits, Settings
from dsec.edge.network.warden.survival import survived
from dsec.edge.network.warden.upstream import Servers, Upstream
from dsec.kit.blocking import in_thread

logger = logging.getLogger("dsec.warden")

_OTHER_DESCRIPTORS = 128
_GONE = (OSError, anyio.EndOfStream, anyio.IncompleteRead, anyio.BrokenResourceError)


class Warden:
    """One process's work. The first message configures it; every later one is carried out in order."""

    def __init__(
        self,
        control: ByteStream,
        kernel: KernelNames,
        clock: Clock,
        *,
        transparent: bool = True,
        destination: DestinationOf = destination_of,
    ) -> None:
        """Do nothing yet.

        Args:
            control: the connection to the edge.
            kernel: the filters' maps.
            clock: for all times.
            transparent: accept connections to whatever address; needs root.
            destination: where an inspected connection wants to go.
        """
        self._control = control
        self._frames = Frames(control)
        self._sending = anyio.Lock()
        self._kernel = kernel
        self._clock = clock
        self._transparent = transparent
        self._destination = destination

    async def run(self) -> None:
        """Work until the control connection ends.

        Raises:
            Unavailable: what came first does not configure it, or it broke the protocol.
        """
        try:
            first = await self._frames.receive(REQUESTS)
            if not isinstance(first, Configure):
                raise Unavailable("not configured first")
            async with anyio.create_task_group() as tasks:
                guests = await self._configured(first, tasks)
                if guests is not None:
                    with contextlib.suppress(*_GONE):
                        await self._obey(guests)
                tasks.cancel_scope.cancel()
        except _GONE:
            return  # before it was configured

    async def _configured(self, request: Configure, tasks: anyio.abc.TaskGroup) -> Guests | None:
        try:
            guests, ports = await self._begin(request.settings, tasks)
        except (OSError, ValueError) as exc:
            logger.exception("cannot begin")
            await self._send(_failed(request.id, Unavailable(f"the warden cannot begin: {exc}")))
            return None
        await self._send(Done(id=request.id, ports=ports))
        return guests

    async def _begin(
        self, settings: Settings, tasks: anyio.abc.TaskGroup
    ) -> tuple[Guests, dict[str, int]]:
        """Listen and serve. Raises OSError, ValueError."""
        limits, clock = _fitting(settings.limits), self._clock
        authorities = Path(settings.authorities) if settings.authorities else None
        dialer = Dialer(await in_thread("names", trust, authorities), limits.connect_s)
        denials = Denials(limits, clock)
        guests = Guests(self._kernel, limits, clock)
        upstream = Upstream(Servers(settings, clock), limits)
        resolver = Resolver(
            guests,
            Lookups(upstream.ask, limits, clock),
            denials,
            clock,
            limits,
            never=never([ip_network(text) for text in settings.never]),
            local_names=frozenset(settings.local_names),
        )
        proxy = Proxy(guests, resolver, denials, dialer.connect, clock, limits, self._destination)
        opened = await in_thread(
            "names", lambda: places.opened(settings, transparent=self._transparent)
        )
        ports = opened.ports()
        await _serve(opened, DnsServer(guests, resolver, limits), proxy, tasks)
        tasks.start_soon(denials.tell, self._send)
        return guests, ports

    async def _obey(self, guests: Guests) -> None:
        """Until the connection ends, or breaks the protocol: then the edge starts another warden."""
        try:
            while True:
                request = await self._frames.receive(REQUESTS)
                await self._send(await _carried_out(request, guests))
        except _GONE:
            return
        except Unavailable as exc:
            logger.error("the control connection broke", extra={"why": exc.message})  # noqa: TRY400

    async def _send(self, message: Answer) -> None:
        async with self._sending:
            with contextlib.suppress(*_GONE):  # whoever receives sees the end
                await self._control.send(framed(message))


def _fitting(limits: Limits) -> Limits:
    """Limits that this process has descriptors for: one that runs out of them serves nobody."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    other = limits.all_dns_connections + limits.upstream_at_once + _OTHER_DESCRIPTORS
    most = max(1, (hard - other) // 2)  # two for each: the sandbox's and the server's
    return msgspec.structs.replace(limits, all_connections=min(limits.all_connections, most))


async def _serve(opened: Places, dns: DnsServer, proxy: Proxy, tasks: anyio.abc.TaskGroup) -> None:
    for sock in opened.dns_udp:
        tasks.start_soon(dns.serve_udp, await places.datagrams(sock))
    for serve, socks in (
        (dns.serve_tcp, opened.dns_tcp),
        (proxy.serve_transparent, opened.transparent),
        (proxy.serve_explicit, opened.proxy),
    ):
        for sock in socks:
            tasks.start_soon(serve, await places.listener(sock))


async def _carried_out(request: Request, guests: Guests) -> Answer:
    answers: list[Answer] = []
    with survived("a request of the edge"):
        answers.append(await _tried(request, guests))
    return answers[0] if answers else _failed(request.id, InternalError("the warden failed"))


async def _tried(request: Request, guests: Guests) -> Answer:
    try:
        return Done(id=request.id, held=await _hold(request, guests))
    except ValueError as exc:
        return _failed(request.id, InvalidRequest(str(exc)))
    except OSError as exc:
        return _failed(request.id, Unavailable(f"the filter's map: {exc}"))


async def _hold(request: Request, guests: Guests) -> tuple[HeldName, ...]:
    match request:
        case Assign():
            return await guests.assign(request)
        case Refill():
            return await guests.refill(request.address4)
        case Forget():
            guests.forget(request.address4)
            return ()
        case Configure():
            raise ValueError("configured already")


def _failed(number: int, error: DsecError) -> Failed:
    return Failed(id=number, code=error.code, message=error.message)
