# SPDX-License-Identifier: Apache-2.0
"""Rows of trees among a batch's flat entries, and the sampler's walk along them."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from vllm_weaver.engine.sampler import _Rows
from vllm_weaver.engine.step import RequestTrees, RowLayout, TreeStep, depth_offset
from vllm_weaver.tree import DraftTree

COUNTS = [[4, 4, 4], [5, 2, 1], [1], [1, 6, 3], [3, 1, 1, 1]]
CPU = torch.device("cpu")


def layout_of(counts: list[int]) -> RowLayout:
    return RowLayout(np.array(counts), CPU)


def random_trees(counts: list[int], rows: int, seed: int = 0) -> DraftTree:
    """Trees with as many nodes as given, drawn at random."""
    generator = torch.Generator().manual_seed(seed)
    parents = torch.full((len(counts), rows), -1, dtype=torch.int32)
    for request, count in enumerate(counts):
        for node in range(1, count):
            parents[request, node] = int(torch.randint(0, node, (1,), generator=generator))
    tokens = torch.randint(0, 50, parents.shape, generator=generator, dtype=torch.int32)
    return DraftTree.from_parents(tokens, parents, torch.tensor(counts, dtype=torch.int32))


@pytest.mark.parametrize("counts", COUNTS)
def test_flatten_undoes_pack(counts: list[int]) -> None:
    layout = layout_of(counts)
    assert layout.uniform == (len(set(counts)) == 1)
    entries = torch.randn(sum(counts) + 5, 2)
    rows = layout.pack(entries)
    assert rows.shape == (len(counts), max(counts), 2)
    start = 0
    for request, count in enumerate(counts):
        assert torch.equal(rows[request, :count], entries[start : start + count])
        start += count
    assert torch.equal(layout.flatten(rows), entries[: sum(counts)])
    assert layout.exists.sum() == layout.num_entries == sum(counts)


@pytest.mark.parametrize("counts", COUNTS)
def test_path_first_puts_each_path_before_its_requests_rows(counts: list[int]) -> None:
    layout = layout_of(counts)
    total = sum(counts) + 4
    generator = torch.Generator().manual_seed(1)
    path = torch.full((len(counts), 8), -1, dtype=torch.int32)
    length = torch.ones(len(counts), dtype=torch.int32)
    for request, count in enumerate(counts):
        nodes = [0, *(1 + n for n in range(count - 1) if torch.rand(1, generator=generator) < 0.5)]
        path[request, : len(nodes)] = torch.tensor(nodes, dtype=torch.int32)
        length[request] = len(nodes)
    order = layout.path_first(path, length, total)
    assert order.shape == (total,)
    start = 0
    for request, count in enumerate(counts):
        n = int(length[request])
        assert order[start : start + n].tolist() == [start + p for p in path[request, :n].tolist()]
        assert order[start + n : start + count].tolist() == list(range(start + n, start + count))
        start += count
    assert order[start:].tolist() == list(range(start, total))


@pytest.mark.parametrize("counts", COUNTS)
def test_depth_offset_turns_row_numbers_into_depths(counts: list[int]) -> None:
    layout, tree = layout_of(counts), random_trees(counts, max(counts))
    row_numbers = torch.cat([torch.arange(count) for count in counts])
    depths = torch.cat([tree.depths[r, :count] for r, count in enumerate(counts)])
    assert torch.equal(row_numbers + depth_offset(tree, layout), depths.long())


def test_depth_offset_leaves_rows_past_the_tree_where_they_are() -> None:
    layout, tree = layout_of([4, 4]), random_trees([2, 4], 4)
    assert depth_offset(tree, layout)[2:4].tolist() == [0, 0]


def test_a_slot_holds_the_root_alone_until_a_tree_is_stored_and_after_a_reset() -> None:
    trees = RequestTrees(4, 6, CPU)
    slots, tree = torch.tensor([2, 0]), random_trees([7, 3], 7)
    tokens = tree.tokens.clone()
    limits = torch.tensor([7, 7], dtype=torch.int32)
    assert trees.load(slots, tokens, limits).num_nodes.tolist() == [1, 1]
    trees.store(slots, tree)
    loaded = trees.load(slots, tokens, limits)
    for name in ("parents", "depths", "num_nodes", "ancestors"):
        assert torch.equal(getattr(loaded, name), getattr(tree, name))
    trees.reset(2)
    assert trees.load(slots, tokens, limits).num_nodes.tolist() == [1, 3]


def test_a_cut_tree_is_the_prefix_that_was_scheduled() -> None:
    trees = RequestTrees(1, 6, CPU)
    tree = random_trees([7], 7)
    trees.store(torch.tensor([0]), tree)
    cut = trees.load(torch.tensor([0]), tree.tokens[:, :4], torch.tensor([4], dtype=torch.int32))
    assert cut.num_nodes.tolist() == [4]
    assert torch.equal(cut.parents, tree.parents[:, :4])


def test_step_knows_the_context_before_each_tree() -> None:
    trees = RequestTrees(3, 6, CPU)
    counts = np.array([7, 4])
    trees.store(torch.tensor([1, 2]), random_trees([7, 7], 7))
    step = TreeStep.create(
        trees,
        torch.tensor([1, 2, 0]),
        counts,
        torch.arange(20),
        torch.tensor([27, 14, 3], dtype=torch.int32),
    )
    assert (step.num_requests, step.num_tokens) == (2, 11)
    assert step.context_lens.tolist() == [20, 10]
    assert step.tree.num_nodes.tolist() == [7, 4]
    assert step.tree.tokens[1, :4].tolist() == [7, 8, 9, 10]
    path, length = torch.zeros(3, 8, dtype=torch.int32), torch.ones(3, dtype=torch.int32)
    after = step.with_path(path, length)
    assert after.path.shape == (2, 8) and after.length.shape == (2,) and step.path is None


def rows_of(counts: list[int], depth: int = 7) -> tuple[_Rows, DraftTree]:
    """The sampler's view of a batch in which one further request has no draft."""
    rows = max(counts)
    trees = RequestTrees(len(counts) + 1, rows - 1, CPU)
    tree = random_trees(counts, rows)
    trees.store(torch.arange(len(counts)), tree)
    all_counts = np.array([*counts, 1])
    starts = np.concatenate(([0], np.cumsum(all_counts))).astype(np.int32)
    input_ids = torch.cat(
        [*(tree.tokens[r, :count] for r, count in enumerate(counts)), torch.tensor([9])]
    )
    batch = SimpleNamespace(
        cu_num_logits_np=starts,
        cu_num_logits=torch.from_numpy(starts),
        input_ids=input_ids,
        positions=torch.cat([torch.arange(100, 100 + count) for count in all_counts]),
        logits_indices=torch.arange(len(input_ids)),
        idx_mapping=torch.arange(len(counts) + 1),
    )
    return _Rows(SimpleNamespace(trees=trees, depth=depth, step=None), batch, None), tree


