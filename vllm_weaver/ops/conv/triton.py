# SPDX-License-Identifier: Apache-2.0
# mypy: disable-error-code="no-untyped-def, assignment, misc"
# ruff: noqa: RUF005
"""Causal depthwise convolution on trees in Triton, and its commit for one layer or for all.

Both kernels are elementwise over the channels: a thread keeps the same channels in every row, so
nothing passes between threads. Sums are float32, in the reference's order. Rows are found through
the int table of `reference.conv_table`, made once for the layers of a step.

The module knows nothing of vLLM and of what the channels mean. Its definition is `reference`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from vllm_weaver.ops.addresses import address_table
from vllm_weaver.ops.conv.reference import ConvStash
from vllm_weaver.ops.dispatch import refuse

DTYPES = (torch.float16, torch.bfloat16, torch.float32)
CHANNELS = 256
"""Channels per program of the convolution."""
ROWS = 4
"""Rows per program of the convolution."""
COMMIT_CHANNELS = 1024
"""Channels per program of the commit."""


@triton.jit
def activate(total, SILU: tl.constexpr):
    """SiLU of a float32 sum, spelt out as everywhere in this package."""
    if SILU:
        total = total / (1.0 + tl.exp(-total))
    return total


@triton.jit
def tree_conv_kernel(
    x_ptr,
    state_ptr,
    slots_ptr,
    weight_ptr,
    bias_ptr,
    num_nodes_ptr,
    table_ptr,
    y_ptr,
    stash_ptr,
    T,
    C,
    x_stride_r,
    x_stride_t,
    weight_stride_c,
    weight_stride_w,
    STATE_STRIDE: tl.constexpr,
    STATE_STRIDE_W: tl.constexpr,
    STATE_STRIDE_C: tl.constexpr,
    W: tl.constexpr,
    BIAS: tl.constexpr,
    SILU: tl.constexpr,
    BT: tl.constexpr,
    BC: tl.constexpr,
):
    """Grid (C / BC, T / BT, R)."""
    channel = tl.program_id(0) * BC + tl.arange(0, BC)
    row = tl.program_id(1) * BT + tl.arange(0, BT)
    r = tl.program_id(2).to(tl.int64)
    inside = channel < C
    slot = tl.load(slots_ptr + r).to(tl.int64)
    nodes = tl.minimum(tl.load(num_nodes_ptr + r).to(tl.int32), T)
    nodes = tl.where(slot < 0, 0, nodes)
    alive = row < nodes
    mask = alive[:, None] & inside[None, :]
    x = x_ptr + r * x_stride_r + channel[None, :]
    state = state_ptr + slot * STATE_STRIDE + channel[None, :] * STATE_STRIDE_C
    weight = weight_ptr + channel * weight_stride_c
    place = (r * T + row)[:, None] * C + channel[None, :]

    own = tl.load(x + row[:, None] * x_stride_t, mask=mask, other=0.0)
    tap = tl.load(weight + (W - 1) * weight_stride_w, mask=inside, other=0.0).to(tl.float32)
    total = own.to(tl.float32) * tap[None, :]
    for hop in tl.static_range(W - 1):
        at = tl.load(table_ptr + (r * T + row) * (W - 1) + hop, mask=alive, other=0)[:, None]
        node = tl.load(x + at * x_stride_t, mask=mask & (at >= 0), other=0.0)
        past = tl.load(state + (W - 1 + at) * STATE_STRIDE_W, mask=mask & (at < 0), other=0.0)
        above = tl.where(at >= 0, node.to(tl.float32), past.to(tl.float32))
        tap = tl.load(weight + (W - 2 - hop) * weight_stride_w, mask=inside, other=0.0)
        tap = tl.broadcast_to(tap.to(tl.float32)[None, :], above.shape)
        # Fused by hand, so that a commit that convolves again gives the same bits.
        total = tl.fma(above, tap, total)
    if BIAS:
        total += tl.load(bias_ptr + channel, mask=inside, other=0.0).to(tl.float32)[None, :]
    y = tl.where(alive[:, None], activate(total, SILU), 0.0)
    written = (row < T)[:, None] & inside[None, :]
    tl.store(y_ptr + place, y.to(y_ptr.dtype.element_ty), mask=written)
    tl.store(stash_ptr + place, own, mask=mask)


@triton.jit
def conv_commit_kernel(
    x_ptr,
    state_ptr,
    address_ptr,
    path_ptr,
    length_ptr,
    slots_ptr,
    sources_ptr,
    L,
    C,
    x_stride_r,
    x_stride_t,
    path_stride_r,
    path_stride_l,
    STATE_STRIDE: tl.constexpr,
    STATE_STRIDE_W: tl.constexpr,
    STATE_STRIDE_C: tl.constexpr,
    H: tl.constexpr,
    BC: tl.constexpr,
    LAYERS: tl.constexpr,
):
    """Grid (C / BC, R, layers). With LAYERS, the table holds each layer's x and state."""
    channel = tl.program_id(0) * BC + tl.arange(0, BC)
    r = tl.program_id(1).to(tl.int64)
    inside = channel < C
    if LAYERS:
        layer = address_ptr + tl.program_id(2) * 2
        x_ptr = tl.multiple_of(tl.load(layer).to(x_ptr.dtype), 16)
        state_ptr = tl.multiple_of(tl.load(layer + 1).to(state_ptr.dtype), 16)
    slot = tl.load(slots_ptr + r).to(tl.int64)
    source = tl.load(sources_ptr + r).to(tl.int64)
    length = tl.minimum(tl.load(length_ptr + r).to(tl.int32), L)
    if (slot < 0) | (source < 0) | (length <= 0):
        return
    x = x_ptr + r * x_stride_r + channel
    state = state_ptr + channel * STATE_STRIDE_C
    old = state + source * STATE_STRIDE
    new = state + slot * STATE_STRIDE
    # Row h becomes the one `length` places later; all are read before any is written.
    rows = ()
    for h in tl.static_range(H):
        at = length + h - H
        node = tl.load(path_ptr + r * path_stride_r + tl.maximum(at, 0) * path_stride_l)
        # The row comes from one of the two: the other load is of no channel.
        new_channels = tl.where(at >= 0, C, 0)
        fresh = tl.load(x + node * x_stride_t, mask=channel < new_channels, other=0.0)
        kept = tl.load(old + (H + at) * STATE_STRIDE_W, mask=channel < C - new_channels, other=0.0)
        rows = rows + (tl.where(channel < new_channels, fresh.to(kept.dtype), kept),)
    tl.debug_barrier()
    for h in tl.static_range(H):
        tl.store(new + h * STATE_STRIDE_W, rows[h], mask=inside)


