# SPDX-License-Identifier: Apache-2.0
"""The attention, compaction and noise kernels compile for three GPU generations.

Their main loops spill no registers. All forms for Hopper (sm_90), the largest of each kernel for
Ampere (sm_80) and Blackwell (sm_100).

No GPU is needed. Run as a script for the figures: `python tests/ops/test_attention_compile.py 90`.
A process of its own compiles, since one that interprets Triton cannot.
"""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from compiling import SHARED_LIMIT, compile_kernel, figures_of, print_figures

POINTER_TYPES = {
    "block_table_ptr": "*i32",
    "context_lens_ptr": "*i32",
    "num_nodes_ptr": "*i32",
    "ancestors_ptr": "*i32",
    **dict.fromkeys(("k_scale_ptr", "v_scale_ptr", "prefix_lse_ptr"), "*fp32"),
    "part_ptr": "*fp32",
    "part_lse_ptr": "*fp32",
    "address_ptr": "*i64",
    "slots_ptr": "*i64",
    **dict.fromkeys(("seeds_ptr", "positions_ptr", "ids_ptr"), "*i64"),
    **dict.fromkeys(("request_ptr", "depths_ptr", "top_k_ptr"), "*i32"),
    "path_ptr": "*i32",
    "length_ptr": "*i32",
}
SPILL_LIMIT = 512
"""Bytes a thread outside of the loop that matters."""
TAIL_SPILL_LIMIT = 16
"""Of the tail for many requests: timed, it was the fastest all the same."""
LARGEST = (
    *("attention bf16 cache=None D=256 page=784", "attention fp32"),
    *("merge", "tail D=256 (32, 32, 4)", "compact", "noise fp64=True", "drawn"),
)
"""What is compiled for generations other than Hopper: of every kernel the largest form, attention
in both precisions, and see :func:`largest`."""
FEW_ROWS = (2, 4, 8)
"""Of trees in large batches."""
FLOATS = ("scale_log2", "weight", "penalty")


def compile_for(
    kernel: Any,
    arch: int,
    element: str,
    constants: dict[str, Any],
    cache: str | None = None,
    **options: int,
) -> dict[str, Any]:
    """Compile with pointers to ``element`` where nothing else is known, ``cache`` for caches."""

    def type_of(name: str) -> str:
        if name in ("k_cache_ptr", "v_cache_ptr"):
            return f"*{cache or element}"
        if name.endswith("_ptr"):
            return POINTER_TYPES.get(name, f"*{element}")
        return "fp32" if name in FLOATS else "i32"

    def aligned(name: str) -> bool:
        strided = "stride" in name and not name.startswith("ancestors")
        strided = strided and name not in ("table_stride_r", "lse_stride_h", "slots_stride_r")
        return name.endswith("_ptr") or strided

    return compile_kernel(kernel, arch, constants, type_of, aligned, **options)


def few_name(rows: int) -> str:
    """Name of the attention of trees of so few rows."""
    return f"few rows of attention: {rows}"


def largest(arch: int) -> tuple[str, ...]:
    """Starts of the names of what is compiled for a generation other than Hopper."""
    return LARGEST if arch < 89 else (*LARGEST, "attention bf16 cache=fp8e4nv")


