# SPDX-License-Identifier: Apache-2.0
"""The fast path: scores the children of many tree nodes at once, with cached keys and values.

A `TreeScorer` lives for one decode step. It knows nothing of how nodes are chosen, of tokens'
acceptance, or of vLLM: a tree builder calls it as its `expand`.

Where things are: keys and values of every request lie in one buffer of S = D + 1 + T + 1 rows per
request: the prefix, the tree's nodes, and one trash row for inert entries. `_slots` holds, for
each node, the buffer rows it attends to, in order: the D + 1 prefix rows, then its ancestors and
itself by depth. A node's row of `_slots` is its parent's with itself added, so attention reads
2 D + 1 rows for any size of tree, and no ancestor walk is needed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from vllm_weaver.adapter.config import AdapterError
from vllm_weaver.adapter.layers import (
    PoolRows,
    TokenRows,
    WeaverBlock,
    linear,
    pool_log_probs,
    rotate_half,
    take_rows,
    token_rows,
)

if TYPE_CHECKING:
    from vllm_weaver.adapter.model import WeaverAdapter


class HasParents(Protocol):
    """What the scorer reads of a tree: `parents` [R, T] int, -1 at the root."""

    parents: Tensor


class TreeScorer:
    """Scores children of tree nodes for one decode step; made by `WeaverAdapter.begin`.

    Call: `expand(request_N, node_N, tokens_N, depths_N, tree) -> (ids_NP, log_probs_NP)`.

    | name | shape, dtype | in/out | meaning |
    |---|---|---|---|
    | `request_N` | [N] int | in | request of each entry |
    | `node_N` | [N] int | in | node in its tree; -1 marks an inert entry |
    | `tokens_N`, `depths_N` | [N] int | in | the node's token, and its depth (root 0, at most
      D - 1) |
    | `tree.parents` | [R, T] int | in | T at most `max_nodes`; the parent of a node that is not the
      root must have been expanded before |
    | `ids_NP` | [N, P], dtype of the candidate ids | out | the pool of the children's depth |
    | `log_probs_NP` | [N, P] float32 | out | log-probabilities over that pool; -inf at padding |

    Inert entries give ids of -1 and -inf, whatever stands in their other fields, and disturb
    nothing. Nothing is read back to the host. Errors: `AdapterError` when the tree has more rows
    than `max_nodes`. Source: spec section 2, node step.
    """

    @torch.no_grad()
    def __init__(
        self,
        adapter: WeaverAdapter,
        h_ver_Rd: Tensor,
        h_draft_RDd: Tensor,
        candidate_ids_RDP: Tensor,
        candidate_logits_RDP: Tensor,
        embed: TokenRows,
        lm_head: PoolRows,
        max_nodes: int,
        *,
        projected: bool,
        gather_rows: bool,
    ) -> None:
        config = adapter.config
        self._adapter = adapter
        self._embed = embed
        # With projected tables a node's row and query are already in the adapter's own width.
        self._projected = projected
        self._depth = config.depth
        self._max_nodes = max_nodes
        self._ids_QP = candidate_ids_RDP.flatten(0, 1)
        self._logits_QP = candidate_logits_RDP.flatten(0, 1)
        self._products: Callable[[Tensor, Tensor, Tensor], Tensor]
        if not isinstance(lm_head, Tensor):
            function = lm_head
            self._products = lambda pool_N, ids_NP, query: function(ids_NP, query)
        elif gather_rows:
            gathered = take_rows(lm_head, self._ids_QP.long().clamp(min=0)).to(adapter.dtype)
            self._products = lambda pool_N, ids_NP, query: _dot(take_rows(gathered, pool_N), query)
        else:
            table = lm_head
            self._products = lambda pool_N, ids_NP, query: _dot(take_rows(table, ids_NP), query)

        requests = h_ver_Rd.shape[0]
        device = h_ver_Rd.device
        num_prefix = self._depth + 1
        self._stride = num_prefix + max_nodes + 1
        self._rope = adapter.rope_tables(device)
        rows = requests * self._stride
        self._kv = torch.empty(
            (config.num_layers, rows, 2, config.num_heads, config.head_dim),
            dtype=adapter.dtype,
            device=device,
        )
        base_R11 = torch.arange(requests, device=device)[:, None, None] * self._stride
        self._columns_L = torch.arange(num_prefix + self._depth, device=device)
        # Unused columns point at prefix row 0: it is always written, so a masked column never
        # brings in what an uninitialised row holds.
        first_L = torch.where(self._columns_L < num_prefix, self._columns_L, 0)
        self._slots = (
            (base_R11 + first_L)
            .expand(requests, max_nodes + 1, num_prefix + self._depth)
            .flatten(0, 1)
            .contiguous()
        )
        self._run_prefix(h_ver_Rd, h_draft_RDd)

    @torch.no_grad()
    def __call__(
        self,
        request_N: Tensor,
        node_N: Tensor,
        tokens_N: Tensor,
        depths_N: Tensor,
        tree: HasParents,
    ) -> tuple[Tensor, Tensor]:
        """Expand N nodes at once; see the class."""
        parents_RT = tree.parents
        if parents_RT.shape[1] > self._max_nodes:
            raise AdapterError(
                f"the tree has {parents_RT.shape[1]} rows but begin() was given max_nodes "
                f"{self._max_nodes}: pass the rows of the largest tree, root included"
            )
        inert_N = node_N < 0
        request_N = request_N.masked_fill(inert_N, 0).long()
        depths_N = depths_N.masked_fill(inert_N, 0).long()
        tokens_N = tokens_N.masked_fill(inert_N, 0).long()
        row_N = node_N.masked_fill(inert_N, self._max_nodes).long()
        # The root continues its own, still empty, row of slots.
        parents_N = parents_RT[request_N, node_N.long().clamp(min=0)].long().clamp(min=0)

        own_N = request_N * self._stride + self._depth + 1 + row_N
        slots_NL = self._slots[request_N * (self._max_nodes + 1) + parents_N]
        own_column_N1 = (self._depth + 1 + depths_N)[:, None]
        slots_NL = slots_NL.scatter(1, own_column_N1, own_N[:, None])
        self._slots[request_N * (self._max_nodes + 1) + row_N] = slots_NL
        mask_N11L = (self._columns_L <= own_column_N1)[:, None, None]

        hidden_Nr = self._run_nodes(tokens_N, depths_N, own_N, slots_NL, mask_N11L)

        pool_N = request_N * self._depth + depths_N
        ids_NP = self._ids_QP[pool_N].masked_fill(inert_N[:, None], -1)
        query = hidden_Nr
        if not self._projected:
            query = linear(self._adapter.lm_head_query_in, hidden_Nr)
        products_NP = self._products(pool_N, ids_NP.long().clamp(min=0), query)
        log_probs_NP = pool_log_probs(ids_NP, self._logits_QP[pool_N], products_NP)
        return ids_NP, log_probs_NP

    def _run_prefix(self, h_ver_Rd: Tensor, h_draft_RDd: Tensor) -> None:
        """One causal pass over the D + 1 prefix rows; only keys and values stay."""
        adapter = self._adapter
        x_RSr = adapter.prefix_input(h_ver_Rd, h_draft_RDd, adapter.dtype)
        requests, num_prefix = x_RSr.shape[:2]
        rope = None if self._rope is None else tuple(table[:, None] for table in self._rope)
        kv_layers = self._kv.unflatten(1, (requests, self._stride))
        for index, module in enumerate(adapter.blocks):
            block = cast(WeaverBlock, module)
            last = index == len(adapter.blocks) - 1
            if last:
                k, v = block.kv(x_RSr)
            else:
                q, k, v = block.qkv(x_RSr)
            if rope is not None:
                k = rotate_half(k, *rope)
            kv_layers[index, :, :num_prefix, 0] = k
            kv_layers[index, :, :num_prefix, 1] = v
            if last:
                return
            if rope is not None:
                q = rotate_half(q, *rope)
            attended = F.scaled_dot_product_attention(
                q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), is_causal=True
            )
            x_RSr = block.finish(x_RSr, attended.transpose(1, 2))

    def _run_nodes(
        self,
        tokens_N: Tensor,
        depths_N: Tensor,
        own_N: Tensor,
        slots_NL: Tensor,
        mask_N11L: Tensor,
    ) -> Tensor:
        """The node step up to the output norm, [N, r]; leaves each node's keys and values."""
        adapter = self._adapter
        rows = token_rows(self._embed, tokens_N)
        if self._projected:
            x_Nr = rows.to(adapter.dtype)
        else:
            x_Nr = adapter.token_input(rows, adapter.dtype)
        x_Nr = adapter.node_input(x_Nr, depths_N)
        rope = None
        if self._rope is not None:
            rope = tuple(table[depths_N + 1][:, None] for table in self._rope)
        for index, module in enumerate(adapter.blocks):
            block = cast(WeaverBlock, module)
            q, k, v = block.qkv(x_Nr)
            if rope is not None:
                q, k = rotate_half(q, *rope), rotate_half(k, *rope)
            kv = self._kv[index]
            kv[own_N] = torch.stack([k, v], dim=1)
            keys_NLHh, values_NLHh = take_rows(kv, slots_NL).unbind(2)
            attended = F.scaled_dot_product_attention(
                q[:, :, None],
                keys_NLHh.transpose(1, 2),
                values_NLHh.transpose(1, 2),
                attn_mask=mask_N11L,
            )
            x_Nr = block.finish(x_Nr, attended[:, :, 0])
        return adapter.out_norm(x_Nr, adapter.dtype)


def _dot(rows_NPd: Tensor, query_Nd: Tensor) -> Tensor:
    # The query comes first: a batch of row-vector products is much faster on a CPU than one of
    # column-vector products.
    rows_NdP = rows_NPd.to(query_Nd.dtype).transpose(1, 2)
    return torch.bmm(query_Nd[:, None], rows_NdP)[:, 0]
