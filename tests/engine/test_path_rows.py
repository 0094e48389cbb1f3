# SPDX-License-Identifier: Apache-2.0
"""The one-launch ops around verification against the step's own layout of the batch."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from vllm_weaver.engine.step import RequestTrees, RowLayout, TreeStep, depth_offset
from vllm_weaver.ops import StepTensors, StoredTrees, accept_paths, gather_rows, prepare_step
from vllm_weaver.tree import DraftTree

CPU = torch.device("cpu")
BUDGET = 11


def random_trees(requests: int, seed: int) -> DraftTree:
    g = torch.Generator().manual_seed(seed)
    parents = torch.full((requests, BUDGET + 1), -1, dtype=torch.int32)
    for row in range(1, BUDGET + 1):
        parents[:, row] = torch.randint(max(0, row - 3), row, (requests,), generator=g)
    tokens = torch.randint(0, 3, parents.shape, generator=g)
    num_nodes = torch.randint(2, BUDGET + 2, (requests,), generator=g)
    return DraftTree.from_parents(tokens, parents, num_nodes)


def walked(tree: DraftTree, seed: int):
    g = torch.Generator().manual_seed(seed)
    sampled = torch.randint(0, 3, tree.tokens.shape, generator=g)
    return accept_paths(
        tree.tokens, tree.parents, tree.depths, tree.num_nodes, tree.ancestors, sampled, 6
    )


@pytest.mark.parametrize("seed", range(4))
def test_order_of_acceptance_is_the_layouts_path_first(seed: int) -> None:
    tree = random_trees(3, seed)
    accepted = walked(tree, seed)
    layout = RowLayout(np.full(3, BUDGET + 1), CPU)
    order = layout.path_first(accepted.path, accepted.length, 3 * (BUDGET + 1))
    assert torch.equal(accepted.order.flatten(), order)
    assert int(accepted.length.max()) > 1


@pytest.mark.parametrize("seed", range(4))
def test_rows_gathered_in_place_are_the_layouts_path_first(seed: int) -> None:
    """Requests of different rows, and entries of others behind them."""
    tree = random_trees(3, seed)
    counts = tree.num_nodes.numpy()
    accepted = walked(tree, seed)
    layout = RowLayout(counts, CPU)
    states = torch.randn(layout.num_entries + 5, 8)
    wanted = states[layout.path_first(accepted.path, accepted.length, len(states))]
    starts = torch.from_numpy(np.concatenate(([0], np.cumsum(counts))))
    gather_rows([states], starts[:3], accepted.path, accepted.length)
    for start, length in zip(starts.tolist(), accepted.length.tolist(), strict=False):
        path = slice(start, start + length)
        assert torch.equal(states[path], wanted[path])
    assert torch.equal(states[layout.num_entries :], wanted[layout.num_entries :])


@pytest.mark.parametrize("counts", [[12, 12, 12], [12, 3, 7]])
def test_prepared_trees_are_the_steps(counts: list[int]) -> None:
    stored = RequestTrees(6, BUDGET, CPU)
    slots = torch.tensor([4, 1, 2])
    stored.store(slots, random_trees(3, 1))
    starts = torch.tensor([0, *np.cumsum(counts)], dtype=torch.int32)
    entries = int(starts[-1]) + 2
    input_ids = torch.arange(100, 100 + entries)
    seq_lens = torch.tensor([40, 50, 60, 9], dtype=torch.int32)
    step = TreeStep.create(stored, slots, np.array(counts), input_ids, seq_lens)
    positions = torch.arange(entries)
    positions[: step.num_tokens] += depth_offset(step.tree, step.layout)

    out, moved = StepTensors.empty(4, BUDGET + 1, 4, CPU), torch.arange(entries)
    trees = StoredTrees(stored.parents, stored.depths, stored.num_nodes, stored.ancestors)
    prepare_step(trees, slots, starts, seq_lens, input_ids, moved, out)
    assert torch.equal(moved, positions)
    assert out.num_nodes.tolist() == [*step.tree.num_nodes.tolist(), 0]
    assert out.context_lens.tolist() == [*step.context_lens.tolist(), 0]
    live, head = step.tree.live_rows(), out.first(3)
    for name in ("tokens", "parents", "depths", "ancestors"):
        assert torch.equal(getattr(head, name)[live], getattr(step.tree, name)[live]), name
    assert torch.equal(head.conv_table[live], step.conv_table(4)[live])
