"""DecodeCore over tiers: what was evicted or retracted comes back from below; each page has one owner meanwhile."""

from __future__ import annotations

import numpy as np
import pytest
from core_rig import EVERYONE, GATEWAY, GREEDY, PREFILL, Rig, decode_engine, member, prompt_of

from baton.common.config import TiersConfig
from baton.common.engine.fake_runner import fake_answer
from baton.common.errors import ErrorCode
from baton.common.kv.census import OwnerClass
from baton.common.kv.tiers.api import AbortRestore, AbortStore, RestorePages, StorePages
from baton.common.messages import CloseSession, SamplingParams, Timeline
from baton.transfer.api import OpenSink

THROUGH = TiersConfig(host_bytes=1, restore_min_pages=1)
BACK = TiersConfig(host_bytes=1, restore_min_pages=1, write="back")
LONG = SamplingParams(max_tokens=40)


def answer(prompt: np.ndarray, sampling: SamplingParams = GREEDY) -> list[int]:
    return list(fake_answer(prompt, sampling, 256).tokens)


def tiered(tiers: TiersConfig = THROUGH, pages: int = 64, **config: int) -> Rig:
    return Rig(decode_engine(pages=pages, tiers=tiers, **config))


def forgotten(rig: Rig) -> Rig:
    """Nothing is left but in the tiers."""
    rig.decode.pool.clear_cache()
    rig.prefill.pool.clear_cache()
    assert rig.decode.pool.free_pages == rig.decode.pool.total_pages
    return rig


def everything(command: object) -> bool:
    return True


def stores(command: object) -> bool:
    return isinstance(command, StorePages)


def hold_backups(rig: Rig) -> None:
    """What is stored when the first request was retracted."""
    rig.tier.holds = lambda command: stores(command) and rig.decode.core.retractions > 0


def all_of(rig: Rig, kind: type) -> list[object]:
    return [effect for effect in rig.log if isinstance(effect, kind)]


def timeline_of(rig: Rig, name: str) -> Timeline:
    timeline = rig.gateway.finals[name].timeline
    assert timeline is not None
    return timeline


def parts(rig: Rig, name: str) -> tuple[int, int, int, int]:
    """Prompt tokens that were cached, restored, transferred, computed here."""
    found = timeline_of(rig, name)
    return found.cached_tokens, found.restored_tokens, found.transferred_tokens, found.local_tokens


def answered(rig: Rig, name: str, prompt: np.ndarray, sampling: SamplingParams = GREEDY) -> None:
    rig.submit(name, prompt, sampling)
    rig.settle()
    assert rig.gateway.tokens[name] == answer(prompt, sampling)


# ------------------------------------------------------------------------------------------------ restoring


def test_what_was_evicted_comes_back_and_only_the_rest_is_sent() -> None:
    rig = tiered()
    answered(rig, "first", prompt_of(42))
    forgotten(rig)
    longer = np.concatenate((prompt_of(42), prompt_of(9, 5)))
    answered(rig, "second", longer)
    assert parts(rig, "second") == (0, 40, 11, 0)
    assert [one.start for one in all_of(rig, OpenSink)] == [0, 40]
    rig.assert_clean()


def test_a_whole_prompt_comes_back_but_its_last_token() -> None:
    rig = tiered()
    answered(rig, "first", prompt_of(40))
    forgotten(rig)
    answered(rig, "second", prompt_of(40))
    assert parts(rig, "second") == (0, 36, 4, 0)


def test_the_tree_is_asked_before_the_tiers() -> None:
    rig = tiered()
    answered(rig, "first", prompt_of(42))
    rig.decode.pool.evict(8)
    cached = rig.decode.pool.match_len(prompt_of(42))
    assert 0 < cached < 40
    answered(rig, "second", prompt_of(42))
    assert parts(rig, "second") == (cached, 40 - cached, 0, 2)


def test_a_short_rest_is_computed_where_the_beginning_is() -> None:
    """A prefill worker that has forgotten the prompt would compute all of it for a token or two."""
    rig = tiered()
    answered(rig, "first", prompt_of(50))
    forgotten(rig)
    answered(rig, "second", prompt_of(51)[:51])
    assert parts(rig, "second") == (0, 48, 0, 3)
    assert len(all_of(rig, OpenSink)) == 1
    answered(rig, "third", np.concatenate((prompt_of(50)[:48], prompt_of(4, 5))))
    assert parts(rig, "third") == (48, 0, 4, 0)


