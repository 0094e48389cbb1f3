# SPDX-License-Identifier: Apache-2.0
"""The kernels around verification compile for three GPU generations and do not spill.

All forms for Hopper (sm_90), the largest of each kernel for Ampere (sm_80) and Blackwell (sm_100).

No GPU is needed. Run as a script for the figures: `python tests/ops/test_step_compile.py 90`. A
process of its own compiles, since one that interprets Triton cannot.
"""

import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from compiling import compile_kernel, figures_of, print_figures

SLOT_VALUES = ("*i64", "*u8", "*i64", "*fp32", "*i32", "*fp32", "*fp32", "*i64")
POINTER_TYPES = {
    "address_ptr": "*i64",
    "ancestors_ptr": "*i64",
    "out_ancestors_ptr": "*i64",
    "order_ptr": "*i64",
    "sampled_ptr": "*i64",
    "emitted_ptr": "*i64",
    "positions_ptr": "*i64",
    "ids_ptr": "*i64",
    "roots_ptr": "*i64",
    "log_probs_ptr": "*fp32",
    "out_positions_ptr": "*i64",
    "tree_ancestors_ptr": "*i64",
    "stored_ancestors_ptr": "*i64",
    "below_ptr": "*i64",
    "lengths_ptr": "*i64",
    "rows_ptr": "*i64",
    "sizes_ptr": "*i64",
    "hidden_ptr": "*bf16",
    "states_ptr": "*bf16",
    "chain_only_ptr": "*u8",
    "wanted_ptr": "*u8",
    # Token, whether a chain, seed, temperature, top-k, top-p and min-p, and one to spare.
    **dict(zip((f"s{i}_ptr" for i in range(8)), SLOT_VALUES, strict=True)),
    **dict(zip((f"o{i}_ptr" for i in range(8)), ("*i32", *SLOT_VALUES[1:]), strict=True)),
    **dict.fromkeys(
        ("log_q_ptr", "noise_ptr", "temperature_ptr", "top_p_ptr", "min_p_ptr"), "*fp32"
    ),
}

LARGEST = (
    *("accept T=256", "store T=256", "chain T=256", "step T=256", "ddtree B=255", "best P=512"),
    *("compact, 2", "gather", "roots", "count", "slots"),
)
"""What is compiled for generations other than Hopper: of every kernel the largest form."""


def type_of(name: str) -> str:
    if name.endswith("_ptr"):
        return POINTER_TYPES.get(name, "*i32")
    if name in ("weight", "penalty"):
        return "fp32"
    # Addresses by value, of the gather, are not specialised.
    return "i64" if re.fullmatch(r"a\d", name) else "i32"


def aligned(name: str) -> bool:
    return name.endswith("_ptr") or name in ("stride_block", "stride_slot", "stride_h")


def kernels() -> Iterator[tuple[str, Any, dict[str, Any], dict[str, Any]]]:
    """Name, kernel, constants and options of what is launched at the shapes of Qwen3.6-27B."""
    from vllm_weaver.ops.accept import triton as accept
    from vllm_weaver.ops.compact import triton as compact
    from vllm_weaver.ops.gather import triton as gather
    from vllm_weaver.ops.noise import drawn
    from vllm_weaver.ops.propose import triton as propose
    from vllm_weaver.ops.step import triton as step
    from vllm_weaver.tree import ddtree_triton as ddtree

    warp = {"num_warps": 1}
    for rows in (64, 256):
        words = rows // 64
        constants = {"W": words, "BT": rows, "BJ": accept.SIBLINGS, "BD": accept.COLUMNS}
        yield f"accept T={rows}", accept.accept_kernel, constants, warp
        constants = {"W": words, "BT": rows}
        yield f"store T={rows}", propose.store_trees_kernel, constants, {"num_warps": 2}
        constants |= {"ALL": False, "tokens_stride_d": 1}
        yield f"chain T={rows}", propose.choose_chain_kernel, constants, {"num_warps": 2}
        constants = {"W": words, "H": 3, "A": 1, "BT": step.ROWS}
        yield f"step T={rows}", step.prepare_step_kernel, constants, {"num_warps": 2}
        constants = {
            "W": words,
            "BT": rows,
            "BP": min(rows, 64),
            "BL": ddtree.LEVELS,
            "BC": ddtree.COLUMNS,
            "stride_p": 1,
            "ids_p": 1,
            "roots_stride": 1,
        }
        yield f"ddtree B={rows - 1}", ddtree.ddtree_kernel, constants, warp
    for itemsize in (1, 2):
        constants = {
            "BLOCK_SIZE": 16,
            "K": 256,
            "ROW": 1024,
            "STEP": compact.STEP,
            "CHUNK": compact.CHUNK_BYTES // itemsize,
            "ELEMENT": compact._ELEMENTS[itemsize],
            "ALIGN": 16,
            "stride_k": 1,
            "path_stride_l": 1,
            "slots_stride_t": 1,
        }
        yield f"compact, {itemsize}-byte elements", compact.compact_kernel, constants, {}
    constants = {
        "WIDTH": 5120 * 2 // 8,
        "STRIDE": 5120 * 2 // 8,
        "STEP": gather.STEP,
        "CHUNK": gather.CHUNK_BYTES // 8,
        "ELEMENT": gather._ELEMENTS[8],
        "ALIGN": 16,
        "path_stride_l": 1,
    }
    yield "gather", gather.gather_rows_kernel, constants, {}
    yield "gather paths", gather.gather_paths_kernel, constants, {}
    constants = {"WIDTH": 5120, "CHUNK": propose.CHUNK, "COUNT": 7, "PATHS": True, "BL": 16}
    yield "roots", propose.load_roots_kernel, constants, {"num_warps": 4}
    yield "count", accept.count_kernel, {"BD": 16}, warp
    yield "slots", step.state_slots_kernel, {"LAST": True, "BR": 16}, warp
    for pool in (256, 512):
        constants = {"HALVINGS": drawn.HALVINGS, "BLOCK": pool}
        yield f"best P={pool}", drawn.best_kernel, constants, {"num_warps": 4}


def compile_all(arch: int, wanted: Callable[[str], bool]) -> dict[str, dict]:
    return {
        name: compile_kernel(kernel, arch, constants, type_of, aligned, **options)
        for name, kernel, constants, options in kernels()
        if wanted(name)
    }


@pytest.mark.parametrize("arch", [80, 90, 100])
def test_kernels_compile_without_spills(arch: int) -> None:
    """All of them for Hopper, the largest forms for the others."""
    for name, figure in figures_of(__file__, arch, *(() if arch == 90 else LARGEST)).items():
        assert figure["spilled_bytes"] == 0, (name, figure)
        if name.startswith(("compact", "gather")):
            assert figure["loads_of_16_bytes"] > 0, (name, figure)
        if name.startswith("ddtree"):
            # A step is two of them; a shuffle per halving would cost several times as much.
            assert figure["warp_reductions"] > 0, (name, figure)


if __name__ == "__main__":
    print_figures(compile_all)