INTERPRETED = not isinstance(tree_conv_kernel, triton.runtime.JITFunction)


def tree_conv(
    x_RTC: Tensor,
    conv_state: Tensor,
    state_indices_R: Tensor,
    weight_CW: Tensor,
    num_nodes_R: Tensor,
    table_RTH: Tensor,
    bias_C: Tensor | None,
    activation: str | None,
    *,
    out: Tensor | None = None,
    stash: ConvStash | None = None,
) -> tuple[Tensor, ConvStash]:
    """Launch the convolution; tensors as in `vllm_weaver.ops.conv.causal_conv1d_tree`.

    Raises:
        ValueError: dtype or device that the kernel does not take.
    """
    R, T, C = x_RTC.shape
    W = weight_CW.shape[1]
    _check_supported("causal_conv1d_tree", x_RTC, conv_state)
    if out is None:
        out = torch.empty((R, T, C), dtype=x_RTC.dtype, device=x_RTC.device)
    if stash is None:
        stash = ConvStash(torch.empty_like(out), "triton")
    if out.numel() == 0:
        return out, stash
    x = x_RTC if x_RTC.stride(-1) == 1 else x_RTC.contiguous()
    tree_conv_kernel[(triton.cdiv(C, CHANNELS), triton.cdiv(T, ROWS), R)](
        x,
        conv_state,
        state_indices_R.contiguous(),
        weight_CW,
        x if bias_C is None else bias_C,
        num_nodes_R.contiguous(),
        table_RTH.contiguous(),
        out,
        stash.x,
        T,
        C,
        *x.stride()[:2],
        *weight_CW.stride(),
        STATE_STRIDE=conv_state.stride(0),
        STATE_STRIDE_W=conv_state.stride(1),
        STATE_STRIDE_C=conv_state.stride(2),
        W=W,
        BIAS=bias_C is not None,
        SILU=activation == "silu",
        BT=ROWS,
        BC=CHANNELS,
    )
    return out, stash


