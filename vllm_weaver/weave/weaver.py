# SPDX-License-Identifier: Apache-2.0
"""Buffers and launches of a weave: everything between the marginals and the finished trees.

The kernels are `weave.triton`'s and `adapter.triton`'s; nothing is computed here.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any, cast

import torch
import torch.nn.functional as F
import triton
from torch import Tensor

from vllm_weaver.adapter.config import AdapterError
from vllm_weaver.adapter.layers import BiasedRMSNorm, WeaverBlock
from vllm_weaver.adapter.model import AdapterTables, WeaverAdapter
from vllm_weaver.adapter.tiling import (
    FEW_ROWS,
    LayerShape,
    ScoreTiling,
    Tiling,
    choose_scores,
    choose_tiling,
    linear_scratch,
)
from vllm_weaver.adapter.triton import (
    ACTIVATIONS,
    INTERPRETED,
    SWIGLU,
    folded_bias,
    launch_attention,
    launch_linear,
)
from vllm_weaver.ops.noise.drawn import HALVINGS
from vllm_weaver.tree.best_first import check_growth
from vllm_weaver.tree.draft_tree import DraftTree, check_budget, num_words
from vllm_weaver.tree.rank_triton import rank_rows
from vllm_weaver.tree.shared_noise import (
    CONDITIONAL_WEIGHT,
    OUTSIDE_PENALTY,
    SharedNoise,
)
from vllm_weaver.tree.triton import Frontier, TreeRows
from vllm_weaver.tree.weaver_tree import group_width, most_rounds
from vllm_weaver.weave.arguments import (
    ByDepth,
    Entries,
    Growth,
    InputTables,
    Noise,
    Query,
    Sizes,
    StepInputs,
)
from vllm_weaver.weave.triton import score_and_grow_kernel, start_kernel

MAX_GRAPHS = 32
"""Captured graphs that are kept; the one captured first goes first."""
MAX_POOL = 1024
"""Candidates per depth: one program holds those of all nodes of a round."""
Tilings = Mapping[LayerShape, Tiling]
ScoreTilings = Mapping[tuple[int, int], ScoreTiling]


class TreeWeaver:
    """Builds Weaver trees on a GPU, in a fixed number of launches and in buffers of its own.

    | argument | meaning |
    |---|---|
    | `adapter` | on the device, contiguous; its parameters must not move or change afterwards |
    | `embed`, `lm_head` | [V, e] and [V, d], contiguous, of any float dtype; None with `tables` |
    | `tables` | `adapter.precompute`'s, as tensors: two launches a round fewer, and 42 MB a round
      less to read at the published size, for 2 V r numbers of memory |
    | `max_requests`, `pool` | largest R; P |
    | `budget`, `expansion_width`, `children`, `full_pools` | as in `tree.build_weaver_tree` |
    | `overlap` | launch each kernel while the one before ends, and fetch its weights meanwhile;
      needs CUDA and compute capability 9.0; None: where there is that |
    | `tilings`, `score_tilings` | launch shapes instead of those of `adapter.tiling` |
    | `graphs` | whether calls are captured and replayed; None: on a GPU |

    `build` gives the trees of `build_weaver_tree(adapter.begin(...), ...)`. Scores are added up in
    float32 throughout, where `TreeScorer` rounds to the adapter's dtype between layers: in float32
    the trees are the same but for candidates within that error of each other.

    Errors: `AdapterError` for tables that do not fit, `ValueError` for arguments out of range.
    """

    @torch.no_grad()
    def __init__(
        self,
        adapter: WeaverAdapter,
        embed: Tensor | None,
        lm_head: Tensor | None,
        *,
        max_requests: int,
        budget: int,
        pool: int,
        tables: AdapterTables | None = None,
        expansion_width: int | None = None,
        children: int = 8,
        full_pools: bool = False,
        overlap: bool | None = None,
        tilings: Tilings | None = None,
        score_tilings: ScoreTilings | None = None,
        graphs: bool | None = None,
    ) -> None:
        config = adapter.config
        device, dtype = adapter.device, adapter.dtype
        if device.type != "cuda" and not INTERPRETED:
            raise ValueError(
                f"TreeWeaver cannot run on {device.type} without TRITON_INTERPRET=1: "
                "use build_weaver_tree"
            )
        self._adapter = adapter
        self._projected = tables is not None
        source = (tables.token_input, tables.pool_rows) if tables is not None else (embed, lm_head)
        widths = (config.d_rank,) * 2 if self._projected else (config.d_embed, config.d_model)
        self._token_rows, self._pool_rows = (
            _table(name, table, width)
            for name, table, width in zip(("embed", "lm_head"), source, widths, strict=True)
        )
        if max_requests < 1 or not 1 <= pool <= MAX_POOL:
            raise ValueError(
                f"max_requests is {max_requests} and pool {pool}: pass at least 1 request and "
                f"1 to {MAX_POOL} candidates"
            )
        self.max_requests, self.budget, self.pool = max_requests, check_budget(budget), pool
        self._expansion_width = expansion_width
        self.width = group_width(budget, expansion_width)
        roots = torch.full((max_requests,), -1, dtype=torch.int32, device=device)
        check_growth(roots, config.depth, self.width, children)
        self._children = min(children, pool)
        self._full_pools = full_pools
        self.rounds = self.shape_for(budget)[1]
        self._overlap = can_overlap(device) if overlap is None else overlap
        self._tilings, self._score_tilings = tilings, score_tilings
        self._graphs: dict[tuple[object, ...], tuple[torch.cuda.CUDAGraph, int]] | None = (
            {} if (device.type == "cuda" if graphs is None else graphs) else None
        )

        rows = budget + 1
        nodes, prefix = max_requests * self.width, max_requests * (config.depth + 1)
        # The prefix pass is over before the first round and shares its buffers.
        most = max(nodes, prefix)
        r, depth = config.d_rank, config.depth
        self._stride = depth + 1 + rows
        shapes = [self.shape_for(count) for count in range(1, rows)]
        places = max(width * rounds for width, rounds in shapes) * self._children

        def empty(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        def index(*shape: int) -> Tensor:
            return empty(*shape, dtype=torch.int32)

        self._h_ver = empty(max_requests, config.d_model, dtype=dtype)
        self._roots = roots
        # As grown, and with rows by falling score.
        self._tree, self._ranked = (
            TreeRows(
                *(index(max_requests, rows), index(max_requests, rows), index(max_requests, rows)),
                index(max_requests),
                empty(max_requests, rows, num_words(rows), dtype=torch.int64),
            )
            for _ in range(2)
        )
        self._row_scores = empty(max_requests, rows)
        self._frontier = Frontier(
            empty(max_requests, places, dtype=torch.int64),
            index(max_requests, places),
            index(max_requests, places),
        )
        self._entries = Entries(index(nodes), index(nodes), empty(nodes))
        # With projected tables the nodes' inputs are the residual stream besides.
        self._inputs = StepInputs(
            *(index(nodes), index(nodes), index(nodes)),
            path=index(nodes, depth),
            row_paths=index(max_requests, rows, depth),
            x=empty(nodes, r) if self._projected else None,
            scaled=empty(nodes, widths[0], dtype=dtype),
            squares=empty(nodes),
        )
        self._prefix_x = empty(prefix, config.d_model, dtype=dtype)
        self._prefix_squares = empty(prefix)
        t = torch.arange(depth + 1, dtype=torch.int32, device=device).repeat(max_requests)
        request = torch.arange(max_requests, dtype=torch.int32, device=device)
        self._prefix_position, self._prefix_count = t, t + 1
        self._prefix_slot = request.repeat_interleave(depth + 1) * self._stride + t
        self._kv = empty(config.num_layers, max_requests * self._stride, 2 * r, dtype=dtype)
        self._x = [empty(most, r) for _ in range(2)]
        self._scaled = empty(most, r, dtype=dtype)
        self._q = empty(most, r)
        self._attended = empty(most, r, dtype=dtype)
        self._hidden = empty(most, config.mlp_dim, dtype=dtype)
        self._query = None if self._projected else empty(nodes, config.d_model)
        self._scores, self._request_ticket = empty(nodes, pool), index(max_requests)
        # Blocks of 16 outputs or more, or of any number where rows are few.
        blocks = max(triton.cdiv(r, 16) * most, r * FEW_ROWS)
        self._squares = [empty(blocks) for _ in range(2)]
        self._positions = None
        if adapter.pos_emb is not None:
            self._positions = F.pad(adapter.pos_emb.detach(), (0, 0, 1, 0)).contiguous()
        rope = adapter.rope_tables(device)
        self._rope = None if rope is None else torch.stack(rope, dim=1).contiguous()
        part, ticket = self._scratch()
        self._part, self._ticket = empty(part), index(ticket)
        layers = [cast(WeaverBlock, block) for block in adapter.blocks]
        self._qkv_bias = [folded_bias(b.qkv_proj, b.norm_attn.bias) for b in layers]
        self._first_bias = [folded_bias(_mlp(b)[0], b.norm_mlp.bias) for b in layers]
        self._prefix_bias = folded_bias(adapter.proposal_in, _norm(adapter.output_norm).bias)
        if not self._projected:
            norms = _norm(adapter.embed_norm), _norm(adapter.out_norm)
            self._token_bias = folded_bias(adapter.token_in, norms[0].bias)
            self._query_bias = folded_bias(adapter.lm_head_query_in, norms[1].bias)
        self.launches = 0

    @property
    def roots(self) -> tuple[Tensor, Tensor]:
        """Buffers of `h_ver_Rd` and, int32, `root_tokens_R` for `max_requests` requests.

        A caller may fill them itself and pass their first rows to `build`.
        """
        return self._h_ver, self._roots

    def nbytes(self) -> int:
        """Bytes of the buffers, without the adapter's parameters and the tables."""
        tables = self._token_rows, self._pool_rows
        return sum(
            x.numel() * x.element_size()
            for x in _tensors(tuple(vars(self).values()))
            if not any(x is table for table in tables)
        )

    def table_nbytes(self) -> int:
        """Bytes of the precomputed tables; 0 without."""
        tables = (self._token_rows, self._pool_rows) if self._projected else ()
        return sum(table.numel() * table.element_size() for table in tables)

    @torch.no_grad()
    def build(
        self,
        h_ver_Rd: Tensor,
        h_draft_RDd: Tensor,
        candidate_ids_RDP: Tensor,
        candidate_logits_RDP: Tensor,
        root_tokens_R: Tensor,
        noise: SharedNoise | None = None,
        nodes: int | None = None,
    ) -> DraftTree:
        """Build one tree per request.

        | name | shape, dtype | meaning |
        |---|---|---|
        | `h_ver_Rd` ... `candidate_logits_RDP` | as in `WeaverAdapter.begin` | unit stride in the
          last axis, P = `pool` |
        | `root_tokens_R` | [R] int | last sampled tokens; below 0: an inert request, of which
          nothing else is read and whose tree has no row |
        | `noise` | [R, D, P] | of the sampler, for the candidates, whose nodes are then ranked by
          their chance to be drawn (`SharedNoise.expanding`); None: by probability |
        | `nodes` | int | nodes below the root, `budget` at most and if None: trees as of such a
          budget, in rows of T |
        | returns | [R, T] | trees in this object's buffers, valid until the next call |

        Nothing is read back to the host and nothing allocated. Where graphs are used, the first
        call with new addresses, strides or number of requests (rounded up) of the drafter's arrays
        or of the noise captures one, so these should stay where they are; within another capture
        the kernels are launched as they are.
        """
        requests = root_tokens_R.shape[0]
        self._check(h_ver_Rd, h_draft_RDd, candidate_ids_RDP, candidate_logits_RDP, requests)
        nodes = self.budget if nodes is None else nodes
        if not 1 <= nodes <= self.budget:
            raise ValueError(f"nodes is {nodes}: pass 1 to the budget, {self.budget}")
        arrays: tuple[Tensor, ...] = (h_draft_RDd, candidate_ids_RDP, candidate_logits_RDP)
        if noise is not None:
            self._check_noise(noise, requests)
            arrays += (noise.noise_RDP, *noise.sampling.parameters())
        if requests:
            # What the caller has put there is not copied.
            for own, given in ((self._h_ver, h_ver_Rd), (self._roots, root_tokens_R)):
                if own.data_ptr() != given.data_ptr():
                    own[:requests].copy_(given)
            if self._graphs is None or torch.cuda.is_current_stream_capturing():
                self._launch(requests, nodes, *arrays)
            else:
                self._replay(requests, nodes, arrays)
        return DraftTree(*(part[:requests] for part in self._ranked))

    @contextlib.contextmanager
    def without_graphs(self) -> Iterator[None]:
        """Launch the kernels of the calls within as they are: for passes that warm up a caller."""
        graphs, self._graphs = self._graphs, None
        try:
            yield
        finally:
            self._graphs = graphs

    def shape_for(self, nodes: int) -> tuple[int, int]:
        """Nodes popped per round, and rounds, that grow trees of `nodes` below the root."""
        width = group_width(nodes, self._expansion_width)
        depth, children = self._adapter.config.depth, self._children
        return width, most_rounds(nodes, depth, width, children, self._full_pools)

    def _replay(self, requests: int, nodes: int, arrays: tuple[Tensor, ...]) -> None:
        assert self._graphs is not None
        padded = triton.next_power_of_2(requests) if requests <= 8 else -(-requests // 8) * 8
        padded = min(padded, self.max_requests)
        self._roots[requests:padded].fill_(-1)
        key = (padded, nodes, *((x.data_ptr(), x.dtype, x.stride()) for x in arrays))
        if key not in self._graphs:
            # Once outside a capture, since the first launch of a kernel compiles and loads it.
            self._launch(padded, nodes, *arrays)
            graph = torch.cuda.CUDAGraph()
            # Other threads of the process may use the device meanwhile.
            with torch.cuda.graph(graph, capture_error_mode="thread_local"):
                self._launch(padded, nodes, *arrays)
            if len(self._graphs) >= MAX_GRAPHS:
                self._graphs.pop(next(iter(self._graphs)))
            self._graphs[key] = graph, self.launches
        graph, self.launches = self._graphs[key]
        graph.replay()

    def _launch(
        self,
        R: int,
        nodes: int,
        h_draft_RDd: Tensor,
        ids_RDP: Tensor,
        logits_RDP: Tensor,
        noise_RDP: Tensor | None = None,
        *parameters: Tensor,
    ) -> None:
        self.launches = 1
        width, rounds = self.shape_for(nodes)
        noise = None if noise_RDP is None else Noise(ByDepth.of(noise_RDP), *parameters)
        candidates = ByDepth.of(ids_RDP), ByDepth.of(logits_RDP), noise
        self._start(R, h_draft_RDd, width)
        self._run_prefix(R)
        for step in range(rounds):
            query, squares = self._run_nodes(R, width)
            self._score_and_grow(R, step, query, squares, *candidates, width=width, nodes=nodes)
        rank_rows(self._row_scores, self._tree, self._ranked, R)

    def _growth(self) -> Growth:
        """What is given to a kernel that places nodes and prepares them for the next round."""
        # Without projected tables the position is added after the input projection.
        positions = self._positions if self._projected else None
        tables = InputTables(self._token_rows, positions, self._first_norm().weight)
        return Growth(
            *(self._tree, self._frontier, self._row_scores),
            *(tables, self._entries, self._inputs, self._stride),
        )

    def _first_norm(self) -> BiasedRMSNorm:
        """The norm that the nodes' inputs meet first."""
        adapter = self._adapter
        return _norm(adapter.blocks[0].norm_attn if self._projected else adapter.embed_norm)

    def _sizes(self, width: int) -> dict[str, Any]:
        rows, words = self._tree.ancestors.shape[1:]
        inputs = self._inputs.scaled.shape[1]
        block = min(2048 if width <= 8 else 512, triton.next_power_of_2(inputs))
        return {
            "sizes": Sizes(
                *(rows, words, self._adapter.config.depth, width, inputs, block),
                *(self.pool, self._children, self._frontier.keys.shape[1]),
            ),
            "OVERLAP": self._overlap,
            **({"launch_pdl": True} if self._overlap else {}),
        }

    def _start(self, R: int, h_draft_RDd: Tensor, width: int) -> None:
        config = self._adapter.config
        self.launches += 1
        start_kernel[(config.depth + 2, R)](
            *(self._h_ver, ByDepth.of(h_draft_RDd), self._roots),
            *(self._prefix_x, _norm(self._adapter.output_norm).weight, self._prefix_squares),
            *(self._h_ver.stride(0), self._growth()),
            WIDTH=config.d_model,
            num_warps=4,
            **self._sizes(width),
        )

    def _linear(
        self, rows: int, x: Tensor, weight: Tensor, out: Tensor | None, **options: Any
    ) -> int:
        self.launches += 1
        gated = options.get("activation") == SWIGLU
        outputs = weight.shape[0] // (2 if gated else 1)
        tiling = choose_tiling(rows, x.shape[1], outputs, weight.dtype, gated, self._tilings)
        return launch_linear(
            *(tiling, rows, x, weight, out),
            part=self._part,
            ticket=self._ticket,
            overlap=self._overlap,
            **options,
        )

    def _run_prefix(self, R: int) -> None:
        """Keys and values of the D + 1 prefix rows of every request, in every layer."""
        adapter = self._adapter
        config = adapter.config
        rows = R * (config.depth + 1)
        x, squares = self._x[0], self._squares[0]
        norm = _norm(adapter.output_norm)
        J = self._linear(
            *(rows, self._prefix_x, adapter.proposal_in.weight, x),
            bias_M=self._prefix_bias,
            squares_JN=(self._prefix_squares, 1),
            eps=norm.eps,
            add=self._positions,
            add_index_N=self._prefix_position,
            scaled=(self._scaled, _norm(adapter.blocks[0].norm_attn).weight),
            out_squares=squares,
        )
        cache = (self._prefix_slot, self._prefix_count, config.depth + 1)
        scaled = self._scaled
        for layer, module in enumerate(adapter.blocks):
            block = cast(WeaverBlock, module)
            if layer < config.num_layers - 1:
                given = (rows, layer, x, scaled, (squares, J))
                x, squares, J = self._run_block(*given, *cache)
            else:
                self._linear(
                    *(rows, scaled, block.qkv_proj.weight[config.d_rank :], None),
                    bias_M=self._qkv_bias[layer][config.d_rank :],
                    squares_JN=(squares, J),
                    eps=block.norm_attn.eps,
                    cache=(self._kv[layer], self._prefix_slot),
                )

    def _run_nodes(self, R: int, width: int) -> tuple[Tensor, tuple[Tensor, int] | None]:
        """The node step of all entries: queries, with their squares where a norm is to come."""
        adapter = self._adapter
        rows = R * width
        x, scaled, squares, J = self._inputs.x, self._inputs.scaled, self._inputs.squares, 1
        if not self._projected:
            x, out_squares = self._x[0], self._squares[0]
            J = self._linear(
                *(rows, scaled, adapter.token_in.weight, x),
                bias_M=self._token_bias,
                squares_JN=(squares, J),
                eps=_norm(adapter.embed_norm).eps,
                add=self._positions,
                add_index_N=self._inputs.position,
                scaled=(self._scaled, _norm(adapter.blocks[0].norm_attn).weight),
                out_squares=out_squares,
            )
            scaled, squares = self._scaled, out_squares
        cache = (self._inputs.slot, self._inputs.columns, width)
        for layer in range(adapter.config.num_layers):
            x, squares, J = self._run_block(rows, layer, x, scaled, (squares, J), *cache)
            scaled = self._scaled
        if self._query is None:
            return x, (squares, J)
        self._linear(
            *(rows, scaled, adapter.lm_head_query_in.weight, self._query),
            bias_M=self._query_bias,
            squares_JN=(squares, J),
            eps=_norm(adapter.out_norm).eps,
        )
        return self._query, None

    def _run_block(
        self,
        rows: int,
        layer: int,
        x: Tensor,
        scaled: Tensor,
        squares_JN: tuple[Tensor, int],
        slot: Tensor,
        count: Tensor,
        group: int,
    ) -> tuple[Tensor, Tensor, int]:
        """One block over `rows` rows of the stream `x` and their product `scaled` with its norm's
        weight, into `_x[0]` and, unless nothing follows it, `_scaled`; its squares, their number.
        """
        adapter = self._adapter
        block = cast(WeaverBlock, adapter.blocks[layer])
        self._linear(
            *(rows, scaled, block.qkv_proj.weight, self._q),
            bias_M=self._qkv_bias[layer],
            squares_JN=squares_JN,
            eps=block.norm_attn.eps,
            cache=(self._kv[layer], slot),
        )
        self.launches += 1
        launch_attention(
            *(rows, self._q, self._kv[layer], self._inputs.path),
            *(count, self._rope, self._attended),
            group=group,
            stride=self._stride,
            heads=block.num_heads,
            overlap=self._overlap,
        )
        between, squares = self._x[1], self._squares[1]
        J = self._linear(
            *(rows, self._attended, block.o_proj.weight, between),
            add=x,
            scaled=(self._scaled, block.norm_mlp.weight),
            out_squares=squares,
        )
        first, second = _mlp(block)
        self._linear(
            *(rows, self._scaled, first.weight, self._hidden),
            bias_M=self._first_bias[layer],
            squares_JN=(squares, J),
            eps=block.norm_mlp.eps,
            activation=ACTIVATIONS[block.activation or "gelu"],
        )
        following: BiasedRMSNorm | None = None
        if layer + 1 < adapter.config.num_layers:
            following = _norm(adapter.blocks[layer + 1].norm_attn)
        elif not self._projected:
            following = _norm(adapter.out_norm)
        out, out_squares = self._x[0], self._squares[0]
        J = self._linear(
            *(rows, self._hidden, second.weight, out),
            bias_M=second.bias,
            add=between,
            scaled=None if following is None else (self._scaled, following.weight),
            out_squares=out_squares,
        )
        return out, out_squares, J

    def _score_and_grow(
        self,
        R: int,
        step: int,
        query: Tensor,
        squares_JN: tuple[Tensor, int] | None,
        ids: ByDepth,
        logits: ByDepth,
        noise: Noise | None,
        *,
        width: int,
        nodes: int,
    ) -> None:
        self.launches += 1
        norm = _norm(self._adapter.out_norm)
        squares, J = squares_JN if squares_JN is not None else (None, 0)
        rows, inputs = R * width, query.shape[1]
        tiling = choose_scores(inputs, R, width, self.pool, self._score_tilings)
        score_and_grow_kernel[(triton.cdiv(self.pool, tiling.candidates), rows)](
            *(Query(query, squares, norm.weight, norm.bias, norm.eps), self._pool_rows),
            *(ids, logits, noise, self._scores, self._request_ticket),
            *(self._growth(), step * width * self._children, rows),
            *(CONDITIONAL_WEIGHT, OUTSIDE_PENALTY),
            LIMIT=nodes + 1,
            HALVINGS=HALVINGS,
            BP=tiling.candidates,
            K=inputs,
            BK=tiling.block_k,
            J=J,
            num_warps=tiling.num_warps,
            **self._sizes(width),
        )

    def _linears(self) -> Iterator[tuple[bool, int, int, bool]]:
        """Layers by their inputs and outputs: of the prefix alone or of both; gated or not."""
        config = self._adapter.config
        d, r, m = config.d_model, config.d_rank, config.mlp_dim
        yield True, d, r, False
        yield True, r, 2 * r, False
        if not self._projected:
            yield False, config.d_embed, r, False
            yield False, r, d, False
        yield False, r, 3 * r, False
        yield False, r, r, False
        yield False, r, m, config.activation == "swiglu"
        yield False, m, r, False

    def _scratch(self) -> tuple[int, int]:
        """The largest parts and tickets that any launch needs, over all numbers of requests."""
        part = ticket = 1
        prefix = self._adapter.config.depth + 1
        for R in range(1, self.max_requests + 1):
            for _, inputs, outputs, gated in self._linears():
                for rows in (R * prefix, *(R * width for width in range(1, self.width + 1))):
                    tiling = choose_tiling(
                        rows, inputs, outputs, self._adapter.dtype, gated, self._tilings
                    )
                    parts, tickets = linear_scratch(tiling, rows, outputs, gated)
                    part, ticket = max(part, parts), max(ticket, tickets)
        return part, ticket

    def _check(
        self, h_ver: Tensor, h_draft: Tensor, ids: Tensor, logits: Tensor, requests: int
    ) -> None:
        config = self._adapter.config
        if requests > self.max_requests:
            raise ValueError(f"{requests} requests, but max_requests is {self.max_requests}")
        pools = (requests, config.depth, self.pool)
        for name, tensor, shape in (
            ("h_ver_Rd", h_ver, (requests, config.d_model)),
            ("h_draft_RDd", h_draft, (requests, config.depth, config.d_model)),
            ("candidate_ids_RDP", ids, pools),
            ("candidate_logits_RDP", logits, pools),
        ):
            if tuple(tensor.shape) != shape:
                raise AdapterError(f"{name} is {tuple(tensor.shape)}, not {shape}")
            if tensor.stride(-1) != 1 or tensor.device != self._roots.device:
                raise AdapterError(
                    f"{name} has strides {tensor.stride()} on {tensor.device}: pass unit stride in "
                    f"the last axis, on {self._roots.device}"
                )
        if ids.dtype not in (torch.int32, torch.int64):
            raise AdapterError(f"candidate_ids_RDP is {ids.dtype}: pass int32 or int64")

    def _check_noise(self, noise: SharedNoise, requests: int) -> None:
        shape = (requests, self._adapter.config.depth, self.pool)
        found = noise.noise_RDP
        if tuple(found.shape) != shape or found.stride(-1) != 1 or found.dtype != torch.float32:
            raise AdapterError(
                f"the noise is {tuple(found.shape)} of {found.dtype} with strides "
                f"{found.stride()}, not float32 {shape} with unit stride in the last axis"
            )


def can_overlap(device: torch.device) -> bool:
    """Whether a launch may start while the one before it ends."""
    if INTERPRETED or device.type != "cuda" or torch.version.hip is not None:
        return False
    return torch.cuda.get_device_capability(device)[0] >= 9


def _tensors(value: object) -> Iterator[Tensor]:
    """Tensors in tuples and lists of any depth."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, tuple | list):
        for item in value:
            yield from _tensors(item)


def _norm(norm: object) -> BiasedRMSNorm:
    return cast(BiasedRMSNorm, norm)


def _mlp(block: WeaverBlock) -> tuple[torch.nn.Linear, torch.nn.Linear]:
    if block.activation == "swiglu":
        return block.gate_up_proj, block.down_proj
    return block.fc1, block.fc2


def _table(name: str, table: object, width: int) -> Tensor:
    if not isinstance(table, Tensor):
        raise AdapterError(f"{name} is a {type(table).__name__}: the weave needs the whole table")
    if table.dim() != 2 or table.shape[1] != width or not table.is_contiguous():
        raise AdapterError(
            f"{name} is {tuple(table.shape)} with strides {table.stride()}: pass a contiguous "
            f"table with rows of {width}"
        )
    return table
