# SPDX-License-Identifier: Apache-2.0
"""DDTree: the best tree under marginal log-probabilities, built without an adapter.

The module knows the marginals of each depth and nothing of what a token at one depth implies for
the next; that is the Weaver tree's business. Source: spec section 3, arXiv 2604.12989.

Shape legend: R requests; T rows of a tree, root included; D draft depth; P candidate pool.
"""

from __future__ import annotations

import torch
from torch import Tensor

from vllm_weaver.ops.dispatch import Backends
from vllm_weaver.tree.draft_tree import DraftTree, check_budget
from vllm_weaver.tree.order import best, stable_keys

_NO_DEPTH = -2
"""Depth of an empty place: it is no node's depth and no parent's."""


def build_ddtree_reference(
    log_probs_RDP: Tensor, ids_RDP: Tensor, root_tokens_R: Tensor, budget: int
) -> DraftTree:
    """`build_ddtree` in PyTorch, from inputs that are already checked.

    Method: log-probabilities are at most 0 and fall along P, so whatever the heap must pop
    before a node stands before it in that order too, and the heap pops exactly the first
    `budget` nodes of the order over all tuples. They are found depth by depth: the best T nodes
    of depth up to k, kept in lexicographic order, are merged with the children of those at depth
    k. Laid out as [node, its children by rank], the candidates are again in lexicographic order,
    so the index breaks ties.
    """
    num_requests, max_depth, pool = log_probs_RDP.shape
    num_rows = budget + 1
    device = log_probs_RDP.device
    # A node of rank r or depth k needs r siblings or k - 1 ancestors in the tree before it.
    levels = min(max_depth, budget)
    ranks = min(pool, budget)

    marginals = log_probs_RDP[:, :levels, :ranks].detach().float().clamp(max=0.0)
    placeable = (marginals > -torch.inf) & (ids_RDP[:, :levels, :ranks] >= 0)
    marginals = torch.where(placeable, marginals, -torch.inf)

    scores_RT = torch.full((num_requests, num_rows), -torch.inf, device=device)
    scores_RT[:, 0] = 0.0
    depths_RT = torch.full((num_requests, num_rows), _NO_DEPTH, device=device)
    depths_RT[:, 0] = 0
    ranks_RT = torch.zeros_like(depths_RT)
    for depth in range(levels):
        parent_scores = torch.where(depths_RT == depth, scores_RT, -torch.inf)
        child_scores = parent_scores[:, :, None] + marginals[:, depth, None, :]
        candidates = torch.cat([scores_RT[:, :, None], child_scores], dim=2).flatten(1)
        _, kept = best(stable_keys(candidates), num_rows)
        kept = kept.sort(dim=1).values
        node, column = kept // (1 + ranks), kept % (1 + ranks)
        is_child = column > 0
        scores_RT = candidates.gather(1, kept)
        depths_RT = torch.where(is_child, depth + 1, depths_RT.gather(1, node))
        depths_RT = torch.where(scores_RT > -torch.inf, depths_RT, _NO_DEPTH)
        ranks_RT = torch.where(is_child, column - 1, ranks_RT.gather(1, node))

    # Lexicographic order is preorder: the parent is the last earlier node one level up.
    rows_T = torch.arange(num_rows, device=device)
    one_up = depths_RT[:, None, :] == depths_RT[:, :, None] - 1
    earlier = rows_T < rows_T[:, None]
    parents_RT = torch.where(one_up & earlier, rows_T, -1).amax(dim=2)

    _, order = best(stable_keys(scores_RT), num_rows)
    position = torch.empty_like(order).scatter_(1, order, rows_T.expand_as(order))
    parents_RT = parents_RT.gather(1, order)
    parents_RT = torch.where(
        parents_RT < 0, parents_RT, position.gather(1, parents_RT.clamp(min=0))
    )
    depth_index = (depths_RT.gather(1, order) - 1).clamp(min=0)
    rank_index = ranks_RT.gather(1, order)
    flat_ids = ids_RDP[:, :levels, :ranks].flatten(1)
    tokens_RT = flat_ids.gather(1, depth_index * ranks + rank_index)
    tokens_RT = torch.where(rows_T == 0, root_tokens_R[:, None], tokens_RT)
    return DraftTree.from_parents(tokens_RT, parents_RT, (scores_RT > -torch.inf).sum(dim=1))


