"""vLLM's own connector for decode benchmarks, which makes contexts up instead of computing them; for requests that are
called "decode" alone, so that prompts can be measured in the same engine.
"""

from __future__ import annotations

from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.decode_bench_connector import DecodeBenchConnector


class NoiseConnector(DecodeBenchConnector):
    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        if not request.request_id.startswith("decode"):
            return 0, False
        return super().get_num_new_matched_tokens(request, num_computed_tokens)
