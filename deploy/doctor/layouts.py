"""What the workers of one cluster must have in common to exchange KV, as far as it is known before a model is loaded.

Owns: `layout_of`. Never: loads weights; of files too large to read, the size and both ends stand for all of it. What
registered workers say of themselves (`KvMemory.fingerprint`) is more exact, and compared where a cluster runs.
"""

from __future__ import annotations

from pathlib import Path

import xxhash

from baton.common.compat import KV_VERSION, rounded_weights
from baton.common.config import FAKE_MODEL, ClusterConfig
from baton.common.model.spec import resolve_source

END_BYTES = 1 << 20


def layout_of(config: ClusterConfig) -> dict[str, str]:
    """Field -> value. Raises ConfigError when the model cannot be read here."""
    found = {
        "model": config.model.model,
        "dtype": config.model.dtype,
        "kv_page_size": str(config.kv.page_size),
        "kv_cache_dtype": config.kv.cache_dtype,
        "digest": config.transfer.digest,
        "kv_version": str(KV_VERSION),
        **rounded_weights(config.model.weights),
    }
    if config.model.model == FAKE_MODEL:
        return found
    source = resolve_source(config.model.model)
    from baton.common.model.loading import model_info  # heavy, and not needed for the fake model

    info = model_info(config.model.model)
    layout = info.layout(config.kv.page_size)
    sizes = {
        f"{one}_bytes": str(info.component_bytes(one, config.model.dtype, cache_dtype=config.kv.cache_dtype))
        for one in layout.components
    }
    found |= {
        "architecture": info.architecture,
        "layers": str(info.num_layers),
        "kv_heads": str(info.num_kv_heads),
        "kv_head_dim": str(info.head_dim),
        "kv_components": "+".join(layout.components),
        "window": str(layout.window),
        "files": digest_of_ends(source.path),
    }
    return found | sizes


def digest_of_ends(path: Path) -> str:
    """Of a file, or all files of a directory: names, sizes, and what stands at both ends of each."""
    digest = xxhash.xxh3_64()
    for file in sorted(path.iterdir()) if path.is_dir() else [path]:
        if not file.is_file():
            continue
        size = file.stat().st_size
        digest.update(f"{file.name if path.is_dir() else ''} {size} ".encode())
        with file.open("rb") as opened:
            digest.update(opened.read(END_BYTES))
            opened.seek(max(END_BYTES, size - END_BYTES))
            digest.update(opened.read(END_BYTES))
    return str(digest.hexdigest())
