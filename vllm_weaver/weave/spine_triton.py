# SPDX-License-Identifier: Apache-2.0
# mypy: disable-error-code="no-untyped-def"
"""What is different in a weave of spine trees: `tree.spine_tree`'s lines, for one request.

Rows of the tree that grows are given out beforehand: the first D to the root and the spine, then
WIDTH * LINE to every round. The scores of rows that are no node stay -inf.

Shape legend as in `weave.triton`; WIDTHB is the power of two above WIDTH, and LINE is one.
"""

import triton
import triton.language as tl

from vllm_weaver.adapter.triton import let_next_start, wait_for_previous
from vllm_weaver.tree.triton import frontier_of, pop_best, push_children, tree_of
from vllm_weaver.weave.entries_triton import prepare_nodes, row_of


@triton.jit
def spine_kernel(
    ids,
    logits,
    noise,
    spine_ptr,
    weight,
    P: tl.constexpr,
    D: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Grid (D, R): the spine's token of a depth, `tree.spine_of`."""
    if OVERLAP:
        wait_for_previous()
        let_next_start()
    NONE: tl.constexpr = 0x7FFFFFFF
    d = tl.program_id(0)
    r = tl.program_id(1)
    p = tl.arange(0, triton.next_power_of_2(P))
    pool = row_of(ids, r.to(tl.int64), d)
    present = tl.load(pool + p, mask=p < P, other=-1) >= 0
    scores = tl.load(row_of(logits, r.to(tl.int64), d) + p, mask=p < P, other=float("-inf"))
    scores = scores.to(tl.float32)
    if noise is not None:
        drawn = tl.load(row_of(noise.noise, r.to(tl.int64), d) + p, mask=p < P, other=0.0)
        scores += weight * tl.load(noise.temperature + r) * drawn
    # NaN compares as false.
    scores = tl.where(present & (scores > float("-inf")), scores, float("-inf"))
    place = tl.min(tl.where(scores == tl.max(scores, 0), p, NONE), 0)
    token = tl.load(pool + place).to(tl.int32)
    tl.store(spine_ptr + r * D + d, tl.maximum(token, 0))


@triton.jit
def _bits_up_to(row, w):
    """Words w of the bits 0 to `row`: [rows, words]."""
    count = tl.minimum(tl.maximum(row[:, None] + 1 - w[None, :] * 64, 0), 64).to(tl.int64)
    one = tl.full(count.shape, 1, tl.int64)
    return tl.where(count == 64, -one, (one << tl.minimum(count, 63)) - 1)


@triton.jit
def place_spine(
    live,
    root,
    spine_ptr,
    tree,
    row_scores_ptr,
    T: tl.constexpr,
    W: tl.constexpr,
):
    """Make a tree of its root and the spine's tokens below it, `live` rows in all.

    No row has a score yet. `num_nodes` is 1, or 0 where `live` is.
    """
    TB: tl.constexpr = triton.next_power_of_2(T)
    WB: tl.constexpr = triton.next_power_of_2(W)
    t = tl.arange(0, TB)
    mask = t < T
    here = t < live
    token = tl.load(spine_ptr + t - 1, mask=here & (t > 0), other=0)
    tl.store(tree.tokens + t, tl.where(here & (t == 0), root, token), mask=mask)
    tl.store(tree.parents + t, tl.where(here, t - 1, -1), mask=mask)
    tl.store(tree.depths + t, tl.where(here, t, 0), mask=mask)
    tl.store(row_scores_ptr + t, tl.full((TB,), float("-inf"), tl.float32), mask=mask)
    w = tl.arange(0, WB)
    words = tl.where(here[:, None], _bits_up_to(t, w), 0)
    at = tree.ancestors + t[:, None] * W + w[None, :]
    tl.store(at, words, mask=mask[:, None] & (w < W)[None, :])
    tl.store(tree.num_nodes, (live > 0).to(tl.int32))


@triton.jit
def _line_scores(score, step, GB: tl.constexpr, LINE: tl.constexpr):
    """Scores of entries in lines of LINE: the first's own, then with each `step` above it."""
    e = tl.arange(0, GB)
    above = e[None, :] + 1 == e[:, None]
    total = tl.where(e % LINE == 0, score, 0.0)
    for j in range(1, LINE):
        below = tl.sum(tl.where(above, (total + step)[None, :], 0.0), 1)
        total = tl.where(e % LINE == j, below, total)
    return total


@triton.jit
def _along(x, WIDTHB: tl.constexpr, LINE: tl.constexpr):
    """`x` [WIDTHB] for every entry of its line."""
    return tl.reshape(tl.broadcast_to(x[:, None], (WIDTHB, LINE)), (WIDTHB * LINE,))


@triton.jit
def grow_lines(
    r,
    own,
    log_probs,
    ids,
    pools,
    growth,
    first,
    first_row,
    OWN_LINE: tl.constexpr,
    WIDTH: tl.constexpr,
    LINE: tl.constexpr,
    sizes: tl.constexpr,
):
    """Growth of request r by lines of OWN_LINE nodes, of whose entries only the first have `score`.

    The best C children of every node but for the one that its line goes on with go to the frontier
    from place `first` on. The WIDTH best candidates above the depth limit are placed with lines of
    LINE nodes, in rows from `first_row` on, and prepared for the next round; with less than WIDTH *
    LINE rows left, none is.
    """
    T: tl.constexpr = sizes.T
    W: tl.constexpr = sizes.W
    D: tl.constexpr = sizes.D
    G: tl.constexpr = sizes.G
    C: tl.constexpr = sizes.C
    F: tl.constexpr = sizes.F
    GB: tl.constexpr = triton.next_power_of_2(G)
    NEXT: tl.constexpr = WIDTH * LINE
    WIDTHB: tl.constexpr = triton.next_power_of_2(WIDTH)
    NEXTB: tl.constexpr = WIDTHB * LINE
    e = tl.arange(0, GB)
    node = own.node
    tree = tree_of(growth.trees, r, T, W)
    frontier = frontier_of(growth.frontiers, r, F)
    spine_ptr = growth.spine + r * D
    following = e[None, :] == e[:, None] + 1
    goes_on = tl.max(tl.where(following, node[None, :], -1), 1) >= 0
    goes_on = goes_on & (e % OWN_LINE < OWN_LINE - 1)
    on = tl.load(spine_ptr + own.depth, mask=goes_on, other=-1)
    is_next = goes_on[:, None, None] & (ids == on[:, None, None]) & (ids >= 0)
    # NaN compares as false.
    usable = is_next & (log_probs > float("-inf"))
    step = tl.where(usable, tl.minimum(log_probs, 0.0), float("-inf"))
    score = _line_scores(own.score, tl.max(tl.max(step, 1), 1), GB, OWN_LINE)
    tl.store(growth.row_scores + r * T + node, score, mask=node >= 0)

    push_children(
        *(tl.where(is_next, float("-inf"), log_probs), ids, node >= 0, own.depth + 1 >= D),
        *(node, score, pools, frontier, first, G, C),
    )
    tl.debug_barrier()
    if first_row + NEXT <= T:
        popped, place, found = pop_best(frontier.keys, first + G * C, WIDTH, F)
        token = tl.load(frontier.tokens + place, mask=popped, other=0)
        parent = tl.load(frontier.parents + place, mask=popped, other=0)
        depth = tl.load(tree.depths + parent, mask=popped, other=0) + 1
        j = tl.arange(0, NEXTB) % LINE
        row = first_row + tl.arange(0, NEXTB)
        head = _along(parent, WIDTHB, LINE)
        depth = _along(depth, WIDTHB, LINE) + j
        live = (_along(popped.to(tl.int32), WIDTHB, LINE) > 0) & (depth < D)
        below = tl.load(spine_ptr + depth - 1, mask=live & (j > 0), other=0)
        token = tl.where(j == 0, _along(token, WIDTHB, LINE), below)
        w = tl.arange(0, triton.next_power_of_2(W))
        mask = live[:, None] & (w < W)[None, :]
        words = tl.load(tree.ancestors + head[:, None] * W + w[None, :], mask=mask, other=0)
        words |= _bits_up_to(row, w) & ~_bits_up_to(row - j - 1, w)
        tl.store(tree.tokens + row, token, mask=live)
        tl.store(tree.parents + row, tl.where(j == 0, head, row - 1), mask=live)
        tl.store(tree.depths + row, depth, mask=live)
        tl.store(tree.ancestors + row[:, None] * W + w[None, :], words, mask=mask)
        prepare_nodes(
            *(r, live, row, token, depth, _along(found, WIDTHB, LINE), head, j),
            *(growth, NEXT, sizes),
        )
