# SPDX-License-Identifier: Apache-2.0
# mypy: disable-error-code="no-untyped-def"
"""The entries of a round: what the node step reads of each node that it expands.

Shape legend as in `weave.triton`.
"""

import triton
import triton.language as tl


@triton.jit
def prepare_nodes(
    r,
    expands,
    row,
    token,
    depth,
    score,
    parent,
    ahead,
    token_rows_ptr,
    positions_ptr,
    node_ptr,
    depth_ptr,
    score_ptr,
    position_ptr,
    count_ptr,
    slot_ptr,
    path_ptr,
    row_paths_ptr,
    x_ptr,
    scaled_ptr,
    scale_ptr,
    squares_ptr,
    stride,
    T: tl.constexpr,
    D: tl.constexpr,
    DB: tl.constexpr,
    G: tl.constexpr,
    GB: tl.constexpr,
    E: tl.constexpr,
    EB: tl.constexpr,
    STREAM: tl.constexpr,
    POSITIONS: tl.constexpr,
):
    """Write what the node step reads of each entry; entries that do not expand are inert.

    `ahead` rows before an entry's own are of its line, from the line's first node down; `parent` is
    that node's. The input row goes out times the weight of the norm that follows, with STREAM also
    as it is.
    """
    g = tl.arange(0, GB)
    n = r * G + g
    here = g < G
    slot = (r * stride + D + 1 + row).to(tl.int32)
    tl.store(node_ptr + n, tl.where(expands, row, -1), mask=here)
    tl.store(depth_ptr + n, tl.where(expands, depth, 0), mask=here)
    tl.store(score_ptr + n, score, mask=here)
    tl.store(position_ptr + n, tl.where(expands, depth + 1, 0), mask=here)
    tl.store(count_ptr + n, tl.where(expands, D + 2 + depth, 0), mask=here)
    tl.store(slot_ptr + n, tl.where(expands, slot, -1), mask=here)

    d = tl.arange(0, DB)[None, :]
    before = d - (depth - ahead)[:, None]
    above = expands[:, None] & (before < 0)
    old = tl.load(row_paths_ptr + (r * T + parent)[:, None] * D + d, mask=above, other=0)
    path = tl.where(before < 0, old, (slot - ahead)[:, None] + before)
    mask = expands[:, None] & (d < D)
    tl.store(row_paths_ptr + (r * T + row)[:, None] * D + d, path, mask=mask)
    tl.store(path_ptr + n[:, None] * D + d, path, mask=mask)

    squares = tl.zeros((GB,), tl.float32)
    source = token_rows_ptr + token.to(tl.int64)[:, None] * E
    for start in tl.static_range(0, E, EB):
        e = start + tl.arange(0, EB)[None, :]
        inside = expands[:, None] & (e < E)
        x = tl.load(source + e, mask=inside, other=0.0).to(tl.float32)
        if POSITIONS:
            at = positions_ptr + (depth + 1)[:, None] * E + e
            x += tl.load(at, mask=inside, other=0.0).to(tl.float32)
        inside = here[:, None] & (e < E)
        if STREAM:
            tl.store(x_ptr + n[:, None] * E + e, x, mask=inside)
        weight = tl.load(scale_ptr + e, mask=e < E, other=0.0).to(tl.float32)
        scaled = (x * weight).to(scaled_ptr.dtype.element_ty)
        tl.store(scaled_ptr + n[:, None] * E + e, scaled, mask=inside)
        squares += tl.sum(x * x, 1)
    tl.store(squares_ptr + n, squares, mask=here)
