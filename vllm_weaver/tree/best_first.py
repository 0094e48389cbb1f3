# SPDX-License-Identifier: Apache-2.0
"""What the Weaver tree and the grown tree share: trees that grow, and their frontier.

The module does not know how many rounds a builder runs or which nodes it keeps in the end; it
knows how to pop the best candidates, place them in the trees and put their children on the
frontier.

Shape legend: R requests; T rows of a tree, root included; G nodes popped at once per request;
C children kept of a node; P candidate pool; F places of the frontier; N = R * G nodes expanded
at once; W words of ancestor bits.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from vllm_weaver.tree.draft_tree import DraftTree, row_bits
from vllm_weaver.tree.order import NO_KEY, best, stable_keys

ExpandFn = Callable[[Tensor, Tensor, Tensor, Tensor, DraftTree], tuple[Tensor, Tensor]]
"""`expand(request_N, node_N, tokens_N, depths_N, tree) -> (ids_NP, log_probs_NP)`.

Scores the children of N nodes at once; the adapter is one such callable, a table another.

| name         | shape  | dtype   | in/out | meaning                                              |
|--------------|--------|---------|--------|------------------------------------------------------|
| request_N    | [N]    | int32   | in     | request of the entry, n // G for entry n             |
| node_N       | [N]    | int32   | in     | row of the node in `tree`, -1 for an inert entry     |
| tokens_N     | [N]    | int32   | in     | token of the node; 0 for an inert entry              |
| depths_N     | [N]    | int32   | in     | depth of the node, the root's is 0; 0 if inert       |
| tree         | [R, T] |         | in     | nodes placed so far, the N nodes among them          |
| ids_NP       | [N, P] | integer | out    | distinct candidate tokens; below 0 for padding       |
| log_probs_NP | [N, P] | float   | out    | conditional log-probabilities, in any order along P  |

