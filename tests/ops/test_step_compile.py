# SPDX-License-Identifier: Apache-2.0
"""The kernels around verification compile for three GPU generations and do not spill.

No GPU is needed. Run as a script for the figures: `python tests/ops/test_step_compile.py 90`. A
process of its own compiles, since one that interprets Triton cannot.
"""

import re
from collections.abc import Iterator
from typing import Any

import pytest
from compiling import compile_kernel, figures_of, print_figures

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
}


def type_of(name: str) -> str:
    if name.endswith("_ptr"):
        return POINTER_TYPES.get(name, "*i32")
    # Addresses by value, of the gather, are not specialised.
    return "i64" if re.fullmatch(r"a\d", name) else "i32"


def aligned(name: str) -> bool:
    return name.endswith("_ptr") or name in ("stride_block", "stride_slot", "stride_h")


def kernels() -> Iterator[tuple[str, Any, dict[str, Any], dict[str, Any]]]:
    """Name, kernel, constants and options of what is launched at the shapes of Qwen3.6-27B."""
    from vllm_weaver.ops.accept import triton as accept
    from vllm_weaver.ops.compact import triton as compact
    from vllm_weaver.ops.gather import triton as gather
    from vllm_weaver.ops.step import triton as step
    from vllm_weaver.tree import ddtree_triton as ddtree

    warp = {"num_warps": 1}
    for rows in (64, 256):
        words = rows // 64
        constants = {"W": words, "BT": rows, "BJ": accept.SIBLINGS, "BD": accept.COLUMNS}
        yield f"accept T={rows}", accept.accept_kernel, constants, warp
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
            "L": 16,
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


def compile_all(arch: int) -> dict[str, dict]:
    return {
        name: compile_kernel(kernel, arch, constants, type_of, aligned, **options)
        for name, kernel, constants, options in kernels()
    }


@pytest.mark.parametrize("arch", [80, 90, 100])
def test_kernels_compile_without_spills(arch: int) -> None:
    for name, figure in figures_of(__file__, arch).items():
        assert figure["spilled_bytes"] == 0, (name, figure)
        if name.startswith(("compact", "gather")):
            assert figure["loads_of_16_bytes"] > 0, (name, figure)
        if name.startswith("ddtree"):
            # A step is two of them; a shuffle per halving would cost several times as much.
            assert figure["warp_reductions"] > 0, (name, figure)


if __name__ == "__main__":
    print_figures(compile_all)
