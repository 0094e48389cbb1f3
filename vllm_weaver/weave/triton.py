# SPDX-License-Identifier: Apache-2.0
# mypy: disable-error-code="no-untyped-def"
"""The two kernels that join tree growth to the adapter's arithmetic.

`start_kernel` begins a step: the prefix rows' inputs and the root. `score_and_grow_kernel` ends a
round: candidates' scores, and then, in the last program of each request, growth and the inputs of
the nodes to expand next. In between stand the adapter's own kernels.

Shape legend as in `vllm_weaver.tree.triton` and `vllm_weaver.adapter`; E is the width of a node's
input row (r with projected tables, else e); entry n = r * G + g is the g-th node of request r.
"""

import triton
import triton.language as tl

from vllm_weaver.adapter.triton import (
    let_next_start,
    norm_scale,
    pool_log_softmax,
    wait_for_previous,
)
from vllm_weaver.ops.noise.drawn import drawn
from vllm_weaver.tree.triton import frontier_of, place_best, place_root, push_children, tree_of
from vllm_weaver.weave.arguments import Entries
from vllm_weaver.weave.entries_triton import prepare_nodes, row_of
from vllm_weaver.weave.spine_triton import grow_lines, place_spine


@triton.jit
def start_kernel(
    h_ver_ptr,
    h_draft,
    roots_ptr,
    prefix_x_ptr,
    prefix_scale_ptr,
    prefix_squares_ptr,
    h_ver_stride_r,
    growth,
    WIDTH: tl.constexpr,
    SPINE: tl.constexpr,
    OVERLAP: tl.constexpr,
    sizes: tl.constexpr,
):
    """Grid (D + 2, R): the prefix rows of a request times the weight of their norm, with their
    squares; then its root, with SPINE also its spine.

    Hidden states of an inert request (root below 0) are not read: its rows are zeros.
    """
    T: tl.constexpr = sizes.T
    W: tl.constexpr = sizes.W
    D: tl.constexpr = sizes.D
    if OVERLAP:
        wait_for_previous()
        let_next_start()
    t = tl.program_id(0)
    r = tl.program_id(1)
    token = tl.load(roots_ptr + r).to(tl.int32)
    live = (token >= 0).to(tl.int32)
    if t <= D:
        row = r * (D + 1) + t
        source = h_ver_ptr + r.to(tl.int64) * h_ver_stride_r
        if t > 0:
            source = row_of(h_draft, r.to(tl.int64), (t - 1).to(tl.int64))
        k = tl.arange(0, triton.next_power_of_2(WIDTH))
        x = tl.load(source + k, mask=k < WIDTH * live, other=0.0).to(tl.float32)
        scaled = x * tl.load(prefix_scale_ptr + k, mask=k < WIDTH, other=0.0).to(tl.float32)
        at = prefix_x_ptr + row.to(tl.int64) * WIDTH + k
        tl.store(at, scaled.to(prefix_x_ptr.dtype.element_ty), mask=k < WIDTH)
        tl.store(prefix_squares_ptr + row, tl.sum(x * x, 0))
    else:
        g = tl.arange(0, triton.next_power_of_2(sizes.G))
        none = tl.zeros_like(g)
        rows = none
        tokens = none + token
        tree = tree_of(growth.trees, r, T, W)
        if SPINE:
            rows = g
            spine = growth.spine + r * D
            above = spine + g - 1
            tokens = tl.where(g > 0, tl.load(above, mask=(g > 0) & (g < D), other=0), token)
            live = live * D
            place_spine(live, token, spine, tree, growth.row_scores + r * T, T, W)
        else:
            place_root(token, tree, T, W)
        prepare_nodes(
            *(r, g < live, rows, tokens, rows, none.to(tl.float32), none, rows),
            *(growth, sizes.G, sizes),
        )


