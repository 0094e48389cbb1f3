# SPDX-License-Identifier: Apache-2.0
"""The caches of a compaction: checked and grouped once, so that a step need not look at them.

The module knows nothing of vLLM or of layers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from vllm_weaver.ops.dispatch import refuse

OP = "compact_kv"


@dataclass(frozen=True)
class CacheGroup:
    """Caches of equal shape, strides and element size, which one launch reaches.

    Attributes:
        addresses: int64 [caches], on their device.
        shape: (block_size, HKV, D_h).
        strides: elements from block to block, slot to slot, head to head, and along a head.
        itemsize: bytes of an element.
        alignment: bytes at which every cache starts, at most 16.
    """

    addresses: Tensor
    shape: tuple[int, int, int]
    strides: tuple[int, ...]
    itemsize: int
    alignment: int


class CacheTable:
    """Caches whose rows move together, as `vllm_weaver.ops.compact_kv` takes them.

    Make one when the caches are allocated and pass it at every step: what `compact_kv` checks of a
    list of caches, and the copy of their addresses to the device, are then done once. The caches
    must stay where they are.

    Args:
        caches: [blocks, block_size, HKV, D_h] each, of any type and strides; one block size.

    Raises:
        ValueError: a cache of other dimensions, on another device, or of another block size.
    """

    def __init__(self, caches: Sequence[Tensor]) -> None:
        self.caches = tuple(caches)
        for index, cache in enumerate(self.caches):
            _check(index, cache, self.caches[0])
        self.device = self.caches[0].device if self.caches else None
        layouts: dict[tuple[object, ...], list[Tensor]] = {}
        for cache in self.caches:
            if cache.numel():
                layout = cache.shape[1:], cache.stride(), cache.itemsize
                layouts.setdefault(layout, []).append(cache)
        self.groups = [_group(members) for members in layouts.values()]


def _check(index: int, cache: Tensor, first: Tensor) -> None:
    name = f"caches[{index}]"
    if cache.dim() != 4:
        refuse(OP, f"{name} has shape {list(cache.shape)}, expected 4 dimensions")
    if cache.device != first.device:
        refuse(OP, f"{name} is on {cache.device}, expected {first.device}: move it there")
    if cache.shape[1] != first.shape[1]:
        refuse(
            OP,
            f"{name} has block size {cache.shape[1]}, caches[0] has {first.shape[1]}: "
            "slots are flat, so call once per block size",
        )


def _group(caches: list[Tensor]) -> CacheGroup:
    first = caches[0]
    addresses = tuple(cache.data_ptr() for cache in caches)
    return CacheGroup(
        _addresses(addresses, first.device),
        (first.shape[1], first.shape[2], first.shape[3]),
        first.stride(),
        first.itemsize,
        first.itemsize if any(x % 16 for x in addresses) else 16,
    )


@lru_cache(maxsize=64)
def _addresses(addresses: tuple[int, ...], device: torch.device) -> Tensor:
    return torch.tensor(addresses, dtype=torch.int64, device=device)
