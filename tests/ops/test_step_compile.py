# SPDX-License-Identifier: Apache-2.0
"""The kernels around verification compile for three GPU generations and do not spill.

No GPU is needed. Run as a script for the figures: `python tests/ops/test_step_compile.py 90`. A
process of its own compiles, since one that interprets Triton cannot.
"""

import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

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


def compile_kernel(kernel: Any, arch: int, constants: dict[str, Any], **options: int) -> dict:
    """Compile as a launch with aligned pointers would; read registers, memory and instructions."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    signature, aligned = {}, {}
    for index, name in enumerate(kernel.arg_names):
        if name in constants:
            signature[name] = "constexpr"
        elif name.endswith("_ptr"):
            signature[name] = POINTER_TYPES.get(name, "*i32")
            aligned[(index,)] = [["tt.divisibility", 16]]
        else:
            # Addresses by value, of the gather, are not specialised.
            signature[name] = "i64" if re.fullmatch(r"a\d", name) else "i32"
            if name in ("stride_block", "stride_slot", "stride_h"):
                aligned[(index,)] = [["tt.divisibility", 16]]
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=aligned)
    compiled = triton.compile(source, target=GPUTarget("cuda", arch, 32), options=options)
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        usage = subprocess.run(
            [tool, "--dump-resource-usage", file.name], capture_output=True, text=True, check=True
        ).stdout
    if "DUMP" in os.environ:
        Path(os.environ["DUMP"], f"{kernel.__name__}.ptx").write_text(compiled.asm["ptx"])
        Path(os.environ["DUMP"], f"{kernel.__name__}.cubin").write_bytes(compiled.asm["cubin"])
    found = dict(re.findall(r"(REG|STACK|LOCAL):(\d+)", usage))
    ptx = compiled.asm["ptx"]
    return {
        "registers": int(found["REG"]),
        "spilled_bytes": int(found["STACK"]) + int(found["LOCAL"]),
        "shared_bytes": compiled.metadata.shared,
        "loads_of_16_bytes": len(re.findall(r"ld\.global\S*\.v(?:4\.b32|2\.b64)", ptx)),
        "warp_reductions": len(re.findall(r"redux\.sync", ptx)),
    }


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
        name: compile_kernel(kernel, arch, constants, **options)
        for name, kernel, constants, options in kernels()
    }


@pytest.mark.parametrize("arch", [80, 90, 100])
def test_kernels_compile_without_spills(arch: int) -> None:
    pytest.importorskip("triton.backends.nvidia", reason="needs Triton with its NVIDIA backend")
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, __file__, str(arch)], env=env, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-2000:]
    figures = json.loads(done.stdout)
    for name, figure in figures.items():
        assert figure["spilled_bytes"] == 0, (name, figure)
        if name.startswith(("compact", "gather")):
            assert figure["loads_of_16_bytes"] > 0, (name, figure)
        if name.startswith("ddtree"):
            # A step is two of them; a shuffle per halving would cost several times as much.
            assert figure["warp_reductions"] > 0, (name, figure)


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[2]))
    print(json.dumps(compile_all(int(sys.argv[1])), indent=1))
