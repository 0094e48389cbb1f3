# SPDX-License-Identifier: Apache-2.0
"""The Gated DeltaNet layer: verifies trees without writing its state, and commits a path later.

Rows of trees go through :mod:`vllm_weaver.ops`; prompts and single tokens through vLLM's own
kernels, or, on a CPU where those cannot run (anything but bfloat16), through our references.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from vllm.model_executor.layers.mamba.gdn.qwen_gdn_linear_attn import QwenGatedDeltaNetAttention
from vllm.model_executor.layers.mamba.mamba_utils import MambaStateShapeCalculator
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.attention.backends.gdn_attn import GDNAttentionBackend, GDNAttentionMetadataBuilder
from vllm.v1.attention.backends.utils import mamba_get_block_table_tensor

from vllm_weaver.engine import compat
from vllm_weaver.engine.attention import TreeBuilderMixin, TreeMetadata, rest_of_batch
from vllm_weaver.engine.config import WeaverConfigError, requested
from vllm_weaver.ops import (
    causal_conv1d_prefill,
    causal_conv1d_tree,
    conv_commit,
    gdn_commit,
    gdn_gate,
    gdn_prefill,
    gdn_tree_verify,
)


@dataclass
class TreeGDNMetadata(TreeMetadata):
    """Metadata of a GDN layer for a batch that carries trees.

    Attributes:
        state_indices: slot of each tree's committed state, int32 [n]; -1 for a padding row.
    """

    state_indices: torch.Tensor


class TreeGDNMetadataBuilder(TreeBuilderMixin, GDNAttentionMetadataBuilder):
    """Trees apart; every other request as in an engine without speculation."""

    def build(
        self,
        common_prefix_len: int,
        common_attn_metadata: CommonAttentionMetadata,
        num_accepted_tokens: torch.Tensor | None = None,
        num_decode_draft_tokens_cpu: torch.Tensor | None = None,
        fast_build: bool = False,
    ) -> Any:
        """Build metadata; the committed state is always that of the last emitted token."""
        step = self.take_step()
        common = common_attn_metadata
        if step is None:
            return super().build(common_prefix_len, common, fast_build=fast_build)
        rest = rest_of_batch(common, step)
        n = step.num_requests
        indices = mamba_get_block_table_tensor(
            common.block_table_tensor[:n],
            common.seq_lens[:n],
            self.kv_cache_spec,
            self.vllm_config.cache_config.mamba_cache_mode,
        )[:, 0]
        return TreeGDNMetadata(
            step=step,
            block_table=common.block_table_tensor[:n],
            linear=None if rest is None else super().build(0, rest, fast_build=fast_build),
            seq_lens=common.seq_lens[:n],
            # Block 0 is vLLM's null block: it holds no state.
            state_indices=torch.where(indices > 0, indices, torch.full_like(indices, -1)),
        )


class TreeGDNBackend(GDNAttentionBackend):
    """vLLM's GDN backend with our metadata."""

    @staticmethod
    def get_builder_cls() -> type[TreeGDNMetadataBuilder]:
        """Class of the metadata builders."""
        return TreeGDNMetadataBuilder


