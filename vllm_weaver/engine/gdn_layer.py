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

from vllm_weaver.engine import compat
from vllm_weaver.engine.attention import TreeBuilderMixin, TreeMetadata, rest_of_batch
from vllm_weaver.engine.config import WeaverConfigError, requested
from vllm_weaver.engine.step import TreeStep
from vllm_weaver.ops import (
    ConvStash,
    causal_conv1d_prefill,
    causal_conv1d_tree,
    conv_commit_layers,
    gdn_commit_layers,
    gdn_gate,
    gdn_prefill,
    gdn_tree_verify,
    state_slots,
)
from vllm_weaver.ops.gdn import cuda
from vllm_weaver.ops.gdn.raw import GdnRawStash
from vllm_weaver.ops.gdn.raw import tree_verify_raw as gdn_tree_verify_raw

logger = compat.init_logger(__name__)


@dataclass
class TreeGDNMetadata(TreeMetadata):
    """Metadata of a GDN layer for a batch that carries trees.

    Attributes:
        state_indices: slot of each tree's committed state, int32 [n]; -1 for a padding row.
    """

    state_indices: torch.Tensor


class TreeGDNMetadataBuilder(TreeBuilderMixin, GDNAttentionMetadataBuilder):
    """Trees apart; every other request as in an engine without speculation."""

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        most = self.vllm_config.scheduler_config.max_num_seqs
        # A captured graph reads the slots of every later batch here.
        self._tree_slots = torch.full((most,), -1, dtype=torch.int32, device=self.device)

    def build_for_cudagraph_capture(self, common_attn_metadata: CommonAttentionMetadata) -> Any:
        """Metadata that a captured graph keeps: of trees, or of single tokens as vLLM's own."""
        if self.tree_step is None:
            return super().build_for_cudagraph_capture(common_attn_metadata)
        return self.build(0, common_attn_metadata)

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
        # Without prefix caching a sequence has one block. Block 0 is vLLM's null block.
        mode = self.vllm_config.cache_config.mamba_cache_mode
        slots = self._tree_slots[:n]
        state_slots(
            common.block_table_tensor[:n],
            common.seq_lens[:n],
            step.tree.num_nodes,
            0 if mode == "none" else self.kv_cache_spec.block_size,
            slots,
        )
        return TreeGDNMetadata(
            step=step,
            block_table=common.block_table_tensor[:n],
            linear=None if rest is None else super().build(0, rest, fast_build=fast_build),
            seq_lens=common.seq_lens[:n],
            state_indices=slots,
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
        # Recurrence and convolution stash of the trees verified last, made by the references; and
        # in their place, on a GPU, raw rows, gates and scratch at addresses that stay.
        self._stash: tuple[Any, Any] | None = None
        self._rows: torch.Tensor | None = None
        self._gates: torch.Tensor | None = None
        self._shared: torch.Tensor | None = None
        self._max_depth: int | None = None
        self._kernel = "triton"
        self._views: dict[tuple[int, int], GdnRawStash] = {}
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
        if self._rows is not None:
            self._verify_raw(metadata, pack(mixed_qkv), pack(b), pack(a), out)
            return
        rows, conv_stash = causal_conv1d_tree(
            pack(mixed_qkv),
            self.conv_state(),
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
            self.recurrent_state(),
            metadata.state_indices,
            tree.parents,
            tree.num_nodes,
            ancestors=tree.ancestors,
        )
        out[: step.num_tokens] = step.layout.flatten(nodes)
        self._stash = gdn_stash, conv_stash

    def _verify_raw(
        self,
        metadata: TreeGDNMetadata,
        x_RTC: torch.Tensor,
        b_RTH: torch.Tensor,
        a_RTH: torch.Tensor,
        out: torch.Tensor,
    ) -> None:
        """The same in two launches, with the reserved memory; graphs can capture it."""
        step = metadata.step
        requests, rows = x_RTC.shape[:2]
        direct = step.layout.uniform and out.is_contiguous()
        scratch = stash = None
        if self._fits(requests, rows):
            assert self._shared is not None
            scratch = self._shared[: x_RTC.numel()].view(x_RTC.shape)
            stash = self._raw_stash(requests, rows)
        nodes, stash = gdn_tree_verify_raw(
            x_RTC,
            self.conv_state(),
            compat.conv_weight(self),
            a_RTH,
            b_RTH,
            self.A_log,
            self.dt_bias,
            self.recurrent_state(),
            metadata.state_indices,
            step.tree.num_nodes,
            step.tree.ancestors,
            step.conv_table(self.conv_kernel_size),
            self.num_k_heads // self.tp_size,
            activation=self.activation,
            max_depth=self._max_depth,
            backend=self._kernel,
            rows=scratch,
            out=out[: step.num_tokens].unflatten(0, (requests, rows)) if direct else None,
            stash=stash,
        )
        self._stash = stash, stash.conv
        if not direct:
            out[: step.num_tokens] = step.layout.flatten(nodes)

    # ------------------------------------------------------------------ reserved memory

    def runs_kernels(self, device: torch.device) -> bool:
        """Whether trees run through the GPU kernels rather than the references."""
        return device.type == "cuda"

    def conv_channels(self) -> int:
        """Channels C of the convolution on this rank: q | k | v."""
        return (2 * self.key_dim + self.value_dim) // self.tp_size

    def reserve(self, entries: int, depth: int, kernel: str, shared: torch.Tensor) -> int:
        """Reserve the stash of up to ``entries`` nodes.

        Args:
            entries: most nodes of a batch.
            depth: deepest level of a tree.
            kernel: ``triton``, ``cuda``, or ``auto`` for whichever is faster.
            shared: room for the convolved rows of a batch, [entries * C], of all layers.

        Returns:
            Bytes reserved.
        """
        heads = self.num_v_heads // self.tp_size
        self._rows = torch.empty_like(shared)
        self._gates = torch.empty((2, entries * heads), dtype=torch.float32, device=shared.device)
        self._shared, self._max_depth, self._kernel = shared, depth, kernel
        return self._rows.nbytes + self._gates.nbytes

    def _fits(self, requests: int, rows: int) -> bool:
        """Whether a batch's stash is in reserved memory."""
        return self._rows is not None and requests * rows * self.conv_channels() <= len(self._rows)

    def forget_views(self) -> None:
        """Drop what was made for a KV cache that is there no more."""
        self._views.clear()

    def _raw_stash(self, requests: int, rows: int) -> GdnRawStash:
        """The stash of a batch, which lies at the same place whatever the batch."""
        shape = requests, rows
        if shape not in self._views:
            self._views[shape] = self._make_raw_stash(requests, rows)
        return self._views[shape]

    def _make_raw_stash(self, requests: int, rows: int) -> GdnRawStash:
        assert self._rows is not None and self._gates is not None
        shape = requests, rows
        heads, channels = self.num_v_heads // self.tp_size, self.conv_channels()
        entries = requests * rows
        g, beta = (x[: entries * heads].view(*shape, heads) for x in self._gates)
        return GdnRawStash(
            conv=ConvStash(self._rows[: entries * channels].view(*shape, channels), "triton"),
            conv_state=self.conv_state(),
            weight_CW=compat.conv_weight(self),
            bias_C=None,
            activation=self.activation,
            g_RTH=g,
            beta_RTH=beta,
            key_heads=self.num_k_heads // self.tp_size,
            qk_l2norm=True,
        )

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
            self.conv_state(),
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
            self.recurrent_state(),
            indices,
            starts,
            started,
        )

    # ------------------------------------------------------------------ commit

    def stash(self, step: TreeStep) -> tuple[Any, Any]:
        """Recurrence and convolution stash of the trees of ``step``, which were verified last."""
        if not self._fits(step.num_requests, step.layout.num_rows):
            assert self._stash is not None
            # A padded graph has verified more requests than the batch has.
            live = slice(step.num_requests)
            gdn_stash, conv_stash = self._stash
            return gdn_stash.select(live), conv_stash.select(live)
        raw = self._raw_stash(step.num_requests, step.layout.num_rows)
        return raw, raw.conv

    def conv_state(self) -> torch.Tensor:
        """Committed raw rows [slots, W - 1, C], a view of the cache."""
        return compat.conv_state(self)

    def recurrent_state(self) -> torch.Tensor:
        """Recurrent states [slots, HV, V_h, K], a view of the cache."""
        return compat.recurrent_state(self, self.native_cpu)

    def clear(self, slots: torch.Tensor) -> None:
        """Set the states in ``slots`` to those before a sequence's first token."""
        slots = slots.long()
        # Not by assignment: see `RequestTrees.forget`.
        self.conv_state().index_fill_(0, slots, 0)
        self.recurrent_state().index_fill_(0, slots, 0)


