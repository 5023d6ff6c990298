"""In which numbers a pool keeps K and V, and what that takes. Without torch: configurations are sized by it.

Owns: the names of the formats, and the bytes of a head's token in each. Never: where in a page something lies
(`quantised_pages`).
"""

from __future__ import annotations

from typing import Literal

CacheDtype = Literal["auto", "float32", "bfloat16", "int8", "fp8"]
"""auto: as the model computes them, which the next two say by name. int8, fp8 (e4m3): a byte each, and a scale for each
token of each head."""
SCALE_BYTES = 2
"""A bfloat16: the range of a float. What its few digits cost is nothing, as values are divided by the rounded scale."""


def is_quantised(cache_dtype: CacheDtype) -> bool:
    return cache_dtype in ("int8", "fp8")


def token_head_bytes(cache_dtype: CacheDtype, head_dim: int, itemsize: int) -> int:
    """Of K, or of V, of one token in one head. `itemsize`: of the model's numbers."""
    return head_dim + SCALE_BYTES if is_quantised(cache_dtype) else head_dim * itemsize
