"""llama.cpp through its C interface: a step is one `llama_decode` of all rows and the argmax of their logits.

The GGUF file in the wanted precision is made once by its own quantizer, from the file that Baton's weights come from.
A context is computed once for each case, and copied into every row.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import llama_cpp as llama
import numpy as np

from benchmarks.engine.cases import Case, prompt_ids
from benchmarks.engine.child import Step, main

PRECISIONS = {  # of the file, of K and V
    "float32": (llama.LLAMA_FTYPE_ALL_F32, llama.GGML_TYPE_F32),
    "bfloat16": (llama.LLAMA_FTYPE_MOSTLY_BF16, llama.GGML_TYPE_F16),
}
MICRO_BATCH = 512
"""Its default."""


@llama.llama_log_callback
def _silent(level: int, text: bytes, user_data: object) -> None:
    """It logs every tensor of every graph."""


class LlamaCpp:
    """`spec`: source, a GGUF file; name; dtype."""

    def __init__(self, spec: Mapping[str, Any]) -> None:
        self._threads = len(spec["cores"])
        self._file_type, self._kv_type = PRECISIONS[spec["dtype"]]
        llama.llama_log_set(_silent, None)
        llama.llama_backend_init()
        path = self._converted(Path(spec["source"]), f"{spec['name']}-{spec['dtype']}")
        parameters = llama.llama_model_default_params()
        self._model = llama.llama_model_load_from_file(str(path).encode(), parameters)
        if not self._model:
            raise RuntimeError(f"llama.cpp cannot load {path}")
        self._vocab_size = llama.llama_vocab_n_tokens(llama.llama_model_get_vocab(self._model))
        self._context: Any = None
        self._states: dict[Case, Any] = {}  # of one row's KV; it fits only into a context made for as many rows
        self.extra: dict[str, Any] = {}
        self.about = f"KV in {'float32' if spec['dtype'] == 'float32' else 'float16'}, micro-batches of {MICRO_BATCH}"

    def _converted(self, source: Path, name: str) -> Path:
        path = Path(sys.prefix) / "models" / f"{name}.gguf"
        if not path.is_file():
            path.parent.mkdir(exist_ok=True)
            parameters = llama.llama_model_quantize_default_params()
            parameters.ftype, parameters.allow_requantize, parameters.pure = self._file_type, True, True
            parameters.nthread = self._threads
            partial = path.with_suffix(".partial")
            if llama.llama_model_quantize(str(source).encode(), str(partial).encode(), ctypes.byref(parameters)) != 0:
                raise RuntimeError(f"llama.cpp cannot convert {source}")
            partial.rename(path)
        return path

    def _open(self, case: Case) -> None:
        parameters = llama.llama_context_default_params()
        parameters.n_ctx = case.rows * case.longest
        parameters.n_seq_max = case.rows
        parameters.n_batch = parameters.n_ubatch = MICRO_BATCH
        parameters.n_threads = parameters.n_threads_batch = self._threads
        parameters.type_k = parameters.type_v = self._kv_type
        parameters.kv_unified = False  # rows share nothing
        parameters.no_perf = True
        self._context = llama.llama_init_from_model(self._model, parameters)
        if not self._context:
            raise MemoryError(f"llama.cpp has no room for {case.name}")

    def prepare(self, case: Case) -> Step:
        self._open(case)
        if case.kind == "prefill":
            prompts = [prompt_ids(row, case.tokens) for row in range(case.rows)]
            return lambda: self._prefill(prompts)
        state = self._state(case)
        for row in range(case.rows):
            if llama.llama_state_seq_set_data(self._context, state, len(state), row) == 0:
                raise MemoryError("llama.cpp does not take a row's state back")
        tokens = [100 + row for row in range(case.rows)]
        position = case.tokens

        def step() -> None:
            nonlocal position
            self._decode(tokens, [position] * case.rows, list(range(case.rows)), list(range(case.rows)))
            position += 1

        return step

    def _state(self, case: Case) -> Any:
        """In the context that is open; left empty again."""
        if case not in self._states:
            self._prefill([prompt_ids(0, case.tokens)])
            state = (ctypes.c_uint8 * llama.llama_state_seq_get_size(self._context, 0))()
            llama.llama_state_seq_get_data(self._context, state, len(state), 0)
            llama.llama_memory_clear(llama.llama_get_memory(self._context), False)
            self._states = {case: state}
        return self._states[case]

    def _prefill(self, prompts: Sequence[Sequence[int]]) -> None:
        """Packed, so many tokens at a time."""
        flat = [(token, at, row) for row, ids in enumerate(prompts) for at, token in enumerate(ids)]
        lasts = {(len(ids) - 1, row) for row, ids in enumerate(prompts)}
        for start in range(0, len(flat), MICRO_BATCH):
            part = flat[start : start + MICRO_BATCH]
            tokens, positions, rows = ([one[index] for one in part] for index in range(3))
            wanted = [index for index, (_, at, row) in enumerate(part) if (at, row) in lasts]
            self._decode(tokens, positions, rows, wanted)

    def _decode(self, tokens: Sequence[int], positions: Sequence[int], rows: Sequence[int], wanted: list[int]) -> None:
        """`wanted`: places whose next token is chosen."""
        batch = llama.llama_batch_init(len(tokens), 0, 1)
        try:
            batch.n_tokens = len(tokens)
            for index, (token, position, row) in enumerate(zip(tokens, positions, rows, strict=True)):
                batch.token[index], batch.pos[index] = token, position
                batch.n_seq_id[index], batch.seq_id[index][0] = 1, row
                batch.logits[index] = 0
            for index in wanted:
                batch.logits[index] = 1
            status = llama.llama_decode(self._context, batch)
            if status != 0:
                raise RuntimeError(f"llama_decode: {status}")
        finally:
            llama.llama_batch_free(batch)
        if wanted:
            logits = llama.llama_get_logits(self._context)
            np.ctypeslib.as_array(logits, (len(wanted), self._vocab_size)).argmax(axis=-1).tolist()

    def drop(self) -> None:
        llama.llama_free(self._context)
        self._context = None


if __name__ == "__main__":
    main(LlamaCpp)
