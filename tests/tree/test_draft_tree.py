# SPDX-License-Identifier: Apache-2.0
"""DraftTree: what is derived from parents, and what a prefix keeps."""

from __future__ import annotations

import random

import pytest
import torch
from tree_oracles import ancestor_words, random_parents

from vllm_weaver.tree import DraftTree
from vllm_weaver.tree.draft_tree import check_budget

KINDS = ("chain", "star", "comb", "random")


def batch(num_rows: int, seed: int, device: str = "cpu") -> tuple[DraftTree, list[list[int]]]:
    """One tree of each kind, of different sizes, with garbage in the rows past them."""
    rng = random.Random(seed)
    counts = [num_rows, *(rng.randint(1, num_rows) for _ in KINDS[1:])]
    parents = [random_parents(rng, n, kind) for n, kind in zip(counts, KINDS, strict=True)]
    padded = [p + [10**6 + rng.randrange(9)] * (num_rows - len(p)) for p in parents]
    tokens = torch.randint(1, 100, (len(KINDS), num_rows), device=device)
    tree = DraftTree.from_parents(
        tokens, torch.tensor(padded, device=device), torch.tensor(counts, device=device)
    )
    return tree, parents


@pytest.mark.parametrize("num_rows", [1, 2, 63, 64, 65, 128, 256])
def test_depths_and_ancestors_follow_from_parents(num_rows: int, device: str) -> None:
    tree, parents = batch(num_rows, num_rows, device)
    tree.validate()
    assert tree.ancestors.shape == (len(KINDS), num_rows, -(-num_rows // 64))
    mask = tree.ancestor_mask()
    for request, expected in enumerate(parents):
        count = len(expected)
        assert int(tree.num_nodes[request]) == count
        assert tree.parents[request].tolist() == expected + [-1] * (num_rows - count)
        assert ancestor_words(tree, request, count) == tree.ancestors[request].tolist()
        for row in {0, count // 2, count - 1}:
            chain = [row]
            while expected[chain[-1]] >= 0:
                chain.append(expected[chain[-1]])
            assert int(tree.depths[request, row]) == len(chain) - 1
            assert mask[request, row].nonzero().flatten().tolist() == sorted(chain)
        assert not tree.tokens[request, count:].any()
        assert not tree.depths[request, count:].any()
        assert not mask[request, count:].any() and not mask[request, :, count:].any()


def test_ancestor_table_lists_the_path_by_depth(device: str) -> None:
    tree, parents = batch(65, 3, device)
    for max_depth in (0, 4, 64):
        table = tree.ancestor_table(max_depth).tolist()
        for request, expected in enumerate(parents):
            for row in range(tree.num_rows):
                path: list[int] = []
                node = row if row < len(expected) else -1
                while node >= 0:
                    path.insert(0, node)
                    node = expected[node]
                path = (path + [-1] * (max_depth + 1))[: max_depth + 1]
                assert table[request][row] == path


def test_every_prefix_is_a_valid_subtree(device: str) -> None:
    tree, parents = batch(70, 5, device)
    for kept in range(-1, 72):
        prefix = tree.prefix(kept)
        prefix.validate()
        counts = [max(0, min(kept, len(p))) for p in parents]
        assert prefix.num_nodes.tolist() == counts
        rebuilt = DraftTree.from_parents(tree.tokens, tree.parents, prefix.num_nodes)
        for name in ("tokens", "parents", "depths", "ancestors"):
            assert torch.equal(getattr(prefix, name), getattr(rebuilt, name))


def test_prefix_takes_a_count_per_request() -> None:
    tree, parents = batch(70, 6)
    prefix = tree.prefix(torch.tensor([3, 70, 0, 1]))
    assert prefix.num_nodes.tolist() == [3, len(parents[1]), 0, min(1, len(parents[3]))]
    prefix.validate()


@pytest.mark.parametrize("depth", [0, 1, 15])
def test_chain_is_the_tree_whose_parents_are_the_rows_above(depth: int, device: str) -> None:
    root = torch.tensor([5, 6], device=device)
    tokens = torch.arange(2 * depth, device=device).reshape(2, depth)
    chain = DraftTree.chain(root, tokens)
    chain.validate()
    assert chain.tokens.tolist() == torch.cat([root[:, None], tokens], 1).tolist()
    assert chain.parents.tolist() == [list(range(-1, depth))] * 2
    assert chain.depths.tolist() == [list(range(depth + 1))] * 2
    assert torch.equal(chain.ancestor_mask(), torch.ones_like(chain.ancestor_mask()).tril())

    wide = DraftTree.chain(root, tokens, num_rows=66)
    wide.validate()
    assert wide.num_rows == 66 and wide.num_nodes.tolist() == [depth + 1] * 2
    assert torch.equal(wide.tokens[:, : depth + 1], chain.tokens)
    assert not wide.tokens[:, depth + 1 :].any()


def test_index_tensors_become_int32() -> None:
    tree, _ = batch(5, 0)
    for name in ("tokens", "parents", "depths", "num_nodes"):
        assert getattr(tree, name).dtype == torch.int32
    again = DraftTree(
        tree.tokens.long(), tree.parents.long(), tree.depths, tree.num_nodes, tree.ancestors
    )
    assert again.tokens.dtype == torch.int32 and again.parents.dtype == torch.int32


def test_validate_names_the_broken_row() -> None:
    def broken(**changes: object) -> DraftTree:
        tree = DraftTree.chain(torch.tensor([1]), torch.tensor([[2, 3, 4]]))
        for name, (index, value) in changes.items():
            getattr(tree, name)[index] = value
        return tree

    broken().validate()
    cases = [
        ({"parents": ((0, 0), 0)}, "row 0 must be the root"),
        ({"parents": ((0, 2), 2)}, "row 2 has parent 2"),
        ({"parents": ((0, 2), -1)}, "row 2 has parent -1"),
        ({"depths": ((0, 3), 1)}, "depths of row 3"),
        ({"ancestors": ((0, 1, 0), 2)}, "ancestors of row 1"),
        ({"num_nodes": (0, 5)}, "outside 0..4"),
    ]
    for changes, message in cases:
        with pytest.raises(ValueError, match=message):
            broken(**changes).validate()
    # The same damage past num_nodes is nobody's business.
    tree = broken(parents=((0, 3), 99), depths=((0, 3), -7), ancestors=((0, 3, 0), -1))
    tree.num_nodes[0] = 3
    tree.validate()


def test_disagreeing_tensors_are_refused() -> None:
    tree, _ = batch(5, 0)
    good = (tree.tokens, tree.parents, tree.depths, tree.num_nodes, tree.ancestors)
    cases = [
        (0, tree.tokens[0], "tokens has shape"),
        (1, tree.parents[:, :4], "parents has shape"),
        (1, tree.parents.float(), "parents is torch.float32"),
        (3, tree.num_nodes[:2], "num_nodes has shape"),
        (4, tree.ancestors.int(), "ancestors is torch.int32"),
        (4, tree.ancestors[..., 0], "ancestors has shape"),
    ]
    for index, value, message in cases:
        arguments = [*good[:index], value, *good[index + 1 :]]
        with pytest.raises(ValueError, match=message):
            DraftTree(*arguments)
    with pytest.raises(ValueError, match="num_rows 3 cannot hold a chain of 3 tokens"):
        DraftTree.chain(torch.tensor([1]), torch.tensor([[2, 3, 4]]), num_rows=3)
    with pytest.raises(ValueError, match="root_tokens has shape"):
        DraftTree.chain(torch.tensor([1, 1]), torch.tensor([[2, 3, 4]]))
    with pytest.raises(ValueError, match="num_nodes has shape"):
        tree.prefix(torch.tensor([1, 2]))


def test_budget_is_1_to_255() -> None:
    assert [check_budget(b) for b in (1, 64, 255)] == [1, 64, 255]
    for budget in (0, -1, 256, 1.0, True):
        with pytest.raises(ValueError, match="budget"):
            check_budget(budget)  # type: ignore[arg-type]
