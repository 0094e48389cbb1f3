# SPDX-License-Identifier: Apache-2.0
"""The DFlash drafter of depth D that proposes trees of B nodes.

Runs vLLM's DFlash forward pass unchanged, once per step, on the accepted path; keeps its
marginals instead of its argmax; hands them to the :class:`~vllm_weaver.engine.proposer.Proposer`.

All of that happens where vLLM samples its draft, so that one CUDA graph holds the drafter and the
weaving of the tree. What it reads and writes beside vLLM's own buffers lies at addresses that stay.
"""

from __future__ import annotations

import contextlib
import dataclasses
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn
from vllm.config.compilation import CUDAGraphMode
from vllm.v1.worker.gpu.spec_decode.dflash.speculator import DFlashSpeculator

from vllm_weaver.engine import compat
from vllm_weaver.engine.config import draft_depth, options_of
from vllm_weaver.engine.proposer import (
    WEAVER_REQUESTS,
    Marginals,
    Proposer,
    empty_trees,
    load_adapter,
)
from vllm_weaver.engine.state import DenseTreeState, HybridTreeState, TreeStateMixin
from vllm_weaver.engine.step import TreeStep, tree_tensors
from vllm_weaver.ops import PathRows, gather_paths, gather_rows, load_roots, top_pool
from vllm_weaver.tree import DraftTree, SharedNoise

if TYPE_CHECKING:
    from vllm.v1.worker.gpu.input_batch import InputBatch

    from vllm_weaver.weave import TreeWeaver

logger = compat.init_logger(__name__)