def test_walk_follows_the_sampled_token_from_node_to_node() -> None:
    counts = [6, 4]
    rows, tree = rows_of(counts)
    # Each node samples the token of its last child, or a token that no child has.
    sampled = torch.full((11,), 77)
    expected: list[list[int]] = []
    for request, count in enumerate(counts):
        children = {
            node: [c for c in range(count) if int(tree.parents[request, c]) == node]
            for node in range(count)
        }
        first = sum(counts[:request])
        for node, below in children.items():
            if below:
                sampled[first + node] = int(tree.tokens[request, below[-1]])
        node, emitted = 0, []
        while True:
            emitted.append(int(sampled[first + node]))
            matching = [c for c in children[node] if int(tree.tokens[request, c]) == emitted[-1]]
            if not matching:
                break
            node = matching[0]
        expected.append(emitted)
    path, length, tokens = rows.walk(sampled)
    assert length.tolist() == [len(expected[0]), len(expected[1]), 1]
    for request, emitted in enumerate([*expected, [77]]):
        assert tokens[request, : len(emitted)].tolist() == emitted
        assert (tokens[request, len(emitted) :] == -1).all()
    order, in_order = rows.path_order(path, length, tokens)
    for request, emitted in enumerate(expected):
        first = sum(counts[:request])
        n = int(length[request])
        assert order[first : first + n].tolist() == [first + p for p in path[request, :n].tolist()]
        assert in_order[first : first + n].tolist() == emitted


def test_positions_in_the_sampler_are_those_of_depth() -> None:
    rows, tree = rows_of([6, 4])
    depths = torch.cat([tree.depths[0, :6], tree.depths[1, :4], torch.tensor([0])])
    assert torch.equal(rows.positions, 100 + depths.long())
