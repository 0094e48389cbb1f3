# SPDX-License-Identifier: Apache-2.0
"""The spine tree: a Weaver tree in fewer rounds, whose nodes are expanded together with guesses of
their descendants.

A round of the Weaver tree goes one level down. Here each node is expanded together with a line of
nodes below it, whose tokens are the drafter's best of their depths, the *spine*: what is known
before any round. The first round does so with the root, the others with the best candidates, and in
the end the best of all nodes are kept, so that a wrong guess costs work and no place in the tree.

The module knows a callable that scores the children of nodes, and not that it is an adapter.

Shape legend: R requests; T rows of a tree, root included; G lines of a round per request; L nodes
of a line; N = R * G * L; C children kept of a node; D draft depth; F places of the frontier; A rows
of the nodes that are expanded, root included.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from vllm_weaver.tree.best_first import ExpandFn, check_answer, check_growth
from vllm_weaver.tree.draft_tree import DraftTree, check_budget, row_bits
from vllm_weaver.tree.order import NO_KEY, best, stable_keys
from vllm_weaver.tree.shared_noise import MARGINAL_WEIGHT, SharedNoise

ROUNDS, LINE = 6, 2
"""Rounds after the first, and nodes of a line in them."""
_NODES_PER_WIDTH = 8


@dataclass(frozen=True)
class SpineShape:
    """How a spine tree grows: `rounds` after the first, each of `width` lines of `line` nodes."""

    rounds: int
    width: int
    line: int

    @classmethod
    def of(cls, budget: int, expansion_width: int | None = None) -> SpineShape:
        """For trees of `budget` nodes: `expansion_width` lines a round, by default budget / 8."""
        width = -(-budget // _NODES_PER_WIDTH) if expansion_width is None else expansion_width
        return cls(ROUNDS, min(width, budget), LINE)

    def rows(self, max_depth: int) -> int:
        """Rows of the nodes that are expanded, the root's included."""
        return max_depth + self.rounds * self.width * self.line


def build_spine_tree(
    expand: ExpandFn,
    root_tokens_R: Tensor,
    spine_RD: Tensor,
    budget: int,
    max_depth: int,
    *,
    shape: SpineShape | None = None,
    children: int = 8,
) -> DraftTree:
    """Grow in 1 + `shape.rounds` calls of `expand`, keep the best `budget` nodes, T = budget + 1.

    | name          | shape  | dtype   | meaning                                               |
    |---------------|--------|---------|-------------------------------------------------------|
    | expand        |        |         | scores children, see `ExpandFn`; of the nodes of one  |
    |               |        |         | call, some are below others, which come before them   |
    | root_tokens_R | [R]    | integer | last sampled token of each request                    |
    | spine_RD      | [R, D] | integer | the drafter's best token of each depth, see           |
    |               |        |         | `spine_of`                                            |
    | budget        |        | int     | nodes without the root, 1..255                        |
    | max_depth     |        | int     | depth of the deepest nodes, D                         |
    | shape         |        |         | of the growth; `SpineShape.of(budget)` if None        |
    | children      |        | int     | C, an expanded node's candidates on the frontier      |
    | returns       | [R, T] |         | trees whose rows stand in falling order of score      |

    The line below a node at depth k is the spine's tokens of depths k + 1 and on. The first round
    expands the root and a line of D - 1 nodes below it. Every other round takes the best G
    candidates of the frontier above `max_depth` and expands each with the L - 1 nodes below it, as
    far as these lie above `max_depth`. The best C children of each node go to the frontier but for
    the one that the line goes on with, which is no candidate any more. A node of a line has the
    score that its parent's children have; where the spine's token is no candidate there, it and
    what is below it are no nodes. In the end the `budget` best nodes of lines and frontier are
    kept, fewer where there are fewer.

    Scores are float32 sums of log-probabilities from the root down, where a log-probability above
    0 counts as 0. At equal score on the frontier the candidate inserted first wins: earlier rounds,
    then lines in the order of their first nodes, then nodes from the top of a line, then a node's
    children by falling log-probability, then by index in the pool. In the end, nodes of lines win
    before the frontier, so that no child is before its parent.

    The tree that `expand` sees has the rows of all nodes that are expanded, of which it may read
    those of this call and of earlier ones.

    Raises ValueError for arguments out of range and for a malformed result of `expand`.
    """
    budget = check_budget(budget)
    shape = SpineShape.of(budget) if shape is None else shape
    check_growth(root_tokens_R, max_depth, shape.width, children)
    if spine_RD.shape != (len(root_tokens_R), max_depth):
        raise ValueError(
            f"the spine has shape {tuple(spine_RD.shape)}: pass one token for each of {max_depth} "
            "depths"
        )
    lines = _Lines(expand, root_tokens_R, spine_RD, shape, children, budget)
    lines.expand_root()
    for number in range(shape.rounds):
        lines.expand_best(number)
    return lines.finished_tree(budget)


