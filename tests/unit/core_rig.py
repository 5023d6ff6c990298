"""A decode core and a prefill core face to face, with a transfer plane that copies at once: for tests of the cores.

What the real plane does about lost messages and dying peers is tested elsewhere; here every step is a function call.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from baton.common.config import DecodeConfig, KvReturn, PrefillConfig, TiersConfig, TransferConfig
from baton.common.engine.batch import Batch
from baton.common.engine.chunk_predictor import ChunkPredictor
from baton.common.engine.core_api import EngineCore, FromPeer, MembershipView, SendTo
from baton.common.engine.fake_model import fake_vocabulary
from baton.common.engine.fake_runner import FakeRunner, StepCost, fake_runner
from baton.common.engine.guiding import Guides
from baton.common.errors import ErrorCode
from baton.common.ids import Epoch, HandoffKey, RequestId, Stamp, WorkerId
from baton.common.kv.checker import InvariantChecker
from baton.common.kv.compiled_checker import StepChecker
from baton.common.kv.layout import Component, KvLayout
from baton.common.kv.pool import KvPool
from baton.common.kv.prefix.names import PrefixCacheName
from baton.common.kv.tiers.api import (
    AbortRestore,
    AbortStore,
    PagesRestored,
    PagesStored,
    RestorePages,
    StorePages,
    TierCommand,
    TierEvent,
)
from baton.common.kv.tiers.keys import PageKey, PageKeys
from baton.common.messages import (
    Body,
    CancelRequest,
    Failure,
    FinishAck,
    Grammar,
    Member,
    Output,
    Resume,
    SamplingParams,
    Submit,
    pack_tokens,
    unpack_tokens,
)
from baton.common.spans import NOT_TRACED, TracedSpan
from baton.decode.core import DecodeCore
from baton.prefill.core import PrefillCore
from baton.prefill.pipelining import LayerGroups
from baton.transfer.api import (
    AbortSink,
    AbortSource,
    FinishSource,
    OfferReceived,
    OpenSink,
    ShipRegion,
    SinkCommitted,
    SinkFailed,
    SourceAborted,
    SourceReleased,
)
from baton.transfer.plan import Segment, segments_of, stretch_of

GATEWAY = Stamp(WorkerId("gateway-0"), 1, Epoch(11))
DECODE = Stamp(WorkerId("decode-0"), 1, Epoch(22))
PREFILL = Stamp(WorkerId("prefill-0"), 1, Epoch(33))
PREFILL_2 = Stamp(WorkerId("prefill-1"), 1, Epoch(44))
GREEDY = SamplingParams(max_tokens=8)
VOCABULARY = 1 << 16
"""Tokens that the cores believe the model to have."""


def no_door(grammar: Grammar | None) -> str:
    """Lets everything through."""
    return ""


def member(stamp: Stamp, role: str) -> Member:
    return Member(stamp=stamp, role=role, address="")


def view(version: int, *members: Member, silent: tuple[str, ...] = ()) -> MembershipView:
    return MembershipView(version, members, frozenset(WorkerId(name) for name in silent))


EVERYONE = (member(GATEWAY, "gateway"), member(DECODE, "decode"), member(PREFILL, "prefill"))


def prompt_of(length: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 258, length).astype(np.int32)


@dataclass(frozen=True)
class Sizes:
    """Of an engine's pool; by default all layers attend to everything. Sliding pages: as many as `pages`."""

    pages: int
    page_size: int
    rows: int
    context: int
    layout: KvLayout | None
    swa_pages: int | None
    slots: int
    cache: PrefixCacheName
    layers: int = 1


