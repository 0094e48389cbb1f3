# SPDX-License-Identifier: Apache-2.0
"""KV compaction in plain PyTorch: the definition (spec section 6).

The module knows nothing of vLLM or of layers.

Shape suffixes beyond the common legend: L rows of a path that can move, L = min(path width, T).
"""

from collections.abc import Sequence

import torch
from torch import Tensor


def compact_kv_reference(
    caches: Sequence[Tensor], slots: Tensor, path: Tensor, length: Tensor
) -> None:
    """The definition of `vllm_weaver.ops.compact.compact_kv`, which has the tensor table."""
    L = min(path.shape[1], slots.shape[1])
    if not caches or slots.shape[0] == 0 or L == 0:
        return
    path_RL = path[:, :L].long()
    source_RL = slots.gather(1, path_RL.clamp(min=0)).long()
    target_RL = slots[:, :L].long()
    step_L = torch.arange(L, device=path.device)
    moves_RL = (step_L < length[:, None]) & (path_RL >= 0) & (source_RL >= 0) & (target_RL >= 0)

    # A boolean selection would synchronise with the host. Each dead entry repeats the batch's first
    # live move, which writes the same bits twice; without one, all copy slot 0 onto itself.
    moves, source, target = moves_RL.flatten(), source_RL.flatten(), target_RL.flatten()
    first = moves.to(torch.uint8).argmax()
    any_move = moves.any()
    source = torch.where(moves, source, torch.where(any_move, source[first], 0))
    target = torch.where(moves, target, torch.where(any_move, target[first], 0))

    block_size = caches[0].shape[1]
    source_at = (source // block_size, source % block_size)
    target_at = (target // block_size, target % block_size)
    for cache in caches:
        # float8 types have no indexed write.
        bits = cache.view(torch.uint8) if cache.itemsize == 1 else cache
        bits[target_at] = bits[source_at]
