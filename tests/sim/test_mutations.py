"""The world must notice: each mutation breaks one rule, and some scenario or seed must fail because of it.

A simulator that passes everything proves nothing. Each mutation is a bug that another system had, or nearly had.
"""

from __future__ import annotations

import dataclasses
import re
import traceback
from collections.abc import Callable, Iterator
from functools import partial
from itertools import count, islice, product
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np
import pytest

from baton.common.config import MAX_PRIORITY
from baton.common.errors import ErrorCode
from baton.common.kv.events import PageLog
from baton.common.kv.pool import KvPool
from baton.common.kv.prefix.interface import PrefixLease
from baton.common.kv.prefix.radix_cpp import RadixCacheCpp
from baton.common.kv.prefix.tree import UnifiedRadixCache
from baton.common.kv.window import SlidingWindow
from baton.common.messages import Ack
from baton.common.units import page_floor
from baton.decode import admission, outbox, retract
from baton.decode.admission import Admission
from baton.decode.answers import Answers
from baton.decode.caching import Caching
from baton.decode.core import DecodeCore
from baton.decode.door import Door
from baton.decode.filling import Filling
from baton.decode.outbox import Outbox
from baton.decode.peers import Peers
from baton.decode.request import DecodeRequest, Done, Incoming, Restoring, Storing
from baton.decode.restoring import Restores
from baton.decode.returning import Returns
from baton.decode.sessions import Sessions
from baton.decode.storing import Stores
from baton.decode.waiting import WaitingRequests
from baton.deploy import controller_core, fitting, seat_book
from baton.deploy.admission import Admission as GatewayAdmission
from baton.deploy.admission_limits import RateLimits
from baton.deploy.admission_queue import FairQueue, Tenant
from baton.deploy.controller_core import ControllerCore
from baton.deploy.controller_seats import Killing, KillWorker, Vacant
from baton.deploy.gateway_core import GatewayCore
from baton.deploy.gateway_releases import Releases
from baton.deploy.gateway_states import Placing, Streaming, Waiting
from baton.deploy.routing.index import PrefixIndex
from baton.deploy.routing.router import Router
from baton.deploy.routing.seats import Seats
from baton.deploy.seat_book import SeatBook
from baton.deploy.session_book import SessionBook
from baton.deploy.sim.data_plane import SimDataPlane
from baton.deploy.sim.plan import DangerMissed
from baton.deploy.sim.scenarios import SCENARIOS, run_scenario
from baton.deploy.sim.world import run_seed
from baton.prefill.core import PrefillCore
from baton.prefill.grace import KeptRequests
from baton.prefill.request import Ended, SourceRequest
from baton.prefill.returning import Returns as PrefillReturns
from baton.prefill.shipping import Shipping
from baton.transfer.api import SourceAborted, SourceStopping
from baton.transfer.endpoint import Endpoint
from baton.transfer.membership import Roster
from baton.transfer.session import sink, source
from baton.transfer.session.book import SessionBook as HandoffBook
from baton.transfer.session.effects import EngineEvent, Landed
from baton.transfer.session.sink_states import Receiving
from baton.transfer.session.source_states import Sending
from baton.transfer.session.step import PeerDead
from baton.transfer.session.tickets import TicketFault, Tickets
from baton.transfer.stalls import Stalls

SCENARIO_SEEDS = 3  # as many as the ordinary run has
MOST_WORLDS = 5000
DOCUMENT = Path(__file__).parents[2] / "docs" / "TESTING.md"


class Noticed(NamedTuple):
    """`worlds`: how many were run until one failed."""

    worlds: int
    where: str
    how: str


def worlds() -> Iterator[tuple[str, Callable[[], object]]]:
    """The named scenarios as often as the ordinary run has them, then random worlds."""
    for seed, name in product(range(SCENARIO_SEEDS), SCENARIOS):
        yield f"{name} {seed}", partial(run_scenario, name, seed)
    for seed in count():
        yield f"seed {seed}", partial(run_seed, seed)


def noticed() -> Noticed | None:
    """Which world fails first, and how. A scenario that misses its danger has not noticed anything, nor has a world in
    which a mutation stumbles over what is not there any more."""
    for number, (where, run) in enumerate(islice(worlds(), MOST_WORLDS), start=1):
        try:
            run()
        except DangerMissed:
            continue
        except Exception as error:
            if isinstance(error, AttributeError | NameError | TypeError) and raised_here(error):
                raise
            return Noticed(number, where, f"{type(error).__name__}: {error}")
    return None


def raised_here(error: Exception) -> bool:
    """By a line of this file, not by one that it calls."""
    *_, (frame, _) = traceback.walk_tb(error.__traceback__)
    return frame.f_code.co_filename == __file__


def free_on_abort_without_fence(patch):
    """`abort_mid_write`: decode frees the destination pages as soon as it gives up."""
    let_go, failed, committed = Answers._let_go, Filling._on_failed, Filling._on_committed

    def mutated_let_go(self, request, failure, now):
        incoming = isinstance(request.state, Incoming)
        let_go(self, request, failure, now)
        if incoming:
            self._parts.pool.release_kv_cache(request, request.known_tokens, is_insert=False)
            request.state = Done()

    def unless_freed(original):
        def mutated(self, event, now):
            if self._parts.handoffs._open[event.key][0].kv is not None:
                original(self, event, now)
            else:
                self._parts.handoffs.close(event.key)

        return mutated

    patch.setattr(Answers, "_let_go", mutated_let_go)
    patch.setattr(Filling, "_on_failed", unless_freed(failed))
    patch.setattr(Filling, "_on_committed", unless_freed(committed))


