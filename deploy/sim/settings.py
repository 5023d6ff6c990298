"""What a simulated world is made of: sizes, delays, and how often what goes wrong. Plain values.

`random_settings` draws all of them from a seed, so that many seeds cover many shapes of cluster.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from random import Random
from typing import Any, Literal

from baton.common.config import MAX_PRIORITY, DecodeConfig, LivenessConfig, PrefillConfig, TiersConfig, TransferConfig
from baton.common.engine.fake_runner import StepCost, StepTimer
from baton.common.kv.layout import Component, KvLayout
from baton.common.routing_config import POLICY_NAMES, RoutingConfig
from baton.deploy.admission_queue import Tenant


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkFaults:
    """Per control frame and per region. Probabilities; delays are drawn uniformly up to the stated most."""

    delay_s: float = 0.001
    loss: float = 0.0
    duplicate: float = 0.0
    reorder: float = 0.0  # this share is delayed by up to `reorder_s` more, so that later frames overtake it
    reorder_s: float = 0.3
    region_damaged: float = 0.0
    region_lost: float = 0.0  # the lane breaks


NO_FAULTS = LinkFaults()
STEADY_SHARE = 0.15
"""Of worlds in which every process lives, and only links and clients are bad."""
FLIP_SHARE = 0.35
"""Of the other worlds, those in which workers change their role."""
UPGRADE_SHARE = 0.25
"""Of the other worlds, those that are upgraded."""
SCALE_SHARE = 0.25
"""Of the other worlds, those that come to have more workers, or fewer."""
KEYS_SHARE = 0.25
"""Of all worlds, those whose gateways have a queue."""
TARGETS_SHARE = 0.3
"""Of all worlds, those whose workers may have a profile of their steps."""
AFTERMATH_S = 70.0
"""Longer than a request may take, and than a last message is repeated."""
LAYOUTS = ((True, False, False),) * 3 + (
    (True, True, False),
    (True, False, True),
    (True, True, True),
    (False, True, False),
)
"""(full, sliding, recurrent): half of the worlds run a model whose layers all attend to everything."""


LANES: tuple[dict[str, Any], ...] = (
    {"pull_lane": 0.0},
    {"pull_lane": 0.5},
    {"pull_lane": 1.0},
    {"pull_lane": 0.0, "direct_lane": 1.0},
    {"pull_lane": 0.4, "direct_lane": 0.3},
)


@dataclass(frozen=True, slots=True, kw_only=True)
class WorldSettings:
    """One world. Faults of processes and clients are numbers of events, spread over `fault_s` seconds."""

    prefill: int = 1
    decode: int = 2
    gateways: int = 1
    page_size: int = 4
    full: bool = True  # the layout of the model: layers that attend to everything ...
    window: int = 0  # ... that slide, over so many tokens; 0: none
    state: bool = False  # ... that recur
    prefill_pages: int = 64
    decode_pages: int = 64
    swa_pages: int = 1 << 20  # sliding pages per worker; at most as many as it has for full attention
    state_slots: int = 16  # per worker
    layers: int = 1  # of full attention
    bytes_per_token: int = 16  # of each component
    rows: int = 8
    prefix_cache: Literal["radix", "chunk", "UnifiedRadixCache"] = "radix"  # the last is radix, not compiled
    max_context_len: int = 128
    requests: int = 12
    arrival_s: float = 1.0  # requests arrive within this time
    conversations: int = 0  # beside them, of several turns each
    repeats: float = 0.0  # share of requests whose prompt is another one's, at about that time or later
    scored: float = 0.0  # share of requests that want log probabilities of their prompt's tokens
    max_prompt: int = 60
    max_tokens: int = 12
    request_timeout_s: float = 60.0
    staging_slots: int = 6
    region_pages: int = 2
    pull_lane: float = 0.5  # share of hand-offs that pull ...
    direct_lane: float = 0.0  # ... and of those whose regions go from page to page without staging
    region_s: float = 0.004  # most time of one gather, pull or scatter
    lane_gbps: float = 0.0  # of what one receiver takes in; 0.0: no bytes take time
    tiers: TiersConfig = field(default_factory=TiersConfig)  # of the decode workers; any level: a store that all share
    tier_pages: int = 256  # that it keeps
    tier_page_s: float = 0.002  # most time that copying a page takes
    tier_loss: float = 0.05  # share of jobs and pages that come to nothing
    thread_hop_s: float = 0.0004  # most time from the engine thread to the I/O thread, or back; order is kept
    links: LinkFaults = NO_FAULTS
    crashes: int = 0
    pauses: int = 0
    partitions: int = 0
    drains: int = 0
    cancels: int = 0
    clogs: int = 0
    hangs: int = 0  # of engines, whose processes go on saying that they live
    storms: int = 0  # most clients leave at once
    controller_crashes: int = 0
    flips: int = 0  # of a worker's role
    upgrades: int = 0  # of the whole cluster, to another revision
    scales: int = 0  # to another number of workers of a role
    new_layouts: bool = False  # each revision has another layout, which hand-offs do not cross
    surge: int = 1  # workers of either role that are there beside the others meanwhile
    lane_hangs: int = 0  # of lanes that deliver nothing, while frames go on
    bad_starts: float = 0.0  # share of processes that never get ready: they say so, die, or hang while they load
    lost_kills: float = 0.0  # share of kills that do nothing: the controller must repeat them
    half_open: float = 0.0  # share of pairs in which who sends to a new process does not reach it at first
    successor_pages: float = 1.0  # of its predecessor's that a worker has for full attention after a restart
    thinking_token_id: int = -1  # of the gateways
    routing: RoutingConfig = field(default_factory=lambda: RoutingConfig(policy="rendezvous"))
    max_live_sources: int = 1024  # of each worker: an offer beyond is refused
    max_inflight_requests: int = 256  # of each gateway
    session_ttl_s: float = 3600.0  # in each gateway
    dispatch_ahead: int = 16  # of each gateway, for each decode worker
    keys: tuple[Tenant, ...] = (Tenant(name="key0"),)  # the API keys that ask
    guided: float = 0.0  # share of requests whose answer follows a grammar
    fault_s: float = 4.0
    aftermath_s: float = 0.0  # how long it goes on when all is at rest: late timers must find nothing to do
    clock_offset_s: float = 0.0  # most that the clocks of processes differ by ...
    clock_drift: float = 0.0  # ... and that they gain or lose in a second
    late_fences: float = 0.0  # share of fences that wait for copies under way, as where pools are a device's
    overlapping: bool = False  # engines take events while a step computes; cores allow it, the engine loop does not yet
    start_s: float = 0.4  # most time from start to Hello of a process
    profile_steps: int = 1 << 20  # of a start-up profile, those after which it breaks
    step: StepTimer = field(default_factory=lambda: StepCost(0.004, 0.0002))
    prefill_config: PrefillConfig = field(default_factory=lambda: PrefillConfig(chunk_tokens=16))
    decode_config: DecodeConfig = field(
        default_factory=lambda: DecodeConfig(num_reserved_decode_tokens=4, chunk_tokens=16, max_queued_requests=64)
    )
    transfer: TransferConfig = field(default_factory=lambda: TransferConfig(credit_regions=2, handoff_ttl_s=20.0))
    liveness: LivenessConfig = field(
        default_factory=lambda: LivenessConfig(
            heartbeat_interval_s=0.4, start_deadline_s=20.0, engine_stuck_after_s=6.0
        )
    )

    @property
    def layout(self) -> KvLayout:
        return KvLayout(self.page_size, full=self.full, window=self.window, state=self.state)

    @property
    def least_decode_pages(self) -> int:
        """Of any decode worker, now or after a restart."""
        return int(self.decode_pages * self.successor_pages) if self.full else self.decode_pages

    def num_pages(self, role: str, successor: bool = False) -> dict[Component, int]:
        """Of each component of a worker's pool, the null page counted."""
        pages = self.prefill_pages if role == "prefill" else self.decode_pages
        counts = {
            Component.FULL: int(pages * self.successor_pages) if successor else pages,
            Component.SWA: min(pages, self.swa_pages),
            Component.STATE: self.state_slots,
        }
        return {component: counts[component] + 1 for component in self.layout.components}


