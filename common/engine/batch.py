"""What one engine step computes, as arrays; and the interface of everything that can compute it.

Owns: `Batch` (input of one forward pass), `StepResult` (its output), `ModelRunner` (launch/collect).
Never: allocates pages, touches a request, or knows whether a row is a prefill chunk or a decode token. A batch is
packed and ragged: all rows one after the other, no padding; a row of one query token is a decode step, a row of many
is a prefill chunk. Page ids and write slots are computed once, here, for all layers of a group.

A model's *main* component is the first paged one of its layout: full attention, or the sliding window where all layers
slide. A model without attention has none: its rows hold no pages and its write slots are all 0.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING, Protocol

import msgspec
import numpy as np
import numpy.typing as npt
from msgspec import Struct

from baton.common.kv.layout import Component, KvLayout
from baton.common.kv.page_layout import PAGE_LAYOUT, PageLayout
from baton.common.messages import SamplingParams, TokenLogprob
from baton.common.prompt_logprobs import PromptLogprobs
from baton.common.shared_memory import SharedBlock
from baton.common.units import pages_for_tokens

if TYPE_CHECKING:
    from baton.common.engine.guiding import Guides

I32 = npt.NDArray[np.int32]
I64 = npt.NDArray[np.int64]


class History(Struct, frozen=True):
    """The tokens before the one that is to be chosen: what penalties and grammars look at. Derived from the request,
    never shipped; counted anew in each step, which is little beside the attention to the same tokens."""

    prompt: I32
    outputs: I32


NO_TOKENS: I32 = np.zeros(0, dtype=np.int32)
NO_TOKEN = -1


class Scoring(Struct, frozen=True):
    """That a row's tokens are asked how likely the tokens behind them are, and the `top` likeliest in their place."""

    targets: I32  # behind the first len(targets) tokens of the row
    top: int


class BatchRow(Struct, frozen=True):
    """One sequence's share of a step: compute tokens [kv_len - len(input_ids), kv_len).

    `pages` holds exactly the main component's pages of [0, kv_len): checked. `sampling` is None when no token is wanted
    (a chunk that is not the last); else the token after `kv_len - 1` is sampled as output number `output_index`.
    Dead pages of a sliding window (all below `KvLayout.live_from` of the length before this step may be dead) are 0.
    """

    key: int  # the engine's own name for this row; comes back in StepResult
    input_ids: I32  # [q]
    kv_len: int  # KV length after this step
    pages: I32  # [ceil(kv_len / page_size)]; [0] for a model without attention
    sampling: SamplingParams | None
    output_index: int = 0
    swa_pages: I32 | None = (
        None  # as `pages`, of the sliding window; only for models that have it beside full attention
    )
    state_slot: int = 0  # of the recurrent state; 0 for models without one
    history: History | None = None  # where `sampling.reshapes`
    scoring: Scoring | None = None


class PageTable(Struct, frozen=True):
    """Where a step's rows have their tokens in one pool."""

    slots: I64  # [T] page * page_size + offset: where each token's K and V are written
    page_offsets: I32  # [B + 1]
    page_ids: I32  # [sum of pages] of [0, kv_len) of each row; 0 where a sliding window has left a page behind


