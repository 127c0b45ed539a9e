"""What a sandbox is answered when it asks for a name.

A name nobody allowed does not exist, whoever could know it: the question goes nowhere. Of an allowed
one the addresses it may reach are put into its filter's map, and only then answered.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

import dns.exception
import dns.flags
import dns.message
import dns.opcode
import dns.rcode
import dns.rdataclass
import dns.rdatatype
import dns.rrset

from dsec.base.clock import Clock
from dsec.edge.network.policy import Network
from dsec.edge.network.warden.denials import Denials
from dsec.edge.network.warden.given import SLACK_S
from dsec.edge.network.warden.guests import Guest, Guests
from dsec.edge.network.warden.lookups import Lookups
from dsec.edge.network.warden.rates import looks_smuggled
from dsec.edge.network.warden.reach import MAPPED, PRIVATE, Address, wildcard_of, within
from dsec.edge.network.warden.settings import Limits
from dsec.edge.network.warden.upstream import AddressType, Found, UpstreamFailed
from dsec.wire.sandbox import DenialReason

ANSWERED: Mapping[int, AddressType] = {
    dns.rdatatype.A: "A",
    dns.rdatatype.AAAA: "AAAA",
}
"""The kinds of question that are answered; of all others an allowed name has nothing."""
MAX_QUESTION_BYTES = 1232
MAX_ADDRESSES = 8
"""Of one answer: it fits 512 bytes then, and no client needs more."""
_NAME = re.compile(r"[a-z0-9_-]{1,63}(\.[a-z0-9_-]{1,63})*")
_MAX_NAME_CHARS = 253


class Refused(Exception):
    """A question that is not answered as asked."""

    def __init__(self, reason: DenialReason) -> None:
        super().__init__(reason)
        self.reason: DenialReason = reason


class Resolver:
    """Decides on questions."""

    def __init__(  # noqa: PLR0913 - what it decides with
        self,
        guests: Guests,
        lookups: Lookups,
        denials: Denials,
        clock: Clock,
        limits: Limits,
        *,
        never: tuple[Network, ...],
        local_names: frozenset[str] = frozenset(),
    ) -> None:
        """Put it together.

        Args:
            guests: is told what a sandbox was given.
            lookups: where addresses come from.
            denials: is told what was refused.
            clock: for rates.
            limits: bounds.
            never: networks that no answer points to.
            local_names: names that may point to private addresses.
        """
        self._guests = guests
        self._lookups = lookups
        self._denials = denials
        self._clock = clock
        self._limits = limits
        self._never = never
        self._local_names = local_names

    async def answer(self, guest: Guest, wire: bytes) -> bytes | None:
        """The answer to a question as it came; None: none at all."""
        now = self._clock.monotonic()
        admitted = self._is_admitted(guest, "", now)
        if not admitted and not guest.questions(now).may_be_refused(now):
            return None
        try:
            query = dns.message.from_wire(wire[:MAX_QUESTION_BYTES], question_only=True)
        except (dns.exception.DNSException, ValueError, IndexError, KeyError):
            return None
        if query.flags & dns.flags.QR:
            return None
        return (await self._respond(guest, query, admitted=admitted)).to_wire()

    def _is_admitted(self, guest: Guest, name: str, now: float) -> bool:
        """Whether one more question is within the sandbox's rate; else that is counted."""
        if guest.questions(now).may_ask(now):
            return True
        self._denials.note(guest.identity, "name_rate", name=name)
        return False

    async def _respond(
        self, guest: Guest, query: dns.message.Message, *, admitted: bool
    ) -> dns.message.Message:
        response = dns.message.QueryMessage(id=query.id)
        response.flags = dns.flags.QR | dns.flags.RA | (query.flags & dns.flags.RD)
        response.question = query.question[:1]
        if query.opcode() != dns.opcode.QUERY or len(query.question) != 1:
            response.set_opcode(query.opcode())
            response.set_rcode(dns.rcode.NOTIMP)
            return response
        if not admitted:
            response.set_rcode(dns.rcode.REFUSED)
        else:
            response.set_rcode(await self._fill(guest, response, query.question[0]))
        return response

    async def _fill(
        self, guest: Guest, response: dns.message.Message, question: dns.rrset.RRset
    ) -> dns.rcode.Rcode:
        name = question.name.to_text(omit_final_dot=True).lower()
        kind = ANSWERED.get(question.rdtype)
        try:
            found = await self._resolve(guest, name, kind if _is_internet(question) else None)
        except Refused as refused:
            return _RCODES.get(refused.reason, dns.rcode.NXDOMAIN)
        except (UpstreamFailed, OSError):
            return dns.rcode.SERVFAIL
        if not found.exists:
            return dns.rcode.NXDOMAIN
        texts = [str(address) for address in found.addresses]
        if texts and kind is not None:
            ttl_s = int(found.ttl_s)
            response.answer = [dns.rrset.from_text_list(question.name, ttl_s, "IN", kind, texts)]
        return dns.rcode.NOERROR

    async def resolve(self, guest: Guest, name: str, kind: AddressType) -> Found:
        """The addresses a sandbox may reach a name at; its map has them on return.

        Args:
            guest: who asks.
            name: in lower case.
            kind: of address.

        Raises:
            Refused: it may not ask that; the denial is counted.
            UpstreamFailed: no resolver answers. OSError: its map is gone.
        """
        if not self._is_admitted(guest, name, self._clock.monotonic()):
            raise Refused("name_rate")
        return await self._resolve(guest, name, kind)

    async def _resolve(self, guest: Guest, name: str, kind: AddressType | None) -> Found:
        questions = guest.questions(now := self._clock.monotonic())
        reason = self._objection(guest, name, now)
        if reason is not None or kind is None:
            reason = reason or "name_type"
            self._denials.note(guest.identity, reason, name=name)
            raise Refused(reason)
        questions.waiting += 1
        try:
            found = await self._lookups.find(name, kind)
        finally:
            questions.waiting -= 1
        return await self._give(guest, name, found)

    def _objection(self, guest: Guest, name: str, now: float) -> DenialReason | None:
        """Why a sandbox may not ask for a name."""
        if len(name) > _MAX_NAME_CHARS or not _NAME.fullmatch(name) or not guest.may_ask(name):
            return "name"
        wildcard = wildcard_of(guest.names, name)
        if wildcard is None:
            return None
        if looks_smuggled(name, wildcard, self._limits):
            return "name_entropy"
        return None if guest.questions(now).may_ask_below(wildcard, name, now) else "name_rate"

    async def _give(self, guest: Guest, name: str, found: Found) -> Found:
        """Only now, with what it may reach now: rules may have narrowed while it waited."""
        addresses = self._reachable(guest, name, found.addresses)
        if not guest.may_ask(name):
            raise Refused("name")
        if addresses:
            await self._guests.give(guest, name, addresses, found.ttl_s + SLACK_S)
        elif found.addresses:
            self._denials.note(guest.identity, "never", name=name, address=str(found.addresses[0]))
        return Found(exists=found.exists, addresses=addresses, ttl_s=found.ttl_s)

    def _reachable(
        self, guest: Guest, name: str, addresses: tuple[Address, ...]
    ) -> tuple[Address, ...]:
        """Without those a name must not point to: it could be made to point at anybody's inside."""
        reachable = [
            address
            for address in addresses
            if not self.is_never(address)
            and (
                not within(address, PRIVATE)
                or name in self._local_names
                or guest.allows_network(address, None)
            )
        ]
        return tuple(reachable[:MAX_ADDRESSES])

    def is_never(self, address: Address) -> bool:
        """Whether no rule can allow an address."""
        return address in MAPPED or within(address, self._never)


_RCODES: Mapping[DenialReason, dns.rcode.Rcode] = {
    "name_rate": dns.rcode.REFUSED,
    "name_type": dns.rcode.NOERROR,
}
"""What a refusal looks like; else the name does not exist."""


def _is_internet(question: dns.rrset.RRset) -> bool:
    return question.rdclass == dns.rdataclass.IN
