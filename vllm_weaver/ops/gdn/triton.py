# SPDX-License-Identifier: Apache-2.0
# mypy: disable-error-code="no-untyped-def, assignment, var-annotated"
# ruff: noqa: RUF005
"""Gated DeltaNet on trees in Triton: verification of one layer in one launch (spec section 5).

A program owns BV rows of the state of one value head of one request, and walks the tree in blocks
of BT rows. It solves (I + X) U = R of a block with an explicit inverse, built by doubling: nodes
are grouped by depth (or by row, where depths are not bounded), groups of one level merge in pairs,

    M <- M - M (X between the two halves of a group) M,

and each M is the inverse of the system within its groups, so that nothing large cancels, as it
would in a product of powers of X. Blocks are chained by forward substitution.

Narrow inputs are multiplied as float16 with float32 sums: rows are L2-normalised before they are
rounded, the state and the right hand side are scaled to a fixed range by a power of two. Float32
inputs take three tf32 products for each, and decays are then summed in float64.

Tuples in the kernel grow by sums, since Triton knows no starred expressions. The module knows
nothing of vLLM. Its definition is `reference.tree_verify`; `triton_replay` has decode and commit.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple, NoReturn

import torch
import triton
import triton.language as tl
from torch import Tensor

from vllm_weaver.ops.dispatch import refuse
from vllm_weaver.ops.gdn.recurrence import INTERPRETED
from vllm_weaver.ops.gdn.reference import GdnPending
from vllm_weaver.ops.gdn.triton_pending import (
    arguments,
    check_pending,
    commit_pending,
    held,
    joined,
)
from vllm_weaver.ops.gdn.triton_tiles import (
    decays,
    gates,
    halves,
    live_half,
    load_words,
    magnitude,
    mask_tile,
    popcount,
    product,
    project,
    row_products,
)

HEAD_DIMS = (64, 128)
DTYPES = (torch.float16, torch.bfloat16, torch.float32)
STATE_DTYPES = (torch.float32, torch.bfloat16)
MAX_ROWS = 256


@dataclass(frozen=True)
class GdnTritonStash:
    """What a commit needs of a verified tree: copies of raw k and v, and of the gates.

    Rows past a request's nodes are not written. Opaque to callers but for `select`.
    """

    k_RTHK: Tensor
    v_RTHV: Tensor
    g_RTH: Tensor
    beta_RTH: Tensor
    qk_l2norm: bool = True
    backend: str = "triton"

    def select(self, requests: Tensor | slice) -> GdnTritonStash:
        """Keep some of the requests, in the order given."""
        return replace(
            self,
            k_RTHK=self.k_RTHK[requests],
            v_RTHV=self.v_RTHV[requests],
            g_RTH=self.g_RTH[requests],
            beta_RTH=self.beta_RTH[requests],
        )


class Tiling(NamedTuple):
    """Launch shape of the verification."""

    block_t: int
    block_v: int
    block_k: int
    num_warps: int
    num_stages: int
    max_registers: int | None = None


@triton.jit
def tree_verify_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    g_ptr,
    beta_ptr,
    A_log_ptr,
    dt_bias_ptr,
    state_ptr,
    slots_ptr,
    num_nodes_ptr,
    ancestors_ptr,
    out_ptr,
    stash_k_ptr,
    stash_v_ptr,
    stash_g_ptr,
    stash_beta_ptr,
    pending_k_ptr,
    pending_v_ptr,
    pending_g_ptr,
    pending_beta_ptr,
    pending_path_ptr,
    pending_length_ptr,
    pending_requests_ptr,
    pending_L,
    pending_k_stride_r,
    pending_k_stride_t,
    pending_v_stride_r,
    pending_v_stride_t,
    pending_gate_stride_r,
    pending_gate_stride_t,
    pending_path_stride_r,
    pending_path_stride_l,
    scale,
    T,
    q_stride_r,
    q_stride_t,
    k_stride_r,
    k_stride_t,
    v_stride_r,
    v_stride_t,
    gate_stride_r,
    gate_stride_t,
    ancestors_stride_r,
    ancestors_stride_t,
    STATE_STRIDE: tl.constexpr,
    HK: tl.constexpr,
    HV: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    BT: tl.constexpr,
    NB: tl.constexpr,
    BV: tl.constexpr,
    BK: tl.constexpr,
    LEVELS: tl.constexpr,
    BY_DEPTH: tl.constexpr,
    RAW_GATES: tl.constexpr,
    L2NORM: tl.constexpr,
    STASH_ROWS: tl.constexpr,
    WHOLE: tl.constexpr,
    PRECISE: tl.constexpr,
    WIDEN: tl.constexpr,
    NATIVE: tl.constexpr,
    PENDING: tl.constexpr,
    PENDING_BK: tl.constexpr,
    PENDING_L2NORM: tl.constexpr,
    MOVED: tl.constexpr,
    HELD: tl.constexpr,
):
    """Grid (V / BV, R * HV). With RAW_GATES, g and beta are a and b of `gates`.

    With PENDING, the program first commits the earlier step's path (`triton_pending`).
    """
    # Triton 3.6 misplaces the second half of a transposed wgmma operand with rows of 64 bytes.
    tl.static_assert(PRECISE or BT < 64 or BV >= 64, "blocks of 64 rows need BV of 64 or more")
    LOG2E: tl.constexpr = 1.4426950408889634
    i_v = tl.program_id(0)
    r = (tl.program_id(1) // HV).to(tl.int64)
    hv = tl.program_id(1) % HV
    hk = hv // (HV // HK)
    dim = tl.arange(0, BK)[None, :]
    col = i_v * BV + tl.arange(0, BV)
    ii = tl.arange(0, BT)
    dtype: tl.constexpr = k_ptr.dtype.element_ty

    slot = tl.load(slots_ptr + r).to(tl.int64)
    nodes = tl.minimum(tl.load(num_nodes_ptr + r).to(tl.int32), T)
    out = out_ptr + r * T * HV * V + hv * V + col[None, :]
    inert = slot < 0
    if not PENDING:
        inert = inert | (nodes <= 0)
    if inert:
        for ib in tl.static_range(NB):
            row = ib * BT + ii
            zeros = tl.zeros((BT, BV), out_ptr.dtype.element_ty)
            tl.store(out + row[:, None] * HV * V, zeros, mask=(row < T)[:, None])
        return

    q = q_ptr + r * q_stride_r + hk * K
    k = k_ptr + r * k_stride_r + hk * K
    state = state_ptr + slot * STATE_STRIDE + (hv * V + col[:, None]) * K
    v = v_ptr + r * v_stride_r + hv * V + col[None, :]
    gate = r * gate_stride_r + hv
    ancestors = ancestors_ptr + r * ancestors_stride_r
    stash_row = r * T * HV + hv
    if PENDING:
        J: tl.constexpr = K // PENDING_BK
        tiles = commit_pending(
            state_ptr + slot * STATE_STRIDE + (hv * V + col) * K,
            pending_k_ptr,
            pending_v_ptr,
            pending_g_ptr,
            pending_beta_ptr,
            pending_path_ptr,
            pending_length_ptr,
            pending_requests_ptr,
            pending_L,
            pending_k_stride_r,
            pending_k_stride_t,
            pending_v_stride_r,
            pending_v_stride_t,
            pending_gate_stride_r,
            pending_gate_stride_t,
            pending_path_stride_r,
            pending_path_stride_l,
            r,
            hk,
            hv,
            col,
            K,
            V,
            PENDING_BK,
            PENDING_L2NORM,
            MOVED,
        )
        if not HELD:
            # What other threads wrote is read below.
            tl.debug_barrier()

    # Per block: log decay; its sum c over the path as high and low part, for columns; the columns'
    # factor; u and its magnitude.
    g_blocks = ()
    c_blocks = ()
    low_blocks = ()
    factor_blocks = ()
    u_blocks = ()
    size_blocks = ()
    for ib in tl.static_range(NB):
        row = ib * BT + ii
        alive = row < nodes
        v_i = tl.load(v + row[:, None] * v_stride_t, mask=alive[:, None], other=0.0)
        g_i = tl.load(g_ptr + gate + row * gate_stride_t, mask=alive, other=0.0)
        beta_i = tl.load(beta_ptr + gate + row * gate_stride_t, mask=alive, other=0.0)
        if RAW_GATES:
            A_log = tl.load(A_log_ptr + hv).to(tl.float32)
            g_i, beta_i = gates(g_i, beta_i, A_log, tl.load(dt_bias_ptr + hv).to(tl.float32))
            g_i = tl.where(alive, g_i, 0.0)
            beta_i = tl.where(alive, beta_i, 0.0)
        g_blocks = g_blocks + (g_i,)
        lows = ()
        highs = ()
        for jb in tl.static_range(ib + 1):
            low, high = load_words(ancestors, row, alive, nodes, ancestors_stride_t, jb, BT)
            lows = lows + (low,)
            highs = highs + (high,)

        # Products over K of the raw rows with each other and with the state. With WHOLE, each is
        # made where it is needed, so that few tiles are alive at a time.
        diagonal = ii[:, None] == ii[None, :]
        keys = tl.zeros((BT, BT), tl.float32)
        queries = tl.zeros((BT, BT), tl.float32)
        recalled = tl.zeros((BT, BV), tl.float32)
        o = tl.zeros((BT, BV), tl.float32)
        if WHOLE:
            k_i = tl.load(k + row[:, None] * k_stride_t + dim, mask=alive[:, None], other=0.0)
            q_i = tl.load(q + row[:, None] * q_stride_t + dim, mask=alive[:, None], other=0.0)
            if ib == 0:
                if HELD:
                    s = joined(tiles, J)
                else:
                    s = tl.load(state + dim).to(tl.float32)
            keys = row_products(k_i, k_i, keys, PRECISE, WIDEN)
            if ib == 0:
                s, s_low = halves(s, dtype)
        else:
            squares = tl.zeros((BT, BK), tl.float32)
            for start in range(0, K, BK):
                at = start + dim
                k_i = tl.load(k + row[:, None] * k_stride_t + at, mask=alive[:, None], other=0.0)
                q_i = tl.load(q + row[:, None] * q_stride_t + at, mask=alive[:, None], other=0.0)
                s = tl.load(state + at).to(tl.float32)
                keys, queries, squares, recalled, o = project(
                    k_i, q_i, s, keys, queries, squares, recalled, o, PRECISE, WIDEN
                )
        k_unit = tl.full((BT,), 1.0, tl.float32)
        if L2NORM:
            k_unit = tl.rsqrt(tl.sum(tl.where(diagonal, keys, 0.0), 1) + 1e-6)

        # Tiles start from a dot's result, so that all of them share its layout.
        tile = 0.0 * keys
        c = tl.zeros((BT,), tl.float64 if PRECISE else tl.float32)
        for jb in tl.static_range(ib + 1):
            mask = mask_tile(lows[jb], highs[jb], jb, BT)
            c += tl.sum(tl.where(mask, (tile + g_blocks[jb][None, :]).to(c.dtype), 0.0), 1)
        c *= LOG2E
        c_i = c.to(tl.float32)
        low_i = (c - c_i).to(tl.float32)
        if PRECISE:
            c_j = c_i
        else:
            c_j = c_i - tl.log2(k_unit)
        c_blocks = c_blocks + (c_j,)
        low_blocks = low_blocks + (low_i,)
        factor_blocks = factor_blocks + (k_unit,)
        carried = tl.exp2(c_i)

        # X within the block, and the inverse of I + X. M is zero between groups, so that M X M
        # holds M_a X_ab M_b for every two groups a and b: X needs no mask.
        group = ii
        if BY_DEPTH:
            # Nothing comes from c. But what depends on a sum is made for the rows and passed on to
            # the columns, which is cheaper than to count the bits for both.
            group = tl.where(c_i == float("inf"), 0, -1)
            for half in tl.static_range((ib * BT + BT + 31) // 32):
                bits = live_half(ancestors, row, alive, half, nodes, ancestors_stride_t)
                group += popcount(bits)
        apart = group[:, None] ^ group[None, :]
        decay = decays(c_i, low_i, c_j, low_i, k_unit, mask, tile, PRECISE, NATIVE)
        X = (beta_i * k_unit)[:, None] * decay * keys
        M = tl.where(apart == 1, -X, tl.where(diagonal, 1.0, 0.0))
        if not PRECISE:
            X = X.to(tl.float16)
        for level in range(1, LEVELS):
            coupled = product(M, product(X, M, PRECISE), PRECISE)
            M = tl.where((apart >> level) == 1, M - coupled, M)
        if not PRECISE:
            M = M.to(tl.float16)

        # u = M beta (v - what the state and earlier blocks recall).
        if WHOLE:
            recalled = row_products(k_i, s_low, recalled, PRECISE, WIDEN)
            recalled = row_products(k_i, s, recalled, PRECISE, WIDEN)
        recalled *= carried[:, None]
        for jb in tl.static_range(ib):
            products = tl.zeros((BT, BT), tl.float32)
            for start in range(0, K, BK):
                at = start + dim
                if not WHOLE:
                    k_i = tl.load(
                        k + row[:, None] * k_stride_t + at, mask=alive[:, None], other=0.0
                    )
                k_j = tl.load(k + (jb * BT + ii)[:, None] * k_stride_t + at)
                products = row_products(k_i, k_j, products, PRECISE, WIDEN)
            decay_ij = decays(
                c_i,
                low_i,
                c_blocks[jb],
                low_blocks[jb],
                factor_blocks[jb],
                mask_tile(lows[jb], highs[jb], jb, BT),
                0.0 * products,
                PRECISE,
                NATIVE,
            )
            size = size_blocks[jb]
            recalled += size * product(decay_ij * products, u_blocks[jb], PRECISE)
        rest = beta_i[:, None] * (v_i.to(tl.float32) - k_unit[:, None] * recalled)
        if PRECISE:
            size = 1.0
            u = product(M, rest, PRECISE)
        else:
            size, inverse = magnitude(rest)
            u = product(M, rest * inverse, PRECISE).to(tl.float16)
        u_blocks = u_blocks + (u,)
        size_blocks = size_blocks + (size,)

        # Outputs.
        if WHOLE:
            queries = row_products(q_i, k_i, queries, PRECISE, WIDEN)
            squares = row_products(q_i, q_i, tl.zeros((BT, BT), tl.float32), PRECISE, WIDEN)
            squares = tl.where(diagonal, squares, 0.0)
            tile = 0.0 * queries
            decay = decays(c_i, low_i, c_j, low_i, k_unit, mask, tile, PRECISE, NATIVE)
            o = row_products(q_i, s_low, o, PRECISE, WIDEN)
            o = row_products(q_i, s, o, PRECISE, WIDEN)
        q_unit = tl.full((BT,), 1.0, tl.float32)
        if L2NORM:
            q_unit = tl.rsqrt(tl.sum(squares, 1) + 1e-6)
        o *= (carried * q_unit)[:, None]
        o += size * product(q_unit[:, None] * decay * queries, u, PRECISE)
        for jb in tl.static_range(ib):
            products = tl.zeros((BT, BT), tl.float32)
            for start in range(0, K, BK):
                at = start + dim
                if not WHOLE:
                    q_i = tl.load(
                        q + row[:, None] * q_stride_t + at, mask=alive[:, None], other=0.0
                    )
                k_j = tl.load(k + (jb * BT + ii)[:, None] * k_stride_t + at)
                products = row_products(q_i, k_j, products, PRECISE, WIDEN)
            decay_ij = decays(
                c_i,
                low_i,
                c_blocks[jb],
                low_blocks[jb],
                factor_blocks[jb],
                mask_tile(lows[jb], highs[jb], jb, BT),
                0.0 * products,
                PRECISE,
                NATIVE,
            )
            weight = q_unit[:, None] * decay_ij * products
            o += size_blocks[jb] * product(weight, u_blocks[jb], PRECISE)
        o = tl.where(alive[:, None], o * scale, 0.0).to(out_ptr.dtype.element_ty)
        tl.store(out + row[:, None] * HV * V, o, mask=(row < T)[:, None])

        if STASH_ROWS:
            stash_v = stash_v_ptr + (stash_row + row[:, None] * HV) * V + col[None, :]
            tl.store(stash_v, v_i, mask=alive[:, None])
            if (i_v == 0) & (hv % (HV // HK) == 0):
                stash_k = stash_k_ptr + ((r * T + row[:, None]) * HK + hk) * K
                for start in range(0, K, BK):
                    at = start + dim
                    k_i = tl.load(k + row[:, None] * k_stride_t + at, mask=alive[:, None])
                    tl.store(stash_k + at, k_i, mask=alive[:, None])
        if i_v == 0:
            tl.store(stash_g_ptr + stash_row + row * HV, g_i, mask=alive)
            tl.store(stash_beta_ptr + stash_row + row * HV, beta_i, mask=alive)


def choose_tiling(
    R: int,
    T: int,
    HV: int,
    V: int,
    K: int,
    dtype: torch.dtype,
    capability: int = 9,
) -> Tiling:
    """Launch shape for R requests of T rows: on a Hopper GPU the fastest of `docs/kernels.md`.

    Few requests leave multiprocessors idle, and want more and shorter programs. `capability` is
    the device's major one; before Hopper a matrix product keeps its operands in registers, which a
    whole key dimension would overflow. With a delayed commit it is the same.
    """
    block_t = min(64, max(16, triton.next_power_of_2(T)))
    if INTERPRETED:
        # It pays per program.
        return Tiling(block_t, V, K, 1, 1)
    if dtype == torch.float32:
        return Tiling(block_t, 16, 32, 4, 2)
    heads = R * HV
    if block_t == 16:
        return Tiling(16, 64, 32, 4 if heads <= 256 else 2, 4)
    if block_t == 32:
        return Tiling(32, 32 if heads <= 96 else 64, 32, 2, 4)
    if capability < 9:
        return Tiling(64, 64, 32, 4, 2)
    # A wider block of a longer tree does not fit into shared memory twice.
    return Tiling(64, V if heads > 96 and T <= 64 else 64, K, 4, 1)


def levels_of(block_t: int, T: int, max_depth: int | None) -> tuple[int, bool]:
    """Doublings that merge all groups of a block, and whether groups are depths or else rows."""
    by_row = (min(block_t, T) - 1).bit_length()
    by_depth = by_row + 1 if max_depth is None else max_depth.bit_length()
    return (by_depth, True) if by_depth < by_row else (by_row, False)


def tree_verify(
    q_RTHK: Tensor,
    k_RTHK: Tensor,
    v_RTHV: Tensor,
    g_RTH: Tensor,
    beta_RTH: Tensor,
    state: Tensor,
    state_indices_R: Tensor,
    num_nodes_R: Tensor,
    ancestors_RTW: Tensor,
    scale: float,
    qk_l2norm: bool,
    *,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    max_depth: int | None = None,
    out: Tensor | None = None,
    stash: GdnTritonStash | None = None,
    pending: GdnPending | None = None,
    tiling: Tiling | None = None,
) -> tuple[Tensor, GdnTritonStash]:
    """Launch the kernel; tensors as in `vllm_weaver.ops.gdn.gdn_tree_verify`.

    Args:
        tiling: launch shape; None chooses.

    Raises:
        ValueError: head dim, number of rows, dtype, stride or device that the kernel does not take.
    """
    R, T, HK, K = k_RTHK.shape
    HV, V = v_RTHV.shape[2:]
    if stash is None:
        stash = empty_stash(R, T, HK, HV, K, V, k_RTHK.dtype, v_RTHV.device)
    out = launch_verify(
        (q_RTHK, k_RTHK, v_RTHV, g_RTH, beta_RTH),
        state,
        state_indices_R,
        num_nodes_R,
        ancestors_RTW,
        scale,
        qk_l2norm,
        stash_rows=(stash.k_RTHK, stash.v_RTHV),
        stash_gates=(stash.g_RTH, stash.beta_RTH),
        A_log=A_log,
        dt_bias=dt_bias,
        max_depth=max_depth,
        out=out,
        pending=pending,
        tiling=tiling,
    )
    return out, replace(stash, qk_l2norm=qk_l2norm)


def launch_verify(
    rows: tuple[Tensor, Tensor, Tensor, Tensor, Tensor],
    state: Tensor,
    state_indices_R: Tensor,
    num_nodes_R: Tensor,
    ancestors_RTW: Tensor,
    scale: float,
    qk_l2norm: bool,
    *,
    stash_rows: tuple[Tensor, Tensor] | None,
    stash_gates: tuple[Tensor, Tensor],
    A_log: Tensor | None,
    dt_bias: Tensor | None,
    max_depth: int | None,
    out: Tensor | None,
    tiling: Tiling | None,
    pending: GdnPending | None = None,
) -> Tensor:
    """Launch the kernel into the stash buffers given: k and v (or neither), and the gates.

    Raises:
        ValueError: head dim, number of rows, dtype, stride or device that the kernel does not take.
    """
    op = "gdn_tree_verify"
    q, k, v, g, beta = rows
    R, T, HK, K = k.shape
    HV, V = v.shape[2:]
    check_supported(op, q, k, v, state)
    if T > MAX_ROWS:
        refuse(op, f"the triton backend takes at most {MAX_ROWS} rows, got {T}")
    if out is None:
        out = torch.empty((R, T, HV, V), dtype=v.dtype, device=v.device)
    if out.numel() == 0:
        return out
    q, k, v = rows_aligned(q), rows_aligned(k), rows_aligned(v)
    if g.stride() != beta.stride() or g.stride(-1) != 1:
        g, beta = g.contiguous(), beta.contiguous()
    if ancestors_RTW.stride(-1) != 1:
        ancestors_RTW = ancestors_RTW.contiguous()
    ancestors = ancestors_RTW.view(torch.int32)
    stash_k, stash_v = stash_rows or (out, out)

    # Halves are too coarse for rows of any length.
    precise = q.dtype == torch.float32 or not qk_l2norm
    if tiling is None:
        capability = 9 if INTERPRETED else torch.cuda.get_device_capability(q.device)[0]
        dtype = torch.float32 if precise else q.dtype
        tiling = choose_tiling(R, T, HV, V, K, dtype, capability)
    if pending is not None:
        check_pending(op, pending, k, v, (*(stash_rows or ()), *stash_gates))
    arguments_of_pending, pending_norm, moved = arguments(pending, g)
    pending_columns, hold = held(K, tiling.block_k, state.dtype)
    levels, by_depth = levels_of(tiling.block_t, T, max_depth)
    tree_verify_kernel[(V // tiling.block_v, R * HV)](
        q,
        k,
        v,
        g,
        beta,
        g if A_log is None else A_log,
        g if dt_bias is None else dt_bias,
        state,
        state_indices_R.contiguous(),
        num_nodes_R.contiguous(),
        ancestors,
        out,
        stash_k,
        stash_v,
        *stash_gates,
        *arguments_of_pending,
        scale,
        T,
        *q.stride()[:2],
        *k.stride()[:2],
        *v.stride()[:2],
        *g.stride()[:2],
        *ancestors.stride()[:2],
        STATE_STRIDE=state.stride(0),
        HK=HK,
        HV=HV,
        K=K,
        V=V,
        BT=tiling.block_t,
        NB=triton.cdiv(T, tiling.block_t),
        BV=tiling.block_v,
        BK=tiling.block_k,
        LEVELS=levels,
        BY_DEPTH=by_depth,
        RAW_GATES=A_log is not None,
        L2NORM=qk_l2norm,
        STASH_ROWS=stash_rows is not None,
        WHOLE=tiling.block_k == K,
        PRECISE=precise,
        WIDEN=INTERPRETED and q.dtype == torch.bfloat16,
        NATIVE=not INTERPRETED,
        PENDING=pending is not None,
        PENDING_BK=pending_columns,
        PENDING_L2NORM=pending_norm,
        MOVED=moved,
        HELD=pending is not None and hold,
        num_warps=tiling.num_warps,
        num_stages=tiling.num_stages,
        **({} if tiling.max_registers is None else {"maxnreg": tiling.max_registers}),
    )
    return out


def empty_stash(
    R: int, T: int, HK: int, HV: int, K: int, V: int, dtype: torch.dtype, device: torch.device
) -> GdnTritonStash:
    """Buffers for the stash of R trees of T rows, for a caller that reuses them."""
    return GdnTritonStash(
        torch.empty((R, T, HK, K), dtype=dtype, device=device),
        torch.empty((R, T, HV, V), dtype=dtype, device=device),
        torch.empty((R, T, HV), dtype=torch.float32, device=device),
        torch.empty((R, T, HV), dtype=torch.float32, device=device),
    )


def rows_aligned(x: Tensor) -> Tensor:
    """`x` with dense heads and rows that start at 16 bytes; copied only where it is not so yet."""
    heads, dim = x.shape[-2:]
    dense = x.stride(-1) == 1 and (heads == 1 or x.stride(-2) == dim)
    aligned = x.data_ptr() % 16 == 0 and all(s * x.itemsize % 16 == 0 for s in x.stride()[:-2])
    return x if dense and aligned else x.contiguous()


def check_supported(op: str, q: Tensor, k: Tensor, v: Tensor, state: Tensor) -> None:
    """Refuse what the kernels of this package do not take."""

    def unsupported(line: str) -> NoReturn:
        refuse(op, f'the triton backend {line}: use backend="reference"')

    if v.device.type != "cuda" and not INTERPRETED:
        unsupported(f"cannot run on {v.device.type} tensors without TRITON_INTERPRET=1")
    K, V = k.shape[-1], v.shape[-1]
    if K not in HEAD_DIMS or V not in HEAD_DIMS:
        unsupported(f"takes head dims {HEAD_DIMS}, got K = {K} and V_h = {V}")
    if v.dtype not in DTYPES or not q.dtype == k.dtype == v.dtype:
        unsupported(
            "takes q, k and v in one of float16, bfloat16 and float32, "
            f"got {q.dtype}, {k.dtype} and {v.dtype}"
        )
    if state.dtype not in STATE_DTYPES:
        unsupported(f"takes states in float32 or bfloat16, got {state.dtype}")
    if state.stride()[1:] != (V * K, K, 1):
        unsupported(f"needs states that are dense within a slot, strides are {state.stride()}")
