"""From a model's name to a runner on this process's GPU. Owns nothing."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from baton.common.engine.backends import AttentionChoice, choose_device_backends, importable
from baton.common.engine.gpu.device import CudaEngineDevice
from baton.common.engine.gpu.runner import DeviceRunner
from baton.common.engine.guiding import Guides, model_vocabulary
from baton.common.errors import ConfigError
from baton.common.kv.layout import Component
from baton.common.model.cache import Progress, silent
from baton.common.model.loading import Dtype, load_model, load_tokenizer, model_info


def load_on_cuda(
    spec: str,
    *,
    dtype: Dtype,
    num_pages: Mapping[Component, int],
    page_size: int,
    attention: AttentionChoice = "auto",
    graph_rows: int = 64,
    progress: Progress = silent,
) -> DeviceRunner:
    """On the first device that this process sees (CUDA_VISIBLE_DEVICES, which Ray sets by `placement.gpus`). Raises
    ConfigError."""
    if torch.version.cuda is None:
        reason = f"torch {torch.__version__} is a build for CPUs"
        raise ConfigError("model.device", "cuda", reason, "a CUDA build of torch, or model.device=cpu")
    if not torch.cuda.is_available():
        hint = "placement.gpus=1 where Ray assigns GPUs, or model.device=cpu"
        raise ConfigError("model.device", "cuda", "torch sees no CUDA device in this process", hint)
    if not importable("triton"):
        reason = "triton is not installed, by which pages are copied there"
        raise ConfigError("model.device", "cuda", reason, 'pip install "baton-pd[gpu]"')
    info, place = model_info(spec, progress), torch.device("cuda", torch.cuda.current_device())
    device = CudaEngineDevice(place)
    with device.stream():
        backends = choose_device_backends(attention, info.head_dim, getattr(torch, dtype), place)
    progress(f"bringing the weights to {torch.cuda.get_device_name(place)}")
    return DeviceRunner(
        load_model(spec, dtype, progress),
        info,
        device,
        backends,
        dtype=dtype,
        num_pages=num_pages,
        page_size=page_size,
        max_graph_rows=graph_rows,
        guides=Guides(lambda: model_vocabulary(load_tokenizer(spec), info.vocab_size, info.eos_token_ids)),
    )
