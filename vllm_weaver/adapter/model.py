# SPDX-License-Identifier: Apache-2.0
"""The Weaver adapter: from a drafter's marginals to conditional scores along a path.

Holds the parameters under their published names, the plain definition (`score_children`), the
teacher-forced pass of training (`forward`) and the entry to the fast path (`begin`, whose work is
in `expand.py`). It does not know how a tree is built, which tokens were accepted, how files are
read, or vLLM.

Legend: R requests; D draft depth; P candidate pool; N nodes; d target width; e embedding width;
r adapter width (`d_rank`); V vocabulary; H heads; h head width. Formula: spec section 2.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vllm_weaver.adapter.config import AdapterError, WeaverConfig
from vllm_weaver.adapter.expand import TreeScorer
from vllm_weaver.adapter.layers import (
    BiasedRMSNorm,
    PoolRows,
    TokenRows,
    WeaverBlock,
    linear,
    pool_log_probs,
    rotate_half,
    token_rows,
)

_PRECOMPUTE_ROWS = 8192


@dataclass(frozen=True)
class AdapterTables:
    """What `precompute` makes of the target's embedding and `lm_head`, one row per token.

    | field | shape | meaning |
    |---|---|---|
    | `token_input` | [V, r], or ids [...] -> [..., r] | E' = token_in(embed_norm(E)) |
    | `pool_rows` | [V, r], or (ids [N, P], hidden [N, r]) -> [N, P] | L' = lm_head @ query matrix |

    With L' the block's normalised output is dotted with the table directly, so the query projection
    drops out of every node step. A rank that holds some rows of the vocabulary precomputes those
    and puts functions in their place.
    """

    token_input: TokenRows
    pool_rows: PoolRows


class WeaverAdapter(nn.Module):
    """The adapter of spec section 2, variants v1 and v2.

    `state_dict()` has exactly the published names and shapes. A new adapter starts with a zero
    query projection: it scores the drafter's marginals unchanged until it is trained.
    The GEMMs run in the parameters' dtype, norms and log-softmax in float32.

    Args: `config`; `device` and `dtype` of the parameters ("meta" makes an empty shell).
    `metadata` is free-form and travels with the checkpoint.
    """

    pos_emb: nn.Parameter | None

    def __init__(
        self,
        config: WeaverConfig,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.config = config
        self.metadata: dict[str, object] = {}
        d, e, r, eps = config.d_model, config.d_embed, config.d_rank, config.norm_eps
        self.output_norm = BiasedRMSNorm(d, eps, device, dtype)
        self.proposal_in = nn.Linear(d, r, device=device, dtype=dtype)
        self.embed_norm = BiasedRMSNorm(e, eps, device, dtype)
        self.token_in = nn.Linear(e, r, device=device, dtype=dtype)
        self.blocks = nn.ModuleList(
            WeaverBlock(config, device, dtype) for _ in range(config.num_layers)
        )
        self.out_norm = BiasedRMSNorm(r, eps, device, dtype)
        self.lm_head_query_in = nn.Linear(r, d, bias=False, device=device, dtype=dtype)
        if config.variant == "v1":
            self.pos_emb = nn.Parameter(torch.empty(config.depth, r, device=device, dtype=dtype))
        else:
            self.register_parameter("pos_emb", None)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initialise for training; the query projection is zero, so scores start as marginals."""
        for name, module in self.named_modules():
            if isinstance(module, BiasedRMSNorm):
                nn.init.ones_(module.weight)
                nn.init.zeros_(module.bias)
            elif isinstance(module, nn.Linear):
                std = module.in_features**-0.5
                if name.endswith(("o_proj", "fc2", "down_proj")):
                    std *= (2 * self.config.num_layers) ** -0.5
                nn.init.trunc_normal_(module.weight, std=std, a=-3 * std, b=3 * std)
                if module.bias is not None:
                    nn.init.zeros_(module.bias)
        nn.init.zeros_(self.lm_head_query_in.weight)
        if self.pos_emb is not None:
            nn.init.normal_(self.pos_emb, std=0.02)

    @property
    def dtype(self) -> torch.dtype:
        """dtype of the parameters, and so of the GEMMs."""
        return self.token_in.weight.dtype

    @property
    def device(self) -> torch.device:
        """Where the parameters are."""
        return self.token_in.weight.device

    def forward(
        self, h_ver_Rd: Tensor, h_draft_RDd: Tensor, path_tokens_RN: Tensor, embed: TokenRows
    ) -> Tensor:
        """Queries of all nodes along given paths, in one causal pass: the form for training.

        | name | shape, dtype | meaning |
        |---|---|---|
        | `h_ver_Rd` | [R, d] float | verifier's hidden state, after its final norm, at the position
          whose logits produced the root token |
        | `h_draft_RDd` | [R, D, d] float | drafter's hidden states after its final norm, one per
          depth |
        | `path_tokens_RN` | [R, N] int | root token first; teacher forcing gives N = D (the root
          and the next D - 1 tokens of the target's own text) |
        | `embed` | [V, e] or ids -> rows | the target's token embedding (an `nn.Embedding` does) |
        | returns | [R, N, d] | row k is the query of the node at depth k: its dot products with
          `lm_head` rows correct the drafter's logits of depth k + 1 (`pool_log_probs`) |

        Gradients reach every parameter and both hidden-state inputs; safe under autocast (norms
        stay in float32). Errors: `AdapterError` for a shape that does not fit, N < 1 or N > D.
        Source: spec section 2, node step.
        """
        self._check_hidden(h_ver_Rd, h_draft_RDd)
        self._check_path(path_tokens_RN, h_ver_Rd.shape[0])
        rows_RNe = token_rows(embed, path_tokens_RN)
        return self._path_queries(h_ver_Rd, h_draft_RDd, rows_RNe, self.dtype)

    def score_children(
        self,
        h_ver_Rd: Tensor,
        h_draft_RDd: Tensor,
        candidate_ids_RDP: Tensor,
        candidate_logits_RDP: Tensor,
        path_tokens_RN: Tensor,
        embed_Vd: Tensor,
        lm_head_Vd: Tensor,
    ) -> Tensor:
        """Score the children of the node that each request's path leads to: the definition.

        | name | shape, dtype | meaning |
        |---|---|---|
        | `h_ver_Rd`, `h_draft_RDd` | [R, d], [R, D, d] float | as in `forward` |
        | `candidate_ids_RDP` | [R, D, P] int | pools of depths 1..D; -1 is padding |
        | `candidate_logits_RDP` | [R, D, P] float | the drafter's raw logits of the pool |
        | `path_tokens_RN` | [R, N] int | tokens from the root to the node, root first |
        | `embed_Vd`, `lm_head_Vd` | [V, e], [V, d] float | the target's own matrices |
        | returns | [R, P] float32 | log-probabilities over the pool of depth N, whose children
          the node has; -inf at padding |

        Everything is computed in float32, whatever the inputs' dtypes; the whole sequence of
        prefix and path rows is run anew, nothing is cached. Reads values back to check them, so it
        is a reference and not for a running engine.
        Errors: `AdapterError` for shapes that do not fit, N < 1, N > D, or an id outside [0, V).
        Source: spec section 2.
        """
        self._check_hidden(h_ver_Rd, h_draft_RDd)
        self._check_pool(candidate_ids_RDP, candidate_logits_RDP, h_ver_Rd.shape[0])
        self._check_path(path_tokens_RN, h_ver_Rd.shape[0])
        self._check_target(embed_Vd, lm_head_Vd)
        vocab = min(embed_Vd.shape[0], lm_head_Vd.shape[0])
        _check_range("path_tokens_RN", path_tokens_RN, 0, vocab)
        _check_range("candidate_ids_RDP", candidate_ids_RDP, -1, vocab)

        depth = path_tokens_RN.shape[1] - 1
        ids_RP = candidate_ids_RDP[:, depth].long()
        with torch.autocast(h_ver_Rd.device.type, enabled=False):
            rows_RNe = embed_Vd[path_tokens_RN.long()].float()
            query_RNd = self._path_queries(
                h_ver_Rd.float(), h_draft_RDd.float(), rows_RNe, torch.float32
            )
            pool_RPd = lm_head_Vd[ids_RP.clamp(min=0)].float()
            correction_RP = torch.einsum("rpd,rd->rp", pool_RPd, query_RNd[:, depth])
        return pool_log_probs(ids_RP, candidate_logits_RDP[:, depth], correction_RP)

    def begin(
        self,
        h_ver_Rd: Tensor,
        h_draft_RDd: Tensor,
        candidate_ids_RDP: Tensor,
        candidate_logits_RDP: Tensor,
        embed: TokenRows | None,
        lm_head: PoolRows | None,
        max_nodes: int,
        *,
        tables: AdapterTables | None = None,
        gather_rows: bool = False,
    ) -> TreeScorer:
        """Run the prefix of one decode step and return the scorer that expands its trees.

        | name | shape, dtype | meaning |
        |---|---|---|
        | `h_ver_Rd` ... `candidate_logits_RDP` | as in `score_children` | |
        | `embed` | [V, e] or ids -> rows; None with `tables` | the target's token embedding |
        | `lm_head` | [V, d] or (ids, queries) -> products; None with `tables` | the target's raw
          `lm_head`; the function form serves a vocabulary split over ranks (see `PoolRows`) |
        | `max_nodes` | | rows of the largest tree, root included (T) |
        | `tables` | `AdapterTables` | use `precompute`'s tables in place of the two matrices |
        | `gather_rows` | | copy the R x D x P rows of the pools once now (in the GEMMs' dtype)
          instead of N x P scattered rows in each round; needs a table, not a function |

        The scorer is the `expand` of `vllm_weaver.tree.build_weaver_tree`. No value is read back to
        the host, so that both can be captured in a CUDA graph; ids and tokens are therefore not
        range-checked here. No gradients: call both under the same grad or inference mode.
        Errors: `AdapterError` for shapes that do not fit. Source: spec section 2.
        """
        self._check_hidden(h_ver_Rd, h_draft_RDd)
        self._check_pool(candidate_ids_RDP, candidate_logits_RDP, h_ver_Rd.shape[0])
        if not isinstance(max_nodes, int) or max_nodes < 1:
            raise AdapterError(
                f"max_nodes is {max_nodes!r}: give the tree's rows, root included, 1 or more"
            )
        if tables is not None:
            for name, table in (
                ("token_input", tables.token_input),
                ("pool_rows", tables.pool_rows),
            ):
                if isinstance(table, Tensor):
                    _check_width(f"tables.{name}", table, "token_in.weight", self.config.d_rank)
            embed, lm_head = tables.token_input, tables.pool_rows
        else:
            if embed is None or lm_head is None:
                raise AdapterError(
                    "embed and lm_head are None without tables: pass the target's matrices, "
                    "or tables=adapter.precompute(embed, lm_head)"
                )
            self._check_target(embed, lm_head)
        if gather_rows and not isinstance(lm_head, Tensor):
            raise AdapterError(
                "gather_rows needs lm_head as a table, but it is a function: pass gather_rows=False"
            )
        return TreeScorer(
            self,
            h_ver_Rd,
            h_draft_RDd,
            candidate_ids_RDP,
            candidate_logits_RDP,
            embed,
            lm_head,
            max_nodes,
            projected=tables is not None,
            gather_rows=gather_rows,
        )

    @torch.no_grad()
    def precompute(self, embed_Vd: Tensor, lm_head_Vd: Tensor) -> AdapterTables:
        """Fold the adapter's outer projections into the target's matrices (`AdapterTables`).

        `embed_Vd` [V, e], `lm_head_Vd` [V, d] (a rank may pass the rows it holds); the tables are
        [V, r] in the parameters' dtype and device. The result is stale once a parameter changes.
        Errors: `AdapterError` for a wrong width. Source: spec section 2, fast form.
        """
        self._check_target(embed_Vd, lm_head_Vd)
        dtype = self.dtype
        token_input = embed_Vd.new_empty((embed_Vd.shape[0], self.config.d_rank), dtype=dtype)
        pool_rows = lm_head_Vd.new_empty((lm_head_Vd.shape[0], self.config.d_rank), dtype=dtype)
        # In slices: a float32 copy of a whole embedding would be gigabytes.
        for out, rows in zip(
            token_input.split(_PRECOMPUTE_ROWS), embed_Vd.split(_PRECOMPUTE_ROWS), strict=True
        ):
            out.copy_(self.token_input(rows, dtype))
        for out, rows in zip(
            pool_rows.split(_PRECOMPUTE_ROWS), lm_head_Vd.split(_PRECOMPUTE_ROWS), strict=True
        ):
            out.copy_(rows.to(dtype) @ self.lm_head_query_in.weight)
        return AdapterTables(token_input, pool_rows)

    def prefix_input(self, h_ver_Rd: Tensor, h_draft_RDd: Tensor, dtype: torch.dtype) -> Tensor:
        """Input rows of the prefix, [R, D + 1, r]: the verifier's state, then the drafter's."""
        h_RSd = torch.cat([h_ver_Rd[:, None], h_draft_RDd], dim=1)
        x_RSr = linear(self.proposal_in, self.output_norm(h_RSd, dtype))
        if self.pos_emb is not None:
            x_RSr = x_RSr + F.pad(self.pos_emb.to(dtype), (0, 0, 1, 0))
        return x_RSr

    def token_input(self, rows: Tensor, dtype: torch.dtype) -> Tensor:
        """Embedding rows [..., e] -> node inputs [..., r], before the position is added."""
        return linear(self.token_in, self.embed_norm(rows, dtype))

    def node_input(self, x_Nr: Tensor, depths_N: Tensor) -> Tensor:
        """Add the learned position of each node's depth (v1; v2 has RoPE and changes nothing)."""
        if self.pos_emb is None:
            return x_Nr
        last = self.config.depth - 1
        return x_Nr + self.pos_emb[depths_N.clamp(max=last)].to(x_Nr.dtype)

    def rope_tables(self, device: torch.device) -> tuple[Tensor, Tensor] | None:
        """cos and sin of positions 0..D, each [D + 1, h / 2] float32; None in v1."""
        if self.config.variant == "v1":
            return None
        half = self.config.head_dim // 2
        exponent = torch.arange(half, device=device, dtype=torch.float64) / half
        inverse = torch.exp(exponent * -math.log(self.config.rope_base))
        position = torch.arange(self.config.depth + 1, device=device, dtype=torch.float64)
        angle = position[:, None] * inverse
        return angle.cos().float(), angle.sin().float()

    def _path_queries(
        self, h_ver_Rd: Tensor, h_draft_RDd: Tensor, rows_RNe: Tensor, dtype: torch.dtype
    ) -> Tensor:
        # A path after its prefix is one sequence, and "all prefix rows, the strict ancestors and
        # itself" is then the plain causal mask over D + 1 + N rows.
        x_RLr = self.prefix_input(h_ver_Rd, h_draft_RDd, dtype)
        num_prefix, num_nodes = x_RLr.shape[1], rows_RNe.shape[1]
        depths_N = torch.arange(num_nodes, device=x_RLr.device)
        nodes_RNr = self.node_input(self.token_input(rows_RNe, dtype), depths_N)
        x_RLr = torch.cat([x_RLr, nodes_RNr], dim=1)
        positions_L = torch.cat([torch.arange(num_prefix, device=x_RLr.device), depths_N + 1])
        rope = self.rope_tables(x_RLr.device)
        length = num_prefix + num_nodes
        causal_LL = torch.ones(length, length, dtype=torch.bool, device=x_RLr.device).tril()
        for index, block in enumerate(self.blocks):
            assert isinstance(block, WeaverBlock)
            q, k, v = block.qkv(x_RLr)
            if rope is not None:
                cos, sin = (table[positions_L][:, None] for table in rope)
                q, k = rotate_half(q, cos, sin), rotate_half(k, cos, sin)
            # Prefix rows of the last block serve as keys and values alone.
            first = num_prefix if index == self.config.num_layers - 1 else 0
            attended = F.scaled_dot_product_attention(
                q[:, first:].transpose(1, 2),
                k.transpose(1, 2),
                v.transpose(1, 2),
                attn_mask=causal_LL[first:],
            )
            x_RLr = block.finish(x_RLr[:, first:], attended.transpose(1, 2))
        return linear(self.lm_head_query_in, self.out_norm(x_RLr, dtype))

    def _check_hidden(self, h_ver_Rd: Tensor, h_draft_RDd: Tensor) -> None:
        d, depth = self.config.d_model, self.config.depth
        if h_ver_Rd.dim() != 2 or h_ver_Rd.shape[1] != d:
            raise AdapterError(
                f"h_ver_Rd is {tuple(h_ver_Rd.shape)} but output_norm.weight is ({d},): "
                f"pass [R, {d}], the target's state after its final norm"
            )
        wanted = (h_ver_Rd.shape[0], depth, d)
        if tuple(h_draft_RDd.shape) != wanted:
            raise AdapterError(
                f"h_draft_RDd is {tuple(h_draft_RDd.shape)}, not {wanted}: "
                f"pass the drafter's first {depth} depths, {d} wide"
            )

    def _check_pool(self, ids_RDP: Tensor, logits_RDP: Tensor, requests: int) -> None:
        depth = self.config.depth
        if ids_RDP.dim() != 3 or tuple(ids_RDP.shape[:2]) != (requests, depth):
            raise AdapterError(
                f"candidate_ids_RDP is {tuple(ids_RDP.shape)}, not ({requests}, {depth}, P): "
                "pass one pool per request and depth"
            )
        if ids_RDP.shape[2] < 1 or logits_RDP.shape != ids_RDP.shape:
            raise AdapterError(
                f"candidate_logits_RDP is {tuple(logits_RDP.shape)} and candidate_ids_RDP "
                f"{tuple(ids_RDP.shape)}: pass one logit per candidate, P of 1 or more"
            )

    def _check_path(self, path_tokens_RN: Tensor, requests: int) -> None:
        shape, depth = tuple(path_tokens_RN.shape), self.config.depth
        if len(shape) != 2 or shape[0] != requests:
            raise AdapterError(
                f"path_tokens_RN is {shape}, not ({requests}, N): one path per request"
            )
        if not 1 <= shape[1] <= depth:
            raise AdapterError(
                f"path_tokens_RN is {shape}: a path has 1 (the root) to {depth} tokens, since "
                f"nodes at depth {depth} are leaves"
            )

    def _check_target(self, embed: TokenRows, lm_head: PoolRows) -> None:
        if isinstance(embed, Tensor):
            _check_width("embed", embed, "embed_norm.weight", self.config.d_embed)
        if isinstance(lm_head, Tensor):
            _check_width("lm_head", lm_head, "output_norm.weight", self.config.d_model)


def _check_width(name: str, table: Tensor, against: str, width: int) -> None:
    if table.dim() != 2 or table.shape[1] != width:
        raise AdapterError(
            f"{name} is {tuple(table.shape)} but the adapter's {against} wants rows of {width}: "
            "use the adapter that was trained for this target"
        )


def _check_range(name: str, ids: Tensor, low: int, vocab: int) -> None:
    smallest, largest = int(ids.min()), int(ids.max())
    if smallest < low or largest >= vocab:
        raise AdapterError(
            f"{name} holds ids from {smallest} to {largest}, outside [{low}, {vocab}): "
            "pass token ids of the target's vocabulary"
        )
