# SPDX-License-Identifier: Apache-2.0
"""build_ddtree against the heap that defines it."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from tree_oracles import NO_CANDIDATE, assert_tree_is, ddtree

from vllm_weaver.tree import DraftTree, build_ddtree


def marginals(
    seed: int, requests: int, depth: int, pool: int, values: list[float] | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Falling log-probabilities, from few exact values where given, and distinct ids."""
    generator = torch.Generator().manual_seed(seed)
    shape = (requests, depth, pool)
    if values is None:
        log_probs = (3 * torch.randn(shape, generator=generator)).log_softmax(2)
    else:
        index = torch.randint(len(values), shape, generator=generator)
        log_probs = torch.tensor(values)[index]
    ids = torch.rand(requests, depth, 4 * pool, generator=generator).argsort(2)[..., :pool]
    return log_probs.sort(dim=2, descending=True).values, ids


def check(log_probs: torch.Tensor, ids: torch.Tensor, budget: int, device: str) -> DraftTree:
    requests = log_probs.shape[0]
    roots = torch.arange(100, 100 + requests)
    tree = build_ddtree(log_probs.to(device), ids.to(device), roots.to(device), budget)
    tree.validate()
    assert tree.num_rows == budget + 1
    for request in range(requests):
        nodes = ddtree(log_probs[request].tolist(), ids[request].tolist(), budget)
        assert_tree_is(tree, request, 100 + request, nodes)
    return tree


@pytest.mark.parametrize("budget", [1, 2, 7, 63, 64, 255])
@pytest.mark.parametrize("requests", [1, 4])
def test_random_marginals_give_the_heap_tree(budget: int, requests: int, device: str) -> None:
    for seed, (depth, pool) in enumerate([(15, 40), (3, 300), (1, 9)]):
        check(*marginals(seed, requests, depth, pool), budget, device)


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
def test_ties_break_by_lexicographic_rank(values: list[float], device: str) -> None:
    for seed, budget, depth, pool in [(0, 63, 15, 8), (1, 64, 4, 70), (2, 255, 6, 5), (3, 9, 9, 2)]:
        check(*marginals(seed, 3, depth, pool, values), budget, device)


def test_too_few_candidates_leave_inert_rows(device: str) -> None:
    tree = check(*marginals(0, 2, 15, 1), 63, device)
    assert tree.num_nodes.tolist() == [16, 16]
    tree = check(*marginals(0, 2, 1, 5), 63, device)
    assert tree.num_nodes.tolist() == [6, 6]
    tree = check(*marginals(1, 2, 2, 3), 255, device)
    assert tree.num_nodes.tolist() == [13, 13]


def test_padding_is_never_placed(device: str) -> None:
    log_probs, ids = marginals(2, 2, 4, 6)
    log_probs[0, 0, 3:] = NO_CANDIDATE
    ids[0, 1, 2:] = -1
    log_probs[1, 2] = NO_CANDIDATE
    tree = check(log_probs, ids, 255, device)
    assert int(tree.depths[1].max()) == 2
    log_probs[0] = float("nan")
    tree = build_ddtree(log_probs.to(device), ids.to(device), torch.tensor([1, 2]).to(device), 63)
    tree.validate()
    assert tree.num_nodes.tolist()[0] == 1


def test_requests_do_not_mix() -> None:
    log_probs, ids = marginals(4, 4, 6, 12)
    roots = torch.tensor([1, 2, 3, 4])
    together = build_ddtree(log_probs, ids, roots, 31)
    for r in range(4):
        alone = build_ddtree(log_probs[r : r + 1], ids[r : r + 1], roots[r : r + 1], 31)
        for name in ("tokens", "parents", "depths", "num_nodes", "ancestors"):
            assert torch.equal(getattr(alone, name)[0], getattr(together, name)[r])


def test_a_larger_budget_only_appends() -> None:
    log_probs, ids = marginals(5, 2, 6, 12, [-0.5, -1.0, -1.5])
    roots = torch.tensor([1, 2])
    largest = build_ddtree(log_probs, ids, roots, 80)
    for budget in (1, 20, 63, 64, 79):
        tree = build_ddtree(log_probs, ids, roots, budget)
        for name in ("tokens", "parents", "depths"):
            assert torch.equal(getattr(tree, name), getattr(largest, name)[:, : budget + 1])


