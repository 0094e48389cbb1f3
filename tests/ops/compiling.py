# SPDX-License-Identifier: Apache-2.0
"""Triton kernels compiled for a GPU that need not be there, and what they use of it.

A process of its own compiles, since one that interprets Triton cannot: a test module of this kind
is also a script, which prints the figures of all its kernels for one architecture. Tests compile
all of them for Hopper alone, and the largest forms of each kernel for the other generations: nearly
all of what can go wrong there goes wrong for the largest first, and compiling takes long.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

SHARED_LIMIT = {80: 163 * 1024, 90: 227 * 1024, 100: 227 * 1024}
"""Bytes of shared memory that one block may have."""


def compile_kernel(
    kernel: Any,
    arch: int,
    constants: dict[str, Any],
    type_of: Callable[[str], Any],
    aligned: Callable[[str], bool],
    **options: int,
) -> dict[str, Any]:
    """Compile a kernel as a launch would.

    Args:
        kernel: the Triton function.
        arch: compute capability times ten.
        constants: its constant arguments; all others are typed.
        type_of: Triton's name of an argument's type, by the argument's name; a named tuple of them
            where the argument is one, or None where it is None.
        aligned: whether an argument, by its name, is a multiple of 16 in every launch; of a tuple's
            members the pointers are.
        options: of the compiler.

    Returns:
        Registers and spilled bytes a thread, shared bytes a block; whether wgmma is used, how many
        loads of 16 bytes, reductions over a warp and shuffles there are; for each loop with wgmma
        its instructions and how many of them read or write spilled registers; for float32 sums over
        rows, by shape, the numbers that a thread adds up before threads exchange theirs.
    """
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    values: dict[Any, Any] = dict(constants)
    multiples = {}

    def typed(kind: Any, path: tuple[int, ...], multiple: bool) -> Any:
        if isinstance(kind, tuple):
            members = enumerate(kind)
            return type(kind)(*(typed(x, (*path, i), str(x).startswith("*")) for i, x in members))
        if kind is None:
            values[path] = None
            return "constexpr"
        if multiple:
            multiples[path] = [["tt.divisibility", 16]]
        return kind

    signature = {
        name: "constexpr" if name in constants else typed(type_of(name), (index,), aligned(name))
        for index, name in enumerate(kernel.arg_names)
    }
    source = ASTSource(fn=kernel, signature=signature, constexprs=values, attrs=multiples)
    compiled = triton.compile(source, target=GPUTarget("cuda", arch, 32), options=options)
    tools = Path(triton.__file__).parent / "backends/nvidia/bin"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()

        def output_of(tool: str, option: str) -> str:
            command = [tools / tool, option, file.name]
            return subprocess.run(command, capture_output=True, text=True, check=True).stdout

        ptx = compiled.asm["ptx"]
        usage = output_of("cuobjdump", "--dump-resource-usage")
        code = output_of("nvdisasm", "--print-code") if "wgmma" in ptx else ""
    found = dict(re.findall(r"(REG|STACK|LOCAL):(\d+)", usage))
    return {
        "registers": int(found["REG"]),
        "spilled_bytes": int(found["STACK"]) + int(found["LOCAL"]),
        "shared_bytes": compiled.metadata.shared,
        "wgmma": "wgmma" in ptx,
        "loads_of_16_bytes": len(re.findall(r"ld\.global\S*\.v(?:4\.b32|2\.b64)", ptx)),
        "warp_reductions": len(re.findall(r"redux\.sync", ptx)),
        "wgmma_loops": wgmma_loops(code),
        "shuffles": len(re.findall(r"shfl\.sync", ptx)),
        "row_sums": row_sums(compiled.asm["ttgir"]),
    }


def row_sums(code: str) -> dict[str, list[int]]:
    """Elements of a row in one thread, for sums over tensors of each shape; not of products."""
    blocked = r"^(#\w+) = #ttg\.blocked<\{sizePerThread = \[\d+, (\d+)\]"
    neighbours = {name: int(count) for name, count in re.findall(blocked, code, re.MULTILINE)}
    linear = r"^(#\w+) = #ttg\.linear<\{register = (\[.*?\]), lane"
    for name, registers in re.findall(linear, code, re.MULTILINE):
        neighbours[name] = 2 ** len(re.findall(r"\[\d+, [1-9]\d*\]", registers))
    found: dict[str, set[int]] = {}
    for shape, layout in re.findall(r"\}\) : \(tensor<(\d+x\d+)xf32, (#\w+)>\)", code):
        if layout in neighbours:
            found.setdefault(shape, set()).add(neighbours[layout])
    return {shape: sorted(counts) for shape, counts in found.items()}


def wgmma_loops(code: str) -> list[dict[str, int]]:
    """Loops of disassembled code that have wgmma and no other such loop inside, in their order."""
    labels: dict[str, int] = {}
    lines: list[str] = []
    loops: list[tuple[int, int]] = []
    for line in code.splitlines():
        if label := re.match(r"(\.L_x_\d+):", line):
            labels[label[1]] = len(lines)
        elif re.search(r"/\*[0-9a-f]{4,}\*/", line):
            lines.append(line)
            back = re.search(r"\bBRA\b.*`\((\.L_x_\d+)\)", line)
            if back and back[1] in labels:
                loops.append((labels[back[1]], len(lines)))
    found = []
    for first, last in loops:
        body = lines[first:last]
        within = any((a, b) != (first, last) and first <= a and b <= last for a, b in loops)
        if not within and any("HGMMA" in line for line in body):
            spills = sum(bool(re.search(r"\b(LDL|STL)\b", line)) for line in body)
            found.append({"instructions": len(body), "spill_accesses": spills})
    return found


def figures_of(file: str, arch: int, *names: str) -> dict[str, dict[str, Any]]:
    """Figures that the script ``file`` prints for ``arch``; skips where Triton cannot compile.

    Args:
        file: the script.
        arch: compute capability times ten.
        names: how the names of the wanted kernels begin; without them all kernels are wanted.
    """
    pytest.importorskip("triton.backends.nvidia", reason="needs Triton with its NVIDIA backend")
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, file, str(arch), *names], env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout)


def print_figures(
    compile_all: Callable[[int, Callable[[str], bool]], dict[str, dict[str, Any]]],
) -> None:
    """What the script does: figures for the architecture of its first argument.

    Further arguments say how the names of the wanted kernels begin; each must be the start of one.
    """
    sys.path.insert(0, str(Path(__file__).parents[2]))
    arch, *names = sys.argv[1:]
    starts = tuple(names) or ("",)
    figures = compile_all(int(arch), lambda name: name.startswith(starts))
    missing = [start for start in starts if not any(name.startswith(start) for name in figures)]
    if missing:
        sys.exit(f"no kernel's name begins with {missing}")
    print(json.dumps(figures, indent=1))
