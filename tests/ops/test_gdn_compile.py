# SPDX-License-Identifier: Apache-2.0
"""The GDN and convolution kernels compile for three GPU generations, within limits of resources.

All forms for Hopper (sm_90), the largest of each kernel for Ampere (sm_80) and Blackwell (sm_100).

No GPU is needed. Run as a script for the figures: `python tests/ops/test_gdn_compile.py 90`. A
process of its own compiles, since one that interprets Triton cannot. Shapes are Qwen3.6-27B's.
"""

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from compiling import SHARED_LIMIT, compile_kernel, figures_of, print_figures

SPILL_LIMIT = {80: 512, 90: 128, 100: 576}
"""Bytes that a thread may keep in local memory, with Triton 3.6 to 3.9."""
DELAYED_SPILL_LIMIT = {80: 1024, 90: 448, 100: 1024}
"""The same with a commit in it, whose state stays in registers."""
COMMIT_SHUFFLES = {"commit of rows": 48, "commit of raw rows": 96}
"""In the exact commit: 3 for each of 8 rows of a thread, or 4 for each of 16, and 5 for a norm here
and there. Whole rows, as in decode, take 5 for each of 32."""

LARGEST = (
    *("verify R=16 T=64", "delayed verify R=16 T=64", "delayed verify R=16 T=16"),
    *("decode", "commit of", "conv"),
)
"""What is compiled for generations other than Hopper: the largest verification with and without a
commit in it, a small one whose commit must not spill, and all other kernels."""

RECURRENCES = ("delayed", "decode", "commit of")
"""Kernels that apply nodes one by one, and so add up a row of the state in decode's order."""
LANE = 4
"""Numbers of a float32 state that a thread loads at once."""

HK, HV, K, V, W = 16, 48, 128, 128, 4
C = 2 * HK * K + HV * V
POINTER_TYPES = {
    **dict.fromkeys(("slots_ptr", "num_nodes_ptr", "ancestors_ptr", "table_ptr"), "*i32"),
    **dict.fromkeys(("path_ptr", "length_ptr", "sources_ptr"), "*i32"),
    **dict.fromkeys(("boundary_slots_ptr", "boundary_length_ptr"), "*i32"),
    **dict.fromkeys(("pending_path_ptr", "pending_length_ptr", "pending_requests_ptr"), "*i32"),
    **dict.fromkeys(("pending_g_ptr", "pending_beta_ptr"), "*fp32"),
    **dict.fromkeys(("g_ptr", "beta_ptr", "stash_g_ptr", "stash_beta_ptr", "A_log_ptr"), "*fp32"),
    "state_ptr": "*fp32",
    "address_ptr": "*i64",
}


def type_of(name: str) -> str:
    if name.endswith("_ptr"):
        return POINTER_TYPES.get(name, "*bf16")
    return "fp32" if name == "scale" else "i32"


def aligned(name: str) -> bool:
    if name.startswith("pending_"):
        return name.endswith(("_ptr", "stride_r", "stride_t"))
    return name.endswith("_ptr") or name[2:] in ("stride_r", "stride_t") or name == "C"


