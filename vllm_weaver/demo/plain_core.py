# SPDX-License-Identifier: Apache-2.0
"""A float32 Gated DeltaNet core for plain vLLM on a CPU, whose own kernels need bfloat16.

Plain decoding in float32 is what trees are compared with, so this core is written straight from
the recurrence (spec section 5), one token after another, and shares no arithmetic with
:mod:`vllm_weaver.ops`. It knows no trees and is made for small models only.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from vllm.model_executor.custom_op import op_registry_oot
from vllm.model_executor.layers.mamba.gdn.qwen_gdn_linear_attn import QwenGatedDeltaNetAttention

from vllm_weaver.engine import compat


class PlainGatedDeltaNet(QwenGatedDeltaNetAttention):
    """vLLM's layer with another core for float32 inputs on a CPU."""

    def forward_cpu(self, hidden_states: Tensor) -> Tensor:
        """Input projections, core, output projection of rows [tokens, d]."""
        if hidden_states.dtype != torch.float32:
            return super().forward_cpu(hidden_states)
        qkvz, _ = self.in_proj_qkvz(hidden_states)
        ba, _ = self.in_proj_ba(hidden_states)
        if self.gqa_interleaved_layout:
            q, k, v, z, b, a = self.fix_query_key_value_ordering(qkvz, ba)
            qkv = torch.cat([x.flatten(1) for x in (q, k, v)], dim=-1)
        else:
            value_width = self.value_dim // self.tp_size
            qkv, z = qkvz.tensor_split([qkvz.shape[-1] - value_width], dim=-1)
            z = z.unflatten(-1, (-1, self.head_v_dim))
            b, a = ba.chunk(2, dim=-1)
        out = torch.zeros_like(z)
        table = compat.forward_metadata()
        if table is not None:
            self._advance(table[self.prefix], qkv, b, a, out)
        return self._output_projection(out, z)

    def _advance(self, metadata: Any, qkv: Tensor, b: Tensor, a: Tensor, out: Tensor) -> None:
        """Advance each request's state over its rows; `out` [tokens, HV, V_h] is written."""
        windows, states = compat.conv_state(self), compat.recurrent_state(self, False)
        decay = torch.exp(-self.A_log.exp() * F.softplus(a + self.dt_bias))
        rate = torch.sigmoid(b)
        starts = metadata.non_spec_query_start_loc.tolist()
        slots = metadata.non_spec_state_indices_tensor.tolist()
        started = metadata.has_initial_state
        for request, (start, end) in enumerate(pairwise(starts)):
            if start == end:
                continue
            slot = slots[request]
            if started is not None and not started[request]:
                windows[slot], states[slot] = 0, 0
            rows = torch.cat([windows[slot], qkv[start:end]])
            windows[slot] = rows[end - start :]
            q, k, v = self._convolve(rows)
            state = states[slot].clone()
            for i, t in enumerate(range(start, end)):
                state = state * decay[t, :, None, None]
                read = (state * k[i, :, None, :]).sum(-1)
                write = rate[t, :, None] * (v[i] - read)
                state = state + write[:, :, None] * k[i, :, None, :]
                out[t] = (state * q[i, :, None, :]).sum(-1)
            states[slot] = state

    def _convolve(self, rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """q, k [tokens, HV, K] and v [tokens, HV, V_h] of raw rows, W - 1 earlier ones in front."""
        weight_CW = compat.conv_weight(self)
        x = F.silu((rows.unfold(0, weight_CW.shape[1], 1) * weight_CW).sum(-1))
        key, value = self.key_dim // self.tp_size, self.value_dim // self.tp_size
        q, k, v = x.split([key, key, value], dim=-1)
        share = self.num_v_heads // self.num_k_heads
        q, k = (
            _unit(y.unflatten(-1, (-1, self.head_k_dim))).repeat_interleave(share, dim=1)
            for y in (q, k)
        )
        return q * self.head_k_dim**-0.5, k, v.unflatten(-1, (-1, self.head_v_dim))


def _unit(x: Tensor) -> Tensor:
    return x * torch.rsqrt((x * x).sum(-1, keepdim=True) + 1e-6)


@contextmanager
def plain_core() -> Iterator[None]:
    """Engines that this process starts inside build their GDN layers with the plain core."""
    name = QwenGatedDeltaNetAttention.__name__
    before = op_registry_oot.get(name)
    op_registry_oot[name] = PlainGatedDeltaNet
    try:
        yield
    finally:
        del op_registry_oot[name]
        if before is not None:
            op_registry_oot[name] = before