def test_no_prefix_closed_set_has_more_expected_acceptance() -> None:
    for seed in range(4):
        log_probs, ids = marginals(seed, 1, 3, 2)
        tuples = [t for k in (1, 2, 3) for t in itertools.product(range(2), repeat=k)]
        mass = {
            t: math.exp(sum(log_probs[0, k, r].item() for k, r in enumerate(t))) for t in tuples
        }
        best = max(
            sum(mass[t] for t in chosen)
            for chosen in itertools.combinations(tuples, 5)
            if all(len(t) == 1 or t[:-1] in chosen for t in chosen)
        )
        tree = build_ddtree(log_probs, ids, torch.tensor([0]), 5)
        table = tree.ancestor_table(3)[0].tolist()
        total = 0.0
        for row in range(1, 6):
            path = [n for n in table[row][1:] if n >= 0]
            ranks = [ids[0, k].tolist().index(int(tree.tokens[0, n])) for k, n in enumerate(path)]
            total += mass[tuple(ranks)]
        assert total == pytest.approx(best, rel=1e-6)


def test_peaked_marginals_give_the_chain(device: str) -> None:
    log_probs, ids = marginals(6, 2, 15, 4)
    log_probs = log_probs - 100.0
    log_probs[:, :, 0] = -0.01
    roots = torch.tensor([8, 9])
    tree = build_ddtree(log_probs.to(device), ids.to(device), roots.to(device), 15)
    chain = DraftTree.chain(roots, ids[:, :, 0]).to(device)
    for name in ("tokens", "parents", "depths", "num_nodes", "ancestors"):
        assert torch.equal(getattr(tree, name), getattr(chain, name))


def test_low_precision_marginals_are_added_in_float32(device: str) -> None:
    log_probs, ids = marginals(7, 2, 8, 16)
    check(log_probs.bfloat16().float(), ids, 63, device)
    roots = torch.tensor([1, 2], device=device)
    low = build_ddtree(log_probs.bfloat16().to(device), ids.to(device), roots, 63)
    high = build_ddtree(log_probs.bfloat16().float().to(device), ids.to(device), roots, 63)
    assert torch.equal(low.tokens, high.tokens) and torch.equal(low.parents, high.parents)


def test_an_unsorted_pool_still_gives_a_valid_tree() -> None:
    log_probs, ids = marginals(8, 2, 5, 30)
    shuffled = log_probs[:, :, torch.randperm(30)] + 0.5
    build_ddtree(shuffled, ids, torch.tensor([1, 2]), 63).validate()


def test_no_value_is_read_back_from_the_device() -> None:
    # Meta tensors have no values: anything that looks at one raises.
    log_probs = torch.empty(3, 15, 512, device="meta")
    ids = torch.empty(3, 15, 512, dtype=torch.int64, device="meta")
    tree = build_ddtree(log_probs, ids, torch.empty(3, dtype=torch.int64, device="meta"), 63)
    assert tree.ancestors.shape == (3, 64, 1)


def test_bad_input_is_refused() -> None:
    log_probs, ids = marginals(0, 2, 3, 4)
    roots = torch.tensor([1, 2])
    for budget in (0, 256):
        with pytest.raises(ValueError, match=f"budget {budget} is outside 1..255"):
            build_ddtree(log_probs, ids, roots, budget)
    with pytest.raises(ValueError, match="ids has shape"):
        build_ddtree(log_probs, ids[:, :, :3], roots, 5)
    with pytest.raises(ValueError, match="root_tokens has shape"):
        build_ddtree(log_probs, ids, roots[:1], 5)
    with pytest.raises(ValueError, match="log_probs has shape"):
        build_ddtree(log_probs[0], ids[0], roots, 5)
    with pytest.raises(ValueError, match=r"log_probs is torch\.int64"):
        build_ddtree(ids, ids, roots, 5)
