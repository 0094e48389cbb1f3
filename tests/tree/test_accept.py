# SPDX-License-Identifier: Apache-2.0
"""accept against a plain walk from the root."""

from __future__ import annotations

import random

import pytest
import torch
from tree_oracles import random_parents

from vllm_weaver.tree import DraftTree, accept


def walk(tokens: list[int], parents: list[int], sampled: list[int]) -> list[int]:
    path = [0] if parents else []
    while path:
        here = path[-1]
        hits = [
            row
            for row in range(1, len(parents))
            if parents[row] == here and tokens[row] == sampled[here]
        ]
        if not hits:
            break
        path.append(hits[0])
    return path


def random_batch(seed: int, num_rows: int, device: str) -> tuple[DraftTree, torch.Tensor, list]:
    """Trees whose samples often hit a child, with matching garbage past num_nodes."""
    rng = random.Random(seed)
    rows, counts, paths = [], [], []
    for kind in ("chain", "star", "comb", "random", "random", "chain"):
        count = rng.randint(1, num_rows)
        parents = random_parents(rng, count, kind)
        # Few tokens, so that siblings collide and the first must be followed.
        tokens = [rng.randrange(6) for _ in range(num_rows)]
        sampled = [rng.randrange(6) for _ in range(num_rows)]
        for row in range(count):
            below = [c for c in range(count) if parents[c] == row]
            if below and rng.random() < 0.9:
                sampled[row] = tokens[rng.choice(below)]
        paths.append(walk(tokens, parents, sampled))
        counts.append(count)
        rows.append((tokens, parents + [0] * (num_rows - count), sampled))
    tokens_RT, parents_RT, sampled_RT = (torch.tensor(x) for x in zip(*rows, strict=True))
    counts_R = torch.tensor(counts)
    tree = DraftTree.from_parents(tokens_RT, parents_RT, counts_R)
    past = torch.arange(num_rows) >= counts_R[:, None]
    # Garbage that would be followed: children of the accepted leaf that carry its sample.
    leaf = torch.tensor([p[-1] for p in paths])
    wanted = sampled_RT.gather(1, leaf[:, None]).int()
    tree.tokens = torch.where(past, wanted, tree.tokens)
    tree.parents = torch.where(past, leaf[:, None].int(), tree.parents)
    tree.parents[:, -1] = torch.where(past[:, -1], 10**6, tree.parents[:, -1])
    tree.depths = torch.where(past, torch.tensor([1 - 10**6]), tree.depths)
    tree.ancestors = torch.where(past[:, :, None], -1, tree.ancestors)
    sampled_RT = torch.where(past, torch.tensor([-(2**31)]), sampled_RT)
    return tree.to(device), sampled_RT.to(device), paths


@pytest.mark.parametrize("num_rows", [1, 2, 16, 64, 65, 256])
def test_path_is_that_of_a_plain_walk(num_rows: int, device: str) -> None:
    for seed in range(5):
        tree, sampled, paths = random_batch(seed, num_rows, device)
        path, length = accept(tree, sampled)
        assert path.dtype == length.dtype == torch.int32
        assert path.shape == (len(paths), num_rows)
        assert length.tolist() == [len(p) for p in paths]
        assert path.tolist() == [p + [-1] * (num_rows - len(p)) for p in paths]


@pytest.mark.parametrize("max_depth", [0, 3, 300])
def test_path_ends_at_the_depth_bound(max_depth: int, device: str) -> None:
    tree, sampled, paths = random_batch(1, 64, device)
    path, length = accept(tree, sampled, max_depth=max_depth)
    cut = [p[: max_depth + 1] for p in paths]
    assert length.tolist() == [len(p) for p in cut]
    assert path.tolist() == [p + [-1] * (max_depth + 1 - len(p)) for p in cut]


def test_emitted_tokens_are_the_samples_on_the_path() -> None:
    tree = DraftTree.chain(torch.tensor([9, 9]), torch.tensor([[1, 2, 3], [1, 2, 3]]))
    sampled = torch.tensor([[1, 2, 7, 5], [1, 2, 3, 8]])
    path, length = accept(tree, sampled)
    emitted = [sampled[r, path[r, : length[r]].long()].tolist() for r in range(2)]
    assert emitted == [[1, 2, 7], [1, 2, 3, 8]]


def test_a_matching_node_below_a_miss_is_not_accepted() -> None:
    parents = torch.tensor([[-1, 0, 0, 1, 3]])
    tree = DraftTree.from_parents(torch.tensor([[0, 1, 2, 3, 4]]), parents, torch.tensor([5]))
    path, length = accept(tree, torch.tensor([[2, 3, 0, 4, 0]]))
    assert path.tolist() == [[0, 2, -1, -1, -1]] and length.tolist() == [2]


def test_a_truncated_tree_accepts_the_walk_within_the_prefix(device: str) -> None:
    tree, sampled, _ = random_batch(2, 64, device)
    for kept in (0, 1, 5, 40):
        prefix = tree.prefix(kept)
        counts = prefix.num_nodes.tolist()
        expected = [
            walk(t[:n], p[:n], s)
            for t, p, s, n in zip(
                tree.tokens.tolist(), tree.parents.tolist(), sampled.tolist(), counts, strict=True
            )
        ]
        path, length = accept(prefix, sampled)
        assert length.tolist() == [len(p) for p in expected]
        assert path.tolist() == [p + [-1] * (64 - len(p)) for p in expected]


def test_no_value_is_read_back_from_the_device() -> None:
    # Meta tensors have no values: anything that looks at one raises.
    tree, sampled, _ = random_batch(0, 65, "cpu")
    path, length = accept(tree.to("meta"), sampled.to("meta"))
    assert path.shape == (6, 65) and length.shape == (6,)


def test_bad_input_is_refused() -> None:
    tree, sampled, _ = random_batch(0, 16, "cpu")
    with pytest.raises(ValueError, match="sampled has shape"):
        accept(tree, sampled[:, :15])
    with pytest.raises(ValueError, match=r"sampled is torch\.float32"):
        accept(tree, sampled.float())
    with pytest.raises(ValueError, match="max_depth is -1"):
        accept(tree, sampled, max_depth=-1)