class WeaverSpeculator(DFlashSpeculator):
    """Proposes one tree per request; returns its tokens to vLLM, its shape to the model state."""

    _speculator_name = "Weaver"
    vllm_config: Any

    def __init__(self, vllm_config: Any, device: torch.device):
        self.options = options_of(vllm_config)
        self.full_config = vllm_config
        self.budget: int = vllm_config.speculative_config.num_speculative_tokens
        self.depth = draft_depth(vllm_config)
        self.widths = compat.decode_widths(vllm_config)
        super().__init__(compat.with_num_speculative_tokens(vllm_config, self.depth), device)
        self.proposer: Proposer | None = None
        self._inputs: Roots | None = None
        self._trees: DraftTree | None = None
        self._context_only = False
        self._weaves = True
        # A memory profile holds the rows of every depth, whatever its batch is.
        self._profiles = False

    def _with_graphs(self, vllm_config: Any) -> Any:
        """A configuration with graphs for every batch of trees that has buffers for weaving."""
        rows = self.num_query_per_req
        requests = compat.draft_graph_requests(self.full_config, rows, WEAVER_REQUESTS)
        return compat.with_draft_graphs(vllm_config, requests, rows) if requests else vllm_config

    @property
    def attn_vllm_config(self) -> Any:
        """vLLM's, for graphs as large as :meth:`init_cudagraph_manager` wants them."""
        return self._with_graphs(super().attn_vllm_config)

    def init_cudagraph_manager(self, cudagraph_mode: CUDAGraphMode) -> None:
        """Plan the drafter's graphs as vLLM does, by requests of the target's."""
        whole = self.vllm_config
        self.vllm_config = self._with_graphs(whole)
        try:
            super().init_cudagraph_manager(cudagraph_mode)
        finally:
            self.vllm_config = whole

    def capture(self) -> None:
        """Capture the drafter's graphs, after passes outside of any that warm up."""
        with self._own_graphs(False):
            super().capture()

    def _own_graphs(self, wanted: bool) -> contextlib.AbstractContextManager[None]:
        """Whether passes without a graph of vLLM's capture one of the weave alone."""
        weaver = self.proposer.weaver if self.proposer is not None else None
        return contextlib.nullcontext() if weaver is None or wanted else weaver.without_graphs()

    def _num_graph_context_tokens(self, num_reqs: int) -> int:
        """Rows of context that a graph of so many requests projects and stores.

        Those of the longest paths of its batches' trees; vLLM has a row for every depth. Where more
        come, as with prompts, vLLM stores the rest before the graph.
        """
        longest = min(self.depth, self.useful_nodes(num_reqs)) + 1
        return min(super()._num_graph_context_tokens(num_reqs), num_reqs * longest)

    def load_draft_model(
        self, target_model: nn.Module, target_attn_layer_names: set[str]
    ) -> nn.Module:
        """Load the drafter as vLLM does."""
        model = super().load_draft_model(target_model, target_attn_layer_names)
        if self.device.type == "cpu":
            compat.norm_context_per_layer(model)
        return model

    def load_model(self, target_model: nn.Module) -> None:
        """Load drafter and adapter; choose the model state of the target."""
        super().load_model(target_model)
        state = HybridTreeState if self.full_config.model_config.is_hybrid else DenseTreeState
        # vLLM asks the model for its state class before it falls back to its own choice.
        target_model.get_model_state_cls = lambda: state  # type: ignore[assignment]
        adapter = vocabulary = None
        if self.options.proposal == "weaver":
            dtype = torch.float32 if self.device.type == "cpu" else self.dtype
            adapter = load_adapter(self.full_config, self.options, dtype=dtype, device=self.device)
            vocabulary = compat.Vocabulary(target_model)
        vocab_size = self.full_config.model_config.get_vocab_size()
        self.proposer = Proposer(
            *(self.options, self.budget, self.depth, vocab_size, adapter, vocabulary),
            max_requests=self.max_num_reqs,
        )
        self._allocate(self.proposer.pool_size)
        if self.proposer.weaver is not None:
            logger.info(
                "vllm-weaver: weaving takes %.0f MiB of buffers and %.0f MiB of tables",
                self.proposer.weaver.nbytes() / 2**20,
                self.proposer.weaver.table_nbytes() / 2**20,
            )

    def _allocate(self, pool_size: int) -> None:
        """Marginals, what the trees start from and the trees, for a graph to read and write."""
        rows, shape = self.max_num_reqs, (self.max_num_reqs, self.depth, pool_size)
        on_device = {"device": self.device}
        self._inputs = Roots(
            states=torch.zeros(
                rows, self.full_config.model_config.get_hidden_size(), dtype=self.dtype, **on_device
            ),
            tokens=torch.zeros(rows, dtype=torch.int64, **on_device),
            chain_only=torch.zeros(rows, dtype=torch.bool, **on_device),
        )
        self._trees = empty_trees(rows, self.budget + 1, self.device)
        assert self.proposer is not None
        if self.device.type == "cuda":
            self.proposer.out = self._trees
            self._share_roots(self.proposer.weaver)
        self.marginals = Marginals(
            hidden=torch.zeros(rows, self.depth, self.hidden_size, dtype=self.dtype, **on_device),
            ids=torch.zeros(shape, dtype=torch.int64, **on_device),
            logits=torch.zeros(shape, dtype=torch.float32, **on_device),
            log_probs=torch.zeros(shape, dtype=torch.float32, **on_device),
        )

    def _share_roots(self, weaver: TreeWeaver | None) -> None:
        """Let a weaver read the roots where they are loaded, if it takes as many."""
        if weaver is None or weaver.max_requests < self.max_num_reqs:
            return
        assert self._inputs is not None
        states, tokens = weaver.roots
        if states.dtype == self.dtype:
            self._inputs = dataclasses.replace(self._inputs, states=states, tokens=tokens)

    def _build_uniform_attn_metadata(self, *args: Any, **kwargs: Any) -> Any:
        """What the drafter's attention reads; nothing where its pass is left out."""
        if self._context_only:
            return None
        return super()._build_uniform_attn_metadata(*args, **kwargs)

    def _generate_draft(
        self,
        num_reqs: int,
        num_tokens_padded: int,
        attn_metadata: dict[str, Any] | None,
        slot_mappings: dict[str, torch.Tensor] | None,
        num_tokens_across_dp: torch.Tensor | None,
        cudagraph_runtime_mode: CUDAGraphMode = CUDAGraphMode.NONE,
    ) -> None:
        """One drafter pass: states of all depths, marginals, and the trees made of them.

        No node of a tree of N lies deeper than N, so marginals below are left as they were: the
        head reads the whole vocabulary for every row, and large batches have small trees.
        """
        if self._context_only:
            return
        states = self._run_model(
            num_tokens_padded,
            attn_metadata,
            slot_mappings,
            num_tokens_across_dp,
            cudagraph_runtime_mode,
        )
        found, nodes = self.marginals.first(num_reqs), self.useful_nodes(num_reqs)
        chosen = self.sample_indices[: num_reqs * self.depth]
        torch.index_select(states, 0, chosen, out=found.hidden.flatten(0, 1))
        self._find_candidates(found.upto(self.depth if self._profiles else nodes))

        if not self._weaves:
            return
        assert self.proposer is not None and self._inputs is not None and self._trees is not None
        made = self.proposer.propose(
            self._inputs.states[:num_reqs],
            found,
            self._inputs.tokens[:num_reqs],
            self._inputs.chain_only[:num_reqs],
            self._noise(num_reqs),
            nodes,
        )
        for buffer, part in zip(tree_tensors(self._trees), tree_tensors(made), strict=True):
            if buffer.data_ptr() != part.data_ptr():
                buffer[:num_reqs] = part

    def _find_candidates(self, found: Marginals) -> None:
        """Fill in the rest of marginals that have their states."""
        pools = found.ids, found.logits, found.log_probs
        logits = self.compute_draft_logits(found.hidden.flatten(0, 1), 0)
        if found.ids.is_contiguous():
            ids, best, log_probs = (x.flatten(0, 1) for x in pools)
            top_pool(logits, ids.shape[-1], out=(ids, best, log_probs))
            return
        # Of some of the depths, whose rows lie apart.
        for buffer, part in zip(pools, top_pool(logits, found.ids.shape[-1]), strict=True):
            buffer.copy_(part.view_as(buffer))

    def useful_nodes(self, num_reqs: int) -> int:
        """Most nodes that the next pass verifies of the trees of a batch.

        Args:
            num_reqs: of the batch, or of the graph that it is padded to. Sizes of graphs at most
                double from one to the next, so the batch has more than half as many requests.
        """
        fewest = num_reqs // 2 + 1
        if self.options.adapt:
            # Any captured width whose rows have memory.
            most_rows = max(rows * most for rows, most in self.widths.items())
            rows = [rows for rows in self.widths if rows * fewest <= most_rows]
        else:
            rows = [rows for rows, most in self.widths.items() if most >= fewest]
        return max([1, *(x - 1 for x in rows)])

    def _noise(self, num_reqs: int) -> SharedNoise | None:
        """The sampler's noise for the marginals of the first requests."""
        # vLLM's first memory profile runs before there is a model state.
        source = getattr(getattr(self, "model_state", None), "noise", None)
        if source is None:
            return None
        positions = self.sample_pos[: num_reqs * self.depth].view(num_reqs, self.depth)
        return source.of(positions, self.marginals.ids[:num_reqs])

    @torch.inference_mode()
    def propose(
        self,
        input_batch: InputBatch,
        attn_metadata: dict[str, Any],
        slot_mappings: dict[str, torch.Tensor],
        last_hidden_states: torch.Tensor,
        aux_hidden_states: list[torch.Tensor] | None,
        num_sampled: torch.Tensor,
        num_rejected: torch.Tensor,
        last_sampled: torch.Tensor,
        next_prefill_tokens: torch.Tensor,
        temperature: torch.Tensor,
        seeds: torch.Tensor,
        dp_sync_state: Any = None,
        dummy_run: bool = False,
        skip_attn_for_dummy_run: bool = False,
        mm_inputs: Any = None,
        is_profile: bool = False,
        num_speculative_tokens: int | None = None,
    ) -> torch.Tensor:
        """Draft after the accepted paths and build the next trees.

        Returns:
            Tokens of the trees in node order, root excluded, int64 [R, B].
        """
        rows = input_batch.num_reqs
        # A batch too large for trees still adds to the drafter's context.
        self._context_only = num_speculative_tokens == 0 and not dummy_run
        paths = None
        if not dummy_run:
            step = self.model_state.step
            if step is not None and step.path is not None:
                # DFlash takes the first rows of each request as its new context.
                states = [last_hidden_states, *(aux_hidden_states or [])]
                starts = input_batch.query_start_loc[: step.num_requests]
                if step.layout.uniform and step.num_requests == rows:
                    width = min(self.depth + 1, step.layout.num_rows)
                    path = step.path[:, :width]
                    states = list(gather_paths(states, starts, path, step.length))
                    paths = self._path_rows(input_batch, step, num_rejected)
                elif self.device.type == "cuda":
                    # In place: they are this step's own outputs, and nothing reads them later.
                    gather_rows(states, starts, step.path, step.length)
                else:
                    order = step.layout.path_first(step.path, step.length, len(states[0]))
                    states = [x[order] for x in states]
                last_hidden_states = states[0]
                if aux_hidden_states:
                    aux_hidden_states = states[1:]
        if not dummy_run and (paths is not None or not self._context_only):
            self._load_roots(input_batch, last_hidden_states, num_rejected, last_sampled, paths)
        if paths is not None:
            input_batch, num_rejected = self._paths_alone(input_batch, paths)
        # Warm-up passes measure a GPU's memory and compile its kernels; a CPU has neither.
        self._weaves = not (dummy_run and self.device.type == "cpu")
        self._profiles = is_profile
        with self._own_graphs(not dummy_run):
            super().propose(
                input_batch,
                attn_metadata,
                slot_mappings,
                last_hidden_states,
                aux_hidden_states,
                num_sampled,
                num_rejected,
                last_sampled,
                next_prefill_tokens,
                temperature,
                seeds,
                dp_sync_state=dp_sync_state,
                dummy_run=dummy_run,
                skip_attn_for_dummy_run=skip_attn_for_dummy_run,
                mm_inputs=mm_inputs,
                # Keeps out of the graph, which holds the pass that is left out.
                is_profile=is_profile or self._context_only,
            )
        # Graphs may be captured next, which draft without this method.
        self._profiles = False
        if self._context_only:
            self._context_only = False
            self.model_state.trees.forget(input_batch.idx_mapping)
            return torch.zeros(rows, self.budget, dtype=torch.int64, device=self.device)
        if dummy_run:
            return torch.zeros(rows, self.budget, dtype=torch.int64, device=self.device)
        assert self._trees is not None
        tree = DraftTree(*(x[:rows] for x in tree_tensors(self._trees)))
        if self.options.check_ranks:
            for field in dataclasses.fields(tree):
                part = getattr(tree, field.name)
                compat.require_same_on_all_ranks(part, f"trees ({field.name})")
        state: TreeStateMixin = self.model_state
        return state.trees.store(input_batch.idx_mapping, tree)

    def _load_roots(
        self,
        batch: InputBatch,
        hidden: torch.Tensor,
        num_rejected: torch.Tensor,
        last_sampled: torch.Tensor,
        paths: PathRows | None,
    ) -> None:
        """Put what the next trees start from where a graph finds it.

        Args:
            batch: vLLM's.
            hidden: last states, of the rows in path order where ``paths`` is given.
            num_rejected: rows of each request that do not count.
            last_sampled: of all slots.
            paths: rows that the drafter gets, whose positions are made too.
        """
        assert self._inputs is not None
        rows, state = batch.num_reqs, self.model_state
        sources = [last_sampled.flatten(), state.chain_only]
        targets = [self._inputs.tokens, self._inputs.chain_only]
        if state.noise is not None:
            more = state.noise.parameters()
            sources, targets = [*sources, *more[0]], [*targets, *more[1]]
            state.noise.look(batch.idx_mapping_np[:rows])
        load_roots(
            *(hidden, batch.query_start_loc[1 : rows + 1], num_rejected, batch.idx_mapping),
            *(sources, self._inputs.states, targets, paths),
        )

    def _path_rows(self, batch: InputBatch, step: TreeStep, num_rejected: torch.Tensor) -> PathRows:
        """Rows that can be on a path, of a batch of trees alone: min(D + 1, T) a request."""
        width = min(self.depth + 1, step.layout.num_rows)
        kept = step.num_requests * width
        return PathRows(
            rows=step.layout.num_rows,
            width=width,
            positions=batch.positions,
            out_positions=batch.positions.new_empty(kept),
            out_rejected=torch.empty_like(num_rejected),
        )

    def _paths_alone(self, batch: InputBatch, paths: PathRows) -> tuple[InputBatch, torch.Tensor]:
        """A batch of trees as the drafter needs it: rows that can be on a path, and no others.

        Returns:
            The new batch, and its rejected rows.
        """
        n, width = batch.num_reqs, paths.width
        starts = np.arange(n + 1, dtype=np.int32) * width
        alone = dataclasses.replace(
            batch,
            num_tokens=n * width,
            num_tokens_after_padding=n * width,
            num_scheduled_tokens=np.full(n, width, dtype=np.int32),
            query_start_loc=_even_starts(n, width, self.device),
            query_start_loc_np=starts,
            # Accepted tokens stand one after another, whatever rows they were verified in.
            positions=paths.out_positions,
        )
        return alone, paths.out_rejected


@lru_cache(maxsize=1024)
def _even_starts(num_requests: int, width: int, device: torch.device) -> torch.Tensor:
    """First row of each request of `width` rows, and the row after the last, int32 [R + 1]."""
    return torch.arange(0, (num_requests + 1) * width, width, dtype=torch.int32, device=device)


@dataclasses.dataclass
class Roots:
    """What the trees of R requests start from.

    Attributes:
        states: target states, after its final norm, whose logits gave the roots, [R, d].
        tokens: the roots, int64 or int32 [R].
        chain_only: requests that get the drafter's chain, bool [R].
    """

    states: torch.Tensor
    tokens: torch.Tensor
    chain_only: torch.Tensor
