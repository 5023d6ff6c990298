"""Runs token sequences through a `TorchRunner` without an engine: each holds its pages and its state slot itself, steps
are mixed at random, and every page or slot that nobody needs is full of NaN."""

from __future__ import annotations

import json
import random
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch

from baton.common.engine.batch import Batch, BatchRow, KvMemory, Scoring, pack_batch
from baton.common.engine.gpu.runner import DeviceRunner, DeviceTicket
from baton.common.engine.torch_runner import TorchRunner, TorchTicket
from baton.common.kv.layout import Component, KvLayout
from baton.common.messages import SamplingParams
from baton.common.prompt_logprobs import PromptLogprobs
from baton.common.units import pages_for_tokens, whole_pages

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
    """Hands out the pages or slots of one component in no particular order, and takes them back. What is free is full
    of NaN, page 0 too: who reads it, shows it."""

    def __init__(self, memory: KvMemory, component: Component, rng: random.Random) -> None:
        self._bytes = memory.buffers[component].as_bytes()
        self._bytes[:] = 0xFF
        self._free = list(range(1, len(self._bytes)))
        rng.shuffle(self._free)

    def take(self, count: int) -> list[int]:
        taken, self._free = self._free[:count], self._free[count:]
        assert len(taken) == count, "the test's pool is too small"
        return taken

    def give(self, pages: list[int]) -> None:
        pages = [page for page in pages if page]
        self._bytes[pages] = 0xFF
        self._free += pages


class Pools:
    """All pools of a runner's memory."""

    def __init__(self, runner: TorchRunner | DeviceRunner, rng: random.Random) -> None:
        self.memory = runner.memory
        self.of = {component: Pages(runner.memory, component, rng) for component in runner.memory.layout.components}


@dataclass
class Sequence:
    """One request: how far its KV is computed, and what came out."""

    key: int
    prompt: list[int]
    max_tokens: int
    sampling: SamplingParams = GREEDY
    stop_token: int = -1
    outputs: list[int] = field(default_factory=list)
    logits: list[torch.Tensor] = field(default_factory=list)  # that each output was chosen from
    computed: int = 0
    scored_top: int = -1  # >= 0: the prompt's tokens are scored, with so many alternatives
    scores: list[PromptLogprobs] = field(default_factory=list)
    held: dict[Component, list[int]] = field(default_factory=dict)  # pages by index, 0 where dead; or the one slot

    @property
    def done(self) -> bool:
        return len(self.outputs) == self.max_tokens or self.outputs[-1:] == [self.stop_token]

    def row(self, chunk: int, pools: Pools) -> BatchRow:
        layout = pools.memory.layout
        tokens = self.prompt + self.outputs
        stop = min(len(tokens), self.computed + chunk)
        needed = pages_for_tokens(stop, layout.page_size)
        for component in layout.components:
            held = self.held.setdefault(component, [])
            held += pools.of[component].take((1 if component is Component.STATE else needed) - len(held))
        paged = [np.array(self.held[component], np.int32) for component in layout.paged]
        return BatchRow(
            key=self.key,
            input_ids=np.array(tokens[self.computed : stop], np.int32),
            kv_len=stop,
            pages=paged[0] if paged else np.zeros(0, np.int32),
            sampling=self.sampling if stop == len(tokens) else None,
            output_index=len(self.outputs),
            swa_pages=paged[1] if len(paged) > 1 else None,
            state_slot=self.held[Component.STATE][0] if layout.state else 0,
            scoring=self._scoring(stop),
        )

    def _scoring(self, stop: int) -> Scoring | None:
        if self.scored_top < 0 or self.outputs:
            return None
        return Scoring(np.array(self.prompt[self.computed + 1 : stop + 1], np.int32), self.scored_top)

    def leave_window(self, pools: Pools) -> None:
        """Gives back the pages of the sliding layers that no later step reads."""
        if Component.SWA in self.held:
            dead = whole_pages(pools.memory.layout.live_from(self.computed), pools.memory.layout.page_size)
            pools.of[Component.SWA].give(self.held[Component.SWA][:dead])
            self.held[Component.SWA][:dead] = [0] * dead

    def finish(self, pools: Pools) -> None:
        for component, held in self.held.items():
            pools.of[component].give(held)
        self.held = {}

    def move(self, source: Pools, target: Pools) -> None:
        """What a hand-off does: the bytes of what is live, to other places in another worker's memory."""
        for component, held in self.held.items():
            places = iter(target.of[component].take(sum(page > 0 for page in held)))
            moved = [next(places) if page else 0 for page in held]
            live = [(page, to) for page, to in zip(held, moved, strict=True) if page]
            bytes_of = source.memory.buffers[component].as_bytes()
            for page, to in live:
                target.memory.buffers[component].as_bytes()[to] = bytes_of[page]
            source.of[component].give(held)
            self.held[component] = moved


def run_step(runner: TorchRunner | DeviceRunner, pools: Pools, sequences: list[Sequence], chunks: list[int]) -> None:
    """One step of these sequences: at most so many tokens of each."""
    fresh = [sequence for sequence in sequences if not sequence.computed]
    rows = [sequence.row(chunk, pools) for sequence, chunk in zip(sequences, chunks, strict=True)]
    ticket = runner.launch(pack_step(rows, runner.memory.layout, [sequence.held for sequence in fresh]))
    assert isinstance(ticket, TorchTicket | DeviceTicket)
    result = runner.collect(ticket)
    assert result.keys == tuple(row.key for row in rows)
    logits = iter(() if ticket.logits is None else ticket.logits)
    for sequence, row, token in zip(sequences, rows, result.tokens, strict=True):
        sequence.computed = row.kv_len
        sequence.scores += filter(None, [result.scores.get(row.key)])
        assert (token >= 0) == (row.sampling is not None)
        if token >= 0:
            sequence.outputs.append(token)
            sequence.logits.append(next(logits))
        sequence.leave_window(pools)
        if sequence.done:
            sequence.finish(pools)


def pack_step(rows: list[BatchRow], layout: KvLayout, fresh: list[dict[Component, list[int]]]) -> Batch:
    copies = [(0, held[Component.STATE][0]) for held in fresh] if layout.state else []
    return pack_batch(rows, layout.page_size, np.array(copies, np.int32) if copies else None)


def run_mixed(
    runner: TorchRunner | DeviceRunner,
    sequences: list[Sequence],
    *,
    max_rows: int,
    seed: int,
    chunks: tuple[int, ...] = (7, 33, 64, 129, 350),
) -> None:
    """Finishes all sequences, at most `max_rows` at a time: in each step some decode and some compute a chunk of odd
    size, as chance has it; rows come in any order."""
    rng = random.Random(seed)
    pools = Pools(runner, rng)
    waiting, active = list(sequences), list[Sequence]()
    while waiting or active:
        while waiting and len(active) < max_rows:
            active.append(waiting.pop(0))
        chosen = rng.sample(active, rng.randint(max(1, len(active) - 2), len(active)))
        run_step(runner, pools, chosen, [rng.choice(chunks) for _ in chosen])
        active = [sequence for sequence in active if not sequence.done]