class Engine:
    """One core with its pool and fake runner; checks the pool's books after everything that happens."""

    def __init__(self, make: Callable[[KvPool], EngineCore], sizes: Sizes, step_tokens: int) -> None:
        layout = sizes.layout or KvLayout(sizes.page_size)
        counts = {
            Component.FULL: sizes.pages + 1,
            Component.SWA: (sizes.pages if sizes.swa_pages is None else sizes.swa_pages) + 1,
            Component.STATE: sizes.slots + 1,
        }
        num_pages = {component: counts[component] for component in layout.components}
        self.pool = KvPool(layout, num_pages, sizes.rows, sizes.context, sizes.cache, None, step_tokens)
        self.core = make(self.pool)
        self.runner: FakeRunner = fake_runner(
            num_pages,
            layout.page_size,
            layout=layout,
            max_positions=sizes.context,
            cost=StepCost(0.01),
            bytes_per_token=8 * max(2, sizes.layers),
            layers=sizes.layers,
        )
        self.post: Callable[[list[object]], None] | None = None  # takes what a step has to say while it runs
        self.now = 0.0
        self.launched: Batch | None = None
        self.batches: list[Batch] = []

    def handle(self, event: object) -> list[object]:
        return self._checked(self.core.handle(event, self.now))

    def launch(self) -> bool:
        """Plans a step and computes it, but does not tell the core yet. False when there is nothing to do."""
        assert self.launched is None
        self.launched = self.core.next_batch(self.now)
        self.check()
        if self.launched is not None:
            self.batches.append(self.launched)
        return self.launched is not None

    def collect(self) -> list[object]:
        assert self.launched is not None
        batch, self.launched = self.launched, None
        self.now += 0.01
        early: list[object] = []

        def on_layers(layers: int) -> None:
            (self.post or early.extend)(self._checked(self.core.on_layers(layers, self.now)))

        result = self.runner.collect(self.runner.launch(batch, on_layers))
        return early + self._checked(self.core.on_step(result, self.now))

    def step(self) -> list[object] | None:
        """One whole step; its effects, or None when there was nothing to compute."""
        return self.collect() if self.launch() else None

    def pass_time(self, seconds: float) -> list[object]:
        self.now += seconds
        return self._checked(self.core.on_timer(self.now))

    def check(self) -> None:
        InvariantChecker().check(self.pool, self.core.holdings())
        assert StepChecker(self.pool, self.core.holdings).broken_rule(self.core.records()) == ""

    def _checked(self, effects: list[object]) -> list[object]:
        self.check()
        return effects


def decode_engine(
    pages: int = 64,
    page_size: int = 4,
    rows: int = 16,
    context: int = 256,
    layout: KvLayout | None = None,
    swa_pages: int | None = None,
    slots: int = 24,
    cache: PrefixCacheName = "radix",
    tiers: TiersConfig | None = None,
    layers: int = 1,
    guided: bool = False,
    predictor: ChunkPredictor | None = None,
    **config: int,
) -> Engine:
    """`guided`: its door knows what is wrong with a grammar."""
    config.setdefault("num_reserved_decode_tokens", 8)
    made = DecodeConfig(**config)
    sizes = Sizes(pages, page_size, rows, context, layout, swa_pages, slots, cache, layers)
    keys = None if tiers is None else PageKeys.of_model({"weights": "fake"}, page_size)

    def make(pool: KvPool) -> DecodeCore:
        explain = Guides(fake_vocabulary).explain if guided else no_door
        tiered, transfer = tiers or TiersConfig(), TransferConfig()
        return DecodeCore(DECODE, pool, made, transfer, context, VOCABULARY, tiered, keys, explain, predictor=predictor)

    return Engine(make, sizes, made.chunk_tokens)


def prefill_engine(
    pages: int = 64,
    page_size: int = 4,
    rows: int = 16,
    context: int = 256,
    layout: KvLayout | None = None,
    swa_pages: int | None = None,
    slots: int = 24,
    cache: PrefixCacheName = "radix",
    kv_return: KvReturn = "adaptive",
    layers: int = 1,
    page_bytes: int = 0,
    guided: bool = False,
    predictor: ChunkPredictor | None = None,
    **config: int,
) -> Engine:
    """`page_bytes`: what its core believes of a page, when it decides by itself how to ship layers. `guided`: its door
    knows what is wrong with a grammar."""
    made = PrefillConfig(kv_return=kv_return, **({} if page_bytes else {"layer_groups": 1}) | config)
    sizes = Sizes(pages, page_size, rows, context, layout, swa_pages, slots, cache, layers)
    groups = LayerGroups(layers, page_bytes, made.layer_groups)
    explain = Guides(fake_vocabulary).explain if guided else no_door

    def make(pool: KvPool) -> PrefillCore:
        return PrefillCore(pool, made, VOCABULARY, groups, explain, predictor=predictor)

    return Engine(make, sizes, made.chunk_tokens)


