# SPDX-License-Identifier: Apache-2.0
# mypy: disable-error-code="no-untyped-def"
"""Gated DeltaNet's recurrence in Triton: decode, and commits of an accepted path (spec section 5).

Decode and the exact commit share `recurrence.advance`, so that a commit gives the bits of a decode
per node. Both follow, operation by operation, the packed single-token kernel that vLLM 0.32 decodes
with (gates included, if they come raw), and give that kernel's bits. It divides by a square root
where vLLM's other kernels multiply by `rsqrt`: those differ from it in the last bits.

The product form applies the path in blocks of 16 nodes, each as one update of rank 16, in three
tf32 products for a float32 one.

A commit's program reads BV rows of one value head's state once, and writes them once. A layer's
operands are either the rows of `tree_verify`'s stash, or the raw rows before the convolution, from
which k and v are made again.

The module knows nothing of vLLM. Its definition is `reference.decode` and `reference.commit`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from vllm_weaver.ops.addresses import address_table
from vllm_weaver.ops.conv.triton import activate
from vllm_weaver.ops.dispatch import refuse
from vllm_weaver.ops.gdn.raw import GdnRawStash
from vllm_weaver.ops.gdn.recurrence import (
    INTERPRETED,
    advance,
    columns_of_tile,
    load_state,
    places,
    rounded,
    row_of,
    row_sums,
    store_state,
    unit,
)
from vllm_weaver.ops.gdn.triton import GdnTritonStash, check_supported, rows_aligned
from vllm_weaver.ops.gdn.triton_tiles import gates

BLOCK_V = 32
"""State rows per program of decode: those of vLLM's kernel."""
COMMIT_BLOCK_V = 32
"""State rows per program of the exact commit, a warp. A row's bits do not depend on it."""
PRODUCT_BLOCK_V = 32
PRODUCT_WARPS = 4
PRODUCT_ROWS = 16
"""Nodes that the product form applies at once: the least that a matrix product takes."""


class CommitTiling(NamedTuple):
    """What a program of the exact commit, one warp, holds of the state: rows, columns of a tile."""

    block_v: int
    block_k: int


def choose_commit_tiling(raw: bool, V: int, K: int, dtype: torch.dtype) -> CommitTiling:
    """The exact commit's tiling, from rows or from raw rows, for states of that dtype.

    The fastest of `docs/kernels.md`. Raw rows leave fewer registers for the state's products.
    """
    columns = columns_of_tile(K, dtype)
    # The interpreter pays per program.
    block_v = V if INTERPRETED else COMMIT_BLOCK_V
    return CommitTiling(block_v, min(2 * columns, K) if raw else columns)


