# SPDX-License-Identifier: Apache-2.0
"""The DFlash drafter of depth D that proposes trees of B nodes.

Runs vLLM's DFlash forward pass unchanged, once per step, on the accepted path; keeps its
marginals instead of its argmax; hands them to the :class:`~vllm_weaver.engine.proposer.Proposer`.

All of that happens where vLLM samples its draft, so that one CUDA graph holds the drafter and the
weaving of the tree. What it reads and writes beside vLLM's own buffers lies at addresses that stay.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn
from vllm.config.compilation import CUDAGraphMode
from vllm.v1.worker.gpu.spec_decode.dflash.speculator import DFlashSpeculator

from vllm_weaver.engine import compat
from vllm_weaver.engine.config import draft_depth, options_of
from vllm_weaver.engine.proposer import Marginals, Proposer, load_adapter
from vllm_weaver.engine.state import DenseTreeState, HybridTreeState, TreeStateMixin
from vllm_weaver.engine.step import TreeStep
from vllm_weaver.ops import gather_paths, gather_rows, top_pool
from vllm_weaver.tree import DraftTree, SharedNoise

if TYPE_CHECKING:
    from vllm.v1.worker.gpu.input_batch import InputBatch

logger = compat.init_logger(__name__)


class WeaverSpeculator(DFlashSpeculator):
    """Proposes one tree per request; returns its tokens to vLLM, its shape to the model state."""

    _speculator_name = "Weaver"

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
        first = torch.zeros(rows, dtype=torch.int32, **on_device)
        bare = DraftTree.root_only(first, self.budget + 1)
        # Clones, since fields may be views that repeat one row.
        self._trees = DraftTree(
            **{
                x.name: getattr(bare, x.name).clone(memory_format=torch.contiguous_format)
                for x in dataclasses.fields(bare)
            }
        )
        self.marginals = Marginals(
            hidden=torch.zeros(rows, self.depth, self.hidden_size, dtype=self.dtype, **on_device),
            ids=torch.zeros(shape, dtype=torch.int64, **on_device),
            logits=torch.zeros(shape, dtype=torch.float32, **on_device),
            log_probs=torch.zeros(shape, dtype=torch.float32, **on_device),
        )

    def _generate_draft(
        self,
        num_reqs: int,
        num_tokens_padded: int,
        attn_metadata: dict[str, Any] | None,
        slot_mappings: dict[str, torch.Tensor] | None,
        num_tokens_across_dp: torch.Tensor | None,
        cudagraph_runtime_mode: CUDAGraphMode = CUDAGraphMode.NONE,
    ) -> None:
        """One drafter pass: states and marginals of all depths, and the trees made of them."""
        if self._context_only:
            return
        states = self._run_model(
            num_tokens_padded,
            attn_metadata,
            slot_mappings,
            num_tokens_across_dp,
            cudagraph_runtime_mode,
        )
        states = states[self.sample_indices[: num_reqs * self.depth]]
        logits = self.compute_draft_logits(states, 0)
        ids, best, log_probs = top_pool(logits, self.marginals.ids.shape[-1])
        shape = (num_reqs, self.depth, -1)
        self.marginals.hidden[:num_reqs] = states.view(shape)
        self.marginals.ids[:num_reqs] = ids.view(shape)
        self.marginals.logits[:num_reqs] = best.view(shape)
        self.marginals.log_probs[:num_reqs] = log_probs.view(shape)

        if not self._weaves:
            return
        assert self.proposer is not None and self._inputs is not None and self._trees is not None
        made = self.proposer.propose(
            self._inputs.states[:num_reqs],
            Marginals(**{name: x[:num_reqs] for name, x in vars(self.marginals).items()}),
            self._inputs.tokens[:num_reqs],
            self._inputs.chain_only[:num_reqs],
            self._noise(num_reqs),
            self.useful_nodes(num_reqs),
        )
        for field in dataclasses.fields(made):
            getattr(self._trees, field.name)[:num_reqs] = getattr(made, field.name)

    def useful_nodes(self, num_reqs: int) -> int:
        """Most nodes that the next pass verifies of the trees of a batch.

        Args:
            num_reqs: of the batch, or of the graph that it is padded to. Sizes of graphs less than
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
        # A draft's position, less one: the row above it draws the token that it guesses.
        drawn_at = self.sample_pos[: num_reqs * self.depth].view(num_reqs, self.depth) - 1
        return source.of(drawn_at, self.marginals.ids[:num_reqs])

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
                    input_batch, num_rejected = self._paths_alone(input_batch, step, num_rejected)
                elif self.device.type == "cuda":
                    # In place: they are this step's own outputs, and nothing reads them later.
                    gather_rows(states, starts, step.path, step.length)
                else:
                    order = step.layout.path_first(step.path, step.length, len(states[0]))
                    states = [x[order] for x in states]
                last_hidden_states = states[0]
                if aux_hidden_states:
                    aux_hidden_states = states[1:]
        if not (dummy_run or self._context_only):
            slots = input_batch.idx_mapping
            last_row = input_batch.query_start_loc[1 : rows + 1] - num_rejected - 1
            assert self._inputs is not None
            self._inputs.states[:rows] = last_hidden_states[last_row.long()]
            self._inputs.tokens[:rows] = last_sampled.flatten()[slots]
            self._inputs.chain_only[:rows] = self.model_state.chain_only[slots]
            if self.model_state.noise is not None:
                self.model_state.noise.load(slots, input_batch.idx_mapping_np[:rows])
        # Warm-up passes measure a GPU's memory and compile its kernels; a CPU has neither.
        self._weaves = not (dummy_run and self.device.type == "cpu")
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
        if self._context_only:
            self._context_only = False
            self.model_state.trees.num_nodes[input_batch.idx_mapping] = 1
            return torch.zeros(rows, self.budget, dtype=torch.int64, device=self.device)
        if dummy_run:
            return torch.zeros(rows, self.budget, dtype=torch.int64, device=self.device)
        assert self._trees is not None
        tree = DraftTree(
            **{x.name: getattr(self._trees, x.name)[:rows] for x in dataclasses.fields(DraftTree)}
        )
        if self.options.check_ranks:
            for field in dataclasses.fields(tree):
                part = getattr(tree, field.name)
                compat.require_same_on_all_ranks(part, f"trees ({field.name})")
        state: TreeStateMixin = self.model_state
        state.trees.store(input_batch.idx_mapping, tree)
        return tree.tokens[:, 1:].long()

    def _paths_alone(
        self, batch: InputBatch, step: TreeStep, num_rejected: torch.Tensor
    ) -> tuple[InputBatch, torch.Tensor]:
        """A batch of trees as the drafter needs it: rows that can be on a path, and no others.

        Args:
            batch: of trees alone, T rows each.
            step: its trees, with their paths.
            num_rejected: rows of each request that are off its path.

        Returns:
            The new batch, of min(D + 1, T) rows a request, and its rejected rows.
        """
        n, total = step.num_requests, step.layout.num_rows
        width = min(self.depth + 1, total)
        index = step.layout.index
        starts = np.arange(n + 1, dtype=np.int32) * width
        alone = dataclasses.replace(
            batch,
            num_tokens=n * width,
            num_tokens_after_padding=n * width,
            num_scheduled_tokens=np.full(n, width, dtype=np.int32),
            query_start_loc=torch.arange(
                0, (n + 1) * width, width, dtype=torch.int32, device=self.device
            ),
            query_start_loc_np=starts,
            # Accepted tokens stand one after another, whatever rows they were verified in.
            positions=batch.positions[index[:, :width].flatten()],
        )
        return alone, num_rejected - (total - width)


@dataclasses.dataclass
class Roots:
    """What the trees of R requests start from.

    Attributes:
        states: target states, after its final norm, whose logits gave the roots, [R, d].
        tokens: the roots, int64 [R].
        chain_only: requests that get the drafter's chain, bool [R].
    """

    states: torch.Tensor
    tokens: torch.Tensor
    chain_only: torch.Tensor
