# SPDX-License-Identifier: Apache-2.0
"""Acceptance: the path of the tree that the target's own samples follow.

The module knows a tree and one sampled token per row. It does not know how the target was
sampled, which is why one rule serves greedy and seeded sampling. Source: spec section 4.

Shape legend: R requests; T rows of a tree, root included; D draft depth.
"""

from __future__ import annotations

import torch
from torch import Tensor

from vllm_weaver.tree.draft_tree import DraftTree, row_bits


def accept(
    tree: DraftTree, sampled_RT: Tensor, *, max_depth: int | None = None
) -> tuple[Tensor, Tensor]:
    """Walk from the root while a child carries the token sampled at its parent.

    | name       | shape              | dtype   | in/out | meaning                                |
    |------------|--------------------|---------|--------|----------------------------------------|
    | tree       | [R, T]             |         | in     | the verified trees                     |
    | sampled_RT | [R, T]             | integer | in     | token sampled from the target at each  |
    |            |                    |         |        | row; ignored past `num_nodes`          |
    | max_depth  |                    | int     | in     | D, the path's bound; T - 1 if None     |
    | path       | [R, D + 1]         | int32   | out    | rows from the root on, then -1         |
    | length     | [R]                | int32   | out    | rows on the path, root included        |

    `length` is the number of tokens emitted: `sampled[path[i]]` for i < length, the last of which
    is the bonus token. Of several children with that token (no builder makes such trees) the
    first row is followed. A path never goes below `max_depth`. A request without nodes has
    length 0. Raises ValueError when the shapes disagree or `max_depth` is negative.

    Nothing is walked: a row is on the path exactly when it and all its ancestors are what their
    parents' samples point to, which is one test of the ancestor bits.
    """
    if sampled_RT.shape != tree.tokens.shape:
        raise ValueError(
            f"sampled has shape {tuple(sampled_RT.shape)}, but the tree has rows of shape "
            f"{tuple(tree.tokens.shape)}: pass one sampled token per row"
        )
    if sampled_RT.is_floating_point():
        raise ValueError(f"sampled is {sampled_RT.dtype}: pass integer token ids")
    num_requests, num_rows = tree.tokens.shape
    max_depth = num_rows - 1 if max_depth is None else max_depth
    if max_depth < 0:
        raise ValueError(f"max_depth is {max_depth}: pass 0 or more")
    device = tree.device
    live_RT = tree.live_rows()
    rows_RT = torch.arange(num_rows, device=device).expand(num_requests, num_rows)

    parents_RT = torch.where(live_RT, tree.parents, -1).long()
    has_parent_RT = parents_RT >= 0
    parents_RT = parents_RT.clamp(min=0)
    matches_RT = has_parent_RT & (tree.tokens == sampled_RT.gather(1, parents_RT))
    # Row T of this table takes the rows that match nothing.
    first_match = torch.full((num_requests, num_rows + 1), num_rows, device=device)
    target_RT = torch.where(matches_RT, parents_RT, num_rows)
    first_match = first_match.scatter_reduce(1, target_RT, rows_RT, "amin")
    followed_RT = matches_RT & (first_match.gather(1, parents_RT) == rows_RT)
    followed_RT = followed_RT | (live_RT & ~has_parent_RT)

    followed_RW = torch.where(followed_RT[:, :, None], row_bits(num_rows, device), 0).sum(dim=1)
    strays_RTW = tree.ancestors & ~followed_RW[:, None, :]
    on_path_RT = live_RT & (strays_RTW == 0).all(dim=2) & (tree.depths <= max_depth)

    # Column max_depth + 1 takes the rows that are off the path.
    columns_RT = torch.where(on_path_RT, tree.depths, max_depth + 1).long()
    path = torch.full((num_requests, max_depth + 2), -1, dtype=torch.int32, device=device)
    path.scatter_(1, columns_RT, rows_RT.int())
    length_R = on_path_RT.sum(dim=1, dtype=torch.int32)
    return path[:, : max_depth + 1].contiguous(), length_R
