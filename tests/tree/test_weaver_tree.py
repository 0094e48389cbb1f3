# SPDX-License-Identifier: Apache-2.0
"""build_weaver_tree against a list-sorting definition, with conditionals from tables."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from tree_oracles import (
    NO_CANDIDATE,
    Path,
    Table,
    TableExpand,
    assert_tree_is,
    path_of,
    random_table,
    weaver_tree,
)

import vllm_weaver.tree.weaver_tree as weaver_module
from vllm_weaver.tree import DraftTree, build_ddtree, build_weaver_tree

FIELDS = ("tokens", "parents", "depths", "num_nodes", "ancestors")


def check(
    table: Table,
    budget: int,
    max_depth: int,
    *,
    requests: int = 1,
    width: int | None = None,
    children: int = 8,
    device: str = "cpu",
    full_pools: bool = False,
) -> tuple[DraftTree, TableExpand]:
    expand = TableExpand(table)
    roots = torch.arange(2000, 2000 + requests, device=device)
    tree = build_weaver_tree(
        expand,
        roots,
        budget,
        max_depth,
        expansion_width=width,
        children=children,
        full_pools=full_pools,
    )
    tree.validate()
    assert tree.num_rows == budget + 1
    width = max(1, math.ceil(budget / 16)) if width is None else width
    assert set(expand.sizes) == {requests * min(width, budget)}
    for request in range(requests):
        nodes, expanded = weaver_tree(table, request, budget, max_depth, width, children)
        assert_tree_is(tree, request, 2000 + request, nodes)
        assert expand.expanded[request] == expanded
    return tree, expand


@pytest.mark.parametrize("budget", [1, 2, 16, 17, 63, 64, 255])
@pytest.mark.parametrize("requests", [1, 3])
def test_random_conditionals_give_the_best_first_tree(
    budget: int, requests: int, device: str
) -> None:
    for seed, (depth, pool) in enumerate([(15, 20), (3, 9)]):
        check(random_table(seed, pool), budget, depth, requests=requests, device=device)


@pytest.mark.parametrize("width", [1, 2, 4, 7, 300])
@pytest.mark.parametrize("children", [1, 3, 8, 40])
def test_any_width_and_number_of_children(width: int, children: int) -> None:
    check(random_table(1, 12), 63, 6, requests=2, width=width, children=children)


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
def test_ties_go_to_the_candidate_inserted_first(values: list[float], device: str) -> None:
    for seed, budget, depth, pool, width in [
        (0, 63, 15, 12, None),
        (1, 64, 4, 8, 1),
        (2, 255, 7, 5, None),
        (3, 9, 3, 2, 3),
    ]:
        table = random_table(seed, pool, values)
        check(table, budget, depth, requests=3, width=width, device=device)


@pytest.mark.parametrize("absent", [0.3, 0.8, 1.0])
def test_missing_candidates_are_never_placed(absent: float, device: str) -> None:
    for seed, pool in [(0, 4), (1, 12)]:
        table = random_table(seed, pool, absent=absent)
        tree, _ = check(table, 63, 15, requests=4, device=device)
        if absent == 1.0:
            assert tree.num_nodes.tolist() == [1] * 4


def test_an_empty_frontier_ends_the_tree(device: str) -> None:
    tree, _ = check(random_table(0, 1), 63, 15, requests=2, device=device)
    assert tree.num_nodes.tolist() == [16, 16]
    tree, _ = check(random_table(0, 12), 63, 1, requests=2, device=device)
    assert tree.num_nodes.tolist() == [9, 9]
    tree, _ = check(random_table(0, 3), 255, 2, requests=2, device=device)
    assert tree.num_nodes.tolist() == [13, 13]


def test_requests_of_different_sizes_share_a_batch(device: str) -> None:
    """One request runs dry after its first nodes, another at depth 2, a third never."""
    full = random_table(3, 10)

    def table(request: int, path: Path) -> tuple[list[int], list[float]]:
        ids, log_probs = full(request, path)
        if len(path) > request * 2:
            log_probs = [NO_CANDIDATE] * len(log_probs)
        return ids, log_probs

    tree, _ = check(table, 63, 9, requests=4, children=4, device=device)
    assert tree.num_nodes.tolist() == [5, 64, 64, 64]
    tree, _ = check(table, 255, 9, requests=4, children=4, device=device)
    assert tree.num_nodes.tolist()[:3] == [5, 85, 256]


def test_leaves_and_the_last_group_are_not_expanded() -> None:
    tree, expand = check(random_table(5, 8), 32, 3, width=4)
    expanded = expand.expanded[0]
    assert len(expand.sizes) <= 32 // 4
    rows = [path_of(tree.tokens[0].tolist(), tree.parents[0].tolist(), i) for i in range(33)]
    assert all(len(path) < 3 for path in expanded)
    assert expanded <= set(rows) and sum(len(path) < 3 for path in rows) - len(expanded) <= 4


def test_first_rows_of_wide_groups_are_the_best_nodes(device: str) -> None:
    """What a group places early and should not have comes late; parents stay before children."""
    table = random_table(6, 12)
    wide, _ = check(table, 63, 8, width=4, device=device)
    narrow, _ = check(table, 63, 8, width=1, device=device)
    # Eight nodes in order reach no depth in two rounds of four, and are all found in sixteen.
    first = narrow.prefix(9).tokens[:, :9].sort().values
    assert torch.equal(wide.prefix(9).tokens[:, :9].sort().values, first)


def test_a_fixed_number_of_rounds_builds_the_same_trees(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weaver_module, "may_look", lambda device: False)
    for seed, budget, depth, pool, width, absent in [
        (0, 63, 15, 20, None, 0.0),
        (1, 63, 15, 1, None, 0.0),
        (2, 255, 2, 12, None, 0.0),
        (3, 63, 5, 6, 9, 0.7),
        (4, 64, 15, 3, 64, 0.4),
        (5, 1, 15, 8, None, 0.0),
    ]:
        table = random_table(seed, pool, absent=absent)
        check(table, budget, depth, requests=3, width=width)


def peaked_table(seed: int, depth: int) -> Table:
    """A spine goes straight to the leaves and below it all is nearly certain: few inner nodes."""
    flat = random_table(seed, 8)

    def table(request: int, path: Path) -> tuple[list[int], list[float]]:
        ids, _ = flat(request, path)
        if len(path) == depth - 1:
            return ids, [-0.001 * i for i in range(8)]
        return ids, [-0.001] + [-20.0 - i for i in range(7)]

    return table


@pytest.mark.parametrize("depth", [1, 2, 3, 4, 15])
@pytest.mark.parametrize("budget", [9, 63, 255])
def test_full_pools_need_no_more_rounds_than_promised(
    budget: int, depth: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(weaver_module, "may_look", lambda device: False)
    for width in (None, 1, 5, 16):
        for table in (random_table(depth, 8), peaked_table(0, depth)):
            _, expand = check(table, budget, depth, width=width, full_pools=True)
            assert len(expand.sizes) <= budget
    if depth == 15 and budget == 63:
        _, expand = check(random_table(0, 8), 63, 15, full_pools=True)
        assert len(expand.sizes) == 16


def test_no_prefix_closed_set_has_more_path_probability() -> None:
    for seed in range(4):
        table = random_table(seed, 2)
        mass: dict[Path, float] = {(): 1.0}
        for depth in range(3):
            for path in [p for p in mass if len(p) == depth]:
                for token, log_prob in zip(*table(0, path), strict=True):
                    mass[(*path, token)] = mass[path] * math.exp(log_prob)
        paths = [p for p in mass if p]
        best = max(
            sum(mass[p] for p in chosen)
            for chosen in itertools.combinations(paths, 5)
            if all(len(p) == 1 or p[:-1] in chosen for p in chosen)
        )
        tree, _ = check(table, 5, 3, width=1)
        tokens, parents = tree.tokens[0].tolist(), tree.parents[0].tolist()
        total = sum(mass[path_of(tokens, parents, row)] for row in range(1, 6))
        assert total == pytest.approx(best, rel=1e-6)


def test_independent_depths_and_one_pop_give_the_ddtree(device: str) -> None:
    depth, pool = 5, 6
    for seed in range(3):
        generator = torch.Generator().manual_seed(seed)
        log_probs = torch.randn(2, depth, pool, generator=generator).log_softmax(2)
        log_probs = log_probs.sort(dim=2, descending=True).values.to(device)
        ids = torch.arange(2 * depth * pool, device=device).reshape(2, depth, pool)
        roots = torch.tensor([5, 6], device=device)

        def expand(request_N, node_N, tokens_N, depths_N, tree, ids=ids, log_probs=log_probs):
            return ids[request_N, depths_N], log_probs[request_N, depths_N]

        weaver = build_weaver_tree(expand, roots, 63, depth, expansion_width=1, children=pool)
        marginal = build_ddtree(log_probs, ids, roots, 63)
        for name in FIELDS:
            assert torch.equal(getattr(weaver, name), getattr(marginal, name))


def test_one_child_per_node_gives_the_chain(device: str) -> None:
    table = random_table(7, 9)
    expand = TableExpand(table)
    roots = torch.tensor([1, 2], device=device)
    tree = build_weaver_tree(expand, roots, 15, 15, children=1)
    chain = DraftTree.chain(roots, tree.tokens[:, 1:])
    for name in FIELDS:
        assert torch.equal(getattr(tree, name), getattr(chain, name))


def test_siblings_carry_distinct_tokens() -> None:
    tree, _ = check(random_table(8, 12, [-1.0, -2.0]), 255, 6, requests=2)
    for request in range(2):
        pairs = list(
            zip(tree.parents[request].tolist(), tree.tokens[request].tolist(), strict=True)
        )
        assert len(set(pairs)) == len(pairs)


def test_no_value_is_read_back_from_the_device() -> None:
    # Meta tensors have no values: anything that looks at one raises.
    calls = []

    def expand(request_N, node_N, tokens_N, depths_N, tree):
        calls.append(tuple(request_N.shape))
        ids = torch.empty(len(request_N), 512, dtype=torch.int64, device="meta")
        return ids, torch.empty(ids.shape, device="meta")

    roots = torch.empty(3, dtype=torch.int64, device="meta")
    tree = build_weaver_tree(expand, roots, 63, 15, full_pools=True)
    assert tree.ancestors.shape == (3, 64, 1)
    assert calls == [(12,)] * 16


def test_bad_input_is_refused() -> None:
    roots = torch.tensor([1, 2])
    expand = TableExpand(random_table(0, 4))
    for budget in (0, 256):
        with pytest.raises(ValueError, match=f"budget {budget} is outside 1..255"):
            build_weaver_tree(expand, roots, budget, 3)
    with pytest.raises(ValueError, match="max_depth is 0"):
        build_weaver_tree(expand, roots, 5, 0)
    with pytest.raises(ValueError, match="width is 0"):
        build_weaver_tree(expand, roots, 5, 3, expansion_width=0)
    with pytest.raises(ValueError, match="children is 0"):
        build_weaver_tree(expand, roots, 5, 3, children=0)
    with pytest.raises(ValueError, match="root_tokens has shape"):
        build_weaver_tree(expand, roots[None], 5, 3)
    ids, log_probs = torch.zeros(2, 4, dtype=torch.int64), torch.zeros(2, 4)
    for answer, message in [
        ((ids[:1], log_probs[:1]), "ids of shape"),
        ((ids, log_probs[:, :3]), "log_probs of shape"),
        ((ids[:, :0], log_probs[:, :0]), "ids of shape"),
        ((log_probs, ids), "return integer ids"),
    ]:
        with pytest.raises(ValueError, match=message):
            build_weaver_tree(lambda *_, answer=answer: answer, roots, 5, 3)