@dataclass(frozen=True)
class Boundary:
    """Where paths are committed with prefix caching, each int32 [n].

    Attributes:
        final: slot of the state after the whole path.
        slot: slot of the state at a cache block's boundary that the path crosses, or -1.
        count: path nodes up to the boundary.
    """

    final: torch.Tensor
    slot: torch.Tensor
    count: torch.Tensor


def commit_layers(
    layers: list[TreeGatedDeltaNet],
    step: TreeStep,
    state_indices: torch.Tensor,
    boundary: Boundary | None,
) -> None:
    """Advance the states of layers that share their slots along the accepted paths.

    On a GPU two launches, or three with prefix caching, whatever the number of layers.

    Args:
        layers: which verified the trees of ``step``.
        step: with its paths.
        state_indices: slots that the verification read, int32 [n].
        boundary: slots to write with prefix caching; else the ones that were read.
    """
    assert step.path is not None and step.length is not None
    stashes, conv_stashes = zip(*(layer.stash(step) for layer in layers), strict=True)
    conv_states = [layer.conv_state() for layer in layers]
    final = state_indices if boundary is None else boundary.final
    # The recurrence first: from raw rows, it reads the committed ones.
    gdn_commit_layers(
        stashes,
        step.path,
        step.length,
        [layer.recurrent_state() for layer in layers],
        final,
        source_indices=state_indices,
        boundary_indices=None if boundary is None else boundary.slot,
        boundary_length=None if boundary is None else boundary.count,
    )
    targets = [(final, step.length)]
    if boundary is not None:
        # The boundary first: the final slot may be the one that is read.
        targets.insert(0, (boundary.slot, boundary.count))
    for slots, nodes in targets:
        conv_commit_layers(
            conv_stashes, step.path, nodes, conv_states, slots, source_indices=state_indices
        )


