# SPDX-License-Identifier: Apache-2.0
"""The gated delta rule for training: chunked, differentiable, over whole rows.

Two forms of one function: plain PyTorch (`chunked`) and fla-core's Triton kernels, whose one
backward kernel that is wrong on Hopper under Triton 3.6 is replaced by PyTorch. Knows nothing of
the layer around it. Formula: spec section 5.

Shapes: q, k [B, T, HK, K], already L2-normalised; v [B, T, HV, V]; g (log decay), beta [B, T, HV].
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

GatedDeltaRule = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]

_CHUNK = 64
_MASKED = -1e30


def chunked(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, chunk: int = _CHUNK
) -> tuple[Tensor, Tensor]:
    """Outputs [B, T, HV, V] in q's dtype and the last state [B, HV, K, V] in float32."""
    batch, length, key_heads, key_dim = q.shape
    heads, value_dim = v.shape[2:]
    dtype = q.dtype
    q, k, v, g, beta = (x.float() for x in (q, k, v, g, beta))
    padding = -length % chunk
    q, k, v = (F.pad(x, (0, 0, 0, 0, 0, padding)) for x in (q, k, v))
    g, beta = (F.pad(x, (0, 0, 0, padding)) for x in (g, beta))
    chunks = (length + padding) // chunk

    def split(x: Tensor) -> Tensor:
        return x.view(batch, chunks, chunk, *x.shape[2:]).transpose(2, 3)

    group = heads // key_heads
    q, k = (split(x).repeat_interleave(group, 2) for x in (q * key_dim**-0.5, k))
    v, g, beta = split(v), split(g), split(beta)
    decay = g.cumsum(-1)
    lower = torch.ones(chunk, chunk, dtype=torch.bool, device=q.device).tril()
    pair = (decay[..., :, None] - decay[..., None, :]).masked_fill(~lower, _MASKED).exp()
    x = (beta[..., None] * (k @ k.transpose(-1, -2)) * pair).tril(-1)
    right = torch.cat([beta[..., None] * v, (beta * decay.exp())[..., None] * k], -1)
    eye = torch.eye(chunk, device=q.device)
    solved = torch.linalg.solve_triangular(x + eye, right, upper=False, unitriangular=True)
    fresh, from_state = solved.split([value_dim, key_dim], -1)
    attention = (q @ k.transpose(-1, -2)) * pair
    q_decayed = q * decay.exp()[..., None]
    k_decayed = k * (decay[..., -1:] - decay).exp()[..., None]
    last_decay = decay[..., -1].exp()[..., None, None]

    state = q.new_zeros(batch, heads, key_dim, value_dim)
    outputs = []
    for i in range(chunks):
        u = fresh[:, i] - from_state[:, i] @ state
        outputs.append(q_decayed[:, i] @ state + attention[:, i] @ u)
        state = last_decay[:, i] * state + k_decayed[:, i].transpose(-1, -2) @ u
    out = torch.stack(outputs, 1).transpose(2, 3).reshape(batch, -1, heads, value_dim)
    return out[:, :length].to(dtype), state


