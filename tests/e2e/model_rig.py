"""Runs token sequences through a `TorchRunner` without an engine: a page list per sequence, steps mixed at random."""

from __future__ import annotations

import json
import random
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from baton.common.engine.batch import BatchRow, pack_batch
from baton.common.engine.torch_runner import TorchRunner
from baton.common.messages import SamplingParams
from baton.common.units import pages_for_tokens

REFERENCES = Path(__file__).parents[1] / "data" / "references" / "smollm2-135m-instruct.json"
GREEDY = SamplingParams()


@dataclass(frozen=True)
class Reference:
    number: int
    prompt: list[int]
    outputs: list[int]
    margins: list[float]


def load_references() -> list[Reference]:
    stored = json.loads(REFERENCES.read_text())
    tokens = stored["corpus_tokens"]
    return [
        Reference(
            number,
            [token for start, stop in entry["slices"] for token in tokens[start:stop]],
            entry["outputs"],
            entry["margins"],
        )
        for number, entry in enumerate(stored["prompts"])
    ]


class Pages:
    """Hands out page ids in no particular order, and takes them back."""

    def __init__(self, num_pages: int, rng: random.Random) -> None:
        self._free = list(range(1, num_pages))
        rng.shuffle(self._free)

    def take(self, count: int) -> list[int]:
        taken, self._free = self._free[:count], self._free[count:]
        assert len(taken) == count, "the test's pool is too small"
        return taken

    def give(self, pages: list[int]) -> None:
        self._free += pages


@dataclass
class Sequence:
    """One request: how far its KV is computed, and what came out."""

    key: int
    prompt: list[int]
    max_tokens: int
    sampling: SamplingParams = GREEDY
    stop_token: int = -1
    outputs: list[int] = field(default_factory=list)
    computed: int = 0
    pages: list[int] = field(default_factory=list)

    @property
    def done(self) -> bool:
        return len(self.outputs) == self.max_tokens or self.outputs[-1:] == [self.stop_token]

    def row(self, chunk: int, pages: Pages, page_size: int) -> BatchRow:
        tokens = self.prompt + self.outputs
        stop = min(len(tokens), self.computed + chunk)
        self.pages += pages.take(pages_for_tokens(stop, page_size) - len(self.pages))
        return BatchRow(
            key=self.key,
            input_ids=np.array(tokens[self.computed : stop], np.int32),
            kv_len=stop,
            pages=np.array(self.pages, np.int32),
            sampling=self.sampling if stop == len(tokens) else None,
            output_index=len(self.outputs),
        )


def run_mixed(runner: TorchRunner, sequences: list[Sequence], *, max_rows: int, seed: int) -> None:
    """Finishes all sequences, at most `max_rows` at a time: in each step some decode and some compute a chunk of odd
    size, as chance has it; rows come in any order."""
    rng = random.Random(seed)
    page_size = runner.memory.layout.page_size
    pages = Pages(runner.memory.main.num_pages, rng)
    waiting, active = list(sequences), list[Sequence]()
    while waiting or active:
        while waiting and len(active) < max_rows:
            active.append(waiting.pop(0))
        chosen = rng.sample(active, rng.randint(max(1, len(active) - 2), len(active)))
        rows = [sequence.row(rng.choice((7, 33, 64, 129, 350)), pages, page_size) for sequence in chosen]
        result = runner.collect(runner.launch(pack_batch(rows, page_size)))
        assert result.keys == tuple(row.key for row in rows)
        for sequence, row, token in zip(chosen, rows, result.tokens, strict=True):
            sequence.computed = row.kv_len
            assert (token >= 0) == (row.sampling is not None)
            if token >= 0:
                sequence.outputs.append(token)
            if sequence.done:
                pages.give(sequence.pages)
                active.remove(sequence)
