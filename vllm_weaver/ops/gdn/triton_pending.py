# SPDX-License-Identifier: Apache-2.0
# mypy: disable-error-code="no-untyped-def, assignment, var-annotated"
# ruff: noqa: RUF005
"""Delayed commit in Triton: the part of a verification that commits the path before it.

A program of the verification owns some rows of one value head's state, all of K. It reads them
once, applies the earlier step's path with `recurrence.advance`, node by node in the order of the
exact commit, and writes them once; no other program reads or writes them, whatever the tiling. The
state has the bits of `triton_replay.commit_layers`, and so of a decode per node.

Where the verification takes all of K at once, the rows then go into its products from registers
(HELD). Where it takes K in tiles, they are read again, which the L2 cache serves: registers are
what it lacks there, and holding the rows was slower.

On an H200 it saves up to a fifth of the eager commit's time at batch 16 and one node, and next to
nothing for longer paths; with 64 rows from 4 nodes on, and at batch 1, eager commit and
verification are faster ("Delayed commit" in `docs/kernels.md`). The nodes of a path are a chain,
and with up to 255 registers a thread too few programs fit a multiprocessor to hide it behind
reading.

The module knows nothing of vLLM.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import triton
import triton.language as tl
from torch import Tensor

from vllm_weaver.ops.dispatch import refuse
from vllm_weaver.ops.gdn.recurrence import (
    advance,
    columns_of_tile,
    joined_pieces,
    load_state,
    places,
    rounded,
    row_of,
    store_state,
    unit,
)
from vllm_weaver.ops.gdn.reference import GdnPending

if TYPE_CHECKING:
    from vllm_weaver.ops.gdn.triton import GdnTritonStash


@triton.jit
def commit_pending(
    rows,
    k_ptr,
    v_ptr,
    g_ptr,
    beta_ptr,
    path_ptr,
    length_ptr,
    requests_ptr,
    L,
    k_stride_r,
    k_stride_t,
    v_stride_r,
    v_stride_t,
    gate_stride_r,
    gate_stride_t,
    path_stride_r,
    path_stride_l,
    r,
    hk,
    hv,
    col,
    K: tl.constexpr,
    V: tl.constexpr,
    BK: tl.constexpr,
    L2NORM: tl.constexpr,
    MOVED: tl.constexpr,
):
    """Commit the path of request `r`; its state rows `col` in tiles of BK columns, as written.

    `rows` [BV] are the addresses where the rows start. With MOVED, requests_ptr tells which of
    the earlier step's requests it is. All loads of a request without a path are of its node 0.
    """
    J: tl.constexpr = K // BK
    LANE: tl.constexpr = 128 // rows.dtype.element_ty.primitive_bitwidth
    place = places(rows, BK)
    state = load_state(place, BK, J, LANE)
    if MOVED:
        earlier = tl.load(requests_ptr + r).to(tl.int64)
        r = tl.maximum(earlier, 0)
    last = tl.minimum(tl.load(length_ptr + r).to(tl.int32), L)
    if MOVED:
        last = tl.where(earlier < 0, 0, last)
    k = k_ptr + r * k_stride_r + hk * K + tl.arange(0, K)
    v = v_ptr + r * v_stride_r + hv * V + col
    g = g_ptr + r * gate_stride_r + hv
    beta = beta_ptr + r * gate_stride_r + hv
    path = path_ptr + r * path_stride_r
    # While a node is applied, the next one's key is normed, and the row after that asked for.
    node = tl.load(path, mask=last > 0, other=0).to(tl.int32)
    k_next = unit(tl.load(k + node * k_stride_t).to(tl.float32), L2NORM)
    v_next = tl.load(v + node * v_stride_t)
    g_next = tl.load(g + node * gate_stride_t)
    beta_next = tl.load(beta + node * gate_stride_t)
    second = tl.minimum(1, last - 1) * path_stride_l
    node = tl.load(path + second, mask=last > 0, other=0).to(tl.int32)
    k_own = tl.load(k + node * k_stride_t)
    for i in range(last):
        k_row = row_of(k_next, J, LANE)
        v_i = v_next.to(tl.float32)
        g_i = g_next
        beta_i = beta_next
        k_next = unit(k_own.to(tl.float32), L2NORM)
        v_next = tl.load(v + node * v_stride_t)
        g_next = tl.load(g + node * gate_stride_t)
        beta_next = tl.load(beta + node * gate_stride_t)
        node = tl.load(path + tl.minimum(i + 2, last - 1) * path_stride_l).to(tl.int32)
        k_own = tl.load(k + node * k_stride_t)
        state = advance(state, k_row, v_i, g_i, beta_i, J, LANE)
        state = rounded(state, place.dtype.element_ty, J, LANE)
    if last > 0:
        store_state(place, state, BK, J, LANE)
    tiles = ()
    for j in tl.static_range(J):
        tiles = tiles + (joined_pieces(state, j * LANE, LANE),)
    return tiles


@triton.jit
def joined(tiles, J: tl.constexpr):
    """J = 1, 2 or 4 tiles [rows, BK] side by side."""
    rows: tl.constexpr = tiles[0].shape[0]
    width: tl.constexpr = tiles[0].shape[1] * J
    if J == 1:
        return tiles[0]
    elif J == 2:
        pairs = tl.permute(tl.join(tiles[0], tiles[1]), (0, 2, 1))
        return tl.reshape(pairs, (rows, width))
    else:
        quads = tl.join(tl.join(tiles[0], tiles[2]), tl.join(tiles[1], tiles[3]))
        return tl.reshape(tl.permute(quads, (0, 2, 3, 1)), (rows, width))


def arguments(pending: GdnPending | None, unused: Tensor) -> tuple[tuple[Any, ...], bool, bool]:
    """The kernel's arguments for `pending`, or stand-ins; whether it norms, whether rows moved."""
    if pending is None:
        return (*(unused,) * 7, *(0,) * 9), True, False
    stash: GdnTritonStash = pending.stash
    path, requests = pending.path, pending.requests
    g, beta = stash.g_RTH, stash.beta_RTH
    if g.stride() != beta.stride() or g.stride(-1) != 1:
        g, beta = g.contiguous(), beta.contiguous()
    length = pending.length.contiguous()
    return (
        (
            *(stash.k_RTHK, stash.v_RTHV, g, beta, path, length),
            length if requests is None else requests.contiguous(),
            path.shape[1],
            *stash.k_RTHK.stride()[:2],
            *stash.v_RTHV.stride()[:2],
            *g.stride()[:2],
            *path.stride(),
        ),
        stash.qk_l2norm,
        requests is not None,
    )


