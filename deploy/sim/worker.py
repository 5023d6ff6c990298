"""A simulated worker: the shell of a real prefill or decode core, on virtual time.

It is an engine thread (busy while it computes: events wait) and an I/O thread around the real roster, endpoint and
core. It does what `engine/loop.py`, `transfer/io.py` and `transfer/worker.py` do, without sockets and threads, and is
the oracle that looks at every page which a hand-off or a tier touches.
"""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Generator, Iterable
from typing import TYPE_CHECKING

import numpy as np
from msgspec import structs

from baton.common.engine.batch import Batch
from baton.common.engine.breaking_runner import BreakingRunner
from baton.common.engine.chunk_predictor import ChunkPredictor
from baton.common.engine.core_api import Drain, EngineCore, HandOver, MembershipView, SendTo
from baton.common.engine.fake_runner import FakeRunner, FakeTicket, fake_runner, run_out
from baton.common.engine.kv_feed import KvFeed
from baton.common.engine.profiling import predictor_for
from baton.common.ids import HandoffKey, Stamp, WorkerId
from baton.common.kv.census import Holding, OwnerClass
from baton.common.kv.checker import InvariantChecker
from baton.common.kv.compiled_checker import StepChecker
from baton.common.kv.layout import Component
from baton.common.kv.pool import KvPool
from baton.common.kv.tiers.api import TierCommand
from baton.common.kv.tiers.keys import PageKey
from baton.common.messages import Frame, HandoffBody, KvEvents, Load
from baton.decode.core import DecodeCore
from baton.deploy.sim.data_plane import SimDataPlane
from baton.deploy.sim.lanes import DIRECT_LANE, PULL_LANE, STAGED_LANE
from baton.deploy.sim.oracles import (
    AdmissionOracle,
    SessionOracle,
    assert_no_prompt_waits_in_vain,
    assert_step_fits,
    assert_step_keeps_its_pages,
)
from baton.deploy.sim.process import MemberProcess, Wakeup
from baton.deploy.sim.tier import SimTier, page_keys_of
from baton.deploy.sim.watch import HandoffWatch
from baton.deploy.sim.watch_members import ViewWatch
from baton.deploy.sim.watch_placements import PlacementWatch
from baton.deploy.sim.watch_prompts import PromptWatch
from baton.prefill.core import PrefillCore
from baton.prefill.pipelining import LayerGroups
from baton.transfer.api import OpenSink, SinkCommand, SourceCommand, return_key
from baton.transfer.endpoint import Endpoint
from baton.transfer.session.effects import DataEvent, EndpointEffect, EngineEvent, SendFrame
from baton.transfer.staging import state_pieces_of

if TYPE_CHECKING:
    from baton.deploy.sim.world import World


NEVER_S = 1e6
MOST_OWNERS = 1024
"""Of hand-offs, those remembered for the oracle: many more than have pages at one time."""
READ_BY_PEERS = frozenset({OwnerClass.OUTGOING, OwnerClass.QUARANTINED})


@functools.cache
def _arrival(kind: str) -> str:
    """In the trace."""
    return f"< {kind}"


def shared_secret(own: Stamp, peer: Stamp) -> bytes:
    """Another one for each two processes. In the simulated world nobody looks for it."""
    return repr(sorted(map(repr, (own, peer)))).encode()


