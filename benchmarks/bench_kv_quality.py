"""What quantised KV costs in quality: the same text through the same weights, with `kv.cache_dtype` auto, int8 and fp8.

    python -m benchmarks.bench_kv_quality --text TEXT [--model smollm2-135m-instruct] [--tokens 1024]

The text is computed in pieces, each token given the right ones before it: the mean negative log-likelihood, the share
of places where the likeliest token is the unquantised model's, and how far the logits at a piece's last places are from
that model's, as a share of their length. A piece is longer than a chunk, so that most keys are read back from pages.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path
from typing import get_args

import numpy as np
import torch

from baton.common.engine.batch import BatchRow, Scoring, pack_batch
from baton.common.engine.torch_runner import TorchRunner
from baton.common.kv.cache_dtype import CacheDtype
from baton.common.messages import SamplingParams
from baton.common.model.loading import Dtype, load_tokenizer

PAGE_SIZE = 16
CHUNK = 128
FORMATS: tuple[CacheDtype, ...] = ("auto", "int8", "fp8")
LAST = 16  # places whose logits are compared


@dataclass(frozen=True)
class Reading:
    """Of a whole text: by place the logarithm of the right token's likelihood, and the likeliest token."""

    logprobs: np.ndarray
    likeliest: np.ndarray
    logits: torch.Tensor  # [pieces * LAST, vocabulary]


def read(runner: TorchRunner, pieces: list[np.ndarray]) -> Reading:
    logprobs, likeliest, logits = list[float](), list[int](), list[torch.Tensor]()
    for piece in pieces:
        pages = np.arange(1, -(-len(piece) // PAGE_SIZE) + 1, dtype=np.int32)
        for first in range(0, len(piece), CHUNK):
            end = min(len(piece), first + CHUNK)
            scoring = Scoring(piece[first + 1 : end + 1], 1)
            held = pages[: -(-end // PAGE_SIZE)]
            row = BatchRow(0, piece[first:end], end, held, None, scoring=scoring)
            scores = runner.collect(runner.launch(pack_batch([row], PAGE_SIZE))).scores[0]
            for _, logprob, best in scores.rows():
                logprobs.append(logprob)
                likeliest.append(best[0][0])
        for length in range(len(piece) - LAST + 1, len(piece) + 1):
            held = pages[: -(-length // PAGE_SIZE)]
            row = BatchRow(0, piece[length - 1 : length], length, held, SamplingParams())
            logits.append(runner.logits(pack_batch([row], PAGE_SIZE), (0,))[0].float())
    return Reading(np.array(logprobs), np.array(likeliest), torch.stack(logits))


def pieces_of(text: str, model: str, tokens: int, length: int) -> list[np.ndarray]:
    ids = np.array(load_tokenizer(model)(text)["input_ids"][:tokens], np.int32)
    return [ids[first : first + length] for first in range(0, len(ids), length)]


def load(model: str, dtype: Dtype, cache_dtype: CacheDtype, length: int) -> TorchRunner:
    return TorchRunner.load(
        model,
        dtype=dtype,
        num_pages=length // PAGE_SIZE + 2,
        page_size=PAGE_SIZE,
        sliding_groups=False,
        cache_dtype=cache_dtype,
        threads=1,
    )


def compared(mine: Reading, plain: Reading) -> tuple[float, float, float]:
    """The mean negative log-likelihood, the share of places that agree, the error of the logits."""
    error = (mine.logits - plain.logits).norm(dim=-1) / plain.logits.norm(dim=-1)
    return -float(mine.logprobs.mean()), float((mine.likeliest == plain.likeliest).mean()), float(error.mean())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--dtype", choices=get_args(Dtype), default="float32")
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--piece", type=int, default=512)
    options = parser.parse_args()
    pieces = pieces_of(options.text.read_text(), options.model, options.tokens, options.piece)
    plain: Reading | None = None
    print(f"{options.model}, {options.dtype}, {sum(map(len, pieces))} tokens in pieces of {options.piece}")
    for cache_dtype in FORMATS:
        runner = load(options.model, options.dtype, cache_dtype, options.piece)
        mine = read(runner, pieces)
        plain = mine if plain is None else plain
        likelihood, agreement, error = compared(mine, plain)
        page_bytes = sum(buffer.page_bytes for buffer in runner.memory.buffers.values())
        pages = (1 << 30) // page_bytes
        print(
            f"{cache_dtype:5}  nll {likelihood:.4f}  likeliest equal {agreement:.4f}  logits off by {error:.4f}  "
            f"{pages} pages in a GiB, {runner.forward_path}",
            flush=True,
        )


if __name__ == "__main__":
    main()
