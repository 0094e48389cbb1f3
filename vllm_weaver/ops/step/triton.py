# SPDX-License-Identifier: Apache-2.0
# mypy: disable-error-code="no-untyped-def, assignment, misc"
"""A step's trees in one Triton launch, a program per part of a request's rows, and its states.

The module knows nothing of vLLM. The definitions are in `reference`.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from vllm_weaver.ops.dispatch import expect_kernel_device, refuse
from vllm_weaver.ops.step.reference import StepTensors, StoredTrees

ROWS = 64
"""Rows per program at most."""


@triton.jit(do_not_specialize=["n", "T", "stored_rows", "stored_words", "positions_stride_a"])
def prepare_step_kernel(
    parents_ptr,
    depths_ptr,
    num_nodes_ptr,
    ancestors_ptr,
    slots_ptr,
    query_start_loc_ptr,
    seq_lens_ptr,
    input_ids_ptr,
    positions_ptr,
    out_tokens_ptr,
    out_parents_ptr,
    out_depths_ptr,
    out_num_nodes_ptr,
    out_ancestors_ptr,
    out_context_lens_ptr,
    out_offsets_ptr,
    out_conv_table_ptr,
    n,
    T,
    stored_rows,
    stored_words,
    positions_stride_a,
    W: tl.constexpr,
    H: tl.constexpr,
    A: tl.constexpr,
    BT: tl.constexpr,
):
    """Grid (T / BT, R). A = 0 leaves the positions out."""
    row = tl.program_id(0) * BT + tl.arange(0, BT)
    r = tl.program_id(1)
    inside = row < T
    known = r < n
    slot = tl.load(slots_ptr + r, mask=known, other=0).to(tl.int64)
    start = tl.load(query_start_loc_ptr + r, mask=known, other=0).to(tl.int64)
    end = tl.load(query_start_loc_ptr + r + 1, mask=known, other=0).to(tl.int64)
    seq_len = tl.load(seq_lens_ptr + r, mask=known, other=0).to(tl.int64)
    count = end - start
    nodes = tl.load(num_nodes_ptr + slot, mask=known, other=0).to(tl.int64)
    nodes = tl.minimum(tl.minimum(nodes, count), T)
    live = row < nodes

    parents = parents_ptr + slot * stored_rows
    parent = tl.load(parents + row, mask=live, other=-1).to(tl.int32)
    depth = tl.load(depths_ptr + slot * stored_rows + row, mask=live, other=0).to(tl.int32)
    offset = tl.where(live, depth - row, 0)
    token = tl.load(input_ids_ptr + start + row, mask=live, other=0).to(tl.int32)
    place = r.to(tl.int64) * T + row
    tl.store(out_tokens_ptr + place, token, mask=inside)
    tl.store(out_parents_ptr + place, parent, mask=inside)
    tl.store(out_depths_ptr + place, depth, mask=inside)
    tl.store(out_offsets_ptr + place, offset, mask=inside)

    stored = ancestors_ptr + (slot * stored_rows + row) * stored_words
    one = tl.full([BT], 1, tl.int64)
    for word in tl.static_range(W):
        alone = tl.where(row // 64 == word, one << (row % 64).to(tl.int64), 0)
        bits = tl.where(live, tl.load(stored + word, mask=live, other=0), alone)
        tl.store(out_ancestors_ptr + place * W + word, bits, mask=inside)

    # Past the root a hop counts on into the committed rows: -1, -2, ...
    above = row
    for hop in tl.static_range(H):
        step_up = tl.load(parents + above, mask=live & (above >= 0), other=-1).to(tl.int32)
        above = tl.where(above >= 0, tl.maximum(step_up, -1), above - 1)
        above = tl.where(live, above, -1)
        tl.store(out_conv_table_ptr + place * H + hop, above, mask=inside)

    for axis in tl.static_range(A):
        position = positions_ptr + axis * positions_stride_a + start + row
        moved = tl.load(position, mask=live, other=0) + offset
        tl.store(position, moved, mask=live)

    if tl.program_id(0) == 0:
        tl.store(out_num_nodes_ptr + r, nodes.to(tl.int32))
        tl.store(out_context_lens_ptr + r, (seq_len - count).to(tl.int32))


@triton.jit(do_not_specialize=["R", "block_size", "stride_r"])
def state_slots_kernel(
    table_ptr,
    seq_lens_ptr,
    num_nodes_ptr,
    out_ptr,
    R,
    block_size,
    stride_r,
    LAST: tl.constexpr,
    BR: tl.constexpr,
):
    """Grid (R / BR,). LAST: the block of the last token, else the first block."""
    r = tl.program_id(0) * BR + tl.arange(0, BR)
    mask = r < R
    nodes = tl.load(num_nodes_ptr + r, mask=mask, other=0)
    at = table_ptr + r.to(tl.int64) * stride_r
    if LAST:
        seq_len = tl.load(seq_lens_ptr + r, mask=mask, other=1).to(tl.int32)
        at += tl.maximum(seq_len - 1, 0) // block_size
    block = tl.load(at, mask=mask, other=0).to(tl.int32)
    tl.store(out_ptr + r, tl.where((block > 0) & (nodes > 0), block, -1), mask=mask)


INTERPRETED = not isinstance(prepare_step_kernel, triton.runtime.JITFunction)


def prepare_step_triton(
    stored: StoredTrees,
    slots: Tensor,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    input_ids: Tensor,
    positions: Tensor | None,
    out: StepTensors,
) -> None:
    """Launch the kernel; tensors as in `vllm_weaver.ops.prepare_step`.

    Raises:
        ValueError: a device that Triton cannot run on, or a tensor that is not contiguous.
    """
    expect_kernel_device("prepare_step", input_ids.device, INTERPRETED)
    inputs = {"slots": slots, "query_start_loc": query_start_loc, "seq_lens": seq_lens}
    named = {**stored._asdict(), **inputs, "input_ids": input_ids, **out._asdict()}
    for name, tensor in named.items():
        if not tensor.is_contiguous():
            refuse("prepare_step", f"{name} is not contiguous, with strides {tensor.stride()}")
    if positions is not None and positions.stride(-1) != 1:
        refuse("prepare_step", f"positions has strides {positions.stride()}, expected 1 at the end")
    R, T = out.tokens.shape
    if R == 0:
        return
    axes = 0 if positions is None else 1 if positions.dim() == 1 else len(positions)
    block = min(ROWS, triton.next_power_of_2(T))
    prepare_step_kernel[(triton.cdiv(T, block), R)](
        *stored,
        slots,
        query_start_loc,
        seq_lens,
        input_ids,
        out.offsets if positions is None else positions,
        *out,
        len(slots),
        T,
        stored.parents.shape[1],
        stored.ancestors.shape[2],
        positions.stride(0) if positions is not None and axes > 1 else 0,
        W=out.ancestors.shape[2],
        H=out.conv_table.shape[2],
        A=axes,
        BT=block,
        num_warps=1 if block <= 32 else 2,
    )


def state_slots_triton(
    block_table: Tensor, seq_lens: Tensor, num_nodes: Tensor, block_size: int, out: Tensor
) -> None:
    """Launch the kernel; tensors as in `vllm_weaver.ops.state_slots`.

    Raises:
        ValueError: a device that Triton cannot run on, or a vector that is not contiguous.
    """
    expect_kernel_device("state_slots", out.device, INTERPRETED)
    for tensor in (seq_lens, num_nodes, out):
        if not tensor.is_contiguous():
            refuse("state_slots", f"a vector has strides {tensor.stride()}, expected 1")
    block = min(128, triton.next_power_of_2(len(out)))
    state_slots_kernel[(triton.cdiv(len(out), block),)](
        *(block_table, seq_lens, num_nodes, out),
        len(out),
        block_size,
        block_table.stride(0),
        LAST=block_size > 0,
        BR=block,
        num_warps=1,
    )