@triton.jit
def decode_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    g_ptr,
    beta_ptr,
    A_log_ptr,
    dt_bias_ptr,
    state_ptr,
    slots_ptr,
    out_ptr,
    scale,
    q_stride_r,
    k_stride_r,
    v_stride_r,
    gate_stride_r,
    STATE_STRIDE: tl.constexpr,
    HK: tl.constexpr,
    HV: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    BV: tl.constexpr,
    RAW_GATES: tl.constexpr,
    L2NORM: tl.constexpr,
):
    """Grid (V / BV, R * HV)."""
    r = (tl.program_id(1) // HV).to(tl.int64)
    hv = tl.program_id(1) % HV
    hk = hv // (HV // HK)
    dim = tl.arange(0, K)
    col = tl.program_id(0) * BV + tl.arange(0, BV)
    out = out_ptr + (r * HV + hv) * V + col
    slot = tl.load(slots_ptr + r).to(tl.int64)
    if slot < 0:
        tl.store(out, tl.zeros((BV,), out_ptr.dtype.element_ty))
        return
    # A thread's neighbours: what it loads of the state at once.
    LANE: tl.constexpr = 128 // state_ptr.dtype.element_ty.primitive_bitwidth
    place = places(state_ptr + slot * STATE_STRIDE + (hv * V + col) * K, K)
    state = load_state(place, K, 1, LANE)
    q = tl.load(q_ptr + r * q_stride_r + hk * K + dim).to(tl.float32)
    k = tl.load(k_ptr + r * k_stride_r + hk * K + dim).to(tl.float32)
    v = tl.load(v_ptr + r * v_stride_r + hv * V + col).to(tl.float32)
    g = tl.load(g_ptr + r * gate_stride_r + hv)
    beta = tl.load(beta_ptr + r * gate_stride_r + hv)
    if RAW_GATES:
        A_log = tl.load(A_log_ptr + hv).to(tl.float32)
        g, beta = gates(g, beta, A_log, tl.load(dt_bias_ptr + hv).to(tl.float32))
    state = advance(state, row_of(unit(k, L2NORM), 1, LANE), v, g, beta, 1, LANE)
    o = row_sums(state, row_of(unit(q, L2NORM) * scale, 1, LANE), 1, LANE)
    tl.store(out, o.to(out_ptr.dtype.element_ty))
    store_state(place, state, K, 1, LANE)


@triton.jit
def _row(
    own,
    h1,
    h2,
    h3,
    taps,
    bias,
    tap_stride,
    RAW: tl.constexpr,
    BIAS: tl.constexpr,
    SILU: tl.constexpr,
):
    """A row in float32, if raw convolved with the three before it; and those before the next.

    The operations are those of `conv.triton.tree_conv_kernel`, so the bits are its output's.
    """
    if RAW:
        total = own.to(tl.float32) * tl.load(taps + 3 * tap_stride).to(tl.float32)
        total = tl.fma(h1.to(tl.float32), tl.load(taps + 2 * tap_stride).to(tl.float32), total)
        total = tl.fma(h2.to(tl.float32), tl.load(taps + tap_stride).to(tl.float32), total)
        total = tl.fma(h3.to(tl.float32), tl.load(taps).to(tl.float32), total)
        if BIAS:
            total += tl.load(bias).to(tl.float32)
        return activate(total, SILU).to(own.dtype).to(tl.float32), own.to(h1.dtype), h1, h2
    else:
        return own.to(tl.float32), h1, h2, h3


@triton.jit
def commit_kernel(
    k_ptr,
    v_ptr,
    g_ptr,
    beta_ptr,
    state_ptr,
    conv_state_ptr,
    weight_ptr,
    bias_ptr,
    address_ptr,
    path_ptr,
    length_ptr,
    slots_ptr,
    sources_ptr,
    boundary_slots_ptr,
    boundary_length_ptr,
    L,
    k_stride_r,
    k_stride_t,
    v_stride_r,
    v_stride_t,
    gate_stride_r,
    gate_stride_t,
    path_stride_r,
    path_stride_l,
    weight_stride_c,
    weight_stride_w,
    STATE_STRIDE: tl.constexpr,
    CONV_STRIDE: tl.constexpr,
    CONV_STRIDE_W: tl.constexpr,
    CONV_STRIDE_C: tl.constexpr,
    HK: tl.constexpr,
    HV: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    BV: tl.constexpr,
    BK: tl.constexpr,
    RAW: tl.constexpr,
    BIAS: tl.constexpr,
    SILU: tl.constexpr,
    L2NORM: tl.constexpr,
    BOUNDARY: tl.constexpr,
    LAYERS: tl.constexpr,
):
    """Grid (V / BV * HV, R, layers): replay of the path.

    With LAYERS, the table holds each layer's k, v, g, beta, state, conv state, weight and bias.
    With RAW, k and v are both the raw rows [R, T, q | k | v channels].
    """
    hv = tl.program_id(0) // (V // BV)
    r = tl.program_id(1).to(tl.int64)
    hk = hv // (HV // HK)
    dim = tl.arange(0, K)
    col = tl.program_id(0) % (V // BV) * BV + tl.arange(0, BV)
    if LAYERS:
        layer = address_ptr + tl.program_id(2) * 8
        k_ptr = tl.multiple_of(tl.load(layer).to(k_ptr.dtype), 16)
        v_ptr = tl.multiple_of(tl.load(layer + 1).to(v_ptr.dtype), 16)
        g_ptr = tl.load(layer + 2).to(g_ptr.dtype)
        beta_ptr = tl.load(layer + 3).to(beta_ptr.dtype)
        state_ptr = tl.multiple_of(tl.load(layer + 4).to(state_ptr.dtype), 16)
        if RAW:
            conv_state_ptr = tl.multiple_of(tl.load(layer + 5).to(conv_state_ptr.dtype), 16)
            weight_ptr = tl.multiple_of(tl.load(layer + 6).to(weight_ptr.dtype), 16)
            bias_ptr = tl.load(layer + 7).to(bias_ptr.dtype)
    slot = tl.load(slots_ptr + r).to(tl.int64)
    source = tl.load(sources_ptr + r).to(tl.int64)
    length = tl.minimum(tl.load(length_ptr + r).to(tl.int32), L)
    last = tl.where(slot < 0, 0, length)
    if BOUNDARY:
        boundary_slot = tl.load(boundary_slots_ptr + r).to(tl.int64)
        boundary = tl.minimum(tl.load(boundary_length_ptr + r).to(tl.int32), L)
        boundary = tl.where(boundary_slot < 0, 0, boundary)
        last = tl.maximum(last, boundary)
    if (source < 0) | (last <= 0):
        return

    key = hk * K + dim
    value = hv * V + col
    if RAW:
        key += HK * K
        value += 2 * HK * K
    k = k_ptr + r * k_stride_r + key
    v = v_ptr + r * v_stride_r + value
    gate = r * gate_stride_r + hv
    path = path_ptr + r * path_stride_r
    J: tl.constexpr = K // BK
    LANE: tl.constexpr = 128 // state_ptr.dtype.element_ty.primitive_bitwidth
    place = places((hv * V + col) * K, BK)
    state = load_state(state_ptr + source * STATE_STRIDE + place, BK, J, LANE)
    k_1 = 0
    k_2 = 0
    k_3 = 0
    v_1 = 0
    v_2 = 0
    v_3 = 0
    k_taps = k
    v_taps = v
    if RAW:
        history = conv_state_ptr + source * CONV_STRIDE
        k_taps = weight_ptr + key * weight_stride_c
        v_taps = weight_ptr + value * weight_stride_c
        k_3 = tl.load(history + key * CONV_STRIDE_C)
        k_2 = tl.load(history + CONV_STRIDE_W + key * CONV_STRIDE_C)
        k_1 = tl.load(history + 2 * CONV_STRIDE_W + key * CONV_STRIDE_C)
        v_3 = tl.load(history + value * CONV_STRIDE_C)
        v_2 = tl.load(history + CONV_STRIDE_W + value * CONV_STRIDE_C)
        v_1 = tl.load(history + 2 * CONV_STRIDE_W + value * CONV_STRIDE_C)
    k_bias = bias_ptr + key
    v_bias = bias_ptr + value

    # While a node is applied, the next one's row is made, and the row after that asked for.
    node = tl.load(path).to(tl.int32)
    k_own = tl.load(k + node * k_stride_t)
    v_own = tl.load(v + node * v_stride_t)
    g_next = tl.load(g_ptr + gate + node * gate_stride_t)
    beta_next = tl.load(beta_ptr + gate + node * gate_stride_t)
    node = tl.load(path + tl.minimum(1, last - 1) * path_stride_l).to(tl.int32)
    k_next, k_1, k_2, k_3 = _row(
        k_own, k_1, k_2, k_3, k_taps, k_bias, weight_stride_w, RAW, BIAS, SILU
    )
    v_next, v_1, v_2, v_3 = _row(
        v_own, v_1, v_2, v_3, v_taps, v_bias, weight_stride_w, RAW, BIAS, SILU
    )
    k_next = unit(k_next, L2NORM)
    k_own = tl.load(k + node * k_stride_t)
    v_own = tl.load(v + node * v_stride_t)
    for i in range(last):
        k_row = row_of(k_next, J, LANE)
        v_i = v_next
        g_i = g_next
        beta_i = beta_next
        k_next, k_1, k_2, k_3 = _row(
            k_own, k_1, k_2, k_3, k_taps, k_bias, weight_stride_w, RAW, BIAS, SILU
        )
        v_next, v_1, v_2, v_3 = _row(
            v_own, v_1, v_2, v_3, v_taps, v_bias, weight_stride_w, RAW, BIAS, SILU
        )
        k_next = unit(k_next, L2NORM)
        g_next = tl.load(g_ptr + gate + node * gate_stride_t)
        beta_next = tl.load(beta_ptr + gate + node * gate_stride_t)
        node = tl.load(path + tl.minimum(i + 2, last - 1) * path_stride_l).to(tl.int32)
        k_own = tl.load(k + node * k_stride_t)
        v_own = tl.load(v + node * v_stride_t)
        state = advance(state, k_row, v_i, g_i, beta_i, J, LANE)
        # A narrower state is rounded after every token, as decode does.
        state = rounded(state, state_ptr.dtype.element_ty, J, LANE)
        if BOUNDARY and i + 1 == boundary:
            store_state(state_ptr + boundary_slot * STATE_STRIDE + place, state, BK, J, LANE)
        if BOUNDARY and (slot >= 0) & (i + 1 == length):
            store_state(state_ptr + slot * STATE_STRIDE + place, state, BK, J, LANE)
    if not BOUNDARY:
        store_state(state_ptr + slot * STATE_STRIDE + place, state, BK, J, LANE)


@triton.jit
def commit_product_kernel(
    k_ptr,
    v_ptr,
    g_ptr,
    beta_ptr,
    state_ptr,
    path_ptr,
    length_ptr,
    slots_ptr,
    sources_ptr,
    L,
    k_stride_r,
    k_stride_t,
    v_stride_r,
    v_stride_t,
    gate_stride_r,
    gate_stride_t,
    path_stride_r,
    path_stride_l,
    STATE_STRIDE: tl.constexpr,
    HK: tl.constexpr,
    HV: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    BV: tl.constexpr,
    BL: tl.constexpr,
    L2NORM: tl.constexpr,
):
    """Grid (V / BV * HV, R): the path in blocks of BL = 16 nodes, each one update of rank BL.

    e^c S + sum over j of e^(c - c_j) u_j k_j^T, with u from (I + X) U = R along the chain.
    """
    hv = tl.program_id(0) // (V // BV)
    r = tl.program_id(1).to(tl.int64)
    hk = hv // (HV // HK)
    dim = tl.arange(0, K)
    col = tl.program_id(0) % (V // BV) * BV + tl.arange(0, BV)
    slot = tl.load(slots_ptr + r).to(tl.int64)
    source = tl.load(sources_ptr + r).to(tl.int64)
    length = tl.minimum(tl.load(length_ptr + r).to(tl.int32), L)
    if (slot < 0) | (source < 0) | (length <= 0):
        return
    k = k_ptr + r * k_stride_r + hk * K + dim[None, :]
    v = v_ptr + r * v_stride_r + hv * V + col[None, :]
    gate = r * gate_stride_r + hv
    place = (hv * V + col[:, None]) * K + dim[None, :]
    state = tl.load(state_ptr + source * STATE_STRIDE + place).to(tl.float32)

    ii = tl.arange(0, BL)
    below = ii[:, None] > ii[None, :]
    apart = ii[:, None] ^ ii[None, :]
    for start in range(0, length, BL):
        at = start + ii
        alive = at < length
        node = tl.load(path_ptr + r * path_stride_r + at * path_stride_l, mask=alive, other=0)
        k_i = tl.load(k + node[:, None] * k_stride_t, mask=alive[:, None], other=0.0)
        k_i = k_i.to(tl.float32)
        v_i = tl.load(v + node[:, None] * v_stride_t, mask=alive[:, None], other=0.0)
        v_i = v_i.to(tl.float32)
        g_i = tl.load(g_ptr + gate + node * gate_stride_t, mask=alive, other=0.0)
        beta_i = tl.load(beta_ptr + gate + node * gate_stride_t, mask=alive, other=0.0)
        if L2NORM:
            k_i *= tl.rsqrt(tl.sum(k_i * k_i, 1) + 1e-6)[:, None]
        g_j = g_i.to(tl.float64)[None, :]
        c = tl.sum(tl.where(below | (apart == 0), g_j, 0.0), 1)
        gap = (c[:, None] - c[None, :]).to(tl.float32)
        decay = tl.exp(tl.where(below, gap, float("-inf")))
        X = beta_i[:, None] * decay * tl.dot(k_i, tl.trans(k_i), input_precision="tf32x3")
        M = tl.where(apart == 0, 1.0, tl.where(apart == 1, -X, 0.0))
        for level in tl.static_range(1, 4):
            between = tl.where((apart >> level) == 1, X, 0.0)
            part = tl.dot(between, M, input_precision="tf32x3")
            M -= tl.dot(M, part, input_precision="tf32x3")
        recalled = tl.dot(k_i, tl.trans(state), input_precision="tf32x3")
        rest = beta_i[:, None] * (v_i - tl.exp(c.to(tl.float32))[:, None] * recalled)
        u = tl.dot(M, rest, input_precision="tf32x3")
        total = tl.sum(g_i.to(tl.float64), 0)
        u *= tl.exp((total - c).to(tl.float32))[:, None]
        state *= tl.exp(total.to(tl.float32))
        state = tl.dot(tl.trans(u), k_i, state, input_precision="tf32x3")
    tl.store(state_ptr + slot * STATE_STRIDE + place, state.to(state_ptr.dtype.element_ty))


def decode(
    q_RHK: Tensor,
    k_RHK: Tensor,
    v_RHV: Tensor,
    g_RH: Tensor,
    beta_RH: Tensor,
    state: Tensor,
    state_indices_R: Tensor,
    scale: float,
    qk_l2norm: bool,
    *,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Launch the decode; tensors as in `vllm_weaver.ops.gdn.gdn_decode`.

    Raises:
        ValueError: head dim, dtype, stride or device that the kernel does not take.
    """
    R, HK, K = q_RHK.shape
    HV, V = v_RHV.shape[1:]
    check_supported("gdn_decode", q_RHK, k_RHK, v_RHV, state)
    if out is None:
        out = torch.empty((R, HV, V), dtype=v_RHV.dtype, device=v_RHV.device)
    if out.numel() == 0:
        return out
    q, k, v = rows_aligned(q_RHK), rows_aligned(k_RHK), rows_aligned(v_RHV)
    g, beta = g_RH, beta_RH
    if g.stride() != beta.stride() or g.stride(-1) != 1:
        g, beta = g.contiguous(), beta.contiguous()
    # The interpreter pays per program.
    block_v = V if INTERPRETED else BLOCK_V
    decode_kernel[(V // block_v, R * HV)](
        q,
        k,
        v,
        g,
        beta,
        g if A_log is None else A_log,
        g if dt_bias is None else dt_bias,
        state,
        state_indices_R.contiguous(),
        out,
        scale,
        q.stride(0),
        k.stride(0),
        v.stride(0),
        g.stride(0),
        STATE_STRIDE=state.stride(0),
        HK=HK,
        HV=HV,
        K=K,
        V=V,
        BV=block_v,
        RAW_GATES=A_log is not None,
        L2NORM=qk_l2norm,
        num_warps=1,
        num_stages=3,
    )
    return out


def commit(
    stash: GdnTritonStash | GdnRawStash,
    path_RL: Tensor,
    length_R: Tensor,
    state: Tensor,
    state_indices_R: Tensor,
    source_indices_R: Tensor,
    exact: bool,
) -> None:
    """Launch the commit of one layer; tensors as in `vllm_weaver.ops.gdn.gdn_commit`.

    Raises:
        ValueError: a product commit of a raw stash; dtype, stride or device that the kernel does
            not take.
    """
    if exact:
        commit_layers([stash], path_RL, length_R, [state], state_indices_R, source_indices_R)
        return
    if isinstance(stash, GdnRawStash):
        refuse("gdn_commit", "the product form needs k and v: commit a raw stash exactly")
    R = len(path_RL)
    HK, K = stash.k_RTHK.shape[2:]
    HV, V = stash.v_RTHV.shape[2:]
    _check_state("gdn_commit", state, V, K)
    if R == 0:
        return
    commit_product_kernel[(V // PRODUCT_BLOCK_V * HV, R)](
        stash.k_RTHK,
        stash.v_RTHV,
        stash.g_RTH,
        stash.beta_RTH,
        state,
        path_RL,
        length_R.contiguous(),
        state_indices_R.contiguous(),
        source_indices_R.contiguous(),
        path_RL.shape[1],
        *stash.k_RTHK.stride()[:2],
        *stash.v_RTHV.stride()[:2],
        *stash.g_RTH.stride()[:2],
        *path_RL.stride(),
        STATE_STRIDE=state.stride(0),
        HK=HK,
        HV=HV,
        K=K,
        V=V,
        BV=PRODUCT_BLOCK_V,
        BL=PRODUCT_ROWS,
        L2NORM=stash.qk_l2norm,
        num_warps=PRODUCT_WARPS,
        num_stages=1,
    )


def commit_layers(
    stashes: Sequence[GdnTritonStash | GdnRawStash],
    path_RL: Tensor,
    length_R: Tensor,
    states: Sequence[Tensor],
    state_indices_R: Tensor,
    source_indices_R: Tensor,
    boundary_indices_R: Tensor | None = None,
    boundary_length_R: Tensor | None = None,
    *,
    tiling: CommitTiling | None = None,
) -> None:
    """Launch the exact commit; tensors as in `vllm_weaver.ops.gdn.gdn_commit_layers`.

    Args:
        tiling: what a program holds; None chooses. The bits do not depend on it.

    Raises:
        ValueError: layers that differ in dtype or layout; dtype, stride or device that the kernel
            does not take.
    """
    op = "gdn_commit"
    stash, state = stashes[0], states[0]
    raw = isinstance(stash, GdnRawStash)
    HV, V, K = state.shape[1:]
    _check_state(op, state, V, K)
    layers = [_operands(s, x) for s, x in zip(stashes, states, strict=True)]
    for tensors in layers:
        for tensor, first in zip(tensors, layers[0], strict=True):
            if tensor.dtype != first.dtype or tensor.stride() != first.stride():
                refuse(op, "layers differ in dtype or strides: commit them one by one")
    k, v, g, _, _, conv_state, weight, _ = layers[0]
    R = len(path_RL)
    if R == 0:
        return
    HK = stash.key_heads if isinstance(stash, GdnRawStash) else k.shape[2]
    if raw and weight.shape[1] != 4:
        refuse(op, f"a raw stash needs a convolution of width 4, got {weight.shape[1]}")
    boundary = boundary_indices_R is not None and boundary_length_R is not None
    if boundary_indices_R is None or boundary_length_R is None:
        boundary_indices_R = boundary_length_R = length_R
    addresses = path_RL
    if len(layers) > 1:
        addresses = address_table(op, [tensor for tensors in layers for tensor in tensors])
    if tiling is None:
        tiling = choose_commit_tiling(raw, V, K, state.dtype)
    commit_kernel[(V // tiling.block_v * HV, R, len(layers))](
        *layers[0],
        addresses,
        path_RL,
        length_R.contiguous(),
        state_indices_R.contiguous(),
        source_indices_R.contiguous(),
        boundary_indices_R.contiguous(),
        boundary_length_R.contiguous(),
        path_RL.shape[1],
        *k.stride()[:2],
        *v.stride()[:2],
        *g.stride()[:2],
        *path_RL.stride(),
        *(weight.stride() if raw else (0, 0)),
        STATE_STRIDE=state.stride(0),
        CONV_STRIDE=conv_state.stride(0) if raw else 0,
        CONV_STRIDE_W=conv_state.stride(1) if raw else 0,
        CONV_STRIDE_C=conv_state.stride(2) if raw else 0,
        HK=HK,
        HV=HV,
        K=K,
        V=V,
        BV=tiling.block_v,
        BK=tiling.block_k,
        RAW=raw,
        BIAS=isinstance(stash, GdnRawStash) and stash.bias_C is not None,
        SILU=isinstance(stash, GdnRawStash) and stash.activation == "silu",
        L2NORM=stash.qk_l2norm,
        BOUNDARY=boundary,
        LAYERS=len(layers) > 1,
        num_warps=1,
        num_stages=3,
    )


def _operands(stash: GdnTritonStash | GdnRawStash, state: Tensor) -> tuple[Tensor, ...]:
    """A layer's tensors in the order of the kernel's first arguments; unused ones repeat others."""
    if isinstance(stash, GdnRawStash):
        x, bias = stash.conv.x, stash.bias_C
        return (
            *(x, x, stash.g_RTH, stash.beta_RTH, state),
            *(stash.conv_state, stash.weight_CW, x if bias is None else bias),
        )
    k, v = stash.k_RTHK, stash.v_RTHV
    return k, v, stash.g_RTH, stash.beta_RTH, state, k, k, k


def _check_state(op: str, state: Tensor, V: int, K: int) -> None:
    if state.device.type != "cuda" and not INTERPRETED:
        refuse(
            op,
            f"the triton backend cannot run on {state.device.type} tensors without "
            'TRITON_INTERPRET=1: use backend="reference"',
        )
    if state.stride()[1:] != (V * K, K, 1):
        refuse(op, f"needs states that are dense within a slot, strides are {state.stride()}")
