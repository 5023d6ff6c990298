"""Tickets: the right to begin one hand-off, good once, for those two processes, and refused with a name otherwise."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from msgspec import structs

from baton.common.config import TransferConfig
from baton.common.engine.core_api import MembershipView
from baton.common.errors import ErrorCode
from baton.common.ids import Epoch, HandoffId, HandoffKey, RequestId, Stamp, WorkerId
from baton.common.kv.layout import KvLayout
from baton.common.messages import (
    Accept,
    Cancel,
    Cancelled,
    Failure,
    Frame,
    Member,
    Offer,
    Refuse,
    SamplingParams,
    Ticket,
    pack_tokens,
)
from baton.transfer.api import OfferReceived
from baton.transfer.endpoint import Endpoint
from baton.transfer.session.effects import EngineEvent, SendFrame, SourceFenced
from baton.transfer.session.tickets import WINDOW, TicketFault, Tickets

SINK, OTHER = (Stamp(WorkerId(f"decode-{number}"), 1, Epoch(100 + number)) for number in (0, 1))
SOURCE, ELSEWHERE = (Stamp(WorkerId(f"prefill-{number}"), 1, Epoch(200 + number)) for number in (0, 1))
CONFIG = TransferConfig(tombstone_ttl_s=5.0)


def secret_of(own: Stamp) -> Callable[[Stamp], bytes | None]:
    """What a process shares with each of the others; with a stranger nothing."""
    known = (SINK, OTHER, SOURCE, ELSEWHERE)
    return lambda peer: repr(sorted(map(repr, (own, peer)))).encode() if peer in known else None


def tickets(own: Stamp) -> Tickets:
    return Tickets(own, secret_of(own))


def offer(number: int, ticket: Ticket, tag_base: int = 9000) -> Offer:
    return Offer(
        key=HandoffKey(HandoffId(number), 1),
        request_id=RequestId("r"),
        tokens=pack_tokens(list(range(8))),
        start=0,
        sample=True,
        sampling=SamplingParams(),
        ttl_s=5.0,
        lane="zmq",
        credit=2,
        region_units=(2,),
        tag_base=tag_base,
        ticket=ticket,
    )


def offers(count: int, sink: Stamp = SINK, source: Stamp = SOURCE) -> list[Offer]:
    issuer = tickets(sink)
    return [
        offer(number, issuer.issue(source, HandoffKey(HandoffId(number), 1), 9000)) for number in range(1, count + 1)
    ]


def test_a_ticket_is_good_once_in_any_order() -> None:
    source = tickets(SOURCE)
    given = offers(50)
    for one in (*given[1::2], *given[-2::-2]):
        assert source.take(one, SINK) is None
    assert {source.take(one, SINK) for one in given} == {TicketFault.USED}


def test_a_ticket_that_is_too_far_behind_is_not_good_any_more() -> None:
    source = tickets(SOURCE)
    given = offers(WINDOW + 2)
    assert source.take(given[-1], SINK) is None
    assert [source.take(one, SINK) for one in given[:3]] == [TicketFault.EXPIRED, TicketFault.EXPIRED, None]
    assert source.take(given[2], SINK) is TicketFault.USED


def test_a_jump_beyond_the_window_forgets_nothing_that_is_in_it() -> None:
    source = tickets(SOURCE)
    given = offers(3 * WINDOW)
    assert source.take(given[0], SINK) is None
    assert source.take(given[-1], SINK) is None
    assert source.take(given[0], SINK) is TicketFault.EXPIRED
    assert source.take(given[-2], SINK) is None


@pytest.mark.parametrize(
    "forge",
    [
        lambda one: structs.replace(one, ticket=Ticket()),
        lambda one: structs.replace(one, ticket=structs.replace(one.ticket, mac=b"")),
        lambda one: structs.replace(one, ticket=structs.replace(one.ticket, mac=one.ticket.mac[:-1])),
        lambda one: structs.replace(one, ticket=structs.replace(one.ticket, mac=bytes(32))),
        lambda one: structs.replace(one, ticket=structs.replace(one.ticket, number=one.ticket.number + 1)),
        lambda one: structs.replace(one, key=HandoffKey(HandoffId(99), 1)),
        lambda one: structs.replace(one, key=HandoffKey(one.key.handoff, 2)),
        lambda one: structs.replace(one, tag_base=one.tag_base + 1),
    ],
    ids=["none", "no mac", "short mac", "zeros", "number", "hand-off", "attempt", "tags"],
)
def test_what_is_changed_is_forged(forge: Callable[[Offer], Offer]) -> None:
    source, [given] = tickets(SOURCE), offers(1)
    assert source.take(forge(given), SINK) is TicketFault.FORGED
    assert source.take(given, SINK) is None, "a forgery uses nothing up"


def test_a_ticket_of_other_processes_is_forged() -> None:
    successor = Stamp(SINK.worker, 2, SINK.epoch)
    [given] = offers(1)
    assert tickets(SOURCE).take(given, OTHER) is TicketFault.FORGED
    assert tickets(SOURCE).take(given, successor) is TicketFault.FORGED, "that is no member"
    assert tickets(ELSEWHERE).take(given, SINK) is TicketFault.FORGED


def test_nothing_is_remembered_of_who_is_gone() -> None:
    """So its tickets would be good again, and numbers begin anew: it is no member, and never will be."""
    source, sink, [given] = tickets(SOURCE), tickets(SINK), offers(1)
    first = sink.issue(SOURCE, given.key, given.tag_base)
    assert source.take(given, SINK) is None
    source.forget([SINK])
    sink.forget([SOURCE])
    assert source.take(given, SINK) is None
    assert sink.issue(SOURCE, given.key, given.tag_base) == first


# ------------------------------------------------------------------------------------------- at an endpoint


def endpoint() -> Endpoint:
    made = Endpoint(SOURCE, CONFIG, KvLayout(4), ["zmq"], secret_with=secret_of(SOURCE))
    members = tuple(Member(stamp=stamp, role="", address="") for stamp in (SINK, OTHER, SOURCE, ELSEWHERE))
    made.on_membership(MembershipView(1, members, frozenset()), 0.0)
    return made


def answers(effects: object) -> list[object]:
    return [one.body if isinstance(one, SendFrame) else getattr(one, "event", one) for one in effects]  # type: ignore[attr-defined]


def test_an_offer_that_comes_again_when_all_is_forgotten_begins_nothing() -> None:
    here, [given] = endpoint(), offers(1)
    received, accept = answers(here.on_frame(Frame(SINK, SOURCE.epoch, given), 0.0))
    assert isinstance(received, OfferReceived)
    assert answers(here.on_frame(Frame(SINK, SOURCE.epoch, given), 0.1)) == [accept] == [Accept(key=given.key)]
    failure = Failure(code=ErrorCode.CANCELLED)
    here.on_frame(Frame(SINK, SOURCE.epoch, Cancel(key=given.key, failure=failure)), 0.2)
    here.on_data(SourceFenced(given.key), 0.2)
    assert answers(here.on_frame(Frame(SINK, SOURCE.epoch, given), 0.3)) == [Cancelled(key=given.key)]
    here.on_timer(CONFIG.tombstone_ttl_s + 1)
    assert here.sessions() == []
    [refusal] = answers(here.on_frame(Frame(SINK, SOURCE.epoch, given), CONFIG.tombstone_ttl_s + 1))
    assert isinstance(refusal, Refuse)
    assert refusal.failure.code is ErrorCode.TICKET_REFUSED
    assert "used" in refusal.failure.reason
    assert here.counters["ticket.used"] == 1
    assert here.sessions() == []


def test_a_flood_of_forged_offers_leaves_nothing_behind() -> None:
    here = endpoint()
    for number, given in enumerate(offers(300, sink=OTHER)):
        effects = here.on_frame(Frame(SINK, SOURCE.epoch, given), 0.0)  # another worker's
        assert not any(isinstance(one, EngineEvent) for one in effects), number
    assert (here.counters["ticket.forged"], here.sessions()) == (300, [])


def test_a_forged_offer_does_not_touch_the_hand_off_that_it_names() -> None:
    here, [given] = endpoint(), offers(1)
    here.on_frame(Frame(SINK, SOURCE.epoch, given), 0.0)
    forged = structs.replace(given, ticket=structs.replace(given.ticket, mac=bytes(32)))
    assert here.on_frame(Frame(SINK, SOURCE.epoch, forged), 0.0) == []
    assert (here.counters["ticket.forged"], here.live_sources) == (1, 1)
    assert answers(here.on_frame(Frame(SINK, SOURCE.epoch, given), 0.0)) == [Accept(key=given.key)]