def acknowledge_before_scatter(patch):
    """The sink says "landed" when the bytes have arrived, not when they are in the pages."""

    def scatter(self, effect, data):
        if self._is_open(effect):
            units, pool = self._units_of(effect), self.stretch(effect.chunk)
            rows = np.frombuffer(data, dtype=np.uint8).reshape(len(units), -1)
            self._host.after(0.02, lambda: pool.__setitem__(units, rows), "late scatter")
            self._end_landing(effect, Landed(effect.key, effect.chunk.seq, len(data), 0.0))

    patch.setattr(SimDataPlane, "_scatter", scatter)


def ignore_epoch(patch):
    """A process that restarted in the same seat is taken for its predecessor: the gateway waits for its answers."""
    on_view = GatewayCore._on_view

    def mutated(self, view, now, out):
        for request in self._requests.values():
            state = request.state
            if not isinstance(state, Waiting):
                successor = next((one.stamp for one in view.members if one.stamp.worker == state.worker.worker), None)
                if successor is not None and successor != state.worker:
                    placing = isinstance(state, Placing)
                    request.state = Placing(successor) if placing else Streaming(successor, state.heard_s)
        on_view(self, view, now, out)

    def no_answer(self, gateway, key, failure):
        return None

    patch.setattr(GatewayCore, "_on_view", mutated)
    patch.setattr(Outbox, "refuse", no_answer)


def free_source_on_stopping(patch):
    """Prefill gives its pages back when the attempt is over, though a reader may be left."""
    stop = PrefillCore._stop

    def mutated(self, request, failure):
        stop(self, request, failure)
        if request.number not in self._launched:
            self._give_back(request)

    patch.setattr(PrefillCore, "_stop", mutated)


def silence_is_proof(patch):
    """The source takes a silent reader for a dead one."""

    def mutated(self, worker, now):
        effects = []
        for book in (self._sinks, self._sources):
            for key in book.keys_of(lambda peer: peer.worker == worker, ended_too=False):
                effects += book.apply(key, PeerDead(), now)
        return self._out(effects)

    patch.setattr(Endpoint, "on_peer_silent", mutated)


def insert_what_has_not_landed(patch):
    """A failed hand-off counts everything that was promised as landed."""
    failed = Filling._on_failed

    def mutated(self, event, now):
        request, _ = self._parts.handoffs._open[event.key]
        failed(self, msgspec.structs.replace(event, landed_until=request.fill_len), now)

    patch.setattr(Filling, "_on_failed", mutated)


def say_the_end_once(patch):
    """The last message is not repeated."""
    patch.setattr(Outbox, "on_timer", lambda self, now: self._resends.pop_due(now) and None)


def never_ask_for_gaps(patch):
    """Outputs are taken as they come."""
    on_output = GatewayCore._on_output

    def mutated(self, sender, message, now, out):
        request = self._requests.get(message.request_id)
        if request is not None and message.first_index > len(request.outputs):
            message = msgspec.structs.replace(message, first_index=len(request.outputs))
        on_output(self, sender, message, now, out)

    patch.setattr(GatewayCore, "_on_output", mutated)


def leak_a_lock(patch):
    """Every 50th release forgets a lock on the tree."""
    release = KvPool.release_kv_cache
    calls = 0

    def mutated(self, holder, tokens, is_insert=True, *, effective_len=None):
        nonlocal calls
        calls += 1
        if calls % 50 == 0:
            self.prefix.lock(self.prefix.match_prefix(np.ascontiguousarray(tokens, dtype=np.int32)))
        release(self, holder, tokens, is_insert, effective_len=effective_len)

    patch.setattr(KvPool, "release_kv_cache", mutated)


def no_cancel_to_old_placements(patch):
    """A placement that was given up is not told."""
    patch.setattr(GatewayCore, "_release_current", lambda self, request, now, out: None)
    patch.setattr(Releases, "let_go", lambda self, *rest: None)


def free_while_a_tier_writes(patch):
    """A request that is over gives its pages back at once, though a tier may still write into them."""
    let_go, restored = Answers._let_go, Filling.on_restored

    def mutated_let_go(self, request, failure, now):
        restoring = isinstance(request.state, Restoring)
        let_go(self, request, failure, now)
        if restoring:
            self.done(request, now)

    def mutated_restored(self, event, now):
        if self._parts.restores._open[event.job].request.kv is not None:
            restored(self, event, now)
        else:
            self._parts.restores.end(event)

    patch.setattr(Answers, "_let_go", mutated_let_go)
    patch.setattr(Filling, "on_restored", mutated_restored)


def trust_what_was_asked_for(patch):
    """Everything that a tier was asked for counts as restored."""
    end = Restores.end

    def mutated(self, event):
        return end(self, dataclasses.replace(event, pages=len(self._open[event.job].command.keys)))

    patch.setattr(Restores, "end", mutated)


def copy_without_a_lease(patch):
    """What is written through is not kept in place while it is copied."""
    begin, end = KvPool.begin_copy, KvPool.end_copy

    def mutated(self, match):
        lease = begin(self, match)
        if lease is not None:
            copy = PrefixLease(lease.length)
            pages = self.prefix.pages(lease)
            end(self, lease)
            held[id(copy)] = (copy, pages)
            return copy
        return None

    def seen(original):
        return lambda self, lease: held[id(lease)][1] if id(lease) in held else original(self, lease)

    held = {}
    patch.setattr(KvPool, "begin_copy", mutated)
    patch.setattr(KvPool, "end_copy", lambda self, lease: held.pop(id(lease)))
    for tree in (UnifiedRadixCache, RadixCacheCpp):
        patch.setattr(tree, "pages", seen(tree.pages))