class TreeGatedDeltaNet(QwenGatedDeltaNetAttention):
    """Takes the place of vLLM's layer; in an engine that does not ask for trees, it is that layer.

    The state has one slot per sequence whatever the budget: a verified tree leaves a stash of the
    raw rows, and :meth:`commit` replays the accepted path from it.
    """

    trees = False

    def __init__(self, config: Any, vllm_config: Any, *args: Any, **kwargs: Any):
        # Read by methods that the base class calls while it builds itself.
        object.__setattr__(self, "trees", requested(vllm_config))
        super().__init__(config, vllm_config, *args, **kwargs)
        # Metadata, convolution stash and recurrence stash of the trees verified last.
        self._pending: tuple[TreeGDNMetadata, Any, Any] | None = None
        if self.trees:
            self.enable_fused_gdn_spec_decode = False
            if self.get_state_dtype()[1] != torch.float32:
                raise WeaverConfigError(
                    f"weaver: the recurrent state is {self.get_state_dtype()[1]}; a path is "
                    "committed exactly in a float32 state: pass --mamba-ssm-cache-dtype float32"
                )
            self.native_cpu = compat.native_cpu_gdn(self, vllm_config.model_config.dtype)

    # ------------------------------------------------------------------ cache

    def get_state_shape(self) -> tuple[tuple[int, ...], ...]:
        """Conv and recurrent state of one sequence, without room for drafts."""
        if not self.trees:
            return super().get_state_shape()
        return MambaStateShapeCalculator.gated_delta_net_state_shape(
            self.tp_size,
            self.num_k_heads,
            self.num_v_heads,
            self.head_k_dim,
            self.head_v_dim,
            self.conv_kernel_size,
            0,
        )

    def get_kv_cache_spec(self, vllm_config: Any) -> Any:
        """Cache spec with a single state per sequence."""
        spec = super().get_kv_cache_spec(vllm_config)
        return replace(spec, num_speculative_blocks=0) if self.trees else spec

    def get_attn_backend(self) -> Any:
        """Backend whose metadata carries trees."""
        return TreeGDNBackend if self.trees else super().get_attn_backend()

    # ------------------------------------------------------------------ forward

    def forward_cpu(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Input projections, core, output projection, on a CPU.

        Args:
            hidden_states: [tokens, d].
        """
        if not self.trees:
            return super().forward_cpu(hidden_states)
        qkvz, _ = self.in_proj_qkvz(hidden_states)
        ba, _ = self.in_proj_ba(hidden_states)
        if self.gqa_interleaved_layout:
            q, k, v, z, b, a = self.fix_query_key_value_ordering(qkvz, ba)
            qkv = torch.cat([x.flatten(1) for x in (q, k, v)], dim=-1)
        else:
            widths = [(2 * self.key_dim + self.value_dim) // self.tp_size]
            qkv, z = qkvz.split([*widths, self.value_dim // self.tp_size], dim=-1)
            z = z.reshape(len(z), -1, self.head_v_dim)
            b, a = ba.chunk(2, dim=-1)
        heads = self.num_v_heads // self.tp_size
        out = hidden_states.new_zeros(len(hidden_states), heads, self.head_v_dim)
        self._forward_core(qkv, b, a, out)
        return self._output_projection(out, z)

    def _forward_core(
        self,
        mixed_qkv: torch.Tensor,
        b: torch.Tensor,
        a: torch.Tensor,
        core_attn_out: torch.Tensor,
    ) -> None:
        """Convolution and recurrence of a batch of trees, prompts and single tokens.

        Args:
            mixed_qkv: raw q | k | v rows [tokens, C].
            b, a: gate projections [tokens, HV].
            core_attn_out: [tokens, HV, V_h], written.
        """
        table = compat.forward_metadata() if self.trees else None
        metadata = None if table is None else table.get(self.prefix)
        if metadata is None:
            if not self.trees or mixed_qkv.device.type != "cpu":
                super()._forward_core(mixed_qkv, b, a, core_attn_out)
            return
        linear, first = metadata, 0
        if isinstance(metadata, TreeGDNMetadata):
            self._verify(metadata, mixed_qkv, b, a, core_attn_out)
            linear, first = metadata.linear, metadata.step.num_tokens
        if linear is None:
            return
        parts = [x[first:] for x in (mixed_qkv, b, a, core_attn_out)]
        if mixed_qkv.device.type != "cpu":
            with compat.layer_metadata(self.prefix, linear):
                super()._forward_core(*parts)
        elif self.native_cpu:
            with compat.layer_metadata(self.prefix, linear):
                compat.native_cpu_gdn_core(self, *parts)
        else:
            self._advance(linear, *parts)

    def _split(self, conv_out: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """q, k [..., HK, K] and v [..., HV, V_h] of activated rows [..., C]."""
        key, value = self.key_dim // self.tp_size, self.value_dim // self.tp_size
        q, k, v = conv_out.split([key, key, value], dim=-1)
        return (
            q.unflatten(-1, (-1, self.head_k_dim)),
            k.unflatten(-1, (-1, self.head_k_dim)),
            v.unflatten(-1, (-1, self.head_v_dim)),
        )

    def _verify(
        self,
        metadata: TreeGDNMetadata,
        mixed_qkv: torch.Tensor,
        b: torch.Tensor,
        a: torch.Tensor,
        out: torch.Tensor,
    ) -> None:
        """Outputs of all nodes; keeps the stash from which a path can be committed."""
        step = metadata.step
        pack, tree = step.layout.pack, step.tree
        rows, conv_stash = causal_conv1d_tree(
            pack(mixed_qkv),
            compat.conv_state(self),
            metadata.state_indices,
            compat.conv_weight(self),
            tree.parents,
            tree.num_nodes,
            activation=self.activation,
            table=step.conv_table(self.conv_kernel_size),
        )
        g, beta = gdn_gate(pack(a), pack(b), self.A_log, self.dt_bias)
        nodes, gdn_stash = gdn_tree_verify(
            *self._split(rows),
            g,
            beta,
            compat.recurrent_state(self, self.native_cpu),
            metadata.state_indices,
            tree.parents,
            tree.num_nodes,
            ancestors=tree.ancestors,
        )
        out[: step.num_tokens] = step.layout.flatten(nodes)
        self._pending = (metadata, conv_stash, gdn_stash)

    def _advance(
        self,
        metadata: Any,
        mixed_qkv: torch.Tensor,
        b: torch.Tensor,
        a: torch.Tensor,
        out: torch.Tensor,
    ) -> None:
        """Prompts and single tokens through our references; advances their states."""
        starts = metadata.non_spec_query_start_loc
        indices = metadata.non_spec_state_indices_tensor
        started = metadata.has_initial_state
        if started is None:
            started = torch.ones(len(indices), dtype=torch.bool, device=indices.device)
        rows = causal_conv1d_prefill(
            mixed_qkv,
            compat.conv_state(self),
            indices,
            compat.conv_weight(self),
            starts,
            started,
            activation=self.activation,
        )
        g, beta = gdn_gate(a, b, self.A_log, self.dt_bias)
        out[:] = gdn_prefill(
            *self._split(rows),
            g,
            beta,
            compat.recurrent_state(self, self.native_cpu),
            indices,
            starts,
            started,
        )

    # ------------------------------------------------------------------ commit

    def commit(
        self,
        path: torch.Tensor,
        length: torch.Tensor,
        blocks: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None,
    ) -> None:
        """Advance the states along the accepted paths of the trees verified last.

        Args:
            path: accepted nodes [n, D + 1], root first.
            length: nodes on each path [n].
            blocks: with prefix caching, the slots to write: (final slot, slot of the state at a
                crossed block boundary or -1, path nodes up to it), each [n]; else None.
        """
        assert self._pending is not None
        metadata, conv_stash, gdn_stash = self._pending
        self._pending = None
        source = metadata.state_indices
        targets = [(source, length)]
        if blocks is not None:
            final, boundary, count = blocks
            # The boundary first: the final slot may be the one that is read.
            targets = [(boundary.to(torch.int32), count), (final.to(torch.int32), length)]
        conv_state = compat.conv_state(self)
        state = compat.recurrent_state(self, self.native_cpu)
        for slots, nodes in targets:
            conv_commit(conv_stash, path, nodes, conv_state, slots, source_indices=source)
            gdn_commit(gdn_stash, path, nodes, state, slots, source_indices=source)

    def clear(self, slots: torch.Tensor) -> None:
        """Set the states in ``slots`` to those before a sequence's first token."""
        slots = slots.long()
        compat.conv_state(self)[slots] = 0
        compat.recurrent_state(self, self.native_cpu)[slots] = 0

    def block_table(self) -> torch.Tensor:
        """Cache blocks of the requests whose trees were verified last, [n, blocks]."""
        assert self._pending is not None
        return self._pending[0].block_table
