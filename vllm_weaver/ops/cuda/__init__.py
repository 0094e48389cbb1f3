# SPDX-License-Identifier: Apache-2.0
"""The compiled kernels of `csrc/`: where their library lies, and how it is loaded.

`python -m vllm_weaver.ops.cuda.build` compiles it; nothing is compiled otherwise. The module knows
no op.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch


class NotBuilt(ValueError):
    """The library of the kernels has not been compiled from the present sources."""


@cache
def load(emulated: bool = False) -> Any:
    """The namespace of the compiled ops: for a GPU, or `emulated` for CPU tensors.

    Raises:
        NotBuilt: it is not compiled, or not from the present sources; the line says how to.
    """
    # Imported here, so that the module can also be run.
    from vllm_weaver.ops.cuda.build import library_path

    kinds = ("emulator",) if emulated else ("full", "quick")
    for path in map(library_path, kinds):
        if path.exists():
            torch.ops.load_library(path)
            return torch.ops.vllm_weaver_emulator if emulated else torch.ops.vllm_weaver
    raise NotBuilt(
        f"the CUDA kernels are not built: python -m vllm_weaver.ops.cuda.build {kinds[0]}"
    )