def test_what_was_restored_is_not_stored_again() -> None:
    rig = tiered()
    answered(rig, "first", prompt_of(42))
    forgotten(rig)
    before = sum(len(one.keys) for one in all_of(rig, StorePages))
    answered(rig, "second", prompt_of(42))
    stored = [key for one in all_of(rig, StorePages) for key in one.keys][before:]
    assert len(stored) == (42 + 8 - 1) // 4 - 10, "the page that the answer ended, which is another one now"


def test_a_prompt_larger_than_a_share_of_the_pool_goes_down_in_the_end() -> None:
    rig = tiered(pages=64)
    answered(rig, "first", prompt_of(130))
    assert sum(len(one.keys) for one in all_of(rig, StorePages)) == (130 + 8 - 1) // 4
    assert max(len(one.keys) for one in all_of(rig, StorePages)) == 16


def test_a_prompt_comes_back_without_any_prefill_worker() -> None:
    rig = tiered()
    answered(rig, "first", prompt_of(42))
    forgotten(rig)
    rig.view(*EVERYONE[:2])
    answered(rig, "second", prompt_of(42))
    assert parts(rig, "second") == (0, 40, 0, 2)


@pytest.mark.parametrize("landed", [0, 3, 10])
def test_a_restore_that_is_cut_short_keeps_what_landed(landed: int) -> None:
    rig = tiered()
    answered(rig, "first", prompt_of(42))
    forgotten(rig)
    rig.tier.holds = everything
    rig.submit("second", prompt_of(42))
    assert rig.decode.core.next_deadline() == pytest.approx(rig.decode.now + THROUGH.restore_deadline_s)
    rig.run(rig.decode.pass_time(THROUGH.restore_deadline_s))
    assert len(all_of(rig, AbortRestore)) == 1
    rig.release_tier(landed)
    rig.settle()
    assert rig.gateway.tokens["second"] == answer(prompt_of(42))
    rest = 42 - 4 * landed
    assert parts(rig, "second") == (0, 4 * landed, *((rest, 0) if landed < 10 else (0, rest)))
    rig.assert_clean()


@pytest.mark.parametrize("how", ["cancelled", "late", "gateway gone"])
def test_pages_of_a_restore_are_kept_until_it_has_ended(how: str) -> None:
    rig = tiered()
    answered(rig, "first", prompt_of(42))
    forgotten(rig)
    rig.tier.holds = everything
    rig.submit("second", prompt_of(42), ttl_s=1.0)
    match how:
        case "cancelled":
            rig.cancel("second")
        case "late":
            rig.run(rig.decode.pass_time(1.0))
        case _:
            rig.view(member(PREFILL, "prefill"), *EVERYONE[1:2])
            assert not any(one.stamp == GATEWAY for one in EVERYONE[1:])
    assert len(all_of(rig, AbortRestore)) == 1
    (holding,) = rig.decode.core.holdings()
    assert holding.owner_class is OwnerClass.INCOMING
    assert rig.decode.pool.free_pages == rig.decode.pool.total_pages - 11
    rig.release_tier(4)
    assert not list(rig.decode.core.holdings())
    assert rig.decode.pool.match_len(prompt_of(42)) == 16, "what landed is of use to others"
    rig.settle()
    rig.assert_clean()


def test_damaged_or_missing_pages_are_computed() -> None:
    rig = tiered()
    answered(rig, "first", prompt_of(42))
    forgotten(rig)
    rig.tier.pages.clear()
    answered(rig, "second", prompt_of(42))
    assert parts(rig, "second") == (0, 0, 42, 0)