class Batch(Struct, frozen=True):
    """A packed step. T query tokens over B rows. `slots`, `page_offsets` and `page_ids` are the main component's."""

    keys: tuple[int, ...]  # [B]
    input_ids: I64  # [T]
    positions: I64  # [T]
    slots: I64  # [T] page * page_size + offset: where each token's K and V are written
    q_offsets: I32  # [B + 1] row b is [q_offsets[b], q_offsets[b + 1])
    kv_lens: I32  # [B] after the step
    page_offsets: I32  # [B + 1]
    page_ids: I32  # [sum of pages]
    sampling: tuple[SamplingParams | None, ...]  # [B]
    output_indices: tuple[int, ...]  # [B]
    page_size: int
    swa: PageTable | None = None  # where the model has a sliding window beside full attention
    state_slots: I32 | None = None  # [B] where the model has recurrent layers: read and written by the step
    state_copies: I32 | None = None  # [n, 2] (from, to) slots, copied in this order before the step; from 0: zeroed
    report_after: tuple[int, ...] = ()  # ascending; layers of the main component, see `ModelRunner.launch`
    histories: Mapping[int, History] = msgspec.field(default_factory=dict)  # by key, of rows whose `sampling.reshapes`
    scorings: Mapping[int, Scoring] = msgspec.field(default_factory=dict)  # by key

    @property
    def main(self) -> PageTable:
        return PageTable(self.slots, self.page_offsets, self.page_ids)

    @property
    def num_tokens(self) -> int:
        return len(self.input_ids)

    @property
    def num_rows(self) -> int:
        return len(self.keys)


def pack_batch(
    rows: list[BatchRow], page_size: int, state_copies: I32 | None = None, report_after: tuple[int, ...] = ()
) -> Batch:
    """Packs rows into one step. Asserts that each row's pages are exactly those of its length, and that all rows are of
    one model: with the same components."""
    assert rows, "an empty step is never launched"
    positions = [np.arange(row.kv_len - len(row.input_ids), row.kv_len) for row in rows]
    for row in rows:
        assert 0 < len(row.input_ids) <= row.kv_len, (row.key, len(row.input_ids), row.kv_len)
    main = _page_table(rows, [row.pages for row in rows], positions, page_size)
    swa_pages = [row.swa_pages for row in rows if row.swa_pages is not None]
    assert len(swa_pages) in (0, len(rows)), "either all rows have a sliding window or none"
    slots = [row.state_slot for row in rows]
    assert all(slots) or not any(slots), "either all rows have a state or none"
    return Batch(
        keys=tuple(row.key for row in rows),
        input_ids=np.concatenate([row.input_ids for row in rows]).astype(np.int64),
        positions=np.concatenate(positions).astype(np.int64),
        slots=main.slots,
        q_offsets=_offsets([len(row.input_ids) for row in rows]),
        kv_lens=np.array([row.kv_len for row in rows], dtype=np.int32),
        page_offsets=main.page_offsets,
        page_ids=main.page_ids,
        sampling=tuple(row.sampling for row in rows),
        output_indices=tuple(row.output_index for row in rows),
        page_size=page_size,
        swa=_page_table(rows, swa_pages, positions, page_size) if swa_pages else None,
        state_slots=np.array(slots, dtype=np.int32) if slots[0] else None,
        state_copies=state_copies,
        report_after=report_after,
        histories={row.key: row.history for row in rows if row.history is not None},
        scorings={row.key: row.scoring for row in rows if row.scoring is not None},
    )


