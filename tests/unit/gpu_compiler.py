"""Compiles the engine's Triton kernels for a GPU that need not be there, and looks at the code for what makes one slow.

python gpu_compiler.py 90: as a program of its own, since Triton's interpreter must be off where kernels are defined.
"""

from __future__ import annotations

import sys

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, CompiledKernel

from baton.common.engine.gpu import decode_attention as decode
from baton.common.engine.gpu import varlen_attention as varlen
from baton.common.engine.gpu import write_kv as write

BF16, FP32 = torch.bfloat16, torch.float32
CASES = ((BF16, 64, 1), (BF16, 80, 2), (BF16, 128, 8), (BF16, 256, 4), (FP32, 64, 3))  # dtype, head size, group
SHARED_BYTES = 99 << 10
"""What a block may have on every GPU since Ampere."""
TYPES = (
    dict.fromkeys(("page_offsets", "page_ids", "kv_lens", "q_offsets"), "*i32")
    | dict.fromkeys(("part_sums", "part_tops", "part_totals", "sinks"), "*fp32")
    | {"slots": "*i64", "scale": "fp32", "softcap": "fp32"}
)
OF_POOL = ("query", "key", "value", "layer_pool", "out")
ALIGNED = ("_token", "_head", "_stride")  # by 16 elements, as head sizes are; Triton sees it when it launches


def compiled(
    kernel: triton.JITFunction, dtype: torch.dtype, arch: int, warps: int, constants: dict[str, object]
) -> CompiledKernel:
    pool = "*bf16" if dtype == BF16 else "*fp32"
    known = TYPES | dict.fromkeys(OF_POOL, pool) | dict.fromkeys(constants, "constexpr")
    signature = {name: known.get(name, "i32") for name in kernel.arg_names}
    aligned = [n for n, (name, kind) in enumerate(signature.items()) if kind[0] == "*" or name.endswith(ALIGNED)]
    source = ASTSource(kernel, signature, constants, {(n,): [["tt.divisibility", 16]] for n in aligned})
    return triton.compile(source, target=GPUTarget("cuda", arch, 32), options={"num_warps": warps, "num_stages": 2})


def kernels(arch: int, dtype: torch.dtype, head_dim: int, group: int) -> dict[str, CompiledKernel]:
    """By name, with the sizes that the product would launch them with."""
    dim = triton.next_power_of_2(head_dim)
    tile = varlen.tile_places(dtype, group, dim)
    head = {"HEAD_DIM": head_dim, "BLOCK_DIM": dim}
    splits = {"MAX_SPLITS": decode.MAX_SPLITS, "MIN_SPLIT_KEYS": decode.MIN_SPLIT_KEYS, "WINDOW": True}
    attention = {"KV_HEADS": 2, "GROUP": group, "PAGE_SIZE": 16, "SOFTCAP": True, "WINDOW": True, "WIDE": dtype == FP32}
    of_split = {"BLOCK_GROUP": 16, "BLOCK_KEYS": decode.block_keys(dtype, dim)}
    queries = {"BLOCK_TILE": tile, "BLOCK_QUERIES": tile // group, "BLOCK_KEYS": varlen.block_keys(dtype, dim)}
    eight = {"KV_HEADS": 8, "BLOCK_HEADS": 8, "PAGE_SIZE": 16}
    return {
        "split": compiled(decode.split_kernel, dtype, arch, 4, head | attention | splits | of_split),
        "merge": compiled(decode.merge_kernel, dtype, arch, 4, head | splits | {"Q_HEADS": 2 * group}),
        "varlen": compiled(varlen.varlen_kernel, dtype, arch, varlen.warps(tile), head | attention | queries),
        "write": compiled(write.write_kv_kernel, dtype, arch, write.warps(8 * dim), head | eight),
    }


def main(arch: int) -> None:
    for dtype, head_dim, group in CASES:
        for name, kernel in kernels(arch, dtype, head_dim, group).items():
            case, code = (name, dtype, head_dim), kernel.asm["ptx"]
            assert kernel.asm["cubin"], f"{case}: no machine code"
            assert kernel.metadata.shared <= SHARED_BYTES, f"{case}: {kernel.metadata.shared} bytes of shared memory"
            assert dtype == FP32 or name in ("merge", "write") or "mma" in code, f"{case}: no tensor cores"
            assert "cp.async" in code or "ld.global.v4" in code, f"{case}: loads less than 16 bytes at once"


if __name__ == "__main__":
    main(int(sys.argv[1]))
