# SPDX-License-Identifier: Apache-2.0
# mypy: disable-error-code="no-untyped-def, assignment, var-annotated"
# ruff: noqa: RUF005
"""One token of Gated DeltaNet's recurrence, in the order of vLLM's packed decode (spec section 5).

That kernel gives a thread LANE neighbours of a state row. It adds up their products with fused
multiply-adds; then the threads that share the row add what they have, those of its two halves
first, of its quarters next. Bits depend on this tree of additions, and not on who does them. So a
row may also be cut into tiles of BK columns, which a thread holds one of each: what the tiles have
at the same place is added in registers, and only the last levels go through a warp's shuffles.

    K = 128, LANE = 4     rows a warp   levels in registers   shuffles for 32 rows
    BK = 128 (decode)     1             0                     160
    BK = 32               4             2                     24

A state is a tuple of pieces [rows, BK / LANE]: for each tile in the order of columns, its first
neighbours, its second ones, and so on. A thread holds the same places of all pieces, so nothing but
those last levels moves between threads. The module knows nothing of vLLM.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl


def columns_of_tile(K: int, dtype: torch.dtype) -> int:
    """Columns of a tile that keep the order of additions for states of that dtype.

    Eight threads share a row of a tile, which is 128 bytes. The norm of k adds up neighbours of
    K // 32 columns: where that is not what a thread loads of the state, rows stay whole.
    """
    lane = 16 // dtype.itemsize
    return 8 * lane if 32 * lane == K else K


@triton.jit
def pieces_of(x, LANE: tl.constexpr):
    """x [rows, columns] as LANE = 2, 4 or 8 pieces [rows, columns / LANE], one a neighbour."""
    rows: tl.constexpr = x.shape[0]
    lanes: tl.constexpr = x.shape[1] // LANE
    if LANE == 2:
        x_0, x_1 = tl.split(tl.reshape(x, (rows, lanes, 2)))
        return x_0, x_1
    elif LANE == 4:
        x_e, x_o = tl.split(tl.reshape(x, (rows, lanes, 2, 2)))
        x_0, x_2 = tl.split(x_e)
        x_1, x_3 = tl.split(x_o)
        return x_0, x_1, x_2, x_3
    else:
        x_e, x_o = tl.split(tl.reshape(x, (rows, lanes, 2, 2, 2)))
        x_e0, x_e1 = tl.split(x_e)
        x_o0, x_o1 = tl.split(x_o)
        x_0, x_4 = tl.split(x_e0)
        x_2, x_6 = tl.split(x_e1)
        x_1, x_5 = tl.split(x_o0)
        x_3, x_7 = tl.split(x_o1)
        return x_0, x_1, x_2, x_3, x_4, x_5, x_6, x_7


@triton.jit
def joined_pieces(x, first: tl.constexpr, LANE: tl.constexpr):
    """The tile of the LANE = 4 or 8 pieces from x[first] on: what `pieces_of` cut up."""
    rows: tl.constexpr = x[first].shape[0]
    width: tl.constexpr = x[first].shape[1] * LANE
    if LANE == 4:
        x_e = tl.join(x[first], x[first + 2])
        x_o = tl.join(x[first + 1], x[first + 3])
    else:
        x_e0 = tl.join(x[first], x[first + 4])
        x_e1 = tl.join(x[first + 2], x[first + 6])
        x_o0 = tl.join(x[first + 1], x[first + 5])
        x_o1 = tl.join(x[first + 3], x[first + 7])
        x_e = tl.join(x_e0, x_e1)
        x_o = tl.join(x_o0, x_o1)
    return tl.reshape(tl.join(x_e, x_o), (rows, width))


@triton.jit
def products(x, y, first: tl.constexpr, LANE: tl.constexpr):
    """Sums of the products of neighbours, the pieces from `first` on.

    The second product is rounded, then the first, third, ... are added to it, each with a fused
    multiply-add: the order that the compiler gives a sum over a row in vLLM's kernel. Left to the
    compiler, it is another one now and then.
    """
    total = tl.fma(x[first], y[first], x[first + 1] * y[first + 1])
    for e in tl.static_range(2, LANE):
        total = tl.fma(x[first + e], y[first + e], total)
    return total


INTERPRETED = not isinstance(products, triton.runtime.JITFunction)
IN_ORDER = tl.constexpr(INTERPRETED)


@triton.jit
def halved(x):
    """Sums over the second dimension of x [rows, up to 32 lanes], halves first, in any layout."""
    for _ in tl.static_range(5):
        if x.shape[1] > 1:
            x = tl.sum(tl.reshape(x, (x.shape[0], 2, x.shape[1] // 2)), 1)
    return tl.sum(x, 1)


@triton.jit
def lane_sums(x):
    """The same where a warp's lanes hold the second dimension: its own order."""
    if IN_ORDER:
        # The interpreter's sum has another one.
        return halved(x)
    else:
        return tl.sum(x, 1)


