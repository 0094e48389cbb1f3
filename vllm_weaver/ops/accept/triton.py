# SPDX-License-Identifier: Apache-2.0
# mypy: disable-error-code="no-untyped-def, assignment, misc"
"""Acceptance in one Triton launch, a warp per request.

Nothing is walked: a walk would be one dependent reduction per accepted row. Lanes hold rows, so
what a program passes between its lanes is one word of bits per 64 rows, and the length.

The module knows nothing of vLLM. Its definition is `reference.accept_paths_reference`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from vllm_weaver.ops.accept.reference import AcceptedPaths, PathCounts
from vllm_weaver.ops.dispatch import expect_kernel_device, refuse

SIBLINGS = 16
"""Rows at a time against which all rows are compared, to find the first of matching siblings."""
COLUMNS = 64
"""Columns of the path filled at a time."""


@triton.jit
def pointed_at(tokens, parents, sampled, row, alive):
    """Parent of each row, and whether the row's token is the one sampled at its parent."""
    parent = tl.load(parents + row, mask=alive, other=-1).to(tl.int32)
    child = alive & (parent >= 0)
    token = tl.load(tokens + row, mask=child, other=0).to(tl.int64)
    wanted = tl.load(sampled + parent, mask=child, other=0).to(tl.int64)
    return parent, child & (token == wanted)


