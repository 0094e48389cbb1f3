# SPDX-License-Identifier: Apache-2.0
# mypy: disable-error-code="no-untyped-def, assignment, misc"
"""What a proposal starts from and where its trees go, one Triton launch each.

In PyTorch these are a gather and a copy for every value of a request, and a pass of pointer
doubling for chains, microseconds each. The module knows nothing of vLLM. Its definitions are those
of `reference`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from vllm_weaver.ops.dispatch import expect_kernel_device, refuse
from vllm_weaver.ops.propose import MAX_SOURCES
from vllm_weaver.ops.propose.reference import PathRows
from vllm_weaver.ops.step.reference import StoredTrees

CHUNK = 1024
"""Elements of a hidden row per program."""


@triton.jit
def _take(index: tl.constexpr, COUNT: tl.constexpr, source_ptr, target_ptr, slot, r):
    """Copy a slot's value, if there are so many."""
    if index < COUNT:
        tl.store(target_ptr + r, tl.load(source_ptr + slot))


@triton.jit(do_not_specialize=["rows", "width"])
def load_roots_kernel(
    hidden_ptr,
    row_ends_ptr,
    num_rejected_ptr,
    slots_ptr,
    positions_ptr,
    s0_ptr,
    s1_ptr,
    s2_ptr,
    s3_ptr,
    s4_ptr,
    s5_ptr,
    s6_ptr,
    s7_ptr,
    o0_ptr,
    o1_ptr,
    o2_ptr,
    o3_ptr,
    o4_ptr,
    o5_ptr,
    o6_ptr,
    o7_ptr,
    states_ptr,
    out_positions_ptr,
    out_rejected_ptr,
    stride_n,
    rows,
    width,
    WIDTH: tl.constexpr,
    CHUNK: tl.constexpr,
    COUNT: tl.constexpr,
    PATHS: tl.constexpr,
    BL: tl.constexpr,
):
    """Grid (chunks of WIDTH elements of a row, R). BL is a power of two, `width` or more."""
    r = tl.program_id(1).to(tl.int64)
    rejected = tl.load(num_rejected_ptr + r).to(tl.int64)
    if PATHS:
        rejected -= rows - width
        end = (r + 1) * width
    else:
        end = tl.load(row_ends_ptr + r).to(tl.int64)
    element = tl.program_id(0) * CHUNK + tl.arange(0, CHUNK)
    mask = element < WIDTH
    row = tl.load(hidden_ptr + (end - rejected - 1) * stride_n + element, mask=mask)
    tl.store(states_ptr + r * WIDTH + element, row, mask=mask)
    if tl.program_id(0) == 0:
        slot = tl.load(slots_ptr + r).to(tl.int64)
        _take(0, COUNT, s0_ptr, o0_ptr, slot, r)
        _take(1, COUNT, s1_ptr, o1_ptr, slot, r)
        _take(2, COUNT, s2_ptr, o2_ptr, slot, r)
        _take(3, COUNT, s3_ptr, o3_ptr, slot, r)
        _take(4, COUNT, s4_ptr, o4_ptr, slot, r)
        _take(5, COUNT, s5_ptr, o5_ptr, slot, r)
        _take(6, COUNT, s6_ptr, o6_ptr, slot, r)
        _take(7, COUNT, s7_ptr, o7_ptr, slot, r)
        if PATHS:
            step = tl.arange(0, BL)
            kept = step < width
            position = tl.load(positions_ptr + r * rows + step, mask=kept)
            tl.store(out_positions_ptr + r * width + step, position, mask=kept)
            tl.store(out_rejected_ptr + r, rejected.to(out_rejected_ptr.dtype.element_ty))


