"""The resolver's sockets: UDP and TCP on the gateway's addresses."""

from __future__ import annotations

import contextlib

import anyio
from anyio.abc import SocketListener, SocketStream, UDPSocket
from anyio.streams.buffered import BufferedByteReceiveStream

from dsec.edge.network.warden.guests import Guest, Guests
from dsec.edge.network.warden.places import peer_of
from dsec.edge.network.warden.resolver import MAX_QUESTION_BYTES, Resolver
from dsec.edge.network.warden.settings import Limits
from dsec.edge.network.warden.survival import survived

_GONE = (
    OSError,
    anyio.EndOfStream,
    anyio.IncompleteRead,
    anyio.BrokenResourceError,
    anyio.ClosedResourceError,
)


class DnsServer:
    """Answers who is known; to anybody else it is silent."""

    def __init__(self, guests: Guests, resolver: Resolver, limits: Limits) -> None:
        """Listen nowhere yet.

        Args:
            guests: who may ask.
            resolver: what is answered.
            limits: bounds.
        """
        self._guests = guests
        self._resolver = resolver
        self._limits = limits
        self._running = 0
        self._connections = 0

    async def serve_udp(self, udp: UDPSocket) -> None:
        """Answer datagrams until cancelled; one too many is dropped, its client asks again."""
        sending = anyio.Lock(fast_acquire=True)  # the socket takes one sender at a time
        async with udp, anyio.create_task_group() as tasks:
            while True:
                try:
                    data, sender = await udp.receive()
                except anyio.BrokenResourceError:
                    continue  # an ICMP error about an earlier answer
                guest = self._guests.at(sender[0])
                if guest is not None and self._running < self._limits.all_questions_at_once:
                    self._running += 1
                    tasks.start_soon(self._answer_datagram, udp, sending, guest, data, sender)

    async def _answer_datagram(
        self,
        udp: UDPSocket,
        sending: anyio.Lock,
        guest: Guest,
        data: bytes,
        sender: tuple[str, int],
    ) -> None:
        try:
            with survived("a question"), contextlib.suppress(*_GONE):
                answer = await self._resolver.answer(guest, data)
                if answer is not None:
                    async with sending:
                        await udp.sendto(answer, *sender)
        finally:
            self._running -= 1

    async def serve_tcp(self, listener: SocketListener) -> None:
        """Answer connections until cancelled."""
        async with listener:
            await listener.serve(self._answer_connection)

    async def _answer_connection(self, stream: SocketStream) -> None:
        async with stream:
            guest = self._guests.at(peer_of(stream))
            if guest is None or not self._has_room(guest):
                return
            guest.dns_connections += 1
            self._connections += 1
            try:
                with survived("questions"), contextlib.suppress(*_GONE, TimeoutError):
                    await self._converse(guest, stream)
            finally:
                guest.dns_connections -= 1
                self._connections -= 1

    def _has_room(self, guest: Guest) -> bool:
        limits = self._limits
        return (
            guest.dns_connections < limits.dns_connections
            and self._connections < limits.all_dns_connections
        )

    async def _converse(self, guest: Guest, stream: SocketStream) -> None:
        """One question after the other; who takes too long is left."""
        buffered = BufferedByteReceiveStream(stream)
        while self._guests.at(guest.address4) is guest:
            with anyio.fail_after(self._limits.dns_idle_s):
                size = int.from_bytes(await buffered.receive_exactly(2), "big")
                if size > MAX_QUESTION_BYTES:
                    return
                data = await buffered.receive_exactly(size)
            answer = await self._resolver.answer(guest, data)
            if answer is None:
                return
            with anyio.fail_after(self._limits.dns_idle_s):
                await stream.send(len(answer).to_bytes(2, "big") + answer)
