"""Tickets: the right to begin one hand-off, and so to read its pages. Pure.

Owns: what a ticket says, the numbers that this process has issued, and which ones of each sink have been used here.
Never: a key of its own (`secret_with` knows what two processes share), a clock, or what becomes of a hand-off.

A ticket is a number that a sink gives out once to one source, and a MAC under what the two share, over the number, the
hand-off and its attempt, both processes (worker, incarnation, epoch) and the tags of its regions. So nobody else can
make one, and it is good for no other hand-off, attempt, sink or source.

A source remembers the last `WINDOW` numbers of each sink: of these each is good once, and older ones are not good any
more. That needs no common clock, and no more memory, however long ended hand-offs are remembered.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Callable, Collection
from dataclasses import dataclass
from enum import StrEnum

import msgspec

from baton.common.ids import HandoffKey, Stamp
from baton.common.messages import Offer, Ticket

WINDOW = 1 << 14
"""More than hand-offs that one sink has open with one source: an offer may be late by as many others."""

_ALL = (1 << WINDOW) - 1

SecretWith = Callable[[Stamp], bytes | None]
"""What this process and a peer share and nobody else knows; None: that is no member. From any thread."""


class TicketFault(StrEnum):
    """Why a ticket is not taken."""

    FORGED = "forged"  # or another hand-off's, another worker's, or none
    USED = "used"
    EXPIRED = "expired"


def everybody(peer: Stamp) -> bytes | None:
    """Of a cluster without keys: anybody can make a ticket, and it is good once all the same."""
    return b""


@dataclass(frozen=True, slots=True)
class _Used:
    """Bit i: number `newest - i` was used."""

    newest: int
    bits: int


_NOTHING_USED = _Used(0, 0)


class Tickets:
    """Those of one process, as a sink and as a source."""

    def __init__(self, own: Stamp, secret_with: SecretWith = everybody) -> None:
        self._own = own
        self._secret_with = secret_with
        self._issued: dict[Stamp, int] = {}
        self._used: dict[Stamp, _Used] = {}

    def issue(self, source: Stamp, key: HandoffKey, tag_base: int) -> Ticket:
        """For one hand-off with this source."""
        secret = self._secret_with(source)
        if secret is None:  # it is no member any more: nobody will look at it
            return Ticket()
        number = self._issued[source] = self._issued.get(source, 0) + 1
        return sign(secret, number, key, self._own, source, tag_base)

    def take(self, offer: Offer, sink: Stamp) -> TicketFault | None:
        """None: it is good, and was, from now on."""
        ticket, secret = offer.ticket, self._secret_with(sink)
        if secret is None or ticket.number < 1:
            return TicketFault.FORGED
        good = sign(secret, ticket.number, offer.key, sink, self._own, offer.tag_base)
        if not hmac.compare_digest(good.mac, ticket.mac):
            return TicketFault.FORGED
        return self._use(sink, ticket.number)

    def forget(self, gone: Collection[Stamp]) -> None:
        """They are no members any more, and never again."""
        for stamp in gone:
            self._issued.pop(stamp, None)
            self._used.pop(stamp, None)

    def _use(self, sink: Stamp, number: int) -> TicketFault | None:
        used = self._used.get(sink, _NOTHING_USED)
        age = used.newest - number
        if age >= WINDOW:
            return TicketFault.EXPIRED
        if age >= 0 and used.bits >> age & 1:
            return TicketFault.USED
        if age >= 0:
            self._used[sink] = _Used(used.newest, used.bits | 1 << age)
        else:
            earlier = used.bits << -age & _ALL if -age < WINDOW else 0
            self._used[sink] = _Used(number, earlier | 1)
        return None


def sign(secret: bytes, number: int, key: HandoffKey, sink: Stamp, source: Stamp, tag_base: int) -> Ticket:
    said = msgspec.msgpack.encode((number, key, sink, source, tag_base))
    return Ticket(number=number, mac=hmac.digest(secret, said, hashlib.sha256))