@dataclass
class GatewayStub:
    """Keeps what the decode worker says, per request, and complains about gaps and second endings."""

    tokens: dict[str, list[int]] = field(default_factory=dict)
    finals: dict[str, Output] = field(default_factory=dict)
    said: list[SendTo] = field(default_factory=list)
    acknowledge: bool = True

    def hear(self, effect: SendTo) -> list[Body]:
        self.said.append(effect)
        body = effect.body
        if not isinstance(body, Output):
            return []
        known = self.tokens.setdefault(body.request_id, [])
        assert body.first_index <= len(known), f"a gap: {body}"
        known.extend(unpack_tokens(body.tokens)[len(known) - body.first_index :].tolist())
        if not body.finish_reason and body.failure is None:
            return []
        before = self.finals.setdefault(body.request_id, body)
        assert (before.finish_reason, before.failure) == (body.finish_reason, body.failure)
        return [FinishAck(request_id=body.request_id, placement=body.placement)] if self.acknowledge else []


class TierStub:
    """Copies from and to an engine's pages: at once, or, what it `holds`, when told. Keeps everything."""

    def __init__(self, engine: Engine) -> None:
        self._memory = engine.runner.memory.main.as_bytes()
        self.pages: dict[PageKey, np.ndarray] = {}
        self.holds: Callable[[TierCommand], bool] = lambda command: False
        self.held: list[StorePages | RestorePages] = []
        self.refuses = False  # what comes, not what is held: as a tier thread whose level does not move

    def take(self, command: TierCommand) -> list[TierEvent]:
        if isinstance(command, AbortRestore | AbortStore):
            return []
        if self.refuses:
            return [self.carry_out(command, 0)]
        if self.holds(command):
            self.held.append(command)
            return []
        return [self.carry_out(command)]

    def carry_out(self, command: StorePages | RestorePages, most: int = 1 << 30) -> TierEvent:
        """`most`: pages that are copied before it is cut short."""
        pages = list(zip(command.keys, command.page_ids.tolist(), strict=True))[:most]
        if isinstance(command, StorePages):
            self.pages |= {key: self._memory[page].copy() for key, page in pages}
            return PagesStored(command.job, len(pages))
        restored = 0
        for key, page in pages:
            if key not in self.pages:
                break
            self._memory[page] = self.pages[key]
            restored += 1
        return PagesRestored(command.job, restored if restored >= command.at_least else 0)

    def release(self) -> list[StorePages | RestorePages]:
        """What was held; nothing is from now on."""
        held, self.held, self.holds = self.held, [], lambda command: False
        return held


@dataclass
class _Handoff:
    open: OpenSink
    segments: dict[Component, Segment]
    shipped: int  # of full attention
    sent: list[Component] = field(default_factory=list)  # segments of which all was shipped
    moved: list[tuple[Component, np.ndarray, np.ndarray]] = field(default_factory=list)  # from pages to pages

    @property
    def total(self) -> int:
        return len(self.open.tokens)

    def landed_until(self) -> int:
        """What counts when it fails now."""
        return self.shipped if set(self.segments) == {Component.FULL} else self.open.start