def forget_what_was_computed(patch):
    """When a receiver dies, all that was computed for it is computed again for the next one."""
    patch.setattr(KeptRequests, "keeps", False)


def keep_for_ever(patch):
    """The grace period does not end."""
    patch.setattr(KeptRequests, "take_due", lambda self, now: [])
    patch.setattr(KeptRequests, "next_deadline", lambda self: None)


def ship_again_without_proof(patch):
    """What was computed for a silent receiver is kept, and shipped to the next one, as if it were proven dead."""
    handle = PrefillCore.handle

    def mutated(self, event, now):
        if isinstance(event, SourceStopping):
            event = SourceAborted(event.key, event.failure)
        if isinstance(event, SourceAborted) and event.key not in self._requests:
            return []
        return handle(self, event, now)

    patch.setattr(PrefillCore, "handle", mutated)


def ship_a_layer_early(patch):
    """Prefill ships layers that the step has not computed yet."""
    on_layers = PrefillCore.on_layers

    def mutated(self, layers, now):
        return on_layers(self, layers + 1, now)

    patch.setattr(PrefillCore, "on_layers", mutated)


def exchange_what_was_shipped(patch):
    """A prompt that left by layers is offered to the tree at once: pages that the receiver is told to read may be
    exchanged for the tree's own."""
    ship_the_rest = Shipping._ship_the_rest

    def mutated(self, request):
        self._pool.cache_unfinished_req(request, request.offer.tokens)
        ship_the_rest(self, request)

    patch.setattr(Shipping, "_ship_the_rest", mutated)


def free_while_a_return_writes(patch):
    """A prefill worker whose request is over gives its pages back, though what it asked back may still arrive."""
    end, returned = PrefillCore._end, PrefillCore._on_returned

    def mutated_end(self, request):
        end(self, request)
        if request.kv is not None and request.number not in self._launched:
            self._give_back(request)

    def mutated_returned(self, event, now):
        if self._returns._open[event.key].request.kv is None:
            self._returns.end(event, now)
        else:
            returned(self, event, now)

    patch.setattr(PrefillCore, "_end", mutated_end)
    patch.setattr(PrefillCore, "_on_returned", mutated_returned)


def go_on_while_pages_are_lent(patch):
    """A decode worker lets a hand-off end before its return has: its pages are freed while they are read."""
    patch.setattr(Returns, "defer", lambda self, event: False)


def trust_what_was_asked_back(patch):
    """A return that failed counts as if all had landed."""
    end = PrefillReturns.end

    def mutated(self, event, now):
        until = self._open[event.key].until
        return end(self, event, now)._replace(until=until)

    patch.setattr(PrefillReturns, "end", mutated)


def start_again_what_was_cancelled(patch):
    """No memory of what is over: a late Submit starts it once more."""
    patch.setattr(Outbox, "is_buried", lambda self, gateway, key, now: False)


def count_a_page_too_many(patch):
    """A hand-off that failed counts one page more than has landed."""
    failed = sink.sink_failed

    def mutated(order, failure, peer_lost, lane, arrivals, rules):
        told = failed(order, failure, peer_lost, lane, arrivals, rules)
        until = min(order.total, told.event.landed_until + rules.page_size)
        return EngineEvent(msgspec.structs.replace(told.event, landed_until=until))

    patch.setattr(sink, "sink_failed", mutated)


def promise_a_slot_too_many(patch):
    """The receiver gives credit for one region more than it has slots."""
    patch.setattr(Receiving, "credit", property(lambda self: self.offer.credit + self.arrivals.slots + 1))


def announce_regions_once(patch):
    """A Chunk that was lost is not sent again."""
    patch.setattr(source, "unacked", lambda state: ())


def say_once_that_all_has_landed(patch):
    """A Commit that was lost is not sent again."""
    committed = sink._committed
    patch.setattr(sink, "_committed", lambda state, event: msgspec.structs.replace(committed(state, event), effects=()))


def begin_the_answer_again(patch):
    """A new placement is not told what the client has already."""
    send = GatewayCore._send_submit

    def mutated(self, request, *rest):
        outputs, request.outputs = request.outputs, []
        send(self, request, *rest)
        request.outputs = outputs

    patch.setattr(GatewayCore, "_send_submit", mutated)


def believe_frames_for_a_predecessor(patch):
    """An endpoint does not look whom a frame is for."""
    on_frame = Endpoint.on_frame

    def mutated(self, frame, now):
        return on_frame(self, msgspec.structs.replace(frame, dst_epoch=self._stamp.epoch), now)

    patch.setattr(Endpoint, "on_frame", mutated)


def go_on_behind_what_differs(patch):
    """A turn that leaves its conversation finds one token more in the session than it shares with it."""
    reusable = Sessions.reusable

    def mutated(self, slot, tokens):
        found = reusable(self, slot, tokens)
        return found + (0 < found < min(len(tokens), slot.record.kv_committed_len))

    patch.setattr(Sessions, "reusable", mutated)


def restore_under_other_names(patch):
    """A tier is asked for the right pages in the wrong order."""
    begin = Restores.begin

    def mutated(self, request, now):
        command = begin(self, request, now)
        return command and dataclasses.replace(command, keys=command.keys[::-1])

    patch.setattr(Restores, "begin", mutated)


def free_a_page_of_the_window(patch):
    """What slides out of sight is freed a page too early."""
    free = SlidingWindow.free_out_of_window
    patch.setattr(
        SlidingWindow, "free_out_of_window", lambda self, record, known: free(self, record, known + self._page_size)
    )


