# SPDX-License-Identifier: Apache-2.0
"""Counters of tree decoding: kept on the device, read on request or published for Prometheus.

The worker counts; the front-end of ``vllm serve`` exports. They meet in a small file that rank 0
rewrites twice a second, named by the engine's instance, because vLLM carries no statistics of
a plugin between its processes. Nothing here makes the host wait for the device during a step.
"""

from __future__ import annotations

import atexit
import json
import os
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from vllm_weaver.engine.step import TreeStep
from vllm_weaver.ops import PathCounts, count_paths

PUBLISH_SECONDS = 0.5


def stats_file(instance_id: str) -> Path:
    """Where rank 0 of an engine publishes its counters."""
    return Path(tempfile.gettempdir()) / f"vllm-weaver-{instance_id}.json"


def times_file(instance_id: str) -> Path:
    """Where rank 0 of an engine leaves the step times that it measured at start-up."""
    return stats_file(instance_id).with_suffix(".times.json")


class StepStats:
    """Running totals over verification passes.

    Args:
        budget: nodes of a tree without the root.
        depth: deepest level of a tree.
        device: where the totals live.
        file: where to publish them; None to keep them.
    """

    def __init__(self, budget: int, depth: int, device: torch.device, file: Path | None = None):
        self.file = file
        if file is not None:
            atexit.register(file.unlink, missing_ok=True)
        self._depth = depth
        # One buffer, so that one copy reads it: passes by emitted tokens, accepted nodes by
        # place in the tree, passes by number of nodes, root included.
        self._parts = [depth + 2, budget + 1, budget + 2]
        self._totals = torch.zeros(sum(self._parts), dtype=torch.int64, device=device)
        self._counts = PathCounts(*self._totals.split(self._parts))
        self._fallbacks = 0
        self._published = 0.0
        self._copy: tuple[torch.Tensor, torch.cuda.Event | None] | None = None

    def count_chain_fallback(self) -> None:
        """Count a request that gets chains because its sampling reads the whole prefix."""
        self._fallbacks += 1

    def record(self, step: TreeStep) -> None:
        """Count one step whose paths are known."""
        assert step.path is not None and step.length is not None
        count_paths(step.path, step.length, step.tree.num_nodes, self._counts)
        self.publish()

    def snapshot(self) -> dict[str, Any]:
        """Totals so far; waits for the device.

        Returns:
            ``target_passes``: verified trees. ``emitted_tokens``: tokens that they emitted,
            bonus included. ``mean_accepted_length``: their ratio. ``length_histogram``: passes
            by emitted tokens. ``tree_nodes``: nodes offered, roots excluded.
            ``accepted_by_node``: accepted nodes by place in the tree. ``offered_by_node``: passes
            whose tree had a node at that place. ``chain_fallbacks``: requests that got chains.
        """
        return self._describe(self._totals.tolist())

    def reset(self) -> None:
        """Start counting again."""
        self._fallbacks = 0
        self._totals.zero_()

    def _describe(self, totals: list[int]) -> dict[str, Any]:
        emitted_end, ranks_end = self._parts[0], self._parts[0] + self._parts[1]
        histogram, ranks = totals[:emitted_end], totals[emitted_end:ranks_end]
        sizes = totals[ranks_end:]
        # A tree of m rows has a node at every place below m.
        offered = [sum(sizes[place + 1 :]) for place in range(len(ranks))]
        passes = sum(histogram)
        emitted = sum(length * count for length, count in enumerate(histogram))
        return {
            "target_passes": passes,
            "emitted_tokens": emitted,
            "mean_accepted_length": emitted / passes if passes else 0.0,
            "length_histogram": histogram,
            "tree_nodes": sum(offered[1:]),
            "accepted_by_node": ranks,
            "offered_by_node": offered,
            "chain_fallbacks": self._fallbacks,
        }

    def publish(self) -> None:
        """Start a copy to the host twice a second; write it once it has arrived.

        Of every step, also those that count nothing: else the last trees before steps of plain
        decoding would be told with the next trees.
        """
        if self.file is None:
            return
        if self._copy is not None:
            host, arrived = self._copy
            if arrived is None or arrived.query():
                self._copy = None
                self._write(self._describe(host.tolist()))
        elif time.monotonic() - self._published >= PUBLISH_SECONDS:
            self._published = time.monotonic()
            if self._totals.is_cuda:
                host = torch.empty(self._totals.shape, dtype=torch.int64, pin_memory=True)
                host.copy_(self._totals, non_blocking=True)
                event = torch.cuda.Event()
                event.record()
                self._copy = host, event
            else:
                self._copy = self._totals.clone(), None

    def _write(self, snapshot: dict[str, Any]) -> None:
        assert self.file is not None
        scratch = self.file.with_suffix(f".{os.getpid()}")
        try:
            scratch.write_text(json.dumps(snapshot))
            scratch.replace(self.file)
        except OSError:
            self.file = None  # a full or read-only disk costs the metrics, never a request