class Rig:
    """One decode worker, one prefill worker (optional), one gateway."""

    def __init__(self, decode: Engine | None = None, prefill: Engine | None = None) -> None:
        self.decode = decode or decode_engine()
        self.prefill = prefill or prefill_engine()
        self.prefill.post = self.run
        self.tier = TierStub(self.decode)
        self.gateway = GatewayStub()
        self.handoffs: dict[HandoffKey, _Handoff] = {}
        self.returns: dict[HandoffKey, OpenSink] = {}
        self.hold_returns = False  # they are begun, and not asked for at the decode worker
        self.log: list[object] = []
        self.hold_offers = False
        self.offers: list[OfferReceived] = []
        self.version = 0
        self.view(*EVERYONE)

    def view(self, *members: Member, silent: tuple[str, ...] = ()) -> None:
        self.version += 1
        self.run(self.decode.handle(view(self.version, *members, silent=silent)))

    def tell(self, body: Body, sender: Stamp = GATEWAY) -> None:
        self.run(self.decode.handle(FromPeer(sender, body)))

    def submit(
        self,
        name: str,
        prompt: np.ndarray,
        sampling: SamplingParams = GREEDY,
        outputs: list[int] | None = None,
        placement: int = 0,
        ttl_s: float = 1000.0,
        session: tuple[str, int] = ("", 0),
        thinking_token_id: int = -1,
        priority: int = 0,
        trace: str = NOT_TRACED,
    ) -> None:
        self.tell(
            Submit(
                request_id=RequestId(name),
                placement=placement,
                prompt=pack_tokens(prompt),
                outputs=pack_tokens(outputs or []),
                sampling=sampling,
                ttl_s=ttl_s,
                session_id=session[0],
                session_turn=session[1],
                thinking_token_id=thinking_token_id,
                priority=priority,
                trace=trace,
            )
        )

    def cancel(self, name: str, placement: int = 0, *, answered: bool = False) -> None:
        self.tell(CancelRequest(request_id=RequestId(name), placement=placement, answered=answered))

    def resume(self, name: str, next_index: int, placement: int = 0) -> None:
        self.tell(Resume(request_id=RequestId(name), placement=placement, next_index=next_index))

    def settle(self, limit: int = 2000) -> None:
        """Steps both engines until neither has anything to compute."""
        for _ in range(limit):
            worked = False
            for engine in (self.prefill, self.decode):
                if engine.launched is None and (effects := engine.step()) is not None:
                    self.run(effects)
                    worked = True
            if not worked and self.decode.core.next_deadline() == 0.0:
                self.run(self.decode.pass_time(0.0))
                worked = True
            if not worked:
                return
        raise AssertionError("the cores never come to rest")

    def run(self, effects: list[object]) -> None:
        """Carries effects out, and what follows from them, at once."""
        for effect in effects:
            self.log.append(effect)
            match effect:
                case SendTo():
                    for answer in self.gateway.hear(effect):
                        self.tell(answer, Stamp(effect.worker, 1, Epoch(effect.epoch)))
                case OpenSink():
                    if effect.key.attempt < 0:
                        self._open_return(effect)
                    else:
                        self._open(effect)
                case AbortSink(key, failure):
                    self.end(key, failure)
                case StorePages() | RestorePages() | AbortStore() | AbortRestore():
                    for answer in self.tier.take(effect):
                        self.run(self.decode.handle(answer))
                case ShipRegion():
                    self._ship(effect)
                case FinishSource(key, result) if key in self.returns:
                    del self.returns[key]
                    self.run(
                        self.prefill.handle(
                            SinkCommitted(key, DECODE.worker, result, 1, "test", 0.1, 0.01, self.prefill.now)
                        )
                    )
                    self.run(self.decode.handle(SourceReleased(key)))
                case FinishSource(key, result):
                    handoff = self.handoffs.pop(key)
                    assert handoff.sent == list(handoff.segments)
                    self._compare(handoff)
                    self.run(
                        self.decode.handle(
                            SinkCommitted(key, PREFILL.worker, result, 1, "test", 0.1, 0.01, self.decode.now)
                        )
                    )
                    self.run(self.prefill.handle(SourceReleased(key)))
                case AbortSource(key, failure):
                    self.end(key, failure)
                case TracedSpan():
                    pass
                case _:
                    raise TypeError(effect)

    def end(self, key: HandoffKey, failure: Failure, peer_lost: bool = False) -> None:
        """The hand-off is over without success: both sides hear it, in the order of the protocol."""
        if key in self.returns:
            self._end_return(key, failure)
            return
        handoff = self.handoffs.pop(key, None)
        if handoff is None:
            return
        landed = handoff.landed_until() // self.decode.pool.page_size * self.decode.pool.page_size
        self.run(self.decode.handle(SinkFailed(key, handoff.open.peer, failure, landed, 1, "inproc", peer_lost)))
        if key in {offer.key for offer in self.offers}:
            self.offers = [offer for offer in self.offers if offer.key != key]
        elif handoff.open.peer == PREFILL.worker:
            self.run(self.prefill.handle(SourceAborted(key, failure)))

    def fail(self, key: HandoffKey) -> None:
        """One attempt fails, and both live on."""
        self.end(key, Failure(code=ErrorCode.INTERNAL, reason="the lane broke"))

    def lose_prefill(self) -> None:
        """Every open hand-off fails because its prefill worker is gone."""
        for key in list(self.handoffs):
            handoff = self.handoffs.pop(key)
            failure = Failure(code=ErrorCode.INTERNAL, reason="peer lost")
            self.run(
                self.decode.handle(
                    SinkFailed(key, handoff.open.peer, failure, handoff.landed_until(), 1, "inproc", True)
                )
            )
        self.offers = []

    def release_tier(self, most: int = 1 << 30) -> None:
        """Carries out what the tiers held, in its order; of each at most so many pages."""
        for command in self.tier.release():
            self.run(self.decode.handle(self.tier.carry_out(command, most)))

    def release_offers(self) -> None:
        offers, self.offers, self.hold_offers = self.offers, [], False
        for offer in offers:
            self.run(self.prefill.handle(offer))

    def _open(self, command: OpenSink) -> None:
        found = segments_of(self.decode.pool.layout, command.start, len(command.tokens))
        segments = {segment.component: segment for segment in found}
        assert {one: len(ids) for one, ids in command.pages.items()} == {c: s.units for c, s in segments.items()}
        self.handoffs[command.key] = _Handoff(command, segments, command.start)
        offer = OfferReceived(
            command.key,
            DECODE,
            command.request_id,
            command.tokens,
            command.start,
            command.sample,
            command.sampling,
            command.deadline_s,
        )
        if self.hold_offers or command.peer != PREFILL.worker:
            self.offers.append(offer)
        else:
            self.run(self.prefill.handle(offer))

    def _open_return(self, command: OpenSink) -> None:
        assert len(command.pages[Component.FULL]) * self.prefill.pool.page_size == len(command.tokens) - command.start
        self.returns[command.key] = command
        if not self.hold_returns:
            self.offer_return(command)

    def offer_return(self, command: OpenSink) -> None:
        """The decode worker hears of a return that was begun."""
        offered = (command.request_id, command.tokens, command.start, command.sample, command.sampling)
        self.run(self.decode.handle(OfferReceived(command.key, PREFILL, *offered, command.deadline_s)))

    def _end_return(self, key: HandoffKey, failure: Failure) -> None:
        command, heard = self.returns.pop(key), not self.hold_returns
        failed = SinkFailed(key, DECODE.worker, failure, command.start, 0, "test", peer_lost=False)
        self.run(self.prefill.handle(failed))
        if heard:
            self.run(self.decode.handle(SourceAborted(key, failure)))

    def _ship(self, region: ShipRegion) -> None:
        if (wanted := self.returns.get(region.key)) is not None:
            assert (region.first_token, region.tokens) == (wanted.start, len(wanted.tokens) - wanted.start)
            there = self.decode.runner.memory.main.as_bytes()
            self.prefill.runner.memory.main.as_bytes()[wanted.pages[Component.FULL]] = there[region.pages]
            return
        handoff = self.handoffs.get(region.key)
        if handoff is None:
            return
        segment = handoff.segments[region.component]
        begin = handoff.shipped if region.component is Component.FULL else segment.first_token
        assert region.first_token == begin, "regions follow one another without gap"
        first = 0
        if region.component is not Component.STATE:
            first = (region.first_token - segment.first_token) // self.decode.pool.page_size
        target = handoff.open.pages[region.component][first : first + len(region.pages)]
        assert len(target) == len(region.pages)
        assert region.pages.all()
        buffers = [engine.runner.memory.buffers[region.component] for engine in (self.prefill, self.decode)]
        begin, end = stretch_of(buffers[0].page_bytes, buffers[0].layers, region.part, region.parts)
        there, here = (buffer.as_bytes()[:, begin:end] for buffer in buffers)
        here[target] = there[region.pages]
        handoff.moved.append((region.component, region.pages, target))
        if region.part < region.parts - 1:
            return
        if region.component is Component.FULL:
            handoff.shipped += region.tokens
        if region.first_token + region.tokens == handoff.total:
            handoff.sent.append(region.component)

    def _compare(self, handoff: _Handoff) -> None:
        """What has landed is what the source has now, byte for byte."""
        for component, source, target in handoff.moved:
            there, here = (one.runner.memory.buffers[component].as_bytes() for one in (self.prefill, self.decode))
            assert np.array_equal(here[target], there[source]), f"{component} of {handoff.open.request_id}"

    def assert_clean(self) -> None:
        """Nothing is held by anybody any more, once it is over what is kept for receivers that may come."""
        self.run(self.prefill.pass_time(PrefillConfig().grace_s))
        for engine in (self.decode, self.prefill):
            assert engine.core.idle
            assert not list(engine.core.holdings())
            assert engine.pool.census(()).idle
            for component in engine.pool.layout.components:
                assert engine.pool.parts.available(component) == engine.pool.supply.total(component)