def _page_table(rows: list[BatchRow], held: list[I32], positions: list[I64], page_size: int) -> PageTable:
    """Of rows that all hold the pages of their length, or all none."""
    paged = any(len(pages) for pages in held)
    for row, pages in zip(rows, held, strict=True):
        needed = pages_for_tokens(row.kv_len, page_size) if paged else 0
        assert len(pages) == needed, (row.key, row.kv_len, len(pages))
    slots = [
        pages[at // page_size].astype(np.int64) * page_size + at % page_size if paged else np.zeros_like(at)
        for pages, at in zip(held, positions, strict=True)
    ]
    return PageTable(
        slots=np.concatenate(slots),
        page_offsets=_offsets([len(pages) for pages in held]),
        page_ids=np.concatenate(held).astype(np.int32),
    )


def _offsets(lengths: list[int]) -> I32:
    return np.array(list(accumulate(lengths, initial=0)), dtype=np.int32)


class StepResult(Struct, frozen=True):
    """Per row: the sampled token, or NO_TOKEN where none was wanted or a grammar has outgrown its limits; and its log
    probability where asked for."""

    keys: tuple[int, ...]
    tokens: tuple[int, ...]
    logprobs: tuple[TokenLogprob | None, ...]
    compute_s: float
    scores: Mapping[int, PromptLogprobs] = msgspec.field(default_factory=dict)  # by key, of `Batch.scorings`


class KvBuffer(Protocol):
    """The memory behind the page ids of one pool: `num_pages` pages (page 0, the null page, included) of `page_bytes`
    bytes each, one contiguous block per page, which is `layers` equal stretches one after the other, each in
    `page_layout`. For recurrent layers a page is one sequence's state, in one stretch.

    `as_bytes()` is a writable uint8 view [num_pages, page_bytes] over the live memory, for gather, scatter and pulls.
    `fingerprint()` names everything that must be equal for two pools to exchange pages byte for byte. `block` is what
    the memory is the beginning of, where processes of this host can share it; None: they cannot. Of a pool that is
    `on_device` the host sees no bytes: `as_bytes` raises, and there is no block.
    """

    num_pages: int
    page_bytes: int
    layers: int
    page_layout: PageLayout
    on_device: bool

    @property
    def block(self) -> SharedBlock | None: ...

    def as_bytes(self) -> npt.NDArray[np.uint8]: ...

    def adopt(self, pages: I32, layers: slice, source: PageLayout) -> None:
        """What has just come into these layers of `pages` is laid out as `source`: puts it into its own order."""
        ...

    def fingerprint(self) -> dict[str, str]: ...


@dataclass(frozen=True, slots=True)
class KvMemory:
    """All KV memory of one worker: a buffer for each component that the model has."""

    layout: KvLayout
    buffers: Mapping[Component, KvBuffer]

    def __post_init__(self) -> None:
        assert set(self.buffers) == set(self.layout.components), (self.buffers, self.layout)

    @classmethod
    def full(cls, buffer: KvBuffer, page_size: int) -> KvMemory:
        """Of a model whose layers all attend to everything."""
        return cls(KvLayout(page_size), {Component.FULL: buffer})

    @property
    def layers(self) -> dict[Component, int]:
        return {component: buffer.layers for component, buffer in self.buffers.items()}

    @property
    def on_device(self) -> bool:
        """Any of it."""
        return any(buffer.on_device for buffer in self.buffers.values())

    @property
    def main(self) -> KvBuffer:
        """The first component's."""
        return self.buffers[self.layout.components[0]]

    def fingerprint(self) -> dict[str, str]:
        """What two workers must have in common to exchange KV, and how pages are laid out; by component, where there is
        more than one."""
        layout = self.layout
        found = {"kv_components": "+".join(layout.components), "kv_page_size": str(layout.page_size)}
        found[PAGE_LAYOUT] = self.main.page_layout.value
        if layout.window:
            found["kv_window"] = str(layout.window)
        for component, buffer in self.buffers.items():
            prefix = "" if len(self.buffers) == 1 else f"{component}_"
            found |= {f"{prefix}{name}": value for name, value in buffer.fingerprint().items()}
        return found


class Ticket(Protocol):
    """A launched step. Opaque; collected exactly once."""


OnLayers = Callable[[int], None]
"""Told how many layers of the main component are in the pages."""


def tell_nobody(layers: int) -> None:
    """For whoever does not care."""


class ModelRunner(Protocol):
    """Computes steps over one worker's KV memory. Implementations: `fake_runner.FakeRunner`,
    `torch_runner.TorchRunner`, `gpu.runner.DeviceRunner`.

    For each count in `Batch.report_after`, in order and before `collect` has returned, the launching thread calls
    `on_layers` with it: from then on the keys and values of so many layers of the main component, of all the step's
    tokens, are in the pages, and the step writes them no more."""

    memory: KvMemory
    vocab_size: int
    max_positions: int
    guides: Guides
    forward_path: str  # how it computes a step, for people

    def launch(self, batch: Batch, on_layers: OnLayers = tell_nobody) -> Ticket: ...

    def collect(self, ticket: Ticket) -> StepResult: ...