class WorkerProcess(MemberProcess):
    """A prefill or decode worker."""

    def __init__(self, world: World, stamp: Stamp, role: str, revision: int) -> None:
        self._settings = settings = world.settings
        config = settings.prefill_config if role == "prefill" else settings.decode_config
        num_pages = settings.num_pages(role, successor=stamp.incarnation > 1)
        self.pool = KvPool(
            settings.layout,
            num_pages,
            settings.rows + (settings.decode_config.max_sessions if role == "decode" else 0),
            settings.max_context_len,
            settings.prefix_cache,
            step_tokens=config.chunk_tokens,
            events=settings.routing.indexed,
        )
        feed = KvFeed.of(self.pool, indexed=settings.routing.indexed)
        self.runner: FakeRunner = fake_runner(
            num_pages,
            settings.page_size,
            layout=settings.layout,
            max_positions=settings.max_context_len,
            cost=settings.step,
            bytes_per_token=settings.bytes_per_token,
            layers=settings.layers,
        )
        predictor = self._profile(config.chunk_tokens, config.chunk_target_s)
        self.core = self._make_core(stamp, role, feed, predictor)
        memory = self.runner.memory
        self.endpoint = Endpoint(
            stamp,
            settings.transfer,
            memory.layout,
            (PULL_LANE, DIRECT_LANE, STAGED_LANE),
            state_pieces=state_pieces_of(memory),
            layers=memory.layers,
            max_live_sources=settings.max_live_sources,
            secret_with=functools.partial(shared_secret, stamp),
        )
        super().__init__(world, stamp, role, revision)
        pieces = state_pieces_of(memory)
        self._watch = HandoffWatch(stamp, settings.page_size, pieces, settings.transfer, world.is_prompt)
        self.data = SimDataPlane(self, memory, settings, world.schedule, world.network, world.worker_at, world.probe)
        self.tier = SimTier(self, memory.main.as_bytes(), world.tier_store)
        self._checker = StepChecker(self.pool, self.core.holdings)
        self._chunk_tokens = config.chunk_tokens
        decode = settings.decode_config
        self._admissions = AdmissionOracle(self.pool, decode.num_reserved_decode_tokens, decode.max_running_requests)
        self._sessions = SessionOracle(decode.max_sessions, decode.session_ttl_s)
        self._inbox: deque[object] = deque()
        self._computing: Batch | None = None
        self._stages: Generator[int, None, FakeTicket] | None = None  # of the step, where it reports layers
        self._step_began_s = 0.0
        self._hangs = False
        self._engine_timer = Wakeup(self, self._turn, "engine timer")
        self._io_timer = Wakeup(self, self._io_due, "io timer")
        self._to_io_s = self._to_engine_s = 0.0
        self._view = ViewWatch(self.name)
        self._placements: PlacementWatch | None = None
        self._prompts: PromptWatch | None = None
        if isinstance(self.core, DecodeCore):
            self._placements = PlacementWatch(self.name, self.core, decode, settings.transfer)
        elif isinstance(self.core, PrefillCore):
            self._prompts = PromptWatch(self.name, self.core, settings.prefill_config)
        self.owners: dict[HandoffKey, str] = {}  # request of each sink, for the oracle
        self._asked: dict[int, tuple[int, ...]] = {}  # by hand-off: the epochs of whom it was asked of

    def _make_core(self, stamp: Stamp, role: str, feed: KvFeed | None, predictor: ChunkPredictor | None) -> EngineCore:
        settings, vocab_size = self._settings, self.runner.vocab_size
        if role == "prefill":
            groups = LayerGroups.of(self.runner.memory, settings.prefill_config.layer_groups)
            return PrefillCore(self.pool, settings.prefill_config, vocab_size, groups, feed=feed, predictor=predictor)
        return DecodeCore(
            stamp,
            self.pool,
            settings.decode_config,
            settings.transfer,
            settings.max_context_len,
            vocab_size,
            settings.tiers,
            page_keys_of(settings),
            feed=feed,
            predictor=predictor,
        )

    def _profile(self, chunk_tokens: int, target_s: float) -> ChunkPredictor | None:
        """In worlds where one is wanted; in some of them it fails, and nothing else does."""
        if not target_s:
            return None
        runner = BreakingRunner(self.runner, self._settings.profile_steps, RuntimeError("the simulated profile breaks"))
        found = predictor_for(self.pool, runner, chunk_tokens, target_s)
        return found if isinstance(found, ChunkPredictor) else None

    # ----------------------------------------------------------------------------------- engine thread

    def load(self) -> Load:
        load = self.core.load()
        if self._placements is not None:
            self._placements.counts(load)
        return load if self._computing is None else structs.replace(load, step_age_s=self.now - self._step_began_s)

    def hang(self) -> None:
        """The next step does not end. Everything else goes on: it says that it lives."""
        self._hangs = True

    def drain(self) -> None:
        self.deliver(Drain())

    def hand_over(self) -> None:
        self.deliver(HandOver())

    def deliver(self, event: object) -> None:
        """From the I/O thread to the engine: in order, a moment later."""
        self._to_engine_s = due_s = max(self._to_engine_s, self._after_a_hop())
        self.schedule.enter(due_s, self, _arrival(type(event).__name__), self._arrive, (event,))

    def _arrive(self, event: object) -> None:
        self._inbox.append(event)
        if self._computing is None:
            self._turn()
        elif self._settings.overlapping:
            self._take_events(self.now)
            self._checker.check(self.core.records())
            assert_step_keeps_its_pages(self._computing, self.pool)

    def _turn(self) -> None:
        """Events, due timers, then at most one step; nothing at all while a step is running."""
        if self._computing is not None:
            return
        core, now = self.core, self.now
        self._take_events(now)
        self._computing = batch = core.next_batch(now)
        self._checker.check(core.records())
        if batch is None:
            self._engine_timer.want(core.next_deadline())
            return
        assert_step_fits(batch, self._chunk_tokens)
        self._step_began_s = now
        cost_s = NEVER_S if self._hangs else self.runner.step_cost_s(batch)
        for layers in batch.report_after:
            share = layers / self._settings.layers
            self.after(cost_s * share, self._layers_over, "layers")
        self.after(cost_s, self._step_over, "step")

    def _take_events(self, now: float) -> None:
        """And due timers."""
        core, placements, prompts = self.core, self._placements, self._prompts
        while self._inbox:
            event = self._inbox.popleft()
            if isinstance(event, MembershipView):
                self._view.told(event)
            if placements is not None:
                placements.before(event)
                effects = core.handle(event, now)
                placements.after(event, effects, now)
            else:
                assert prompts is not None
                prompts.before(event)
                effects = core.handle(event, now)
                prompts.after(event, effects, self._computing is not None)
            self._post(effects)
            self._look_who_waits()
        due_s = core.next_deadline()
        if due_s is not None and due_s <= now:
            effects = core.on_timer(now)
            if placements is not None:
                placements.timer(effects, now)
            elif prompts is not None:
                prompts.says(effects)
            self._post(effects)
            self._look_who_waits()

    def _look_who_waits(self) -> None:
        """After each event by itself: who was let in with the first may not count with what came of the second."""
        core, records = self.core, self.core.records()
        if isinstance(core, DecodeCore):
            self._admissions.look(core, records)
        elif isinstance(core, PrefillCore):
            assert_no_prompt_waits_in_vain(self.pool, core, records)
            if self._prompts is not None and self._computing is None:
                self._prompts.look()

    def _layers_over(self) -> None:
        """The step has come so far: these layers are in the pages, the others are not."""
        assert self._computing is not None
        self._stages = self._stages or self.runner.stages(self._computing)
        layers = next(self._stages)
        self.world.probe("layers_over", (self, layers))
        self._post(self.core.on_layers(layers, self.now))
        self._checker.check(self.core.records())

    def _step_over(self) -> None:
        assert self._computing is not None
        result = self.runner.collect(run_out(self._stages or self.runner.stages(self._computing)))
        self._computing = self._stages = None
        self.world.probe("step_over", (self, self._step_began_s))
        if self._prompts is not None:
            self._prompts.before_filling()
        effects = self.core.on_step(result, self.now)
        if self._placements is not None:
            self._placements.says(effects, self.now)
        elif self._prompts is not None:
            self._prompts.filled()
            self._prompts.says(effects)
        self._post(effects)
        self._look_who_waits()
        self._turn()

    def _post(self, effects: Iterable[object]) -> None:
        """From the engine to the I/O thread: in order, a moment later."""
        enter = self.schedule.enter
        for effect in effects:
            if isinstance(effect, OpenSink):
                self._view.asks(effect.peer)
                epoch = self._view.epoch_of(effect.peer)
                self._assert_alike(effect.peer, epoch)
                self._assert_not_in_vain(effect.key, epoch)
            elif isinstance(effect, SendTo) and isinstance(effect.body, KvEvents):
                self.world.caches.said(self.stamp, effect.body)
            self._to_io_s = due_s = max(self._to_io_s, self._after_a_hop())
            enter(due_s, self, "> io", self._io_take, (effect,))

    def _after_a_hop(self) -> float:
        schedule = self.schedule
        return schedule.now + schedule.rng.random() * self._settings.thread_hop_s

    def _assert_not_in_vain(self, key: HandoffKey, epoch: int) -> None:
        """Who has failed a hand-off is asked once more at most, where it was the lane that had failed."""
        asked = self._asked.pop(key.handoff, ())
        assert asked.count(epoch) < 2 or key.attempt < 0, f"{self.name} asks for {key} a third time"
        self._asked[key.handoff] = (*asked, epoch)
        if len(self._asked) > MOST_OWNERS:
            del self._asked[next(iter(self._asked))]

    def check(self) -> None:
        """All KV invariants of this worker, by the walk that explains what it finds."""
        InvariantChecker().check(self.pool, self.core.holdings())

    def look_at_what_is_kept(self) -> None:
        """Unless it cannot have done anything about it."""
        if self.paused or self._hangs:
            return
        if isinstance(self.core, DecodeCore) and self._placements is not None:
            self._sessions.look(self.core, self._placements.answered, self.now)
            self._placements.look(self.now)
        elif self._computing is None and self.core.load().draining:
            kept = [one.owner_id for one in self.core.holdings() if one.owner_class is OwnerClass.REQUEST]
            assert not kept, f"{self.name} drains, and keeps {kept} for a receiver that may come"

    # -------------------------------------------------------------------------------------- I/O thread

    def _io_take(self, effect: object) -> None:
        if isinstance(effect, SendTo):
            self.send(effect.worker, effect.epoch, effect.body)
            return
        if isinstance(effect, TierCommand):
            self.world.probe("tier_command", (self, effect))
            self.tier.take(effect)
            return
        assert isinstance(effect, SinkCommand | SourceCommand), effect
        if isinstance(effect, OpenSink):
            self.owners[effect.key] = effect.request_id
            if len(self.owners) > MOST_OWNERS:
                del self.owners[next(iter(self.owners))]
        self.world.probe("command", (self, effect))
        now = self.now
        effects = self.endpoint.command(effect, now)
        self._watch.command(effect, effects, now)
        self._carry_out(effects)

    def _io_due(self) -> None:
        now = self.now
        effects = self.endpoint.on_timer(now)
        self._watch.timer(effects, now)
        self._carry_out(effects)

    def partners(self) -> list[Stamp]:
        return self.endpoint.peers()

    def hand_off_frame(self, frame: Frame) -> None:
        self.world.probe("hand_off_frame", (self, frame))
        now = self.now
        effects = self.endpoint.on_frame(frame, now)
        if effects:
            self._assert_alike(frame.src.worker, frame.src.epoch)
        self._watch.frame(frame, effects, now)
        self._carry_out(effects)

    def _assert_alike(self, peer: WorkerId, epoch: int) -> None:
        """Pages mean the same to both. One that has had a successor is not there any more."""
        other = self.world.seats.get(peer)
        known = isinstance(other, WorkerProcess) and other.stamp.epoch == epoch
        layout = other.layout if isinstance(other, WorkerProcess) and known else self.layout
        assert layout == self.layout, f"a hand-off between {self.name} with {self.layout} and {peer} with {layout}"

    def stray_frame(self, frame: Frame) -> None:
        """An endpoint does not rely on others to drop it."""
        if isinstance(frame.body, HandoffBody):
            effects = self.endpoint.on_frame(frame, self.now)
            assert not effects, f"{self.name} acts on {type(frame.body).__name__} of {frame.src}: {effects}"

    def membership_changed(self, view: MembershipView) -> None:
        now = self.now
        effects = self.endpoint.on_membership(view, now)
        self._watch.membership(view, effects, now)
        self._carry_out(effects)

    def _speak(self) -> None:
        super()._speak()
        now = self.now
        self._watch.look(now)
        for worker in sorted(self.roster.silent):
            effects = self.endpoint.on_peer_silent(worker, now)
            self._watch.silent(worker, effects, now)
            self._carry_out(effects)

    def answer(self, event: DataEvent) -> None:
        self._carry_out(self._on_data(event))

    def _on_data(self, event: DataEvent) -> list[EndpointEffect]:
        now = self.now
        effects = self.endpoint.on_data(event, now)
        self._watch.data(event, effects, now)
        return effects

    def _carry_out(self, effects: Iterable[EndpointEffect]) -> None:
        waiting = deque(effects)
        while waiting:
            effect = waiting.popleft()
            if isinstance(effect, SendFrame):
                self.send(effect.worker, effect.dst_epoch, effect.body)
            elif isinstance(effect, EngineEvent):
                self.world.probe("engine_event", (self, effect.event))
                self.deliver(effect.event)
            else:
                for event in self.data.execute(effect):
                    waiting.extend(self._on_data(event))
        self._io_timer.want(self.endpoint.next_deadline())

    # ------------------------------------------------------------------------------------------ oracles

    def assert_writable(self, key: HandoffKey, component: Component, pages: np.ndarray) -> None:
        """T1, T2: what a hand-off writes is its own, in the engine's books, at this very moment."""
        owner = return_key(key) if key.attempt < 0 else key
        for holding in self.core.holdings():
            if holding.owner_class is OwnerClass.INCOMING and self._is_of(holding, owner):
                own = self.pool.parts.own_ids(holding.record, component)
                if set(pages.tolist()).issubset(own.tolist()):
                    return
        what = f"{component} pages {pages.tolist()}"
        raise AssertionError(f"{self.stamp.worker}: {key} writes {what}, which are not its own")

    def _is_of(self, holding: Holding, owner: HandoffKey) -> bool:
        """Prefill workers name what they hold by its hand-off, decode workers by its request. A return reads and writes
        what its hand-off's request holds."""
        if isinstance(holding.owner, str):
            return holding.owner.startswith(f"{self.owners.get(owner)}#")
        return holding.owner == owner

    def assert_restorable(self, page: int) -> None:
        """T1: what a tier writes was promised to a request that waits for it."""
        for holding in self.core.holdings():
            if holding.owner_class is OwnerClass.INCOMING and self.owns(holding, page):
                return
        raise AssertionError(f"{self.stamp.worker}: a tier writes page {page}, which is not promised to anybody")

    def assert_copied_from(self, page: int) -> None:
        """T1: what a tier reads stays as it is: cached and locked, or a request's."""
        locked = self.pool.prefix.cached_pages()[1].of(self.pool.main)
        if not (locked == page).any() and not any(self.owns(one, page) for one in self.core.holdings()):
            raise AssertionError(f"{self.stamp.worker}: a tier reads page {page}, which nobody keeps for it")

    def wrote_to_tier(self, key: PageKey, page: int) -> None:
        content = self.runner.kept(self.pool.main, np.array([page], dtype=np.int32))[0]
        self.world.stored_pages.wrote(key, content)

    def owns(self, holding: Holding, page: int) -> bool:
        return bool((self.pool.parts.own_ids(holding.record, self.pool.main) == page).any())

    def assert_readable(self, key: HandoffKey, component: Component, pages: np.ndarray) -> None:
        """T1: what is read for a hand-off is still held for it."""
        owner = return_key(key) if key.attempt < 0 else key
        for holding in self.core.holdings():
            lent = key.attempt < 0 and holding.owner_class is OwnerClass.INCOMING
            if (lent or holding.owner_class in READ_BY_PEERS) and self._is_of(holding, owner):
                held = self.pool.parts.readable_ids(holding.record, component)
                if set(pages.tolist()).issubset(held.tolist()):
                    return
        raise AssertionError(
            f"{self.stamp.worker}: {component} pages {pages.tolist()} are read for {key}, which does not hold them"
        )

    @property
    def drained(self) -> bool:
        """As its engine says: takes nothing new, and all that it had has ended. Frames may be under way."""
        return self.core.load().draining and self.core.idle and not self._inbox

    @property
    def settled(self) -> bool:
        return (
            self.core.idle
            and not self.core.records()  # nor what is kept of conversations
            and not self._inbox
            and self._computing is None
            and self.endpoint.live_sinks == 0
            and self.endpoint.live_sources == 0
            and self.endpoint.next_deadline() is None  # nothing to say again
            and self.data.quiet
            and self.tier.quiet
            and not self.pool.copying  # what the tier has not heard of yet
        )