_BACKENDS = Backends("build_ddtree", build_ddtree_reference)
_BACKENDS.register(
    "triton", "vllm_weaver.tree.ddtree_triton:build_ddtree_triton", default_on=("cuda",)
)


def build_ddtree(
    log_probs_RDP: Tensor,
    ids_RDP: Tensor,
    root_tokens_R: Tensor,
    budget: int,
    *,
    backend: str | None = None,
) -> DraftTree:
    """Build the `budget` best nodes under independent depths, T = budget + 1.

    | name          | shape     | dtype   | meaning                                              |
    |---------------|-----------|---------|------------------------------------------------------|
    | log_probs_RDP | [R, D, P] | float   | marginal log-probabilities of depths 1..D, normalised |
    |               |           |         | over the whole vocabulary, falling along P           |
    | ids_RDP       | [R, D, P] | integer | their tokens; below 0 for padding                    |
    | root_tokens_R | [R]       | integer | last sampled token of each request                   |
    | budget        |           | int     | nodes without the root, 1..255                       |
    | returns       | [R, T]    |         | trees whose rows stand in heap order                 |

    The result is that of a max-heap which starts with rank 0 of depth 1, and whose every pop
    places a node and pushes its next sibling (same parent, rank + 1) and its first child (depth
    + 1, rank 0). A node is named by its rank tuple, the ranks on its path from depth 1 down.

    Order of the rows: higher score first; at equal score the lexicographically smaller rank
    tuple, a tuple before its extensions. Scores are float32 sums of the marginals along the
    path, added from depth 1 down, so that equal paths have equal scores on every device.
    Log-probabilities above 0 count as 0. Entries of log-probability -inf or NaN and padding ids
    are never placed; where too few are left, the tree is smaller than the budget.

    Where a pool does not fall along P, the tree is still valid; which nodes it holds then may
    depend on the backend.

    Backends: "reference" (any device, no host synchronisation) and "triton" (one launch, a step of
    a warp per node). None takes "triton" on a GPU, else "reference".

    Raises ValueError for a bad budget, an unknown backend, or shapes and dtypes that disagree.
    """
    budget = check_budget(budget)
    _check_inputs(log_probs_RDP, ids_RDP, root_tokens_R)
    build = _BACKENDS.pick(backend, log_probs_RDP.device)
    return build(log_probs_RDP, ids_RDP, root_tokens_R, budget)


def _check_inputs(log_probs_RDP: Tensor, ids_RDP: Tensor, root_tokens_R: Tensor) -> None:
    if log_probs_RDP.dim() != 3 or 0 in log_probs_RDP.shape[1:]:
        raise ValueError(
            f"log_probs has shape {tuple(log_probs_RDP.shape)}: "
            "expected [requests, depth, pool] with depth and pool of at least 1"
        )
    if not log_probs_RDP.is_floating_point():
        raise ValueError(f"log_probs is {log_probs_RDP.dtype}: pass floating-point values")
    if ids_RDP.shape != log_probs_RDP.shape:
        raise ValueError(
            f"ids has shape {tuple(ids_RDP.shape)}, log_probs {tuple(log_probs_RDP.shape)}: "
            "both must be [requests, depth, pool]"
        )
    if root_tokens_R.shape != log_probs_RDP.shape[:1]:
        raise ValueError(
            f"root_tokens has shape {tuple(root_tokens_R.shape)}, but log_probs holds "
            f"{log_probs_RDP.shape[0]} requests: pass one root token each"
        )
