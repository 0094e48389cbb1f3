# SPDX-License-Identifier: Apache-2.0
"""Finds where the plugin's code waits for the device, on a machine that has none."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

import vllm_weaver

PACKAGE = Path(vllm_weaver.__file__).parent
#: Operators that make the host wait for a GPU's result, or whose shape depends on it.
WAITING = {"_local_scalar_dense", "nonzero", "masked_select", "_unique2"}


class HostReads(TorchDispatchMode):
    """Records every waiting operator that the package calls, by file and line.

    Attributes:
        found: (file within the package, line, operator), each once.
    """

    def __init__(self) -> None:
        super().__init__()
        self.found: set[tuple[str, int, str]] = set()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name = func.overloadpacket.__name__
        masks = name in ("index", "index_put_", "index_put") and any(
            x is not None and x.dtype in (torch.bool, torch.uint8) for x in args[1]
        )
        # The number becomes a tensor on the host, and is copied before the host goes on.
        number = name in ("index_put_", "index_put") and args[2].dim() == 0
        if name in WAITING or masks or number:
            self._record(f"{name} with a mask" if masks else f"{name} of a number" * number or name)
        return func(*args, **(kwargs or {}))

    def _record(self, name: str) -> None:
        frame: Any = sys._getframe(1)
        while frame is not None:
            file = Path(frame.f_code.co_filename)
            if PACKAGE in file.parents:
                self.found.add((str(file.relative_to(PACKAGE)), frame.f_lineno, name))
                return
            if "/vllm/" in str(file):
                return  # vLLM's own
            frame = frame.f_back
