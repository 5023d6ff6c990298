"""The model runner of a worker, from its settings: which one, over how much memory, and how long chunks may be on it.

Owns: what is loaded, of a model or of the fake one, and the names of its weights. Never: runs a step for a request, or
keeps what it has made.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping

from baton.common.compat import rounded_weights
from baton.common.config import FAKE_MODEL, ClusterConfig
from baton.common.engine.batch import ModelRunner
from baton.common.engine.chunk_predictor import ChunkPredictor, Unfit
from baton.common.engine.fake_runner import fake_runner
from baton.common.engine.profiling import predictor_for
from baton.common.huge_pages import shared_huge_pages
from baton.common.kv.layout import Component, KvLayout
from baton.common.kv.pool import KvPool
from baton.common.kv.sizing import decided_counts
from baton.common.log import EventLog
from baton.transfer.process import ProcessSpec

_log = EventLog("baton.worker")

RunnerFactory = Callable[[ProcessSpec, Callable[[str], None]], ModelRunner]


def make_runner(spec: ProcessSpec, progress: Callable[[str], None]) -> ModelRunner:
    """The runner of the configured model, over as many pages and slots as are configured, and the null ones."""
    config, shared = spec.config, shares_pools(spec.role)
    if config.model.model == FAKE_MODEL:
        layout = KvLayout(config.kv.page_size)
        return fake_runner(_with_null(decided_counts(config.kv, layout)), config.kv.page_size, shared=shared)
    from baton.common.engine.torch_runner import TorchRunner  # heavy, and not needed for the fake model
    from baton.common.model.loading import model_info

    layout = model_info(config.model.model, progress).layout(config.kv.page_size)
    if config.model.device != "cpu":
        return _device_runner(config, layout, progress)
    runner = TorchRunner.load(
        config.model.model,
        dtype=config.model.dtype,
        num_pages=_with_null(decided_counts(config.kv, layout)),
        page_size=config.kv.page_size,
        page_layout=config.kv.page_layout,
        cache_dtype=config.kv.cache_dtype,
        attention=config.model.attention,
        forward_path=config.model.forward_path,
        weights=config.model.weights,
        threads=len(spec.cores) or _threads(config),
        shared=shared,
        progress=progress,
    )
    progress("reading the vocabulary")
    runner.guides.prepare()
    return runner


def _device_runner(config: ClusterConfig, layout: KvLayout, progress: Callable[[str], None]) -> ModelRunner:
    from baton.common.engine.gpu.loading import load_on_cuda

    runner = load_on_cuda(
        config.model.model,
        dtype=config.model.dtype,
        num_pages=_with_null(decided_counts(config.kv, layout)),
        page_size=config.kv.page_size,
        attention=config.model.attention,
        graph_rows=config.model.graph_rows,
        progress=progress,
    )
    progress("reading the vocabulary")
    runner.guides.prepare()
    return runner


def find_predictor(
    pool: KvPool, runner: ModelRunner, chunk_tokens: int, target_s: float, say: Callable[[str], None]
) -> tuple[ChunkPredictor | None, str]:
    """What chooses the length of chunks, if anything shall (`target_s`) and can; and what to tell of it."""
    if not target_s:
        return None, "off"
    say("measuring how long chunks take")
    predictor = predictor_for(pool, runner, chunk_tokens, target_s)
    if isinstance(predictor, Unfit):
        _log.warning("chunk_predictor_off", reason=predictor.reason, chunk_tokens=chunk_tokens)
        return None, f"failed: {predictor.reason}"
    _log.info("chunk_predictor", formula=str(predictor))
    return predictor, str(predictor)


def shares_pools(role: str) -> bool:
    """Whether other processes of this host may map this worker's pools. What prefill computes, they read; decode reads
    its own pool all day, and without huge pages in shared memory a step would lose up to a tenth of its speed."""
    return role == "prefill" or shared_huge_pages()


def model_identity(model: str) -> str:
    """Names the weights in the fingerprint of a process."""
    if model == FAKE_MODEL:
        return FAKE_MODEL
    from baton.common.model.loading import model_identity as of_files

    return of_files(model)


def weights_identity(model: str, weights: str) -> str:
    """Names the weights, in their format: models with one name compute the same KV."""
    if model == FAKE_MODEL:
        return FAKE_MODEL
    from baton.common.model.loading import weights_identity as of_files

    return "-".join([of_files(model), *rounded_weights(weights).values()])


def _threads(config: ClusterConfig) -> int:
    """Of a worker that is not pinned. Where nodes are not told apart, all workers are taken to be on this machine."""
    if config.placement.resources == "role":
        return config.placement.cpus
    return max(1, (os.cpu_count() or 1) // (config.prefill + config.decode))


def _with_null(counts: Mapping[Component, int]) -> dict[Component, int]:
    return {component: count + 1 for component, count in counts.items()}
