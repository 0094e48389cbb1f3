# SPDX-License-Identifier: Apache-2.0
"""Acceptance in plain PyTorch: the definition (spec section 4).

Shape legend: R requests; T rows of a tree, root included; W words of ancestor bits; D bound on the
depth of a path.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

_WORD_BITS = 64


class PathCounts(NamedTuple):
    """Running totals, int64: passes by rows on their path; accepted nodes by row of the tree, the
    root left out; passes by rows of their tree.
    """

    lengths: Tensor
    rows: Tensor
    sizes: Tensor


class AcceptedPaths(NamedTuple):
    """What `vllm_weaver.ops.accept_paths` returns; its tensor table has the shapes."""

    path: Tensor
    length: Tensor
    emitted: Tensor
    order: Tensor


def accept_paths_reference(
    tokens_RT: Tensor,
    parents_RT: Tensor,
    depths_RT: Tensor,
    num_nodes_R: Tensor,
    ancestors_RTW: Tensor,
    sampled_RT: Tensor,
    max_depth: int,
    out: AcceptedPaths | None,
) -> AcceptedPaths:
    """The definition of `vllm_weaver.ops.accept_paths`, which has the tensor table."""
    R, T = tokens_RT.shape
    device = tokens_RT.device
    row_T = torch.arange(T, device=device)
    live_RT = row_T < num_nodes_R[:, None]
    rows_RT = row_T.expand(R, T)

    parents_RT = torch.where(live_RT, parents_RT, -1).long()
    has_parent_RT = parents_RT >= 0
    parents_RT = parents_RT.clamp(min=0)
    matches_RT = has_parent_RT & (tokens_RT == sampled_RT.gather(1, parents_RT))
    # Row T of this table takes the rows that match nothing.
    first_match = torch.full((R, T + 1), T, device=device)
    target_RT = torch.where(matches_RT, parents_RT, T)
    first_match = first_match.scatter_reduce(1, target_RT, rows_RT, "amin")
    followed_RT = matches_RT & (first_match.gather(1, parents_RT) == rows_RT)
    followed_RT = followed_RT | (live_RT & ~has_parent_RT)

    bit_T = torch.bitwise_left_shift(torch.ones_like(row_T), row_T % _WORD_BITS)
    word_W = torch.arange(ancestors_RTW.shape[2], device=device)
    bits_TW = torch.where(word_W == (row_T // _WORD_BITS)[:, None], bit_T[:, None], 0)
    followed_RW = torch.where(followed_RT[:, :, None], bits_TW, 0).sum(dim=1)
    strays_RTW = ancestors_RTW & ~followed_RW[:, None, :]
    on_path_RT = live_RT & (strays_RTW == 0).all(dim=2) & (depths_RT <= max_depth)

    # The last column takes the rows that are off the path.
    columns_RT = torch.where(on_path_RT, depths_RT, max_depth + 1).long()
    path = torch.full((R, max_depth + 2), -1, dtype=torch.int32, device=device)
    path = path.scatter_(1, columns_RT, rows_RT.int())[:, : max_depth + 1].contiguous()
    emitted = sampled_RT.new_full((R, max_depth + 2), -1)
    emitted = emitted.scatter_(1, columns_RT, sampled_RT)[:, : max_depth + 1].contiguous()
    places_RT = torch.where(on_path_RT, depths_RT, T).long()
    order = torch.nn.functional.pad(rows_RT, (0, 1)).scatter_(1, places_RT, rows_RT)[:, :T]
    order = order + T * torch.arange(R, device=device)[:, None]
    result = AcceptedPaths(path, on_path_RT.sum(dim=1, dtype=torch.int32), emitted, order)
    if out is None:
        return result
    for buffer, value in zip(out, result, strict=True):
        buffer.copy_(value)
    return out


def count_paths_reference(
    path_RD: Tensor, length_R: Tensor, num_nodes_R: Tensor, counts: PathCounts
) -> None:
    """The definition of `vllm_weaver.ops.count_paths`, which has the tensor table."""
    length, rows = length_R.long(), path_RD.long()
    counts.lengths.scatter_add_(0, length, torch.ones_like(length))
    counts.rows.scatter_add_(0, rows.clamp(min=0).flatten(), (rows > 0).long().flatten())
    counts.sizes.scatter_add_(0, num_nodes_R.long(), torch.ones_like(length))
