"""Every configuration of the prefix cache on real architectures: what a prefill and a decode worker say together is
what the model says alone, token for token, whatever becomes of the request on its way.

Small random models through both engine cores (`pd_rig`). Each kind of traffic proves that it took place.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from random import Random

import msgspec
import pytest
from core_rig import EVERYONE
from pd_rig import CHUNK, Case, Model, Pair, Tokens, Write, all_cases, joined, ordinary_cases, prompt_of

from baton.common.config import KvReturn
from baton.common.engine.batch import Batch
from baton.common.engine.torch_runner import TorchRunner
from baton.common.errors import ErrorCode
from baton.common.kv.layout import Component
from baton.common.messages import SamplingParams
from baton.transfer.api import ShipRegion

ORDINARY = ordinary_cases()
CASES = [pytest.param(case, id=str(case)) for case in ORDINARY] + [
    pytest.param(case, id=str(case), marks=pytest.mark.slow) for case in all_cases() if case not in ORDINARY
]

TIERED = [case for case in ORDINARY if case.shares and case.layout.only_full]
RETURNING = [Case("radix", family, page_size) for family, page_size in (("llama", 1), ("qwen3", 4), ("llama", 16))]
MODES: tuple[KvReturn, ...] = ("on", "off")
WRITES: tuple[Write, ...] = ("back", "through")
TIERED_CASES = [
    pytest.param(case, write, id=f"{case}-{write}", marks=[pytest.mark.slow] if (turn + index) % 2 else [])
    for turn, case in enumerate(TIERED)
    for index, write in enumerate(WRITES)
]


@pytest.fixture(scope="module")
def model_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Model]:
    made: dict[str, Model] = {}

    def make(family: str) -> Model:
        if family not in made:
            made[family] = Model(family, tmp_path_factory.mktemp(family))
        return made[family]

    return make


@pytest.mark.parametrize("case", CASES)
def test_what_two_workers_say_is_what_the_model_says(case: Case, model_of: Callable[[str], Model]) -> None:
    pair = Pair(case, model_of(case.family))
    all_traffic(pair)
    pair.end()


@pytest.mark.parametrize(("case", "write"), TIERED_CASES)
def test_tiers_below_the_pool(case: Case, write: Write, tmp_path: Path, model_of: Callable[[str], Model]) -> None:
    """What was evicted or retracted comes back from there."""
    pair = Pair(case, model_of(case.family), tmp_path, write)
    all_traffic(pair)
    crowded_out(pair)
    pair.end()


SEVERAL_FULL_LAYERS = (
    "UnifiedRadixCache-llama-4",
    "ChunkCache-llama-4",
    "SWARadixCache-gemma2-16",
    "UnifiedRadixCache-falcon-h1-1",
)
BY_LAYERS = [case for case in ORDINARY if str(case) in SEVERAL_FULL_LAYERS]


@pytest.mark.parametrize("case", BY_LAYERS, ids=str)
def test_what_leaves_by_layers_says_the_same(case: Case, model_of: Callable[[str], Model]) -> None:
    pair = Pair(case, model_of(case.family), layer_groups=2)
    prefixes(pair)
    conversation(pair)
    retraction(pair)
    requests_that_are_given_up(pair)
    pair.end()
    parts = [one.part for one in pair.rig.log if isinstance(one, ShipRegion) and one.parts > 1]
    assert parts.count(0) == parts.count(1) > 10


def test_a_layer_that_is_reported_too_early_is_noticed(
    model_of: Callable[[str], Model], monkeypatch: pytest.MonkeyPatch
) -> None:
    reports = TorchRunner._reports

    def one_layer_early(self: TorchRunner, batch: Batch) -> dict[int, int]:
        layers = sorted(self._groups.attention)
        return {layers[max(0, layers.index(layer) - 1)]: count for layer, count in reports(self, batch).items()}

    monkeypatch.setattr(TorchRunner, "_reports", one_layer_early)
    case = BY_LAYERS[0]
    pair = Pair(case, model_of(case.family), layer_groups=2)
    with pytest.raises(AssertionError, match="of first"):
        pair.answer("first", prompt_of(12, 1))


@pytest.mark.parametrize("case", RETURNING, ids=str)
def test_a_conversation_comes_back(case: Case, model_of: Callable[[str], Model]) -> None:
    """Five turns: the prefill worker computes what nobody has, from KV that the decode worker made."""
    computed = {}
    for mode in MODES:
        pair = Pair(case, model_of(case.family), kv_return=mode)
        text, names = prompt_of(14, 60), [f"turn-{turn}" for turn in range(5)]
        for turn, name in enumerate(names):
            pair.answer(name, text, 6, session=("talk", turn))
            text = joined(text, pair.said(name), prompt_of(12, 61 + turn))
        computed[mode] = sum(batch.num_tokens for batch in pair.rig.prefill.batches)
        missing = sum(end - first for first, end in pair.spans_sent(*names)[Component.FULL])
        assert mode == "off" or computed[mode] == missing
        pair.end()
    assert computed["on"] < computed["off"]


def test_penalties_survive_hand_off_and_migration(model_of: Callable[[str], Model]) -> None:
    """They are counted anew from the tokens, on whichever worker: the prefill worker, which samples the first token,
    the decode worker, and one that goes on after so many tokens."""
    case, prompt = Case("radix", "qwen3", 4), prompt_of(21, 70)
    plain = SamplingParams(temperature=0.9, seed=5, max_tokens=24)
    sampling = msgspec.structs.replace(
        plain,
        min_p=0.01,
        repetition_penalty=1.2,
        frequency_penalty=0.7,
        presence_penalty=0.4,
        logit_bias=((int(prompt[0]), 4.0), (int(prompt[-1]), 3.0)),
    )

    def said(sampling: SamplingParams, before: list[int]) -> list[int]:
        pair = Pair(case, model_of(case.family))
        pair.rig.gateway.tokens["r"] = list(before)
        pair.rig.submit("r", prompt, sampling, before, placement=len(before))
        pair.settle()
        assert pair.hand_offs("r")
        assert len(pair.said("r")) == 24
        pair.end()
        return pair.said("r")

    whole = said(sampling, [])
    assert whole != said(plain, [])
    for moved_after in (1, 9, 23):
        assert said(sampling, whole[:moved_after]) == whole


def all_traffic(pair: Pair) -> None:
    prefixes(pair)
    conversation(pair)
    retraction(pair)
    requests_that_are_given_up(pair)
    a_lost_hand_off(pair)
    nobody_to_prefill(pair)


def crowded_out(pair: Pair) -> None:
    """A prefix that was evicted because others came; of what is written back, the beginning was copied in time."""
    known = prompt_of(48, 80)
    pair.answer("old", known)
    for number in range(4):
        pair.answer(f"newer-{number}", prompt_of(40, 81 + number))
    timeline = pair.answer("old-again", joined(known, prompt_of(5, 86)))
    assert timeline.cached_tokens == 0
    assert timeline.restored_tokens > 0


def prefixes(pair: Pair) -> None:
    """A prompt that comes in chunks; then its prefix is found where it was decoded, and where it was prefilled."""
    known = prompt_of(64, 1)
    found = len(known) if pair.case.shares else 0
    steps = len(pair.rig.prefill.batches)
    first = pair.answer("first", known)
    assert (first.cached_tokens, first.transferred_tokens) == (0, len(known))
    chunks = pair.rig.prefill.batches[steps:]
    assert len(chunks) >= len(known) // CHUNK
    assert max(chunk.num_tokens for chunk in chunks) <= CHUNK
    here = pair.answer("here", joined(known, prompt_of(9, 2)))
    assert here.cached_tokens == found
    pair.decode.pool.clear_cache()
    there = pair.answer("there", joined(known, prompt_of(9, 3)))
    assert there.cached_tokens == 0
    assert there.restored_tokens + there.prefill_cached_tokens == found
    if pair.tiers is not None and pair.tiers.write == "through":
        assert there.restored_tokens == found
    pair.answer("shortest", prompt_of(1, 4))


def conversation(pair: Pair) -> None:
    """Four turns, of which the KV of each token is sent at most once; then one that goes back in the conversation, one
    that is stopped in the middle of its answer, and one after that."""
    text = prompt_of(21, 10)
    names: list[str] = []
    known = 0
    for turn in range(4):
        names.append(f"turn-{turn}")
        timeline = pair.answer(names[-1], text, 6, session=("talk", turn))
        assert timeline.cached_tokens == known
        known = len(text) + 6 - 1  # the newest token has no KV yet
        text = joined(text, pair.said(names[-1]), prompt_of(21, 11 + turn))
    spans = pair.spans_sent(*names)
    for component in pair.case.layout.paged:
        assert all(before[1] <= after[0] for before, after in zip(spans[component], spans[component][1:], strict=False))
    assert len(spans[Component.STATE]) == (len(names) if pair.case.layout.state else 0)

    edited = joined(text[:30], prompt_of(12, 16))
    pair.answer("edited", edited, 6, session=("talk", 4))
    text = joined(edited, pair.said("edited"), prompt_of(9, 17))
    stop_while_decoding(pair, "stopped", text, session=("talk", 5))
    pair.answer("after-stopped", joined(text, prompt_of(5, 18)), 6, session=("talk", 6))


def stop_while_decoding(pair: Pair, name: str, text: Tokens, session: tuple[str, int] = ("", 0)) -> None:
    """Given up while a step that computes its next token is under way."""
    pair.ask(name, text, 20, session)
    while len(pair.said(name)) < 4:
        pair.step()
    assert pair.decode.launch()
    pair.rig.cancel(name)
    pair.rig.run(pair.decode.collect())
    pair.settle()
    pair.check_begun(name)


def retraction(pair: Pair) -> None:
    """More answers at once than the decode worker has pages for, half of them of conversations."""
    before, restored = pair.decode.core.retractions, pair.decode.core.restored_tokens
    names = [f"long-{number}" for number in range(4)]
    for number, name in enumerate(names):
        pair.ask(name, prompt_of(14 + number, 30 + number), 28, session=(name if number % 2 else "", 0))
    pair.settle()
    retracted = sum(pair.check(name).retractions for name in names)
    assert pair.decode.core.retractions - before == retracted
    # A state never grows: who has begun can go on.
    assert (retracted > 0) == bool(pair.case.layout.paged)
    if pair.tiers is not None:
        assert pair.decode.core.restored_tokens > restored
        return
    came_back = len(pair.hand_offs(*names)) - len(names)  # without what the decode worker found in its own cache
    assert (came_back > 0) == (retracted > 0)
    for name in names[1::2]:  # also when its conversation had to make room
        text = joined(pair.prompts[name], pair.said(name), prompt_of(7, 38))
        pair.answer(f"{name}-goes-on", text, session=(name, 1))


def requests_that_are_given_up(pair: Pair) -> None:
    """One while its prompt is being computed and sent, one while it is decoded, and others beside them."""
    prompt = prompt_of(50, 50)
    pair.begin("in-transfer", prompt)
    pair.ask("beside-1", prompt_of(24, 51), 12)
    for _ in range(2):
        pair.rig.run(pair.rig.prefill.step() or [])
    assert pair.rig.prefill.batches[-1].kv_lens[0] == 2 * CHUNK
    pair.rig.cancel("in-transfer")
    failure = pair.final("in-transfer").failure
    assert failure is not None
    assert failure.code is ErrorCode.CANCELLED
    assert not pair.said("in-transfer")
    pair.ask("beside-2", prompt_of(24, 52), 12)
    stop_while_decoding(pair, "decoding", prompt_of(20, 53))
    for name in ("beside-1", "beside-2"):
        pair.check(name)
    timeline = pair.answer("once-more", prompt)
    found = timeline.cached_tokens + timeline.restored_tokens + timeline.prefill_cached_tokens
    assert found == (2 * CHUNK if pair.case.shares else 0)


def a_lost_hand_off(pair: Pair) -> None:
    """What landed is used where it is of use; the rest is computed by the decode worker."""
    pair.begin("lost", prompt_of(45, 60))
    for _ in range(2):
        pair.rig.run(pair.rig.prefill.step() or [])
    (key,) = pair.rig.handoffs
    pair.rig.fail(key)
    (again,) = pair.rig.handoffs  # the same worker is asked once more
    assert again != key
    pair.rig.fail(again)
    pair.settle()
    timeline = pair.check("lost")
    landed = 2 * CHUNK if pair.decode.pool.lands_in_part else 0
    assert (timeline.transferred_tokens, timeline.local_tokens) == (landed, 45 - landed)


def nobody_to_prefill(pair: Pair) -> None:
    """The decode worker computes prompts itself, in chunks, and finds them again."""
    pair.rig.view(*EVERYONE[:2])
    prompt = prompt_of(48, 70)
    assert pair.answer("alone", prompt).local_tokens == len(prompt)
    timeline = pair.answer("alone-again", joined(prompt, prompt_of(5, 71)))
    assert timeline.cached_tokens == (len(prompt) if pair.case.shares else 0)
    pair.rig.view(*EVERYONE)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("case", [pytest.param(case, id=str(case)) for case in ORDINARY])
def test_storm(case: Case, seed: int, tmp_path: Path, model_of: Callable[[str], Model]) -> None:
    """All of it at once, in any order: steps that are under way while requests come and go, workers too."""
    tiers = (tmp_path, WRITES[seed // 2]) if case in TIERED and seed % 2 else (None, "through")
    pair = Pair(case, model_of(case.family), *tiers)
    storm = Storm(pair, Random(f"{case} {seed}"))
    for number in range(16):
        storm.arrive(number)
        storm.step(storm.rng.randrange(12))
        storm.strike(number)
    for engine in (pair.rig.prefill, pair.decode):
        if engine.launched is not None:
            pair.rig.run(engine.collect())
    pair.settle()
    for name in pair.prompts:
        if name in storm.cancelled:
            pair.check_begun(name)
        else:
            pair.check(name)
    pair.end()


class Storm:
    """What happens is random. What is asked is not, as far as it can be: then a model's answers are known already."""

    def __init__(self, pair: Pair, rng: Random) -> None:
        self.pair, self.rng = pair, rng
        self.cancelled: set[str] = set()
        self.talks: dict[str, list[str]] = {"x": [], "y": []}

    def arrive(self, number: int) -> None:
        fixed = Random(number)
        name, max_tokens = f"r{number}", fixed.randint(1, 25)
        shared = prompt_of(60, 90 + fixed.randrange(2))[: fixed.randint(1, 50)]
        prompt = joined(shared, prompt_of(fixed.randint(0, 12), 100 + number))
        talk = fixed.choice(["", "x", "y"])
        turns = self.talks.get(talk, [])
        before = turns[-1] if turns else None
        if before is not None and before in self.pair.rig.gateway.finals and fixed.random() < 0.8:
            prompt = joined(self.pair.prompts[before], self.pair.said(before), prompt[-8:])
        if talk:
            self.talks[talk].append(name)
        if len(prompt) + max_tokens <= 100:
            self.pair.ask(name, prompt, max_tokens, session=(talk, 0))

    def step(self, count: int) -> None:
        rig = self.pair.rig
        for _ in range(count):
            engine = self.rng.choice([rig.prefill, rig.decode, None])
            if engine is None:
                self.pair.hear_tiers()
            elif engine.launched is not None:
                rig.run(engine.collect())
            else:
                engine.launch()

    def strike(self, number: int) -> None:
        rig, chance, name = self.pair.rig, self.rng.random(), f"r{number}"
        if chance < 0.2 and name in self.pair.prompts and name not in rig.gateway.finals:
            self.cancelled.add(name)
            rig.cancel(name)
        elif chance < 0.4 and rig.handoffs:
            rig.fail(self.rng.choice(list(rig.handoffs)))
        elif chance < 0.5:
            self.rng.choice([rig.prefill, rig.decode]).pool.clear_cache()
        elif chance < 0.6:
            rig.view(*(EVERYONE[:2] if self.rng.random() < 0.5 else EVERYONE))
