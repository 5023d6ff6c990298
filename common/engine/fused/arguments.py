"""The structures of csrc/forward.cpp, field for field. Owns no memory: whoever fills them keeps what they point to."""

from __future__ import annotations

import ctypes
from ctypes import c_double, c_int64, c_void_p
from typing import ClassVar

Report = ctypes.CFUNCTYPE(None, c_int64)
TABLES = 2
WEIGHTS = ("query", "key", "value", "output", "gate", "up", "down")
NORMS = ("before_attention", "of_query", "of_key", "after_attention", "before_mlp", "after_mlp")
"""Of a layer, named as in `decoder.DecoderLayer`."""


class Weight(ctypes.Structure):
    """A packed matrix."""

    _fields_: ClassVar = [*((name, c_void_p) for name in ("packed", "scales", "bias")), ("outputs", c_int64)]


class RowNorm(ctypes.Structure):
    """A root-mean-square norm; all zero: none."""

    _fields_: ClassVar = [("weight", c_void_p), ("eps", c_double)]


class LayerArgs(ctypes.Structure):
    """A layer and where it has its K and V."""

    _fields_: ClassVar = [
        *((name, Weight) for name in WEIGHTS),
        *((name, RowNorm) for name in NORMS),
        *((name, c_void_p) for name in ("cosines", "sines", "pool")),
        *((name, c_int64) for name in ("pool_layers", "pool_layer", "table", "window")),
        *((name, c_double) for name in ("scale", "softcap")),
    ]


class ModelArgs(ctypes.Structure):
    """All of a model over its pools."""

    _fields_: ClassVar = [
        *((name, c_int64) for name in ("is_bf16", "num_layers", "hidden", "inner", "q_heads", "kv_heads", "head_dim")),
        *((name, c_int64) for name in ("vocabulary", "page_size", "page_layout", "gelu")),
        ("layers", ctypes.POINTER(LayerArgs)),
        ("embedding", c_void_p),
        ("embedding_scale", c_double),
        ("last_norm", RowNorm),
        ("head", Weight),
        ("logits_softcap", c_double),
    ]


class TableArgs(ctypes.Structure):
    """Where a step's rows have their tokens in one pool."""

    _fields_: ClassVar = [(name, c_void_p) for name in ("slots", "page_offsets", "page_ids")]


class PartTimes(ctypes.Structure):
    """Nanoseconds that the parts of all steps have taken; `rest`: norms, sums and copies."""

    _fields_: ClassVar = [(n, c_int64) for n in ("projections", "attention", "output", "gate", "down", "head", "rest")]


class StepArgs(ctypes.Structure):
    """One step."""

    _fields_: ClassVar = [
        ("model", ctypes.POINTER(ModelArgs)),
        *((name, c_int64) for name in ("num_tokens", "num_rows", "num_asked")),
        *((name, c_void_p) for name in ("input_ids", "positions", "q_offsets", "kv_lens", "asked")),
        ("tables", TableArgs * TABLES),
        ("reports", c_void_p),
        ("report", Report),
        ("workspace", c_void_p),
        ("logits", c_void_p),
        ("part_ns", ctypes.POINTER(PartTimes)),
    ]