def commit_conv(
    stash: ConvStash,
    path_RL: Tensor,
    length_R: Tensor,
    conv_state: Tensor,
    state_indices_R: Tensor,
    source_indices_R: Tensor,
) -> None:
    """Launch the commit of one layer; tensors as in `vllm_weaver.ops.conv.conv_commit`.

    Raises:
        ValueError: dtype or device that the kernel does not take.
    """
    commit_conv_layers([stash], path_RL, length_R, [conv_state], state_indices_R, source_indices_R)


def commit_conv_layers(
    stashes: Sequence[ConvStash],
    path_RL: Tensor,
    length_R: Tensor,
    conv_states: Sequence[Tensor],
    state_indices_R: Tensor,
    source_indices_R: Tensor,
) -> None:
    """Launch the commit of all layers; tensors as in `vllm_weaver.ops.conv.conv_commit_layers`.

    Raises:
        ValueError: layers that differ in dtype or layout, or a device that Triton cannot run on.
    """
    op = "conv_commit"
    first, state = stashes[0].x, conv_states[0]
    _check_supported(op, first, state)
    for x, other in zip((s.x for s in stashes), conv_states, strict=True):
        if x.stride() != first.stride() or other.stride() != state.stride():
            refuse(op, "layers differ in strides: allocate all alike, or commit them one by one")
        if x.dtype != first.dtype or other.dtype != state.dtype:
            refuse(op, "layers differ in dtype: commit them one by one")
    R, C, H = len(path_RL), first.shape[2], state.shape[1]
    if R == 0 or C == 0 or H == 0:
        return
    tensors = [t for s, other in zip(stashes, conv_states, strict=True) for t in (s.x, other)]
    layers = len(stashes) > 1
    conv_commit_kernel[(triton.cdiv(C, COMMIT_CHANNELS), R, len(stashes))](
        first,
        state,
        address_table(op, tensors) if layers else path_RL,
        path_RL,
        length_R.contiguous(),
        state_indices_R.contiguous(),
        source_indices_R.contiguous(),
        path_RL.shape[1],
        C,
        *first.stride()[:2],
        *path_RL.stride(),
        STATE_STRIDE=state.stride(0),
        STATE_STRIDE_W=state.stride(1),
        STATE_STRIDE_C=state.stride(2),
        H=H,
        BC=COMMIT_CHANNELS,
        LAYERS=layers,
    )


def _check_supported(op: str, x: Tensor, conv_state: Tensor) -> None:
    if x.device.type != "cuda" and not INTERPRETED:
        refuse(
            op,
            f"the triton backend cannot run on {x.device.type} tensors without "
            'TRITON_INTERPRET=1: use backend="reference"',
        )
    if x.dtype not in DTYPES or conv_state.dtype not in DTYPES:
        refuse(
            op,
            "the triton backend takes float16, bfloat16 and float32, "
            f'got {x.dtype} and {conv_state.dtype}: use backend="reference"',
        )
