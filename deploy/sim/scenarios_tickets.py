"""Scenarios about the right to begin a hand-off: offers that come again, changed, or in another's name."""

from __future__ import annotations

from dataclasses import replace

from msgspec import structs

from baton.common.config import TransferConfig
from baton.common.errors import ErrorCode
from baton.common.ids import Epoch, HandoffKey, Stamp, WorkerId
from baton.common.messages import Frame, Offer, Refuse
from baton.deploy.sim.plan import BASE, FIRST_S, Plan, Scenario, second_of
from baton.deploy.sim.world import World
from baton.transfer.api import OfferReceived
from baton.transfer.session.tickets import TicketFault

TOMBSTONE_S = 0.5
AGAIN_S = 2.0
"""All has ended by then, and been forgotten."""


def offers_come_again(seed: int) -> Scenario:
    """Whoever hears everything says each offer once more: at once, when its hand-off has long been forgotten, for
    another attempt, and in the name of another worker. None of it begins anything, and nobody waits for it."""
    transfer = TransferConfig(credit_regions=2, handoff_ttl_s=4.0, tombstone_ttl_s=TOMBSTONE_S)
    plan = Plan(replace(BASE, prefill=2, decode=2, transfer=transfer), seed)
    for index in range(8):
        plan.request(24 + 8 * index, at_s=FIRST_S + 0.5 * index)
    world, offered = plan.world, set[tuple[HandoffKey, Stamp]]()

    def listen(world: World, details: object) -> None:
        assert isinstance(details, tuple)
        sender, worker, body = details
        if isinstance(body, Offer) and (body.key, sender) not in offered:
            offered.add((body.key, sender))
            say_again(sender, worker, body)
        if isinstance(body, Refuse) and body.failure.code is ErrorCode.TICKET_REFUSED:
            plan.note(next(fault for fault in TicketFault if fault in body.failure.reason))

    def say_again(sender: Stamp, worker: WorkerId, offer: Offer) -> None:
        target = world.seats.get(worker)
        if target is None:
            return
        other = next((one.stamp for one in world.workers("decode") if one.stamp != sender), sender)
        unused = structs.replace(offer.ticket, number=offer.ticket.number + 100)
        another = structs.replace(offer, key=HandoffKey(offer.key.handoff, offer.key.attempt + 1000), ticket=unused)
        said = ((0.05, sender, offer), (0.1, sender, another), (0.2, other, offer), (AGAIN_S, sender, offer))
        for after_s, who, what in said:
            world.network.inject(after_s, worker, Frame(who, Epoch(target.stamp.epoch), what))

    def look(world: World, details: object) -> None:
        event = second_of(details)
        if isinstance(event, OfferReceived):
            assert (event.key, event.peer) in offered, f"{event.peer} has not offered {event.key}"

    world.on("sent", listen)
    world.on("engine_event", look)
    return plan.ready(TicketFault.USED, TicketFault.FORGED)


SCENARIOS = (offers_come_again,)
