# SPDX-License-Identifier: Apache-2.0
"""The adapter's parts: norm, block, rotation, and the log-softmax over a candidate pool.

Used alike by the plain definition, by training and by the fast path; none of them says here which
rows attend to which. Knows nothing of checkpoints, trees or vLLM. Source: spec section 2.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vllm_weaver.adapter.config import WeaverConfig

# A table of one row per token, or a function from token ids [...] to their rows [..., e].
TokenRows = Tensor | Callable[[Tensor], Tensor]
# A table of one row per token, or a function from ids [N, P] and queries [N, d] to the dot
# products [N, P]. The function form serves a vocabulary that is split over ranks: each rank adds
# the products of its own rows, and an all-reduce over [N, P] sums them.
PoolRows = Tensor | Callable[[Tensor, Tensor], Tensor]


class BiasedRMSNorm(nn.Module):
    """RMSNorm with scale and bias, computed in float32 (float64 for float64 input)."""

    def __init__(
        self,
        width: int,
        eps: float,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(width, device=device, dtype=dtype))
        self.bias = nn.Parameter(torch.zeros(width, device=device, dtype=dtype))

    def forward(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        """Normalise the last axis of `x`; the result is rounded to `dtype` once, at the end."""
        wide = torch.promote_types(x.dtype, torch.float32)
        scaled = F.rms_norm(x.to(wide), self.weight.shape, self.weight.to(wide), self.eps)
        return (scaled + self.bias.to(wide)).to(dtype)


class WeaverBlock(nn.Module):
    """One pre-norm block, cut at its attention so that each caller attends in its own way."""

    def __init__(
        self,
        config: WeaverConfig,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        r, m = config.d_rank, config.mlp_dim
        self.num_heads, self.head_dim = config.num_heads, config.head_dim
        self.activation = config.activation
        self.norm_attn = BiasedRMSNorm(r, config.norm_eps, device, dtype)
        self.qkv_proj = nn.Linear(r, 3 * r, bias=False, device=device, dtype=dtype)
        self.o_proj = nn.Linear(r, r, bias=False, device=device, dtype=dtype)
        self.norm_mlp = BiasedRMSNorm(r, config.norm_eps, device, dtype)
        if config.variant == "v1":
            self.fc1 = nn.Linear(r, m, device=device, dtype=dtype)
            self.fc2 = nn.Linear(m, r, device=device, dtype=dtype)
        else:
            self.gate_up_proj = nn.Linear(r, 2 * m, device=device, dtype=dtype)
            self.down_proj = nn.Linear(m, r, device=device, dtype=dtype)

    def qkv(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """x [..., r] -> q, k, v, each [..., H, h], before RoPE."""
        rows = linear(self.qkv_proj, self.norm_attn(x, x.dtype))
        q, k, v = rows.unflatten(-1, (3, self.num_heads, self.head_dim)).unbind(-3)
        return q, k, v

    def kv(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """x [..., r] -> k, v: what a prefix row leaves behind in the last block."""
        weight = self.qkv_proj.weight[self.num_heads * self.head_dim :]
        rows = F.linear(self.norm_attn(x, x.dtype), weight.to(x.dtype))
        k, v = rows.unflatten(-1, (2, self.num_heads, self.head_dim)).unbind(-3)
        return k, v

    def finish(self, x: Tensor, attended: Tensor) -> Tensor:
        """x [..., r] and the attention's output [..., H, h] -> the block's output [..., r]."""
        x = x + linear(self.o_proj, attended.flatten(-2).to(x.dtype))
        y = self.norm_mlp(x, x.dtype)
        if self.activation == "swiglu":
            gate, up = linear(self.gate_up_proj, y).chunk(2, dim=-1)
            return x + linear(self.down_proj, F.silu(gate) * up)
        approximate = "tanh" if self.activation == "gelu_tanh" else "none"
        return x + linear(self.fc2, F.gelu(linear(self.fc1, y), approximate=approximate))


def linear(layer: nn.Linear, x: Tensor) -> Tensor:
    """`layer(x)` in the dtype of `x`, so that one set of parameters serves every precision."""
    bias = None if layer.bias is None else layer.bias.to(x.dtype)
    return F.linear(x, layer.weight.to(x.dtype), bias)


def rotate_half(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """RoPE over the full head: x [..., H, h], cos and sin [..., 1, h / 2]; float32 inside."""
    first, second = x.to(torch.promote_types(x.dtype, cos.dtype)).chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1).to(x.dtype)


def take_rows(table: Tensor, index: Tensor) -> Tensor:
    """`table[index]` for an int64 index of any shape, copying whole rows at a time."""
    rows = F.embedding(index, table.flatten(1))
    return rows.unflatten(-1, table.shape[1:])


def token_rows(embed: TokenRows, ids: Tensor) -> Tensor:
    """Rows of `ids` from a table or a function."""
    if isinstance(embed, Tensor):
        return take_rows(embed, ids.long())
    return embed(ids.long())


def pool_log_probs(candidate_ids: Tensor, candidate_logits: Tensor, correction: Tensor) -> Tensor:
    """Log-softmax over a pool of the drafter's logits plus the adapter's correction.

    All three [..., P]; ids of -1 are padding and get -inf (a pool of padding alone is all -inf,
    not NaN), and neither their values nor their gradients touch the rest. Returns float32.
    """
    padding = candidate_ids < 0
    logits = candidate_logits.float() + correction.float()
    logits = logits.masked_fill(padding, -math.inf)
    logits = logits.masked_fill(padding.all(-1, keepdim=True), 0.0)
    return logits.log_softmax(-1).masked_fill(padding, -math.inf)