def kernels(arch: int) -> Iterator[tuple[str, Any, dict[str, Any], dict[str, Any]]]:
    """Name, kernel, constants and options of what is launched at these shapes."""
    import torch

    from vllm_weaver.ops.conv import triton as conv
    from vllm_weaver.ops.gdn import triton as gdn
    from vllm_weaver.ops.gdn import triton_replay as replay
    from vllm_weaver.ops.gdn.triton_pending import held

    heads = {"STATE_STRIDE": HV * V * K, "HK": HK, "HV": HV, "K": K, "V": V}
    shapes = (1, 16), (16, 16), (1, 32), (16, 32), (1, 64), (16, 64)
    for (R, T), pending in itertools.product(shapes, (False, True)):
        tiling = gdn.choose_tiling(R, T, HV, V, K, torch.bfloat16, arch // 10)
        columns, hold = held(K, tiling.block_k, torch.float32)
        constants = {
            **heads,
            "BT": tiling.block_t,
            "NB": 1,
            "BV": tiling.block_v,
            "BK": tiling.block_k,
            "LEVELS": 4,
            "BY_DEPTH": True,
            "RAW_GATES": R == 16,
            "L2NORM": True,
            "STASH_ROWS": True,
            "PRECISE": False,
            "WHOLE": tiling.block_k == K,
            "WIDEN": False,
            "NATIVE": True,
            "PENDING": pending,
            "PENDING_BK": columns,
            "PENDING_L2NORM": True,
            "MOVED": True,
            "HELD": pending and hold,
        }
        options = {"num_warps": tiling.num_warps, "num_stages": tiling.num_stages}
        name = f"{'delayed ' if pending else ''}verify R={R} T={T} {tuple(tiling)}"
        yield name, gdn.tree_verify_kernel, constants, options

    warp = {"num_warps": 1, "num_stages": 3}
    decode = {**heads, "BV": replay.BLOCK_V, "RAW_GATES": True, "L2NORM": True}
    yield "decode", replay.decode_kernel, decode, warp
    for kind in ("rows", "raw rows"):
        tile = replay.choose_commit_tiling(kind == "raw rows", V, K, torch.float32)
        commit = {
            **heads,
            "CONV_STRIDE": (W - 1) * C,
            "CONV_STRIDE_W": C,
            "CONV_STRIDE_C": 1,
            "BV": tile.block_v,
            "BK": tile.block_k,
            "RAW": kind == "raw rows",
            "BIAS": False,
            "SILU": True,
            "L2NORM": True,
            "BOUNDARY": True,
            "LAYERS": True,
        }
        yield f"commit of {kind}", replay.commit_kernel, commit, warp
    strides = {
        "STATE_STRIDE": (W - 1) * C,
        "STATE_STRIDE_W": C,
        "STATE_STRIDE_C": 1,
    }
    tree = {
        **strides,
        "W": W,
        "BIAS": False,
        "SILU": True,
        "BT": conv.ROWS,
        "BC": conv.CHANNELS,
        "weight_stride_w": 1,
    }
    yield "conv", conv.tree_conv_kernel, tree, {"num_warps": 4}
    last = {**strides, "H": W - 1, "BC": conv.COMMIT_CHANNELS, "LAYERS": True}
    yield "conv commit", conv.conv_commit_kernel, last, {"num_warps": 4}


def compile_all(arch: int, wanted: Callable[[str], bool]) -> dict[str, dict]:
    figures = {}
    for name, kernel, constants, options in kernels(arch):
        if not wanted(name):
            continue
        types = {"state_ptr": "*bf16"} if name.startswith("conv") else {}
        if constants.get("RAW_GATES"):
            types |= {"g_ptr": "*bf16", "beta_ptr": "*bf16"}
        figure = figures[name] = compile_kernel(
            kernel,
            arch,
            constants,
            lambda argument, types=types: types.get(argument) or type_of(argument),
            aligned,
            **options,
        )
        if name.startswith(RECURRENCES):
            columns = constants.get("PENDING_BK") or constants.get("BK") or K
            shape = f"{constants['BV']}x{columns // LANE}"
            figure["neighbours_first"] = figure["row_sums"].get(shape)
    return figures


@pytest.mark.parametrize("arch", [80, 90, 100])
def test_kernels_compile_within_limits(arch: int) -> None:
    """All of them for Hopper, the largest forms for the others."""
    for name, figure in figures_of(__file__, arch, *(() if arch == 90 else LARGEST)).items():
        limit = DELAYED_SPILL_LIMIT if name.startswith("delayed") else SPILL_LIMIT
        assert figure["spilled_bytes"] <= limit[arch], (name, figure)
        assert figure["shared_bytes"] <= SHARED_LIMIT[arch], (name, figure)
        if arch == 90 and "T=64" in name:
            assert figure["wgmma"], (name, figure)
        if name == "decode" or name in COMMIT_SHUFFLES or ("delayed" in name and "T=16" in name):
            assert figure["spilled_bytes"] <= (0 if arch == 90 else 8), (name, figure)
        if name.startswith(RECURRENCES):
            # None: `lane_sums` begins with the two halves of a row.
            assert figure["neighbours_first"] == [1], (name, figure)
        if name.startswith("commit of"):
            assert figure["shuffles"] <= COMMIT_SHUFFLES[name], (name, figure)


if __name__ == "__main__":
    print_figures(compile_all)
