# SPDX-License-Identifier: Apache-2.0
"""Tree attention in vLLM's attention backends: what the CPU and the CUDA form share.

A batch is split in two: the leading requests that verify a tree, and the rest, which vLLM's own
metadata describes as if it were the whole batch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from vllm.v1.attention.backend import CommonAttentionMetadata

from vllm_weaver.engine.step import TreeStep
from vllm_weaver.ops import tree_attention

# Base of the mixins, whose methods come from the class that they are mixed into.
_Mixed: Any = object


@dataclass
class TreeMetadata:
    """Attention metadata of a batch that carries trees.

    Attributes:
        step: the trees, and where their rows lie.
        block_table: cache blocks of the n requests with a tree, [n, blocks].
        linear: vLLM's metadata of the other requests, as a batch of their own; None if none.
        seq_lens: tokens of the n requests with their rows, [n].
    """

    step: TreeStep
    block_table: torch.Tensor
    linear: Any | None
    seq_lens: torch.Tensor


class TreeBuilderMixin:
    """Mixed into vLLM's metadata builders.

    The model state sets ``tree_step`` before each build; a build consumes it.
    """

    tree_step: TreeStep | None = None

    def take_step(self) -> TreeStep | None:
        """The step to build for, once."""
        step, self.tree_step = self.tree_step, None
        return step


class TreeAttentionBuilderMixin(TreeBuilderMixin, _Mixed):
    """Mixed into the metadata builders of attention layers."""

    def build_for_cudagraph_capture(self, common_attn_metadata: CommonAttentionMetadata) -> Any:
        """Metadata that a captured graph keeps: of trees, or of single tokens as vLLM's own."""
        if self.tree_step is None:
            return super().build_for_cudagraph_capture(common_attn_metadata)
        return self.build(0, common_attn_metadata)

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


class TreeAttentionImplMixin(_Mixed):
    """Mixed into the implementations of attention layers."""

    def cache_views(self, kv_cache: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values [blocks, block_size, HKV, D_h] of a cache [blocks, HKV, block, 2 D_h]."""
        rows = kv_cache.transpose(1, 2)
        return rows[..., : self.head_size], rows[..., self.head_size :]


def rest_of_batch(
    common: CommonAttentionMetadata, step: TreeStep
) -> CommonAttentionMetadata | None:
    """The requests after those that carry a tree, as a batch of their own; None if none."""
    n, tokens = step.num_requests, step.num_tokens
    if common.num_reqs == n:
        return None
    starts_cpu = common.query_start_loc_cpu[n:] - tokens

    def tail(x: Any, start: int) -> Any:
        return None if x is None else x[start:]

    return common.replace(
        query_start_loc=common.query_start_loc[n:] - tokens,
        query_start_loc_cpu=starts_cpu,
        seq_lens=common.seq_lens[n:],
        num_reqs=common.num_reqs - n,
        num_actual_tokens=common.num_actual_tokens - tokens,
        max_query_len=int(starts_cpu.diff().max()),
        block_table_tensor=common.block_table_tensor[n:],
        slot_mapping=common.slot_mapping[tokens:],
        positions=tail(common.positions, tokens),
        is_prefilling=tail(common.is_prefilling, n),
        seq_lens_cpu_upper_bound=tail(common.seq_lens_cpu_upper_bound, n),
        req_idx=tail(common.req_idx, n),
        _num_computed_tokens_cache=None,
        _token_to_req_indices_cache=None,
    )


def attend_trees(
    metadata: TreeMetadata,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    output: torch.Tensor,
    scale: float,
    backend: str | None = None,
) -> None:
    """Attention of the leading rows of a batch, which are nodes of trees.

    Args:
        metadata: the batch's trees.
        query, output: [tokens, H, D_h]; the leading tokens are read and written.
        key, value: fresh rows [tokens, HKV, D_h].
        key_cache, value_cache: [blocks, block_size, HKV, D_h].
        scale: score scale.
        backend: of the op; None takes the device's default.
    """
    step = metadata.step
    out = tree_attention(
        step.layout.pack(query),
        step.layout.pack(key),
        step.layout.pack(value),
        key_cache,
        value_cache,
        metadata.block_table,
        step.context_lens,
        step.tree.ancestors,
        step.tree.num_nodes,
        scale=scale,
        backend=backend,
    )
    output[: step.num_tokens] = step.layout.flatten(out).view_as(output[: step.num_tokens])


class CacheLayer:
    """KV cache of one target attention layer, as the views that compaction moves rows in."""

    def __init__(self, layer: Any):
        self.layer = layer

    @staticmethod
    def applies(layer: Any) -> bool:
        """Whether an attention layer runs a backend that can verify trees."""
        return hasattr(layer.impl, "cache_views")

    def address(self) -> int:
        """Where the cache lies; it changes when vLLM allocates caches anew."""
        return self.layer.kv_cache.data_ptr()

    def caches(self) -> list[torch.Tensor]:
        """Key and value cache, each [blocks, block_size, HKV, D_h]."""
        return list(self.layer.impl.cache_views(self.layer.kv_cache))
