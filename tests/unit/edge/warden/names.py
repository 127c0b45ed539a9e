"""A resolver for the tests, as the node has one: UDP and TCP on loopback."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Self

import anyio
import dns.flags
import dns.message
import dns.name
import dns.rcode
import dns.rrset
from anyio.abc import SocketStream, UDPSocket
from anyio.streams.buffered import BufferedByteReceiveStream


class NameServer:
    """Answers from `zone`; whatever it is told to do wrong, it does."""

    def __init__(self) -> None:
        self.zone: dict[str, dict[str, list[str]]] = {}
        self.ttl_s = 300
        self.asked: list[tuple[str, str]] = []
        self.over_tcp = 0
        self.silent = False
        self.lowers_case = False
        self.truncates = False
        self.forges = False
        self.port = 0

    def has(self, name: str, **records: list[str]) -> None:
        self.zone[name] = records

    @asynccontextmanager
    async def running(self) -> AsyncIterator[Self]:
        async with await anyio.create_tcp_listener(local_host="127.0.0.1") as listener:
            self.port = int(listener.extra(anyio.abc.SocketAttribute.local_port))
            udp = await anyio.create_udp_socket(local_host="127.0.0.1", local_port=self.port)
            async with udp, anyio.create_task_group() as tasks:
                tasks.start_soon(self._datagrams, udp)
                tasks.start_soon(listener.serve, self._stream)
                yield self
                tasks.cancel_scope.cancel()

    async def _datagrams(self, udp: UDPSocket) -> None:
        async for data, sender in udp:
            if self.silent:
                continue
            query = dns.message.from_wire(data)
            if self.forges:
                forged = self._answer(query)
                forged.id ^= 1
                forged.answer = [
                    dns.rrset.from_text(query.question[0].name, 60, "IN", "A", "203.0.113.66")
                ]
                await udp.sendto(forged.to_wire(), *sender)
            answer = self._answer(query)
            if self.truncates:
                answer.flags |= dns.flags.TC
                answer.answer = []
            if self.lowers_case:
                answer.question = [
                    dns.rrset.RRset(q.name.canonicalize(), q.rdclass, q.rdtype)
                    for q in answer.question
                ]
            await udp.sendto(answer.to_wire(), *sender)

    async def _stream(self, stream: SocketStream) -> None:
        async with stream:
            buffered = BufferedByteReceiveStream(stream)
            size = int.from_bytes(await buffered.receive_exactly(2), "big")
            self.over_tcp += 1
            wire = self._answer(
                dns.message.from_wire(await buffered.receive_exactly(size))
            ).to_wire()
            await stream.send(len(wire).to_bytes(2, "big") + wire)

    def _answer(self, query: dns.message.Message) -> dns.message.Message:
        question = query.question[0]
        kind = dns.rdatatype.to_text(question.rdtype)
        name = question.name
        self.asked.append((name.to_text(omit_final_dot=True).lower(), kind))
        answer = dns.message.make_response(query)
        for _ in range(8):
            records = self.zone.get(name.to_text(omit_final_dot=True).lower())
            if records is None:
                answer.set_rcode(dns.rcode.NXDOMAIN)
                return answer
            if kind in records:
                texts = records[kind]
                answer.answer.append(dns.rrset.from_text(name, self.ttl_s, "IN", kind, *texts))
                return answer
            if "CNAME" not in records:
                return answer
            target = records["CNAME"][0]
            answer.answer.append(dns.rrset.from_text(name, self.ttl_s, "IN", "CNAME", target))
            if "stop" in records:
                return answer
            name = dns.name.from_text(target)
        return answer
