# SPDX-License-Identifier: Apache-2.0
"""The kernels from marginals to trees compile for three GPU generations within their limits.

All forms for Hopper (sm_90), the largest of each kernel for Ampere (sm_80) and Blackwell (sm_100).

No GPU is needed. Run as a script for the figures: `python tests/ops/test_weave_compile.py 90`. A
process of its own compiles, since one that interprets Triton cannot. Shapes are the published
adapter's at Qwen3.6-27B's width and vocabulary.
"""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from compiling import SHARED_LIMIT, compile_kernel, figures_of, print_figures

V, E, R, D, P, C = 248_320, 5120, 2048, 15, 512, 8
FLOAT = dict.fromkeys(
    (
        *("x_ptr", "squares_ptr", "add_ptr", "out_squares_ptr", "part_ptr", "q_ptr", "rope_ptr"),
        *("scores_ptr", "prefix_squares_ptr"),
        *("top_ptr", "total_ptr", "best_ptr", "log_probs_ptr"),
    ),
    "*fp32",
)
INTEGER = dict.fromkeys(
    (
        *("add_index_ptr", "slot_ptr", "ticket_ptr", "path_ptr", "count_ptr"),
        *("roots_ptr", "list_ptr"),
    ),
    "*i32",
)
SCALARS = dict.fromkeys(("eps", "weight", "penalty"), "fp32")
TYPES = {**FLOAT, **INTEGER, **SCALARS, "ids_ptr": "*i64"}
Kernel = tuple[str, Any, dict[str, Any], dict[str, Any], dict[str, int]]

LARGEST = (
    *("pool scan fp32", "pool select bf16", "qkv, 4 rows", "swiglu, 4 rows", "attention, RoPE"),
    *("score and grow, tables, noise, G=8", "score and grow, raw", "start", "rank rows, T=128"),
)
"""What is compiled for generations other than Hopper: of every kernel the largest forms, of the
adapter's layers one with tensor cores and one without, of the growth one with noise and one without
tables."""


def type_of(name: str, types: dict[str, Any]) -> Any:
    return types.get(name, "*bf16" if name.endswith("_ptr") else "i32")


def aligned(name: str) -> bool:
    return name.endswith("_ptr") or name[2:] in ("stride_r", "stride_t")


