"""A model without weights whose answers prove that every page and slot it read was the right one.

Owns: a runner over the fake model (`FakeRunner`); what a correct system must answer is in `fake_answer`. Never: knows
pages beyond a batch's ids, or who owns them.

What is kept of a position (`fake_model`) is computed from what lies in the page of the position before it, and in the
page at the far end of the window, or in the sequence's slot; it is spread over all bytes of its share of a page, or of
the slot. The next token is a hash of every position that attention would see and of the running state: one wrong,
stale, dead or damaged page or slot anywhere changes the output.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt
from msgspec import Struct

from baton.common.engine.batch import I32, Batch, KvMemory, OnLayers, PageTable, StepResult, Ticket, tell_nobody
from baton.common.engine.fake_answer import FakeAnswer, fake_answer, fake_generate
from baton.common.engine.fake_kernels import CompiledStep, fake_step
from baton.common.engine.fake_model import (
    FAKE_VOCAB_SIZE,
    FULL_SALT,
    START,
    STATE_SALT,
    SWA_SALT,
    U64,
    A,
    B,
    FakeModel,
    Spread,
    fake_vocabulary,
    join_digests,
)
from baton.common.engine.guiding import Guides, MaskedRow, TokenMask
from baton.common.kv.buffers import NumpyKvBuffer
from baton.common.kv.layout import Component, KvLayout
from baton.common.messages import TokenLogprob
from baton.common.prompt_logprobs import PromptLogprobs

__all__ = [
    "FAKE_VOCAB_SIZE",
    "FakeAnswer",
    "FakeRunner",
    "StepCost",
    "StepTimer",
    "fake_answer",
    "fake_generate",
    "fake_runner",
]

_NO_ROWS = np.zeros(0, dtype=np.int64)


class StepTimer(Protocol):
    """How long a step takes."""

    def of(self, batch: Batch) -> float: ...


@dataclass(frozen=True, slots=True)
class StepCost:
    """How long a step takes, for the simulator: base + per query token + per key read."""

    base_s: float = 0.0
    per_token_s: float = 0.0
    per_key_s: float = 0.0

    def of(self, batch: Batch) -> float:
        keys_s = self.per_key_s * float(batch.kv_lens.sum()) if self.per_key_s else 0.0
        return self.base_s + self.per_token_s * batch.num_tokens + keys_s


class FakeTicket(Struct, frozen=True):
    """A step that was computed at launch."""

    result: StepResult


class _Memory:
    """One component's pages or slots as hashes. `per_page` hashes of a page; a slot has one. A hash has some words in
    each layer of its page."""

    def __init__(self, memory: KvMemory, component: Component) -> None:
        buffer = memory.buffers[component]
        self.per_page = 1 if component is Component.STATE else memory.layout.page_size
        self.layers = buffer.layers
        share = 8 * self.per_page * self.layers
        assert buffer.page_bytes % share == 0, "each position needs whole 64-bit words of each layer of its page"
        words = buffer.page_bytes // share
        self.pages = buffer.as_bytes().view(np.uint64).reshape(buffer.num_pages, self.layers, self.per_page, words)
        self._words = words
        self._spread = Spread(self.layers * words)

    def write(self, slots: npt.NDArray[np.int64] | I32, hashes: U64, begin: int = 0, end: int | None = None) -> None:
        """Layers [begin, end) of it."""
        words = self._spread.write(hashes).reshape(len(hashes), self.layers, self._words)
        self.pages[slots // self.per_page, begin:end, slots % self.per_page] = words[:, begin:end]

    def read(self, slots: npt.NDArray[np.int64] | I32) -> U64:
        words = self.pages[slots // self.per_page, :, slots % self.per_page]
        return self._spread.read(words.reshape(len(words), self.layers * self._words))

    def read_pages(self, pages: I32) -> U64:
        words = self.pages[pages].swapaxes(1, 2)
        return self._spread.read(words.reshape(len(words), self.per_page, self.layers * self._words))

    def read_at(self, table: PageTable, rows: npt.NDArray[np.int64] | int, positions: npt.NDArray[np.int64]) -> U64:
        """Of positions in rows, from their pages."""
        pages = table.page_ids[table.page_offsets[rows] + positions // self.per_page]
        return self.read(pages.astype(np.int64) * self.per_page + positions % self.per_page)


class FakeRunner:
    """`ModelRunner` over the fake model. Every byte it reads or writes lies in `memory`."""

    def __init__(
        self,
        memory: KvMemory,
        *,
        max_positions: int = 8192,
        vocab_size: int = FAKE_VOCAB_SIZE,
        cost: StepTimer | None = None,
        compiled: bool = True,
    ) -> None:
        """Not `compiled`, or without a compiler: the same in numpy."""
        self.memory = memory
        self.vocab_size = vocab_size
        self.max_positions = max_positions
        self.guides = Guides(fake_vocabulary)
        self.forward_path = "fake"
        self._cost = cost or StepCost()
        self._model = FakeModel(max_positions + memory.layout.page_size, vocab_size)
        self._of = {component: _Memory(memory, component) for component in memory.layout.components}
        step = fake_step() if compiled else None
        self._compiled = (
            {} if step is None else {one: CompiledStep(step, memory, one) for one in memory.layout.components}
        )

    def kept(self, component: Component, ids: I32) -> U64:
        """What pages hold, position by position, or slots: [ids, positions]. Of damaged ones, something else."""
        return self._of[component].read_pages(ids)

    def step_cost_s(self, batch: Batch) -> float:
        """What this step would take on the machine that `cost` describes."""
        return self._cost.of(batch)

    def launch(self, batch: Batch, on_layers: OnLayers = tell_nobody) -> FakeTicket:
        """Takes no time: whoever simulates the time that it takes goes through `stages`."""
        return run_out(self.stages(batch), on_layers)

    def stages(self, batch: Batch) -> Generator[int, None, FakeTicket]:
        """Writes what the step keeps, component by component, then reads all of it for the rows that want a token.
        Yields each count of `batch.report_after` when so many layers are written, and no more."""
        wanted = np.array([row for row, sampling in enumerate(batch.sampling) if sampling is not None], dtype=np.int64)
        found = yield from self._run_compiled(batch, wanted) if self._compiled else self._run_arrays(batch, wanted)
        tokens, logprobs = self._sample(batch, wanted, found)
        scores = self._scores(batch) if batch.scorings else {}
        return FakeTicket(StepResult(batch.keys, tokens, logprobs, self.step_cost_s(batch), scores))

    def _run_compiled(self, batch: Batch, wanted: npt.NDArray[np.int64]) -> Generator[int, None, list[list[int]]]:
        """The digests of the rows `wanted`, by component."""
        found: list[list[int]] = []
        for component, compiled in self._compiled.items():
            table: PageTable | None = batch.main
            if component is Component.SWA and self.memory.layout.full:
                table = batch.swa
                assert table is not None, "this model's sliding layers have a pool of their own"
            elif component is Component.STATE:
                self._copy_states(batch)
                table = None
            begin = 0
            for end in batch.report_after if component is Component.FULL else ():
                compiled.run(batch, table, begin, end, _NO_ROWS)
                yield end
                begin = end
            found.append(compiled.run(batch, table, begin, compiled.layers, wanted))
        return found

    def _run_arrays(self, batch: Batch, wanted: npt.NDArray[np.int64]) -> Generator[int, None, list[list[int]]]:
        found: list[U64] = []
        for component, memory in self._of.items():
            match component:
                case Component.FULL:
                    yield from self._write_full(batch, memory)
                    found.append(self._digests(memory, batch.main, batch.kv_lens, wanted, None))
                case Component.SWA:
                    table = batch.swa if self.memory.layout.full else batch.main
                    assert table is not None, "this model's sliding layers have a pool of their own"
                    self._write_window(batch, memory, table)
                    begins = np.maximum(batch.kv_lens[wanted] - self.memory.layout.window, 0)
                    found.append(self._digests(memory, table, batch.kv_lens, wanted, begins))
                case Component.STATE:
                    found.append(self._write_state(batch, memory)[wanted])
        return [digests.tolist() for digests in found]

    def collect(self, ticket: Ticket) -> StepResult:
        assert isinstance(ticket, FakeTicket), ticket
        return ticket.result

    def _write_full(self, batch: Batch, memory: _Memory) -> Generator[int, None, None]:
        """Computes and stores the KV of every query token, reading what lies before it from the pages."""
        first = batch.positions[batch.q_offsets[:-1]]
        previous = memory.read_at(batch.main, np.arange(batch.num_rows), np.maximum(first - 1, 0))
        previous = np.where(first > 0, previous, np.uint64(START))
        hashes, begin = self._chains(batch, previous, FULL_SALT), 0
        for end in batch.report_after:
            memory.write(batch.slots, hashes, begin, end)
            yield end
            begin = end
        memory.write(batch.slots, hashes, begin)

    def _chains(self, batch: Batch, previous: U64, salt: int) -> U64:
        """h or s of every query token, given that of the position before each row's first."""
        hashes = np.empty(batch.num_tokens, dtype=np.uint64)
        q_starts = batch.q_offsets[:-1]
        single = np.diff(batch.q_offsets) == 1
        at = q_starts[single]
        hashes[at] = previous[single] * np.uint64(A) + self._model.scrambled(
            batch.input_ids[at], batch.positions[at], salt
        )
        for row in np.flatnonzero(~single):
            span = slice(int(q_starts[row]), int(batch.q_offsets[row + 1]))
            first = int(batch.positions[span.start])
            hashes[span] = self._model.hashes(batch.input_ids[span], first, int(previous[row]), salt)
        return hashes

    def _write_window(self, batch: Batch, memory: _Memory, table: PageTable) -> None:
        """As `_write_full`; a row reads no position before the window of its first query."""
        window = self.memory.layout.window
        hashes = np.empty(batch.num_tokens, dtype=np.uint64)
        q_starts = batch.q_offsets[:-1]
        single = np.diff(batch.q_offsets) == 1
        rows, at = np.flatnonzero(single), q_starts[single]
        positions = batch.positions[at]
        hashes[at] = self._model.scrambled(batch.input_ids[at], positions, SWA_SALT)
        if window > 1:
            for factor, before in ((A, positions - 1), (B, positions - window + 1)):
                there = np.flatnonzero(before >= 0)
                hashes[at[there]] += memory.read_at(table, rows[there], before[there]) * np.uint64(factor)
        for row in np.flatnonzero(~single):
            span = slice(int(q_starts[row]), int(batch.q_offsets[row + 1]))
            first = int(batch.positions[span.start])
            seen = np.arange(max(0, first - window + 1), first)
            values = memory.read_at(table, int(row), seen)
            hashes[span] = self._model.window_hashes(batch.input_ids[span], first, values, window)
        memory.write(table.slots, hashes)

    def _write_state(self, batch: Batch, memory: _Memory) -> U64:
        """Moves the state of each row on; returns it."""
        assert batch.state_slots is not None
        assert len(set(batch.state_slots.tolist())) == batch.num_rows, "two rows would write one state"
        self._copy_states(batch)
        states = self._chains(batch, memory.read(batch.state_slots), STATE_SALT)[batch.q_offsets[1:] - 1]
        memory.write(batch.state_slots, states)
        return states

    def _copy_states(self, batch: Batch) -> None:
        pages = self._of[Component.STATE].pages
        for source, target in () if batch.state_copies is None else batch.state_copies.tolist():
            pages[target] = pages[source] if source else 0

    def _sample(
        self, batch: Batch, wanted: npt.NDArray[np.int64], found: list[list[int]]
    ) -> tuple[tuple[int, ...], tuple[TokenLogprob | None, ...]]:
        """Of the rows that want a token, from what was found of them in each component."""
        tokens = [-1] * batch.num_rows
        logprobs: list[TokenLogprob | None] = [None] * batch.num_rows
        masks = self._masks(batch) if batch.histories else {}
        if len(wanted):
            digests = found[0]
            for others in found[1:]:
                digests = [join_digests(one, other) for one, other in zip(digests, others, strict=True)]
            for row, digest in zip(wanted.tolist(), digests, strict=True):
                sampling = batch.sampling[row]
                assert sampling is not None
                history = batch.histories.get(batch.keys[row])
                tokens[row] = self._model.token(
                    digest, sampling, batch.output_indices[row], history, masks.get(batch.keys[row])
                )
                logprobs[row] = self._model.logprob(digest, tokens[row], sampling)
        return tuple(tokens), tuple(logprobs)

    def _scores(self, batch: Batch) -> dict[int, PromptLogprobs]:
        """From the pages of the main component."""
        memory = self._of[self.memory.layout.paged[0]]
        scores: dict[int, PromptLogprobs] = {}
        for row, key in enumerate(batch.keys):
            scoring = batch.scorings.get(key)
            if scoring is not None and len(scoring.targets):
                first = int(batch.q_offsets[row])
                at = batch.positions[first : first + len(scoring.targets)]
                hashes = memory.read_at(batch.main, row, at)
                scores[key] = self._model.score(hashes, scoring.targets.astype(np.int64), scoring.top)
        return scores

    def _masks(self, batch: Batch) -> dict[int, TokenMask | None]:
        """Of the guided rows, by key."""
        rows: list[MaskedRow] = []
        for key, sampling in zip(batch.keys, batch.sampling, strict=True):
            if sampling is not None and sampling.grammar is not None:
                rows.append((key, sampling.grammar, batch.histories[key].outputs))
        return dict(zip([key for key, _, _ in rows], self.guides.masks(rows), strict=True))

    def _digests(
        self,
        memory: _Memory,
        table: PageTable,
        kv_lens: I32,
        rows: npt.NDArray[np.int64],
        begins: I32 | None,
    ) -> U64:
        """Over the positions of `rows` from `begins` (or the first) to the end of each."""
        if not len(rows):
            return np.zeros(0, dtype=np.uint64)
        page_size = self.memory.layout.page_size
        first_pages = np.zeros(len(rows), dtype=np.int64) if begins is None else begins.astype(np.int64) // page_size
        counts = np.diff(table.page_offsets)[rows].astype(np.int64) - first_pages
        starts = np.concatenate([np.zeros(1, dtype=np.int64), np.cumsum(counts)])
        # The index of each page within its row.
        within = np.arange(starts[-1]) - np.repeat(starts[:-1] - first_pages, counts)
        pages = table.page_ids[np.repeat(table.page_offsets[rows].astype(np.int64), counts) + within]
        positions = within[:, None] * page_size + np.arange(page_size)
        weights = self._model.weights(positions)
        weights[positions >= np.repeat(kv_lens[rows], counts)[:, None]] = 0
        if begins is not None:
            weights[positions < np.repeat(begins, counts)[:, None]] = 0
        per_page = (memory.read_pages(pages) * weights).sum(axis=1, dtype=np.uint64)
        return np.add.reduceat(per_page, starts[:-1])


