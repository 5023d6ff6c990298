"""The Ray actor of a decode worker. Owns the choice of its core; everything else is `baton.transfer.worker`'s."""

from __future__ import annotations

from baton.common.config import ClusterConfig
from baton.common.engine.batch import ModelRunner
from baton.common.engine.chunk_predictor import ChunkPredictor
from baton.common.engine.core_api import EngineCore
from baton.common.engine.kv_feed import KvFeed
from baton.common.ids import Stamp
from baton.common.kv.pool import KvPool
from baton.common.kv.tiers.keys import PageKeys
from baton.decode.core import DecodeCore
from baton.transfer.worker import WorkerActor


class DecodeActor(WorkerActor):
    """Owns requests, asks prefill workers for their KV, and produces the answers."""

    def make_core(
        self,
        stamp: Stamp,
        pool: KvPool,
        runner: ModelRunner,
        config: ClusterConfig,
        max_context_len: int,
        page_keys: PageKeys | None,
        predictor: ChunkPredictor | None,
    ) -> EngineCore:
        own, transfer, tiers = config.decode_worker, config.transfer, config.kv.tiers
        explain = runner.guides.explain
        feed = KvFeed.of(pool, indexed=config.routing.indexed, published=config.kv_events.publish)
        return DecodeCore(
            stamp, pool, own, transfer, max_context_len, runner.vocab_size, tiers, page_keys, explain, feed, predictor
        )

    def has_tiers(self, config: ClusterConfig) -> bool:
        return config.kv.tiers.named

    def max_rows(self, config: ClusterConfig) -> int:
        return config.decode_worker.max_running_requests + config.decode_worker.max_sessions

    def step_tokens(self, config: ClusterConfig) -> int:
        return config.decode_worker.chunk_tokens

    def chunk_target_s(self, config: ClusterConfig) -> float:
        return config.decode_worker.chunk_target_s
