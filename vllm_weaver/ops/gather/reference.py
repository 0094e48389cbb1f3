# SPDX-License-Identifier: Apache-2.0
"""Path rows to the front in plain PyTorch: the definition."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from vllm_weaver.ops.slots import repeat_first


def gather_rows_reference(
    sources: Sequence[Tensor], starts_R: Tensor, path_RL: Tensor, length_R: Tensor
) -> None:
    """The definition of `vllm_weaver.ops.gather_rows`, which has the tensor table."""
    step_L = torch.arange(path_RL.shape[1], device=path_RL.device)
    moves_RL = (step_L < length_R[:, None]) & (path_RL > step_L)
    source_RL = starts_R[:, None].long() + path_RL
    target_RL = starts_R[:, None].long() + step_L
    source, target = repeat_first(moves_RL.flatten(), source_RL.flatten(), target_RL.flatten())
    for rows in sources:
        # float8 types have no indexed write.
        bits = rows.view(torch.uint8) if rows.itemsize == 1 else rows
        bits[target] = bits[source]


def gather_paths_reference(
    sources: Sequence[Tensor], starts_R: Tensor, path_RL: Tensor, length_R: Tensor
) -> Tensor:
    """The definition of `vllm_weaver.ops.gather_paths`, which has the tensor table."""
    step_L = torch.arange(path_RL.shape[1], device=path_RL.device)
    node_RL = torch.where(step_L < length_R[:, None], path_RL, 0)
    index = (starts_R[:, None].long() + node_RL).flatten()
    return torch.stack([source.index_select(0, index) for source in sources])