def start_a_successor_without_proof(patch):
    """The controller fills a seat before its process is proven gone."""

    def mutated(self, seat, incarnation, member, reason, now):
        self._changed = True
        self._move(seat, Vacant(now), reason)
        return [KillWorker(seat.spec.worker, incarnation, reason)]

    patch.setattr(ControllerCore, "_kill", mutated)


def listen_to_no_peer_of_a_hand_off(patch):
    """The silence of a hand-off's peer counts for nothing."""
    audience = Roster.audience
    patch.setattr(Roster, "audience", lambda self, partners, now: audience(self, (), now))


def answer_nobody_who_asks(patch):
    """A worker without a hand-off does not say that it lives when it is asked."""
    patch.setattr(Roster, "on_asked", lambda self, sender: None)


def lend_what_may_be_exchanged(patch):
    """Whole pages are shipped as soon as they are computed, though the tree may exchange them for its own."""
    patch.setattr(KvPool, "settled_until", lambda self, record: page_floor(record.kv_committed_len, self.page_size))


def leave_no_room_to_grow(patch):
    """Whoever fits is let in, whatever the others have been reserved."""
    patch.setattr(admission, "_growth_pages", lambda *rest: 0)


def let_nobody_finish_alone(patch):
    """Admission does not see to it that one running request can reach its end when the others give way."""
    of = admission._Load.of
    patch.setattr(admission._Load, "of", lambda *rest: dataclasses.replace(of(*rest), finish_alone_pages=0))


def promise_for_having_asked(patch):
    """A growth that was refused keeps the sliding pages that it was promised for a moment."""
    promise_for = SlidingWindow.promise_for

    def mutated(self, record, length):
        return promise_for(self, record, length) if self.pages_for(length) > record.swa_promised else None

    patch.setattr(SlidingWindow, "promise_for", mutated)


def go_back_to_any_length(patch):
    """A turn that leaves its conversation goes on from there, whether windows and states can or not."""

    def mutated(self, record, length):
        return record.cache_protected_len <= length <= record.kv_committed_len

    patch.setattr(KvPool, "can_go_back", mutated)


def lose_the_slot_that_is_replaced(patch):
    """A turn that did not go on from its session's slot takes the place of that, which nobody gives back."""
    keep = Sessions.keep

    def mutated(self, request, now):
        self._slots.pop(request.session_id, None)
        keep(self, request, now)

    patch.setattr(Sessions, "keep", mutated)


def share_more_in_a_later_turn(patch):
    """Every turn of a session is offered to the tree like a first one."""
    lend = Sessions.lend

    def mutated(self, slot, request):
        lend(self, slot, request)
        request.session_protected_len = None

    patch.setattr(Sessions, "lend", mutated)


def leave_the_slot_behind(patch):
    """A session that has moved stays with its old worker, too, until its time is over."""
    end_turn = SessionBook.end_turn

    def mutated(self, session, worker, now):
        end_turn(self, session, worker, now)

    patch.setattr(SessionBook, "end_turn", mutated)


def restore_the_last_token_too(patch):
    """A tier is asked for all of a prompt, and nobody computes the first output."""
    begin = Restores.begin

    def mutated(self, request, now):
        with patch.context() as inner:
            inner.setattr(DecodeRequest, "wants_first_token", False)
            return begin(self, request, now)

    patch.setattr(Restores, "begin", mutated)


def believe_in_half_a_store(patch):
    """A store that was cut short counts as whole: the rest is never given to a tier again."""
    end = Stores.end

    def mutated(self, event):
        pages = len(self._open[event.job].pages) if event.pages else 0
        return end(self, dataclasses.replace(event, pages=pages))

    patch.setattr(Stores, "end", mutated)


def store_what_was_restored(patch):
    """What came from a tier is given to it once more."""
    patch.setattr(Stores, "found", lambda self, landed: None)


def store_what_was_only_planned(patch):
    """The newest position of a request that gives way goes down, too, though no step has computed it."""
    retract = Stores.retract

    def mutated(self, request, now):
        with patch.context() as inner:
            inner.setattr(DecodeRequest, "fill_len", property(lambda one: one.record.kv_committed_len))
            return retract(self, request, now)

    patch.setattr(Stores, "retract", mutated)


def wait_for_what_does_not_come(patch):
    """A lane that delivers nothing is never given up while its peer lives."""
    patch.setattr(Stalls, "look", lambda self, now: [])


def wait_for_somebody_to_end(patch):
    """What the tree gives back when a prompt is offered to it is no news for those who wait for pages."""
    patch.setattr(
        Caching,
        "_offer",
        lambda self, request, tokens, length: self._pool.cache_finished_req(request, tokens, kv_len_to_handle=length),
    )


def begin_to_count_anew(patch):
    """One who comes back, ahead of all others, ends the count of those who have overtaken a large request."""
    admit = Admission.admit

    def mutated(self, queue, active):
        candidates = list(queue)
        if candidates and candidates[0].retracted:
            self._head = None
        return admit(self, candidates, active)

    patch.setattr(Admission, "admit", mutated)


def push_back_the_dearest(patch):
    """Who has the most to bring back gives way."""
    patch.setattr(retract, "choose_victim", lambda running: choose_dearest(running) if len(running) > 1 else None)


def choose_dearest(running):
    return max(running, key=lambda one: one.record.kv_committed_len - one.record.cache_protected_len)


def put_back_behind_all(patch):
    """Who was pushed back waits behind those who have never run."""

    def mutated(self, request):
        self._queue.append(request)
        self.stir()

    patch.setattr(WaitingRequests, "put_back", mutated)