def spine_of(ids_RDP: Tensor, logits_RDP: Tensor, noise: SharedNoise | None = None) -> Tensor:
    """[R, D]: the token of each depth that the drafter holds for the likeliest to be drawn.

    `ids_RDP` and `logits_RDP` are pools and raw logits as for `WeaverAdapter.begin`; ids below 0
    and logits of NaN are no candidates. With the sampler's noise, the largest logit + w T G counts,
    T the request's temperature and w the weight of marginals: filters are left out of account. The
    first of equal ones is taken; a depth without candidates has some token.
    """
    scores_RDP = logits_RDP.float()
    if noise is not None:
        weight_R = MARGINAL_WEIGHT * noise.sampling.temperature_R
        scores_RDP = scores_RDP + weight_R[:, None, None] * noise.noise_RDP
    scores_RDP = torch.where(ids_RDP >= 0, scores_RDP, -torch.inf)
    place_RD = scores_RDP.nan_to_num(-torch.inf, torch.inf, -torch.inf).argmax(-1)
    return ids_RDP.gather(-1, place_RD[..., None])[..., 0].clamp(min=0)


class _Lines:
    """Lines of nodes, and the candidates below them.

    Rows of the tree [R, A + 1] hold all nodes that were expanded, a line's next to each other; the
    last row takes nothing that is read. The frontier [R, F] holds candidates in the order of their
    insertion: scores, of which -inf is none, tokens, rows of their parents, and keys, of which
    those that may not be expanded are `NO_KEY`.
    """

    def __init__(
        self,
        expand: ExpandFn,
        root_tokens_R: Tensor,
        spine_RD: Tensor,
        shape: SpineShape,
        children: int,
        budget: int,
    ) -> None:
        self._expand, self._shape, self._children = expand, shape, children
        self._depth = spine_RD.shape[1]
        self._spine_RD = spine_RD.int()
        requests, device = root_tokens_R.shape[0], root_tokens_R.device
        rows = shape.rows(self._depth)
        self._tree = DraftTree.root_only(root_tokens_R, rows)
        self._row_scores = torch.full((requests, rows), -torch.inf, device=device)
        self._bits = row_bits(rows, device)
        self._request_R = torch.arange(requests, dtype=torch.int32, device=device)
        # Room for the budget, even where less is grown.
        places = (requests, max(rows * children, shape.width, budget))
        self._scores = torch.full(places, -torch.inf, device=device)
        self._tokens = torch.zeros(places, dtype=torch.int32, device=device)
        self._parents = torch.zeros(places, dtype=torch.int64, device=device)
        self._keys = torch.full(places, NO_KEY, dtype=torch.int64, device=device)
        self._used = 0

    def expand_root(self) -> None:
        """The root and the whole spine, but for its last token, which is a leaf."""
        live_RG = torch.ones_like(self._tree.tokens[:, :1], dtype=torch.bool)
        zeros_RG = torch.zeros_like(live_RG, dtype=torch.float32)
        root = self._tree.tokens[:, :1], torch.full_like(live_RG, -1, dtype=torch.int64)
        self._expand_lines(live_RG, *root, zeros_RG, 0, self._depth)

    def expand_best(self, number: int) -> None:
        """Round `number` after the first, from 0 on: the best candidates and lines below them."""
        width, line = self._shape.width, self._shape.line
        keys_RG, places_RG = best(self._keys, width)
        live_RG = keys_RG < NO_KEY
        self._keys.scatter_(1, places_RG, NO_KEY)
        scores_RG = self._scores.gather(1, places_RG)
        # A popped candidate is a row from now on.
        self._scores.scatter_(1, places_RG, torch.where(live_RG, -torch.inf, scores_RG))
        tokens_RG, parents_RG = (x.gather(1, places_RG) for x in (self._tokens, self._parents))
        first = self._depth + number * width * line
        self._expand_lines(live_RG, tokens_RG, parents_RG, scores_RG, first, line)

    def _expand_lines(
        self,
        live_RG: Tensor,
        tokens_RG: Tensor,
        parents_RG: Tensor,
        scores_RG: Tensor,
        first: int,
        length: int,
    ) -> None:
        """Place lines below and with their first nodes, in rows from `first` on; expand them."""
        requests, lines = live_RG.shape
        tree, depth = self._tree, self._depth
        steps_L = torch.arange(length, device=live_RG.device)
        rows_GL = first + torch.arange(lines * length, device=live_RG.device).view(lines, length)
        above_RG = parents_RG.clamp(min=0)
        depths_RG = torch.where(parents_RG < 0, 0, tree.depths.gather(1, above_RG) + 1)
        depths_RGL = depths_RG[..., None] + steps_L
        live_RGL = live_RG[..., None] & (depths_RGL < depth)
        # Whether a node's line goes on, and with which token.
        goes_on_RGL = torch.nn.functional.pad(live_RGL[..., 1:], (0, 1))
        at_RE = depths_RGL.clamp(0, depth - 1).flatten(1).long()
        next_RGL = self._spine_RD.gather(1, at_RE).view_as(live_RGL)
        tokens_RGL = torch.cat([tokens_RG[..., None], next_RGL[..., :-1]], -1)
        parents_RGL = torch.cat(
            [parents_RG[..., None], (rows_GL[:, :-1]).expand(requests, -1, -1)], -1
        )
        words_RGW = tree.ancestors.gather(
            1, above_RG[..., None].expand(-1, -1, tree.ancestors.shape[2])
        )
        words_RGW = torch.where((parents_RG < 0)[..., None], 0, words_RGW)
        rows = slice(first, first + lines * length)
        # Of every node the bits of those before it in its line, and its own: each bit is set once.
        own_GLW = self._bits[rows].view(lines, length, -1).cumsum(1)
        words_RGLW = words_RGW[:, :, None] + own_GLW
        tree.tokens[:, rows] = torch.where(live_RGL, tokens_RGL, 0).flatten(1)
        tree.parents[:, rows] = torch.where(live_RGL, parents_RGL, -1).flatten(1).int()
        tree.depths[:, rows] = torch.where(live_RGL, depths_RGL, 0).flatten(1).int()
        tree.ancestors[:, rows] = torch.where(live_RGL[..., None], words_RGLW, 0).flatten(1, 2)

        ids_NP, log_probs_NP = self._expand(
            self._request_R.repeat_interleave(lines * length),
            torch.where(live_RGL, rows_GL, -1).flatten().int(),
            tree.tokens[:, rows].flatten(),
            tree.depths[:, rows].flatten(),
            tree,
        )
        check_answer(ids_NP, log_probs_NP, live_RGL.numel())
        log_probs_NP = log_probs_NP.detach().float().clamp(max=0.0)
        usable_NP = (log_probs_NP > -torch.inf) & (ids_NP >= 0) & live_RGL.flatten()[:, None]
        is_next_NP = usable_NP & (ids_NP == next_RGL.flatten()[:, None])
        is_next_NP &= goes_on_RGL.flatten()[:, None]
        step_N = torch.where(is_next_NP, log_probs_NP, -torch.inf).amax(1)
        step_RGL = step_N.view_as(live_RGL)
        line_scores = [scores_RG]
        for step in range(length - 1):
            line_scores.append(line_scores[-1] + step_RGL[..., step])
        scores_RGL = torch.where(live_RGL, torch.stack(line_scores, -1), -torch.inf)
        self._row_scores[:, rows] = scores_RGL.flatten(1)

        log_probs_NP = torch.where(usable_NP & ~is_next_NP, log_probs_NP, -torch.inf)
        children = min(self._children, ids_NP.shape[1])
        _, best_NC = best(stable_keys(log_probs_NP), children)
        gained_RGLC = log_probs_NP.gather(1, best_NC).view(*live_RGL.shape, children)
        child_scores_RE = (scores_RGL[..., None] + gained_RGLC).flatten(1)
        open_RE = (depths_RGL + 1 < depth)[..., None].expand_as(gained_RGLC).flatten(1)
        keys_RE = stable_keys(child_scores_RE, self._used)
        places = slice(self._used, self._used + child_scores_RE.shape[1])
        self._scores[:, places] = child_scores_RE
        self._tokens[:, places] = ids_NP.gather(1, best_NC).int().view(requests, -1)
        self._parents[:, places] = (
            rows_GL[..., None].expand(requests, lines, length, children).flatten(1)
        )
        self._keys[:, places] = torch.where(open_RE, keys_RE, NO_KEY)
        self._used = places.stop

    def finished_tree(self, budget: int) -> DraftTree:
        """The best of the nodes of lines, by row, and of the frontier, by insertion."""
        rows = self._row_scores.shape[1]
        scores = torch.cat([self._row_scores, self._scores], 1)
        scores[:, 0] = 0.0
        keys_RT, kept_RT = best(stable_keys(scores), budget + 1)
        rows_T = torch.arange(budget + 1, device=scores.device).expand_as(kept_RT)
        new_rows = torch.zeros_like(scores, dtype=torch.int64).scatter_(1, kept_RT, rows_T)
        tokens = torch.cat([self._tree.tokens, self._tokens], 1).gather(1, kept_RT)
        parents = torch.cat([self._tree.parents.long(), self._parents], 1).gather(1, kept_RT)
        parents = torch.where(rows_T == 0, -1, new_rows[:, :rows].gather(1, parents.clamp(min=0)))
        return DraftTree.from_parents(tokens, parents, (keys_RT < NO_KEY).sum(dim=1))
