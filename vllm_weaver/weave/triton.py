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
from vllm_weaver.tree.triton import place_best, place_root, push_children
from vllm_weaver.weave.entries_triton import prepare_nodes
from vllm_weaver.weave.spine_triton import grow_lines, place_spine


@triton.jit
def start_kernel(
    h_ver_ptr,
    h_draft_ptr,
    roots_ptr,
    token_rows_ptr,
    positions_ptr,
    tokens_ptr,
    parents_ptr,
    depths_ptr,
    num_nodes_ptr,
    ancestors_ptr,
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
    prefix_x_ptr,
    prefix_scale_ptr,
    prefix_squares_ptr,
    spine_ptr,
    row_scores_ptr,
    h_ver_stride_r,
    h_draft_stride_r,
    h_draft_stride_d,
    stride,
    T: tl.constexpr,
    TB: tl.constexpr,
    W: tl.constexpr,
    WB: tl.constexpr,
    D: tl.constexpr,
    DB: tl.constexpr,
    G: tl.constexpr,
    GB: tl.constexpr,
    E: tl.constexpr,
    EB: tl.constexpr,
    WIDTH: tl.constexpr,
    WIDTHB: tl.constexpr,
    SPINE: tl.constexpr,
    STREAM: tl.constexpr,
    POSITIONS: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Grid (D + 2, R): the prefix rows of a request times the weight of their norm, with their
    squares; then its root, with SPINE also its spine.

    Hidden states of an inert request (root below 0) are not read: its rows are zeros.
    """
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
            source = h_draft_ptr + (
                r.to(tl.int64) * h_draft_stride_r + (t - 1).to(tl.int64) * h_draft_stride_d
            )
        k = tl.arange(0, WIDTHB)
        x = tl.load(source + k, mask=k < WIDTH * live, other=0.0).to(tl.float32)
        scaled = x * tl.load(prefix_scale_ptr + k, mask=k < WIDTH, other=0.0).to(tl.float32)
        at = prefix_x_ptr + row.to(tl.int64) * WIDTH + k
        tl.store(at, scaled.to(prefix_x_ptr.dtype.element_ty), mask=k < WIDTH)
        tl.store(prefix_squares_ptr + row, tl.sum(x * x, 0))
    else:
        g = tl.arange(0, GB)
        none = tl.zeros((GB,), tl.int32)
        rows = none
        tokens = none + token
        if SPINE:
            rows = g
            above = spine_ptr + r * D + g - 1
            tokens = tl.where(g > 0, tl.load(above, mask=(g > 0) & (g < D), other=0), token)
            live = live * D
            place_spine(
                *(live, token, spine_ptr + r * D, tokens_ptr + r * T, parents_ptr + r * T),
                *(depths_ptr + r * T, num_nodes_ptr + r, ancestors_ptr + r * T * W),
                *(row_scores_ptr + r * T, T, TB, W, WB),
            )
        else:
            place_root(
                *(token, tokens_ptr + r * T, parents_ptr + r * T, depths_ptr + r * T),
                *(num_nodes_ptr + r, ancestors_ptr + r * T * W, T, TB, W, WB),
            )
        prepare_nodes(
            *(r, g < live, rows, tokens, rows, none.to(tl.float32), none, rows),
            *(token_rows_ptr, positions_ptr, node_ptr, depth_ptr),
            *(score_ptr, position_ptr, count_ptr, slot_ptr, path_ptr, row_paths_ptr),
            *(x_ptr, scaled_ptr, scale_ptr, squares_ptr, stride),
            *(T, D, DB, G, GB, E, EB, STREAM, POSITIONS),
        )


@triton.jit
def _score_candidates(
    n,
    r,
    block,
    query_ptr,
    norm_weight_ptr,
    norm_bias_ptr,
    query_squares_ptr,
    pool_rows_ptr,
    ids_ptr,
    logits_ptr,
    scores_ptr,
    node_ptr,
    depth_ptr,
    ids_stride_r,
    ids_stride_d,
    logits_stride_r,
    logits_stride_d,
    N,
    eps,
    P: tl.constexpr,
    BP: tl.constexpr,
    K: tl.constexpr,
    BK: tl.constexpr,
    J: tl.constexpr,
    JB: tl.constexpr,
):
    """Scores of a block of a node's candidates: the drafter's logit plus the product of the
    candidate's row [K] with the node's query; with J > 0 the query is normed first.
    """
    depth = tl.load(depth_ptr + n)
    if tl.load(node_ptr + n) >= 0:
        p = block * BP + tl.arange(0, BP)
        ids_at = r.to(tl.int64) * ids_stride_r + depth.to(tl.int64) * ids_stride_d
        ids = tl.load(ids_ptr + ids_at + p, mask=p < P, other=-1).to(tl.int64)
        if J > 0:
            one = n + tl.zeros((1,), tl.int32)
            scale = norm_scale(query_squares_ptr, one, one < N, N, eps, J, JB, K)
        rows = pool_rows_ptr + ids[:, None] * K
        acc = tl.zeros((BP, BK), tl.float32)
        # Unrolled, so that the rows are all on their way at once.
        for start in tl.static_range(0, K, BK):
            k = start + tl.arange(0, BK)
            query = tl.load(query_ptr + n * K + k, mask=k < K, other=0.0)
            if J > 0:
                norm_weight = tl.load(norm_weight_ptr + k, mask=k < K, other=0.0).to(tl.float32)
                norm_bias = tl.load(norm_bias_ptr + k, mask=k < K, other=0.0).to(tl.float32)
                query = query * scale * norm_weight + norm_bias
            mask = (ids >= 0)[:, None] & (k < K)[None, :]
            w = tl.load(rows + k[None, :], mask=mask, other=0.0)
            acc += w.to(tl.float32) * query[None, :]
        logits_at = r.to(tl.int64) * logits_stride_r + depth.to(tl.int64) * logits_stride_d
        logits = tl.load(logits_ptr + logits_at + p, mask=p < P, other=0.0).to(tl.float32)
        logits = tl.where(ids >= 0, logits + tl.sum(acc, 1), float("-inf"))
        tl.store(scores_ptr + n * P + p, logits, mask=p < P)


@triton.jit
def _candidates(
    r,
    expanded,
    own_depth,
    ids_ptr,
    scores_ptr,
    noise_ptr,
    temperature_ptr,
    top_k_ptr,
    top_p_ptr,
    min_p_ptr,
    ids_stride_r,
    ids_stride_d,
    noise_stride_r,
    noise_stride_d,
    weight,
    penalty,
    NOISE: tl.constexpr,
    HALVINGS: tl.constexpr,
    P: tl.constexpr,
    PB: tl.constexpr,
    G: tl.constexpr,
    GB: tl.constexpr,
):
    """Log-probabilities and ids of the children of request r's entries, [GB, S, L], and [GB]
    pointers at their pools.

    With NOISE, log-probabilities are those of being drawn by a sampler of that noise
    (`ops.noise.drawn`).
    """
    own = r * G + tl.arange(0, GB)
    L: tl.constexpr = PB if PB < 128 else 128
    S: tl.constexpr = PB // L
    p = tl.arange(0, S)[None, :, None] * L + tl.arange(0, L)[None, None, :]
    mask = expanded[:, None, None] & (p < P)
    scores = scores_ptr + own[:, None, None] * P + p
    logits = tl.load(scores, mask=mask, other=float("-inf"), cache_modifier=".cg")
    pools = ids_ptr + r.to(tl.int64) * ids_stride_r + own_depth.to(tl.int64) * ids_stride_d
    ids = tl.load(pools[:, None, None] + p, mask=mask, other=-1)
    log_probs = pool_log_softmax(logits)
    if NOISE:
        noise_at = noise_ptr + (
            r.to(tl.int64) * noise_stride_r + own_depth.to(tl.int64)[:, None] * noise_stride_d
        )
        p = tl.arange(0, PB)[None, :]
        noise = tl.load(noise_at + p, mask=expanded[:, None] & (p < P), other=0.0)
        log_probs = drawn(
            *(
                tl.reshape(log_probs, (GB, PB)),
                noise,
                tl.load(temperature_ptr + r),
                tl.load(top_k_ptr + r),
            ),
            *(tl.load(top_p_ptr + r), tl.load(min_p_ptr + r), P, weight, penalty, HALVINGS),
        )
        log_probs = tl.reshape(log_probs, (GB, S, L))
    return log_probs, ids, pools


@triton.jit
def _grow(
    r,
    node,
    score,
    log_probs,
    ids,
    pools,
    keys_ptr,
    frontier_tokens_ptr,
    frontier_parents_ptr,
    row_scores_ptr,
    token_rows_ptr,
    positions_ptr,
    tokens_ptr,
    parents_ptr,
    depths_ptr,
    num_nodes_ptr,
    ancestors_ptr,
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
    first,
    C: tl.constexpr,
    CB: tl.constexpr,
    F: tl.constexpr,
    FB: tl.constexpr,
    T: tl.constexpr,
    LIMIT: tl.constexpr,
    W: tl.constexpr,
    WB: tl.constexpr,
    D: tl.constexpr,
    DB: tl.constexpr,
    G: tl.constexpr,
    GB: tl.constexpr,
    E: tl.constexpr,
    EB: tl.constexpr,
    STREAM: tl.constexpr,
    POSITIONS: tl.constexpr,
):
    """Growth of request r by its entries' `node` and `score`, each [GB], and `_candidates`.

    The children go to the frontier from place `first` on; the G best candidates of the whole
    frontier are placed, as far as there are rows below LIMIT, and prepared for the next round.
    """
    expanded = node >= 0
    keys = keys_ptr + r * F
    frontier_tokens = frontier_tokens_ptr + r * F
    frontier_parents = frontier_parents_ptr + r * F
    push_children(
        *(log_probs, ids, expanded, node < -1, node, score, pools),
        *(keys, frontier_tokens, frontier_parents, first, G, GB, C, CB),
    )
    tl.debug_barrier()
    live, row, token, placed_depth, total, parent, placed = place_best(
        *(keys, frontier_tokens, frontier_parents, first + G * C),
        *(tokens_ptr + r * T, parents_ptr + r * T, depths_ptr + r * T, num_nodes_ptr + r),
        *(ancestors_ptr + r * T * W, LIMIT, G, GB, FB, W, WB),
    )
    tl.store(row_scores_ptr + r * T + row, total, mask=live)
    # A full tree has no use for further children.
    leaf_depth = D * (placed < LIMIT).to(tl.int32)
    prepare_nodes(
        *(r, live & (placed_depth < leaf_depth), row, token, placed_depth, total, parent, row * 0),
        *(token_rows_ptr, positions_ptr, node_ptr, depth_ptr, score_ptr, position_ptr),
        *(count_ptr, slot_ptr, path_ptr, row_paths_ptr, x_ptr, scaled_ptr, scale_ptr),
        *(squares_ptr, stride, T, D, DB, G, GB, E, EB, STREAM, POSITIONS),
    )


@triton.jit(do_not_specialize=["first", "first_row"])
def score_and_grow_kernel(
    query_ptr,
    norm_weight_ptr,
    norm_bias_ptr,
    query_squares_ptr,
    pool_rows_ptr,
    ids_ptr,
    logits_ptr,
    scores_ptr,
    ticket_ptr,
    keys_ptr,
    frontier_tokens_ptr,
    frontier_parents_ptr,
    row_scores_ptr,
    own_node_ptr,
    own_depth_ptr,
    own_score_ptr,
    token_rows_ptr,
    positions_ptr,
    tokens_ptr,
    parents_ptr,
    depths_ptr,
    num_nodes_ptr,
    ancestors_ptr,
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
    noise_ptr,
    temperature_ptr,
    top_k_ptr,
    top_p_ptr,
    min_p_ptr,
    spine_ptr,
    ids_stride_r,
    ids_stride_d,
    logits_stride_r,
    logits_stride_d,
    noise_stride_r,
    noise_stride_d,
    stride,
    first,
    first_row,
    N,
    eps,
    weight,
    penalty,
    NOISE: tl.constexpr,
    HALVINGS: tl.constexpr,
    P: tl.constexpr,
    PB: tl.constexpr,
    BP: tl.constexpr,
    K: tl.constexpr,
    BK: tl.constexpr,
    J: tl.constexpr,
    JB: tl.constexpr,
    C: tl.constexpr,
    CB: tl.constexpr,
    F: tl.constexpr,
    FB: tl.constexpr,
    T: tl.constexpr,
    LIMIT: tl.constexpr,
    W: tl.constexpr,
    WB: tl.constexpr,
    D: tl.constexpr,
    DB: tl.constexpr,
    G: tl.constexpr,
    GB: tl.constexpr,
    E: tl.constexpr,
    EB: tl.constexpr,
    STREAM: tl.constexpr,
    POSITIONS: tl.constexpr,
    OWN_LINE: tl.constexpr,
    WIDTH: tl.constexpr,
    LINE: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Grid (blocks of P, N = R * G): `_score_candidates`; growth in a request's last program, by
    `_grow` or, where the entries are lines of OWN_LINE nodes, by `grow_lines`.
    """
    if OVERLAP:
        wait_for_previous()
    n = tl.program_id(1)
    r = n // G
    # For growth, should this be the program that does it: its loads wait for each other enough.
    g = tl.arange(0, GB)
    node = tl.load(own_node_ptr + r * G + g, mask=g < G, other=-1)
    own_depth = tl.load(own_depth_ptr + r * G + g, mask=g < G, other=0)
    score = tl.load(own_score_ptr + r * G + g, mask=g < G, other=0.0)
    _score_candidates(
        *(n, r, tl.program_id(0), query_ptr, norm_weight_ptr, norm_bias_ptr, query_squares_ptr),
        *(pool_rows_ptr, ids_ptr, logits_ptr, scores_ptr, own_node_ptr, own_depth_ptr),
        *(ids_stride_r, ids_stride_d, logits_stride_r, logits_stride_d),
        *(N, eps, P, BP, K, BK, J, JB),
    )
    if OVERLAP:
        let_next_start()
    # The barrier puts all threads' stores before the ticket, which publishes them.
    tl.debug_barrier()
    if tl.atomic_add(ticket_ptr + r, 1) == tl.num_programs(0) * G - 1:
        tl.store(ticket_ptr + r, 0)
        log_probs, ids, pools = _candidates(
            *(r, node >= 0, own_depth, ids_ptr, scores_ptr, noise_ptr, temperature_ptr),
            *(top_k_ptr, top_p_ptr, min_p_ptr, ids_stride_r, ids_stride_d, noise_stride_r),
            *(noise_stride_d, weight, penalty, NOISE, HALVINGS, P, PB, G, GB),
        )
        if OWN_LINE > 0:
            grow_lines(
                *(r, node, own_depth, score, log_probs, ids, pools, keys_ptr),
                *(frontier_tokens_ptr, frontier_parents_ptr, row_scores_ptr, token_rows_ptr),
                *(positions_ptr, tokens_ptr, parents_ptr, depths_ptr, ancestors_ptr, node_ptr),
                *(depth_ptr, score_ptr, position_ptr, count_ptr, slot_ptr, path_ptr),
                *(row_paths_ptr, x_ptr, scaled_ptr, scale_ptr, squares_ptr, spine_ptr, stride),
                *(first, first_row, C, CB, F, FB, T, W, WB, D, DB, G, GB, E, EB, STREAM),
                *(POSITIONS, OWN_LINE, WIDTH, LINE),
            )
        else:
            _grow(
                *(r, node, score, log_probs, ids, pools, keys_ptr, frontier_tokens_ptr),
                *(frontier_parents_ptr, row_scores_ptr, token_rows_ptr, positions_ptr),
                *(tokens_ptr, parents_ptr, depths_ptr, num_nodes_ptr, ancestors_ptr, node_ptr),
                *(depth_ptr, score_ptr, position_ptr, count_ptr, slot_ptr, path_ptr),
                *(row_paths_ptr, x_ptr, scaled_ptr, scale_ptr, squares_ptr, stride, first),
                *(C, CB, F, FB, T, LIMIT, W, WB, D, DB, G, GB, E, EB, STREAM, POSITIONS),
            )