def test_requests_are_restored_side_by_side() -> None:
    rig = tiered(pages=128)
    for seed in range(3):
        answered(rig, f"first{seed}", prompt_of(42, seed))
    forgotten(rig)
    rig.tier.holds = everything
    for seed in range(3):
        rig.submit(f"second{seed}", prompt_of(42, seed))
    assert rig.decode.core.load().running == 3
    for command in reversed(rig.tier.release()):
        rig.run(rig.decode.handle(rig.tier.carry_out(command)))
    rig.settle()
    for seed in range(3):
        assert rig.gateway.tokens[f"second{seed}"] == answer(prompt_of(42, seed))
        assert parts(rig, f"second{seed}") == (0, 40, 0, 2)
    rig.assert_clean()


# -------------------------------------------------------------------------------------------------- storing


def test_prompt_and_answer_go_down_once() -> None:
    rig = tiered()
    answered(rig, "first", prompt_of(42), LONG)
    stored = [key for one in all_of(rig, StorePages) for key in one.keys]
    assert len(stored) == len(set(stored)) == (42 + 40 - 1) // 4
    answered(rig, "again", prompt_of(42), LONG)
    assert sum(len(one.keys) for one in all_of(rig, StorePages)) == len(stored)


def test_thoughts_stay_out_of_the_tiers() -> None:
    rig = tiered()
    thinking = answer(prompt_of(42), LONG)[0]
    rig.submit("r", prompt_of(42), LONG, thinking_token_id=thinking)
    rig.settle()
    assert sum(len(one.keys) for one in all_of(rig, StorePages)) == 10


def test_a_conversation_goes_down_when_it_ends() -> None:
    rig = tiered()
    rig.submit("turn", prompt_of(42), session=("chat", 0))
    rig.settle()
    before = sum(len(one.keys) for one in all_of(rig, StorePages))
    assert before == 10
    rig.tell(CloseSession(session_id="chat"))
    assert sum(len(one.keys) for one in all_of(rig, StorePages)) == (42 + 8 - 1) // 4


def test_written_back_pages_go_down_before_they_are_evicted() -> None:
    rig = tiered(BACK, pages=48)
    for seed in range(6):  # more than the pool can keep
        answered(rig, f"first{seed}", prompt_of(42, seed))
    stored = {key for one in all_of(rig, StorePages) for key in one.keys}
    assert stored, "the pool was full more than once"
    assert rig.decode.pool.match_len(prompt_of(42)) < 40
    rig.prefill.pool.clear_cache()
    answered(rig, "second", prompt_of(42))
    cached, restored, *others = parts(rig, "second")
    assert restored > 0
    assert cached + restored + sum(others) == 42
    rig.assert_clean()


def test_who_waits_for_pages_that_are_being_copied_gets_them_afterwards() -> None:
    rig = tiered(pages=16)
    rig.tier.holds = stores
    rig.submit("first", prompt_of(14))
    rig.settle()
    assert rig.decode.pool.copying
    rig.submit("second", prompt_of(52, 1), SamplingParams(max_tokens=4))
    rig.settle()
    assert "second" not in rig.gateway.tokens
    rig.release_tier()
    rig.settle()
    assert rig.gateway.tokens["second"] == answer(prompt_of(52, 1), SamplingParams(max_tokens=4))
    rig.assert_clean()


def test_what_comes_free_goes_to_who_waits_before_more_is_written_back() -> None:
    """Each store of a part of the tree's one branch keeps all of it in place: as long as one follows the other."""
    rig = tiered(BACK, pages=16)
    rig.tier.holds = stores
    rig.submit("first", prompt_of(54))
    rig.settle()
    (store,) = rig.tier.held
    assert len(store.page_ids) < 14
    rig.submit("second", prompt_of(52, 1), SamplingParams(max_tokens=4))
    rig.settle()
    assert "second" not in rig.gateway.tokens
    rig.tier.held.clear()
    rig.run(rig.decode.handle(rig.tier.carry_out(store, 1)))
    rig.settle()
    assert "second" in rig.gateway.tokens
    rig.release_tier()
    rig.settle()
    assert rig.gateway.tokens["second"] == answer(prompt_of(52, 1), SamplingParams(max_tokens=4))


