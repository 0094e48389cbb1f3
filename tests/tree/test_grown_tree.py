# SPDX-License-Identifier: Apache-2.0
"""build_grown_tree against a list-sorting definition, with conditionals from tables."""

from __future__ import annotations

import math

import pytest
import torch
from tree_oracles import Table, TableExpand, assert_tree_is, grown_tree, path_of, random_table

import vllm_weaver.tree.grown_tree as grown_module
from vllm_weaver.tree import DraftTree, build_grown_tree, build_weaver_tree


def check(
    table: Table,
    budget: int,
    max_depth: int,
    *,
    requests: int = 1,
    rounds: int | None = None,
    width: int | None = None,
    children: int = 8,
    device: str = "cpu",
) -> tuple[DraftTree, TableExpand]:
    expand = TableExpand(table)
    roots = torch.arange(2000, 2000 + requests, device=device)
    tree = build_grown_tree(
        expand, roots, budget, max_depth, rounds=rounds, width=width, children=children
    )
    tree.validate()
    assert tree.num_rows == budget + 1
    rounds = max_depth if rounds is None else rounds
    width = math.ceil(budget / 8) if width is None else width
    assert set(expand.sizes) == {requests * width} and len(expand.sizes) <= rounds
    for request in range(requests):
        nodes = grown_tree(table, request, budget, max_depth, rounds, width, children)
        assert_tree_is(tree, request, 2000 + request, nodes)
    return tree, expand


@pytest.mark.parametrize("budget", [1, 2, 63, 64, 255])
@pytest.mark.parametrize("requests", [1, 3])
def test_random_conditionals_give_the_pruned_tree(budget: int, requests: int, device: str) -> None:
    for seed, (depth, pool) in enumerate([(9, 12), (3, 9)]):
        check(random_table(seed, pool), budget, depth, requests=requests, device=device)


@pytest.mark.parametrize("rounds", [1, 2, 20])
@pytest.mark.parametrize("width", [1, 5, 40])
@pytest.mark.parametrize("children", [1, 8])
def test_any_rounds_width_and_children(rounds: int, width: int, children: int) -> None:
    table = random_table(1, 12)
    check(table, 63, 6, requests=2, rounds=rounds, width=width, children=children)


@pytest.mark.parametrize(
    "values",
    [
        [-1.0],
        [0.0],
        [-0.5, -1.0, -2.0],
        [0.0, -0.0, -1.0],
        # Sums that collapse in float32 although the terms differ.
        [-1.0, -1.0 - 2**-23, -(2.0**-26), -2.0, -3.0],
    ],
)
def test_ties_go_to_the_candidate_grown_first(values: list[float], device: str) -> None:
    for seed, budget, depth, pool, width in [
        (0, 63, 8, 12, None),
        (1, 64, 4, 8, 1),
        (2, 9, 3, 2, 3),
    ]:
        table = random_table(seed, pool, values)
        check(table, budget, depth, requests=3, width=width, device=device)


@pytest.mark.parametrize("absent", [0.3, 0.8, 1.0])
def test_missing_candidates_are_never_kept(absent: float, device: str) -> None:
    for seed, pool in [(0, 4), (1, 12)]:
        table = random_table(seed, pool, absent=absent)
        tree, _ = check(table, 63, 9, requests=4, device=device)
        if absent == 1.0:
            assert tree.num_nodes.tolist() == [1] * 4


def test_too_little_growth_leaves_inert_rows(device: str) -> None:
    tree, _ = check(random_table(0, 1), 63, 15, requests=2, device=device)
    assert tree.num_nodes.tolist() == [16, 16]
    tree, expand = check(random_table(0, 12), 63, 1, requests=2, device=device)
    assert tree.num_nodes.tolist() == [9, 9] and len(expand.sizes) == 1
    tree, _ = check(random_table(0, 12), 63, 5, rounds=2, width=2, device=device)
    assert tree.num_nodes.tolist() == [25]


def test_a_fixed_number_of_rounds_builds_the_same_trees(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grown_module, "may_look", lambda device: False)
    for seed, budget, depth, pool, absent in [
        (0, 63, 9, 20, 0.0),
        (1, 63, 15, 1, 0.0),
        (2, 255, 2, 12, 0.0),
        (3, 63, 5, 6, 0.7),
    ]:
        _, expand = check(random_table(seed, pool, absent=absent), budget, depth, requests=3)
        assert len(expand.sizes) == depth


def test_pruning_never_loses_path_probability_to_best_first_growth() -> None:
    """The same nodes are expanded one by one; keeping the best of all grown can only gain."""
    for seed in range(5):
        table = random_table(seed, 8)

        def mass(tree: DraftTree, table: Table = table) -> float:
            tokens, parents = tree.tokens[0].tolist(), tree.parents[0].tolist()
            total = 0.0
            for row in range(1, tree.num_rows):
                path, score = path_of(tokens, parents, row), 0.0
                for k, token in enumerate(path):
                    ids, log_probs = table(0, path[:k])
                    score += log_probs[ids.index(token)]
                total += math.exp(score)
            return total

        grown, _ = check(table, 24, 6, rounds=24, width=1)
        first = build_weaver_tree(
            TableExpand(table), torch.tensor([2000]), 24, 6, expansion_width=1
        )
        assert mass(grown) >= mass(first) * (1 - 1e-6)


def test_positive_rounding_residue_cannot_lift_a_child_over_its_parent() -> None:
    def expand(request_N, node_N, tokens_N, depths_N, tree):
        ids = torch.arange(4).expand(len(node_N), 4)
        return ids, torch.full(ids.shape, 1e-6)

    tree = build_grown_tree(expand, torch.tensor([9]), 30, 5)
    tree.validate()
    assert tree.num_nodes.tolist() == [31]


def test_no_value_is_read_back_from_the_device() -> None:
    # Meta tensors have no values: anything that looks at one raises.
    def expand(request_N, node_N, tokens_N, depths_N, tree):
        ids = torch.empty(len(request_N), 512, dtype=torch.int64, device="meta")
        return ids, torch.empty(ids.shape, device="meta")

    roots = torch.empty(3, dtype=torch.int64, device="meta")
    assert build_grown_tree(expand, roots, 63, 15).ancestors.shape == (3, 64, 1)


def test_bad_input_is_refused() -> None:
    roots = torch.tensor([1, 2])
    expand = TableExpand(random_table(0, 4))
    for budget in (0, 256):
        with pytest.raises(ValueError, match=f"budget {budget} is outside 1..255"):
            build_grown_tree(expand, roots, budget, 3)
    for name in ("rounds", "width", "children"):
        with pytest.raises(ValueError, match=f"{name} is 0"):
            build_grown_tree(expand, roots, 5, 3, **{name: 0})
    with pytest.raises(ValueError, match="max_depth is 0"):
        build_grown_tree(expand, roots, 5, 0)
