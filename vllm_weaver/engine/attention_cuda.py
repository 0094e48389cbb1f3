# SPDX-License-Identifier: Apache-2.0
"""Attention on a GPU for a target that verifies trees: FlashAttention with a tree part.

Requests that carry a tree go through :func:`vllm_weaver.ops.tree_attention`; all others through
vLLM's FlashAttention, as a batch of their own.
"""

from __future__ import annotations

from typing import Any

import torch
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.attention.backends.flash_attn import (
    FlashAttentionBackend,
    FlashAttentionImpl,
    FlashAttentionMetadataBuilder,
)

from vllm_weaver.engine.attention import (
    TreeBuilderMixin,
    TreeMetadata,
    attend_trees,
    rest_of_batch,
)


class TreeFlashAttentionMetadataBuilder(TreeBuilderMixin, FlashAttentionMetadataBuilder):
    """vLLM's metadata, and the trees beside it where the batch carries some."""

    def build(
        self,
        common_prefix_len: int,
        common_attn_metadata: CommonAttentionMetadata,
        fast_build: bool = False,
    ) -> Any:
        """Build for the whole batch, or for its trees and for the rest apart."""
        step = self.take_step()
        if step is None:
            return super().build(common_prefix_len, common_attn_metadata, fast_build)
        rest = rest_of_batch(common_attn_metadata, step)
        n = step.num_requests
        return TreeMetadata(
            step=step,
            block_table=common_attn_metadata.block_table_tensor[:n],
            linear=None if rest is None else super().build(0, rest, fast_build),
            seq_lens=common_attn_metadata.seq_lens[:n],
        )


class TreeFlashAttentionImpl(FlashAttentionImpl):
    """Attention of one layer."""

    def cache_views(self, kv_cache: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values [blocks, block_size, HKV, D_h] of a cache [blocks, HKV, block, 2 D_h]."""
        rows = kv_cache.transpose(1, 2)
        return rows[..., : self.head_size], rows[..., self.head_size :]

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
        if not isinstance(attn_metadata, TreeMetadata):
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
        attend_trees(attn_metadata, query, key, value, keys, values, output, self.scale)
        if attn_metadata.linear is not None:
            first = attn_metadata.step.num_tokens
            super().forward(
                layer,
                query[first:],
                key[first:],
                value[first:],
                kv_cache,
                attn_metadata.linear,
                output[first:],
            )
        return output


class TreeFlashAttentionBackend(FlashAttentionBackend):
    """FlashAttention that can verify trees; selected as ``CUSTOM``."""

    @staticmethod
    def get_name() -> str:
        """Name under which vLLM knows the backend."""
        return "CUSTOM"

    @staticmethod
    def get_impl_cls() -> type[TreeFlashAttentionImpl]:
        """Class of the layers."""
        return TreeFlashAttentionImpl

    @staticmethod
    def get_builder_cls() -> type[TreeFlashAttentionMetadataBuilder]:
        """Class of the metadata builders."""
        return TreeFlashAttentionMetadataBuilder
