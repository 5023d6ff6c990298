"""The data plane on virtual time: staging slots, gathers, pulls and scatters that take a while, over simulated lanes.

Carries out `transfer/session/effects.py` like the real one. Bytes are read from a page at the *end* of a gather or pull
and written at the *end* of a scatter, so that a page given back too early shows; and before each touch an oracle asks
the owning core whether the page is still the hand-off's.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol, assert_never

import numpy as np
import xxhash

from baton.common.engine.batch import KvMemory
from baton.common.errors import ErrorCode
from baton.common.ids import HandoffKey, Stamp
from baton.common.kv.layout import Component
from baton.common.messages import Failure, unpack_tokens
from baton.deploy.sim.lanes import DIRECT_LANE, STAGED_LANE, SimLanes
from baton.deploy.sim.network import Network, Receiver
from baton.deploy.sim.schedule import Schedule
from baton.deploy.sim.settings import WorldSettings
from baton.transfer.plan import Cut, stretch_of
from baton.transfer.session.effects import (
    PULL_LANES,
    CloseSink,
    DataEffect,
    DataEvent,
    FenceSink,
    FenceSource,
    Landed,
    LandRegion,
    PrepareSink,
    RegionDamaged,
    RegionReady,
    SendRegion,
    SinkFenced,
    SinkLaneFailed,
    SinkNotPrepared,
    SinkPrepared,
    SourceFenced,
)
from baton.transfer.staging import state_pieces_of, unit_rows

LANE_TIMEOUT_S = 2.0
"""A region that has not come by then will not, unless the lane hangs: it is called broken."""
SPARE_SLOT = 0.2
"""How often a hand-off is given a slot more, where nobody waits for it."""


class Host(Receiver, Protocol):
    """The worker process around a data plane."""

    alive: bool
    data: SimDataPlane

    def after(self, delay_s: float, action: Callable[[], None], label: str) -> None: ...

    def answer(self, event: DataEvent) -> None: ...

    def assert_readable(self, key: HandoffKey, component: Component, pages: np.ndarray) -> None: ...

    def assert_writable(self, key: HandoffKey, component: Component, pages: np.ndarray) -> None: ...


@dataclass(slots=True)
class _Sink:
    prepare: PrepareSink
    lane: str
    room: int  # regions that may be open; on the staged lane each has a slot
    open: dict[int, LandRegion] = field(default_factory=dict)  # by seq

    @property
    def slots(self) -> int:
        return self.room if self.lane == STAGED_LANE else 0


class SimDataPlane:
    """One worker's. `worker_at` finds a peer for pulls."""

    def __init__(
        self,
        host: Host,
        kv: KvMemory,
        settings: WorldSettings,
        schedule: Schedule,
        network: Network,
        worker_at: Callable[[Stamp], Host | None],
        probe: Callable[[str, object], None],
    ) -> None:
        self._host = host
        self.pools = unit_rows(kv)
        self._state_pieces = state_pieces_of(kv)
        self._layers = kv.layers
        self._settings = settings
        self._schedule = schedule
        self._network = network
        self._worker_at = worker_at
        self._probe = probe
        self._lanes = SimLanes(settings, schedule, lambda wait_s: host.after(wait_s, self._look, "look at lanes"))
        self._free_slots = settings.staging_slots
        self._waiting: deque[PrepareSink] = deque()
        self._sinks: dict[HandoffKey, _Sink] = {}
        self._staged: dict[int, bytes] = {}  # tag -> bytes that have arrived
        self._offered: dict[int, SendRegion] = {}  # by tag: regions that wait in their pages to be asked for
        self._fenced_sources: set[HandoffKey] = set()
        self._lane_free_s = 0.0

    @property
    def quiet(self) -> bool:
        """No staging slot and no registration is in use."""
        return not self._sinks and not self._waiting and self._free_slots == self._settings.staging_slots

    @property
    def waiting(self) -> int:
        """Hand-offs that wait for a slot."""
        return len(self._waiting)

    def execute(self, effect: DataEffect) -> list[DataEvent]:
        match effect:
            case PrepareSink():
                return self._prepare(effect)
            case LandRegion():
                self._land(effect)
                return []
            case FenceSink(key):
                self._probe("fence_sink", (self._host, key))
                self._note_given_up(key)
                return self._fence(lambda: [*self._close(key), SinkFenced(key)])
            case CloseSink(key):
                return self._close(key)
            case SendRegion():
                self._host.after(self._work_s(), lambda: self._gathered(effect), "gather")
                return []
            case FenceSource(key):
                return self._fence(lambda: self._fence_source(key))
            case _:
                assert_never(effect)

    def _fence(self, end: Callable[[], list[DataEvent]]) -> list[DataEvent]:
        """At once, or when copies that have begun are over: until then they go on."""
        late = self._settings.late_fences
        if not late or self._schedule.rng.random() >= late:
            return end()

        def later() -> None:
            for event in end():
                self._host.answer(event)

        self._host.after(self._work_s(), later, "fence")
        return []

    def _fence_source(self, key: HandoffKey) -> list[DataEvent]:
        self._fenced_sources.add(key)
        self._offered = {tag: offer for tag, offer in self._offered.items() if offer.key != key}
        return [SourceFenced(key)]

    # -------------------------------------------------------------------------------------------- sink

    def _prepare(self, effect: PrepareSink) -> list[DataEvent]:
        """Only who takes the staged lane waits for slots."""
        if self._worker_at(effect.peer) is None and self._schedule.rng.random() < 0.5:
            failure = Failure(code=ErrorCode.NO_WORKER, reason="no lane to the peer")
            return [SinkNotPrepared(effect.key, failure, True)]
        lane = self._lanes.choose(effect.peer)
        if lane != STAGED_LANE:
            return [self._open(effect, lane, self._settings.transfer.credit_regions)]
        self._waiting.append(effect)
        return self._prepare_waiting()

    def _prepare_waiting(self) -> list[DataEvent]:
        """Slots in order of arrival."""
        events: list[DataEvent] = []
        while self._waiting and self._free_slots > 0:
            credit = min(self._free_slots, self._settings.transfer.credit_regions)
            self._free_slots -= credit
            events.append(self._open(self._waiting.popleft(), STAGED_LANE, credit))
        return events

    def _open(self, prepare: PrepareSink, lane: str, credit: int) -> SinkPrepared:
        self._sinks[prepare.key] = _Sink(prepare, lane, credit)
        region_units = (self._settings.region_pages,) * len(prepare.spans)
        return SinkPrepared(prepare.key, lane, credit, region_units, self._settings.lane_gbps)

    def _close(self, key: HandoffKey) -> list[DataEvent]:
        """Gives the slots back. What is still in the air for them is dropped when it lands."""
        sink = self._sinks.pop(key, None)
        if sink is None:
            self._waiting = deque(one for one in self._waiting if one.key != key)
        else:
            self._free_slots += sink.slots
            for effect in sink.open.values():
                self._lanes.ended(effect)
            base = sink.prepare.tag_base
            for tag in [tag for tag in self._staged if base <= tag < base + sink.prepare.tag_count]:
                del self._staged[tag]
        return self._prepare_waiting()

    def _land(self, effect: LandRegion) -> None:
        sink = self._sinks[effect.key]
        assert effect.chunk.seq not in sink.open, f"region {effect.chunk.seq} of {effect.key} is landing already"
        assert len(sink.open) < sink.room, "more regions than were promised room"
        sink.open[effect.chunk.seq] = effect
        self._lanes.began(effect)
        self._probe("land_region", (self._host, effect))
        if effect.lane in PULL_LANES:
            self._probe("bytes_moving", (self._host, effect))
            self._host.after(self._work_s(effect.chunk.nbytes), lambda: self._pulled(effect), "pull")
        elif effect.lane == DIRECT_LANE:
            asked = partial(self._at, self._host.stamp, effect.tag)
            self._network.carry(self._host.stamp, effect.peer.worker, DIRECT_LANE, asked)
            self._host.after(LANE_TIMEOUT_S, lambda: self._timed_out(effect), "lane timeout")
        elif effect.tag in self._staged:
            data = self._staged.pop(effect.tag)
            self._probe("bytes_moving", (self._host, effect))
            self._host.after(self._work_s(len(data)), lambda: self._scatter(effect, data), "scatter")
        else:
            self._host.after(LANE_TIMEOUT_S, lambda: self._timed_out(effect), "lane timeout")

    def region_arrived(self, tag: int, data: bytes) -> None:
        """Into staging memory, whatever has become of its hand-off."""
        for sink in self._sinks.values():
            for effect in sink.open.values():
                if effect.tag == tag:
                    self._probe("bytes_moving", (self._host, effect))
                    self._host.after(self._work_s(len(data)), partial(self._scatter, effect, data), "scatter")
                    return
            base = sink.prepare.tag_base
            if base <= tag < base + sink.prepare.tag_count:
                self._staged[tag] = data
                return
        self._probe("late_region_dropped", (self._host, tag))

    def _is_open(self, effect: LandRegion) -> bool:
        sink = self._sinks.get(effect.key)
        return sink is not None and sink.open.get(effect.chunk.seq) is effect

    def _scatter(self, effect: LandRegion, data: bytes) -> None:
        if not self._is_open(effect):
            self._probe("late_region_dropped", (self._host, effect.tag))
            return
        units, component = self._units_of(effect), effect.chunk.component
        if len(data) != effect.chunk.nbytes or xxhash.xxh3_64_intdigest(data) != effect.chunk.digest:
            self._end_damaged(effect)
            return
        self._host.assert_writable(effect.key, component, self._pages(component, units))
        self.stretch(effect.chunk)[units] = np.frombuffer(data, dtype=np.uint8).reshape(len(units), -1)
        self._end_landing(effect, self._landed(effect, len(data)))

    def _landed(self, effect: LandRegion, nbytes: int) -> Landed:
        """Its slot goes to who waits for one, or there is room for one more region, or neither."""
        sink = self._sinks[effect.key]
        slots = 1
        if sink.lane == STAGED_LANE:
            if self._waiting and sink.room > 1:
                slots = 0
            elif self._free_slots > 0 and self._schedule.rng.random() < SPARE_SLOT:
                slots = 2
        sink.room += slots - 1
        self._free_slots -= slots - 1 if sink.lane == STAGED_LANE else 0
        return Landed(effect.key, effect.chunk.seq, nbytes, 0.001, slots)

    def _pulled(self, effect: LandRegion) -> None:
        """Reads the peer's pages under its read grant, straight into the own ones."""
        if not self._is_open(effect):
            self._probe("late_region_dropped", (self._host, effect.tag))
            return
        source = self._worker_at(effect.peer)
        if source is None:
            self._lane_failed(effect)
            return
        source_units, units = unpack_tokens(effect.chunk.source_pages), self._units_of(effect)
        component = effect.chunk.component
        source.assert_readable(effect.key, component, self._pages(component, source_units))
        self._host.assert_writable(effect.key, component, self._pages(component, units))
        pool = self.stretch(effect.chunk)
        pool[units] = source.data.stretch(effect.chunk)[source_units]
        if self._schedule.rng.random() < self._network.faults.region_damaged:
            pool[units[0], 0] ^= 1
            self._network.damaged.add(effect.tag)
        if xxhash.xxh3_64_intdigest(pool[units].tobytes()) != effect.chunk.digest:
            self._end_damaged(effect)
        else:
            self._end_landing(effect, self._landed(effect, effect.chunk.nbytes))

    def _timed_out(self, effect: LandRegion) -> None:
        """A lane that hangs is not broken: it is found out by what it does not do."""
        if not self._network.hangs(effect.peer.worker, self._host.stamp.worker, effect.lane):
            self._lane_failed(effect)

    def _look(self) -> None:
        """All hand-offs on a lane that has stalled are over."""
        for lane, peer in self._lanes.look():
            for sink in [one for one in self._sinks.values() if (one.lane, one.prepare.peer) == (lane, peer)]:
                if sink.open:
                    failure = Failure(code=ErrorCode.INTERNAL, reason="nothing has come for too long")
                    effect = sink.open[min(sink.open)]
                    self._end_landing(effect, SinkLaneFailed(effect.key, failure, False))

    def _note_given_up(self, key: HandoffKey) -> None:
        sink = self._sinks.get(key)
        if sink is not None and sink.open:
            self._lanes.given_up(sink.lane, sink.prepare.peer)

    def _lane_failed(self, effect: LandRegion) -> None:
        if self._is_open(effect):
            lost = self._worker_at(effect.peer) is None
            failure = Failure(code=ErrorCode.INTERNAL, reason="the lane broke")
            self._end_landing(effect, SinkLaneFailed(effect.key, failure, lost))

    def _end_landing(self, effect: LandRegion, event: DataEvent) -> None:
        del self._sinks[effect.key].open[effect.chunk.seq]
        self._lanes.ended(effect)
        self._probe("landing_ended", (self._host, event))
        self._host.answer(event)
        for granted in self._prepare_waiting():
            self._host.answer(granted)

    def _end_damaged(self, effect: LandRegion) -> None:
        """Only what the world has damaged may be: else the bytes have changed between the digest and the reading."""
        assert effect.tag in self._network.damaged, f"region {effect.chunk.seq} of {effect.key} changed on its way"
        self._end_landing(effect, RegionDamaged(effect.key, effect.chunk.seq))

    def _units_of(self, effect: LandRegion) -> np.ndarray:
        chunk = effect.chunk
        [span] = [span for span in self._sinks[effect.key].prepare.spans if span.component is chunk.component]
        return unpack_tokens(span.pages)[chunk.first_unit : chunk.first_unit + chunk.units]

    def stretch(self, cut: Cut) -> np.ndarray:
        """Of every unit, what travels of the units of `cut`."""
        pool = self.pools[cut.component]
        begin, end = stretch_of(pool.shape[1], self._layers[cut.component], cut.part, cut.parts)
        return pool[:, begin:end]

    def _pages(self, component: Component, units: np.ndarray) -> np.ndarray:
        """As the cores count them."""
        return units // self._state_pieces if component is Component.STATE else units

    # ------------------------------------------------------------------------------------------ source

    def _gathered(self, effect: SendRegion) -> None:
        if effect.key in self._fenced_sources:
            return
        component, units = effect.span.component, unpack_tokens(effect.span.pages)
        self._host.assert_readable(effect.key, component, self._pages(component, units))
        data = self.stretch(effect.span)[units].tobytes()
        digest = xxhash.xxh3_64_intdigest(data)
        if effect.lane == DIRECT_LANE:
            self._offered[effect.tag] = effect
        elif effect.lane not in PULL_LANES:
            self._send_bytes(effect, data)
        self._host.answer(RegionReady(effect.key, effect.seq, effect.tag, len(data), digest))

    def _send_bytes(self, effect: SendRegion, data: bytes) -> None:
        rng, faults = self._schedule.rng, self._network.faults
        if faults.region_damaged and rng.random() < faults.region_damaged:
            data = bytes([data[0] ^ 1]) + data[1:]
            self._network.damaged.add(effect.tag)
        if faults.region_lost and rng.random() < faults.region_lost:
            return

        def arrive(receiver: Receiver) -> None:
            """Whoever sits there now: a successor has never given out this tag."""
            host = self._worker_at(receiver.stamp)
            if host is not None:
                host.data.region_arrived(effect.tag, data)

        self._network.carry(self._host.stamp, effect.peer.worker, effect.lane, arrive)

    # ------------------------------------------------------------------------------------- direct lane

    def _at(self, asker: Stamp, tag: int, receiver: Receiver) -> None:
        """A region is asked for: it leaves unit by unit, straight out of the pages of whoever has offered it."""
        host = self._worker_at(receiver.stamp)
        if host is not None:
            host.data.asked_for(tag, asker)

    def asked_for(self, tag: int, asker: Stamp) -> None:
        effect = self._offered.get(tag)
        if effect is not None and effect.peer == asker:
            self._send_unit(effect, 0)

    def _send_unit(self, effect: SendRegion, at: int) -> None:
        rng, faults, component = self._schedule.rng, self._network.faults, effect.span.component
        if effect.key in self._fenced_sources or (faults.region_lost and rng.random() < faults.region_lost):
            return  # the stream ends here
        units = unpack_tokens(effect.span.pages)[at : at + 1]
        self._host.assert_readable(effect.key, component, self._pages(component, units))
        data = self.stretch(effect.span)[units].tobytes()
        if faults.region_damaged and rng.random() < faults.region_damaged:
            data = bytes([data[0] ^ 1]) + data[1:]
            self._network.damaged.add(effect.tag)
        work_s = self._work_s(len(data)) / effect.span.units

        def arrive(receiver: Receiver) -> None:
            host = self._worker_at(receiver.stamp)
            if host is not None:
                host.data.unit_arrived(effect.tag, at, data)
            if at + 1 < effect.span.units:
                self._host.after(0.0, lambda: self._send_unit(effect, at + 1), "send")

        self._host.after(
            work_s, lambda: self._network.carry(self._host.stamp, effect.peer.worker, DIRECT_LANE, arrive), "send"
        )

    def unit_arrived(self, tag: int, at: int, data: bytes) -> None:
        """Into its page, if it is wanted."""
        for sink in self._sinks.values():
            for effect in sink.open.values():
                if effect.tag == tag:
                    self._place_unit(effect, at, data)
                    return
        self._probe("late_region_dropped", (self._host, tag))

    def _place_unit(self, effect: LandRegion, at: int, data: bytes) -> None:
        units, component = self._units_of(effect), effect.chunk.component
        self._probe("bytes_moving", (self._host, effect))
        self._host.assert_writable(effect.key, component, self._pages(component, units[at : at + 1]))
        pool = self.stretch(effect.chunk)
        pool[units[at]] = np.frombuffer(data, dtype=np.uint8)
        if at + 1 == len(units):
            if xxhash.xxh3_64_intdigest(pool[units].tobytes()) != effect.chunk.digest:
                self._end_damaged(effect)
            else:
                self._end_landing(effect, self._landed(effect, effect.chunk.nbytes))

    def _work_s(self, nbytes: int = 0) -> float:
        """A region's turn and time on the lane, where bytes take time."""
        wait_s = self._schedule.rng.random() * self._settings.region_s
        if nbytes and self._settings.lane_gbps:
            now = self._schedule.now
            self._lane_free_s = max(self._lane_free_s, now) + nbytes / (self._settings.lane_gbps * 1e9)
            wait_s += self._lane_free_s - now
        return wait_s
