# SPDX-License-Identifier: Apache-2.0
"""The driver half: names the CPU as the active device, unless the machine has a GPU."""

from collections.abc import Callable
from typing import Any

import torch
from triton.backends.compiler import GPUTarget
from triton.backends.driver import DriverBase


class _NoDevice:
    """Device interface of a machine without one."""

    @staticmethod
    def synchronize() -> None:
        """Nothing runs asynchronously."""

    @staticmethod
    def current_device() -> int:
        """The only device."""
        return 0


class InterpreterDriver(DriverBase):
    """Driver of the interpreter."""

    @staticmethod
    def is_active() -> bool:
        """Inert on a GPU host."""
        return not torch.cuda.is_available()

    def get_current_target(self) -> GPUTarget:
        """A target that no compiler accepts."""
        return GPUTarget("cpu", 0, 1)

    def get_active_torch_device(self) -> torch.device:
        """Where tensors of kernels live."""
        return torch.device("cpu")

    def get_benchmarker(self) -> Callable[..., list[float]]:
        """Autotuning has nothing to measure."""
        return lambda *args, **kwargs: [0.0]

    def get_device_interface(self) -> type[_NoDevice]:
        """Stand-in for ``torch.cuda``."""
        return _NoDevice

    def map_python_to_cpp_type(self, ty: str) -> str:
        """Types of a launcher that is never built."""
        return ty

    def get_current_device(self) -> int:
        """The only device."""
        return 0

    def get_current_stream(self, *args: Any) -> int:
        """The only stream."""
        return 0

    def set_current_device(self, *args: Any) -> None:
        """Nothing to select."""
