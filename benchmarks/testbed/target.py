# SPDX-License-Identifier: Apache-2.0
"""The target: a Qwen3.5 text model in plain PyTorch, fast enough to train in minutes.

Parameter names and shapes are those of Transformers' `Qwen3_5ForCausalLM`, so that an export is a
`state_dict`; `export.py` checks that the logits are the same. Knows nothing of drafting: it gives
the hidden states that a drafter and an adapter read. Layer formulas: spec section 5.

Shapes: B rows, T positions, d width. Parameters are float32; compute is in `dtype`.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from . import gdn
from .config import TargetShape

_PREFILL_TOKENS = 32768
# cuDNN's attention, which PyTorch prefers on Hopper, builds a plan for every number of keys, 23 to
# 37 ms each on the host; a text that grows has another number at every step.
_GROWING = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]


@dataclasses.dataclass
class Runtime:
    """How the layers run: compute dtype, the delta rule, and whether pieces are compiled, in
    passes over whole rows (`compiled`) and in steps of one token (`compiled_steps`)."""

    dtype: torch.dtype = torch.float32
    rule: gdn.GatedDeltaRule = gdn.plain
    compiled: bool = False
    compiled_steps: bool = False


RUNTIME = Runtime()


def piece(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compile `function` once, for use while `RUNTIME.compiled`; all layers share the result."""
    compiled = torch.compile(function, dynamic=False)

    def call(*arguments: Any) -> Any:
        return (compiled if RUNTIME.compiled else function)(*arguments)

    return call


def linear(x: Tensor, weight: Tensor) -> Tensor:
    return F.linear(x, weight.to(x.dtype))


def norm(x: Tensor, gain: Tensor, eps: float) -> Tensor:
    wide = x.float()
    return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps) * gain).to(x.dtype)


