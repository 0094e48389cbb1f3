# SPDX-License-Identifier: Apache-2.0
"""build_spine_tree against a list-sorting definition, with conditionals from tables."""

from __future__ import annotations

import math

import pytest
import torch
from tree_oracles import (
    Node,
    Path,
    Table,
    add,
    assert_tree_is,
    best_children,
    path_of,
    random_table,
)

from vllm_weaver.tree import (
    DraftTree,
    Sampling,
    SharedNoise,
    SpineShape,
    build_spine_tree,
    build_weaver_tree,
    spine_of,
)


def spine_tree(
    table: Table,
    request: int,
    spine: list[int],
    budget: int,
    max_depth: int,
    shape: SpineShape,
    children: int,
) -> list[Node]:
    """Nodes without the root, best first."""
    lines: list[tuple[float, Path]] = []
    frontier: list[tuple[float, Path]] = []
    open_places: set[int] = set()

    def expand_line(path: Path, score: float, length: int) -> None:
        for step in range(min(length, max_depth - len(path))):
            if score == -math.inf:
                return
            lines.append((score, path))
            depth = len(path) + 1
            follows = spine[depth - 1] if step + 1 < length and depth < max_depth else None
            found, below = [], -math.inf
            for log_prob, token in best_children(table, request, path, 10**6):
                if token == follows:
                    below = add(score, log_prob)
                else:
                    found.append((add(score, log_prob), (*path, token)))
            for candidate in found[:children]:
                if depth < max_depth:
                    open_places.add(len(frontier))
                frontier.append(candidate)
            path, score = (*path, follows), below

    expand_line((), 0.0, max_depth)
    popped: set[int] = set()
    for _ in range(shape.rounds):
        best = sorted(open_places - popped, key=lambda i: (-frontier[i][0], i))[: shape.width]
        popped |= set(best)
        for i in best:
            expand_line(frontier[i][1], frontier[i][0], shape.line)
    left = [node for i, node in enumerate(frontier) if i not in popped]
    kept = sorted([*lines[1:], *left], key=lambda node: -node[0])[:budget]
    row_of = {(): 0} | {path: row for row, (_, path) in enumerate(kept, start=1)}
    return [Node(path[-1], row_of[path[:-1]], len(path)) for _, path in kept]


def check(
    table: Table,
    budget: int,
    max_depth: int,
    shape: SpineShape | None = None,
    children: int = 8,
    requests: int = 2,
    device: str = "cpu",
) -> DraftTree:
    calls = []

    def expand(request_N, node_N, tokens_N, depths_N, tree):
        calls.append(len(node_N))
        pool = len(table(0, ())[0])
        ids, log_probs = (
            torch.full((len(node_N), pool), 7),
            torch.full((len(node_N), pool), math.nan),
        )
        tokens, parents = tree.tokens.tolist(), tree.parents.tolist()
        for n, (request, node) in enumerate(zip(request_N.tolist(), node_N.tolist(), strict=True)):
            if node >= 0:
                path = path_of(tokens[request], parents[request], node)
                assert len(path) == int(depths_N[n]) < max_depth
                answer = table(request, path)
                ids[n], log_probs[n] = torch.tensor(answer[0]), torch.tensor(answer[1])
        return ids.to(device), log_probs.to(device)

    roots = torch.arange(2000, 2000 + requests, device=device)
    pools = [[table(r, tuple([0] * d))[0] for d in range(max_depth)] for r in range(requests)]
    spine = torch.tensor([[pool[d % len(pool)] for d, pool in enumerate(p)] for p in pools])
    spine = spine.clamp(min=0)
    tree = build_spine_tree(
        *(expand, roots, spine.to(device), budget, max_depth), shape=shape, children=children
    )
    tree.validate()
    shape = SpineShape.of(budget) if shape is None else shape
    later = [requests * shape.width * shape.line] * shape.rounds
    assert calls == [requests * max_depth, *later]
    for request in range(requests):
        given = (spine[request].tolist(), budget, max_depth, shape, children)
        assert_tree_is(tree, request, 2000 + request, spine_tree(table, request, *given))
    return tree


@pytest.mark.parametrize("budget", [1, 2, 63, 255])
def test_random_conditionals_give_the_pruned_tree(budget: int, device: str) -> None:
    for seed, (depth, pool) in enumerate([(9, 12), (3, 9), (1, 4)]):
        check(random_table(seed, pool, vocabulary=pool), budget, depth, device=device)


