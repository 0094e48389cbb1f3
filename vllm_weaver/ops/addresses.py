# SPDX-License-Identifier: Apache-2.0
"""Base addresses of tensors in a table on their device: how one launch reaches many layers.

The module knows nothing of what the tensors hold.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import Tensor

from vllm_weaver.ops.dispatch import refuse


def address_table(op: str, tensors: Sequence[Tensor]) -> Tensor:
    """Addresses [tensors] int64, on their device; the same set of tensors gives the same table.

    A new set is copied to the device, which a graph capture does not allow: see a set once before.

    Raises:
        ValueError: a tensor does not start at 16 bytes, or is on another device than the first.
    """
    device = tensors[0].device
    for tensor in tensors:
        if tensor.data_ptr() % 16:
            refuse(op, f"a tensor of shape {list(tensor.shape)} does not start at 16 bytes")
        if tensor.device != device:
            refuse(op, f"tensors are on {device} and on {tensor.device}: move them together")
    return _table(tuple(tensor.data_ptr() for tensor in tensors), device)


@lru_cache(maxsize=256)
def _table(addresses: tuple[int, ...], device: torch.device) -> Tensor:
    return torch.tensor(addresses, dtype=torch.int64, device=device)