def pool_kernels() -> Iterator[Kernel]:
    from vllm_weaver.ops.pool import triton as pool

    groups = -(-V // pool.GROUP)
    subs = {"SUBS": pool.GROUP // pool.SUBGROUP, "SUB": pool.SUBGROUP}
    for name, narrow in (("bf16", True), ("fp32", False)):
        types = dict.fromkeys(("logits_ptr", "group_ptr", "subgroup_ptr"), f"*{name}")
        scan = {"GROUPS": pool.GROUPS_PER_CHUNK, **subs}
        warps = {"num_warps": pool.SCAN_WARPS}
        yield f"pool scan {name}", pool.scan_kernel, scan, TYPES | types, warps
        chunks = pool.triton.cdiv(groups, pool.GROUPS_PER_CHUNK)
        select = {
            **subs,
            "P1": P,
            "PB": P,
            "GB": pool.triton.next_power_of_2(groups),
            "CB": pool.triton.next_power_of_2(chunks),
            "NARROW": narrow,
        }
        warps = {"num_warps": pool.SELECT_WARPS}
        yield f"pool select {name}", pool.select_kernel, select, TYPES | types, warps


def adapter_kernels(arch: int) -> Iterator[Kernel]:
    import torch
    import triton

    from vllm_weaver.adapter import triton as adapter
    from vllm_weaver.adapter.tiling import choose_tiling

    # Tall tiles on the architecture that is measured: they are the ones that take long to compile.
    for rows in (4, 16, 64) if arch == 90 else (4,):
        J = R // choose_tiling(rows, R, R, torch.bfloat16).block_o
        # Name, inputs, outputs, and what the layer has beside its product.
        layers = (
            ("input", E, R, dict(J=1, BIAS=True, ADD=2, SQUARES=True, NEXT=True)),
            ("qkv", R, 3 * R, dict(J=J, BIAS=True, CACHE=True)),
            ("output", R, R, dict(ADD=1, SQUARES=True, NEXT=True)),
            ("gelu", R, R, dict(J=J, BIAS=True, ACTIVATION=1)) if arch == 90 else None,
            ("swiglu", R, R, dict(J=J, BIAS=True, ACTIVATION=3)),
            ("query", R, E, dict(J=J, BIAS=True)),
        )
        for name, inputs, outputs, extra in filter(None, layers):
            tiling = choose_tiling(rows, inputs, outputs, torch.bfloat16, name == "swiglu")
            lines = triton.cdiv(inputs * 2, tiling.splits * adapter.CACHE_LINE)
            given = dict.fromkeys(("BIAS", "CACHE", "SQUARES", "NEXT", "WIDEN"), False)
            constants = {
                **given,
                **dict.fromkeys(("J", "ACTIVATION", "ADD"), 0),
                **extra,
                "K": inputs,
                "M": outputs,
                "OUT": outputs - (2 * R if extra.get("CACHE") else 0),
                "JB": triton.next_power_of_2(extra.get("J") or 1),
                "SPLITS": tiling.splits,
                "BO": tiling.block_o,
                "BN": tiling.block_n,
                "BK": tiling.block_k,
                "DOTS": tiling.dots,
                "LINES": triton.next_power_of_2(lines),
                "OVERLAP": arch >= 90,
            }
            types = {"out_ptr": "*bf16" if name in ("gelu", "swiglu") else "*fp32"}
            types |= {"x_ptr": "*bf16", "bias_ptr": "*fp32"}
            options = {"num_warps": tiling.num_warps, "num_stages": tiling.num_stages}
            label = f"{name}, {rows} rows {tuple(tiling)}"
            yield label, adapter.linear_kernel, constants, TYPES | types, options
    for rope in (False, True):
        constants = {
            **dict(GROUP=4, D=D, H=16, HD=128, LB=32, HB=128),
            **dict(ROPE=rope, OVERLAP=arch >= 90),
        }
        label = f"attention, {'RoPE' if rope else 'no RoPE'}"
        yield label, adapter.attention_kernel, constants, TYPES, {"num_warps": 4}


def weave_kernels(arch: int) -> Iterator[Kernel]:
    import torch

    from vllm_weaver.adapter.tiling import choose_scores, choose_tiling
    from vllm_weaver.ops.noise.drawn import HALVINGS
    from vllm_weaver.tree import rank_triton
    from vllm_weaver.tree.triton import Frontier, TreeRows
    from vllm_weaver.weave import arguments as given
    from vllm_weaver.weave import triton as weave

    frontier = Frontier("*i64", "*i32", "*i32")
    tree = TreeRows(*["*i32"] * 4, ancestors="*i64")
    entries = given.Entries("*i32", "*i32", "*fp32")
    strides = "i32", "i32"
    floats = given.ByDepth("*fp32", *strides)
    drawn = given.Noise(floats, "*fp32", "*i32", "*fp32", "*fp32")
    tables = given.InputTables("*bf16", "*bf16", "*bf16")
    inputs = given.StepInputs(*["*i32"] * 5, x="*fp32", scaled="*bf16", squares="*fp32")
    growth = given.Growth(tree, frontier, "*fp32", tables, entries, inputs, "i32")
    types = TYPES | {
        **dict(tree=tree, out=tree, growth=growth),
        "query": given.Query("*fp32", "*fp32", "*bf16", "*bf16", "fp32"),
        **dict(ids=given.ByDepth("*i64", *strides), logits=floats, noise=None),
        "h_draft": given.ByDepth("*bf16", *strides),
    }
    for budget, group in ((15, 1), (63, 4), (127, 8)):
        rows = budget + 1
        words = -(-rows // 64)
        places = weave.triton.next_power_of_2(16 * group * C)
        sizes = {
            "sizes": given.Sizes(rows, words, D, group, R, 2048, P, C, places),
            "OVERLAP": arch >= 90,
        }
        blocks = R // choose_tiling(group, R, R, torch.bfloat16).block_o
        for kind, K, J, noise in (
            ("tables", R, blocks, False),
            ("tables, noise", R, blocks, True),
            ("raw", E, 0, False),
        ):
            if kind == "raw" and group != 4:
                continue
            tiling = choose_scores(K, 1, group, P)
            constants = {
                **sizes,
                **dict(LIMIT=rows, BP=tiling.candidates, K=K, BK=tiling.block_k, J=J),
                **dict(HALVINGS=HALVINGS),
            }
            warps = {"num_warps": tiling.num_warps}
            name = f"score and grow, {kind}, G={group}"
            noised = types | {"noise": drawn if noise else None}
            yield name, weave.score_and_grow_kernel, constants, noised, warps
        if group == 4:
            constants = {**sizes, "WIDTH": E}
            yield "start", weave.start_kernel, constants, types, {"num_warps": 4}
        name = f"rank rows, T={rows}"
        constants = dict(T=rows, TB=rows, W=words, ROWS=16, BLOCK=min(16, rows))
        yield name, rank_triton.rank_rows_kernel, constants, types, {"num_warps": 4}


def compile_all(arch: int, wanted: Callable[[str], bool]) -> dict[str, dict]:
    kernels = (*pool_kernels(), *adapter_kernels(arch), *weave_kernels(arch))
    return {
        name: compile_kernel(
            kernel, arch, constants, lambda x, types=types: type_of(x, types), aligned, **options
        )
        for name, kernel, constants, types, options in kernels
        if wanted(name)
    }


@pytest.mark.parametrize("arch", [80, 90, 100])
def test_kernels_compile_within_limits(arch: int) -> None:
    """All of them for Hopper, the largest forms for the others."""
    for name, figure in figures_of(__file__, arch, *(() if arch == 90 else LARGEST)).items():
        # The loops of filters hold two bounds more than fit.
        assert figure["spilled_bytes"] <= (16 if "noise" in name else 0), (name, figure)
        assert figure["shared_bytes"] <= SHARED_LIMIT[arch], (name, figure)


if __name__ == "__main__":
    print_figures(compile_all)