@triton.jit
def _score_candidates(
    n,
    r,
    block,
    node,
    depth,
    query,
    pool_rows_ptr,
    ids,
    logits,
    scores_ptr,
    N,
    P: tl.constexpr,
    BP: tl.constexpr,
    K: tl.constexpr,
    BK: tl.constexpr,
    J: tl.constexpr,
):
    """Scores of a block of the candidates of entry n's node: the drafter's logit plus the product
    of the candidate's row [K] with the node's query; with J > 0 the query is normed first.
    """
    if node >= 0:
        p = block * BP + tl.arange(0, BP)
        pool = row_of(ids, r.to(tl.int64), depth.to(tl.int64))
        token = tl.load(pool + p, mask=p < P, other=-1).to(tl.int64)
        if J > 0:
            one = n + tl.zeros((1,), tl.int32)
            JB: tl.constexpr = triton.next_power_of_2(J)
            scale = norm_scale(query.squares, one, one < N, N, query.eps, J, JB, K)
        rows = pool_rows_ptr + token[:, None] * K
        acc = tl.zeros((BP, BK), tl.float32)
        # Unrolled, so that the rows are all on their way at once.
        for start in tl.static_range(0, K, BK):
            k = start + tl.arange(0, BK)
            x = tl.load(query.rows + n * K + k, mask=k < K, other=0.0)
            if J > 0:
                weight = tl.load(query.norm_weight + k, mask=k < K, other=0.0).to(tl.float32)
                bias = tl.load(query.norm_bias + k, mask=k < K, other=0.0).to(tl.float32)
                x = x * scale * weight + bias
            mask = (token >= 0)[:, None] & (k < K)[None, :]
            w = tl.load(rows + k[None, :], mask=mask, other=0.0)
            acc += w.to(tl.float32) * x[None, :]
        given = row_of(logits, r.to(tl.int64), depth.to(tl.int64))
        score = tl.load(given + p, mask=p < P, other=0.0).to(tl.float32)
        score = tl.where(token >= 0, score + tl.sum(acc, 1), float("-inf"))
        tl.store(scores_ptr + n * P + p, score, mask=p < P)


@triton.jit
def _candidates(
    r,
    own,
    ids,
    scores_ptr,
    noise,
    weight,
    penalty,
    HALVINGS: tl.constexpr,
    P: tl.constexpr,
    G: tl.constexpr,
):
    """Log-probabilities and ids of the children of request r's entries, [GB, S, L], and [GB]
    pointers at their pools.

    With noise, log-probabilities are those of being drawn by a sampler of that noise
    (`ops.noise.drawn`).
    """
    GB: tl.constexpr = triton.next_power_of_2(G)
    PB: tl.constexpr = triton.next_power_of_2(P)
    n = r * G + tl.arange(0, GB)
    L: tl.constexpr = PB if PB < 128 else 128
    S: tl.constexpr = PB // L
    p = tl.arange(0, S)[None, :, None] * L + tl.arange(0, L)[None, None, :]
    expanded = own.node >= 0
    mask = expanded[:, None, None] & (p < P)
    scores = scores_ptr + n[:, None, None] * P + p
    logits = tl.load(scores, mask=mask, other=float("-inf"), cache_modifier=".cg")
    pools = row_of(ids, r.to(tl.int64), own.depth.to(tl.int64))
    tokens = tl.load(pools[:, None, None] + p, mask=mask, other=-1)
    log_probs = pool_log_softmax(logits)
    if noise is not None:
        rows = row_of(noise.noise, r.to(tl.int64), own.depth.to(tl.int64)[:, None])
        p = tl.arange(0, PB)[None, :]
        values = tl.load(rows + p, mask=expanded[:, None] & (p < P), other=0.0)
        log_probs = drawn(
            *(tl.reshape(log_probs, (GB, PB)), values),
            *(tl.load(noise.temperature + r), tl.load(noise.top_k + r)),
            *(tl.load(noise.top_p + r), tl.load(noise.min_p + r), P, weight, penalty, HALVINGS),
        )
        log_probs = tl.reshape(log_probs, (GB, S, L))
    return log_probs, tokens, pools


