# SPDX-License-Identifier: Apache-2.0
"""The study of sizes: probabilities belong to their nodes, and policies do what they say."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from benchmarks.testbed import sizing
from benchmarks.testbed.sizing import NODES, Batch, Trees, emitted, simulate
from vllm_weaver.tree import DraftTree, build_weaver_tree


def test_path_probabilities_are_those_of_the_finished_trees_nodes() -> None:
    """Conditionals that depend on depth and parent's token, in groups of four."""
    requests, pool = 3, 9
    table = torch.randn(20, pool, pool, generator=torch.Generator().manual_seed(0)).log_softmax(-1)

    def expand(
        request_N: Tensor, node_N: Tensor, tokens_N: Tensor, depths_N: Tensor, tree: DraftTree
    ) -> tuple[Tensor, Tensor]:
        log_q = table[depths_N.long() + request_N.long(), tokens_N.long() % pool]
        return torch.arange(pool).expand(len(node_N), pool), log_q

    recorded = sizing.Recorded(expand, requests, 41)
    tree = build_weaver_tree(recorded, torch.arange(requests), 40, 6, expansion_width=4)
    found = recorded.path_probabilities(tree)
    for r in range(requests):
        score = [0.0]
        for row in range(1, 41):
            parent, depth = int(tree.parents[r, row]), int(tree.depths[r, row])
            above, token = int(tree.tokens[r, parent]), int(tree.tokens[r, row])
            score.append(score[parent] + float(table[depth - 1 + r, above % pool, token]))
            assert float(found[r, row - 1]) == pytest.approx(torch.tensor(score[-1]).exp().item())
    assert bool((found.diff(dim=1) <= 1e-7).all())


def batch_of(trees: Trees, requests: int, sizes: list[int], ms: list[float]) -> Batch:
    queues = sizing.queues(len(trees.own), requests, 5, 0)
    return Batch(
        *(requests, torch.tensor(sizes), torch.tensor(ms), trees.hit, emitted(trees.hit), queues)
    )


def test_policies_find_the_best_size_and_the_best_nodes() -> None:
    """Every other prompt is easy: ten nodes of its trees are accepted, none of the others'."""
    hit = torch.zeros(8, 40, NODES)
    hit[::2, :, :10] = 1.0
    trees = Trees(hit * 0.9, hit)
    dear = batch_of(trees, 4, [0, 5, 20], [10.0, 11.0, 60.0])
    fixed = [simulate(dear, sizing.Policy(c), 200, 0.2) for c in range(3)]
    assert fixed[0].tolist() == pytest.approx([0.4] * 5)
    assert fixed[1].mean() > fixed[0].mean() > fixed[2].mean()
    for policy in (sizing.Own(emitted(trees.own)), sizing.Own(emitted(trees.own), 2, 0.9)):
        assert simulate(dear, policy, 200, 0.2).mean() >= 0.98 * fixed[1].mean()
    # Nodes of hard prompts are worth nothing: the easy ones get all rows, if they are told apart.
    ragged = simulate(dear, sizing.Ragged(trees.own, trees.own), 200, 0.2)
    assert bool((ragged > 1.1 * fixed[1]).all())
    known = sizing.Frequencies(dear)
    assert simulate(dear, known, 1500, 0.2).mean() > 0.8 * fixed[1].mean()


def test_calibration_is_of_the_other_half_and_times_grow_with_rows() -> None:
    own = torch.rand(6, 50, NODES, generator=torch.Generator().manual_seed(1))
    hit = (torch.rand(own.shape, generator=torch.Generator().manual_seed(2)) < own / 2).float()
    fitted = sizing.calibrated(Trees(own, hit))
    assert float((fitted - own / 2).abs().mean()) < 0.03
    found = sizing.calibration(Trees(own, hit), fitted)["63"]
    assert found["calibrated"] == pytest.approx(found["accepted"], rel=0.05)
    assert found["sum_of_probabilities"] == pytest.approx(2 * found["accepted"], rel=0.05)
    assert sizing.step_ms(1, 1, False) == sizing.step_ms(1, 140, False) == 15.5
    assert sizing.step_ms(4, 256, True) > sizing.step_ms(4, 128, True) > sizing.step_ms(4, 4, False)
