"""SmolLM2 through our paged pool says, token for token, what `transformers` `generate` says.

The references were made once (`make references`); a mismatch report names the margin that the reference had there.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from model_rig import GREEDY, Reference, Sequence, load_references, run_mixed

from baton.common.engine.backends import choose_backends
from baton.common.engine.batch import BatchRow, pack_batch
from baton.common.engine.torch_runner import TorchRunner
from baton.common.errors import ConfigError
from baton.common.messages import SamplingParams
from baton.common.model.loading import load_model, model_info
from baton.common.prompt_logprobs import join_chunks

pytestmark = pytest.mark.model

MODEL = "smollm2-135m-instruct"
REFERENCES = load_references()


@pytest.fixture(scope="module")
def runner() -> TorchRunner:
    return TorchRunner.load(MODEL, dtype="float32", num_pages=1200, page_size=16, threads=1)


def with_page_size(runner: TorchRunner, page_size: int, num_pages: int) -> TorchRunner:
    """Another pool over the same model."""
    return TorchRunner(runner.model, runner.info, dtype="float32", num_pages=num_pages, page_size=page_size)


def check(runner: TorchRunner, references: list[Reference], *, max_rows: int, seed: int) -> None:
    sequences = [
        Sequence(key=reference.number, prompt=reference.prompt, max_tokens=32, stop_token=2) for reference in references
    ]
    run_mixed(runner, sequences, max_rows=max_rows, seed=seed)
    for reference, sequence in zip(references, sequences, strict=True):
        if sequence.outputs != reference.outputs:
            pairs = zip(sequence.outputs, reference.outputs, strict=False)
            place = next((i for i, (ours, theirs) in enumerate(pairs) if ours != theirs), -1)
            pytest.fail(
                f"prompt {reference.number} ({len(reference.prompt)} tokens) differs at output {place}, where the "
                f"reference's margin is {reference.margins[place]}: {sequence.outputs} != {reference.outputs}"
            )


@pytest.mark.timeout(600)  # half a minute of one core; others may want it too
def test_mixed_batches_say_what_generate_says(runner: TorchRunner) -> None:
    """Chats, lengths 1 to 513 on both sides of page and chunk edges, shared prefixes; many rows in a step."""
    edges = [r for r in REFERENCES if len(r.prompt) in (255, 257, 513)][:4]
    chosen = [*[r for r in REFERENCES if len(r.prompt) < 130][::6], *edges]
    assert len(chosen) >= 20
    check(runner, chosen, max_rows=16, seed=1)


@pytest.mark.parametrize("page_size", [1, 4])
def test_small_pages(runner: TorchRunner, page_size: int) -> None:
    chosen = [r for r in REFERENCES if len(r.prompt) in (3, 16, 17, 64)][:4]
    check(with_page_size(runner, page_size, 6 * 300 // page_size), chosen, max_rows=4, seed=2)


@pytest.mark.slow
@pytest.mark.parametrize("page_size", [1, 4, 16])
@pytest.mark.timeout(3600)
def test_all_references(runner: TorchRunner, page_size: int) -> None:
    check(with_page_size(runner, page_size, 20_000 // page_size), REFERENCES, max_rows=6, seed=3)


def test_plain_torch_attention_says_the_same(runner: TorchRunner) -> None:
    plain = TorchRunner(runner.model, runner.info, dtype="float32", num_pages=200, page_size=16, attention="torch")
    check(plain, [r for r in REFERENCES if len(r.prompt) in (17, 65)][:2], max_rows=2, seed=4)


def last_logits(runner: TorchRunner, tokens: list[int], chunks: list[int], beside: list[BatchRow]) -> torch.Tensor:
    """Logits after the last token, computed in chunks of these sizes, each step together with other rows."""
    pages = np.arange(1, -(-len(tokens) // 16) + 1, dtype=np.int32)
    done = 0
    for chunk in chunks:
        ids, done = np.array(tokens[done : done + chunk], np.int32), done + chunk
        row = BatchRow(0, ids, done, pages[: -(-done // 16)], GREEDY)
        logits = runner.logits(pack_batch([*beside, row], 16), (len(beside),))
    assert done == len(tokens)
    return logits[0]


def test_float32_logits_do_not_depend_on_the_batch(runner: TorchRunner) -> None:
    """To the bit: in one piece or in chunks or token by token, alone or among others, on one thread or two. This is
    what makes an answer continued on another worker the same answer."""
    try:
        choose_backends("compiled", 64)
    except ConfigError as error:
        pytest.skip(str(error))
    tokens = next(r.prompt for r in REFERENCES if len(r.prompt) > 700)[:620]
    whole = last_logits(runner, tokens, [620], [])
    rng = np.random.default_rng(5)
    beside = [
        BatchRow(9, rng.integers(0, 40_000, 33).astype(np.int32), 33, np.array([201, 202, 203], np.int32), None),
        *(BatchRow(10 + i, np.array([i], np.int32), 1, np.array([300 + i], np.int32), None) for i in range(12)),
    ]
    assert torch.equal(whole, last_logits(runner, tokens, [1, 64, 99, 400, 56], []))
    assert torch.equal(whole, last_logits(runner, tokens, [301, 311, *[1] * 8], beside))
    threads = torch.get_num_threads()
    torch.set_num_threads(3 - min(threads, 2))
    try:
        assert torch.equal(whole, last_logits(runner, tokens, [520, 100], beside[:1]))
    finally:
        torch.set_num_threads(threads)


def test_seeded_sampling_continues_elsewhere(runner: TorchRunner) -> None:
    """A request stopped after some outputs and continued from prompt + outputs draws the same tokens."""
    prompt = next(r.prompt for r in REFERENCES if len(r.prompt) == 39)
    sampling = SamplingParams(temperature=0.9, top_p=0.95, seed=1234)
    whole = Sequence(key=0, prompt=prompt, max_tokens=16, sampling=sampling)
    run_mixed(runner, [whole], max_rows=1, seed=6)
    resumed = Sequence(key=1, prompt=prompt, max_tokens=16, sampling=sampling, outputs=whole.outputs[:7])
    beside = Sequence(key=2, prompt=prompt[:20], max_tokens=16, sampling=SamplingParams(temperature=1.0, seed=5))
    run_mixed(runner, [resumed, beside], max_rows=2, seed=7)
    assert resumed.outputs == whole.outputs
    assert beside.outputs != whole.outputs


def test_bfloat16_runs_and_agrees_with_float32_mostly(runner: TorchRunner) -> None:
    """Bfloat16 rounds its own way; the likely continuation of a chat survives it."""
    half = TorchRunner.load(MODEL, dtype="bfloat16", num_pages=100, page_size=16)
    reference = REFERENCES[0]
    sequence = Sequence(key=0, prompt=reference.prompt, max_tokens=8, stop_token=2)
    run_mixed(half, [sequence], max_rows=1, seed=8)
    assert sequence.outputs == reference.outputs[:8]
    assert half.memory.fingerprint()["kv_dtype"] == "bfloat16"


def test_a_step_without_samples_gives_no_tokens_and_logprobs_are_log_softmax(runner: TorchRunner) -> None:
    prompt = np.array(REFERENCES[0].prompt, np.int32)
    pages = np.array([5, 3, 9, 7], np.int32)
    silent = pack_batch([BatchRow(1, prompt[:20], 20, pages[:2], None)], 16)
    assert runner.collect(runner.launch(silent)).tokens == (-1,)
    row = BatchRow(1, prompt[20:], len(prompt), pages[: -(-len(prompt) // 16)], SamplingParams(logprobs=3))
    batch = pack_batch([row], 16)
    result = runner.collect(runner.launch(batch))
    scores = torch.log_softmax(runner.logits(batch, (0,))[0].double(), dim=-1)
    (score,) = result.logprobs
    assert score is not None
    assert [token for token, _ in score.top] == torch.topk(scores, 3).indices.tolist()
    assert score.logprob == pytest.approx(float(scores[result.tokens[0]]), abs=1e-5)


def test_the_pool_is_what_the_model_needs(runner: TorchRunner) -> None:
    info = model_info(MODEL)
    assert runner.memory.main.page_bytes == info.kv_bytes_per_token("float32") * 16
    assert runner.memory.main.as_bytes().shape == (runner.memory.main.num_pages, runner.memory.main.page_bytes)
    assert (runner.vocab_size, runner.max_positions) == (49152, 8192)
    assert info.eos_token_ids == (2,)


def test_moved_pages_are_the_same_kv(runner: TorchRunner) -> None:
    """What a hand-off does: pages copied as bytes to other places of another pool continue the answer there."""
    reference = REFERENCES[1]
    other = with_page_size(runner, 16, 64)
    source = np.arange(10, 10 + -(-len(reference.prompt) // 16), dtype=np.int32)
    prompt = BatchRow(0, np.array(reference.prompt, np.int32), len(reference.prompt), source, GREEDY)
    first = runner.collect(runner.launch(pack_batch([prompt], 16))).tokens[0]
    target = source[::-1] + 20
    other.memory.main.as_bytes()[target] = runner.memory.main.as_bytes()[source]
    sequence = Sequence(0, reference.prompt, 32, stop_token=2, outputs=[first], computed=len(reference.prompt))
    pages = target.tolist()
    spare = [page for page in range(1, 64) if page not in pages]
    while not sequence.done:
        need = -(-(len(sequence.prompt) + len(sequence.outputs)) // 16)
        while len(pages) < need:
            pages.append(spare.pop())
        length = len(sequence.prompt) + len(sequence.outputs)
        row = BatchRow(0, np.array(sequence.outputs[-1:], np.int32), length, np.array(pages, np.int32), GREEDY)
        sequence.outputs.append(other.collect(other.launch(pack_batch([row], 16))).tokens[0])
    assert sequence.outputs == reference.outputs


def test_load_model_is_quick_after_conversion() -> None:
    """The second load only maps safetensors; nothing is converted (no progress line says so)."""
    lines: list[str] = []
    load_model(MODEL, "float32", lines.append)
    assert not [line for line in lines if "convert" in line]


def test_a_prompts_own_log_probabilities_do_not_depend_on_the_chunks(runner: TorchRunner) -> None:
    """To the bit, in float32; and they are those of the logits."""
    prompt = next(r.prompt for r in REFERENCES if len(r.prompt) > 255)[:150]
    runs = []
    for chunks in ((150,), (64, 1, 33)):
        sequence = Sequence(0, prompt, max_tokens=1, scored_top=4)
        run_mixed(runner, [sequence], max_rows=1, seed=3, chunks=chunks)
        runs.append(join_chunks(sequence.scores))
    scores = runs[0]
    assert scores is not None
    assert runs[1] == scores
    expected = torch.log_softmax(last_logits(runner, prompt[:100], [100], []), -1)
    rank, logprob, best = scores.rows()[99]
    assert logprob == float(expected[prompt[100]])
    assert rank == int((expected > logprob).sum()) + 1
    assert [token for token, _ in best] == expected.topk(4).indices.tolist()