def cache_thoughts(patch):
    """An answer is cached whether the model was thinking or not."""
    patch.setattr(DecodeRequest, "effective_kv_committed_len", property(lambda self: self.record.kv_committed_len))


def keep_what_a_session_had(patch):
    """What a session leaves in the tree is not given to the tiers."""

    def mutated(self, session_id):
        slot = self._slots.pop(session_id, None)
        if slot is not None:
            self._pool.release_kv_cache(slot, slot.tokens, effective_len=slot.effective_len)
        return slot is not None

    patch.setattr(Sessions, "close", mutated)


def leave_the_end_to_a_re_send(patch):
    """A sink that has ended does not send Cancel until it would send it again."""
    draining = sink._draining

    def mutated(state, event, now, rules):
        step = draining(state, event, now, rules)
        return msgspec.structs.replace(step, effects=tuple(one for one in step.effects if isinstance(one, EngineEvent)))

    patch.setattr(sink, "_draining", mutated)


def begin_what_was_cancelled(patch):
    """A Cancel that comes before its Offer is answered, and not remembered."""
    patch.setattr(HandoffBook, "bury_unasked", lambda self, key, state, now: None)


def take_credit_back(patch):
    """An acknowledgement that was overtaken by a later one lowers the credit again."""
    sending = source._sending

    def mutated(state, event, now, rules):
        step = sending(state, event, now, rules)
        if isinstance(event, Ack) and isinstance(step.state, Sending):
            return msgspec.structs.replace(step, state=msgspec.structs.replace(step.state, credit=event.credit))
        return step

    patch.setattr(source, "_sending", mutated)


def go_back_to_an_older_view(patch):
    """A membership that was overtaken by a newer one is believed."""
    on_membership = Roster.on_membership

    def mutated(self, controller, membership, now):
        self._source = (-1, -1)
        return on_membership(self, controller, membership, now)

    patch.setattr(Roster, "on_membership", mutated)


def overlook_a_death_behind_a_successor(patch):
    """A process counts as dead when its seat is empty, not when another one sits there."""
    on_membership = Endpoint.on_membership

    def mutated(self, view, now):
        after = {member.stamp.worker: member.stamp for member in view.members}
        self._listed = {worker: after.get(worker, stamp) for worker, stamp in self._listed.items()}
        return on_membership(self, view, now)

    patch.setattr(Endpoint, "on_membership", mutated)


def unlist_before_the_proof(patch):
    """A process that is to be killed is published no more, though it is not proven dead."""
    membership = ControllerCore.membership

    def mutated(self):
        dying = {seat.spec.worker for seat in self._seats.values() if isinstance(seat.state, Killing)}
        told = membership(self)
        members = tuple(one for one in told.members if one.stamp.worker not in dying)
        return msgspec.structs.replace(told, members=members)

    patch.setattr(ControllerCore, "membership", mutated)


def let_in_whoever_came_first(patch):
    """One queue for all keys: who asks for much at once is served before those who come after."""

    def pop(self):
        waiting = [(entry.number, share) for share, entry in self._waiting.values()]
        _, share = min(waiting, key=lambda one: one[0])
        entry = min(share.waiting, key=lambda one: one.number)
        self.leave(entry.request_id)
        return entry.request_id, entry.tokens

    patch.setattr(FairQueue, "pop", pop)


def forget_the_weights(patch):
    """Every key has the same share."""
    join = FairQueue.join

    def mutated(self, request_id, tenant, priority, tokens):
        join(self, request_id, dataclasses.replace(tenant, weight=1.0), priority, tokens)

    patch.setattr(FairQueue, "join", mutated)


def save_up_for_later(patch):
    """A key that has asked for nothing has all of it to come."""
    join = FairQueue.join

    def mutated(self, request_id, tenant, priority, tokens):
        before = self._shares[tenant.name].counter if tenant.name in self._shares else 0.0
        join(self, request_id, tenant, priority, tokens)
        self._shares[tenant.name].counter = before

    patch.setattr(FairQueue, "join", mutated)


def take_answers_for_nothing(patch):
    """Only prompts count."""
    patch.setattr(FairQueue, "said", lambda self, tenant, tokens: None)


def leave_room_unused(patch):
    """Who waits is looked at only when somebody new comes."""
    handle, let_in = GatewayCore.handle, GatewayCore._let_in

    def mutated(self, event, now):
        patch.setattr(GatewayCore, "_let_in", lambda self, now, out: None)
        try:
            return handle(self, event, now)
        finally:
            patch.setattr(GatewayCore, "_let_in", let_in)

    patch.setattr(GatewayCore, "handle", mutated)


def keep_nobody_waiting(patch):
    """Everything goes to the workers at once, and waits there, where keys are not known."""
    patch.setattr(GatewayAdmission, "_room_of", lambda self, load: 1 << 20)


def refuse_whoever_comes_last(patch):
    """Who finds all places taken has none, whoever has taken them."""
    patch.setattr(FairQueue, "last_of_longest", lambda self, than: None)


def keep_quiet_about_what_is_evicted(patch):
    """A pool says what its tree has come to hold, and not what it gives up."""
    patch.setattr(PageLog, "removed", lambda self, pages: None)


def take_batches_out_of_turn(patch):
    """An index takes a batch of changes before those that come before it."""

    def mutated(self, sender, message, now):
        known = self._known.get(sender)
        if known is not None and message.seq > known.seq:
            known.seq, known.ahead = message.seq - 1, {message.seq: message}
            self._take_ahead(known, now)

    patch.setattr(PrefixIndex, "on_events", mutated)


