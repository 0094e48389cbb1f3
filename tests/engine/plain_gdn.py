# SPDX-License-Identifier: Apache-2.0
"""A plain float32 Gated DeltaNet core for vLLM's CPU build, whose own needs bfloat16.

One token after another, straight from the recurrence; shares no code with ``vllm_weaver.ops``. It
stands in for vLLM's core in runs without trees, so that those with trees have something exact to
be compared with. ``test_plain_core.py`` checks it against Transformers' greedy output.
"""

import torch
import torch.nn.functional as F
from vllm.forward_context import get_forward_context
from vllm.model_executor.layers.mamba.gdn.qwen_gdn_linear_attn import QwenGatedDeltaNetAttention
from vllm.model_executor.layers.mamba.mamba_utils import is_conv_state_dim_first

_native_forward_cpu = QwenGatedDeltaNetAttention.forward_cpu


def _unit(x: torch.Tensor) -> torch.Tensor:
    return x * torch.rsqrt((x * x).sum(-1, keepdim=True) + 1e-6)


def _core(layer, qkv, b, a, out) -> None:
    metadata = get_forward_context().attn_metadata
    if not isinstance(metadata, dict):
        return
    metadata = metadata[layer.prefix]
    conv = layer.kv_cache[0]
    conv = conv.transpose(-1, -2) if is_conv_state_dim_first() else conv
    states = layer.kv_cache[1]
    weight = getattr(layer.conv1d, "_cpu_unpacked_conv_weight", layer.conv1d.weight)
    weight = weight.reshape(weight.shape[0], -1).float()
    key_heads = layer.num_k_heads // layer.tp_size
    value_heads = layer.num_v_heads // layer.tp_size
    K, V = layer.head_k_dim, layer.head_v_dim
    starts = metadata.non_spec_query_start_loc.tolist()
    slots = metadata.non_spec_state_indices_tensor.tolist()
    started = metadata.has_initial_state
    for request, slot in enumerate(slots[: len(starts) - 1]):
        start, end = starts[request], starts[request + 1]
        if start == end:
            continue
        fresh = started is not None and not bool(started[request])
        window = torch.zeros_like(conv[slot]) if fresh else conv[slot].clone()
        state = torch.zeros_like(states[slot]) if fresh else states[slot].clone()
        for t in range(start, end):
            window = torch.cat([window, qkv[t : t + 1]])
            y = F.silu((window * weight.t()).sum(0))
            window = window[1:]
            q, k, v = y.split([key_heads * K, key_heads * K, value_heads * V])
            q = (_unit(q.view(key_heads, K)) * K**-0.5).repeat_interleave(
                value_heads // key_heads, 0
            )
            k = _unit(k.view(key_heads, K)).repeat_interleave(value_heads // key_heads, 0)
            decay = torch.exp(-layer.A_log.exp() * F.softplus(a[t] + layer.dt_bias))
            state = state * decay[:, None, None]
            read = torch.einsum("hvk,hk->hv", state, k)
            write = torch.sigmoid(b[t])[:, None] * (v.view(value_heads, V) - read)
            state = state + write[:, :, None] * k[:, None, :]
            out[t] = torch.einsum("hvk,hk->hv", state, q)
        conv[slot], states[slot] = window, state


def forward_cpu(self, hidden_states: torch.Tensor) -> torch.Tensor:
    """Replaces ``QwenGatedDeltaNetAttention.forward_cpu`` for float32 inputs."""
    if hidden_states.dtype != torch.float32:
        return _native_forward_cpu(self, hidden_states)
    qkvz, _ = self.in_proj_qkvz(hidden_states)
    ba, _ = self.in_proj_ba(hidden_states)
    if self.gqa_interleaved_layout:
        q, k, v, z, b, a = self.fix_query_key_value_ordering(qkvz, ba)
        qkv = torch.cat([x.flatten(1) for x in (q, k, v)], dim=-1)
    else:
        width = (2 * self.key_dim + self.value_dim) // self.tp_size
        qkv, z = qkvz.split([width, self.value_dim // self.tp_size], dim=-1)
        z = z.reshape(len(z), -1, self.head_v_dim)
        b, a = ba.chunk(2, dim=-1)
    heads = self.num_v_heads // self.tp_size
    out = hidden_states.new_zeros(len(hidden_states), heads, self.head_v_dim)
    _core(self, qkv, b, a, out)
    return self._output_projection(out, z)


def install() -> None:
    """Let every layer of vLLM's own class, in this process, run the plain core in float32."""
    QwenGatedDeltaNetAttention.forward_cpu = forward_cpu
