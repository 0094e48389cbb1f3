# SPDX-License-Identifier: Apache-2.0
"""Acceptance: the path of the tree that the target's own samples follow.

The module knows a tree and one sampled token per row. It does not know how the target was
sampled, which is why one rule serves greedy and seeded sampling. Source: spec section 4.

Shape legend: R requests; T rows of a tree, root included; D draft depth.
"""

from __future__ import annotations

import torch
from torch import Tensor

from vllm_weaver.ops.accept import accept_paths
from vllm_weaver.tree.draft_tree import DraftTree


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

    `vllm_weaver.ops.accept_paths` does the work, in one launch on a GPU, and gives more of it.
    """
    if sampled_RT.shape != tree.tokens.shape:
        raise ValueError(
            f"sampled has shape {tuple(sampled_RT.shape)}, but the tree has rows of shape "
            f"{tuple(tree.tokens.shape)}: pass one sampled token per row"
        )
    if sampled_RT.is_floating_point():
        raise ValueError(f"sampled is {sampled_RT.dtype}: pass integer token ids")
    max_depth = tree.num_rows - 1 if max_depth is None else max_depth
    if max_depth < 0:
        raise ValueError(f"max_depth is {max_depth}: pass 0 or more")
    if sampled_RT.dtype not in (torch.int32, torch.int64):
        sampled_RT = sampled_RT.long()
    accepted = accept_paths(
        tree.tokens,
        tree.parents,
        tree.depths,
        tree.num_nodes,
        tree.ancestors,
        sampled_RT,
        max_depth,
    )
    return accepted.path, accepted.length
