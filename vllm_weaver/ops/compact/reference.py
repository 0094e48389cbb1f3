# SPDX-License-Identifier: Apache-2.0
"""KV compaction in plain PyTorch: the definition (spec section 6).

The module knows nothing of vLLM or of layers.

Shape suffixes beyond the common legend: L rows of a path that can move, L = min(path width, T).
"""

import torch
from torch import Tensor

from vllm_weaver.ops.compact.table import CacheTable
from vllm_weaver.ops.slots import repeat_first


def compact_kv_reference(table: CacheTable, slots: Tensor, path: Tensor, length: Tensor) -> None:
    """The definition of `vllm_weaver.ops.compact.compact_kv`, which has the tensor table."""
    caches = table.caches
    L = min(path.shape[1], slots.shape[1])
    if not caches or slots.shape[0] == 0 or L == 0:
        return
    path_RL = path[:, :L].long()
    source_RL = slots.gather(1, path_RL.clamp(min=0)).long()
    target_RL = slots[:, :L].long()
    step_L = torch.arange(L, device=path.device)
    moves_RL = (step_L < length[:, None]) & (path_RL >= 0) & (source_RL >= 0) & (target_RL >= 0)

    source, target = repeat_first(moves_RL.flatten(), source_RL.flatten(), target_RL.flatten())

    block_size = caches[0].shape[1]
    source_at = (source // block_size, source % block_size)
    target_at = (target // block_size, target % block_size)
    for cache in caches:
        # float8 types have no indexed write.
        bits = cache.view(torch.uint8) if cache.itemsize == 1 else cache
        bits[target_at] = bits[source_at]
