# SPDX-License-Identifier: Apache-2.0
# mypy: disable-error-code="no-untyped-def"
"""Tree attention in two parts: a prefix kernel of the caller's, then the tree's rows and the merge.

The prefix is dense and not causal, which any paged attention kernel does that gives its
log-sum-exp; one Triton launch then attends to the tree's rows under the ancestor bitmask and merges
both (spec section 6). The prefix kernel is handed in as a function, so the module knows nothing
of vLLM or FlashAttention.
"""

import math
from typing import Protocol

import torch
import triton
import triton.language as tl
from torch import Tensor

from vllm_weaver.ops.attention.tiling import TailForm, choose_tail, multiprocessors
from vllm_weaver.ops.attention.triton import (
    INTERPRETED,
    ancestor_bits,
    check_supported,
    take_tile,
    words_of,
)
from vllm_weaver.ops.dispatch import refuse


class PrefixAttention(Protocol):
    """A kernel for the prefix part: every query row of a request attends to its whole context."""

    def __call__(
        self,
        q: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        block_table: Tensor,
        context_lens: Tensor,
        *,
        rows: int,
        scale: float,
    ) -> tuple[Tensor, Tensor]:
        """Attend without a causal mask.

        Args:
            q: [R * T, H, D_h]; rows past a tree may hold NaN, and then so may their results.
            k_cache, v_cache: [blocks, block_size, HKV, D_h].
            block_table: [R, max_blocks] int32.
            context_lens: [R] int32, from 0; read on the device.
            rows: T, query rows of each request.
            scale: of the scores.

        Returns:
            Normalised output [R * T, H, D_h] and natural log-sum-exp [H, R * T] in float32, which
            is infinite (of either sign) for an empty context.
        """
        ...


