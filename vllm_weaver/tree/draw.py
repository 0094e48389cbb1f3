# SPDX-License-Identifier: Apache-2.0
"""Draw a tree in a terminal, with the accepted path marked.

For people only: the module reads the tree on the host and knows tokens through a callable.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor

from vllm_weaver.tree.draft_tree import DraftTree

ACCEPTED_MARK = "●"
REJECTED_MARK = "○"

_GREEN = "\x1b[1;32m"
_RESET = "\x1b[0m"


def draw_tree(
    tree: DraftTree,
    request: int,
    token_text: Callable[[int], str],
    path: Tensor | Sequence[int] | None = None,
    max_nodes: int = 64,
    *,
    color: bool = False,
) -> str:
    """Return a drawing of one tree, one line per branch.

    | name       | meaning                                                                     |
    |------------|-----------------------------------------------------------------------------|
    | tree       | the trees                                                                   |
    | request    | which of them                                                               |
    | token_text | text of a token; shown as a Python literal, so that blanks can be seen      |
    | path       | rows of this request's accepted path, as from `accept`; -1 is skipped       |
    | max_nodes  | rows to draw, root included; the first ones, which are a subtree            |
    | color      | paint accepted nodes green with ANSI codes                                  |

    A node is its mark, ● on the accepted path and ○ off it, and its text. A node's only child
    stands on the same line; several children are drawn below it, in row order, which is the order
    of placing. Raises ValueError when `request` or `max_nodes` is out of range.
    """
    if not 0 <= request < tree.num_requests:
        raise ValueError(f"request {request} is not among the tree's {tree.num_requests}")
    if max_nodes < 1:
        raise ValueError(f"max_nodes is {max_nodes}: pass at least 1, the root")
    tokens = tree.tokens[request].tolist()
    parents = tree.parents[request].tolist()
    num_nodes = int(tree.num_nodes[request])
    shown = min(num_nodes, max_nodes)
    rows = path.tolist() if isinstance(path, Tensor) else path or ()
    accepted = {int(row) for row in rows if row >= 0}
    children: list[list[int]] = [[] for _ in range(shown)]
    for row in range(1, shown):
        children[parents[row]].append(row)

    def label(row: int) -> str:
        mark = ACCEPTED_MARK if row in accepted else REJECTED_MARK
        text = f"{mark} {token_text(tokens[row])!r}"
        return f"{_GREEN}{text}{_RESET}" if color and row in accepted else text

    lines: list[str] = []
    stack = [(0, "", "")] if shown else []
    while stack:
        row, lead, indent = stack.pop()
        labels = [label(row)]
        while len(children[row]) == 1:
            row = children[row][0]
            labels.append(label(row))
        lines.append(lead + " ".join(labels))
        branches = children[row]
        for child in reversed(branches):
            final = child == branches[-1]
            elbow, below = ("└─ ", "   ") if final else ("├─ ", "│  ")
            stack.append((child, indent + elbow, indent + below))
    if shown < num_nodes:
        lines.append(f"… {num_nodes - shown} more nodes")
    return "\n".join(lines)
