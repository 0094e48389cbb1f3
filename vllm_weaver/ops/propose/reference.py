# SPDX-License-Identifier: Apache-2.0
"""What a proposal starts from and where its trees go, in plain PyTorch: the definition.

Shape legend: R requests of a batch; S request slots; N rows of hidden states, of width d; L rows of
a request on its path; D draft depth; T rows of a tree, root included; W words of ancestor bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

_WORD_BITS = 64


class PathRows(NamedTuple):
    """A batch of trees alone, T rows each, of which the first L in path order are kept.

    `rows` is T and `width` L; `positions` [>= R * T] are the batch's, `out_positions` [R * L] those
    of what is kept, and `out_rejected` [R] counts the kept rows that are off the path.
    """

    rows: int
    width: int
    positions: Tensor
    out_positions: Tensor
    out_rejected: Tensor


def load_roots_reference(
    hidden_Nd: Tensor,
    row_ends_R: Tensor,
    num_rejected_R: Tensor,
    slots_R: Tensor,
    sources: Sequence[Tensor],
    out_states: Tensor,
    targets: Sequence[Tensor],
    paths: PathRows | None,
) -> None:
    """The definition of `vllm_weaver.ops.load_roots`, which has the tensor table."""
    R = len(slots_R)
    if paths is not None:
        rows, width = paths.rows, paths.width
        kept = paths.positions[: R * rows].view(R, rows)[:, :width]
        paths.out_positions.copy_(kept.flatten())
        paths.out_rejected.copy_(num_rejected_R - (rows - width))
        row_ends_R = torch.arange(width, (R + 1) * width, width, device=slots_R.device)
        num_rejected_R = paths.out_rejected
    out_states[:R] = hidden_Nd[(row_ends_R - num_rejected_R - 1).long()]
    for source, target in zip(sources, targets, strict=True):
        target[:R] = source[slots_R.long()]


def choose_chain_reference(
    tokens_RD: Tensor,
    roots_R: Tensor,
    chain_only_R: Tensor,
    tree: Sequence[Tensor] | None,
    out: Sequence[Tensor],
) -> None:
    """The definition of `vllm_weaver.ops.choose_chain`, which has the tensor table."""
    D = tokens_RD.shape[1]
    T, W = out[4].shape[1:]
    device = tokens_RD.device
    row_T = torch.arange(T, dtype=torch.int32, device=device)
    live_T = row_T <= D
    tokens_RT = torch.cat([roots_R[:, None], tokens_RD], dim=1).int()
    tokens_RT = torch.nn.functional.pad(tokens_RT, (0, T - D - 1))
    above_T = torch.where(live_T, row_T - 1, -1)
    bits_TW = torch.zeros(T, W, dtype=torch.int64, device=device)
    for word in range(W):
        within_T = (row_T.long() - word * _WORD_BITS).clamp(max=_WORD_BITS - 1)
        ones_T = torch.bitwise_left_shift(torch.full_like(within_T, 2), within_T.clamp(min=0)) - 1
        bits_TW[:, word] = torch.where(live_T & (within_T >= 0), ones_T, 0)
    count_R = torch.full_like(roots_R, D + 1, dtype=torch.int32)
    depths_T = torch.where(live_T, row_T, 0)
    chain = (tokens_RT, above_T, depths_T, count_R, bits_TW)
    for index, (buffer, value) in enumerate(zip(out, chain, strict=True)):
        if tree is not None:
            first_R = chain_only_R.view(-1, *[1] * (buffer.dim() - 1))
            value = torch.where(first_R, value, tree[index])
        buffer.copy_(value)


def store_trees_reference(
    tree: Sequence[Tensor], slots_R: Tensor, stored: Sequence[Tensor], out_tokens: Tensor
) -> None:
    """The definition of `vllm_weaver.ops.store_trees`, which has the tensor table."""
    tokens, parents, depths, num_nodes, ancestors = tree
    slots = slots_R.long()
    for buffer, value in zip(stored, (parents, depths, num_nodes, ancestors), strict=True):
        buffer[slots] = value
    out_tokens.copy_(tokens[:, 1:])
