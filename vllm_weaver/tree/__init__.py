# SPDX-License-Identifier: Apache-2.0
"""Draft trees: their form, the builders, and acceptance.

Nothing here knows vLLM, the target or the adapter: a builder takes log-probabilities or a
callable that returns them, and acceptance takes the tokens that were sampled.
"""

from vllm_weaver.tree.accept import accept
from vllm_weaver.tree.best_first import ExpandFn
from vllm_weaver.tree.ddtree import build_ddtree
from vllm_weaver.tree.draft_tree import MAX_BUDGET, DraftTree
from vllm_weaver.tree.draw import draw_tree
from vllm_weaver.tree.grown_tree import build_grown_tree
from vllm_weaver.tree.shared_noise import (
    CONDITIONAL_WEIGHT,
    MARGINAL_WEIGHT,
    Sampling,
    SharedNoise,
    drawn_log_probs,
    noise_given_draw,
    outside_filters,
)
from vllm_weaver.tree.weaver_tree import build_weaver_tree

__all__ = [
    "CONDITIONAL_WEIGHT",
    "MARGINAL_WEIGHT",
    "MAX_BUDGET",
    "DraftTree",
    "ExpandFn",
    "Sampling",
    "SharedNoise",
    "accept",
    "build_ddtree",
    "build_grown_tree",
    "build_weaver_tree",
    "draw_tree",
    "drawn_log_probs",
    "noise_given_draw",
    "outside_filters",
]
