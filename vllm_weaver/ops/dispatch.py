# SPDX-License-Identifier: Apache-2.0
"""What the dispatchers of the ops share: a registry of backends per op, and one-line shape checks.

The module knows nothing of any op.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any, Generic, NoReturn, TypeVar

import torch
from torch import Tensor

Fn = TypeVar("Fn", bound=Callable[..., Any])


class Backends(Generic[Fn]):
    """The implementations of one op by name, and which of them each device type takes by default.

    "reference" is always there, and the default wherever no other backend claims the device. Any
    other one is registered as "module:function" and imported when it is first picked, so that an
    unused one costs nothing.
    """

    def __init__(self, op: str, reference: Fn) -> None:
        self.op = op
        self._functions: dict[str, Fn] = {"reference": reference}
        self._targets: dict[str, str] = {}
        self._defaults: dict[str, str] = {}

    @property
    def names(self) -> tuple[str, ...]:
        """Every backend that `pick` accepts, "reference" first."""
        return ("reference", *self._targets)

    def register(self, name: str, target: str, *, default_on: tuple[str, ...] = ()) -> None:
        """Add backend `name`, found at `target`; `default_on`: device types, such as "cuda"."""
        self._targets[name] = target
        self._defaults.update(dict.fromkeys(default_on, name))

    def pick(self, backend: str | None, device: torch.device) -> Fn:
        """Return the function of `backend`, or of the device's default where it is None.

        Raises:
            ValueError: the op has no such backend; the line lists those that it has.
        """
        name = self._defaults.get(device.type, "reference") if backend is None else backend
        function = self._functions.get(name)
        if function is None:
            target = self._targets.get(name)
            if target is None:
                raise ValueError(
                    f"{self.op}: unknown backend {name!r}; available: {', '.join(self.names)}"
                )
            module, _, attribute = target.partition(":")
            function = self._functions[name] = getattr(import_module(module), attribute)
        return function


def refuse(op: str, line: str) -> NoReturn:
    """Raise the ValueError of an op for bad input."""
    raise ValueError(f"{op}: {line}")


def expect_kernel_device(op: str, device: torch.device, interpreted: bool) -> None:
    """Check that Triton can run where an op's tensors are.

    Raises:
        ValueError: it cannot.
    """
    if device.type != "cuda" and not interpreted:
        refuse(
            op,
            f"the triton backend cannot run on {device.type} tensors without "
            'TRITON_INTERPRET=1: use backend="reference"',
        )


def expect_shapes(
    op: str, device: torch.device, expected: Mapping[str, tuple[Tensor, tuple[int, ...]]]
) -> None:
    """Check shapes and devices of an op's inputs, by name; reads metadata alone.

    Raises:
        ValueError: a tensor has another shape than expected, or is on another device.
    """
    for name, (tensor, shape) in expected.items():
        if tuple(tensor.shape) != shape:
            refuse(op, f"{name} has shape {list(tensor.shape)}, expected {list(shape)}")
        if tensor.device != device:
            refuse(op, f"{name} is on {tensor.device}, expected {device}: move it there")


def expect_indices(op: str, tensors: Mapping[str, Tensor]) -> None:
    """Check that index tensors, by name, are int32 (or int64).

    Raises:
        ValueError: one has another dtype.
    """
    for name, tensor in tensors.items():
        if tensor.dtype not in (torch.int32, torch.int64):
            refuse(op, f"{name} is {tensor.dtype}, expected int32")
