# SPDX-License-Identifier: Apache-2.0
"""Model states: where a step's tree reaches the model, and where its path is committed.

vLLM's Model Runner V2 calls one ``ModelState`` around every forward pass. Ours adds, for the
requests that verify a tree: positions by depth, the tree beside the attention metadata, a sampler
that samples at every node, and after acceptance the compaction of the KV cache and the commit of
the recurrent states. They do not know how trees are proposed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from vllm.config.compilation import CUDAGraphMode
from vllm.v1.worker.gpu.model_states.default import DefaultModelState
from vllm.v1.worker.gpu.model_states.mamba_hybrid import MambaHybridModelState

from vllm_weaver.engine.attention import CacheLayer, TreeBuilderMixin
from vllm_weaver.engine.compat import (
    has_custom_logits_processors,
    init_logger,
    is_target_attention,
    max_graph_rows,
    max_step_rows,
)
from vllm_weaver.engine.config import WeaverConfigError, draft_depth, options_of
from vllm_weaver.engine.gdn_layer import (
    Boundary,
    TreeGatedDeltaNet,
    commit_layers,
    reserve_stashes,
)
from vllm_weaver.engine.noise import SamplerNoise
from vllm_weaver.engine.sampler import TreeSampler
from vllm_weaver.engine.stats import StepStats, stats_file
from vllm_weaver.engine.step import RequestTrees, StepBuffers, TreeStep, upload
from vllm_weaver.ops import accept_paths, compact_kv
from vllm_weaver.ops.compact import CacheTable

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import NewRequestData
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.worker.gpu.block_table import BlockTables
    from vllm.v1.worker.gpu.input_batch import InputBatch
    from vllm.v1.worker.gpu.states import RequestState

logger = init_logger(__name__)

# Base of the mixin, whose methods come from the state that it is mixed into.
_State: Any = object


def needs_chain(sampling_params: Any) -> bool:
    """Whether a request's sampling reads the whole linear prefix, so that it gets a chain.

    Penalties, bad words, a thinking budget and structured output depend on the tokens before a
    row, which vLLM reads from the row's neighbours: right for a chain, wrong for a branch.
    """
    if sampling_params is None:
        return False
    return bool(
        sampling_params.repetition_penalty != 1.0
        or sampling_params.presence_penalty != 0.0
        or sampling_params.frequency_penalty != 0.0
        or sampling_params.bad_words
        or getattr(sampling_params, "thinking_token_budget", None) is not None
        or sampling_params.structured_outputs is not None
    )


@dataclass
class _KVGroup:
    """Target attention layers that share one block table."""

    index: int
    layers: list[CacheLayer]
    _addresses: tuple[int, ...] = ()
    _table: CacheTable | None = None

    def caches(self) -> CacheTable:
        """Their keys and values, laid out anew only when vLLM has moved them."""
        addresses = tuple(layer.address() for layer in self.layers)
        if self._table is None or addresses != self._addresses:
            self._table = CacheTable([cache for layer in self.layers for cache in layer.caches()])
            self._addresses = addresses
        return self._table


class TreeStateMixin(_State):
    """What the dense and the hybrid state add to vLLM's own."""

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.options = options_of(self.vllm_config)
        spec = self.vllm_config.speculative_config
        assert spec is not None
        self.budget: int = spec.num_speculative_tokens
        self.depth = draft_depth(self.vllm_config)
        self.trees = RequestTrees(self.max_num_reqs, self.budget, self.device)
        self.max_step_rows = max(max_step_rows(self.vllm_config), max_graph_rows(self.vllm_config))
        self.buffers = StepBuffers(
            self.max_num_reqs,
            self.max_step_rows,
            self.budget + 1,
            self._conv_width(),
            self.device,
        )
        self.chain_only = torch.zeros(self.max_num_reqs, dtype=torch.bool, device=self.device)
        first_rank = self.vllm_config.parallel_config.rank == 0
        self.stats = StepStats(
            self.budget,
            self.depth,
            self.device,
            stats_file(self.vllm_config.instance_id) if first_rank else None,
        )
        self.noise: SamplerNoise | None = None
        self.step: TreeStep | None = None
        self.slot_mappings: torch.Tensor | None = None
        self._all_chains = False
        self._positions = torch.zeros(self.max_num_tokens, dtype=torch.int64, device=self.device)
        self._kv_groups: list[_KVGroup] = []

    def _conv_width(self) -> int:
        """Taps of the target's causal convolution; a dense model has none."""
        return 0

    # ------------------------------------------------------------------ requests

    def add_request(self, req_index: int, new_req_data: NewRequestData) -> None:
        """Start a slot without a tree, and with chains where its sampling needs them."""
        super().add_request(req_index, new_req_data)
        self.trees.reset(req_index)
        chain = self._all_chains or needs_chain(new_req_data.sampling_params)
        self.chain_only[req_index].fill_(chain)
        if chain:
            self.stats.count_chain_fallback()

    # ------------------------------------------------------------------ before the forward pass

    def initialize_kv_cache(
        self, kv_cache_config: KVCacheConfig, block_tables: BlockTables
    ) -> None:
        """Find the target's attention caches once they are bound."""
        super().initialize_kv_cache(kv_cache_config, block_tables)
        layers = self.vllm_config.compilation_config.static_forward_context
        self._kv_groups = []
        for index, group in enumerate(kv_cache_config.kv_cache_groups):
            members = [layers[name] for name in group.layer_names]
            target = [layer for layer in members if is_target_attention(layer)]
            for layer in target:
                if not CacheLayer.applies(layer):
                    raise WeaverConfigError(
                        f"weaver: attention layer {layer.layer_name} runs "
                        f"{type(layer.impl).__name__}, which cannot verify trees; leave the "
                        "attention backend at its default"
                    )
            if target:
                self._kv_groups.append(_KVGroup(index, [CacheLayer(layer) for layer in target]))

    def prepare_attn(
        self,
        input_batch: InputBatch,
        cudagraph_mode: Any,
        block_tables: tuple[torch.Tensor, ...],
        slot_mappings: torch.Tensor,
        attn_groups: list[list[Any]],
        kv_cache_config: KVCacheConfig,
        for_capture: bool = False,
        ubatch_idx: int = 0,
        model_specific_attn_metadata: Any = None,
    ) -> dict[str, Any]:
        """Lay out this batch's trees and hand them to the metadata builders."""
        if for_capture:
            self.step, shown = None, self._captured_step(input_batch)
        else:
            self.step, shown = self._tree_step(input_batch, cudagraph_mode)
        self.slot_mappings = slot_mappings
        for groups in attn_groups:
            for group in groups:
                builder = group.get_metadata_builder(ubatch_idx)
                if isinstance(builder, TreeBuilderMixin):
                    builder.tree_step = shown
        return super().prepare_attn(
            input_batch,
            cudagraph_mode,
            block_tables,
            slot_mappings,
            attn_groups,
            kv_cache_config,
            for_capture,
            ubatch_idx,
            model_specific_attn_metadata,
        )

    def _captured_step(self, batch: InputBatch) -> TreeStep | None:
        """What a whole-step graph reads; None for one of single tokens, which carry no trees."""
        rows = batch.num_tokens // batch.num_reqs
        if rows == 1:
            return None
        # By the kernel that lays out batches, so that the first one finds it compiled.
        step = self._fill(batch, batch.idx_mapping[:0], rows, batch.num_reqs)
        # Acceptance follows the graph, and is compiled here, too.
        tree = step.tree
        accept_paths(
            *(tree.tokens, tree.parents, tree.depths, tree.num_nodes, tree.ancestors),
            torch.zeros_like(tree.tokens, dtype=torch.int64),
            self.depth,
        )
        return step

    def _tree_step(
        self, batch: InputBatch, cudagraph_mode: Any
    ) -> tuple[TreeStep | None, TreeStep | None]:
        """The step of the requests that carry trees, and that of a padded graph's requests."""
        drafts = batch.num_draft_tokens_per_req
        if drafts is None or not drafts.any():
            return None, None
        n = int((drafts > 0).sum())
        row_counts = drafts[:n] + 1
        scheduled = np.diff(batch.query_start_loc_np[: n + 1])
        if not (drafts[:n] > 0).all() or not (scheduled == row_counts).all():
            raise RuntimeError(
                "weaver: a batch mixes prompt tokens and drafts in one request "
                f"(scheduled {scheduled.tolist()}, drafts {drafts.tolist()}); this is a bug"
            )
        slots = batch.idx_mapping[:n]
        padded = n
        if cudagraph_mode == CUDAGraphMode.FULL:
            padded = batch.num_reqs_after_padding
        rows = int(row_counts[0])
        # A request that waited has drafts for a smaller batch than this one may be.
        if (row_counts != rows).any() or not self.buffers.fits(padded, rows):
            step = TreeStep.create(self.trees, slots, row_counts, batch.input_ids, batch.seq_lens)
            return step, step
        shown = self._fill(batch, slots, rows, padded)
        return self.buffers.of(slots, rows), shown

    def _fill(self, batch: InputBatch, slots: torch.Tensor, rows: int, padded: int) -> TreeStep:
        """See :meth:`StepBuffers.fill`."""
        starts, lengths = batch.query_start_loc, batch.seq_lens
        return self.buffers.fill(self.trees, slots, rows, starts, batch.input_ids, lengths, padded)

    def prepare_inputs(
        self, input_batch: InputBatch, req_states: RequestState
    ) -> dict[str, torch.Tensor | None]:
        """Positions by depth for the rows of trees; slots in the KV cache stay linear."""
        inputs = super().prepare_inputs(input_batch, req_states)
        positions = inputs.get("positions")
        if positions is None:
            positions = self._shifted(input_batch)
        elif self.step is not None:
            # Multi-axis (M-RoPE) positions advance alike on every axis after the prompt.
            positions[..., : self.step.num_tokens] += self.step.depth_offset()
        return {**inputs, "positions": positions}

    def _shifted(self, batch: InputBatch) -> torch.Tensor:
        """Positions by depth at an address that stays, padding included."""
        total = batch.num_tokens_after_padding
        linear, positions = batch.positions[:total], self._positions[:total]
        moved = 0 if self.step is None else self.step.num_tokens
        if self.step is not None:
            torch.add(linear[:moved], self.step.depth_offset(), out=positions[:moved])
            self.step.positions = positions[:moved]
        if moved < total:
            positions[moved:].copy_(linear[moved:])
        return positions

    def prepare_dummy_inputs(self, num_reqs: int, num_tokens: int) -> dict[str, Any]:
        """The buffers that :meth:`prepare_inputs` fills, for graph capture."""
        inputs = super().prepare_dummy_inputs(num_reqs, num_tokens)
        inputs.setdefault("positions", self._positions[:num_tokens])
        return inputs

    def custom_sampler(self, sampler: Any) -> tuple[Any, Any]:
        """vLLM's sampler, and ours in place of its rejection sampler."""
        self._all_chains = has_custom_logits_processors(sampler)
        if self.options.shares_noise:
            self.noise = SamplerNoise(sampler, self.max_num_reqs, self.device)
        return sampler, TreeSampler(sampler, self)

    # ------------------------------------------------------------------ after sampling

    def postprocess_state(
        self,
        idx_mapping: torch.Tensor,
        num_sampled: torch.Tensor | int,
        num_computed_tokens: torch.Tensor | None = None,
    ) -> None:
        """Commit the accepted paths, then let vLLM see a step that accepted one token."""
        step = self.step
        if step is not None and step.path is not None:
            self._compact(step)
            self.commit_recurrent(step, idx_mapping)
        elif step is None:
            self.stats.publish()
        super().postprocess_state(idx_mapping, 1, num_computed_tokens)

    def commit_recurrent(self, step: TreeStep, idx_mapping: torch.Tensor) -> None:
        """Advance recurrent states along the accepted paths. A dense model has none."""

    def _compact(self, step: TreeStep) -> None:
        assert self.slot_mappings is not None
        assert step.path is not None and step.length is not None
        for group in self._kv_groups:
            slots = step.layout.pack(self.slot_mappings[group.index])
            if not step.layout.uniform:
                slots = torch.where(step.layout.exists, slots, -1)
            compact_kv(group.caches(), slots, step.path, step.length)


