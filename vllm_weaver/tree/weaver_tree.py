# SPDX-License-Identifier: Apache-2.0
"""The Weaver tree: best-first growth on cumulative conditional log-probability.

The module knows a callable that scores the children of nodes, and not that it is an adapter.
Source: spec section 3, arXiv 2607.06763 (several pops per round), arXiv 2410.11744 (best first).

Shape legend: R requests; T rows of a tree, root included; G nodes popped at once per request;
C children kept of a node.
"""

from __future__ import annotations

from torch import Tensor

from vllm_weaver.tree.best_first import ExpandFn, Growth, check_growth, may_look
from vllm_weaver.tree.draft_tree import DraftTree, check_budget

_NODES_PER_WIDTH = 16


def build_weaver_tree(
    expand: ExpandFn,
    root_tokens_R: Tensor,
    budget: int,
    max_depth: int,
    *,
    expansion_width: int | None = None,
    children: int = 8,
    full_pools: bool = False,
) -> DraftTree:
    """Grow trees of `budget` nodes, the most probable candidates first, T = budget + 1.

    | name            | shape  | dtype   | meaning                                             |
    |-----------------|--------|---------|-----------------------------------------------------|
    | expand          |        |         | scores children, see `ExpandFn`; N = R * G          |
    | root_tokens_R   | [R]    | integer | last sampled token of each request                  |
    | budget          |        | int     | nodes without the root, 1..255                      |
    | max_depth       |        | int     | depth of the deepest nodes, D                       |
    | expansion_width |        | int     | G, popped per round; max(1, ceil(budget / 16)) if   |
    |                 |        |         | None, never more than the budget                    |
    | children        |        | int     | C, an expanded node's candidates on the frontier    |
    | full_pools      |        | bool    | promise: each pool has C candidates above -inf      |
    | returns         | [R, T] |         | trees whose rows stand by falling score             |

    The root is expanded first. Each round pops the best G candidates of the frontier, places
    them in falling order, expands them together and puts the best C children of each on the
    frontier. Nodes at `max_depth` are leaves. Rounds go on until the budget is placed or the
    frontier is empty, in which case the tree is smaller; the last group is not expanded.

    Scores are float32 sums of log-probabilities from the root down, where a log-probability above
    0 counts as 0. At equal score the candidate inserted first wins: earlier rounds before later
    ones, then the parents in the order of their placing, then a node's children by falling
    log-probability, then by index in the pool. Rows of equal score stand in the order of placing.

    With G above 1, a group holds nodes that are worse than some still to come, and the first groups
    reach no depth: rows in order of score make the first of them a good tree of their own.

    The frontier can hold fewer than G candidates (few children, pools with -inf), which costs
    more rounds than ceil(budget / G). A CPU stops when the trees are complete. On other devices,
    where looking would wait, the number of rounds is the largest that can be needed, which
    `full_pools` lowers to ceil(budget / G) where C >= G and the trees may be deep. A broken
    promise costs nodes, not validity.

    Raises ValueError for arguments out of range and for a malformed result of `expand`.
    """
    budget = check_budget(budget)
    width = group_width(budget, expansion_width)
    check_growth(root_tokens_R, max_depth, width, children)
    rounds = most_rounds(budget, max_depth, width, children, full_pools)
    stops_early = may_look(root_tokens_R.device)
    num_rows = budget + 1

    growth = Growth(
        expand, root_tokens_R, num_rows=num_rows, width=width, children=children, pushes=rounds
    )
    root = growth.root()
    growth.push_children(root, root.live_RG)
    for to_come in reversed(range(rounds)):
        group = growth.place_best()
        goes_on_RG = group.live_RG & (growth.tree.num_nodes < num_rows)[:, None]
        if to_come == 0 or (stops_early and not bool(goes_on_RG.any())):
            break
        expands_RG = goes_on_RG & (group.depths_RG < max_depth)
        if not stops_early or bool(expands_RG.any()):
            growth.push_children(group, expands_RG)
    return growth.finished_tree()


def group_width(budget: int, expansion_width: int | None) -> int:
    """Nodes popped per round: `expansion_width`, by default ceil(budget / 16); at most `budget`."""
    if expansion_width is None:
        expansion_width = -(-budget // _NODES_PER_WIDTH)
    return min(expansion_width, budget)


def most_rounds(budget: int, max_depth: int, width: int, children: int, full_pools: bool) -> int:
    """Rounds after which every tree is complete, whatever the scores.

    A round that finds fewer than `width` candidates pops them all, so that the least depth on
    the frontier rises: there are at most `max_depth` such rounds, each places at least one node,
    and every other round but the last places `width`.

    With full pools, the frontier after `placed` nodes, `inner` of them above `max_depth`, holds
    children * (inner + 1) - placed candidates. It is smallest where leaves are placed as early as
    they can be: the first needs max_depth - 1 inner nodes, and every `children` more another one.
    """
    short_rounds = min(max_depth, budget)
    most = short_rounds + -(-(budget - short_rounds) // width)
    if not full_pools:
        return most
    rounds, placed, inner = 0, 0, 0
    while placed < budget:
        while inner + children * max(0, inner - max_depth + 2) < placed:
            inner += 1
        placed += min(width, max(1, children * (inner + 1) - placed))
        rounds += 1
    return min(rounds, most)
