# SPDX-License-Identifier: Apache-2.0
"""The compiled kernels of `csrc/`: where their library lies, and how it is loaded.

`python -m vllm_weaver.ops.cuda.build` compiles it; nothing is compiled otherwise. The module knows
no op.
"""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import torch


class NotBuilt(ValueError):
    """The library of the kernels has not been compiled from the present sources."""


class Library(NamedTuple):
    """A loaded library: the namespace of its ops, and which of `build.KINDS` it is."""

    ops: Any
    kind: str


def load(emulated: bool = False) -> Any:
    """The namespace of the compiled ops: for a GPU, or `emulated` for CPU tensors.

    Raises:
        NotBuilt: it is not compiled, or not from the present sources; the line says how to.
    """
    return load_library(emulated).ops


@cache
def load_library(emulated: bool = False) -> Library:
    """The same with its kind: for a GPU the full build, or a quick one where that alone is there.

    Raises:
        NotBuilt: as `load`.
    """
    # Imported here, so that the module can also be run.
    from vllm_weaver.ops.cuda.build import library_path

    kinds = ("emulator",) if emulated else ("full", "quick")
    for kind in kinds:
        path = library_path(kind)
        if path.exists():
            torch.ops.load_library(path)
            ops = torch.ops.vllm_weaver_emulator if emulated else torch.ops.vllm_weaver
            return Library(ops, kind)
    raise NotBuilt(
        f"the CUDA kernels are not built: python -m vllm_weaver.ops.cuda.build {kinds[0]}"
    )
