"""The fake model must notice every wrong page; these tests are what the simulator's verdicts rest on."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.common.engine.batch import BatchRow, pack_batch
from baton.common.engine.fake_runner import FakeRunner, fake_answer, fake_generate, fake_runner
from baton.common.messages import SamplingParams

GREEDY = SamplingParams(max_tokens=64)


class Sequence:
    """Runs one sequence on a runner, with pages handed out in a shuffled order."""

    def __init__(self, runner: FakeRunner, pages: np.ndarray, prompt: list[int], sampling: SamplingParams) -> None:
        self.runner, self.pages, self.prompt, self.sampling = runner, pages, prompt, sampling
        self.tokens = list(prompt)
        self.computed = 0

    def row(self, upto: int, key: int = 0) -> BatchRow:
        size = self.runner.memory.layout.page_size
        last = upto == len(self.tokens)
        ids = np.array(self.tokens[self.computed : upto], dtype=np.int32)
        pages = self.pages[: -(-upto // size)]
        index = len(self.tokens) - len(self.prompt)
        return BatchRow(key, ids, upto, pages, self.sampling if last else None, index)

    def prefill(self, chunk: int) -> None:
        while self.computed < len(self.tokens):
            upto = min(self.computed + chunk, len(self.tokens))
            result = run(self.runner, [self.row(upto)])
            self.computed = upto
        self.tokens.append(result[0])

    def decode(self, steps: int) -> list[int]:
        for _ in range(steps):
            token = run(self.runner, [self.row(len(self.tokens))])[0]
            self.computed = len(self.tokens)
            self.tokens.append(token)
        return self.tokens[len(self.prompt) :]


def run(runner: FakeRunner, rows: list[BatchRow]) -> tuple[int, ...]:
    return runner.collect(runner.launch(pack_batch(rows, runner.memory.layout.page_size))).tokens


def shuffled_pages(count: int, seed: int) -> np.ndarray:
    return (np.random.default_rng(seed).permutation(count) + 1).astype(np.int32)


@settings(max_examples=40, deadline=None)
@given(
    length=st.integers(1, 120),
    chunk=st.integers(1, 50),
    page_size=st.sampled_from([1, 4, 16]),
    width=st.sampled_from([8, 16, 64]),
    temperature=st.sampled_from([0.0, 1.0]),
    seed=st.integers(0, 99),
)
def test_paged_chunked_run_equals_the_answer(
    length: int, chunk: int, page_size: int, width: int, temperature: float, seed: int
) -> None:
    sampling = SamplingParams(temperature=temperature, seed=seed, max_tokens=9)
    prompt = [int(token) for token in np.random.default_rng(seed).integers(0, 258, length)]
    runner = fake_runner(200, page_size, bytes_per_token=width)
    sequence = Sequence(runner, shuffled_pages(150, seed), prompt, sampling)
    sequence.prefill(chunk)
    assert sequence.decode(8) == fake_generate(prompt, sampling, 9)


def test_rows_of_one_step_do_not_disturb_each_other() -> None:
    runner = fake_runner(100, 4)
    pages = shuffled_pages(90, 1)
    prompts = [[1, 2, 3], list(range(17)), [7]]
    sequences = [Sequence(runner, pages[i * 30 : i * 30 + 30], prompt, GREEDY) for i, prompt in enumerate(prompts)]
    for _ in range(5):
        tokens = run(runner, [sequence.row(len(sequence.tokens), key) for key, sequence in enumerate(sequences)])
        for sequence, token in zip(sequences, tokens, strict=True):
            sequence.computed = len(sequence.tokens)
            sequence.tokens.append(token)
    for sequence, prompt in zip(sequences, prompts, strict=True):
        assert sequence.tokens[len(prompt) :] == fake_generate(prompt, GREEDY, 5)


@pytest.mark.parametrize("position", [0, 5, 16, 37])
@pytest.mark.parametrize("byte", [0, 7, 11, 31])
@pytest.mark.parametrize("bit", [0, 7])
def test_one_flipped_bit_anywhere_changes_the_output(position: int, byte: int, bit: int) -> None:
    prompt = list(range(40))
    runner = fake_runner(64, 4, bytes_per_token=32)
    sequence = Sequence(runner, shuffled_pages(60, 3), prompt, GREEDY)
    sequence.prefill(16)
    page = sequence.pages[position // 4]
    runner.memory.main.as_bytes()[page, (position % 4) * 32 + byte] ^= 1 << bit
    assert sequence.decode(8)[1:] != fake_generate(prompt, GREEDY, 9)[1:]


def test_pages_in_the_wrong_order_change_the_output() -> None:
    prompt = list(range(40))
    runner = fake_runner(64, 4)
    sequence = Sequence(runner, shuffled_pages(60, 3), prompt, GREEDY)
    sequence.prefill(40)
    sequence.pages[[1, 2]] = sequence.pages[[2, 1]]
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