@triton.jit
def unit(x, L2NORM: tl.constexpr):
    """x [K], L2-normalised if asked."""
    if L2NORM:
        lane: tl.constexpr = x.shape[0] // 32
        pieces = pieces_of(x[None, :], lane)
        squares = halved(products(pieces, pieces, 0, lane))
        x = x / tl.sqrt(tl.sum(squares, 0) + 1e-6)
    return x


@triton.jit
def row_of(x, J: tl.constexpr, LANE: tl.constexpr):
    """x [K] in pieces [1, BK / LANE] that go with those of a state of J = 1, 2 or 4 tiles."""
    width: tl.constexpr = x.shape[0] // J
    if J == 1:
        return pieces_of(x[None, :], LANE)
    elif J == 2:
        x_0, x_1 = tl.split(tl.trans(tl.reshape(x, (2, width))))
        return pieces_of(x_0[None, :], LANE) + pieces_of(x_1[None, :], LANE)
    else:
        x_e, x_o = tl.split(tl.permute(tl.reshape(x, (2, 2, width)), (2, 0, 1)))
        x_0, x_2 = tl.split(x_e)
        x_1, x_3 = tl.split(x_o)
        return (
            pieces_of(x_0[None, :], LANE)
            + pieces_of(x_1[None, :], LANE)
            + pieces_of(x_2[None, :], LANE)
            + pieces_of(x_3[None, :], LANE)
        )


@triton.jit
def row_sums(state, x, J: tl.constexpr, LANE: tl.constexpr):
    """Sum over K of each row of the state times x of `row_of`."""
    rows = ()
    for i in tl.static_range(J * LANE):
        rows = rows + (tl.broadcast_to(x[i], state[i].shape),)
    total = products(state, rows, 0, LANE)
    if J == 2:
        total += products(state, rows, LANE, LANE)
    elif J == 4:
        total += products(state, rows, 2 * LANE, LANE)
        rest = products(state, rows, LANE, LANE)
        total += rest + products(state, rows, 3 * LANE, LANE)
    return lane_sums(total)


@triton.jit
def advance(state, k, v, g, beta, J: tl.constexpr, LANE: tl.constexpr):
    """One token of the recurrence: state and k of `row_of` in pieces; v [rows]; scalar gates."""
    decayed = ()
    for i in tl.static_range(J * LANE):
        decayed = decayed + (state[i] * tl.exp(g),)
    v -= row_sums(decayed, k, J, LANE)
    v *= beta
    after = ()
    for i in tl.static_range(J * LANE):
        row = tl.broadcast_to(k[i], state[i].shape)
        after = after + (tl.fma(tl.broadcast_to(v[:, None], state[i].shape), row, decayed[i]),)
    return after


@triton.jit
def places(rows, BK: tl.constexpr):
    """Addresses [rows, 1, BK] of a state's first tile, from those where its rows start.

    The second dimension is for the order of additions. The compiler gives a thread as many
    neighbours of a tile as of any other tile of that shape in the kernel: of [rows, BK] that could
    be more, those of a narrower dtype, and `lane_sums` would then add up neighbours first.
    """
    return rows[:, None, None] + tl.arange(0, BK)[None, None, :]


@triton.jit
def load_state(place, BK: tl.constexpr, J: tl.constexpr, LANE: tl.constexpr):
    """A state in float32 pieces, from the addresses of its first tile, of `places`."""
    state = ()
    for j in tl.static_range(J):
        tile = tl.reshape(tl.load(place + j * BK), (place.shape[0], BK))
        state = state + pieces_of(tile.to(tl.float32), LANE)
    return state


@triton.jit
def store_state(place, state, BK: tl.constexpr, J: tl.constexpr, LANE: tl.constexpr):
    """Write a state to where `load_state` found it, or to another such place."""
    for j in tl.static_range(J):
        tile = tl.reshape(joined_pieces(state, j * LANE, LANE), place.shape)
        tl.store(place + j * BK, tile.to(place.dtype.element_ty))


@triton.jit
def rounded(state, dtype: tl.constexpr, J: tl.constexpr, LANE: tl.constexpr):
    """A state with the values that `dtype` can hold."""
    pieces = ()
    for i in tl.static_range(J * LANE):
        pieces = pieces + (state[i].to(dtype).to(tl.float32),)
    return pieces
