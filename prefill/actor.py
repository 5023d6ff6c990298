"""The Ray actor of a prefill worker. Owns the choice of its core; everything else is `baton.transfer.worker`'s."""

from __future__ import annotations

from baton.common.config import ClusterConfig
from baton.common.engine.batch import ModelRunner
from baton.common.engine.chunk_predictor import ChunkPredictor
from baton.common.engine.core_api import EngineCore
from baton.common.engine.kv_feed import KvFeed
from baton.common.ids import Stamp
from baton.common.kv.pool import KvPool
from baton.common.kv.tiers.keys import PageKeys
from baton.prefill.core import PrefillCore
from baton.prefill.pipelining import LayerGroups
from baton.transfer.worker import WorkerActor


class PrefillActor(WorkerActor):
    """Computes prompts and hands their KV over."""

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
        worker = config.prefill_worker
        groups = LayerGroups.of(runner.memory, worker.layer_groups)
        feed = KvFeed.of(pool, indexed=config.routing.indexed, published=config.kv_events.publish)
        return PrefillCore(pool, worker, runner.vocab_size, groups, runner.guides.explain, feed, predictor)

    def max_rows(self, config: ClusterConfig) -> int:
        return config.prefill_worker.max_queued_requests

    def step_tokens(self, config: ClusterConfig) -> int:
        return config.prefill_worker.chunk_tokens

    def chunk_target_s(self, config: ClusterConfig) -> float:
        return config.prefill_worker.chunk_target_s
