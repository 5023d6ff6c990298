"""The fake model must notice every wrong page; these tests are what the simulator's verdicts rest on."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.common.engine.batch import BatchRow, pack_batch
from baton.common.engine.fake_kernels import fake_step
from baton.common.engine.fake_runner import FakeRunner, fake_answer, fake_generate, fake_runner
from baton.common.kv.layout import Component, KvLayout
from baton.common.messages import SamplingParams

FULL, SWA, STATE = Component.FULL, Component.SWA, Component.STATE
GREEDY = SamplingParams(max_tokens=64)
SHAPES = {  # full, window, state
    "full": (True, 0, False),
    "full+swa": (True, 10, False),
    "swa": (False, 10, False),
    "full+state": (True, 0, True),
    "state": (False, 0, True),
    "full+swa+state": (True, 10, True),
    "window of 1": (True, 1, False),
    "window of 2": (False, 2, False),
}


def layout_of(shape: str, page_size: int) -> KvLayout:
    full, window, state = SHAPES[shape]
    return KvLayout(page_size, full=full, window=window, state=state)


def runner_for(layout: KvLayout, count: int = 200, width: int = 16, compiled: bool = True) -> FakeRunner:
    return fake_runner(
        dict.fromkeys(layout.components, count),
        layout.page_size,
        bytes_per_token=width,
        layout=layout,
        state_bytes=32,
        compiled=compiled,
    )


class Sequence:
    """Runs one sequence on a runner, with pages handed out in a shuffled order, dead ones freed after each step and
    overwritten."""

    def __init__(self, runner: FakeRunner, pages: np.ndarray, prompt: list[int], sampling: SamplingParams) -> None:
        self.runner, self.prompt, self.sampling = runner, prompt, sampling
        self.layout = runner.memory.layout
        self.pages = {component: pages.copy() for component in self.layout.paged}
        self.slot = int(pages[-1])
        self.copies = [(0, self.slot)]
        self.tokens = list(prompt)
        self.computed = 0

    def row(self, upto: int, key: int = 0) -> BatchRow:
        last = upto == len(self.tokens)
        ids = np.array(self.tokens[self.computed : upto], dtype=np.int32)
        held = [self.pages[component][: -(-upto // self.layout.page_size)] for component in self.layout.paged]
        return BatchRow(
            key,
            ids,
            upto,
            held[0] if held else np.zeros(0, np.int32),
            self.sampling if last else None,
            len(self.tokens) - len(self.prompt),
            held[1] if len(held) > 1 else None,
            self.slot if self.layout.state else 0,
        )

    def step(self, upto: int) -> int:
        token = run(self.runner, [self.row(upto)], self.copies)[0]
        self.after(upto)
        return token

    def after(self, upto: int) -> None:
        self.computed, self.copies = upto, []
        if SWA in self.pages:
            dead = self.layout.live_from(upto) // self.layout.page_size
            self.bytes_of(SWA)[self.pages[SWA][:dead]] = 0xAB
            self.pages[SWA][:dead] = 0

    def bytes_of(self, component: Component) -> np.ndarray:
        return self.runner.memory.buffers[component].as_bytes()

    def prefill(self, chunk: int) -> None:
        while self.computed < len(self.tokens):
            token = self.step(min(self.computed + chunk, len(self.tokens)))
        self.tokens.append(token)

    def decode(self, steps: int) -> list[int]:
        for _ in range(steps):
            self.tokens.append(self.step(len(self.tokens)))
        return self.tokens[len(self.prompt) :]


def run(runner: FakeRunner, rows: list[BatchRow], copies: list[tuple[int, int]]) -> tuple[int, ...]:
    layout = runner.memory.layout
    pairs = np.array(copies, np.int32) if copies and layout.state else None
    return runner.collect(runner.launch(pack_batch(rows, layout.page_size, pairs))).tokens


def shuffled_pages(count: int, seed: int) -> np.ndarray:
    return (np.random.default_rng(seed).permutation(count) + 1).astype(np.int32)


@settings(max_examples=120, deadline=None)
@given(
    shape=st.sampled_from(sorted(SHAPES)),
    length=st.integers(1, 120),
    chunk=st.integers(1, 50),
    page_size=st.sampled_from([1, 4, 16]),
    width=st.sampled_from([8, 16, 64]),
    temperature=st.sampled_from([0.0, 1.0]),
    seed=st.integers(0, 99),
    compiled=st.booleans(),
)
def test_paged_chunked_run_equals_the_answer(
    shape: str, length: int, chunk: int, page_size: int, width: int, temperature: float, seed: int, compiled: bool
) -> None:
    sampling = SamplingParams(temperature=temperature, seed=seed, max_tokens=9)
    prompt = [int(token) for token in np.random.default_rng(seed).integers(0, 258, length)]
    layout = layout_of(shape, page_size)
    runner = runner_for(layout, width=width, compiled=compiled)
    for buffer in runner.memory.buffers.values():
        buffer.as_bytes()[:] = 0xCD
    sequence = Sequence(runner, shuffled_pages(150, seed), prompt, sampling)
    sequence.prefill(chunk)
    assert sequence.decode(8) == fake_generate(prompt, sampling, 9, layout=layout)


@pytest.mark.parametrize("width", [16, 64])
@pytest.mark.parametrize("shape", SHAPES)
def test_compiled_steps_write_the_same_bytes(shape: str, width: int) -> None:
    assert fake_step() is not None, "tests want a C++ compiler"
    layout = layout_of(shape, 4)
    prompt = [int(token) for token in np.random.default_rng(3).integers(0, 258, 41)]
    contents, answers = [], []
    for compiled in (True, False):
        runner = runner_for(layout, width=width, compiled=compiled)
        for buffer in runner.memory.buffers.values():
            buffer.as_bytes()[:] = 0xCD
        sequence = Sequence(runner, shuffled_pages(150, 5), prompt, SamplingParams(temperature=1.0, seed=2))
        sequence.prefill(9)
        answers.append(sequence.decode(20))
        contents.append([buffer.as_bytes().tobytes() for buffer in runner.memory.buffers.values()])
    assert answers[0] == answers[1]
    assert contents[0] == contents[1]


def test_a_compiled_step_touches_no_page_outside_the_pool() -> None:
    runner = runner_for(layout_of("full", 4), count=4)
    row = BatchRow(0, np.arange(6, dtype=np.int32), 6, np.array([1, 4], dtype=np.int32), GREEDY)
    with pytest.raises(AssertionError, match="does not have"):
        run(runner, [row], [])


def test_answers_of_full_attention_stay_what_they_were() -> None:
    """Stored seeds of simulated runs and references elsewhere rest on these."""
    assert fake_generate([1, 2, 3], GREEDY, 8) == [104, 73, 185, 178, 57, 177, 192, 131]
    sampling = SamplingParams(temperature=1.0, seed=7)
    assert fake_generate([1, 2, 3], sampling, 8) == [83, 47, 31, 164, 157, 27, 128, 206]


def test_every_component_decides_about_the_answer() -> None:
    prompt = list(range(30))
    answers = {shape: tuple(fake_generate(prompt, GREEDY, 9, layout=layout_of(shape, 4))) for shape in SHAPES}
    assert len(set(answers.values())) == len(SHAPES)


@pytest.mark.parametrize("shape", SHAPES)
def test_rows_of_one_step_do_not_disturb_each_other(shape: str) -> None:
    layout = layout_of(shape, 4)
    runner = runner_for(layout)
    pages = shuffled_pages(90, 1)
    prompts = [[1, 2, 3], list(range(17)), [7]]
    sequences = [Sequence(runner, pages[i * 30 : i * 30 + 30], prompt, GREEDY) for i, prompt in enumerate(prompts)]
    for _ in range(5):
        copies = [copy for sequence in sequences for copy in sequence.copies]
        tokens = run(runner, [one.row(len(one.tokens), key) for key, one in enumerate(sequences)], copies)
        for sequence, token in zip(sequences, tokens, strict=True):
            sequence.after(len(sequence.tokens))
            sequence.tokens.append(token)
    for sequence, prompt in zip(sequences, prompts, strict=True):
        assert sequence.tokens[len(prompt) :] == fake_generate(prompt, GREEDY, 5, layout=layout)


PROMPT = list(range(40))


def prefilled(shape: str, page_size: int = 4, chunk: int = 16) -> Sequence:
    """A sequence that is about to decode."""
    sequence = Sequence(runner_for(layout_of(shape, page_size), width=32), shuffled_pages(60, 3), PROMPT, GREEDY)
    sequence.prefill(chunk)
    return sequence


def goes_wrong(sequence: Sequence, steps: int = 8) -> bool:
    """It answers something else than a correct system from here on."""
    done = len(sequence.tokens) - len(PROMPT)
    expected = fake_generate(PROMPT, GREEDY, done + steps, layout=sequence.layout)
    return sequence.decode(steps)[done:] != expected[done:]


@pytest.mark.parametrize("shape", ["full+swa", "swa", "full+swa+state"])
@pytest.mark.parametrize("page_size", [1, 4])
def test_a_window_page_freed_one_page_too_early_changes_the_output(shape: str, page_size: int) -> None:
    """The next query, at 40, sees keys from 31 on."""
    sequence = prefilled(shape, page_size)
    oldest = sequence.layout.live_from(40) // page_size
    assert oldest == 31 // page_size
    assert sequence.pages[SWA][oldest]
    sequence.pages[SWA][oldest] = 0
    assert goes_wrong(sequence)


def test_a_window_page_freed_too_early_within_a_prefill_changes_the_output() -> None:
    """Also when no token is wanted for a while: the chunk's own KV depends on what its first query sees."""
    sequence = Sequence(runner_for(layout_of("full+swa", 4)), shuffled_pages(60, 3), PROMPT, GREEDY)
    sequence.step(16)
    sequence.pages[SWA][sequence.layout.live_from(16) // 4] = 0
    sequence.prefill(12)
    assert goes_wrong(sequence)


@pytest.mark.parametrize("position", [31, 35, 39])
@pytest.mark.parametrize("byte", [0, 13, 31])
def test_one_flipped_bit_in_the_window_changes_the_output(position: int, byte: int) -> None:
    for shape in ("full+swa", "swa"):
        sequence = prefilled(shape)
        page = sequence.pages[SWA][position // 4]
        sequence.bytes_of(SWA)[page, position % 4 * 32 + byte] ^= 16
        assert goes_wrong(sequence)


def test_what_lies_outside_of_the_window_does_not_matter() -> None:
    sequence = prefilled("full+swa")
    live = sequence.pages[SWA][31 // 4]
    sequence.bytes_of(SWA)[live, : 32 * (31 % 4)] ^= 0xFF
    sequence.bytes_of(SWA)[0] ^= 0xFF
    assert not goes_wrong(sequence)


@pytest.mark.parametrize("shape", ["full+state", "state", "full+swa+state"])
def test_a_wrong_state_changes_the_output(shape: str) -> None:
    for byte in (0, 9, 31):
        sequence = prefilled(shape)
        sequence.bytes_of(STATE)[sequence.slot, byte] ^= 1
        assert goes_wrong(sequence), "one bit"
    sequence = prefilled(shape)
    before = sequence.bytes_of(STATE)[sequence.slot].copy()
    sequence.tokens.append(sequence.step(len(sequence.tokens)))
    sequence.bytes_of(STATE)[sequence.slot] = before
    assert goes_wrong(sequence), "stale by one token"
    sequence = Sequence(sequence.runner, shuffled_pages(60, 3), PROMPT, GREEDY)
    sequence.copies = []
    sequence.prefill(16)
    assert goes_wrong(sequence), "the slot's last owner left something"


def test_a_forked_state_continues_on_both_sides() -> None:
    """Copy on write: a checkpoint stays what it was while the sequence that it came from goes on."""
    sequence = prefilled("full+state")
    fork = prefilled("full+state")
    fork.runner, fork.slot, fork.copies = sequence.runner, 77, [(sequence.slot, 77)]
    fork.pages = {FULL: sequence.pages[FULL].copy()}
    first = fork.step(len(fork.tokens))
    assert not goes_wrong(sequence)
    assert first == fake_generate(PROMPT, GREEDY, 2, layout=fork.layout)[1]


@pytest.mark.parametrize("position", [0, 5, 16, 37])
@pytest.mark.parametrize("byte", [0, 7, 11, 31])
@pytest.mark.parametrize("bit", [0, 7])
def test_one_flipped_bit_anywhere_changes_the_output(position: int, byte: int, bit: int) -> None:
    prompt = list(range(40))
    runner = fake_runner(64, 4, bytes_per_token=32)
    sequence = Sequence(runner, shuffled_pages(60, 3), prompt, GREEDY)
    sequence.prefill(16)
    page = sequence.pages[FULL][position // 4]
    runner.memory.main.as_bytes()[page, (position % 4) * 32 + byte] ^= 1 << bit
    assert sequence.decode(8)[1:] != fake_generate(prompt, GREEDY, 9)[1:]


def test_pages_in_the_wrong_order_change_the_output() -> None:
    prompt = list(range(40))
    runner = fake_runner(64, 4)
    sequence = Sequence(runner, shuffled_pages(60, 3), prompt, GREEDY)
    sequence.prefill(40)
    sequence.pages[FULL][[1, 2]] = sequence.pages[FULL][[2, 1]]
    assert sequence.decode(8)[1:] != fake_generate(prompt, GREEDY, 9)[1:]


def test_sampled_tokens_depend_on_seed_and_index_alone() -> None:
    prompt = [1, 2, 3]
    one = fake_generate(prompt, SamplingParams(temperature=1.0, seed=1), 8)
    assert one == fake_generate(prompt, SamplingParams(temperature=1.0, seed=1, max_tokens=99), 8)
    assert one != fake_generate(prompt, SamplingParams(temperature=1.0, seed=2), 8)
    assert one[:4] != one[4:]


def test_answer_obeys_stop_tokens_and_lengths() -> None:
    prompt = [5, 6]
    free = fake_generate(prompt, GREEDY, 20)
    stopped = fake_answer(prompt, SamplingParams(max_tokens=20, stop_token_ids=(free[6],)), 100)
    assert stopped.tokens == tuple(free[: free.index(free[6]) + 1])
    assert stopped.finish_reason == "stop"
    assert fake_answer(prompt, SamplingParams(max_tokens=20), 9).tokens == tuple(free[:7])
    assert fake_answer(prompt, SamplingParams(max_tokens=3), 9).finish_reason == "length"


def test_a_step_that_reports_writes_no_layer_before_it_says_so() -> None:
    made = fake_runner(16, 4, layers=4, bytes_per_token=64)
    pages = made.memory.main.as_bytes().reshape(16, 4, -1)
    row = BatchRow(1, np.arange(7, dtype=np.int32), 7, np.array([5, 2], np.int32), SamplingParams())
    batch = pack_batch([row], 4, report_after=(1, 3))
    found: list[list[bool]] = []

    def look(layers: int) -> None:
        assert layers == (1, 3)[len(found)]
        found.append([bool(pages[[5, 2], layer].any()) for layer in range(4)])

    tokens = made.collect(made.launch(batch, look)).tokens
    assert found == [[True, False, False, False], [True, True, True, False]]
    assert pages[[5, 2]].any(axis=2).all()
    assert tokens == tuple(fake_generate(list(range(7)), SamplingParams(), 1))