@triton.jit(do_not_specialize=["T", "lse_stride_h", "ancestors_stride_r", "ancestors_stride_t"])
def attend_tail_kernel(
    q_ptr,
    k_new_ptr,
    v_new_ptr,
    prefix_ptr,
    prefix_lse_ptr,
    ancestors_ptr,
    num_nodes_ptr,
    out_ptr,
    scale_log2,
    T,
    J,
    q_stride_r,
    q_stride_t,
    q_stride_h,
    k_new_stride_r,
    k_new_stride_t,
    k_new_stride_h,
    v_new_stride_r,
    v_new_stride_t,
    v_new_stride_h,
    prefix_stride_t,
    prefix_stride_h,
    lse_stride_h,
    ancestors_stride_r,
    ancestors_stride_t,
    G: tl.constexpr,
    K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    DOT_FLOAT32: tl.constexpr,
):
    """Grid (row blocks, R * J): the tree's part of BLOCK_M packed rows, merged with `prefix`."""
    row_block = tl.program_id(0)
    r = (tl.program_id(1) // J).to(tl.int64)
    j = (tl.program_id(1) % J).to(tl.int64)
    nodes = tl.minimum(tl.load(num_nodes_ptr + r).to(tl.int32), T)
    row = row_block * BLOCK_M + tl.arange(0, BLOCK_M)
    t = row // G
    head = j * G + row % G
    alive = t < nodes
    col = tl.arange(0, BLOCK_N)
    dim = tl.arange(0, K)
    # No load waits for the number of nodes: what may hold NaN is blanked after it has come.
    there = (t < T)[:, None]
    q_offset = r * q_stride_r + t * q_stride_t + head * q_stride_h
    q = tl.load(q_ptr + q_offset[:, None] + dim[None, :], mask=there, other=0.0)
    q = tl.where(alive[:, None], q, 0.0)

    top = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK_M,), tl.float32)
    acc = tl.zeros((BLOCK_M, K), tl.float32)
    k_new = k_new_ptr + r * k_new_stride_r + j * k_new_stride_h
    v_new = v_new_ptr + r * v_new_stride_r + j * v_new_stride_h
    words = ancestors_ptr + r * ancestors_stride_r + t * ancestors_stride_t
    # Parents come before children, so no row of this block has an ancestor past its last one.
    stop = tl.minimum(T, (row_block * BLOCK_M + BLOCK_M - 1) // G + 1)
    for start in tl.range(0, stop, BLOCK_N, num_stages=1):
        node = start + col
        within = (node < stop)[:, None]
        present = node < nodes
        k_at = k_new + (node * k_new_stride_t)[:, None] + dim[None, :]
        v_at = v_new + (node * v_new_stride_t)[:, None] + dim[None, :]
        k = tl.load(k_at, mask=within, other=0.0)
        v = tl.load(v_at, mask=within, other=0.0)
        bits = ancestor_bits(words, start, t < T, T, BLOCK_M, BLOCK_N)
        k = tl.where(present[:, None], k, 0.0)
        v = tl.where(present[:, None], v, 0.0)
        keep = (bits != 0) & (present & (node < stop))[None, :]
        top, total, acc = take_tile(q, k, v, keep, top, total, acc, scale_log2, True, DOT_FLOAT32)

    at = (r * T + t) * prefix_stride_t + head * prefix_stride_h
    prefix = tl.load(prefix_ptr + at[:, None] + dim[None, :], mask=there, other=0.0)
    lse_at = head * lse_stride_h + r * T + t
    lse = tl.load(prefix_lse_ptr + lse_at, mask=alive, other=float("-inf"))
    # An infinity of either sign marks an empty context, whose output may be anything.
    empty = tl.abs(lse) == float("inf")
    lse = tl.where(empty, float("-inf"), lse * 1.4426950408889634)
    tail_top = top * scale_log2
    base = tl.maximum(tail_top, lse)
    base = tl.where(base == float("-inf"), 0.0, base)
    of_prefix = tl.exp2(lse - base)
    of_tail = tl.exp2(tail_top - base)
    total = total * of_tail + of_prefix
    total = tl.where(total > 0.0, total, 1.0)
    prefix = tl.where(empty[:, None], 0.0, prefix.to(tl.float32))
    out = acc * (of_tail / total)[:, None] + prefix * (of_prefix / total)[:, None]
    out = tl.where(alive[:, None], out, 0.0)
    out_offset = ((r * T + t) * J * G + head)[:, None] * K + dim[None, :]
    tl.store(out_ptr + out_offset, out.to(out_ptr.dtype.element_ty), mask=(t < T)[:, None])


def attend_tail(
    q: Tensor,
    k_new: Tensor,
    v_new: Tensor,
    prefix: Tensor,
    prefix_lse: Tensor,
    ancestors: Tensor,
    num_nodes: Tensor,
    *,
    scale: float,
    form: TailForm | None = None,
) -> Tensor:
    """Attend to the tree's rows and merge with the prefix part; one launch.

    Tensors as in `vllm_weaver.ops.attention.tree_attention`, and the prefix part as
    `PrefixAttention` gives it.

    Args:
        form: launch shape; None chooses by the number of programs.

    Raises:
        ValueError: head dim, dtype, stride, scale or device that the kernel does not take.
    """
    R, T, H, K = q.shape
    J = k_new.shape[2]
    tensors = {"q": q, "k_new": k_new, "v_new": v_new, "prefix": prefix}
    check_supported("fa3", scale, tensors)
    out = torch.empty((R, T, H, K), dtype=q.dtype, device=q.device)
    if out.numel() == 0:
        return out
    if prefix_lse.stride(-1) != 1:
        prefix_lse = prefix_lse.contiguous()
    words = words_of(ancestors)
    rows = T * (H // J)
    if form is None:
        form = choose_tail(rows, R * J, multiprocessors(q.device))
    attend_tail_kernel[(triton.cdiv(rows, form.block_m), R * J)](
        *(q, k_new, v_new, prefix, prefix_lse, words, num_nodes.contiguous(), out),
        scale * math.log2(math.e),
        T,
        J,
        *q.stride()[:3],
        *k_new.stride()[:3],
        *v_new.stride()[:3],
        *prefix.stride()[:2],
        prefix_lse.stride(0),
        *words.stride()[:2],
        G=H // J,
        K=K,
        BLOCK_M=form.block_m,
        BLOCK_N=form.block_n,
        DOT_FLOAT32=INTERPRETED and q.dtype == torch.bfloat16,
        num_warps=form.num_warps,
    )
    return out


def tree_attention_in_parts(
    prefix_attention: PrefixAttention,
    q: Tensor,
    k_new: Tensor,
    v_new: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_table: Tensor,
    context_lens: Tensor,
    ancestors: Tensor,
    num_nodes: Tensor,
    *,
    scale: float,
) -> Tensor:
    """`vllm_weaver.ops.attention.tree_attention` with a prefix kernel of the caller's choice.

    Args:
        prefix_attention: attends to the context.
    """
    R, T, H, K = q.shape
    if q.numel() == 0:
        return torch.empty_like(q)
    prefix, lse = prefix_attention(
        q.reshape(R * T, H, K),
        k_cache,
        v_cache,
        block_table,
        context_lens,
        rows=T,
        scale=scale,
    )
    parts = (q, k_new, v_new, prefix, lse, ancestors, num_nodes)
    return attend_tail(*parts, scale=scale)


_fa3: PrefixAttention | None = None


def enable_fa3(prefix_attention: PrefixAttention | None) -> None:
    """Set the prefix kernel of backend "fa3" for this process; None takes it away."""
    global _fa3
    _fa3 = prefix_attention


def tree_attention_fa3(
    q: Tensor,
    k_new: Tensor,
    v_new: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_table: Tensor,
    context_lens: Tensor,
    ancestors: Tensor,
    num_nodes: Tensor,
    *,
    scale: float,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
) -> Tensor:
    """Backend "fa3" of `vllm_weaver.ops.attention.tree_attention`.

    Raises:
        ValueError: no prefix kernel is enabled, the cache is float8, or the tail takes it not.
    """
    if _fa3 is None:
        refuse("tree_attention", "the fa3 backend needs enable_fa3(...) first: use another backend")
    if k_cache.dtype != q.dtype:
        refuse("tree_attention", 'the fa3 backend takes no float8 cache: use backend="triton"')
    return tree_attention_in_parts(
        *(_fa3, q, k_new, v_new, k_cache, v_cache, block_table, context_lens),
        *(ancestors, num_nodes),
        scale=scale,
    )