@triton.jit(do_not_specialize=["D", "T"])
def choose_chain_kernel(
    tokens_ptr,
    roots_ptr,
    chain_only_ptr,
    tree_tokens_ptr,
    tree_parents_ptr,
    tree_depths_ptr,
    tree_num_nodes_ptr,
    tree_ancestors_ptr,
    out_tokens_ptr,
    out_parents_ptr,
    out_depths_ptr,
    out_num_nodes_ptr,
    out_ancestors_ptr,
    tokens_stride_r,
    tokens_stride_d,
    D,
    T,
    W: tl.constexpr,
    BT: tl.constexpr,
    ALL: tl.constexpr,
):
    """Grid (R,). ALL gives chains to all requests, and reads neither the flags nor the trees."""
    r = tl.program_id(0).to(tl.int64)
    t = tl.arange(0, BT)
    inside = t < T
    flag = tl.full([BT], 1, tl.int32)
    if not ALL:
        flag *= tl.load(chain_only_ptr + r).to(tl.int32)
    chain = inside & (flag != 0)
    other = inside & (flag == 0)
    live = chain & (t <= D)
    root = tl.load(roots_ptr + r).to(tl.int32)
    below = tokens_ptr + r * tokens_stride_r + (t - 1) * tokens_stride_d
    token = tl.load(below, mask=live & (t > 0), other=0).to(tl.int32)
    token = tl.where(t == 0, root, token)
    place = r * T + t
    token = tl.where(chain, token, tl.load(tree_tokens_ptr + place, mask=other, other=0))
    parent = tl.load(tree_parents_ptr + place, mask=other, other=-1)
    depth = tl.load(tree_depths_ptr + place, mask=other, other=0)
    tl.store(out_tokens_ptr + place, token, mask=inside)
    tl.store(out_parents_ptr + place, tl.where(live, t - 1, parent), mask=inside)
    tl.store(out_depths_ptr + place, tl.where(live, t, depth), mask=inside)
    one = tl.full([BT], 1, tl.int64)
    for word in tl.static_range(W):
        within = t - word * 64
        # The lowest bits up to a row's own; a shift by all 64 is two shifts.
        shift = tl.minimum(tl.maximum(within, 0), 63).to(tl.int64)
        bits = tl.where(live & (within >= 0), ((one << shift) << 1) - 1, 0)
        words = tl.load(tree_ancestors_ptr + place * W + word, mask=other, other=0)
        tl.store(out_ancestors_ptr + place * W + word, bits | words, mask=inside)
    if ALL:
        tl.store(out_num_nodes_ptr + r, D + 1)
    else:
        nodes = tl.load(tree_num_nodes_ptr + r)
        tl.store(out_num_nodes_ptr + r, tl.where(tl.load(chain_only_ptr + r) != 0, D + 1, nodes))


@triton.jit(do_not_specialize=["T"])
def store_trees_kernel(
    tokens_ptr,
    parents_ptr,
    depths_ptr,
    num_nodes_ptr,
    ancestors_ptr,
    slots_ptr,
    stored_parents_ptr,
    stored_depths_ptr,
    stored_num_nodes_ptr,
    stored_ancestors_ptr,
    below_ptr,
    T,
    W: tl.constexpr,
    BT: tl.constexpr,
):
    """Grid (R,)."""
    r = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots_ptr + r).to(tl.int64)
    t = tl.arange(0, BT)
    inside = t < T
    here, there = r * T + t, slot * T + t
    tl.store(stored_parents_ptr + there, tl.load(parents_ptr + here, mask=inside), mask=inside)
    tl.store(stored_depths_ptr + there, tl.load(depths_ptr + here, mask=inside), mask=inside)
    for word in tl.static_range(W):
        words = tl.load(ancestors_ptr + here * W + word, mask=inside)
        tl.store(stored_ancestors_ptr + there * W + word, words, mask=inside)
    child = inside & (t > 0)
    token = tl.load(tokens_ptr + here, mask=child)
    tl.store(below_ptr + r * (T - 1) + t - 1, token.to(tl.int64), mask=child)
    tl.store(stored_num_nodes_ptr + slot, tl.load(num_nodes_ptr + r))


