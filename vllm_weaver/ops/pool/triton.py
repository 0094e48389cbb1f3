# SPDX-License-Identifier: Apache-2.0
# mypy: disable-error-code="no-untyped-def"
"""Candidate pools in Triton: one read of the logits, then a tournament in one program per row.

A row is cut into groups of 128 neighbours, and these into subgroups of 8. The first kernel reads
the logits once and leaves each group's and subgroup's maximum and each chunk's part of the sum of
exponentials. Of P groups with the best maxima, no entry outside can be among the best P, since P
entries are no worse; the same holds for subgroups. So the second kernel picks the best P groups,
the best P of their subgroups, the best P of the entries of these, and sorts them. Its work does
not depend on the values: no candidate list can overflow, whatever the row holds.

Ties need no wide keys: every list stands in the order of its columns, and a selection takes the
first of equal values.

The module knows nothing of drafters or trees. Its definition is `reference.top_pool_reference`.

Shape suffixes beyond the common legend: C chunks of a row; G groups; U subgroups.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from vllm_weaver.ops.dispatch import refuse
from vllm_weaver.ops.pool import MAX_TRITON_COUNT

SUBGROUP = 8
GROUP = 128
GROUPS_PER_CHUNK = 64
"""Groups that one program of the first kernel reads: 8192 entries, held in registers."""
SCAN_WARPS = 8
SELECT_WARPS = 16


@triton.jit
def _order(x):
    """int32 that orders as the float32 `x` does; neither NaN nor -0 may come in."""
    bits = x.to(tl.int32, bitcast=True)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


@triton.jit
def _clean(x):
    """float32 without NaN and -0."""
    x = x.to(tl.float32) + 0.0
    return tl.where(x == x, x, float("-inf"))


@triton.jit
def scan_kernel(
    logits_ptr,
    group_ptr,
    subgroup_ptr,
    top_ptr,
    total_ptr,
    V,
    stride_n,
    G,
    GROUPS: tl.constexpr,
    SUBS: tl.constexpr,
    SUB: tl.constexpr,
):
    """Grid (chunks, N): a chunk's maxima, and its maximum and sum of exponentials.

    Maxima keep the dtype of the logits, of which they are a selection.
    """
    chunk = tl.program_id(0)
    n = tl.program_id(1).to(tl.int64)
    sub = chunk * GROUPS * SUBS + tl.arange(0, GROUPS * SUBS)
    column = sub[:, None] * SUB + tl.arange(0, SUB)[None, :]
    x = tl.load(
        logits_ptr + n * stride_n + column,
        mask=column < V,
        other=float("-inf"),
        eviction_policy="evict_first",
    )
    x = _clean(x)
    best_sub = tl.max(x, 1)
    best_group = tl.max(tl.reshape(best_sub, (GROUPS, SUBS)), 1)
    top = tl.max(best_group, 0)
    base = tl.where(tl.abs(top) == float("inf"), 0.0, top)
    total = tl.sum(tl.sum(tl.exp(x - base), 1), 0)

    group = chunk * GROUPS + tl.arange(0, GROUPS)
    kind = group_ptr.dtype.element_ty
    tl.store(group_ptr + n * G + group, best_group.to(kind), mask=group < G)
    tl.store(subgroup_ptr + n * G * SUBS + sub, best_sub.to(kind), mask=sub < G * SUBS)
    part = n * tl.num_programs(0) + chunk
    tl.store(top_ptr + part, top)
    tl.store(total_ptr + part, total)


@triton.jit
def _keys(x, present, NARROW: tl.constexpr):
    """Keys of values; below all of them where there is no value. bfloat16 needs half the bits."""
    key = _order(_clean(x))
    if NARROW:
        key = key >> 16
    return tl.where(present, key, -0x80000000)


@triton.jit
def _select(key, count, NARROW: tl.constexpr):
    """Places, in a list of `count`, of the best keys in their own order; -1 for the others.

    The threshold is found two bits at a time: the sums of three comparisons in one reduction.
    """
    # No sum of these leaves int32.
    unit = tl.full((), 1 << 14 if NARROW else 1 << 30, tl.int32)
    threshold = tl.full((), -0x8000 if NARROW else -0x80000000, tl.int32)
    for _ in range(8 if NARROW else 16):
        first = threshold + unit
        second = first + unit
        third = second + unit
        above = (key >= first).to(tl.int64)
        above += (key >= second).to(tl.int64) << 20
        above += (key >= third).to(tl.int64) << 40
        counts = tl.sum(above, 0)
        threshold += tl.where((counts & 0xFFFFF) >= count, unit, 0)
        threshold += tl.where(((counts >> 20) & 0xFFFFF) >= count, unit, 0)
        threshold += tl.where((counts >> 40) >= count, unit, 0)
        unit = unit >> 2
    greater = key > threshold
    equal = key == threshold
    both = greater.to(tl.int32) + (equal.to(tl.int32) << 16)
    before = tl.cumsum(both, 0) - both
    wanted = count - tl.sum(greater.to(tl.int32), 0)
    equal_before = before >> 16
    keep = greater | (equal & (equal_before < wanted))
    place = (before & 0xFFFF) + tl.minimum(equal_before, wanted)
    return tl.where(keep, place, -1)


@triton.jit
def select_kernel(
    logits_ptr,
    group_ptr,
    subgroup_ptr,
    top_ptr,
    total_ptr,
    list_ptr,
    ids_ptr,
    best_ptr,
    log_probs_ptr,
    V,
    stride_n,
    G,
    C,
    P,
    P1: tl.constexpr,
    PB: tl.constexpr,
    GB: tl.constexpr,
    CB: tl.constexpr,
    SUBS: tl.constexpr,
    SUB: tl.constexpr,
    NARROW: tl.constexpr,
):
    """Grid (N): the best P of a row; P1 = min(P, G), PB, GB and CB are P, G and C rounded up.

    `list` [N, 3, PB] takes the chosen groups, subgroups and columns; a program reads only what it
    wrote itself before a barrier.
    """
    n = tl.program_id(0).to(tl.int64)
    groups = list_ptr + n * 3 * PB
    subs = groups + PB
    columns = subs + PB

    g = tl.arange(0, GB)
    x = tl.load(group_ptr + n * G + g, mask=g < G, other=0.0)
    place = _select(_keys(x, g < G, NARROW), P1, NARROW)
    tl.store(groups + place, g, mask=place >= 0)
    tl.debug_barrier()

    i = tl.arange(0, PB * SUBS)
    present = i // SUBS < P1
    group = tl.load(groups + i // SUBS, mask=present, other=0)
    u = group * SUBS + i % SUBS
    # The last group's subgroups may lie past the row.
    present &= u * SUB < V
    x = tl.load(subgroup_ptr + n * G * SUBS + u, mask=present, other=0.0)
    chosen = tl.minimum(P, tl.sum(present.to(tl.int32), 0))
    place = _select(_keys(x, present, NARROW), chosen, NARROW)
    tl.store(subs + place, u, mask=place >= 0)
    tl.debug_barrier()

    j = tl.arange(0, PB * SUB)
    present = j // SUB < chosen
    u = tl.load(subs + j // SUB, mask=present, other=0)
    column = u * SUB + j % SUB
    present &= column < V
    x = tl.load(logits_ptr + n * stride_n + column, mask=present, other=0.0)
    place = _select(_keys(x, present, NARROW), P, NARROW)
    tl.store(columns + place, column, mask=place >= 0)
    tl.debug_barrier()

    p = tl.arange(0, PB)
    column = tl.load(columns + p, mask=p < P, other=0)
    x = _clean(tl.load(logits_ptr + n * stride_n + column, mask=p < P, other=0.0))
    key = (_order(x).to(tl.int64) << 32) | (0x7FFFFFFF - column).to(tl.int64)
    key = tl.where(p < P, key, -0x8000000000000000)
    key = tl.sort(key, descending=True)
    column = 0x7FFFFFFF - (key & 0xFFFFFFFF).to(tl.int32)
    high = (key >> 32).to(tl.int32)
    x = tl.where(high < 0, high ^ 0x7FFFFFFF, high).to(tl.float32, bitcast=True)

    c = tl.arange(0, CB)
    tops = tl.load(top_ptr + n * C + c, mask=c < C, other=float("-inf"))
    totals = tl.load(total_ptr + n * C + c, mask=c < C, other=0.0)
    top = tl.max(tops, 0)
    base = tl.where(tl.abs(top) == float("inf"), 0.0, top)
    log_total = base + tl.log(tl.sum(totals * tl.exp(tops - base), 0))
    log_prob = tl.where(x == float("-inf"), x, x - log_total)
    out = n * P + p
    tl.store(ids_ptr + out, column.to(tl.int64), mask=p < P)
    tl.store(best_ptr + out, x, mask=p < P)
    tl.store(log_probs_ptr + out, log_prob, mask=p < P)


INTERPRETED = not isinstance(scan_kernel, triton.runtime.JITFunction)


def top_pool_triton(
    logits_NV: Tensor, count: int, out: tuple[Tensor, Tensor, Tensor] | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Launch both kernels; tensors as in `vllm_weaver.ops.pool.top_pool`.

    Raises:
        ValueError: a device that Triton cannot run on, a row that is not contiguous, a row or a
            count that is too long.
    """
    if logits_NV.device.type != "cuda" and not INTERPRETED:
        refuse(
            "top_pool",
            f"the triton backend cannot run on {logits_NV.device.type} tensors without "
            'TRITON_INTERPRET=1: use backend="reference"',
        )
    if logits_NV.stride(1) != 1:
        refuse("top_pool", f"the triton backend needs unit stride along V: {logits_NV.stride()}")
    N, V = logits_NV.shape
    if count > MAX_TRITON_COUNT:
        refuse("top_pool", f"the triton backend takes a count to {MAX_TRITON_COUNT}, not {count}")
    if V >= 2**21:
        refuse("top_pool", f"the triton backend takes rows of fewer than 2^21 entries, not {V}")
    device = logits_NV.device
    G = triton.cdiv(V, GROUP)
    C = triton.cdiv(G, GROUPS_PER_CHUNK)
    subs = GROUP // SUBGROUP
    rounded = max(16, triton.next_power_of_2(count))
    group_NG = torch.empty(N, G, dtype=logits_NV.dtype, device=device)
    subgroup_NU = torch.empty(N, G * subs, dtype=logits_NV.dtype, device=device)
    top_NC, total_NC = torch.empty(2, N, C, dtype=torch.float32, device=device)
    lists = torch.empty(N, 3, rounded, dtype=torch.int32, device=device)
    if out is None:
        ids_NP = torch.empty(N, count, dtype=torch.int64, device=device)
        best_NP, log_probs_NP = torch.empty(2, N, count, dtype=torch.float32, device=device)
    else:
        ids_NP, best_NP, log_probs_NP = out
    if N == 0:
        return ids_NP, best_NP, log_probs_NP
    scan_kernel[(C, N)](
        *(logits_NV, group_NG, subgroup_NU, top_NC, total_NC, V, logits_NV.stride(0), G),
        GROUPS=GROUPS_PER_CHUNK,
        SUBS=subs,
        SUB=SUBGROUP,
        num_warps=SCAN_WARPS,
    )
    select_kernel[(N,)](
        *(logits_NV, group_NG, subgroup_NU, top_NC, total_NC, lists),
        *(ids_NP, best_NP, log_probs_NP, V, logits_NV.stride(0), G, C, count),
        P1=min(count, G),
        PB=rounded,
        GB=triton.next_power_of_2(G),
        CB=triton.next_power_of_2(C),
        SUBS=subs,
        SUB=SUBGROUP,
        NARROW=logits_NV.dtype == torch.bfloat16,
        num_warps=SELECT_WARPS,
    )
    return ids_NP, best_NP, log_probs_NP