def held(K: int, block_k: int, dtype: Any) -> tuple[int, bool]:
    """Columns of a tile of the commit, and whether the products take the tiles from registers."""
    columns = columns_of_tile(K, dtype)
    return columns, columns < K and block_k == K


def check_pending(
    op: str, pending: GdnPending, k: Tensor, v: Tensor, own: tuple[Tensor, ...]
) -> None:
    """Refuse what `commit_pending` does not take.

    Args:
        op: the op, for the message.
        pending: the earlier step's path.
        k: keys of this step's rows, v: their values.
        own: the buffers that this step's stash is written to.
    """
    refuse_shared(op, pending, own)
    stash = pending.stash
    if stash.k_RTHK.shape[2:] != k.shape[2:] or stash.v_RTHV.shape[2:] != v.shape[2:]:
        refuse(
            op,
            f"pending.stash has keys {list(stash.k_RTHK.shape[2:])} and values "
            f"{list(stash.v_RTHV.shape[2:])}, this step {list(k.shape[2:])}, {list(v.shape[2:])}",
        )
    for x in (stash.k_RTHK, stash.v_RTHV):
        if x.stride(-1) != 1 or (x.shape[2] > 1 and x.stride(2) != x.shape[3]):
            refuse(op, f"pending.stash needs rows with dense heads, strides are {x.stride()}")


def refuse_shared(op: str, pending: GdnPending, own: tuple[Tensor, ...]) -> None:
    """Refuse buffers to write that share memory with what the pending commit reads."""
    stash = pending.stash
    if getattr(stash, "k_RTHK", None) is None or stash.backend != "triton":
        refuse(op, "pending needs the triton backend's stash of rows (of raw rows: `rows_stash`)")
    read = (stash.k_RTHK, stash.v_RTHV, stash.g_RTH, stash.beta_RTH)
    if any(overlap(x, y) for x in read for y in own):
        refuse(
            op,
            "the stash to write shares memory with pending.stash, which other programs of the same "
            "launch still read: alternate between two stashes",
        )


def overlap(x: Tensor, y: Tensor) -> bool:
    """Whether the address ranges of two tensors meet."""

    def span(tensor: Tensor) -> tuple[int, int]:
        last = sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
        start = tensor.data_ptr()
        return start, start + (last + 1) * tensor.itemsize

    if 0 in (x.numel(), y.numel()):
        return False
    (a, b), (c, d) = span(x), span(y)
    return a < d and c < b