def choose_kernel(wanted: str, layer: TreeGatedDeltaNet, device: torch.device) -> str:
    """Which kernel verifies trees: ``triton``, ``cuda``, or ``auto`` where both can.

    Args:
        wanted: ``WeaverOptions.gdn_kernel``.
        layer: one of the target's GDN layers.
        device: where it runs.

    Raises:
        WeaverConfigError: ``cuda`` is wanted and cannot run here.
    """
    if wanted == "triton":
        return wanted
    if device.type == "cuda":
        rows, state = layer.get_state_dtype()
        why_not = cuda.why_not(layer.head_k_dim, layer.head_v_dim, rows, state)
    else:
        why_not = f"it needs a GPU, and this is {device.type}"
    if why_not is None:
        return wanted
    if wanted == "cuda":
        raise WeaverConfigError(f"weaver: gdn_kernel is 'cuda', but {why_not}; or choose 'auto'")
    return "triton"


def reserve_stashes(
    layers: list[TreeGatedDeltaNet], entries: int, depth: int, device: torch.device, kernel: str
) -> int:
    """Give layers on a GPU the memory that their trees are verified in.

    Raw rows and gates of every node, per layer, until a path is committed; and one set of
    convolved rows, which the layers share. About 1.0 MB a node over 48 layers of 10,240 channels.

    Args:
        layers: the target's GDN layers.
        entries: most nodes of a batch.
        depth: deepest level of a tree.
        device: where they run.
        kernel: ``WeaverOptions.gdn_kernel``.

    Returns:
        Bytes reserved; 0 on a CPU, where the references make what they need.
    """
    if not layers:
        return 0
    chosen = choose_kernel(kernel, layers[0], device)
    if not layers[0].runs_kernels(device):
        return 0
    logger.info(
        "vllm-weaver: GDN layers verify trees with %s",
        "the faster kernel of triton and cuda" if chosen == "auto" else f"the {chosen} kernel",
    )
    channels, dtype = layers[0].conv_channels(), layers[0].get_state_dtype()[0]
    shared = torch.empty(entries * channels, dtype=dtype, device=device)
    total = shared.nbytes
    for layer in layers:
        total += layer.reserve(entries, depth, chosen, shared)
    return total