def run_out(stages: Generator[int, None, FakeTicket], on_layers: OnLayers = tell_nobody) -> FakeTicket:
    """The end of a step, or of the rest of one."""
    while True:
        try:
            layers = next(stages)
        except StopIteration as end:
            ticket: FakeTicket = end.value
            return ticket
        on_layers(layers)


def fake_runner(
    num_pages: int | Mapping[Component, int],
    page_size: int,
    *,
    bytes_per_token: int = 16,
    max_positions: int = 8192,
    cost: StepTimer | None = None,
    layout: KvLayout | None = None,
    state_bytes: int = 64,
    layers: int = 1,
    shared: bool = False,
    compiled: bool = True,
) -> FakeRunner:
    """A fake runner with memory of its own. `num_pages` counts the null page; a number alone is for one component.
    Without `layout` all layers attend to everything. A page has `layers` of them. `state_bytes` is the size of a slot.
    `shared`: other processes may map the memory."""
    layout = layout or KvLayout(page_size)
    assert layout.page_size == page_size, (layout, page_size)
    counts = num_pages if isinstance(num_pages, Mapping) else dict.fromkeys(layout.components, num_pages)
    assert isinstance(num_pages, Mapping) or len(counts) == 1, "each component has a pool of its own size"
    buffers = {
        component: NumpyKvBuffer(counts[component], state_bytes, 1, "fake-state", shared=shared)
        if component is Component.STATE
        else NumpyKvBuffer(
            counts[component], bytes_per_token * page_size, page_size, "fake", layers=layers, shared=shared
        )
        for component in layout.components
    }
    return FakeRunner(KvMemory(layout, buffers), max_positions=max_positions, cost=cost, compiled=compiled)