def recurrent_step(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """One token: q, k [B, HK, K], v [B, HV, V], g, beta [B, HV], state [B, HV, K, V] float32."""
    group = v.shape[1] // q.shape[1]
    q, k = (x.float().repeat_interleave(group, 1) for x in (q * q.shape[-1] ** -0.5, k))
    state = state * g.exp()[..., None, None]
    # Products and sums, not matrix products: these fuse into a few passes over the states.
    delta = beta[..., None] * (v.float() - (state * k[..., None]).sum(-2))
    state = state + k[..., None] * delta[..., None, :]
    return (state * q[..., None]).sum(-2).to(v.dtype), state


def plain(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Tensor:
    return chunked(q, k, v, g, beta)[0]


def _dqkwg(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    do: Tensor,
    h: Tensor,
    dh: Tensor,
    w: Tensor,
    g: Tensor,
    dv: Tensor,
    scale: float,
    chunk: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of q, k, w and g of one chunked pass; g is cumulative in chunks, in log2."""
    batch, length, key_heads, key_dim = k.shape
    heads, value_dim = v.shape[2:]
    chunks, dtype = length // chunk, q.dtype

    def split(x: Tensor) -> Tensor:
        return x.reshape(batch, chunks, chunk, x.shape[2], x.shape[3]).transpose(2, 3)

    group = heads // key_heads
    qs, ks = (split(x).repeat_interleave(group, 2) for x in (q, k))
    vs, dos, dvs = split(v).to(dtype), split(do).to(dtype), split(dv).to(dtype)
    h, dh = (x.view(batch, chunks, heads, key_dim, value_dim) for x in (h, dh))
    h_t = h.to(dtype).transpose(-1, -2)
    gs = g.reshape(batch, chunks, chunk, heads).transpose(2, 3).float()
    g_last = gs[..., -1:]
    ds = (dos @ vs.transpose(-1, -2)).float()
    dq = (dos @ h_t).float() * torch.exp2(gs)[..., None] * scale
    dk = (vs @ dh.to(dtype).transpose(-1, -2)).float() * torch.exp2(g_last - gs)[..., None]
    dw = -(dvs @ h_t)
    dg_last = (h.float() * dh.float()).sum((-1, -2)) * torch.exp2(g_last[..., 0])
    dg_last = dg_last + (dk * ks.float()).sum((-1, -2))
    lower = torch.ones(chunk, chunk, dtype=torch.bool, device=q.device).tril()
    pair = (gs[..., :, None] - gs[..., None, :]).masked_fill(~lower, _MASKED)
    ds = (ds * torch.exp2(pair) * scale).to(dtype)
    dq = dq + (ds @ ks).float()
    dk = dk + (ds.transpose(-1, -2) @ qs).float()
    dg = (dq * qs.float()).sum(-1) - (dk * ks.float()).sum(-1)
    dg = torch.cat([dg[..., :-1], dg[..., -1:] + dg_last[..., None]], -1)

    def join(x: Tensor) -> Tensor:
        return x.transpose(2, 3).reshape(batch, length, heads, key_dim)

    dq, dk = (
        join(x).view(batch, length, key_heads, group, key_dim).sum(3).to(dtype) for x in (dq, dk)
    )
    dg = dg.transpose(2, 3).reshape(batch, length, heads).contiguous()
    return dq, dk, join(dw).to(w.dtype).contiguous(), dg


def fla_kernels(compile_backward: bool = True) -> GatedDeltaRule:
    """The Triton form, checked here against `plain`; raises when it is absent or disagrees."""
    import fla.ops.gated_delta_rule.chunk as kernels
    from triton.runtime.autotuner import Autotuner

    # Autotuning every kernel over its full space takes minutes: keep one or two usual shapes.
    for object_ in gc.get_objects():
        if isinstance(object_, Autotuner) and len(object_.configs) > 1:
            usual = [c for c in object_.configs if c.num_warps == 4 and c.num_stages in (2, 3)]
            usual = usual or [c for c in object_.configs if c.num_warps == 4] or object_.configs
            usual.sort(
                key=lambda c: (
                    c.kwargs.get("BV", 64) != 64,
                    c.kwargs.get("BK", 64) != 64,
                    c.num_stages,
                )
            )
            object_.configs = usual[:2]
    gradient = torch.compile(_dqkwg, dynamic=False) if compile_backward else _dqkwg

    def chunk_bwd_dqkwg(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        do: Tensor,
        h: Tensor,
        dh: Tensor,
        w: Tensor | None = None,
        g: Tensor | None = None,
        g_gamma: Tensor | None = None,
        dv: Tensor | None = None,
        scale: float | None = None,
        state_v_first: bool = False,
        cu_seqlens: Tensor | None = None,
        chunk_size: int = _CHUNK,
        chunk_indices: Any = None,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        if cu_seqlens is not None or state_v_first or q.shape[1] % chunk_size:
            raise ValueError("only whole chunks of equally long rows are supported")
        assert w is not None and g is not None and dv is not None and scale is not None
        return gradient(q, k, v, do, h, dh, w, g, dv, scale, chunk_size)

    kernels.chunk_bwd_dqkwg = chunk_bwd_dqkwg

    def call(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Tensor:
        return kernels.chunk_gated_delta_rule(q, k, v, g, beta)[0]

    return call


def relative_errors(
    rule: GatedDeltaRule, key_heads: int, heads: int, dim: int, device: str
) -> list[float]:
    """RMS-ratio errors of output and gradients of `rule` against `plain`, on fresh inputs."""
    batch, length = 2, 4 * _CHUNK
    dtype = torch.bfloat16

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, device=device)

    inputs = [
        F.normalize(draw(batch, length, key_heads, dim), dim=-1).to(dtype),
        F.normalize(draw(batch, length, key_heads, dim) + 0.5, dim=-1).to(dtype),
        draw(batch, length, heads, dim).to(dtype),
        -F.softplus(draw(batch, length, heads) - 2),
        torch.sigmoid(draw(batch, length, heads)),
    ]
    upstream = draw(batch, length, heads, dim).to(dtype)
    results = []
    for function in (rule, plain):
        leaves = [x.detach().clone().requires_grad_() for x in inputs]
        out = function(*leaves)
        results.append([out, *torch.autograd.grad(out, leaves, upstream)])
    return [
        float((a.float() - b.float()).norm() / b.float().norm())
        for a, b in zip(*results, strict=True)
    ]