def random_settings(seed: int) -> WorldSettings:
    """A small cluster of any shape, with any mixture of faults; every fourth one without any."""
    rng = Random(seed ^ 0x5EED)
    calm = rng.random() < 0.25
    steady = Random(seed ^ 0x57EAD).random() < STEADY_SHARE
    page_size = rng.choice((1, 4, 4, 16))
    pages = rng.randint(20, 60) * 4 // page_size + 4

    def rate(most: float) -> float:
        return 0.0 if calm or rng.random() < 0.3 else rng.random() * most

    def count(most: int) -> int:
        return 0 if calm or steady or rng.random() < 0.3 else rng.randint(0, most)

    links = LinkFaults(
        delay_s=rng.choice((0.0005, 0.003, 0.02)),
        loss=rate(0.1),
        duplicate=rate(0.1),
        reorder=rate(0.2),
        region_damaged=rate(0.05),
        region_lost=rate(0.03),
    )
    settings = WorldSettings(
        prefill=rng.choice((0, 1, 1, 2, 2)),
        decode=rng.choice((1, 2, 2, 3)),
        gateways=rng.choice((1, 1, 2)),
        page_size=page_size,
        prefill_pages=pages,
        decode_pages=rng.choice((pages, pages // 2 + 4, 100 // page_size + 2)),
        rows=rng.choice((2, 4, 8)),
        requests=rng.randint(4, 14),
        arrival_s=rng.choice((0.05, 1.0, 3.0)),
        max_prompt=rng.choice((30, 60, 90)),
        max_tokens=rng.choice((1, 6, 16, 40)),
        staging_slots=rng.choice((1, 4, 8)),
        region_pages=rng.choice((1, 2, 8)),
        **rng.choice(LANES),
        region_s=rng.choice((0.0005, 0.01, 0.05)),
        thread_hop_s=rng.choice((0.0004, 0.0004, 0.02)),
        step=StepCost(rng.choice((0.001, 0.01, 0.03)), 0.0005),
        links=links,
        crashes=count(5),
        pauses=count(3),
        partitions=count(3),
        drains=count(2),
        cancels=count(6),
        prefill_config=PrefillConfig(
            chunk_tokens=rng.choice((8, 16, 64)),
            grace_s=Random(seed ^ 0x6ACE).choice((0.0, 0.5, 5.0)),
            max_queued_requests=Random(seed ^ 0x9E0E).choice((2, 256, 256)),
            kv_return=Random(seed ^ 0x2E7).choice(("on", "on", "off", "adaptive")),
        ),
        transfer=TransferConfig(
            credit_regions=rng.choice((1, 2, 4)),
            handoff_ttl_s=rng.choice((2.0, 20.0)),
            tombstone_ttl_s=rng.choice((1.0, 120.0)),
            max_tombstones=rng.choice((2, 4096)),
        ),
        decode_config=DecodeConfig(
            num_reserved_decode_tokens=rng.choice((0, 0, 4, 32)),
            chunk_tokens=16,
            max_queued_requests=rng.choice((4, 64)),
            local_prefill_max_tokens=rng.choice((0, 0, 8)),
        ),
        prefix_cache=rng.choice(("chunk", "radix", "radix", "radix", "UnifiedRadixCache")),
    )
    settings = _with_bounds(settings, Random(seed ^ 0xB0D5), calm or steady)
    settings = _with_more_faults(settings, Random(seed ^ 0xFA17), calm, steady)
    hangs = Random(seed ^ 0x57A11)
    settings = dataclasses.replace(settings, lane_hangs=hangs.choice((0, 0, 1, 3)) * (not calm and not steady))
    settings = dataclasses.replace(settings, routing=_routing(Random(seed ^ 0x20D7E)))
    settings = _with_keys(settings, Random(seed ^ 0x4E15))
    settings = _with_targets(settings, Random(seed ^ 0x7A26))
    settings = _with_upgrades(settings, Random(seed ^ 0x09AD), calm or steady)
    settings = _with_scales(settings, Random(seed ^ 0x5CA1E), calm or steady)
    settings = dataclasses.replace(
        settings,
        scored=Random(seed ^ 0x5C02E).choice((0.0,) * 5 + (0.5,)),
        guided=Random(seed ^ 0x96A3).choice((0.0,) * 4 + (0.4,)),
        session_ttl_s=Random(seed ^ 0x5E77).choice((3600.0,) * 4 + (0.8,)),
    )
    return _with_layout(_with_flips(settings, Random(seed ^ 0xF11B), calm or steady), rng, calm)


def _routing(rng: Random) -> RoutingConfig:
    """Half of the worlds have an index of what is cached, some of them one that is soon full."""
    if rng.random() < 0.5:
        return RoutingConfig(policy="prefix_aware", max_indexed_pages=rng.choice((1 << 20,) * 4 + (10,)))
    return RoutingConfig(policy=rng.choice(("rendezvous",) * 5 + POLICY_NAMES))


def _with_keys(settings: WorldSettings, rng: Random) -> WorldSettings:
    """In every fourth world the gateways keep most of what comes at once, of several keys."""
    ahead, weights = rng.choice((1, 1, 2)), rng.choice(((1.0,), (1.0, 1.0), (1.0, 3.0), (1.0, 2.0, 8.0)))
    if rng.random() >= KEYS_SHARE:
        return settings
    return dataclasses.replace(settings, dispatch_ahead=ahead, keys=_keys(weights, rng))


def _keys(weights: tuple[float, ...], rng: Random) -> tuple[Tenant, ...]:
    """Some may ask for little in a minute, some may not be urgent."""
    bound = rng.random() < 0.5
    return tuple(
        Tenant(
            name=f"key{number}",
            weight=weight,
            requests_per_minute=rng.choice((None, None, 4.0, 60.0)) if bound else None,
            tokens_per_minute=rng.choice((None, None, 200.0)) if bound else None,
            top_priority=rng.choice((-MAX_PRIORITY, 1, 3)) if bound else -MAX_PRIORITY,
        )
        for number, weight in enumerate(weights)
    )


def _with_targets(settings: WorldSettings, rng: Random) -> WorldSettings:
    """In some worlds chunks follow what a step is predicted to take; in some of these the profile breaks, and they
    do not. In some a time between two tokens is promised."""
    # From less than any step takes, to what some dozens of tokens take.
    prefill_s, decode_s = (rng.choice((0.0, 0.001, 0.015, 0.035)) for _ in range(2))
    steps = rng.choice((0, 5, 1 << 20, 1 << 20))
    aimed = rng.random() < TARGETS_SHARE
    promised_s = rng.choice((None, None, 0.001, 0.035))
    paced = dataclasses.replace(settings.decode_config, itl_s=promised_s)
    settings = dataclasses.replace(settings, decode_config=paced)
    if not aimed:
        return settings
    return dataclasses.replace(
        settings,
        profile_steps=steps,
        prefill_config=dataclasses.replace(settings.prefill_config, chunk_target_s=prefill_s),
        decode_config=dataclasses.replace(settings.decode_config, chunk_target_s=decode_s),
    )


def _with_flips(settings: WorldSettings, rng: Random, nobody_leaves: bool) -> WorldSettings:
    """Every fourth world has workers that change their role, some of which have too little time to finish."""
    flips, drain_s = rng.randint(1, 4), rng.choice((0.5, 30.0))
    if nobody_leaves or rng.random() >= FLIP_SHARE:
        return settings
    liveness = dataclasses.replace(settings.liveness, drain_deadline_s=drain_s)
    return dataclasses.replace(settings, flips=flips, liveness=liveness)


def _with_upgrades(settings: WorldSettings, rng: Random, nobody_leaves: bool) -> WorldSettings:
    """Some worlds are upgraded once or twice. Every second one to another layout: for a while they have two groups."""
    upgrades, new_layouts, surge = rng.choice((1, 1, 2)), rng.random() < 0.5, rng.choice((1, 1, 2))
    if nobody_leaves or rng.random() >= UPGRADE_SHARE:
        return settings
    return dataclasses.replace(settings, upgrades=upgrades, new_layouts=new_layouts, surge=surge)


def _with_scales(settings: WorldSettings, rng: Random, nobody_leaves: bool) -> WorldSettings:
    scales = rng.randint(1, 3)
    if nobody_leaves or rng.random() >= SCALE_SHARE:
        return settings
    return dataclasses.replace(settings, scales=scales)


def _with_bounds(settings: WorldSettings, rng: Random, safe: bool) -> WorldSettings:
    """Some worlds are full with little, and some have trouble with starting processes and ending them."""
    return dataclasses.replace(
        settings,
        max_live_sources=rng.choice((1024, 1024, 1024, 2)),
        max_inflight_requests=rng.choice((256,) * 9 + (4,)),
        bad_starts=rng.choice((0.0, 0.0, 0.0, 0.4)) * (not safe),
        lost_kills=rng.choice((0.0, 0.0, 0.5)) * (not safe),
    )


def _with_more_faults(settings: WorldSettings, rng: Random, calm: bool, steady: bool) -> WorldSettings:
    """Each world with a few of those that few systems are tested with; all with conversations."""

    def some(share: float, most: int) -> int:
        return 0 if calm or steady or rng.random() >= share else rng.randint(1, most)

    return dataclasses.replace(
        settings,
        conversations=rng.choice((0, 1, 3)),
        thinking_token_id=rng.choice((-1, -1, rng.randrange(258))),
        clogs=some(0.3, 3),
        overlapping=rng.random() < 0.25,
        late_fences=rng.choice((0.0, 0.0, 0.5, 1.0)),
        hangs=some(0.2, 1),
        cancels=0 if calm else settings.cancels or rng.randint(0, 3),
        storms=0 if calm or rng.random() >= 0.2 else rng.randint(1, 2),
        controller_crashes=some(0.2, 2),
        request_timeout_s=settings.request_timeout_s if calm or rng.random() < 0.85 else rng.uniform(1.0, 4.0),
        aftermath_s=rng.choice((0.0,) * 11 + (AFTERMATH_S,)),
        half_open=0.0 if calm or steady else rng.choice((0.0, 0.0, 0.3)),
        successor_pages=rng.choice((1.0, 1.0, 0.7)) if not calm else 1.0,
        repeats=rng.choice((0.0, 0.3, 0.6)),
        clock_offset_s=rng.choice((0.0, 0.0, 1000.0)),
        clock_drift=rng.choice((0.0, 0.0, 0.05)),
        decode_config=dataclasses.replace(
            settings.decode_config,
            max_sessions=rng.choice((0, 1, 8)),
            max_running_requests=rng.choice((3, 64, 64)),
            session_ttl_s=rng.choice((1.0, 15.0)),
            lost_session=rng.choice(("prefill", "prefill", "fail")),
        ),
    )


def _with_layout(settings: WorldSettings, rng: Random, calm: bool) -> WorldSettings:
    """With a model of any layer groups; some of those that can have tiers below their pools do."""
    page_size = settings.page_size
    full, slides, state = rng.choice(LAYOUTS)
    window = rng.choice((5, 11, 32)) if slides else 0
    # Enough for the largest request, so that only full attention makes one too long; not for many at a time.
    chunk = max(settings.prefill_config.chunk_tokens, settings.decode_config.chunk_tokens, page_size)
    needed = 2 * window // page_size + chunk // page_size + 6
    tiered = settings.prefix_cache != "chunk" and full and not slides and not state and rng.random() < 0.6
    return dataclasses.replace(
        settings,
        requests=settings.requests + 12 * tiered,  # prompts must come again to be found there
        full=full,
        window=window,
        state=state,
        swa_pages=needed + rng.randint(0, 2 * needed),
        state_slots=rng.choice((2, 4, 16)),
        tiers=TiersConfig(
            host_bytes=int(tiered),
            write=rng.choice(("through", "back")),
            restore_min_pages=rng.choice((1, 2)),
            restore_deadline_s=rng.choice((0.01, 2.0)),
        ),
        tier_pages=rng.choice((8, 256)),
        tier_page_s=rng.choice((0.0005, 0.02)),
        tier_loss=0.0 if calm else rng.choice((0.0, 0.1)),
        **_layers(settings, rng),
    )


def _layers(settings: WorldSettings, rng: Random) -> dict[str, Any]:
    """Some models have layers, and some of their prompts end by layers."""
    layers, groups = rng.choice((1, 3, 4)), rng.choice((1, 2, 4))
    return {
        "layers": layers,
        "bytes_per_token": 8 * max(2, layers),
        "prefill_config": dataclasses.replace(settings.prefill_config, layer_groups=groups),
    }
