"""Who is no member any more, and who has no ticket, at the real sockets of a prefill worker: refused, counted, and
nothing is left of it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
from io_rig import StandInController, Worker, io_config, open_sink, wait_until
from msgspec import structs

from baton.common.ids import HandoffId, HandoffKey, RequestId, WorkerId
from baton.common.messages import Offer, SamplingParams, Ticket, pack_tokens
from baton.transfer.allow_list import PairSecrets
from baton.transfer.api import OfferReceived, SinkCommitted, SinkFailed
from baton.transfer.io import refusals_of
from baton.transfer.link import LaneStatus
from baton.transfer.mesh import Mesh
from baton.transfer.session.tickets import Tickets

MANY = 100


@pytest.fixture
def controller() -> Iterator[StandInController]:
    running = StandInController(True)
    yield running
    running.close()


def pair(lane: str, controller: StandInController) -> tuple[Worker, Worker]:
    """That has done a hand-off. The prefill worker receives from nobody itself."""
    config = io_config(lane)
    config = replace(config, prefill_worker=replace(config.prefill_worker, kv_return="off"))
    decode = Worker("decode-0", "decode", 11, config, controller.door)
    prefill = Worker("prefill-0", "prefill", 22, config, controller.door, fill=5)
    decode.events.wait_view(lambda view: len(view.members) == 2)
    open_sink(decode, "prefill-0", 50, 1)
    decode.events.wait(SinkCommitted)
    return decode, prefill


def lane_is_up(worker: Worker) -> bool:
    data = worker.io.snapshot().data
    return data is not None and any(one.status is LaneStatus.UP for views in data.lanes.values() for one in views)


@pytest.mark.parametrize("lane", ["tcp", "zmq"])
def test_who_was_taken_off_the_list_gets_nothing_more(lane: str, controller: StandInController) -> None:
    decode, prefill = pair(lane, controller)
    try:
        controller.remove("decode-0")  # which is not told, and lives
        prefill.events.wait_view(lambda view: len(view.members) == 1)
        open_sink(decode, "prefill-0", 50, 2, ttl_s=1.5)
        decode.events.wait(SinkFailed)
        if lane == "zmq":  # its connection stays, and what it says there is counted
            wait_until(lambda: prefill.io.snapshot().mesh.foreign_key > 0)
        else:  # its connection is closed, perhaps before it has made its offer
            wait_until(lambda: not lane_is_up(decode))
        before = refusals_of(prefill.io.snapshot())
        stranger = Mesh(decode.stamp, "127.0.0.1", decode.keys)
        stranger.connect(prefill.stamp.worker, prefill.io.member.address, prefill.io.member.key)
        wait_until(lambda: refusals_of(prefill.io.snapshot())["stranger"] > before["stranger"])
        stranger.close()
        assert len(prefill.events.of(OfferReceived)) == 1
        assert not prefill.fatal.is_set()
    finally:
        decode.close()
        prefill.close()


def test_offers_without_a_good_ticket_begin_nothing(controller: StandInController) -> None:
    decode, prefill = pair("zmq", controller)
    member = Mesh(decode.stamp, "127.0.0.1", decode.keys)  # which has been taken over
    try:
        member.allow.set_members([prefill.io.member])
        member.connect(prefill.stamp.worker, prefill.io.member.address, prefill.io.member.key)
        tickets = Tickets(decode.stamp, PairSecrets(decode.keys, member.allow).of("ticket"))

        def offer(number: int, ticket: Ticket | None = None) -> Offer:
            key = HandoffKey(HandoffId(number), 1)
            made = Offer(
                key=key,
                request_id=RequestId("r"),
                tokens=pack_tokens(list(range(50))),
                start=0,
                sample=True,
                sampling=SamplingParams(),
                ttl_s=5.0,
                lane="zmq",
                credit=2,
                region_units=(4,),
                tag_base=1 << 30,
            )
            return structs.replace(made, ticket=ticket or tickets.issue(prefill.stamp, key, made.tag_base))

        used = offer(1000)  # the number of the hand-off that there was
        forged = structs.replace(offer(1001), ticket=Ticket(number=7, mac=bytes(32)))
        another = offer(1002, used.ticket)
        for body in (used, forged, another) * MANY:
            assert member.send(WorkerId("prefill-0"), prefill.stamp.epoch, body)
        wait_until(lambda: refusals_of(prefill.io.snapshot())["ticket"] == 3 * MANY)
        snapshot = prefill.io.snapshot()
        assert (snapshot.endpoint["ticket.used"], snapshot.endpoint["ticket.forged"]) == (MANY, 2 * MANY)
        assert snapshot.hand_offs == 0
        assert len(prefill.events.of(OfferReceived)) == 1
        assert not prefill.fatal.is_set()
    finally:
        member.close()
        decode.close()
        prefill.close()
