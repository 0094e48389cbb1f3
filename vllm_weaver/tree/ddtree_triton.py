# SPDX-License-Identifier: Apache-2.0
# mypy: disable-error-code="no-untyped-def, assignment, misc"
"""DDTree in one Triton launch: a warp per request, one step per node.

The definition is `vllm_weaver.tree.ddtree`: the same trees, bit for bit. Instead of sorting all
candidates level by level, a program runs the heap that defines the tree. Its frontier is one
candidate per placed node, the best child that the node has not got yet, and lives in the lanes'
registers.

Order at equal score. The candidate of node p stands after p and all that is placed below p in
lexicographic order, and before what follows p's subtree; of nested nodes the deeper one's candidate
comes first. That is the postorder of the placed nodes, so a node's place in postorder breaks ties.
A new node is its parent's last child and has none: it takes its parent's place, and the parent and
all after it move up by one.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from vllm_weaver.ops.dispatch import refuse
from vllm_weaver.tree.draft_tree import DraftTree, num_words

LEVELS = 16
"""Levels of the marginals looked at together, before the first step."""
COLUMNS = 32
"""Ranks of them."""

_INFINITY = tl.constexpr(0x7F800000)
_MAGNITUDE = tl.constexpr(0x7FFFFFFF)
_NO_KEY = tl.constexpr(0x7FFFFFFF)


@triton.jit
def load_marginals(log_probs, ids, stride_d, stride_p, ids_d, ids_p, level, rank, mask):
    """Log-probabilities at (level, rank), -inf where none may be placed, and whether one may."""
    value = tl.load(log_probs + level * stride_d + rank * stride_p, mask=mask, other=0.0)
    token = tl.load(ids + level * ids_d + rank * ids_p, mask=mask, other=-1)
    value = value.to(tl.float32)
    usable = mask & (value > float("-inf")) & (token >= 0)
    return tl.where(usable, tl.minimum(value, 0.0), float("-inf")), usable


@triton.jit
def ddtree_kernel(
    log_probs_ptr,
    ids_ptr,
    roots_ptr,
    tokens_ptr,
    parents_ptr,
    depths_ptr,
    num_nodes_ptr,
    ancestors_ptr,
    budget,
    levels,
    ranks,
    stride_r,
    stride_d,
    stride_p,
    ids_r,
    ids_d,
    ids_p,
    roots_stride,
    W: tl.constexpr,
    BT: tl.constexpr,
    BP: tl.constexpr,
    BL: tl.constexpr,
    BC: tl.constexpr,
):
    """Grid (R,). At most 256 rows, 255 levels and 255 ranks: each fits a byte of a key."""
    r = tl.program_id(0).to(tl.int64)
    log_probs = log_probs_ptr + r * stride_r
    ids = ids_ptr + r * ids_r
    row = tl.arange(0, BT)
    column = tl.arange(0, BP)

    # Levels from the first one without a candidate on are out of reach, and few pools have gaps.
    # Looking also brings the tables into the L1 cache, where the steps find them.
    reach = levels
    gaps = 0
    for low in range(0, levels, BL):
        level = low + tl.arange(0, BL)
        found = tl.zeros([BL, BC], tl.int32)
        last = tl.zeros([BL, BC], tl.int32)
        for left in range(0, ranks, BC):
            rank = left + tl.arange(0, BC)
            mask = (level < levels)[:, None] & (rank < ranks)[None, :]
            _, usable = load_marginals(
                log_probs,
                ids,
                stride_d,
                stride_p,
                ids_d,
                ids_p,
                level[:, None],
                rank[None, :],
                mask,
            )
            found += usable.to(tl.int32)
            last = tl.where(usable, rank[None, :] + 1, last)
        found_L, last_L = tl.sum(found, 1), tl.max(last, 1)
        gaps = tl.maximum(gaps, tl.max((found_L != last_L).to(tl.int32), 0))
        empty = (last_L == 0) & (level < levels)
        reach = tl.minimum(reach, tl.min(tl.where(empty, level, levels), 0))

    # Per placed node: its own place, and the rank and score of the child that it may get next.
    depth = tl.zeros([BT], tl.int32)
    rank = tl.zeros([BT], tl.int32)
    parent = tl.full([BT], -1, tl.int32)
    score = tl.zeros([BT], tl.float32)
    post = tl.zeros([BT], tl.int32)
    mask = column < tl.where(reach > 0, ranks, 0)
    value, usable = load_marginals(
        log_probs, ids, stride_d, stride_p, ids_d, ids_p, 0, column, mask
    )
    first_rank = tl.min(tl.where(usable, column, ranks), 0)
    next_rank = tl.where(row == 0, first_rank, ranks)
    # Without its sign, the bit pattern of a float of at most 0 orders as an integer.
    value, usable = load_marginals(
        log_probs, ids, stride_d, stride_p, ids_d, ids_p, depth, next_rank, next_rank < ranks
    )
    magnitude = value.to(tl.int32, bitcast=True) & _MAGNITUDE

    count = 1
    best = tl.min(magnitude, 0)
    while (count <= budget) & (best < _INFINITY):
        key = ((post - 128) << 24) | (row << 16) | (depth << 8) | next_rank
        key = tl.min(tl.where(magnitude == best, key, _NO_KEY), 0)
        its_post = (key >> 24) + 128
        above = (key >> 16) & 255
        its_depth = (key >> 8) & 255
        its_rank = key & 255

        is_parent = row == above
        is_new = row == count
        post = tl.where(is_new, its_post, post + (post >= its_post).to(tl.int32))
        parent = tl.where(is_new, above, parent)
        depth = tl.where(is_new, its_depth + 1, depth)
        rank = tl.where(is_new, its_rank, rank)
        score = tl.where(is_new, -best.to(tl.float32, bitcast=True), score)
        next_rank = tl.where(is_new, 0, tl.where(is_parent, its_rank + 1, next_rank))

        may = (is_new | is_parent) & (depth < reach) & (next_rank < ranks)
        value, usable = load_marginals(
            log_probs, ids, stride_d, stride_p, ids_d, ids_p, depth, next_rank, may
        )
        if gaps > 0:
            # Go on to the next entry that may be placed.
            mask = (column < ranks) & (column > its_rank)
            _, fits = load_marginals(
                log_probs, ids, stride_d, stride_p, ids_d, ids_p, its_depth, column, mask
            )
            sibling = tl.min(tl.where(fits, column, ranks), 0)
            mask = column < tl.where(its_depth + 1 < reach, ranks, 0)
            _, fits = load_marginals(
                log_probs, ids, stride_d, stride_p, ids_d, ids_p, its_depth + 1, column, mask
            )
            child = tl.min(tl.where(fits, column, ranks), 0)
            next_rank = tl.where(is_new, child, tl.where(is_parent, sibling, next_rank))
            value, usable = load_marginals(
                log_probs,
                ids,
                stride_d,
                stride_p,
                ids_d,
                ids_p,
                depth,
                next_rank,
                may & (next_rank < ranks),
            )
        total = (score + value).to(tl.int32, bitcast=True) & _MAGNITUDE
        magnitude = tl.where(is_new | is_parent, total, magnitude)
        best = tl.min(magnitude, 0)
        count += 1

    num_rows = budget + 1
    inside = row < num_rows
    live = row < count
    node = live & (row > 0)
    token = tl.load(ids + (depth - 1) * ids_d + rank * ids_p, mask=node, other=0).to(tl.int32)
    root = tl.load(roots_ptr + r * roots_stride).to(tl.int32)
    place = r * num_rows + row
    tl.store(tokens_ptr + place, tl.where(row == 0, root, token), mask=inside)
    tl.store(parents_ptr + place, parent, mask=inside)
    tl.store(depths_ptr + place, depth, mask=inside)
    tl.store(num_nodes_ptr + r, count)

    # Other lanes' parents are read back from memory.
    tl.debug_barrier()
    deepest = tl.max(depth, 0)
    one = tl.full([BT], 1, tl.int64)
    for word in tl.static_range(W):
        bits = tl.where(live & (row // 64 == word), one << (row % 64).to(tl.int64), 0)
        up = parent
        for _ in range(0, deepest):
            bit = tl.where(up // 64 == word, one << (up % 64).to(tl.int64), 0)
            bits = bits | tl.where(up >= 0, bit, 0)
            up = tl.load(parents_ptr + r * num_rows + up, mask=up >= 0, other=-1)
        tl.store(ancestors_ptr + place * W + word, bits, mask=inside)


INTERPRETED = not isinstance(ddtree_kernel, triton.runtime.JITFunction)


def build_ddtree_triton(
    log_probs_RDP: Tensor, ids_RDP: Tensor, root_tokens_R: Tensor, budget: int
) -> DraftTree:
    """Launch the kernel; tensors as in `vllm_weaver.tree.build_ddtree`, already checked.

    Raises:
        ValueError: a device that Triton cannot run on.
    """
    device = log_probs_RDP.device
    if device.type != "cuda" and not INTERPRETED:
        refuse(
            "build_ddtree",
            f"the triton backend cannot run on {device.type} tensors without "
            'TRITON_INTERPRET=1: use backend="reference"',
        )
    num_requests, max_depth, pool = log_probs_RDP.shape
    num_rows, words = budget + 1, num_words(budget + 1)
    tree = DraftTree(
        tokens=torch.empty((num_requests, num_rows), dtype=torch.int32, device=device),
        parents=torch.empty((num_requests, num_rows), dtype=torch.int32, device=device),
        depths=torch.empty((num_requests, num_rows), dtype=torch.int32, device=device),
        num_nodes=torch.empty((num_requests,), dtype=torch.int32, device=device),
        ancestors=torch.empty((num_requests, num_rows, words), dtype=torch.int64, device=device),
    )
    if num_requests == 0:
        return tree
    ranks = min(pool, budget)
    ddtree_kernel[(num_requests,)](
        log_probs_RDP.detach(),
        ids_RDP,
        root_tokens_R,
        tree.tokens,
        tree.parents,
        tree.depths,
        tree.num_nodes,
        tree.ancestors,
        budget,
        min(max_depth, budget),
        ranks,
        *log_probs_RDP.stride(),
        *ids_RDP.stride(),
        root_tokens_R.stride(0),
        W=words,
        BT=triton.next_power_of_2(num_rows),
        BP=triton.next_power_of_2(ranks),
        BL=LEVELS,
        BC=COLUMNS,
        num_warps=1,
    )
    return tree
