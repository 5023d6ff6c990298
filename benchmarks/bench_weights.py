"""What int8 weights cost and bring: `python -m benchmarks.bench_weights [--text FILE ...] [--steps ROUNDS]`.

Against float32: the mean negative log likelihood of texts, how often the likeliest token is the same one, and how far
log probabilities of the texts' tokens are apart. For the reference prompts the likeliest token is compared with the
answer that `transformers` gave, behind that answer so far. `--steps`: what steps take instead, all forms in turns, in
processor time of one thread.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import numpy as np
import numpy.typing as npt

from baton.common.engine.batch import Batch, BatchRow, Scoring, pack_batch
from baton.common.engine.panels import WeightFormat
from baton.common.engine.torch_runner import TorchRunner
from baton.common.model.loading import Dtype, load_tokenizer

MODEL = "smollm2-135m-instruct"
DATA = Path(__file__).parents[1] / "tests" / "data"
PAGE_SIZE = 16
WINDOW = 512  # tokens of a text that are seen together
MOST_PROMPT_TOKENS = 256
FORMS: tuple[tuple[Dtype, WeightFormat], ...] = (
    ("float32", "dtype"),
    ("bfloat16", "dtype"),
    ("float32", "int8"),
    ("bfloat16", "int8"),
)
Tokens = npt.NDArray[np.int32]


def load(dtype: Dtype, weights: WeightFormat, num_pages: int) -> TorchRunner:
    return TorchRunner.load(MODEL, dtype=dtype, num_pages=num_pages, page_size=PAGE_SIZE, threads=1, weights=weights)


def row_of(key: int, ids: Tokens, kv_len: int, scoring: Scoring | None = None) -> BatchRow:
    """With pages of its own."""
    count = -(-kv_len // PAGE_SIZE)
    return BatchRow(key, ids, kv_len, np.arange(1, count + 1, dtype=np.int32) + key * count, None, scoring=scoring)


def scored(runner: TorchRunner, ids: Tokens) -> tuple[npt.NDArray[np.float32], Tokens]:
    """Log probabilities of all tokens but the first, and the likeliest one in the place of each."""
    batch = pack_batch([row_of(0, ids, len(ids), Scoring(ids[1:], top=1))], PAGE_SIZE)
    found = runner.collect(runner.launch(batch)).scores[0]
    return np.frombuffer(found.logprobs, np.float32), np.frombuffer(found.top_tokens, np.int32)


def score_texts(runner: TorchRunner, texts: dict[str, Tokens]) -> dict[str, tuple[npt.NDArray[np.float32], Tokens]]:
    scores = {}
    for name, ids in texts.items():
        parts = [scored(runner, ids[at : at + WINDOW]) for at in range(0, len(ids) - WINDOW + 1, WINDOW)]
        scores[name] = np.concatenate([one for one, _ in parts]), np.concatenate([best for _, best in parts])
    return scores


def references(most: int) -> Iterator[tuple[Tokens, Tokens]]:
    """Prompts that are not long, and their answers."""
    made = msgspec.json.decode((DATA / "references" / f"{MODEL}.json").read_bytes())
    corpus, found = made["corpus_tokens"], 0
    for one in made["prompts"]:
        prompt = [token for begin, end in one["slices"] for token in corpus[begin:end]]
        if len(prompt) <= MOST_PROMPT_TOKENS and found < most:
            found += 1
            yield np.array(prompt, np.int32), np.array(one["outputs"], np.int32)


def agreement(runner: TorchRunner, most: int) -> tuple[int, int]:
    """Tokens of answers that would have been chosen, of so many."""
    right = count = 0
    for prompt, answer in references(most):
        _, best = scored(runner, np.concatenate((prompt, answer)))
        right += int((best[len(prompt) - 1 :] == answer).sum())
        count += len(answer)
    return right, count


def compare_quality(texts: dict[str, Tokens], most: int) -> None:
    exact = None
    for dtype, weights in FORMS:
        runner = load(dtype, weights, 80)
        scores = score_texts(runner, texts)
        exact = exact or scores
        right, count = agreement(runner, most)
        print(f"{dtype} {weights}: {right} of {count} tokens of answers")
        for name, (logprobs, best) in scores.items():
            same, apart = (best == exact[name][1]).mean(), np.abs(logprobs - exact[name][0]).mean()
            loss = -logprobs.mean()
            print(f"  {name} ({len(best)}): loss {loss:.4f}, likeliest token {same:.2%} the same, apart {apart:.4f}")


def compare_steps(rounds: int) -> None:
    runners = {form: load(*form, num_pages=32 * 10 + 2) for form in FORMS}
    for name, batch in _steps().items():
        rows, took_ms = tuple(range(batch.num_rows)), {form: list[float]() for form in FORMS}
        for _ in range(rounds):
            for form, runner in runners.items():
                began_s = time.thread_time()
                runner.logits(batch, rows)
                took_ms[form].append(1e3 * (time.thread_time() - began_s))
        print(name, ", ".join(f"{' '.join(form)} {statistics.median(ms):.1f} ms" for form, ms in took_ms.items()))


def _steps() -> dict[str, Batch]:
    token, prompt = np.array([100], np.int32), np.arange(100, 612, dtype=np.int32)
    steps = {
        f"decode, batch {count}": pack_batch([row_of(key, token, 129) for key in range(count)], PAGE_SIZE)
        for count in (1, 2, 8, 32)
    }
    return steps | {"prefill 512": pack_batch([row_of(0, prompt, 512)], PAGE_SIZE)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--text", type=Path, nargs="*", default=[DATA / "corpus.txt"])
    parser.add_argument("--tokens", type=int, default=3072, help="of each text, at most")
    parser.add_argument("--prompts", type=int, default=200, help="reference prompts, at most")
    parser.add_argument("--steps", type=int, default=0, metavar="ROUNDS", help="measure steps instead")
    arguments = parser.parse_args()
    if arguments.steps:
        compare_steps(arguments.steps)
        return
    tokenizer = load_tokenizer(MODEL)
    texts = {path.name: tokenizer(path.read_text())["input_ids"][: arguments.tokens] for path in arguments.text}
    compare_quality({name: np.array(ids, np.int32) for name, ids in texts.items()}, arguments.prompts)


if __name__ == "__main__":
    main()
