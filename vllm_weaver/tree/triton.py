# SPDX-License-Identifier: Apache-2.0
# mypy: disable-error-code="no-untyped-def"
"""Growth of one tree by one group of nodes, as Triton functions that a kernel of one program calls.

They are `best_first.Growth` for one request: `push_children` puts the best children of the group on
the frontier, `place_best` pops the best candidates and writes their rows. Candidates are keys as in
`order`: the magnitude of the score, then the place of insertion, so that the smallest key is the
best candidate and ties go to the one inserted first. A key holds its score: there is no other copy.

The module knows neither where log-probabilities come from nor what is done with the nodes placed.

What is selected from stands in three axes [rows, S, L] with L no longer than a warp loads at once:
a row is then one warp's, and a minimum over it takes no barrier.

Shape legend: G nodes popped at once, GB the power of two above; C children kept, CB above; P pool;
F places of the frontier, FB above; T rows; W words of ancestor bits, WB above.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl


class TreeRows(NamedTuple):
    """Trees as a kernel's argument: tensors on the host, in a kernel pointers.

    | name | shape, dtype | meaning |
    |---|---|---|
    | `tokens`, `parents`, `depths` | [R, T] int32 | as in `DraftTree` |
    | `num_nodes` | [R] int32 | as there |
    | `ancestors` | [R, T, W] int64 | as there |
    """

    tokens: Any
    parents: Any
    depths: Any
    num_nodes: Any
    ancestors: Any


class Frontier(NamedTuple):
    """Candidates of trees, likewise; places that were never written are not read.

    | name | shape, dtype | meaning |
    |---|---|---|
    | `keys` | [R, F] int64 | as in `order` |
    | `tokens` | [R, F] int32 | |
    | `parents` | [R, F] int32 | rows of the tree |
    """

    keys: Any
    tokens: Any
    parents: Any


@triton.jit
def tree_of(trees, r, T, W):
    """The tree of request r."""
    return TreeRows(
        trees.tokens + r * T,
        trees.parents + r * T,
        trees.depths + r * T,
        trees.num_nodes + r,
        trees.ancestors + r * T * W,
    )


@triton.jit
def frontier_of(frontiers, r, F):
    """The frontier of request r."""
    return Frontier(frontiers.keys + r * F, frontiers.tokens + r * F, frontiers.parents + r * F)


@triton.jit
def _smallest(
    magnitudes,
    index,
    COUNT: tl.constexpr,
    ROWS: tl.constexpr,
    KEPT: tl.constexpr,
):
    """The COUNT smallest of each row of int32 `magnitudes` [ROWS, S, L], in rising order and, if
    equal, in that of `index`: magnitudes and indices, each [ROWS, KEPT] and the largest int32 past
    COUNT. Two minima of 32 bits, which a warp takes in one instruction each, for every one found.
    """
    NONE: tl.constexpr = 0x7FFFFFFF
    c = tl.arange(0, KEPT)[None, :]
    found = tl.full((ROWS, KEPT), NONE, tl.int32)
    places = tl.full((ROWS, KEPT), NONE, tl.int32)
    for number in range(COUNT):
        smallest = tl.min(tl.min(magnitudes, 1), 1)
        equal = tl.where(magnitudes == smallest[:, None, None], index, NONE)
        place = tl.min(tl.min(equal, 1), 1)
        magnitudes = tl.where(index == place[:, None, None], NONE, magnitudes)
        found = tl.where(c == number, smallest[:, None], found)
        places = tl.where(c == number, place[:, None], places)
    return found, places


@triton.jit
def push_children(
    log_probs,
    ids,
    expanded,
    row,
    score,
    pools,
    frontier,
    first,
    G: tl.constexpr,
    C: tl.constexpr,
):
    """Put the best C children of every expanded node on the request's frontier, from place `first`
    on.

    `log_probs`, `ids` [GB, S, L] with ids below 0 for padding; `expanded`, `row`, `score` [GB];
    `pools` [GB] points at the ids of the children. Nodes that are not expanded write places without
    a candidate.
    """
    GB: tl.constexpr = triton.next_power_of_2(G)
    CB: tl.constexpr = triton.next_power_of_2(C)
    INFINITY: tl.constexpr = 0x7F800000
    S: tl.constexpr = log_probs.shape[1]
    L: tl.constexpr = log_probs.shape[2]
    g = tl.arange(0, GB)
    c = tl.arange(0, CB)
    log_probs = tl.where(log_probs > 0.0, 0.0, log_probs)
    # NaN compares as false.
    usable = (log_probs > float("-inf")) & (ids >= 0) & expanded[:, None, None]
    magnitudes = log_probs.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    index = tl.arange(0, S)[None, :, None] * L + tl.arange(0, L)[None, None, :]
    found, chosen = _smallest(tl.where(usable, magnitudes, INFINITY), index, C, GB, CB)

    live = found < INFINITY
    log_prob = -found.to(tl.float32, bitcast=True)
    token = tl.load(pools[:, None] + chosen, mask=live, other=0).to(tl.int32)
    total = tl.where(live, score[:, None] + log_prob, float("-inf"))
    place = first + g[:, None] * C + c[None, :]
    magnitude = (total.to(tl.int32, bitcast=True) & 0x7FFFFFFF).to(tl.int64)
    mask = (g < G)[:, None] & (c < C)[None, :]
    tl.store(frontier.keys + place, (magnitude << 32) | place.to(tl.int64), mask=mask)
    tl.store(frontier.tokens + place, token, mask=mask)
    tl.store(frontier.parents + place, row[:, None] + tl.zeros_like(token), mask=mask)


@triton.jit
def pop_best(keys_ptr, used, G: tl.constexpr, F: tl.constexpr):
    """Pop the best G of the first `used` candidates of a request's `keys_ptr` [F], best first.

    Returns whether there was one, its place and its score, each [GB].
    """
    GB: tl.constexpr = triton.next_power_of_2(G)
    FB: tl.constexpr = triton.next_power_of_2(F)
    NO_KEY: tl.constexpr = 0x7F80000000000000
    NO_VALUE: tl.constexpr = 0x7FFFFFFFFFFFFFFF
    # A warp loads 64 keys at once; rows for four warps.
    L: tl.constexpr = FB if FB < 64 else 64
    ROWS: tl.constexpr = FB // L if FB // L < 4 else 4
    S: tl.constexpr = FB // (L * ROWS)
    g = tl.arange(0, GB)
    f = tl.arange(0, ROWS)[:, None, None] * (S * L) + tl.arange(0, S)[None, :, None] * L
    f = f + tl.arange(0, L)[None, None, :]
    keys = tl.load(keys_ptr + f, mask=f < used, other=NO_VALUE)
    found, places = _smallest((keys >> 32).to(tl.int32), f, G, ROWS, GB)
    # The best of the rows' best by rank: keys of candidates are distinct.
    best_of_rows = tl.reshape((found.to(tl.int64) << 32) | places.to(tl.int64), (ROWS * GB,))
    ranks = tl.sum((best_of_rows[None, :] < best_of_rows[:, None]).to(tl.int32), 1)
    here = ranks[:, None] == g[None, :]
    best = tl.min(tl.where(here, best_of_rows[:, None], NO_VALUE), 0)
    # The rows of a part have G each: beyond the G-th, more than are asked for.
    popped = (best < NO_KEY) & (g < G)
    place = (best & 0xFFFFFFFF).to(tl.int32)
    score = -(best >> 32).to(tl.int32).to(tl.float32, bitcast=True)
    tl.store(keys_ptr + place, tl.full((GB,), NO_KEY, tl.int64), mask=popped)
    return popped, place, score


@triton.jit
def place_best(
    frontier,
    used,
    tree,
    LIMIT: tl.constexpr,
    G: tl.constexpr,
    F: tl.constexpr,
    W: tl.constexpr,
):
    """Pop the best G of the first `used` candidates of a request and place them, in rows below
    LIMIT.

    Returns live, row, token, depth, score and parent, each [GB], live ones first, and the count of
    rows after it.
    """
    GB: tl.constexpr = triton.next_power_of_2(G)
    WB: tl.constexpr = triton.next_power_of_2(W)
    g = tl.arange(0, GB)
    popped, place, score = pop_best(frontier.keys, used, G, F)

    placed = tl.load(tree.num_nodes)
    row = placed + g
    live = popped & (row < LIMIT)
    token = tl.load(frontier.tokens + place, mask=live, other=0)
    parent = tl.load(frontier.parents + place, mask=live, other=0)
    depth = tl.load(tree.depths + parent, mask=live, other=0) + 1
    w = tl.arange(0, WB)
    mask = live[:, None] & (w < W)[None, :]
    words = tl.load(tree.ancestors + parent[:, None] * W + w[None, :], mask=mask, other=0)
    bit = tl.full((GB, WB), 1, tl.int64) << (row % 64).to(tl.int64)[:, None]
    words = tl.where((row // 64)[:, None] == w[None, :], words | bit, words)
    tl.store(tree.tokens + row, token, mask=live)
    tl.store(tree.parents + row, parent, mask=live)
    tl.store(tree.depths + row, depth, mask=live)
    tl.store(tree.ancestors + row[:, None] * W + w[None, :], words, mask=mask)
    placed += tl.sum(live.to(tl.int32), 0)
    tl.store(tree.num_nodes, placed)
    return live, row, token, depth, score, parent, placed


@triton.jit
def place_root(
    token,
    tree,
    T: tl.constexpr,
    W: tl.constexpr,
):
    """Make a tree of its root alone; of no row at all where `token` is below 0."""
    TB: tl.constexpr = triton.next_power_of_2(T)
    WB: tl.constexpr = triton.next_power_of_2(W)
    t = tl.arange(0, TB)
    mask = t < T
    live = (token >= 0).to(tl.int32)
    is_root = t < live
    tl.store(tree.tokens + t, tl.where(is_root, token, 0), mask=mask)
    tl.store(tree.parents + t, tl.full((TB,), -1, tl.int32), mask=mask)
    tl.store(tree.depths + t, tl.zeros((TB,), tl.int32), mask=mask)
    w = tl.arange(0, WB)
    words = tl.where(is_root[:, None] & (w == 0)[None, :], 1, 0).to(tl.int64)
    at = tree.ancestors + t[:, None] * W + w[None, :]
    tl.store(at, words, mask=mask[:, None] & (w < W)[None, :])
    tl.store(tree.num_nodes, live)