N is the same in every call of one build, so that the call can be captured in a CUDA graph: places
without a node to expand are filled with inert entries (node -1). The callable must return rows for
these too, of any content, NaN included, and they are ignored. It must write nothing that belongs
to another node on their account. Every other entry is a node above the depth limit whose parent
was expanded before, and no node is expanded twice. Log-probabilities above 0 count as 0;
candidates of log-probability -inf or NaN and padding ids are never placed. `tree` grows in place
after the call: the callable must neither change it nor keep it.
"""


@dataclass(slots=True)
class Group:
    """Nodes popped and placed together, best first. Entries that are not live mean nothing.

    | name      | shape  | dtype   | meaning                                          |
    |-----------|--------|---------|--------------------------------------------------|
    | live_RG   | [R, G] | bool    | the entry is a node; live entries come first     |
    | rows_RG   | [R, G] | int64   | row in the tree                                  |
    | tokens_RG | [R, G] | int32   | token                                            |
    | depths_RG | [R, G] | int32   | depth                                            |
    | scores_RG | [R, G] | float32 | cumulative log-probability                       |
    | places_RG | [R, G] | int64   | place on the frontier, where it was a candidate  |
    """

    live_RG: Tensor
    rows_RG: Tensor
    tokens_RG: Tensor
    depths_RG: Tensor
    scores_RG: Tensor
    places_RG: Tensor


class Growth:
    """Trees that grow by groups of nodes, and the candidates that may be placed next.

    Candidates stand on the frontier in the order of their insertion; each place is written once.
    The best candidate has the highest score and, at equal score, was inserted first.

    | name       | shape  | dtype   | meaning                                                |
    |------------|--------|---------|--------------------------------------------------------|
    | tree       | [R, T] |         | nodes placed so far; views that change in place        |
    | scores_RF  | [R, F] | float32 | cumulative log-probability, -inf where there is none   |
    | tokens_RF  | [R, F] | int32   | token                                                  |
    | parents_RF | [R, F] | int64   | row of the parent, where there is a candidate          |

    Every push writes at most `width` * `children` places, and there is room for `pushes` of
    them. Raises ValueError when `expand` returns something of a wrong shape or dtype.
    """

    def __init__(
        self,
        expand: ExpandFn,
        root_tokens_R: Tensor,
        *,
        num_rows: int,
        width: int,
        children: int,
        pushes: int,
    ) -> None:
        self._expand = expand
        self._width = width
        self._children = children
        self._num_rows = num_rows
        num_requests, device = root_tokens_R.shape[0], root_tokens_R.device

        # One row beyond the tree takes what entries that are not live would write.
        grown = DraftTree.root_only(root_tokens_R, num_rows)
        self._tokens = torch.nn.functional.pad(grown.tokens, (0, 1))
        self._parents = torch.nn.functional.pad(grown.parents, (0, 1))
        self._depths = torch.nn.functional.pad(grown.depths, (0, 1))
        self._ancestors = torch.nn.functional.pad(grown.ancestors, (0, 0, 0, 1))
        self.tree = DraftTree(
            tokens=self._tokens[:, :num_rows],
            parents=self._parents[:, :num_rows],
            depths=self._depths[:, :num_rows],
            num_nodes=grown.num_nodes,
            ancestors=self._ancestors[:, :num_rows],
        )
        self._row_scores = torch.full_like(self._tokens, -torch.inf, dtype=torch.float32)
        self._row_scores[:, 0] = 0.0
        self._own_bits = torch.nn.functional.pad(row_bits(num_rows, device), (0, 0, 0, 1))
        self._offsets_G = torch.arange(width, device=device)
        request_R = torch.arange(num_requests, dtype=torch.int32, device=device)
        self._request_N = request_R.repeat_interleave(width)

        shape = (num_requests, pushes * width * children)
        self.scores_RF = torch.full(shape, -torch.inf, device=device)
        self.tokens_RF = torch.zeros(shape, dtype=torch.int32, device=device)
        self.parents_RF = torch.zeros(shape, dtype=torch.int64, device=device)
        self._keys_RF = torch.full(shape, NO_KEY, dtype=torch.int64, device=device)
        self._used = 0

    def root(self) -> Group:
        """The roots as the one live entry of a group; they were never candidates."""
        rows_G = torch.where(self._offsets_G == 0, 0, self._num_rows)
        rows_RG = rows_G.expand(self.tree.num_requests, self._width)
        return Group(
            live_RG=rows_RG == 0,
            rows_RG=rows_RG,
            tokens_RG=self._tokens[:, :1].expand_as(rows_RG),
            depths_RG=self._depths[:, :1].expand_as(rows_RG),
            scores_RG=torch.zeros_like(rows_RG, dtype=torch.float32),
            places_RG=torch.full_like(rows_RG, -1),
        )

    def place_best(self) -> Group:
        """Pop the best candidates, as far as there are some and rows are left, and place them."""
        keys_RF = self._keys_RF[:, : self._used]
        keys_RG, places_RG = best(keys_RF, self._width)
        keys_RF.scatter_(1, places_RG, NO_KEY)
        rows_RG = self.tree.num_nodes[:, None] + self._offsets_G
        live_RG = (keys_RG < NO_KEY) & (rows_RG < self._num_rows)
        rows_RG = torch.where(live_RG, rows_RG, self._num_rows)

        tokens_RG = self.tokens_RF.gather(1, places_RG)
        parents_RG = self.parents_RF.gather(1, places_RG)
        depths_RG = self._depths.gather(1, parents_RG) + 1
        words = (-1, -1, self._ancestors.shape[2])
        ancestors_RGW = self._ancestors.gather(1, parents_RG[:, :, None].expand(words))
        ancestors_RGW |= self._own_bits[rows_RG]
        self._tokens.scatter_(1, rows_RG, tokens_RG)
        self._parents.scatter_(1, rows_RG, parents_RG.int())
        self._depths.scatter_(1, rows_RG, depths_RG)
        self._ancestors.scatter_(1, rows_RG[:, :, None].expand(words), ancestors_RGW)
        scores_RG = self.scores_RF.gather(1, places_RG)
        self._row_scores.scatter_(1, rows_RG, scores_RG)
        self.tree.num_nodes += live_RG.sum(dim=1, dtype=torch.int32)
        return Group(
            live_RG=live_RG,
            rows_RG=rows_RG,
            tokens_RG=tokens_RG,
            depths_RG=depths_RG,
            scores_RG=scores_RG,
            places_RG=places_RG,
        )

    def push_children(
        self, group: Group, expands_RG: Tensor, open_RG: Tensor | None = None
    ) -> None:
        """Expand the nodes of `expands_RG` and put the best children of each on the frontier.

        A node's children are inserted by falling log-probability, then by index in the pool, and
        the nodes in the group's order. Children of nodes outside `open_RG` are never popped.
        """
        ids_RGC, log_probs_RGC = self._best_children(group, expands_RG)
        scores_RE = (group.scores_RG[:, :, None] + log_probs_RGC).flatten(1)
        parents_RE = group.rows_RG[:, :, None].expand_as(ids_RGC).flatten(1)
        keys_RE = stable_keys(scores_RE, self._used)
        if open_RG is not None:
            open_RE = open_RG[:, :, None].expand_as(ids_RGC).flatten(1)
            keys_RE = torch.where(open_RE, keys_RE, NO_KEY)
        places = slice(self._used, self._used + scores_RE.shape[1])
        self.scores_RF[:, places] = scores_RE
        self.tokens_RF[:, places] = ids_RGC.flatten(1)
        self.parents_RF[:, places] = parents_RE
        self._keys_RF[:, places] = keys_RE
        self._used = places.stop

    def finished_tree(self) -> DraftTree:
        """The trees as they are now, rows by falling score and, at equal score, as placed.

        No node scores above its parent, which was placed before it, so parents stay first.
        """
        rows_T = torch.arange(self._num_rows, device=self._tokens.device)
        order_RT = stable_keys(self._row_scores[:, :-1]).argsort(dim=1)
        rank_RT = torch.empty_like(order_RT).scatter_(1, order_RT, rows_T.expand_as(order_RT))
        parents_RT = self.tree.parents.gather(1, order_RT)
        above_RT = rank_RT.gather(1, parents_RT.clamp(min=0).long())
        return DraftTree.from_parents(
            self.tree.tokens.gather(1, order_RT),
            torch.where(parents_RT < 0, -1, above_RT),
            self.tree.num_nodes,
        )

    def _best_children(self, group: Group, expands_RG: Tensor) -> tuple[Tensor, Tensor]:
        """[R, G, C] ids and float32 log-probabilities; -inf where there is no candidate."""
        expands_N = expands_RG.flatten()
        ids_NP, log_probs_NP = self._expand(
            self._request_N,
            torch.where(expands_N, group.rows_RG.flatten(), -1).int(),
            torch.where(expands_N, group.tokens_RG.flatten(), 0),
            torch.where(expands_N, group.depths_RG.flatten(), 0),
            self.tree,
        )
        _check_answer(ids_NP, log_probs_NP, expands_N.shape[0])
        log_probs_NP = log_probs_NP.detach().float().clamp(max=0.0)
        usable_NP = (log_probs_NP > -torch.inf) & (ids_NP >= 0) & expands_N[:, None]
        log_probs_NP = torch.where(usable_NP, log_probs_NP, -torch.inf)
        children = min(self._children, ids_NP.shape[1])
        _, best_NC = best(stable_keys(log_probs_NP), children)
        shape = (*expands_RG.shape, children)
        ids_NC = ids_NP.gather(1, best_NC).int()
        return ids_NC.view(shape), log_probs_NP.gather(1, best_NC).view(shape)


def _check_answer(ids_NP: Tensor, log_probs_NP: Tensor, num_nodes: int) -> None:
    if ids_NP.dim() != 2 or ids_NP.shape[0] != num_nodes or ids_NP.shape[1] < 1:
        raise ValueError(
            f"expand returned ids of shape {tuple(ids_NP.shape)} for {num_nodes} nodes: "
            "return [nodes, pool] with a pool of at least 1"
        )
    if log_probs_NP.shape != ids_NP.shape:
        raise ValueError(
            f"expand returned log_probs of shape {tuple(log_probs_NP.shape)} and ids of shape "
            f"{tuple(ids_NP.shape)}: both must be [nodes, pool]"
        )
    if ids_NP.is_floating_point() or not log_probs_NP.is_floating_point():
        raise ValueError(
            f"expand returned ids of {ids_NP.dtype} and log_probs of {log_probs_NP.dtype}: "
            "return integer ids and floating-point log_probs, in this order"
        )


def may_look(device: torch.device) -> bool:
    """Whether reading a tensor's value costs nothing, so that a loop may stop early on it.

    On an accelerator it would wait for the device; there the builders run a fixed number of
    rounds, and the rounds that a CPU skips change nothing.
    """
    return device.type == "cpu"


def check_growth(root_tokens_R: Tensor, max_depth: int, width: int, children: int) -> None:
    """Raise ValueError when an argument that the builders share is out of range."""
    if root_tokens_R.dim() != 1:
        raise ValueError(
            f"root_tokens has shape {tuple(root_tokens_R.shape)}: pass one token per request"
        )
    for name, value in (("max_depth", max_depth), ("width", width), ("children", children)):
        if value < 1:
            raise ValueError(f"{name} is {value}: pass at least 1")
