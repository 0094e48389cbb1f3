# SPDX-License-Identifier: Apache-2.0
"""The Triton form of build_ddtree against the heap, and against the PyTorch form bit for bit.

It runs on a GPU if there is one, where `test_ddtree.py` holds it to all of its cases as well, else
in Triton's interpreter.
"""

from __future__ import annotations

import random

import pytest
import torch
from interpreter import CUDA, DEVICE, INTERPRETED
from test_ddtree import marginals
from tree_oracles import NO_CANDIDATE, assert_tree_is, ddtree

from vllm_weaver.tree import DraftTree, build_ddtree

pytestmark = pytest.mark.skipif(
    not (CUDA or INTERPRETED), reason="needs a GPU, or TRITON_INTERPRET=1 set before import"
)


def assert_same(a: DraftTree, b: DraftTree) -> None:
    for name in ("num_nodes", "parents", "tokens", "depths", "ancestors"):
        assert torch.equal(getattr(a, name).cpu(), getattr(b, name).cpu()), name


def check(log_probs: torch.Tensor, ids: torch.Tensor, budget: int) -> DraftTree:
    roots = torch.arange(100, 100 + len(ids))
    moved = [x.to(DEVICE) for x in (log_probs, ids, roots)]
    tree = build_ddtree(*moved, budget, backend="triton")
    assert_same(tree, build_ddtree(log_probs, ids, roots, budget, backend="reference"))
    return tree


@pytest.mark.parametrize(
    ("budget", "requests", "depth", "pool"),
    [(1, 2, 15, 40), (2, 1, 3, 9), (15, 3, 15, 64), (63, 1, 15, 64), (64, 1, 3, 200), (7, 2, 1, 9)],
)
def test_random_marginals_give_the_heap_tree(
    budget: int, requests: int, depth: int, pool: int
) -> None:
    log_probs, ids = marginals(budget, requests, depth, pool)
    tree = check(log_probs, ids, budget)
    tree.validate()
    for r in range(requests):
        nodes = ddtree(log_probs[r].tolist(), ids[r].tolist(), budget)
        assert_tree_is(tree, r, 100 + r, nodes)


@pytest.mark.parametrize(
    "values",
    [
        [-1.0],
        [0.0],
        [-0.5, -1.0, -2.0],
        [0.0, -0.0, -1.0],
        [0.0, -0.25, NO_CANDIDATE],
        # Sums that collapse in float32 although the terms differ.
        [-1.0, -1.0 - 2**-23, -(2.0**-26), -2.0, -3.0],
    ],
)
def test_ties_break_by_lexicographic_rank(values: list[float]) -> None:
    for seed, budget, depth, pool in [(0, 15, 15, 8), (1, 12, 4, 20), (2, 20, 6, 5), (3, 9, 9, 2)]:
        check(*marginals(seed, 1, depth, pool, values), budget)


@pytest.mark.parametrize(
    ("depth", "pool"),
    [
        (1, 300),
        pytest.param(255, 1, marks=pytest.mark.skipif(not CUDA, reason="needs a GPU: slow else")),
        pytest.param(15, 64, marks=pytest.mark.skipif(not CUDA, reason="needs a GPU: slow else")),
    ],
)
def test_largest_budget_of_equal_scores(depth: int, pool: int) -> None:
    """256 rows, and 255 ranks, levels and places in order: every field of a key at its bounds."""
    log_probs, ids = marginals(0, 1, depth, pool, [-(2.0**-10)])
    assert check(log_probs, ids, 255).num_nodes.tolist() == [256]


def test_pools_with_gaps_skip_what_may_not_be_placed() -> None:
    rng = random.Random(0)
    for seed in range(3):
        log_probs, ids = marginals(seed, 2, 5, 12, [None, [-0.5, -1.0, -2.0]][seed % 2])
        for _ in range(25):
            place = rng.randrange(2), rng.randrange(5), rng.randrange(12)
            if rng.random() < 0.5:
                ids[place] = -1
            else:
                log_probs[place] = rng.choice([NO_CANDIDATE, float("nan")])
        if seed == 2:
            log_probs[1, 2] = NO_CANDIDATE
        check(log_probs, ids, 20)


def test_too_few_candidates_leave_inert_rows() -> None:
    assert check(*marginals(0, 2, 15, 1), 31).num_nodes.tolist() == [16, 16]
    assert check(*marginals(1, 2, 2, 3), 31).num_nodes.tolist() == [13, 13]
    log_probs, ids = marginals(2, 1, 4, 6)
    log_probs[0] = float("nan")
    assert check(log_probs, ids, 9).num_nodes.tolist() == [1]


def test_slices_of_wider_buffers_and_low_precision_are_read_in_place() -> None:
    log_probs, ids = marginals(3, 3, 8, 16)
    for dtype in (torch.bfloat16, torch.float16):
        low = log_probs.to(dtype)
        check(low, ids.int(), 20)
        check(low[:2, 1:6, :9], ids[:2, 1:6, :9], 20)


def test_sums_above_zero_and_below_the_range_of_floats() -> None:
    log_probs, ids = marginals(4, 1, 6, 5)
    check(log_probs + 1.5, ids, 20)
    check(log_probs * 1e38, ids, 20)


def test_no_requests_give_no_trees() -> None:
    log_probs, ids = (x[:0].to(DEVICE) for x in marginals(0, 1, 3, 4))
    tree = build_ddtree(log_probs, ids, ids[:, 0, 0], 5, backend="triton")
    assert tree.ancestors.shape == (0, 6, 1)


@pytest.mark.skipif(not CUDA, reason="needs a GPU")
def test_a_captured_graph_builds_the_tree_of_other_marginals() -> None:
    first, second = marginals(5, 4, 15, 64), marginals(6, 4, 15, 64)
    log_probs, ids = (x.cuda() for x in first)
    roots = torch.arange(4, device="cuda")
    build_ddtree(log_probs, ids, roots, 63)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        tree = build_ddtree(log_probs, ids, roots, 63)
    log_probs.copy_(second[0])
    ids.copy_(second[1])
    graph.replay()
    assert_same(tree, build_ddtree(*second, torch.arange(4), 63))


def test_an_unknown_backend_is_refused() -> None:
    log_probs, ids = marginals(0, 1, 3, 4)
    with pytest.raises(ValueError, match="unknown backend 'cuda'; available: reference, triton"):
        build_ddtree(log_probs, ids, torch.tensor([1]), 5, backend="cuda")
