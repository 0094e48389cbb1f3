# SPDX-License-Identifier: Apache-2.0
"""The trees of one batch, laid out from stored trees: what a verification step starts from.

The module knows nothing of vLLM and of who proposed the trees. `reference` is the definition;
`triton` does each op in one launch.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from vllm_weaver.ops.dispatch import Backends, expect_indices, expect_shapes, refuse
from vllm_weaver.ops.step.reference import (
    StepTensors,
    StoredTrees,
    prepare_step_reference,
    state_slots_reference,
)

__all__ = ["StepTensors", "StoredTrees", "prepare_step", "state_slots"]

OP = "prepare_step"

_BACKENDS: Backends[Callable[..., None]] = Backends(OP, prepare_step_reference)
_BACKENDS.register(
    "triton", "vllm_weaver.ops.step.triton:prepare_step_triton", default_on=("cuda",)
)
_SLOTS: Backends[Callable[..., None]] = Backends("state_slots", state_slots_reference)
_SLOTS.register("triton", "vllm_weaver.ops.step.triton:state_slots_triton", default_on=("cuda",))


def prepare_step(
    stored: StoredTrees,
    slots: Tensor,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    input_ids: Tensor,
    positions: Tensor | None,
    out: StepTensors,
    *,
    backend: str | None = None,
) -> None:
    """Lay out the trees of the n leading requests of a batch in buffers for R >= n requests.

    The requests n..R - 1 are padding, which a captured graph verifies like the others.

    ===============  ==============  =====  ======  ================================================
    name             shape           dtype  in/out  meaning
    ===============  ==============  =====  ======  ================================================
    stored                                  in      trees by request slot; `StoredTrees` has the
                                                    shapes
    slots            [n]             int32  in      slot of each request (int64 is fine)
    query_start_loc  [n + 1]         int32  in      request r has the batch's entries from
                                                    query_start_loc[r] up to [r + 1]: the rows that
                                                    were scheduled, root first, at most T
    seq_lens         [>= n]          int32  in      tokens of each request, its rows included
    input_ids        [N]             int32  in      tokens of the batch (int64 is fine)
    positions        [N] or [A, N]   int64  in/out  linear position of each entry, on A axes
                                                    (M-RoPE). Row i of a live tree becomes that of
                                                    its depth, position + depths[i] - i. Every other
                                                    entry stays as it is. None: left out
    out                                     out     `StepTensors` for R requests of T rows
    ===============  ==============  =====  ======  ================================================

    Of `out`, with n' = min(stored.num_nodes, scheduled rows) live rows of a request, 0 of padding:

    ============  ============  ===================================================================
    tokens        [R, T]        tokens that are verified: acceptance compares them with the samples.
                                0 past n'
    parents       [R, T]        for acceptance. -1 past n'
    depths        [R, T]        for acceptance and the path's columns. 0 past n'
    num_nodes     [R]           n': attention, GDN and convolution leave the rows past it out
    ancestors     [R, T, W]     mask of attention and GDN. Past n' a row sees itself alone, so that
                                no softmax is empty
    context_lens  [R]           tokens before the tree, seq_lens - scheduled rows: the prefix that
                                attention reads. 0 of padding
    offsets       [R, T]        depths[i] - i: what `positions` got. 0 past n'
    conv_table    [R, T, H]     window of the causal convolution, as `conv_table` makes it for width
                                H + 1: one for all layers. -1 past n'
    ============  ============  ===================================================================

    Nothing else is written: state indices of padding requests keep what the caller put there.

    Backends: "reference" (any device, no host synchronisation) and "triton" (one launch, no
    allocation). None takes "triton" on a GPU, else "reference".

    Raises:
        ValueError: unknown backend, or shapes, dtypes or devices that do not fit together.
    """
    n = len(slots)
    R, T = out.tokens.shape
    if n > R:
        refuse(OP, f"slots holds {n} requests, the buffers are for {R}")
    if stored.parents.dim() != 2 or stored.parents.shape[1] < T:
        refuse(OP, f"the buffers have {T} rows, stored trees {list(stored.parents.shape)}")
    S, rows = stored.parents.shape
    device = out.tokens.device
    words, hops = -(-T // 64), out.conv_table.shape[-1]
    expect_shapes(
        OP,
        device,
        {
            "stored.parents": (stored.parents, (S, rows)),
            "stored.depths": (stored.depths, (S, rows)),
            "stored.num_nodes": (stored.num_nodes, (S,)),
            "stored.ancestors": (stored.ancestors, (S, rows, -(-rows // 64))),
            "slots": (slots, (n,)),
            "query_start_loc": (query_start_loc, (n + 1,)),
            "seq_lens": (seq_lens[:n], (n,)),
            "input_ids": (input_ids, (len(input_ids),)),
            "out.tokens": (out.tokens, (R, T)),
            "out.parents": (out.parents, (R, T)),
            "out.depths": (out.depths, (R, T)),
            "out.num_nodes": (out.num_nodes, (R,)),
            "out.ancestors": (out.ancestors, (R, T, words)),
            "out.context_lens": (out.context_lens, (R,)),
            "out.offsets": (out.offsets, (R, T)),
            "out.conv_table": (out.conv_table, (R, T, hops)),
        },
    )
    expect_indices(
        OP,
        {
            "slots": slots,
            "query_start_loc": query_start_loc,
            "seq_lens": seq_lens,
            "input_ids": input_ids,
        },
    )
    if positions is not None:
        if positions.dim() not in (1, 2) or positions.shape[-1] != len(input_ids):
            refuse(
                OP,
                f"positions has shape {list(positions.shape)}, expected [{len(input_ids)}] or "
                f"[axes, {len(input_ids)}]",
            )
        if positions.dtype != torch.int64 or positions.device != device:
            refuse(
                OP,
                f"positions is {positions.dtype} on {positions.device}, expected torch.int64 on "
                f"{device}",
            )
    run = _BACKENDS.pick(backend, device)
    run(stored, slots, query_start_loc, seq_lens, input_ids, positions, out)


def state_slots(
    block_table: Tensor,
    seq_lens: Tensor,
    num_nodes: Tensor,
    block_size: int,
    out: Tensor,
    *,
    backend: str | None = None,
) -> None:
    """Slots of the committed states that a batch's trees start from.

    ===========  ======  =====  ======  ============================================================
    name         shape   dtype  in/out  meaning
    ===========  ======  =====  ======  ============================================================
    block_table  [R, C]  int32  in      cache blocks of each request; its rows may be strided
    seq_lens     [R]     int32  in      tokens of each request, the tree's rows included
    num_nodes    [R]     int32  in      live rows of each tree; 0: no tree
    block_size           int    in      tokens of a block, where a sequence's state is in the block
                                        of its last token; 0 where it is in the first one
    out          [R]     int32  out     the block; -1 without a tree, and for block 0 and below,
                                        which hold no state
    ===========  ======  =====  ======  ============================================================

    Backends: "reference" (any device, no host synchronisation) and "triton" (one launch). None
    takes "triton" on a GPU, else "reference".

    Raises:
        ValueError: unknown backend, or shapes, dtypes or devices that do not fit together.
    """
    op, R = "state_slots", len(out)
    if block_table.dim() != 2 or block_table.shape[1] < 1 or block_table.stride(1) != 1:
        refuse(op, f"block_table has shape {list(block_table.shape)}, expected [R, blocks]")
    expect_shapes(
        op,
        out.device,
        {
            "block_table": (block_table, (R, block_table.shape[1])),
            "seq_lens": (seq_lens, (R,)),
            "num_nodes": (num_nodes, (R,)),
            "out": (out, (R,)),
        },
    )
    expect_indices(op, {"block_table": block_table, "seq_lens": seq_lens, "num_nodes": num_nodes})
    if R:
        _SLOTS.pick(backend, out.device)(block_table, seq_lens, num_nodes, block_size, out)
