# SPDX-License-Identifier: Apache-2.0
"""The grown tree: grow generously in few rounds, then prune to the budget.

The alternative to the Weaver tree where rounds are dear and nodes per round are cheap. The module
knows a callable that scores the children of nodes, and not that it is an adapter. Source: spec
section 3 (grow-and-prune).

Shape legend: R requests; T rows of a tree, root included; G nodes expanded at once per request;
C children kept of a node; F candidates grown in all.
"""

from __future__ import annotations

import torch
from torch import Tensor

from vllm_weaver.tree.best_first import ExpandFn, Growth, check_growth, may_look
from vllm_weaver.tree.draft_tree import DraftTree, check_budget
from vllm_weaver.tree.order import NO_KEY, best, stable_keys

_NODES_PER_WIDTH = 8


def build_grown_tree(
    expand: ExpandFn,
    root_tokens_R: Tensor,
    budget: int,
    max_depth: int,
    *,
    rounds: int | None = None,
    width: int | None = None,
    children: int = 8,
) -> DraftTree:
    """Grow `rounds` x `width` parents x `children`, keep the best `budget`, T = budget + 1.

    | name          | shape  | dtype   | meaning                                               |
    |---------------|--------|---------|-------------------------------------------------------|
    | expand        |        |         | scores children, see `ExpandFn`; N = R * G            |
    | root_tokens_R | [R]    | integer | last sampled token of each request                    |
    | budget        |        | int     | nodes without the root, 1..255                        |
    | max_depth     |        | int     | depth of the deepest nodes, D                         |
    | rounds        |        | int     | calls of `expand`, the root's included; `max_depth`   |
    |               |        |         | if None, the fewest that can reach a node that deep   |
    | width         |        | int     | G, parents expanded per round after the first;        |
    |               |        |         | ceil(budget / 8) if None, so that with 15 rounds      |
    |               |        |         | about twice the budget is expanded                    |
    | children      |        | int     | C, candidates grown under each parent                 |
    | returns       | [R, T] |         | trees whose rows stand in falling order of score      |

    Round 1 expands the root. Every later round takes the best G candidates that are not yet
    expanded and lie above `max_depth`, wherever they are in the tree, and grows the best C
    children of each. At the end the `budget` best of all candidates are kept, fewer where fewer
    were grown: at most C * (1 + (rounds - 1) * G).

    Scores are float32 sums of log-probabilities from the root down, where a log-probability above
    0 counts as 0, so that no child scores above its parent. At equal score the candidate grown
    first wins: earlier rounds, then the parents in the order of their popping, then a node's
    children by falling log-probability, then by index in the pool. A parent is grown before its
    children, so it is kept when they are and stands before them.

    The tree that `expand` sees holds the root and the nodes expanded so far, 1 + (rounds - 1) * G
    rows; its rows are not those of the result.

    Raises ValueError for arguments out of range and for a malformed result of `expand`.
    """
    budget = check_budget(budget)
    rounds = max_depth if rounds is None else rounds
    width = -(-budget // _NODES_PER_WIDTH) if width is None else width
    check_growth(root_tokens_R, max_depth, width, children)
    if rounds < 1:
        raise ValueError(f"rounds is {rounds}: pass at least 1, the root's own")
    device = root_tokens_R.device
    stops_early = may_look(device)

    # The frontier must hold the budget, even where too little is grown to fill it.
    pushes = max(rounds, -(-budget // (width * children)))
    num_rows = 1 + (rounds - 1) * width
    growth = Growth(
        expand, root_tokens_R, num_rows=num_rows, width=width, children=children, pushes=pushes
    )
    place_of_row = torch.zeros(
        (root_tokens_R.shape[0], num_rows + 1), dtype=torch.int64, device=device
    )
    root = growth.root()
    growth.push_children(root, root.live_RG, root.depths_RG + 1 < max_depth)
    for _ in range(rounds - 1):
        group = growth.place_best()
        if stops_early and not bool(group.live_RG.any()):
            break
        place_of_row.scatter_(1, group.rows_RG, group.places_RG)
        growth.push_children(group, group.live_RG, group.depths_RG + 1 < max_depth)

    keys_RB, kept_RB = best(stable_keys(growth.scores_RF), budget)
    rows_B = torch.arange(1, budget + 1, device=device)
    row_of_place = torch.zeros_like(growth.parents_RF)
    row_of_place.scatter_(1, kept_RB, rows_B.expand_as(kept_RB))
    grown_parents_RB = growth.parents_RF.gather(1, kept_RB)
    parents_RB = row_of_place.gather(1, place_of_row.gather(1, grown_parents_RB))
    parents_RB = torch.where(grown_parents_RB == 0, 0, parents_RB)
    tokens_RB = growth.tokens_RF.gather(1, kept_RB)
    return DraftTree.from_parents(
        torch.cat([root_tokens_R[:, None], tokens_RB], dim=1),
        torch.nn.functional.pad(parents_RB, (1, 0), value=-1),
        1 + (keys_RB < NO_KEY).sum(dim=1),
    )
