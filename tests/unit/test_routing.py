"""Who gets a request: each policy by itself, and the router that keeps what they choose from."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from baton.common.config import ClusterConfig
from baton.common.config_checks import validate
from baton.common.engine.core_api import MembershipView
from baton.common.errors import ConfigError
from baton.common.ids import Epoch, Stamp, WorkerId
from baton.common.kv.events import page_names
from baton.common.messages import KvEvents, KvEventsWanted, Load, Member
from baton.common.routing_config import POLICY_NAMES, KvEventsConfig, RoutingConfig
from baton.deploy.routing.index import IndexCounts
from baton.deploy.routing.own_policy import policy_of
from baton.deploy.routing.policies import (
    SLACK,
    Choice,
    Policy,
    Role,
    least_loaded,
    power_of_two,
    prefix_aware,
    rendezvous,
    round_robin,
)
from baton.deploy.routing.router import Router
from baton.deploy.routing.seats import Seats

PAGE = 16
STAMPS = [Stamp(WorkerId(name), 1, Epoch(number + 1)) for number, name in enumerate(("p0", "p1", "p2", "d0", "d1"))]
P, D = STAMPS[:3], STAMPS[3:]
PROMPT = np.arange(100, dtype=np.int32)


def choice(role: Role = "prefill", count: int = 3, **known: object) -> Choice:
    made = Seats(role, PAGE, STAMPS[:count]).choice(PROMPT, (), None, 0, 0)
    arrays = {name: np.array(value) if isinstance(value, list) else value for name, value in known.items()}
    return replace(made, free_pages=np.full(count, 100), **arrays)  # type: ignore[arg-type]


def view(*stamps: Stamp, silent: frozenset[WorkerId] = frozenset()) -> MembershipView:
    roles = {"p": "prefill", "d": "decode"}
    return MembershipView(1, tuple(Member(stamp=one, role=roles[one.worker[0]], address="") for one in stamps), silent)


def make_router(policy: str = "prefix_aware") -> Router:
    router = Router(RoutingConfig(policy=policy), PAGE, 0.5)
    router.on_view(view(*STAMPS))
    return router


def cached(router: Router, stamp: Stamp, tokens: int, seq: int = 1) -> None:
    names = np.array(list(page_names(PROMPT[:tokens], PAGE)), dtype="<u8").tobytes()
    router.on_kv(stamp, KvEvents(seq=seq, stored=names), 0.0)


@pytest.mark.parametrize("name", POLICY_NAMES)
def test_every_policy_takes_only_who_can_and_says_when_nobody_can(name: str) -> None:
    policy = policy_of(name)
    for draw in range(20):
        for role in ("prefill", "decode"):
            only = choice(role, takes=[False, True, False], draw=draw, turn=draw)
            assert policy(only) == 1
            assert policy(replace(only, matched=np.array([96, 0, 32]))) == 1
            assert policy(choice(role, takes=[False] * 3, draw=draw)) is None
            assert policy(Seats(role, PAGE).choice(PROMPT, (), None, draw, draw)) is None


def test_rendezvous_keeps_to_who_prefers_the_prompt_within_the_slack() -> None:
    favourite = rendezvous(choice())
    assert favourite is not None
    requests = [0, 0, 0]
    requests[favourite] = SLACK
    assert rendezvous(choice(requests=requests)) == favourite
    requests[favourite] += 1
    assert rendezvous(choice(requests=requests)) != favourite


def test_least_loaded_round_robin_and_two_choices() -> None:
    assert least_loaded(choice(requests=[3, 1, 2])) == 1
    assert [round_robin(choice(turn=turn)) for turn in range(4)] == [0, 1, 2, 0]
    drawn = [power_of_two(choice(requests=[9, 1, 5], draw=draw)) for draw in range(60)]
    assert set(drawn) == {1, 2}, "never the fullest of three; not always the emptiest: it is not always drawn"
    assert drawn == [power_of_two(choice(requests=[9, 1, 5], draw=draw)) for draw in range(60)]


def test_prefix_aware_prefill_weighs_computing_against_waiting() -> None:
    assert prefix_aware(choice(matched=[0, 64, 0])) == 1
    assert prefix_aware(choice(matched=[0, 64, 0], waiting_tokens=[0, 100, 0])) == 1
    assert prefix_aware(choice(matched=[0, 64, 0], waiting_tokens=[500, 400, 0])) == 2, "to wait takes longer"
    assert prefix_aware(choice(matched=[0, 32, 0], waiting_tokens=[500, 110, 0])) == 1, "it is close"
    assert prefix_aware(choice(matched=[0, 32, 0], waiting_tokens=[500, 120, 0])) == 2, "it is not any more"
    speeds = choice(matched=[16, 16, 0], tokens_per_s=[100.0, 1000.0, 0.0])
    assert prefix_aware(speeds) == 1, "who computes faster"
    assert prefix_aware(choice(waiting_tokens=[9, 900, 0], current=[True] * 3)) == 2, "nobody has it: the least to do"
    lost = {prefix_aware(choice(waiting_tokens=[9, 900, 0], draw=draw)) for draw in range(60)}
    assert lost == {0, 2}, "nobody knows: the better one of two"


def test_prefix_aware_decode_wants_the_prefix_within_the_slack_and_room() -> None:
    assert prefix_aware(choice("decode", matched=[0, 64, 32], requests=[0, SLACK, 0])) == 1
    assert prefix_aware(choice("decode", matched=[0, 64, 32], requests=[0, SLACK + 1, 0])) == 2
    full = choice("decode", matched=[0, 64, 32])
    assert prefix_aware(replace(full, free_pages=np.array([100, 1, 100]))) == 2, "it would wait for pages"
    assert prefix_aware(replace(full, free_pages=np.array([1, 1, 1]))) == 1, "as it would everywhere"


def test_a_router_goes_where_the_prompt_is_cached() -> None:
    router = make_router()
    cached(router, P[2], 96)
    cached(router, D[1], 64)
    prefill, decode = router.place("prefill", PROMPT, 1), router.place("decode", PROMPT, 1)
    assert prefill is not None
    assert decode is not None
    assert (prefill.stamp, decode.stamp) == (P[2], D[1])
    assert prefill.tokens == 4, "what is left to compute"
    assert router.place("prefill", PROMPT, 1, refused_by={P[2]}) is not None
    router.leave(prefill)
    router.leave(decode)


def test_prompts_that_come_together_go_together() -> None:
    router = make_router()
    first = router.place("prefill", PROMPT, 1)
    assert first is not None
    assert len(first.names) == 6
    same = [router.place("prefill", PROMPT, draw) for draw in range(2, 6)]
    assert {one.stamp for one in same if one} == {first.stamp}, "it will have it"
    for one in (first, *same):
        assert one is not None
        router.leave(one)
    assert router.idle
    later = {placed.stamp for draw in range(20) if (placed := router.place("prefill", PROMPT, draw)) is not None}
    assert later <= set(P)


def test_a_router_asks_for_what_it_missed_and_forgets_a_process_with_its_tree() -> None:
    router = make_router()
    assert router.heard(P[0], Load(kv_seq=3), 0.0) == []
    assert router.index_counts() == IndexCounts(0, 0, 1)
    [asked] = router.heard(P[0], Load(kv_seq=3), 1.0)
    assert (asked.worker, asked.epoch, asked.body) == (P[0].worker, P[0].epoch, KvEventsWanted(first_seq=1))
    cached(router, P[1], 96)
    successor = Stamp(P[1].worker, 2, Epoch(99))
    router.on_view(view(P[0], successor, P[2]))
    assert router.index is not None
    assert router.index.pages == 0
    plain = make_router("rendezvous")
    assert plain.index is None
    assert plain.heard(P[0], Load(kv_seq=3), 1.0) == []
    cached(plain, P[0], 96)  # nobody asked for it: nothing happens


def test_what_others_have_placed_counts_beside_ones_own() -> None:
    router = make_router(f"{__name__}:least_waiting")
    router.heard(P[0], Load(queued_tokens=150), 0.0)
    router.heard(P[1], Load(queued_tokens=130), 0.0)
    router.heard(P[2], Load(queued_tokens=120), 0.0)
    ours = [router.place("prefill", PROMPT, draw) for draw in range(3)]
    assert [one.stamp for one in ours if one] == [P[2], P[1], P[0]], "each with what this gateway had put there since"
    router.heard(P[1], Load(queued_tokens=100), 1.0)
    later = router.place("prefill", PROMPT, 9)
    assert later is not None
    assert later.stamp == P[1], "all that waits there is of this gateway"


def least_waiting(choice: Choice) -> int | None:
    return int(choice.waiting_tokens.argmin())


def test_who_drains_or_is_silent_is_not_chosen() -> None:
    router = make_router("least_loaded")
    router.heard(P[0], Load(draining=True), 0.0)
    router.on_view(view(*STAMPS, silent=frozenset({P[1].worker})))
    placed = [router.place("prefill", PROMPT, draw) for draw in range(5)]
    assert {one.stamp for one in placed if one} == {P[2]}
    router.heard(P[0], Load(), 0.1)  # said before, and overtaken
    again = [router.place("prefill", PROMPT, draw) for draw in range(5)]
    assert {one.stamp for one in again if one} == {P[2]}, "who drains never takes anything again"


def always_last(choice: Choice) -> int | None:
    able = np.flatnonzero(choice.takes)
    return int(able[-1]) if len(able) else None


def test_a_policy_of_ones_own() -> None:
    router = make_router(f"{__name__}:always_last")
    assert router.index is not None, "it may ask what is cached"
    placed = router.place("prefill", PROMPT, 1)
    assert placed is not None
    assert placed.stamp == P[2]
    for name in ("no.such.module:policy", f"{__name__}:nothing", f"{__name__}:PAGE"):
        with pytest.raises(ConfigError, match=r"routing\.policy"):
            policy_of(name)


def crashes(choice: Choice) -> int | None:
    raise KeyError(choice.role)


def last_of_all(choice: Choice) -> int | None:
    return len(choice.takes) - 1


def before_the_first(choice: Choice) -> int | None:
    return -1


def behind_the_last(choice: Choice) -> int | None:
    return len(choice.takes)


def half(choice: Choice) -> int | None:
    return 0.5  # type: ignore[return-value]


@pytest.mark.parametrize("own", [crashes, last_of_all, before_the_first, behind_the_last, half])
def test_where_a_policy_of_ones_own_fails_the_default_chooses(own: Policy, caplog: pytest.LogCaptureFixture) -> None:
    router = make_router(f"{__name__}:{own.__name__}")
    cached(router, P[1], 64)
    for count in (1, 2):
        placed = router.place("prefill", PROMPT, 1, refused_by=[P[2]])
        assert placed is not None
        assert placed.stamp == P[1], "who has it cached"
        assert router.policy_failures == count
    assert caplog.messages == ["routing_policy_failed"], "said, and not with each request"
    assert router.place("prefill", PROMPT, 1, refused_by=P) is None


@pytest.mark.parametrize(
    ("config", "field"),
    [
        (ClusterConfig(routing=RoutingConfig(policy="prefix-aware")), "routing.policy"),
        (ClusterConfig(routing=RoutingConfig(max_indexed_pages=0)), "routing.max_indexed_pages"),
        (ClusterConfig(kv_events=KvEventsConfig(port=0)), "kv_events.port"),
        (ClusterConfig(kv_events=KvEventsConfig(replay_port=5558)), "kv_events.replay_port"),
        (ClusterConfig(kv_events=KvEventsConfig(topic="{pod}")), "kv_events.topic"),
    ],
)
def test_settings_that_cannot_work_are_named(config: ClusterConfig, field: str) -> None:
    with pytest.raises(ConfigError) as raised:
        validate(config)
    assert raised.value.field == field
