# SPDX-License-Identifier: Apache-2.0
"""Candidate pools in plain PyTorch: the definition."""

import torch
from torch import Tensor

_MAGNITUDE = 0x7FFFFFFF


def top_pool_reference(
    logits_NV: Tensor, count: int, out: tuple[Tensor, Tensor, Tensor] | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """The definition of `vllm_weaver.ops.pool.top_pool`, which has the tensor table."""
    # Adding 0 makes the negative zero positive.
    values_NV = (logits_NV.float() + 0.0).nan_to_num(-torch.inf, torch.inf, -torch.inf)
    # The bits of a negative float, turned over, order as an integer. Distinct keys make `topk`,
    # which promises nothing about ties, stable.
    bits_NV = values_NV.view(torch.int32)
    order_NV = torch.where(bits_NV < 0, bits_NV ^ _MAGNITUDE, bits_NV).long()
    column_V = torch.arange(values_NV.shape[1], device=values_NV.device)
    keys_NV = order_NV * 2**32 + (_MAGNITUDE - column_V)
    ids_NP = keys_NV.topk(count, dim=1).indices
    logits_NP = values_NV.gather(1, ids_NP)
    total_N1 = values_NV.logsumexp(1, keepdim=True)
    log_probs_NP = torch.where(logits_NP > -torch.inf, logits_NP - total_N1, -torch.inf)
    if out is None:
        return ids_NP, logits_NP, log_probs_NP
    for buffer, value in zip(out, (ids_NP, logits_NP, log_probs_NP), strict=True):
        buffer.copy_(value)
    return out