def rope(positions: Tensor, rotary_dim: int, theta: float) -> tuple[Tensor, Tensor]:
    """cos and sin of `positions` [...], each [..., rotary_dim / 2]."""
    half = torch.arange(rotary_dim // 2, device=positions.device)
    angle = positions.float()[..., None] * theta ** (-half.float() / (rotary_dim // 2))
    return angle.cos(), angle.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """RoPE on the first 2 * cos.shape[-1] channels of x [..., head_dim]."""
    half = cos.shape[-1]
    first, second, rest = x.float().split([half, half, x.shape[-1] - 2 * half], -1)
    turned = [first * cos - second * sin, second * cos + first * sin, rest]
    return torch.cat(turned, -1).to(x.dtype)


def mlp(x: Tensor, weights: tuple[Tensor, ...], eps: float) -> Tensor:
    """Residual MLP; `weights` are the norm's gain and the gate, up and down projections."""
    gain, gate, up, down = weights
    h = norm(x, gain, eps)
    return x + linear(F.silu(linear(h, gate)) * linear(h, up), down)


def _weight(*shape: int, std: float | None = None) -> nn.Parameter:
    return nn.Parameter(torch.randn(*shape) * (shape[-1] ** -0.5 if std is None else std))


class _Linear(nn.Module):
    def __init__(self, rows: int, columns: int, *, zero: bool = False) -> None:
        super().__init__()
        self.weight = _weight(rows, columns, std=0.0 if zero else None)


class _Gain(nn.Module):
    """A norm's weight; the decoder's norms are (1 + weight), so zero is the identity."""

    def __init__(self, width: int, value: float = 0.0) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((width,), value))


class _Conv(nn.Module):
    def __init__(self, channels: int, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(channels, 1, width) * 0.3)


_recurrent_step = piece(gdn.recurrent_step)


@piece
def _gdn_inputs(
    x: Tensor,
    gain: Tensor,
    projections: tuple[Tensor, Tensor, Tensor, Tensor],
    conv: Tensor,
    a_log: Tensor,
    dt_bias: Tensor,
    past: Tensor | None,
    shape: TargetShape,
) -> tuple[Tensor, ...]:
    """q, k, v, g, beta, z, and the raw rows before the convolution."""
    batch, length, _ = x.shape
    keys, values = (
        shape.gdn_key_heads * shape.gdn_head_dim,
        shape.gdn_value_heads * shape.gdn_head_dim,
    )
    h = norm(x, gain, shape.eps)
    raw, z, b, a = (linear(h, w) for w in projections)
    taps = shape.conv
    window = F.pad(raw, (0, 0, taps - 1, 0)) if past is None else torch.cat([past, raw], 1)
    shifted = [window[:, j : j + length].float() * conv[:, 0, j] for j in range(taps)]
    mixed = sum(shifted[1:], start=shifted[0])
    q, k, v = F.silu(mixed).split([keys, keys, values], -1)

    def heads(t: Tensor) -> Tensor:
        t = t.view(batch, length, shape.gdn_key_heads, shape.gdn_head_dim)
        return (t * torch.rsqrt(t.square().sum(-1, keepdim=True) + 1e-6)).to(x.dtype)

    v = v.reshape(batch, length, shape.gdn_value_heads, shape.gdn_head_dim).to(x.dtype)
    g = -a_log.exp() * F.softplus(a.float() + dt_bias)
    return heads(q), heads(k), v.contiguous(), g, torch.sigmoid(b.float()), z, raw


@piece
def _gdn_outputs(
    x: Tensor,
    o: Tensor,
    z: Tensor,
    gain: Tensor,
    out: Tensor,
    mlp_weights: tuple[Tensor, ...],
    eps: float,
) -> Tensor:
    batch, length = x.shape[:2]
    o = norm(o, gain, eps).float() * F.silu(z.view(o.shape).float())
    return mlp(x + linear(o.to(x.dtype).reshape(batch, length, -1), out), mlp_weights, eps)


@piece
def _attention_inputs(
    x: Tensor,
    cos: Tensor,
    sin: Tensor,
    gain: Tensor,
    projections: tuple[Tensor, Tensor, Tensor],
    head_gains: tuple[Tensor, Tensor],
    shape: TargetShape,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """q, k, v [B, heads, T, head_dim] and the output gate [B, T, heads * head_dim]."""
    h = norm(x, gain, shape.eps)
    q, k, v = (linear(h, w) for w in projections)
    q, gate = q.unflatten(-1, (shape.heads, 2 * shape.head_dim)).chunk(2, -1)
    k, v = (t.unflatten(-1, (shape.kv_heads, shape.head_dim)) for t in (k, v))
    q, k = (norm(t, w, shape.eps).transpose(1, 2) for t, w in zip((q, k), head_gains, strict=True))
    return rotate(q, cos, sin), rotate(k, cos, sin), v.transpose(1, 2), gate.flatten(-2)


@piece
def _attention_outputs(
    x: Tensor, o: Tensor, gate: Tensor, out: Tensor, mlp_weights: tuple[Tensor, ...], eps: float
) -> Tensor:
    o = o.transpose(1, 2).flatten(-2) * torch.sigmoid(gate)
    return mlp(x + linear(o, out), mlp_weights, eps)


class _Block(nn.Module):
    def __init__(self, shape: TargetShape) -> None:
        super().__init__()
        self.shape = shape
        self.input_layernorm = _Gain(shape.width)
        self.post_attention_layernorm = _Gain(shape.width)
        self.mlp = nn.ModuleDict(
            {
                "gate_proj": _Linear(shape.mlp, shape.width),
                "up_proj": _Linear(shape.mlp, shape.width),
                "down_proj": _Linear(shape.width, shape.mlp, zero=True),
            }
        )

    def mlp_weights(self) -> tuple[Tensor, ...]:
        names = ("gate_proj", "up_proj", "down_proj")
        gain = 1 + self.post_attention_layernorm.weight
        return (gain, *(self.mlp[n].get_parameter("weight") for n in names))


class GdnBlock(_Block):
    """A Gated DeltaNet decoder layer. Its cache is (raw conv rows [B, W - 1, C], state)."""

    linear_attn: Any

    def __init__(self, shape: TargetShape) -> None:
        super().__init__(shape)
        keys = shape.gdn_key_heads * shape.gdn_head_dim
        values = shape.gdn_value_heads * shape.gdn_head_dim
        self.linear_attn = nn.Module()
        layer = self.linear_attn
        layer.in_proj_qkv = _Linear(2 * keys + values, shape.width)
        layer.in_proj_z = _Linear(values, shape.width)
        layer.in_proj_b = _Linear(shape.gdn_value_heads, shape.width)
        layer.in_proj_a = _Linear(shape.gdn_value_heads, shape.width)
        layer.conv1d = _Conv(2 * keys + values, shape.conv)
        layer.A_log = nn.Parameter(torch.linspace(1, 8, shape.gdn_value_heads).log())
        # softplus(dt_bias) spread over 1e-3 .. 5e-2: memories of tens to thousands of tokens.
        step = torch.exp(torch.linspace(math.log(1e-3), math.log(5e-2), shape.gdn_value_heads))
        layer.dt_bias = nn.Parameter(step + torch.log(-torch.expm1(-step)))
        layer.norm = _Gain(shape.gdn_head_dim, 1.0)  # this one is a plain gain
        layer.out_proj = _Linear(shape.width, values, zero=True)

    def _inputs(self, x: Tensor, past: Tensor | None) -> tuple[Tensor, ...]:
        layer = self.linear_attn
        names = ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a")
        return _gdn_inputs(
            x,
            1 + self.input_layernorm.weight,
            tuple(getattr(layer, n).weight for n in names),
            layer.conv1d.weight,
            layer.A_log,
            layer.dt_bias,
            past,
            self.shape,
        )

    def _outputs(self, x: Tensor, o: Tensor, z: Tensor) -> Tensor:
        layer = self.linear_attn
        return _gdn_outputs(
            x, o, z, layer.norm.weight, layer.out_proj.weight, self.mlp_weights(), self.shape.eps
        )

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        q, k, v, g, beta, z, _ = self._inputs(x, None)
        return self._outputs(x, RUNTIME.rule(q, k, v, g, beta), z)

    def prefill(self, x: Tensor, cos: Tensor, sin: Tensor, room: int) -> tuple[Tensor, Any]:
        q, k, v, g, beta, z, raw = self._inputs(x, None)
        o, state = gdn.chunked(q, k, v, g, beta)
        return self._outputs(x, o, z), (raw[:, 1 - self.shape.conv :].contiguous(), state)

    def step(
        self, x: Tensor, cos: Tensor, sin: Tensor, cache: Any, position: int
    ) -> tuple[Tensor, Any]:
        past, state = cache
        q, k, v, g, beta, z, raw = self._inputs(x, past)
        o, state = _recurrent_step(q[:, 0], k[:, 0], v[:, 0], g[:, 0], beta[:, 0], state)
        return self._outputs(x, o[:, None], z), (torch.cat([past[:, 1:], raw], 1), state)


class AttentionBlock(_Block):
    """A gated full-attention decoder layer. Its cache is (keys, values) with room to grow."""

    self_attn: Any

    def __init__(self, shape: TargetShape) -> None:
        super().__init__(shape)
        size, kv_size = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
        self.self_attn = nn.Module()
        layer = self.self_attn
        layer.q_proj = _Linear(2 * size, shape.width)
        layer.k_proj = _Linear(kv_size, shape.width)
        layer.v_proj = _Linear(kv_size, shape.width)
        layer.o_proj = _Linear(shape.width, size, zero=True)
        layer.q_norm, layer.k_norm = _Gain(shape.head_dim), _Gain(shape.head_dim)

    def _inputs(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, ...]:
        layer = self.self_attn
        return _attention_inputs(
            x,
            cos,
            sin,
            1 + self.input_layernorm.weight,
            tuple(getattr(layer, n).weight for n in ("q_proj", "k_proj", "v_proj")),
            (1 + layer.q_norm.weight, 1 + layer.k_norm.weight),
            self.shape,
        )

    def _outputs(self, x: Tensor, o: Tensor, gate: Tensor) -> Tensor:
        weight = self.self_attn.o_proj.weight
        return _attention_outputs(x, o, gate, weight, self.mlp_weights(), self.shape.eps)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        q, k, v, gate = self._inputs(x, cos, sin)
        group = self.shape.heads // self.shape.kv_heads
        k, v = (t.repeat_interleave(group, 1) for t in (k, v))
        return self._outputs(x, F.scaled_dot_product_attention(q, k, v, is_causal=True), gate)

    def prefill(self, x: Tensor, cos: Tensor, sin: Tensor, room: int) -> tuple[Tensor, Any]:
        q, k, v, gate = self._inputs(x, cos, sin)
        group = self.shape.heads // self.shape.kv_heads
        keys, values = (t.repeat_interleave(group, 1) for t in (k, v))
        o = F.scaled_dot_product_attention(q, keys, values, is_causal=True)
        cache = tuple(F.pad(t, (0, 0, 0, room - t.shape[2])) for t in (k, v))
        return self._outputs(x, o, gate), cache

    def step(
        self, x: Tensor, cos: Tensor, sin: Tensor, cache: Any, position: int
    ) -> tuple[Tensor, Any]:
        q, k, v, gate = self._inputs(x, cos, sin)
        keys, values = cache
        keys[:, :, position], values[:, :, position] = k[:, :, 0], v[:, :, 0]
        group = self.shape.heads // self.shape.kv_heads
        # Query heads of one key head side by side as query rows: no copy of the cache.
        q = q.unflatten(1, (self.shape.kv_heads, group))[:, :, :, 0]
        o = F.scaled_dot_product_attention(
            q, keys[:, :, : position + 1], values[:, :, : position + 1]
        )
        return self._outputs(x, o.flatten(1, 2)[:, :, None], gate), cache


class Target(nn.Module):
    """The whole model; `forward` returns what drafter and adapter training needs."""

    model: Any
    lm_head: Any

    def __init__(self, shape: TargetShape) -> None:
        super().__init__()
        self.shape = shape
        self.model = nn.Module()
        self.model.embed_tokens = nn.Module()
        self.model.embed_tokens.weight = _weight(
            shape.vocab, shape.width, std=0.02 if shape.tied else 0.5
        )
        self.model.layers = nn.ModuleList(
            AttentionBlock(shape) if shape.is_attention(i) else GdnBlock(shape)
            for i in range(shape.layers)
        )
        self.model.norm = _Gain(shape.width)
        if not shape.tied:
            self.lm_head = nn.Module()
            self.lm_head.weight = _weight(shape.vocab, shape.width, std=0.01)

    @property
    def embedding(self) -> Tensor:
        return self.model.embed_tokens.weight

    @property
    def head(self) -> Tensor:
        return self.embedding if self.shape.tied else self.lm_head.weight

    def _rope(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        dim = int(self.shape.head_dim * self.shape.rotary_factor)
        return rope(positions, dim, self.shape.rope_theta)

    def final_norm(self, x: Tensor) -> Tensor:
        return norm(x, 1 + self.model.norm.weight, self.shape.eps)

    def logits(self, hidden: Tensor) -> Tensor:
        return linear(hidden, self.head)

    def forward(
        self, ids: Tensor, outputs_of: tuple[int, ...] = ()
    ) -> tuple[Tensor, Tensor | None, Tensor]:
        """ids [B, T] -> hidden states after the final norm [B, T, d], the outputs of the layers
        `outputs_of` side by side [B, T, n * d] (or None), and the last layer's output."""
        x = F.embedding(ids, self.embedding).to(RUNTIME.dtype)
        cos, sin = self._rope(torch.arange(ids.shape[1], device=ids.device))
        outputs = {}
        for i, layer in enumerate(self.model.layers):
            x = layer(x, cos, sin)
            if i in outputs_of:
                outputs[i] = x
        auxiliary = torch.cat([outputs[i] for i in outputs_of], -1) if outputs_of else None
        return self.final_norm(x), auxiliary, x

    def _prefill(
        self, ids: Tensor, cos: Tensor, sin: Tensor, room: int
    ) -> tuple[Tensor, list[tuple[Tensor, Tensor]]]:
        """The last output [B, d] over `ids` and each layer's cache, some rows at once: the plain
        form holds dozens of times a row's own states."""
        last: list[Tensor] = []
        caches: list[tuple[Tensor, Tensor]] = []
        rows = max(1, _PREFILL_TOKENS // ids.shape[1])
        for first in range(0, len(ids), rows):
            x = F.embedding(ids[first : first + rows], self.embedding).to(RUNTIME.dtype)
            for i, layer in enumerate(self.model.layers):
                x, found = layer.prefill(x, cos, sin, room)
                if first == 0:
                    whole = [t.new_empty(len(ids), *t.shape[1:]) for t in found]
                    caches.append((whole[0], whole[1]))
                for kept, part in zip(caches[i], found, strict=True):
                    kept[first : first + rows] = part
            last.append(x[:, -1])
        return torch.cat(last), caches

    @torch.no_grad()
    def generate(
        self,
        prefix: Tensor,
        length: int,
        sampled: Tensor,
        generator: torch.Generator | None = None,
        process: Callable[[Tensor], Tensor] = lambda logits: logits,
        known: Tensor | None = None,
    ) -> Tensor:
        """Extend `prefix` [B, T] to [B, length]: rows of `sampled` [B] at temperature 1, after
        `process` of the logits [B, V], others greedily. With `known` [B], row b has only its first
        `known[b]` tokens given; noise is drawn from the smallest of them on, for all rows."""
        tokens = F.pad(prefix, (0, length - prefix.shape[1]))
        device = prefix.device
        layers = list(self.model.layers)
        compiled, RUNTIME.compiled = RUNTIME.compiled, False
        first = prefix.shape[1] if known is None else int(known.min())
        # Of all positions at once: a position sent to the device would wait for all work there.
        cos, sin = self._rope(torch.arange(length, device=device))
        try:
            with sdpa_kernel(_GROWING):
                x, caches = self._prefill(prefix[:, :first], cos[:first], sin[:first], length)
                RUNTIME.compiled = RUNTIME.compiled_steps
                for position in range(first, length):
                    logits = self.logits(self.final_norm(x)).float()
                    noise = torch.empty_like(logits).exponential_(generator=generator)
                    drawn = process(logits) - noise.log()
                    token = torch.where(sampled[:, None], drawn, logits).argmax(-1)
                    if known is not None:
                        token = torch.where(known > position, tokens[:, position], token)
                    tokens[:, position] = token
                    if position + 1 == length:
                        break
                    x = F.embedding(token[:, None], self.embedding).to(RUNTIME.dtype)
                    turn = cos[position : position + 1], sin[position : position + 1]
                    for i, layer in enumerate(layers):
                        x, caches[i] = layer.step(x, *turn, caches[i], position)
                    x = x[:, -1]
        finally:
            RUNTIME.compiled = compiled
        return tokens
