# SPDX-License-Identifier: Apache-2.0
"""Tensors on their way from the host to the device, beside what the device computes.

Knows devices and streams; not what moves. On a CPU nothing moves and nothing waits.
"""

from __future__ import annotations

import torch
from torch import Tensor


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """A tensor of the host on `device`, where the host does not wait for what a GPU computes.

    Memory that is not pinned would make it wait, so it is copied to pinned memory first.
    """
    if device.type != "cuda" or tensor.is_cuda:
        return tensor.to(device)
    pinned = tensor if tensor.is_pinned() else tensor.pin_memory()
    return pinned.to(device, non_blocking=True)


class Lead:
    """How far the host is ahead of a GPU: one unit of work, whose tensors move meanwhile.

    Tensors move in a stream of their own: in the stream of the computation they would stand behind
    all of it, and hold their pinned memory as long.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._copies = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._last: torch.cuda.Event | None = None

    @property
    def on_gpu(self) -> bool:
        """Whether anything moves at all."""
        return self._copies is not None

    def move(self, tensor: Tensor) -> Tensor:
        """A tensor of the host on the device, for whatever is launched from now on."""
        if self._copies is None:
            return tensor.to(self._device)
        computing = torch.cuda.current_stream(self._device)
        with torch.cuda.stream(self._copies):
            moved = to_device(tensor, self._device)
        computing.wait_stream(self._copies)
        # Its memory is that of the other stream, which must not reuse it before this one is done.
        moved.record_stream(computing)
        return moved

    def launched(self) -> None:
        """A unit was launched: wait until the one before it is done."""
        if self._copies is None:
            return
        mark = torch.cuda.Event(blocking=True)
        mark.record(torch.cuda.current_stream(self._device))
        if self._last is not None:
            self._last.synchronize()
        self._last = mark
