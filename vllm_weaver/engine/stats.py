# SPDX-License-Identifier: Apache-2.0
"""Counters of tree decoding, kept on the device and read on request.

Nothing here synchronises during a step; :meth:`StepStats.snapshot` does.
"""

from __future__ import annotations

from typing import Any

import torch

from vllm_weaver.engine.step import TreeStep


class StepStats:
    """Running totals over verification passes.

    Attributes:
        chain_fallbacks: requests that got chains because their sampling reads the whole prefix.
    """

    def __init__(self, budget: int, depth: int, device: torch.device):
        self.chain_fallbacks = 0
        self._emitted = torch.zeros(depth + 2, dtype=torch.int64, device=device)
        self._nodes = torch.zeros((), dtype=torch.int64, device=device)
        self._ranks = torch.zeros(budget + 1, dtype=torch.int64, device=device)

    def record(self, step: TreeStep) -> None:
        """Count one step whose paths are known."""
        assert step.path is not None and step.length is not None
        length = step.length.long()
        self._emitted.scatter_add_(0, length, torch.ones_like(length))
        self._nodes += step.tree.num_nodes.sum() - step.num_requests
        nodes = step.path.long()
        self._ranks.scatter_add_(0, nodes.clamp(min=0).flatten(), (nodes > 0).long().flatten())

    def snapshot(self) -> dict[str, Any]:
        """Totals so far.

        Returns:
            ``target_passes``: verified trees. ``emitted_tokens``: tokens that they emitted,
            bonus included. ``mean_accepted_length``: their ratio. ``length_histogram``: passes
            by emitted tokens. ``tree_nodes``: nodes offered, roots excluded.
            ``accepted_by_node``: accepted nodes by place in the tree. ``chain_fallbacks``.
        """
        histogram = self._emitted.tolist()
        passes = sum(histogram)
        emitted = sum(length * count for length, count in enumerate(histogram))
        return {
            "target_passes": passes,
            "emitted_tokens": emitted,
            "mean_accepted_length": emitted / passes if passes else 0.0,
            "length_histogram": histogram,
            "tree_nodes": int(self._nodes),
            "accepted_by_node": self._ranks.tolist(),
            "chain_fallbacks": self.chain_fallbacks,
        }

    def reset(self) -> None:
        """Start counting again."""
        self.chain_fallbacks = 0
        for total in (self._emitted, self._nodes, self._ranks):
            total.zero_()