INTERPRETED = not isinstance(load_roots_kernel, triton.runtime.JITFunction)


def load_roots_triton(
    hidden: Tensor,
    row_ends: Tensor,
    num_rejected: Tensor,
    slots: Tensor,
    sources: Sequence[Tensor],
    out_states: Tensor,
    targets: Sequence[Tensor],
    paths: PathRows | None,
) -> None:
    """Launch the kernel; tensors as in `vllm_weaver.ops.load_roots`.

    Raises:
        ValueError: a device that Triton cannot run on, or a tensor that is not contiguous.
    """
    op = "load_roots"
    expect_kernel_device(op, hidden.device, INTERPRETED)
    given = [row_ends, num_rejected, slots, *sources, *targets, out_states]
    if paths is not None:
        given += [paths.positions, paths.out_positions, paths.out_rejected]
    _expect_contiguous(op, given)
    width = hidden.shape[1]
    spare = MAX_SOURCES - len(sources)
    # Triton takes booleans as bytes.
    pairs = [
        [x.view(torch.uint8) if x.dtype == torch.bool else x for x in (*part, *part[:1] * spare)]
        for part in (list(sources), list(targets))
    ]
    load_roots_kernel[(triton.cdiv(width, CHUNK), len(slots))](
        *(hidden, row_ends, num_rejected, slots),
        slots if paths is None else paths.positions,
        *pairs[0],
        *pairs[1],
        out_states,
        slots if paths is None else paths.out_positions,
        slots if paths is None else paths.out_rejected,
        hidden.stride(0),
        0 if paths is None else paths.rows,
        0 if paths is None else paths.width,
        WIDTH=width,
        CHUNK=CHUNK,
        COUNT=len(sources),
        PATHS=paths is not None,
        # No smaller for small trees: each width would be compiled when its first batch comes.
        BL=1 if paths is None else max(16, triton.next_power_of_2(paths.width)),
        num_warps=4,
    )


def choose_chain_triton(
    tokens: Tensor,
    roots: Tensor,
    chain_only: Tensor,
    tree: Sequence[Tensor] | None,
    out: Sequence[Tensor],
) -> None:
    """Launch the kernel; tensors as in `vllm_weaver.ops.choose_chain`.

    Raises:
        ValueError: a device that Triton cannot run on, or a tensor that is not contiguous.
    """
    op = "choose_chain"
    expect_kernel_device(op, tokens.device, INTERPRETED)
    _expect_contiguous(op, [roots, chain_only, *out])
    source = out if tree is None else [x.contiguous() for x in tree]
    T, W = out[4].shape[1:]
    choose_chain_kernel[(len(tokens),)](
        *(tokens, roots, chain_only.view(torch.uint8)),
        *source,
        *out,
        *tokens.stride(),
        tokens.shape[1],
        T,
        W=W,
        BT=triton.next_power_of_2(T),
        ALL=tree is None,
        num_warps=2,
    )


def store_trees_triton(
    tree: Sequence[Tensor], slots: Tensor, stored: StoredTrees, out_tokens: Tensor
) -> None:
    """Launch the kernel; tensors as in `vllm_weaver.ops.store_trees`.

    Raises:
        ValueError: a device that Triton cannot run on, or a tensor that is not contiguous.
    """
    op = "store_trees"
    expect_kernel_device(op, slots.device, INTERPRETED)
    _expect_contiguous(op, [slots, *stored, out_tokens])
    T, W = tree[4].shape[1:]
    store_trees_kernel[(len(slots),)](
        *(x.contiguous() for x in tree),
        slots,
        *stored,
        out_tokens,
        T,
        W=W,
        BT=triton.next_power_of_2(T),
        num_warps=2,
    )


def _expect_contiguous(op: str, tensors: Sequence[Tensor]) -> None:
    for tensor in tensors:
        if not tensor.is_contiguous():
            refuse(op, f"a tensor is not contiguous: {list(tensor.shape)}, {tensor.stride()}")