@triton.jit(
    do_not_specialize=[
        "T",
        "max_depth",
        "tokens_stride_r",
        "parents_stride_r",
        "depths_stride_r",
        "ancestors_stride_r",
        "ancestors_stride_t",
        "sampled_stride_r",
    ]
)
def accept_kernel(
    tokens_ptr,
    parents_ptr,
    depths_ptr,
    num_nodes_ptr,
    ancestors_ptr,
    sampled_ptr,
    path_ptr,
    length_ptr,
    emitted_ptr,
    order_ptr,
    T,
    max_depth,
    tokens_stride_r,
    parents_stride_r,
    depths_stride_r,
    ancestors_stride_r,
    ancestors_stride_t,
    sampled_stride_r,
    W: tl.constexpr,
    BT: tl.constexpr,
    BJ: tl.constexpr,
    BD: tl.constexpr,
):
    """Grid (R,)."""
    r = tl.program_id(0).to(tl.int64)
    row = tl.arange(0, BT)
    nodes = tl.minimum(tl.load(num_nodes_ptr + r).to(tl.int32), T)
    live = row < nodes
    tokens = tokens_ptr + r * tokens_stride_r
    parents = parents_ptr + r * parents_stride_r
    sampled = sampled_ptr + r * sampled_stride_r
    depth = tl.load(depths_ptr + r * depths_stride_r + row, mask=live, other=0).to(tl.int32)
    token_at = tl.load(sampled + row, mask=live, other=0)
    parent, followed = pointed_at(tokens, parents, sampled, row, live)

    for start in range(0, nodes, BJ):
        other = start + tl.arange(0, BJ)
        its_parent, matches = pointed_at(tokens, parents, sampled, other, other < nodes)
        earlier = (its_parent[:, None] == parent[None, :]) & (other[:, None] < row[None, :])
        earlier = earlier & matches[:, None]
        followed = followed & (tl.max(earlier.to(tl.int32), 0) == 0)
    followed = followed | (live & (parent < 0))

    on_path = live & (depth <= max_depth)
    ancestors = ancestors_ptr + r * ancestors_stride_r + row * ancestors_stride_t
    one = tl.full([BT], 1, tl.int64)
    for word in tl.static_range(W):
        own_word = followed & (row // 64 == word)
        bits = tl.sum(tl.where(own_word, one << (row % 64).to(tl.int64), 0), 0)
        strays = tl.load(ancestors + word, mask=live, other=0) & ~bits
        on_path = on_path & (strays == 0)

    length = tl.sum(on_path.to(tl.int32), 0)
    tl.store(length_ptr + r, length)
    path = path_ptr + r * (max_depth + 1)
    emitted = emitted_ptr + r * (max_depth + 1)
    order = order_ptr + r * T
    tl.store(path + depth, row, mask=on_path)
    tl.store(emitted + depth, token_at, mask=on_path)
    tl.store(order + depth, r * T + row, mask=on_path)
    tl.store(order + row, r * T + row, mask=(row >= length) & (row < T))
    for start in range(0, max_depth + 1, BD):
        column = start + tl.arange(0, BD)
        past = (column >= length) & (column <= max_depth)
        tl.store(path + column, tl.full([BD], -1, tl.int32), mask=past)
        tl.store(emitted + column, tl.full([BD], -1, tl.int32), mask=past)


@triton.jit(do_not_specialize=["D", "path_stride_r"])
def count_kernel(
    path_ptr,
    length_ptr,
    num_nodes_ptr,
    lengths_ptr,
    rows_ptr,
    sizes_ptr,
    D,
    path_stride_r,
    BD: tl.constexpr,
):
    """Grid (R,): the paths' D columns, BD of them at a time."""
    r = tl.program_id(0).to(tl.int64)
    one = tl.full([BD], 1, tl.int64)
    for start in range(0, D, BD):
        column = start + tl.arange(0, BD)
        row = tl.load(path_ptr + r * path_stride_r + column, mask=column < D, other=-1)
        tl.atomic_add(rows_ptr + row, one, mask=row > 0, sem="relaxed")
    # One lane adds to each of the other totals.
    lane = tl.arange(0, BD)
    length = tl.load(length_ptr + r)
    nodes = tl.load(num_nodes_ptr + r)
    tl.atomic_add(lengths_ptr + length + tl.zeros_like(lane), one, mask=lane == 0, sem="relaxed")
    tl.atomic_add(sizes_ptr + nodes + tl.zeros_like(lane), one, mask=lane == 0, sem="relaxed")


INTERPRETED = not isinstance(accept_kernel, triton.runtime.JITFunction)


def accept_paths_triton(
    tokens: Tensor,
    parents: Tensor,
    depths: Tensor,
    num_nodes: Tensor,
    ancestors: Tensor,
    sampled: Tensor,
    max_depth: int,
    out: AcceptedPaths | None,
) -> AcceptedPaths:
    """Launch the kernel; tensors as in `vllm_weaver.ops.accept_paths`.

    Raises:
        ValueError: a device that Triton cannot run on.
    """
    expect_kernel_device("accept_paths", tokens.device, INTERPRETED)
    R, T = tokens.shape
    if out is None:
        out = AcceptedPaths(
            tokens.new_empty((R, max_depth + 1), dtype=torch.int32),
            tokens.new_empty((R,), dtype=torch.int32),
            sampled.new_empty((R, max_depth + 1)),
            tokens.new_empty((R, T), dtype=torch.int64),
        )
    if R == 0:
        return out
    tokens, parents, depths, sampled = map(_unit_rows, (tokens, parents, depths, sampled))
    ancestors = _unit_rows(ancestors)
    accept_kernel[(R,)](
        tokens,
        parents,
        depths,
        num_nodes.contiguous(),
        ancestors,
        sampled,
        *out,
        T,
        max_depth,
        tokens.stride(0),
        parents.stride(0),
        depths.stride(0),
        ancestors.stride(0),
        ancestors.stride(1),
        sampled.stride(0),
        W=ancestors.shape[2],
        BT=triton.next_power_of_2(T),
        BJ=SIBLINGS,
        BD=COLUMNS,
        num_warps=1,
    )
    return out


def count_paths_triton(path: Tensor, length: Tensor, num_nodes: Tensor, counts: PathCounts) -> None:
    """Launch the kernel; tensors as in `vllm_weaver.ops.count_paths`.

    Raises:
        ValueError: a device that Triton cannot run on, or totals that are not contiguous.
    """
    expect_kernel_device("count_paths", path.device, INTERPRETED)
    if not all(totals.is_contiguous() for totals in counts):
        refuse("count_paths", "the totals are not contiguous")
    path = _unit_rows(path)
    count_kernel[(len(path),)](
        *(path, length.contiguous(), num_nodes.contiguous()),
        *counts,
        path.shape[1],
        path.stride(0),
        BD=min(COLUMNS, triton.next_power_of_2(path.shape[1])),
        num_warps=1,
    )


def _unit_rows(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()