def ask_for_no_changes(patch):
    """A gateway that has missed a batch of changes does not ask for it."""
    patch.setattr(PrefixIndex, "wants", lambda self, sender, seq, now: None)


def inherit_a_predecessors_cache(patch):
    """A new process in a seat is taken to hold what its predecessor did."""
    alive = PrefixIndex.alive

    def mutated(self, stamps):
        names = {stamp.worker: known.names for stamp, known in self._known.items()}
        alive(self, stamps)
        for stamp, known in self._known.items():
            known.names = names.get(stamp.worker, known.names)

    patch.setattr(PrefixIndex, "alive", mutated)


def ask_whoever_computes_prompts(patch):
    """A decode worker takes KV from any prefill worker, whatever that means by a page."""

    def mutated(self, request, member):
        silent = member.stamp.worker in self._silent
        return member.role == "prefill" and not silent and member.stamp not in request.tried

    patch.setattr(Peers, "_can_fill", mutated)


def go_on_with_whoever_is_there(patch):
    """An answer that was begun by one version of a model is gone on with by another."""
    place = Router.place
    patch.setattr(Router, "place", lambda self, *args, group=None, **named: place(self, *args, **named))


def take_all_for_alike(patch):
    """A controller that does not look at fingerprints: all processes are of one group."""
    patch.setattr(controller_core, "group_of", lambda fingerprint: "all")
    patch.setattr(fitting, "group_of", lambda fingerprint: "all")


def look_at_no_ticket(patch):
    """Whoever reaches the control plane begins hand-offs in anybody's name."""
    patch.setattr(Tickets, "take", lambda self, offer, sink: None)


def believe_in_any_mac(patch):
    """A ticket is a number that anybody may say."""
    patch.setattr(Tickets, "take", lambda self, offer, sink: self._use(sink, offer.ticket.number))


def take_a_ticket_twice(patch):
    """An offer that comes again when its hand-off has been forgotten begins another one."""
    take = Tickets.take

    def mutated(self, offer, sink):
        fault = take(self, offer, sink)
        return None if fault is TicketFault.USED else fault

    patch.setattr(Tickets, "take", mutated)


def forget_time_while_pages_are_copied(patch):
    """The time of a request that gave way counts for nothing while a tier copies its pages."""
    fail = Answers.fail

    def mutated(self, request, code, reason, now):
        if not (code is ErrorCode.DEADLINE_EXCEEDED and isinstance(request.state, Storing)):
            fail(self, request, code, reason, now)

    patch.setattr(Answers, "fail", mutated)


def keep_a_turn_without_an_answer(patch):
    """A turn of a session leaves its KV to the next one, however it has ended."""
    done = Answers.done

    def mutated(self, request, now):
        request.answered = True
        done(self, request, now)

    patch.setattr(Answers, "done", mutated)


def forget_that_it_was_answered(patch):
    """A turn that a gateway ends, for it has found a stop string, is taken for one that nobody wants any more."""
    on_cancel = DecodeCore._on_cancel

    def mutated(self, sender, message, now):
        on_cancel(self, sender, msgspec.structs.replace(message, answered=False), now)

    patch.setattr(DecodeCore, "_on_cancel", mutated)


def answer_whom_nobody_hears(patch):
    """A decode worker goes on for a gateway that has fallen silent."""
    patch.setattr(Peers, "is_silent", lambda self, stamp: False)


def let_one_too_many_own_pages(patch):
    """The bound of those who own pages is one too high."""
    pre_alloc = Admission._pre_alloc
    patch.setattr(Admission, "_pre_alloc", lambda self, one, active, load: pre_alloc(self, one, active - 1, load))


def let_one_too_many_wait(patch):
    """The bound of those who wait at a decode worker is one too high."""
    refusal = Door.refusal
    patch.setattr(Door, "refusal", lambda self, message, waiting: refusal(self, message, waiting - 1))


def go_on_without_the_session(patch):
    """A second turn finds nothing of its session, and is computed anew where it was to fail."""
    refusal = Door.refusal

    def mutated(self, message, waiting):
        turn = message.session_turn if message.session_turn > 1 else 0
        return refusal(self, msgspec.structs.replace(message, session_turn=turn), waiting)

    patch.setattr(Door, "refusal", mutated)


def ask_again_and_again(patch):
    """Who has failed a hand-off is asked for it again."""

    def mutated(self, request, member):
        return member.role == "prefill" and member.group == self._group and member.stamp.worker not in self._silent

    patch.setattr(Peers, "_can_fill", mutated)


def score_from_the_cache(patch):
    """A prompt whose tokens' log probabilities are wanted is computed from where it is cached."""
    patch.setattr(SourceRequest, "scored", False)


def lose_the_scores_of_a_prompt(patch):
    """Log probabilities of a prompt's tokens are said with the first token, and not again with what was missed."""
    piece = outbox._piece
    patch.setattr(outbox, "_piece", lambda *rest: msgspec.structs.replace(piece(*rest), prompt_logprobs=None))


def keep_while_leaving(patch):
    """A prefill worker that drains keeps what it has for receivers that may come."""
    patch.setattr(KeptRequests, "take_oldest", lambda self: None)


def end_without_a_word(patch):
    """A request that ends before its first token is not cancelled at its worker."""
    fail = GatewayCore._fail

    def mutated(self, request, failure, now, out):
        with patch.context() as inner:
            if not request.outputs:
                inner.setattr(GatewayCore, "_release_current", lambda self, *rest, **named: None)
            fail(self, request, failure, now, out)

    patch.setattr(GatewayCore, "_fail", mutated)


