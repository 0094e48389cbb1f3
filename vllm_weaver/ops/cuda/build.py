# SPDX-License-Identifier: Apache-2.0
"""Compiles the kernels of `csrc/` into a cache folder.

    python -m vllm_weaver.ops.cuda.build [full | quick | emulator] [--force]

Needs a checkout, and nvcc 13 (for the emulator: g++). A GPU does not have to be there.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch

SOURCES = Path(__file__).parents[3] / "csrc"
SOURCE = SOURCES / "gdn_tree_verify.cu"
ARCHITECTURE = "90a"
KINDS = {
    "full": "every type and head dim",
    "quick": "bfloat16 rows, float32 states and K = 128 alone, compiled in a quarter of the time",
    "emulator": "for CPU tensors, with g++",
}
STABLE_ABI = "0x020B000000000000ULL"
"""PyTorch 2.11, the oldest whose stable ABI the kernels use."""

LIBRARIES = ("-Xlinker", "--no-as-needed", "-ltorch", "-ltorch_cpu")
"""`libtorch` brings PyTorch's CUDA part where there is one, and with it the current stream. A
linker drops it otherwise, since nothing of it is needed where there is none."""


class BuildError(RuntimeError):
    """What is missing for a build, or what the compiler said."""


def library_path(kind: str) -> Path:
    """Where the library of the present sources lies, built or not.

    Its name carries a digest of the sources, of what they are linked with and of PyTorch's version,
    so that an old one is never loaded.
    """
    made_with = (torch.__version__, ARCHITECTURE, *LIBRARIES)
    digest = hashlib.sha256(" ".join(made_with).encode())
    for path in sorted(p for p in SOURCES.rglob("*") if p.suffix in (".cu", ".cuh", ".h")):
        digest.update(path.read_bytes())
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "vllm-weaver"
    return cache / f"kernels-{kind}-{digest.hexdigest()[:16]}.so"


def find_nvcc() -> str:
    """Path of nvcc.

    Raises:
        BuildError: there is none.
    """
    home = os.environ.get("CUDA_HOME") or "/usr/local/cuda"
    nvcc = shutil.which("nvcc") or shutil.which("nvcc", path=f"{home}/bin")
    if nvcc is None:
        raise BuildError(
            f"no nvcc on PATH nor in {home}/bin: install CUDA 13's compiler, or set CUDA_HOME"
        )
    return nvcc


def compile_command(target: Path, kind: str, flags: Sequence[str] = ()) -> list[str]:
    """The compiler's command line; `flags` are added to it.

    Raises:
        BuildError: the sources or the compiler are missing.
    """
    if not SOURCE.exists():
        raise BuildError(f"{SOURCE} is not there: the kernels are built from a checkout")
    root = Path(torch.__file__).parent
    common = [
        f"-DTORCH_TARGET_VERSION={STABLE_ABI}",
        *("-std=c++17", "-shared", f"-I{root}/include"),
        f"-I{root}/include/torch/csrc/api/include",
        *flags,
        *("-o", str(target)),
    ]
    libraries = [f"-L{root}/lib", *LIBRARIES]
    if kind == "emulator":
        compiler = shutil.which("g++")
        if compiler is None:
            raise BuildError("no g++ on PATH: install it to build the emulator")
        options = ["-O1", "-fPIC", "-DWEAVER_EMULATE", "-Wno-unknown-pragmas"]
        return [compiler, *options, *common, "-x", "c++", str(SOURCE), *libraries]
    options = [
        *(["-DWEAVER_QUICK"] if kind == "quick" else []),
        *("-O3", "-lineinfo", "-Xcompiler", "-fPIC", "-split-compile", "0"),
        *("-gencode", f"arch=compute_{ARCHITECTURE},code=sm_{ARCHITECTURE}"),
    ]
    return [find_nvcc(), *options, *common, str(SOURCE), *libraries]


def build(kind: str = "full", force: bool = False) -> Path:
    """Compile the library unless it is there already, and return its path.

    Raises:
        BuildError: something is missing, or the compiler failed; the text says what.
    """
    path = library_path(kind)
    if path.exists() and not force:
        return path
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        made = Path(folder) / path.name
        done = subprocess.run(compile_command(made, kind), capture_output=True, text=True)
        if done.returncode != 0:
            raise BuildError(f"{done.args[0]} failed:\n{done.stdout}{done.stderr}")
        # In one step, since another process may be loading it.
        made.replace(path)
    return path


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    kinds = "; ".join(f"{kind}: {text}" for kind, text in KINDS.items())
    parser.add_argument("kind", nargs="?", default="full", choices=KINDS, help=kinds)
    parser.add_argument("--force", action="store_true", help="compile even if it is there")
    args = parser.parse_args()
    try:
        print(build(args.kind, args.force))
    except BuildError as error:
        raise SystemExit(str(error)) from None


if __name__ == "__main__":
    main()