def test_a_running_request_gets_its_page_before_more_is_written_back() -> None:
    rig = tiered(BACK, pages=16)
    rig.tier.holds = stores
    rig.submit("first", prompt_of(30), SamplingParams(max_tokens=2))
    rig.settle()
    sampling = SamplingParams(max_tokens=34)
    rig.submit("second", prompt_of(22, 1), sampling)
    rig.settle()
    said = 0
    for _ in range(40):
        if "second" in rig.gateway.finals:
            break
        assert rig.tier.held, "it waits for nothing"
        assert len(rig.gateway.tokens["second"]) > said, "a store ended, and it got nothing"
        said = len(rig.gateway.tokens["second"])
        rig.run(rig.decode.handle(rig.tier.carry_out(rig.tier.held.pop(0), 1)))
        rig.settle()
    assert rig.gateway.tokens["second"] == answer(prompt_of(22, 1), sampling)


@pytest.mark.parametrize("tiers", [THROUGH, BACK])
@pytest.mark.parametrize("who", ["newcomer", "running"])
def test_one_conversation_is_given_up_at_a_time(tiers: TiersConfig, who: str) -> None:
    """Its pages are in nobody's way once they were copied: no reason to give up the next one meanwhile."""
    rig = tiered(tiers, pages=44 if who == "newcomer" else 48, num_reserved_decode_tokens=0)
    for seed in range(4):
        rig.submit(f"turn{seed}", prompt_of(30, seed), session=(f"chat{seed}", 0))
        rig.settle()
    rig.tier.holds = stores
    sampling = GREEDY if who == "newcomer" else LONG
    rig.submit("new", prompt_of(27, 9), sampling)
    rig.settle()
    assert "new" not in rig.gateway.finals
    assert len([one for one in rig.decode.core.holdings() if one.owner_class is OwnerClass.SESSION]) == 3
    rig.release_tier()
    rig.settle()
    assert rig.gateway.tokens["new"] == answer(prompt_of(27, 9), sampling)


def test_a_conversation_whose_copy_hangs_is_not_waited_for() -> None:
    rig = tiered(pages=44)
    for seed in range(4):
        rig.submit(f"turn{seed}", prompt_of(30, seed), session=(f"chat{seed}", 0))
        rig.settle()
    rig.tier.holds = stores
    rig.submit("new", prompt_of(27, 9))
    rig.settle()
    rig.tier.refuses = True
    rig.run(rig.decode.pass_time(THROUGH.restore_deadline_s))
    rig.settle()
    assert len(all_of(rig, AbortStore)) == 1
    assert rig.gateway.tokens["new"] == answer(prompt_of(27, 9))


def test_the_last_running_request_waits_for_pages_that_are_being_copied() -> None:
    """It would fail otherwise: nobody else could give way."""
    rig = tiered(pages=12)
    rig.tier.holds = stores
    rig.submit("first", prompt_of(10), SamplingParams(max_tokens=2))
    rig.settle()
    sampling = SamplingParams(max_tokens=28)
    rig.submit("second", prompt_of(14, 1), sampling)
    rig.settle()
    assert "second" not in rig.gateway.finals
    assert len(rig.gateway.tokens["second"]) < 28
    rig.release_tier()
    rig.settle()
    assert rig.gateway.tokens["second"] == answer(prompt_of(14, 1), sampling)
    rig.assert_clean()


# ------------------------------------------------------------------------------------------------ retracting


def crowd(rig: Rig) -> None:
    for index in range(4):
        rig.submit(f"r{index}", prompt_of(14, index), LONG)


def assert_all_right(rig: Rig) -> None:
    for index in range(4):
        assert rig.gateway.tokens[f"r{index}"] == answer(prompt_of(14, index), LONG)
        assert sum(parts(rig, f"r{index}")) == 14
    rig.assert_clean()


def test_a_retracted_request_comes_back_from_below() -> None:
    rig = tiered(pages=24, num_reserved_decode_tokens=0)
    crowd(rig)
    rig.settle()
    core = rig.decode.core
    assert core.retractions > 0
    assert core.restored_tokens > 0
    retracted = [index for index in range(4) if timeline_of(rig, f"r{index}").retractions]
    later = [one for one in all_of(rig, OpenSink) if one.start > 0]
    assert retracted
    assert all(len(one.tokens) - one.start < 4 for one in later), "no more than the page that was not whole is sent"
    assert_all_right(rig)