def ask_who_has_refused(patch):
    """A gateway does not remember who has refused a request."""
    place = Router.place

    def mutated(self, role, prompt, draw, refused_by=(), *rest, **named):
        return place(self, role, prompt, draw, (), *rest, **named)

    patch.setattr(Router, "place", mutated)


def give_to_who_drains(patch):
    """A gateway takes no notice of who drains."""
    heard = Seats.heard
    patch.setattr(
        Seats, "heard", lambda self, stamp, load: heard(self, stamp, msgspec.structs.replace(load, draining=False))
    )


def count_no_turns(patch):
    """A gateway does not know how many turns of a session there were."""
    end_turn = SessionBook.end_turn

    def mutated(self, session, worker, now):
        before = end_turn(self, session, worker, now)
        session.turns = min(session.turns, 1)
        return before

    patch.setattr(SessionBook, "end_turn", mutated)


def keep_what_was_closed_meanwhile(patch):
    """A session that is closed while a turn is answered stays with its worker until its time is over."""
    patch.setattr(SessionBook, "is_open", lambda self, session: True)


def restart_without_a_bound(patch):
    """A seat is filled as often as its process dies."""
    init = ControllerCore.__init__

    def mutated(self, seats, liveness, *rest):
        init(self, seats, dataclasses.replace(liveness, max_restarts_per_minute=1 << 20), *rest)

    patch.setattr(ControllerCore, "__init__", mutated)


def let_the_last_one_go(patch):
    """Whoever is alone in his role may change it."""
    patch.setattr(SeatBook, "has_peer", lambda self, seat, but_extra=False: True)


def let_several_leave_at_once(patch):
    """Who is to be replaced in an upgrade is asked to leave whoever else is away."""
    next_to_replace = seat_book.next_to_replace
    patch.setattr(
        seat_book,
        "next_to_replace",
        lambda turns: next_to_replace([dataclasses.replace(one, there=True) for one in turns]),
    )


def ask_to_leave_before_looking(patch):
    """A controller asks the next one to leave, and then looks who has fallen silent."""
    on_timer, go_on = ControllerCore.on_timer, ControllerCore._go_on_with_changes

    def mutated(self, now):
        self.book.prove(self._liveness.dead_after_s, now)
        effects = [] if self._shutting_down else go_on(self, now)
        return effects + on_timer(self, now)

    patch.setattr(ControllerCore, "on_timer", mutated)
    patch.setattr(ControllerCore, "_go_on_with_changes", lambda self, now: [])


def go_back_a_page_too_far(patch):
    """A turn goes on where a page of its window is gone."""
    is_live = SlidingWindow.is_live
    patch.setattr(
        SlidingWindow, "is_live", lambda self, record, length: is_live(self, record, length + self._page_size)
    )


def go_back_by_a_token(patch):
    """A recurrent state counts as that of one token less, too."""
    can_go_back = KvPool.can_go_back

    def mutated(self, record, length):
        return can_go_back(self, record, length) or length == record.kv_committed_len - 1

    patch.setattr(KvPool, "can_go_back", mutated)


def count_what_the_receiver_has(patch):
    """A prefill worker says that the receiver's own tokens were in its cache."""
    ship = Shipping.ship

    def mutated(self, request):
        request.cached_tokens += request.offer.start
        ship(self, request)
        request.cached_tokens -= request.offer.start

    patch.setattr(Shipping, "ship", mutated)


def let_one_too_many_prompts_wait(patch):
    """The bound of those who wait at a prefill worker is one too high."""
    init = PrefillCore.__init__

    def mutated(self, pool, config, *rest, **named):
        most = config.max_queued_requests + 1
        init(self, pool, dataclasses.replace(config, max_queued_requests=most), *rest, **named)

    patch.setattr(PrefillCore, "__init__", mutated)


def keep_while_others_wait(patch):
    """What is kept for receivers that may come gives way to nobody."""
    admit = PrefillCore._admit

    def mutated(self, now):
        with patch.context() as inner:
            inner.setattr(KeptRequests, "take_oldest", lambda self: None)
            admit(self, now)

    patch.setattr(PrefillCore, "_admit", mutated)


def free_while_a_step_writes(patch):
    """A prefill worker gives back the pages of a hand-off that has ended, though a step is computing it."""

    def mutated(self, request):
        request.state = Ended()
        if not self._returns.holds(request):
            self._give_back(request)

    patch.setattr(PrefillCore, "_end", mutated)


def count_no_hand_offs(patch):
    """A decode worker says nothing of those whose KV is on its way."""
    load = DecodeCore.load

    def mutated(self):
        steps = self._parts.steps
        return msgspec.structs.replace(load(self), running=len(steps.running) + len(steps.prefilling))

    patch.setattr(DecodeCore, "load", mutated)


def remember_no_more_than_before(patch):
    """A decode worker that remembers as many ended placements as it may remembers no other one."""
    bury = Outbox.bury

    def mutated(self, gateway, key, now):
        if len(self._tombstones) < self._max_tombstones:
            bury(self, gateway, key, now)

    patch.setattr(Outbox, "bury", mutated)


def end_sessions_in_use(patch):
    """A session whose turn is being answered counts as one that nobody uses."""

    def mutated(self, now):
        late = [one for one in self._sessions.values() if one.used_s + self._ttl_s <= now]
        return [self._sessions.pop(one.session_id) for one in late]

    patch.setattr(SessionBook, "pop_expired", mutated)


def be_as_urgent_as_one_likes(patch):
    """A gateway does not look how urgent a key may be."""
    submit = GatewayCore.submit

    def unbounded(one):
        return dataclasses.replace(one, top_priority=-MAX_PRIORITY) if isinstance(one, Tenant) else one

    def mutated(self, *args):
        return submit(self, *map(unbounded, args))

    patch.setattr(GatewayCore, "submit", mutated)