@pytest.mark.parametrize("rounds", [0, 1, 5])
@pytest.mark.parametrize("width", [1, 5])
@pytest.mark.parametrize("line", [1, 2, 4])
@pytest.mark.parametrize("children", [1, 8])
def test_any_shape(rounds: int, width: int, line: int, children: int) -> None:
    shape = SpineShape(rounds, width, line)
    check(random_table(1, 12, vocabulary=13), 40, 6, shape, children)


@pytest.mark.parametrize("values", [[-1.0], [0.0], [-0.5, -1.0, -2.0], [0.0, -0.0, -1.0]])
def test_ties_go_to_lines_and_then_to_the_candidate_inserted_first(
    values: list[float], device: str
) -> None:
    for seed, budget, depth, pool, width in [(0, 63, 8, 12, 8), (1, 64, 4, 8, 1), (2, 9, 3, 2, 3)]:
        table = random_table(seed, pool, values, vocabulary=pool)
        check(table, budget, depth, SpineShape(4, width, 2), device=device)


@pytest.mark.parametrize("absent", [0.3, 0.8])
def test_missing_candidates_are_no_nodes(absent: float, device: str) -> None:
    table = random_table(2, 6, absent=absent, vocabulary=7)
    check(table, 30, 5, SpineShape(3, 4, 3), device=device)


def test_pools_of_one_candidate_give_the_chain() -> None:
    """Conditionals that leave one candidate: the tree is the spine."""
    tree = check(lambda request, path: ([5, 6], [-0.1, -math.inf]), 8, 6, requests=1)
    assert tree.num_nodes.tolist() == [7]
    assert tree.parents[0, :7].tolist() == [-1, 0, 1, 2, 3, 4, 5]


def test_with_rounds_enough_the_tree_is_the_best_first_one() -> None:
    table = random_table(3, 6, vocabulary=6)

    def expand(request_N, node_N, tokens_N, depths_N, tree):
        tokens, parents = tree.tokens.tolist(), tree.parents.tolist()
        answers = [
            table(r, path_of(tokens[r], parents[r], n) if n >= 0 else ())
            for r, n in zip(request_N.tolist(), node_N.tolist(), strict=True)
        ]
        return tuple(torch.tensor([a[i] for a in answers]) for i in (0, 1))

    roots, spine = torch.tensor([1]), torch.tensor([[table(0, ())[0][0]] * 5])
    shape = SpineShape(20, 2, 2)
    actual = build_spine_tree(expand, roots, spine, 20, 5, shape=shape)
    expected = build_weaver_tree(expand, roots, 20, 5, expansion_width=1)
    assert set_of_paths(actual) == set_of_paths(expected)


def set_of_paths(tree: DraftTree) -> set[Path]:
    tokens, parents = tree.tokens[0].tolist(), tree.parents[0].tolist()
    return {path_of(tokens, parents, row) for row in range(int(tree.num_nodes[0]))}


def test_a_spine_of_the_wrong_shape_is_refused() -> None:
    with pytest.raises(ValueError, match=r"the spine has shape \(1, 3\)"):
        build_spine_tree(lambda *a: a, torch.tensor([1]), torch.zeros(1, 3).long(), 4, 4)


def test_the_spine_is_the_best_candidate_of_each_depth_with_noise_if_sampled() -> None:
    ids = torch.tensor([[[4, 5, 6], [7, 8, -1], [-1, -1, -1]]]).expand(2, -1, -1)
    logits = torch.tensor([[[1.0, 1.0, math.nan], [0.0, 1.0, 9.0], [1.0, 2.0, 3.0]]])
    logits = logits.expand(2, -1, -1)
    assert spine_of(ids, logits).tolist() == [[4, 8, 0]] * 2
    noise = torch.zeros(2, 3, 3)
    noise[:, 0, 1], noise[:, 1, 0] = 0.1, 2.0
    ones = torch.ones(2)
    sampling = Sampling(torch.tensor([0.0, 1.0]), ones.long() * 9, ones, ones * 0, filtered=False)
    assert spine_of(ids, logits, SharedNoise(noise, sampling)).tolist() == [[4, 8, 0], [5, 7, 0]]