def test_its_pages_are_its_own_until_they_were_copied() -> None:
    rig = tiered(pages=24, num_reserved_decode_tokens=0)
    crowd(rig)
    hold_backups(rig)
    rig.settle()
    held = [one for one in rig.decode.core.holdings() if one.owner_class is OwnerClass.REQUEST]
    assert held, "it is"
    assert rig.decode.core.load().queued == 0
    assert rig.decode.core.retractions == 1, "one at a time"
    rig.submit("new", prompt_of(5, 9))
    assert "new" not in rig.gateway.tokens, "nobody is let in before it"
    rig.release_tier()
    rig.settle()
    assert rig.gateway.tokens["new"] == answer(prompt_of(5, 9))
    assert_all_right(rig)


def test_a_request_that_is_being_copied_computes_no_more() -> None:
    """It had its place in the step already when another could not grow, which then had to wait for the copy."""
    rig = tiered(BACK, pages=12, num_reserved_decode_tokens=0)
    hold_backups(rig)
    prompts = [prompt_of(length, length) for length in (12, 13, 15)]  # the last one is the first that lacks a page
    for index, prompt in enumerate(prompts):
        rig.submit(f"r{index}", prompt)
    rig.settle()
    assert rig.decode.core.retractions == 1
    said = len(rig.gateway.tokens["r0"])
    assert 0 < said < len(answer(prompts[0]))
    rig.release_tier()
    rig.settle()
    assert [rig.gateway.tokens[f"r{index}"] for index in range(3)] == [answer(prompt) for prompt in prompts]
    assert timeline_of(rig, "r0").retractions == 1
    rig.assert_clean()


def test_a_tier_that_hangs_stops_nobody_but_whose_pages_it_reads() -> None:
    rig = tiered(pages=24, num_reserved_decode_tokens=0)
    crowd(rig)
    hold_backups(rig)
    rig.settle()
    assert rig.decode.core.next_deadline() == pytest.approx(rig.decode.now + THROUGH.restore_deadline_s)
    rig.submit("new", prompt_of(5, 9))
    # The page it reads is never read to its end; what comes now is refused, as by a tier thread that sees that.
    rig.tier.refuses = True
    rig.run(rig.decode.pass_time(THROUGH.restore_deadline_s))
    rig.settle()
    assert len(all_of(rig, AbortStore)) == 1
    hung = [index for index in range(4) if f"r{index}" not in rig.gateway.finals]
    assert len(hung) == 1
    assert rig.gateway.tokens["new"] == answer(prompt_of(5, 9))
    assert rig.decode.core.next_deadline() != 0.0
    rig.release_tier()
    rig.settle()
    assert_all_right(rig)


@pytest.mark.parametrize("stored", [0, 1 << 30])
def test_a_retracted_request_that_is_cancelled_meanwhile(stored: int) -> None:
    rig = tiered(pages=24, num_reserved_decode_tokens=0)
    crowd(rig)
    hold_backups(rig)
    rig.settle()
    assert rig.decode.core.retractions == 1
    for index in range(4):
        rig.cancel(f"r{index}")
    (left,) = rig.decode.core.holdings()
    assert left.owner_class is OwnerClass.INCOMING
    rig.release_tier(stored)
    rig.settle()
    for index in range(4):
        failure = rig.gateway.finals[f"r{index}"].failure
        assert failure is not None
        assert failure.code is ErrorCode.CANCELLED
    rig.assert_clean()


def test_a_backup_that_is_lost_is_computed_again() -> None:
    rig = tiered(pages=24, num_reserved_decode_tokens=0)
    crowd(rig)
    for _ in range(2000):
        rig.tier.pages.clear()
        effects = [engine.step() for engine in (rig.prefill, rig.decode)]
        if not any(effects) and rig.decode.core.next_deadline() != 0.0:
            break
        for one in effects:
            rig.run(one or [])
        rig.run(rig.decode.pass_time(0.0))
    assert rig.decode.core.retractions > 0
    assert all(isinstance(one, RestorePages) for one in all_of(rig, RestorePages))
    assert rig.decode.core.restored_tokens == 0
    assert_all_right(rig)
