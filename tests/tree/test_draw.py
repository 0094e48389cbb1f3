# SPDX-License-Identifier: Apache-2.0
"""The drawing shows every node once, in the tree's shape, and the accepted path."""

from __future__ import annotations

import pytest
import torch

from vllm_weaver.tree import DraftTree, accept, draw_tree

WORDS = ["def", " add", "(", "a", ",\n", "b", "\x1b[2J"]


def small_tree() -> DraftTree:
    parents = torch.tensor([[-1, 0, 0, 1, 1, 3, 5], [-1, 0, 1, 2, 0, 0, 0]])
    tokens = torch.arange(7).expand(2, 7)
    return DraftTree.from_parents(tokens, parents, torch.tensor([7, 4]))


def test_drawing_shows_shape_and_accepted_path() -> None:
    tree = small_tree()
    sampled = torch.tensor([[1, 3, 0, 9, 0, 0, 0], [1, 2, 3, 3, 0, 0, 0]])
    path, _ = accept(tree, sampled)
    assert draw_tree(tree, 0, WORDS.__getitem__, path[0]).splitlines() == [
        "● 'def'",
        "├─ ● ' add'",
        "│  ├─ ● 'a' ○ 'b' ○ '\\x1b[2J'",
        "│  └─ ○ ',\\n'",
        "└─ ○ '('",
    ]
    assert draw_tree(tree, 1, WORDS.__getitem__, path[1]) == "● 'def' ● ' add' ● '(' ● 'a'"


def test_colour_is_asked_for() -> None:
    tree = small_tree()
    plain = draw_tree(tree, 0, WORDS.__getitem__, [0, 2, -1])
    painted = draw_tree(tree, 0, WORDS.__getitem__, [0, 2, -1], color=True)
    assert "\x1b" not in plain
    assert painted.count("\x1b[1;32m") == painted.count("\x1b[0m") == 2
    assert painted.replace("\x1b[1;32m", "").replace("\x1b[0m", "") == plain


def test_a_long_drawing_is_cut_to_a_subtree() -> None:
    lines = draw_tree(small_tree(), 0, WORDS.__getitem__, max_nodes=3).splitlines()
    assert lines == ["○ 'def'", "├─ ○ ' add'", "└─ ○ '('", "… 4 more nodes"]


def test_bad_input_is_refused() -> None:
    with pytest.raises(ValueError, match="request 2"):
        draw_tree(small_tree(), 2, str)
    with pytest.raises(ValueError, match="max_nodes is 0"):
        draw_tree(small_tree(), 0, str, max_nodes=0)
