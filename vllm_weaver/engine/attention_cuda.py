# SPDX-License-Identifier: Apache-2.0
"""Attention on a GPU for a target that verifies trees: FlashAttention with a tree part.

Requests that carry a tree go through :func:`vllm_weaver.ops.tree_attention`; all others through
vLLM's FlashAttention, as a batch of their own.
"""

from __future__ import annotations

from typing import Any

import torch
from vllm.config import get_current_vllm_config
from vllm.v1.attention.backends.flash_attn import (
    FlashAttentionBackend,
    FlashAttentionImpl,
    FlashAttentionMetadataBuilder,
)

from vllm_weaver.engine.attention import (
    TreeAttentionBuilderMixin,
    TreeAttentionImplMixin,
    TreeMetadata,
    attend_trees,
)
from vllm_weaver.engine.compat import flash_attention_prefix
from vllm_weaver.engine.config import options_of, requested
from vllm_weaver.ops.attention.tail import enable_fa3


class TreeFlashAttentionMetadataBuilder(TreeAttentionBuilderMixin, FlashAttentionMetadataBuilder):
    """vLLM's metadata, and the trees beside it where the batch carries some."""


class TreeFlashAttentionImpl(TreeAttentionImplMixin, FlashAttentionImpl):
    """Attention of one layer."""

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.tree_backend: str | None = None
        config = get_current_vllm_config()
        if requested(config) and options_of(config).attention_kernel == "fa3":
            enable_fa3(flash_attention_prefix(self.vllm_flash_attn_version))
            self.tree_backend = "fa3"

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
        attend_trees(
            *(attn_metadata, query, key, value, keys, values, output, self.scale),
            backend=self.tree_backend,
        )
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
