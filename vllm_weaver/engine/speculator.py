# SPDX-License-Identifier: Apache-2.0
"""The DFlash drafter of depth D that proposes trees of B nodes.

Runs vLLM's DFlash forward pass unchanged, once per step, on the accepted path; keeps its
marginals instead of its argmax; hands them to the :class:`~vllm_weaver.engine.proposer.Proposer`.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from vllm.config.compilation import CUDAGraphMode
from vllm.v1.worker.gpu.spec_decode.dflash.speculator import DFlashSpeculator

from vllm_weaver.engine import compat
from vllm_weaver.engine.config import draft_depth, options_of
from vllm_weaver.engine.proposer import Marginals, Proposer, load_adapter
from vllm_weaver.engine.state import DenseTreeState, HybridTreeState, TreeStateMixin

if TYPE_CHECKING:
    from vllm.v1.worker.gpu.input_batch import InputBatch


class WeaverSpeculator(DFlashSpeculator):
    """Proposes one tree per request; returns its tokens to vLLM, its shape to the model state."""

    _speculator_name = "Weaver"

    def __init__(self, vllm_config: Any, device: torch.device):
        self.options = options_of(vllm_config)
        self.full_config = vllm_config
        self.budget: int = vllm_config.speculative_config.num_speculative_tokens
        self.depth = draft_depth(vllm_config)
        super().__init__(compat.with_num_speculative_tokens(vllm_config, self.depth), device)
        self.tree_tokens = torch.zeros(
            self.max_num_reqs, self.budget, dtype=torch.int64, device=device
        )
        self.proposer: Proposer | None = None

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
            self.options, self.budget, self.depth, vocab_size, adapter, vocabulary
        )
        self._allocate(self.proposer.pool_size)

    def _allocate(self, pool_size: int) -> None:
        """Address-stable marginals, so that the drafter's graph can write them."""
        rows, shape = self.max_num_reqs, (self.max_num_reqs, self.depth, pool_size)
        on_device = {"device": self.device}
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
        """One drafter pass: states and marginals of all depths into the buffers."""
        states = self._run_model(
            num_tokens_padded,
            attn_metadata,
            slot_mappings,
            num_tokens_across_dp,
            cudagraph_runtime_mode,
        )
        states = states[self.sample_indices[: num_reqs * self.depth]]
        logits = self.compute_draft_logits(states, 0).float()
        best, ids = logits.topk(self.marginals.ids.shape[-1], dim=-1)
        total = logits.logsumexp(-1, keepdim=True)
        shape = (num_reqs, self.depth, -1)
        self.marginals.hidden[:num_reqs] = states.view(shape)
        self.marginals.ids[:num_reqs] = ids.view(shape)
        self.marginals.logits[:num_reqs] = best.view(shape)
        self.marginals.log_probs[:num_reqs] = (best - total).view(shape)

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
        step = None if dummy_run else self.model_state.step
        if step is not None and step.path is not None:
            # DFlash takes the first rows of each request as its new context: the path must lead.
            order = step.layout.path_first(step.path, step.length, last_hidden_states.shape[0])
            last_hidden_states = last_hidden_states[order]
            if aux_hidden_states:
                aux_hidden_states = [states[order] for states in aux_hidden_states]
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
            is_profile=is_profile,
        )
        rows = input_batch.num_reqs
        tokens = self.tree_tokens[:rows]
        if dummy_run:
            return tokens.zero_()
        assert self.proposer is not None
        state: TreeStateMixin = self.model_state
        slots = input_batch.idx_mapping
        last_row = input_batch.query_start_loc[1 : rows + 1] - num_rejected - 1
        tree = self.proposer.propose(
            last_hidden_states[last_row.long()],
            Marginals(**{name: x[:rows] for name, x in vars(self.marginals).items()}),
            last_sampled.flatten()[slots],
            state.chain_only[slots],
        )
        if self.options.check_ranks:
            for field in dataclasses.fields(tree):
                part = getattr(tree, field.name)
                compat.require_same_on_all_ranks(part, f"trees ({field.name})")
        state.trees.store(slots, tree)
        tokens.copy_(tree.tokens[:, 1:])
        return tokens
