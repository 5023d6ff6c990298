"""`transformers`: the forward pass and the argmax that `generate` loops over; the rest of its loop is not counted, in
its favour. The cache is `generate`'s static one; where a model has sliding windows, of which that copies every token of
each step, its default.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from transformers import AutoModelForCausalLM, Cache, DynamicCache, StaticCache

from benchmarks.engine.cases import Case, prompt_ids
from benchmarks.engine.child import Step, main


class Transformers:
    def __init__(self, spec: Mapping[str, Any]) -> None:
        torch.set_num_threads(len(spec["cores"]))
        self._dtype = getattr(torch, spec["dtype"])
        self._model = AutoModelForCausalLM.from_pretrained(spec["directory"], dtype=self._dtype).eval()
        self._config = self._model.config
        self._slides = bool(getattr(self._config, "sliding_window", None))
        self._cache: Cache | None = None
        self.extra: dict[str, Any] = {}
        self.about = f"sdpa, {'dynamic' if self._slides else 'static'} cache in decode, whole prompts in prefill"

    def prepare(self, case: Case) -> Step:
        rows = [prompt_ids(row, case.tokens) for row in range(case.rows)]
        return self._decode(case) if case.kind == "decode" else self._prefill(torch.tensor(rows))

    def _prefill(self, ids: torch.Tensor) -> Step:
        def step() -> None:
            with torch.inference_mode():
                self._model(input_ids=ids, use_cache=True, logits_to_keep=1).logits[:, -1].argmax(-1).tolist()

        return step

    def _decode(self, case: Case) -> Step:
        config = self._config
        cache = DynamicCache(config=config) if self._slides else StaticCache(config=config, max_cache_len=case.longest)
        heads = config.num_key_value_heads
        size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        noise = torch.randn(case.rows, heads, case.tokens, size).to(self._dtype)
        for layer in range(config.num_hidden_layers):
            cache.update(noise, noise, layer)
        self._cache = cache
        token = torch.full((case.rows, 1), 100)

        def step() -> None:
            with torch.inference_mode():
                self._model(input_ids=token, cache=cache, use_cache=True).logits[:, -1].argmax(-1).tolist()

        return step

    def drop(self) -> None:
        self._cache = None


if __name__ == "__main__":
    main(Transformers)
