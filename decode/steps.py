"""What the next step computes. Owns who runs, who is being prefilled here, and what the launched step still uses.

Never: decides who has to give way when a step does not fit (`make_room` does), or what becomes of a sampled token.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from baton.common.engine.batch import I32, Batch, BatchRow, History, pack_batch
from baton.common.engine.chunk_predictor import ChunkPredictor, StepRoom
from baton.common.engine.chunks import ChunkBudget, chunk_row
from baton.common.engine.pacing import ItlPacer
from baton.common.engine.packing import DecodeRows, join_batches, pack_decode_rows
from baton.common.kv.pool import KvPool, Refused
from baton.decode.request import DecodeRequest, Prefilling, Running

RUNNING = Running()

MakeRoom = Callable[[DecodeRequest, Refused], bool]
"""Asked when a request cannot get a page: True when pages were made free (perhaps the request's own)."""


class Steps:
    """`chunk_tokens`: most tokens of local prefills in one step. With `predictor` or `pacer` there are fewer where
    streams would wait too long for the end of the step."""

    def __init__(
        self,
        pool: KvPool,
        chunk_tokens: int,
        predictor: ChunkPredictor | None = None,
        pacer: ItlPacer | None = None,
    ) -> None:
        self._pool = pool
        self._chunk_tokens = chunk_tokens
        self._predictor = predictor
        self._pacer = pacer
        self._room: StepRoom | None = None  # of the launched step, with a predictor and chunks
        self.running: list[DecodeRequest] = []  # oldest first
        self._joined: list[DecodeRequest] = []  # since the last plan
        self.prefilling: list[DecodeRequest] = []
        self._rows: list[DecodeRequest] = []  # of the launched step: decode rows, in batch order ...
        self._chunks: list[tuple[DecodeRequest, int]] = []  # ... then chunks, with their KV length after it

    def join(self, request: DecodeRequest) -> None:
        """It runs from the next step on."""
        self.running.append(request)
        self._joined.append(request)

    def remove(self, request: DecodeRequest) -> None:
        """It computes nothing more."""
        (self.running if request.state is RUNNING else self.prefilling).remove(request)

    def uses(self, request: DecodeRequest) -> bool:
        """The launched step reads or writes its pages."""
        return request in self._rows or any(request is one for one, _ in self._chunks)

    def plan(self, make_room: MakeRoom, now: float) -> Batch | None:
        """One token of every running request, and chunks of local prefills within their own budget, so that running
        streams go on while prompts are computed."""
        assert not self._rows, "one step at a time"
        assert not self._chunks, "one step at a time"
        decode = self._pack_rows(self._grow(make_room))
        for request in self._joined:
            if request.state is RUNNING:
                request.times.steps(now)
        self._joined.clear()
        chunks = self._pack_chunks()
        if decode is None or chunks is None:
            return decode or chunks
        return join_batches(decode, chunks)

    def collect(self, took_s: float) -> tuple[list[DecodeRequest], list[tuple[DecodeRequest, int]]]:
        """The step is over: its decode rows, and its chunks with the KV length each has reached."""
        if self._predictor is not None and self._room is not None:
            self._predictor.learn(self._room, took_s)
        self._room = None
        if self._pacer is not None and self._rows:
            self._pacer.learn(sum(end - one.record.kv_committed_len for one, end in self._chunks), took_s)
        rows, chunks = self._rows, self._chunks
        self._rows, self._chunks = [], []
        return rows, chunks

    def _grow(self, make_room: MakeRoom) -> list[DecodeRequest]:
        """Makes room for one token of each running request. Returns those that go on in this step."""
        grown: list[DecodeRequest] = []
        before = list(self.running)
        prepare = self._pool.prepare_for_decode
        for request in before:
            while request.state is RUNNING:
                if type(refused := prepare(request)) is not Refused:
                    grown.append(request)
                    break
                if not make_room(request, refused):
                    break
        if not len(grown) == len(self.running) == len(before):  # somebody gave way, perhaps one who had grown
            grown = [request for request in grown if request.state is RUNNING]
        return grown

    def _pack_rows(self, rows: list[DecodeRequest]) -> Batch | None:
        if not rows:
            return None
        self._rows = rows
        lengths = [request.record.kv_committed_len for request in rows]
        pages = [self._pool.pages_for_row(one.record, length) for one, length in zip(rows, lengths, strict=True)]
        has_states = self._pool.states is not None
        packed = DecodeRows(
            keys=tuple([request.number for request in rows]),
            input_ids=[request.outputs[-1] for request in rows],
            kv_lens=np.array(lengths, dtype=np.int32),
            page_ids=np.concatenate(pages),
            sampling=tuple([request.sampling for request in rows]),
            output_indices=tuple([len(request.outputs) for request in rows]),
            swa_page_ids=self._swa_pages(rows, lengths),
            state_slots=np.array([one.record.state_slot for one in rows], dtype=np.int32) if has_states else None,
            state_copies=self._pool.take_state_copies(one.record for one in rows) if has_states else None,
            histories={one.number: History(one.prompt, _as_array(one.outputs)) for one in rows if one.reshapes},
        )
        return pack_decode_rows(packed, self._pool.page_size)

    def _step_room(self) -> StepRoom | None:
        """Beside the streams of this step. Without any, nobody waits for its end."""
        if self._predictor is None:
            return None
        keys = sum(request.record.kv_committed_len for request in self._rows)
        return self._predictor.room(len(self._rows), keys, limited=bool(self._rows))

    def _swa_pages(self, rows: list[DecodeRequest], lengths: list[int]) -> I32 | None:
        """Of the sliding window beside full attention."""
        layout = self._pool.layout
        if not (layout.full and layout.window):
            return None
        pages = [self._pool.swa_pages_for_row(one.record, end) for one, end in zip(rows, lengths, strict=True)]
        return np.concatenate([one for one in pages if one is not None])

    def _pack_chunks(self) -> Batch | None:
        if not self.prefilling:
            return None
        paced = self._chunk_tokens if self._pacer is None else self._pacer.most_tokens(len(self._rows))
        if not paced:
            return None
        rows: list[BatchRow] = []
        self._room = self._step_room()
        budget = ChunkBudget(self._pool, min(paced, self._chunk_tokens), self._room)
        for request in self.prefilling:
            record = request.record
            assert isinstance(request.state, Prefilling), request.state
            done, total = record.kv_committed_len, request.state.until
            end = budget.take(done, total, scored=request.scored)
            if end == done:
                break
            sampling = request.sampling if request.wants_first_token and end == request.fill_len else None
            top = request.sampling.prompt_logprobs if request.scored else -1
            rows.append(chunk_row(self._pool, record, request.number, request.fill_tokens, end, sampling, top))
            self._chunks.append((request, end))
        copies = self._pool.take_state_copies(request.record for request, _ in self._chunks)
        return pack_batch(rows, self._pool.page_size, copies) if rows else None


def _as_array(outputs: list[int]) -> I32:
    return np.array(outputs, dtype=np.int32)