def ask_without_a_limit(patch):
    """A gateway does not look how often a key may ask."""
    patch.setattr(RateLimits, "wait_s", lambda self, tenant, now: (0.0, ""))


def limit_prompts_alone(patch):
    """Answers do not count towards the tokens of a key."""
    patch.setattr(RateLimits, "said", lambda self, tenant, tokens, now: None)


def guide_no_answer_that_goes_on(patch):
    """An answer that goes on at another worker does not follow its grammar there."""
    on_submit = DecodeCore._on_submit

    def mutated(self, sender, message, now):
        if message.outputs:
            sampling = msgspec.structs.replace(message.sampling, grammar=None)
            message = msgspec.structs.replace(message, sampling=sampling)
        on_submit(self, sender, message, now)

    patch.setattr(DecodeCore, "_on_submit", mutated)


MUTATIONS: list[Callable[[pytest.MonkeyPatch], None]] = [
    free_on_abort_without_fence,
    acknowledge_before_scatter,
    ignore_epoch,
    free_source_on_stopping,
    silence_is_proof,
    insert_what_has_not_landed,
    say_the_end_once,
    never_ask_for_gaps,
    leak_a_lock,
    no_cancel_to_old_placements,
    free_while_a_tier_writes,
    trust_what_was_asked_for,
    ship_a_layer_early,
    exchange_what_was_shipped,
    copy_without_a_lease,
    forget_what_was_computed,
    keep_for_ever,
    ship_again_without_proof,
    free_while_a_return_writes,
    go_on_while_pages_are_lent,
    trust_what_was_asked_back,
    start_again_what_was_cancelled,
    count_a_page_too_many,
    promise_a_slot_too_many,
    announce_regions_once,
    say_once_that_all_has_landed,
    begin_the_answer_again,
    believe_frames_for_a_predecessor,
    go_on_behind_what_differs,
    restore_under_other_names,
    free_a_page_of_the_window,
    start_a_successor_without_proof,
    listen_to_no_peer_of_a_hand_off,
    answer_nobody_who_asks,
    lend_what_may_be_exchanged,
    leave_no_room_to_grow,
    let_nobody_finish_alone,
    promise_for_having_asked,
    go_back_to_any_length,
    lose_the_slot_that_is_replaced,
    share_more_in_a_later_turn,
    leave_the_slot_behind,
    restore_the_last_token_too,
    believe_in_half_a_store,
    store_what_was_restored,
    store_what_was_only_planned,
    wait_for_somebody_to_end,
    begin_to_count_anew,
    push_back_the_dearest,
    put_back_behind_all,
    cache_thoughts,
    keep_what_a_session_had,
    wait_for_what_does_not_come,
    leave_the_end_to_a_re_send,
    begin_what_was_cancelled,
    take_credit_back,
    go_back_to_an_older_view,
    overlook_a_death_behind_a_successor,
    unlist_before_the_proof,
    let_in_whoever_came_first,
    forget_the_weights,
    save_up_for_later,
    take_answers_for_nothing,
    leave_room_unused,
    keep_nobody_waiting,
    refuse_whoever_comes_last,
    keep_quiet_about_what_is_evicted,
    take_batches_out_of_turn,
    ask_for_no_changes,
    inherit_a_predecessors_cache,
    ask_whoever_computes_prompts,
    go_on_with_whoever_is_there,
    take_all_for_alike,
    look_at_no_ticket,
    believe_in_any_mac,
    take_a_ticket_twice,
    forget_time_while_pages_are_copied,
    keep_a_turn_without_an_answer,
    forget_that_it_was_answered,
    answer_whom_nobody_hears,
    let_one_too_many_own_pages,
    let_one_too_many_wait,
    go_on_without_the_session,
    ask_again_and_again,
    score_from_the_cache,
    lose_the_scores_of_a_prompt,
    keep_while_leaving,
    end_without_a_word,
    ask_who_has_refused,
    give_to_who_drains,
    count_no_turns,
    keep_what_was_closed_meanwhile,
    restart_without_a_bound,
    let_the_last_one_go,
    let_several_leave_at_once,
    ask_to_leave_before_looking,
    go_back_a_page_too_far,
    go_back_by_a_token,
    count_what_the_receiver_has,
    let_one_too_many_prompts_wait,
    keep_while_others_wait,
    free_while_a_step_writes,
    count_no_hand_offs,
    remember_no_more_than_before,
    end_sessions_in_use,
    be_as_urgent_as_one_likes,
    ask_without_a_limit,
    limit_prompts_alone,
    guide_no_answer_that_goes_on,
]


def told() -> dict[str, int]:
    """What the document says of each: so many worlds at most."""
    rows = re.findall(r"^\| `(\w+)` \|[^|]*\| [^|]* \| (\d+) \|$", DOCUMENT.read_text(), re.MULTILINE)
    return {name: int(most) for name, most in rows}


def test_the_document_has_all_mutations() -> None:
    assert list(told()) == [one.__name__ for one in MUTATIONS]
    assert max(told().values()) <= MOST_WORLDS


@pytest.mark.slow
@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda one: one.__name__)
def test_the_world_notices(mutation: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch) -> None:
    mutation(monkeypatch)
    found = noticed()
    assert found is not None, f"no world of {MOST_WORLDS} noticed"
    print(f"\n{mutation.__name__}: {found.worlds} worlds, {found.where}: {found.how[:200]}")
    most = told()[mutation.__name__]
    assert found.worlds <= most, f"the document says {most} worlds at most, and it took {found.worlds}"
