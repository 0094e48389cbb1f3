# SPDX-License-Identifier: Apache-2.0
# mypy: disable-error-code="no-untyped-def"
"""The entries of a round: what the node step reads of each node that it expands.

Shape legend as in `weave.triton`.
"""

import triton
import triton.language as tl


@triton.jit
def row_of(array, r, d):
    """Where the row of request r and depth d of a `ByDepth` starts."""
    return array.start + (r * array.stride_r + d * array.stride_d)


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
    growth,
    G: tl.constexpr,
    sizes: tl.constexpr,
):
    """Write the entries and inputs of G nodes; those that do not expand are inert.

    `ahead` rows before an entry's own are of its line, from the line's first node down; `parent` is
    that node's.
    """
    T: tl.constexpr = sizes.T
    D: tl.constexpr = sizes.D
    E: tl.constexpr = sizes.E
    EB: tl.constexpr = sizes.EB
    GB: tl.constexpr = triton.next_power_of_2(G)
    tables = growth.tables
    entries = growth.entries
    inputs = growth.inputs
    g = tl.arange(0, GB)
    n = r * G + g
    here = g < G
    slot = (r * growth.stride + D + 1 + row).to(tl.int32)
    tl.store(entries.node + n, tl.where(expands, row, -1), mask=here)
    tl.store(entries.depth + n, tl.where(expands, depth, 0), mask=here)
    tl.store(entries.score + n, score, mask=here)
    tl.store(inputs.position + n, tl.where(expands, depth + 1, 0), mask=here)
    tl.store(inputs.columns + n, tl.where(expands, D + 2 + depth, 0), mask=here)
    tl.store(inputs.slot + n, tl.where(expands, slot, -1), mask=here)

    d = tl.arange(0, triton.next_power_of_2(D))[None, :]
    before = d - (depth - ahead)[:, None]
    above = expands[:, None] & (before < 0)
    old = tl.load(inputs.row_paths + (r * T + parent)[:, None] * D + d, mask=above, other=0)
    path = tl.where(before < 0, old, (slot - ahead)[:, None] + before)
    mask = expands[:, None] & (d < D)
    tl.store(inputs.row_paths + (r * T + row)[:, None] * D + d, path, mask=mask)
    tl.store(inputs.path + n[:, None] * D + d, path, mask=mask)

    squares = tl.zeros((GB,), tl.float32)
    source = tables.token_rows + token.to(tl.int64)[:, None] * E
    for start in tl.static_range(0, E, EB):
        e = start + tl.arange(0, EB)[None, :]
        inside = expands[:, None] & (e < E)
        x = tl.load(source + e, mask=inside, other=0.0).to(tl.float32)
        if tables.positions is not None:
            at = tables.positions + (depth + 1)[:, None] * E + e
            x += tl.load(at, mask=inside, other=0.0).to(tl.float32)
        inside = here[:, None] & (e < E)
        if inputs.x is not None:
            tl.store(inputs.x + n[:, None] * E + e, x, mask=inside)
        weight = tl.load(tables.scale + e, mask=e < E, other=0.0).to(tl.float32)
        scaled = (x * weight).to(inputs.scaled.dtype.element_ty)
        tl.store(inputs.scaled + n[:, None] * E + e, scaled, mask=inside)
        squares += tl.sum(x * x, 1)
    tl.store(inputs.squares + n, squares, mask=here)