class DenseTreeState(TreeStateMixin, DefaultModelState):
    """State of a target with attention layers only."""


class HybridTreeState(TreeStateMixin, MambaHybridModelState):
    """State of a target with attention and Gated DeltaNet layers."""

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self._gdn_groups: list[list[TreeGatedDeltaNet]] = []
        self._metadata: dict[str, Any] = {}
        nbytes = reserve_stashes(
            *(self._gdn_layers(), self.max_step_rows, self.depth, self.device),
            self.options.gdn_kernel,
        )
        if nbytes:
            logger.info(
                "vllm-weaver: %.2f GiB reserved for the states' commit (%d rows a step)",
                nbytes / 2**30,
                self.max_step_rows,
            )

    def _gdn_layers(self) -> list[TreeGatedDeltaNet]:
        layers = self.vllm_config.compilation_config.static_forward_context
        return [x for x in layers.values() if isinstance(x, TreeGatedDeltaNet)]

    def _conv_width(self) -> int:
        return max((layer.conv_kernel_size for layer in self._gdn_layers()), default=0)

    def initialize_kv_cache(
        self, kv_cache_config: KVCacheConfig, block_tables: BlockTables
    ) -> None:
        """Find the GDN layers; check what committing across cache blocks relies on."""
        super().initialize_kv_cache(kv_cache_config, block_tables)
        layers = self.vllm_config.compilation_config.static_forward_context
        self._gdn_groups = []
        for group in kv_cache_config.kv_cache_groups:
            members = [layers[name] for name in group.layer_names]
            if ours := [x for x in members if isinstance(x, TreeGatedDeltaNet)]:
                self._gdn_groups.append(ours)
                for layer in ours:
                    layer.forget_views()
        if not self._align_mode:
            return
        _, spec = self._get_mamba_group_info(kv_cache_config)
        self._mamba_block = spec.block_size
        if self._mamba_block < self.budget + 1:
            raise WeaverConfigError(
                f"weaver: the recurrent state's cache block holds {self._mamba_block} tokens, "
                f"fewer than the tree's {self.budget + 1} rows; lower num_speculative_tokens, "
                "raise block_size, or switch prefix caching off"
            )

    def prepare_attn(self, input_batch: InputBatch, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Lay out this batch's trees; clear the states that their first tokens start from."""
        self._metadata = super().prepare_attn(input_batch, *args, **kwargs)
        if self.step is not None:
            self._clear_unstarted(input_batch)
        return self._metadata

    def _clear_unstarted(self, batch: InputBatch) -> None:
        """A prompt of one token that joins running requests is verified as a tree at once.

        vLLM pads it with placeholder drafts, so that no prefill kernel runs that would ignore
        what its cache block held before.
        """
        assert self.step is not None
        computed = batch.num_computed_tokens_np[: self.step.num_requests]
        unstarted = np.flatnonzero(computed == 0)
        if not len(unstarted):
            return
        rows = upload(unstarted, self.device)
        for group in self._gdn_groups:
            for layer in group:
                layer.clear(self._metadata[layer.prefix].state_indices[rows])

    def commit_recurrent(self, step: TreeStep, idx_mapping: torch.Tensor) -> None:
        """Advance conv and recurrent states of all GDN layers along the accepted paths.

        Without prefix caching the state has one slot. With it (``align``), the running state of a
        sequence lies in the block of its last token, and a path that reaches a block boundary
        also leaves the state at that boundary in the block that ends there.
        """
        assert step.path is not None and step.length is not None
        n = step.num_requests
        for group in self._gdn_groups:
            metadata = self._metadata[group[0].prefix]
            boundary = None
            if self._align_mode:
                boundary = self._boundary(step, metadata.block_table[:n])
            commit_layers(group, step, metadata.state_indices[:n], boundary)
        if self._align_mode:
            columns = self._final_column(step)
            self._mamba_state_idx_gpu[step.slots] = columns.to(torch.int32)

    def _final_column(self, step: TreeStep) -> torch.Tensor:
        assert step.length is not None
        last = (step.context_lens + step.length - 1).clamp(min=0)
        return (last // self._mamba_block).long()

    def _boundary(self, step: TreeStep, table: torch.Tensor) -> Boundary:
        """Where the states of the accepted paths go, with prefix caching.

        Args:
            step: with its paths.
            table: cache blocks of its requests, [n, blocks].
        """
        assert step.length is not None
        block = self._mamba_block
        final = table.gather(1, self._final_column(step)[:, None])[:, 0]
        boundary = (step.context_lens // block + 1) * block
        crossed = step.context_lens + step.length > boundary
        column = (boundary // block - 1).long().clamp(max=table.shape[1] - 1)
        slot = table.gather(1, column[:, None])[:, 0]
        slot = torch.where(crossed, slot, torch.full_like(slot, -1))
        count = torch.where(crossed, boundary - step.context_lens, torch.zeros_like(boundary))
        return Boundary(final.to(torch.int32), slot.to(torch.int32), count.to(torch.int32))
