# SPDX-License-Identifier: Apache-2.0
"""Attention on a CPU for a target that verifies trees, in plain PyTorch.

vLLM's CPU kernels keep keys in a layout of their own, which tree rows cannot read, so a tree
target's layers store and read the cache plainly. Drafter layers, and every layer of an engine
that does not ask for trees, run vLLM's code unchanged.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from vllm.config import get_current_vllm_config
from vllm.v1.attention.backends.cpu_attn import (
    CPUAttentionBackend,
    CPUAttentionBackendImpl,
    CPUAttentionMetadataBuilder,
)

from vllm_weaver.engine.attention import (
    TreeAttentionBuilderMixin,
    TreeAttentionImplMixin,
    TreeMetadata,
    attend_trees,
)
from vllm_weaver.engine.compat import is_draft_layer
from vllm_weaver.engine.config import requested


class TreeCPUMetadataBuilder(TreeAttentionBuilderMixin, CPUAttentionMetadataBuilder):
    """vLLM's metadata, and the trees beside it where the batch carries some."""


class TreeCPUAttentionImpl(TreeAttentionImplMixin, CPUAttentionBackendImpl):
    """Attention of one layer."""

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.plain_cache = requested(get_current_vllm_config())

    def do_kv_cache_update(
        self,
        layer: torch.nn.Module,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        slot_mapping: torch.Tensor,
    ) -> None:
        """Store fresh keys and values, plainly for a tree target."""
        if not self.plain_cache or is_draft_layer(layer):
            super().do_kv_cache_update(layer, key, value, kv_cache, slot_mapping)
            return
        keys, values = self.cache_views(kv_cache)
        stored = slot_mapping >= 0
        slots = slot_mapping[stored]
        block, place = slots // keys.shape[1], slots % keys.shape[1]
        keys[block, place] = key[: len(stored)][stored]
        values[block, place] = value[: len(stored)][stored]

    def forward(
        self,
        layer: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        attn_metadata: Any,
        output: torch.Tensor,
        output_scale: torch.Tensor | None = None,
        output_block_scale: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Attention of one layer over a batch of trees, prompts and single tokens."""
        if not self.plain_cache or is_draft_layer(layer) or attn_metadata is None:
            return super().forward(
                layer,
                query,
                key,
                value,
                kv_cache,
                attn_metadata,
                output,
                output_scale,
                output_block_scale,
            )
        keys, values = self.cache_views(kv_cache)
        linear, first = attn_metadata, 0
        if isinstance(attn_metadata, TreeMetadata):
            attend_trees(attn_metadata, query, key, value, keys, values, output, self.scale)
            linear, first = attn_metadata.linear, attn_metadata.step.num_tokens
        if linear is not None:
            self._attend_causally(linear, query[first:], keys, values, output[first:])
        return output

    def _attend_causally(
        self,
        metadata: Any,
        query: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        output: torch.Tensor,
    ) -> None:
        """Plain causal attention over the cache, request by request."""
        starts, lengths = metadata.query_start_loc.tolist(), metadata.seq_lens.tolist()
        block_size = keys.shape[1]
        for request, (start, end) in enumerate(pairwise(starts)):
            if start == end:
                continue
            length = lengths[request]
            position = torch.arange(length)
            block = metadata.block_table[request, position // block_size].long()
            place = position % block_size
            row = torch.arange(length - (end - start), length)
            out = F.scaled_dot_product_attention(
                query[start:end].transpose(0, 1)[None],
                keys[block, place].transpose(0, 1)[None],
                values[block, place].transpose(0, 1)[None],
                attn_mask=position <= row[:, None],
                scale=self.scale,
                enable_gqa=True,
            )
            output[start:end] = out[0].transpose(0, 1).reshape(output[start:end].shape)


class TreeCPUAttentionBackend(CPUAttentionBackend):
    """Takes the place of vLLM's ``CPU_ATTN``; the same for whoever does not ask for trees."""

    @staticmethod
    def get_impl_cls() -> type[TreeCPUAttentionImpl]:
        """Class of the layers."""
        return TreeCPUAttentionImpl

    @staticmethod
    def get_builder_cls() -> type[TreeCPUMetadataBuilder]:
        """Class of the metadata builders."""
        return TreeCPUMetadataBuilder