def kernels(arch: int) -> Iterator[tuple[str, Any, str, dict[str, Any], dict[str, Any]]]:
    """Name, kernel, element, constants, and what else :func:`compile_for` is given."""
    import torch

    from vllm_weaver.ops.attention import tail
    from vllm_weaver.ops.attention import triton as attention
    from vllm_weaver.ops.attention.tiling import LEAN_TAIL, QUICK_TAIL, choose_tiling
    from vllm_weaver.ops.compact import triton as compact
    from vllm_weaver.ops.noise import drawn
    from vllm_weaver.ops.noise import triton as noise

    types = {torch.bfloat16: "bf16", torch.float32: "fp32"}
    for dtype, head_dim, page, cache in (
        (torch.bfloat16, 128, 16, None),
        (torch.bfloat16, 256, 16, None),
        (torch.bfloat16, 256, 784, None),
        (torch.bfloat16, 256, 784, "fp8e4nv"),
        (torch.float32, 64, 16, None),
    ):
        if cache is not None and arch < 89:
            continue
        # 64 rows with 6 query heads to a key/value head, as in Qwen3.6-27B.
        tiling = choose_tiling(64 * 6, head_dim, dtype, arch)
        grouped = {"G": 6, "K": head_dim, "BLOCK_N": tiling.block_n}
        name = f"attention {types[dtype]} cache={cache} D={head_dim} page={page} {tuple(tiling)}"
        constants = {
            **grouped,
            "PAGE": page,
            "BLOCK_M": tiling.block_m,
            "SPLIT": True,
            "SAME_ROWS": True,
            "FP8": cache is not None,
            "DOT_FLOAT32": False,
        }
        options = {"num_warps": tiling.num_warps, "num_stages": tiling.num_stages, "cache": cache}
        yield name, attention.tree_attention_kernel, types[dtype], constants, options
    for rows in FEW_ROWS:
        tiling = choose_tiling(rows * 6, 256, torch.bfloat16, arch)
        constants = {
            **{"G": 6, "K": 256, "BLOCK_N": tiling.block_n, "PAGE": 784},
            **{"BLOCK_M": tiling.block_m, "SPLIT": False, "SAME_ROWS": True},
            **{"FP8": False, "DOT_FLOAT32": False},
        }
        options = {"num_warps": tiling.num_warps, "num_stages": tiling.num_stages}
        yield few_name(rows), attention.tree_attention_kernel, "bf16", constants, options
    grouped = {"G": 6, "K": 256, "BLOCK_N": 64}
    constants = {**grouped, "CHUNK": attention.MERGE_CHUNK}
    yield "merge D=256", attention.merge_splits_kernel, "bf16", constants, {}
    for form in (QUICK_TAIL, LEAN_TAIL):
        blocks = {"BLOCK_M": form.block_m, "BLOCK_N": form.block_n, "DOT_FLOAT32": False}
        name, constants = f"tail D=256 {tuple(form)}", {**grouped, **blocks}
        yield name, tail.attend_tail_kernel, "bf16", constants, {"num_warps": form.num_warps}
    constants = {
        "BLOCK_SIZE": 16,
        "K": 256,
        "ROW": 1024,
        "STEP": compact.STEP,
        "CHUNK": compact.CHUNK_BYTES // 2,
        "ELEMENT": compact._ELEMENTS[2],
        "ALIGN": 16,
        "stride_k": 1,
        "path_stride_l": 1,
        "slots_stride_t": 1,
    }
    yield "compact", compact.compact_kernel, "bf16", constants, {}
    for use_fp64 in (False, True):
        strides = dict.fromkeys(("seeds_stride_r", "positions_stride_d", "ids_stride_p"), 1)
        constants = {**strides, "USE_FP64": use_fp64, "BLOCK": noise.BLOCK}
        yield f"noise fp64={use_fp64}", noise.keyed_gumbel_kernel, "fp32", constants, {}
    constants = {"HALVINGS": drawn.HALVINGS, "BLOCK": 512}
    yield "drawn P=512", drawn.drawn_kernel, "fp32", constants, {}


def compile_all(arch: int, wanted: Callable[[str], bool]) -> dict[str, dict]:
    return {
        name: compile_for(kernel, arch, element, constants, **options)
        for name, kernel, element, constants, options in kernels(arch)
        if wanted(name)
    }


@pytest.mark.parametrize("arch", [80, 90, 100])
def test_kernels_compile_without_spills(arch: int) -> None:
    """All of them for Hopper, the largest forms for the others."""
    import torch

    from vllm_weaver.ops.attention.tiling import choose_tiling

    for name, figure in figures_of(__file__, arch, *(() if arch == 90 else largest(arch))).items():
        assert figure["shared_bytes"] <= SHARED_LIMIT[arch], (name, figure)
        if arch == 90 and name.startswith("attention bf16"):
            # Between the loop over whole tiles and the one over the rest registers may be spilled.
            whole, _ = figure["wgmma_loops"]
            assert whole["spill_accesses"] == 0 and whole["instructions"] < 600, (name, figure)
            assert figure["spilled_bytes"] <= SPILL_LIMIT, (name, figure)
        elif not name.startswith("attention bf16"):
            limit = TAIL_SPILL_LIMIT if name == "tail D=256 (32, 32, 4)" else 0
            limit = SPILL_LIMIT if name.startswith("few rows") else limit
            assert figure["spilled_bytes"] <= limit, (name, figure)
        if name.startswith("few rows of attention"):
            # As many fit a multiprocessor as the choice of splits counts on.
            rows = next(x for x in FEW_ROWS if few_name(x) == name)
            tiling = choose_tiling(rows * 6, 256, torch.bfloat16, arch)
            fit = tiling.per_multiprocessor(256, 2)
            assert fit == (2 if tiling.block_m <= 32 else 1), name
            threads = 32 * tiling.num_warps
            assert fit <= 65536 // (threads * figure["registers"]), (name, figure)
            assert fit * figure["shared_bytes"] <= SHARED_LIMIT[arch], (name, figure)
            loops = figure["wgmma_loops"][:1]
            assert all(loop["spill_accesses"] == 0 for loop in loops), (name, figure)
        if arch == 80:
            assert figure["spilled_bytes"] <= SPILL_LIMIT, (name, figure)


if __name__ == "__main__":
    print_figures(compile_all)