@triton.jit
def _grow(
    r,
    own,
    log_probs,
    ids,
    pools,
    growth,
    first,
    LIMIT: tl.constexpr,
    sizes: tl.constexpr,
):
    """Growth of request r by its entries `own`, each [GB], and `_candidates`.

    The children go to the frontier from place `first` on; the G best candidates of the whole
    frontier are placed, as far as there are rows below LIMIT, and prepared for the next round.
    """
    G: tl.constexpr = sizes.G
    frontier = frontier_of(growth.frontiers, r, sizes.F)
    tree = tree_of(growth.trees, r, sizes.T, sizes.W)
    push_children(
        *(log_probs, ids, own.node >= 0, own.node < -1, own.node, own.score, pools),
        *(frontier, first, G, sizes.C),
    )
    tl.debug_barrier()
    live, row, token, depth, total, parent, placed = place_best(
        frontier, first + G * sizes.C, tree, LIMIT, G, sizes.F, sizes.W
    )
    tl.store(growth.row_scores + r * sizes.T + row, total, mask=live)
    # A full tree has no use for further children.
    leaf_depth = sizes.D * (placed < LIMIT).to(tl.int32)
    prepare_nodes(
        *(r, live & (depth < leaf_depth), row, token, depth, total, parent, row * 0),
        *(growth, G, sizes),
    )


@triton.jit(do_not_specialize=["first", "first_row"])
def score_and_grow_kernel(
    query,
    pool_rows_ptr,
    ids,
    logits,
    noise,
    scores_ptr,
    ticket_ptr,
    own,
    growth,
    first,
    first_row,
    N,
    weight,
    penalty,
    HALVINGS: tl.constexpr,
    BP: tl.constexpr,
    K: tl.constexpr,
    BK: tl.constexpr,
    J: tl.constexpr,
    LIMIT: tl.constexpr,
    OWN_LINE: tl.constexpr,
    WIDTH: tl.constexpr,
    LINE: tl.constexpr,
    OVERLAP: tl.constexpr,
    sizes: tl.constexpr,
):
    """Grid (blocks of P, N = R * G): `_score_candidates`; growth in a request's last program, by
    `_grow` or, where the entries are lines of OWN_LINE nodes, by `grow_lines`.

    `own` are the entries of this round.
    """
    P: tl.constexpr = sizes.P
    G: tl.constexpr = sizes.G
    if OVERLAP:
        wait_for_previous()
    n = tl.program_id(1)
    r = n // G
    # For growth, should this be the program that does it: its loads wait for each other enough.
    g = tl.arange(0, triton.next_power_of_2(G))
    mine = Entries(
        tl.load(own.node + r * G + g, mask=g < G, other=-1),
        tl.load(own.depth + r * G + g, mask=g < G, other=0),
        tl.load(own.score + r * G + g, mask=g < G, other=0.0),
    )
    depth = tl.load(own.depth + n)
    _score_candidates(
        *(n, r, tl.program_id(0), tl.load(own.node + n), depth, query, pool_rows_ptr),
        *(ids, logits, scores_ptr, N, P, BP, K, BK, J),
    )
    if OVERLAP:
        let_next_start()
    # The barrier puts all threads' stores before the ticket, which publishes them.
    tl.debug_barrier()
    if tl.atomic_add(ticket_ptr + r, 1) == tl.num_programs(0) * G - 1:
        tl.store(ticket_ptr + r, 0)
        log_probs, tokens, pools = _candidates(
            r, mine, ids, scores_ptr, noise, weight, penalty, HALVINGS, P, G
        )
        if OWN_LINE > 0:
            grow_lines(
                *(r, mine, log_probs, tokens, pools, growth, first, first_row),
                *(OWN_LINE, WIDTH, LINE, sizes),
            )
        else:
            _grow(r, mine, log_probs, tokens, pools, growth, first, LIMIT, sizes)
