# SPDX-License-Identifier: Apache-2.0
"""How soon `adapt` finds better sizes, and what looking for them costs, on paper.

    python -m benchmarks.testbed.changes --out changes.json

The engine's own scheduler class (`AdaptiveSizesMixin`) over invented steps: a clock moves by the
milliseconds that a step takes at the 27B's cost (`sizing.step_ms`), counters are published as a
worker publishes them, and texts are acceptance by node, of greedy, sampled and hot text. A text
lasts some minutes, then another follows. Told are the share of the tokens that the best size of
the text would have had, and the seconds after which the chosen size has 97 % of its tokens.

Graphs, as an engine times them at start-up, hold no states; trees take 8 % more than their graph,
plain decoding 2 %, and every request its states.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from vllm_weaver.engine import scheduler
from vllm_weaver.engine.config import tree_sizes, with_all_widths
from vllm_weaver.engine.scheduler import AdaptiveSizesMixin
from vllm_weaver.engine.sizes import StepTimes
from vllm_weaver.engine.stats import PUBLISH_SECONDS

from .sizing import BATCHES, NODES, ROWS_PER_STEP, step_ms

#: Acceptance of the first 15 nodes at 16 requests: `results/e2e-27b-adapt.json`.
TEXTS = {
    "greedy": (
        *(0.802, 0.642, 0.560, 0.516, 0.481, 0.383, 0.311, 0.309),
        *(0.286, 0.235, 0.173, 0.141, 0.094, 0.109, 0.081),
    ),
    "T=1": (
        *(0.590, 0.331, 0.229, 0.182, 0.144, 0.113, 0.102, 0.078),
        *(0.084, 0.056, 0.052, 0.045, 0.052, 0.045, 0.039),
    ),
    "T=2": (
        *(0.297, 0.104, 0.052, 0.029, 0.016, 0.015, 0.010, 0.003),
        *(0.008, 0.007, 0.007, 0.003, 0.002, 0.003, 0.002),
    ),
    "hopeless": (0.02, 0.01) + (0.002,) * 13,
}
#: Texts one after another, with their seconds.
ORDERS = (
    (("hopeless", 60), ("greedy", 120), ("hopeless", 300), ("greedy", 120)),
    (("T=2", 60), ("T=2", 300), ("T=1", 120), ("greedy", 120), ("T=2", 120)),
)
_GRID = (1, 2, 3, 4, 6, 8, 10, 12, 16, 20, 24, 28, 32, 40, 48, 56, 64)
_TREES, _PLAIN = 1.08, 1.02
_NOTICED = 0.97


def acceptance(text: str) -> Tensor:
    """[B] of a text, falling with the node's number beyond those that were measured."""
    first = TEXTS[text]
    rest = [first[-1] * len(first) / j for j in range(len(first) + 1, NODES + 1)]
    return torch.tensor([*first, *rest])


class _Clock:
    """Seconds that pass when steps do."""

    now = 1000.0

    def monotonic(self) -> float:
        return self.now


class _File:
    """What was published, if anything was."""

    text: str | None = None

    def read_text(self) -> str:
        if self.text is None:
            raise OSError
        return self.text


class _Stock:
    """Stands for vLLM's scheduler: schedules what it is told."""

    dynamic_sd_lookup: list[int] | None = None

    def __init__(self, vllm_config: Any):
        self.vllm_config = vllm_config
        self.num_spec_tokens = NODES
        self.max_num_running_reqs = vllm_config.scheduler_config.max_num_seqs
        self.running: list[int] = []
        self.output: Any = None

    def schedule(self) -> Any:
        return self.output


class PaperEngine(AdaptiveSizesMixin, _Stock):
    """An engine whose steps take what they should and accept what they may.

    Args:
        clock: moved by steps.
        most: `max_num_seqs`.
        seed: of what is accepted.
    """

    def __init__(self, clock: _Clock, most: int = 64, seed: int = 0):
        sizes = with_all_widths(tree_sizes(NODES, most, ROWS_PER_STEP))
        spec = SimpleNamespace(
            num_speculative_tokens=NODES, num_speculative_tokens_per_batch_size=sizes
        )
        super().__init__(
            SimpleNamespace(
                instance_id="on-paper",
                scheduler_config=SimpleNamespace(max_num_seqs=most),
                speculative_config=spec,
                additional_config={"weaver": {"proposal": "ddtree", "adapt": True}},
            )
        )
        self._clock, self._published = clock, clock.now
        self._stats = _File()
        self._files = _File(), self._stats
        verify = {
            (requests, nodes + 1): step_ms(1, requests * (nodes + 1), False)
            for requests in _GRID
            for nodes in self._choices_of(requests)
        }
        draft = {n: step_ms(n, n, True) - step_ms(n, n, False) for n in _GRID}
        self._times = StepTimes(verify, draft)
        self._counts = torch.zeros(2, NODES + 1)
        self._on_its_way: str | None = None
        self._generator = torch.Generator().manual_seed(seed)
        self._drafted = 0

    def step_of(self, requests: int, nodes: int) -> float:
        """Milliseconds of a step."""
        assert self._times is not None
        graphs = self._times.graphs_ms(requests, nodes)
        assert graphs is not None
        states = step_ms(requests, 1, False) - step_ms(1, 1, False)
        return graphs * (_TREES if nodes else _PLAIN) + states

    def rate(self, requests: int, nodes: int, accepted: Tensor) -> float:
        """Tokens a millisecond of one size."""
        return requests * (1 + float(accepted[:nodes].sum())) / self.step_of(requests, nodes)

    def best(self, requests: int, accepted: Tensor) -> float:
        """Tokens a millisecond of the best size."""
        choices = self._choices_of(requests)
        return max(self.rate(requests, nodes, accepted) for nodes in choices)

    def step(self, requests: int, accepted: Tensor) -> float:
        """One step; the tokens that it emits. Drafts are those that the step before asked for."""
        nodes, clock = self._drafted, self._clock
        self.running = list(range(requests))
        self.output = SimpleNamespace(
            num_scheduled_tokens=dict.fromkeys(self.running, nodes + 1),
            scheduled_spec_decode_tokens=dict.fromkeys(self.running, [0] * nodes) if nodes else {},
            scheduled_new_reqs=[],
        )
        self.schedule()
        assert self.dynamic_sd_lookup is not None
        self._drafted = self.dynamic_sd_lookup[requests]
        won = torch.binomial(
            torch.full((nodes,), float(requests)), accepted[:nodes], generator=self._generator
        )
        self._counts[0, 1 : nodes + 1] += requests
        self._counts[1, 1 : nodes + 1] += won
        self._publish()
        clock.now += 1e-3 * self.step_of(requests, nodes)
        return requests + float(won.sum())

    def _publish(self) -> None:
        """As `StepStats.publish`: what is on its way arrives with the next step."""
        if self._on_its_way is not None:
            self._stats.text, self._on_its_way = self._on_its_way, None
        elif self._clock.now - self._published >= PUBLISH_SECONDS:
            self._published = self._clock.now
            offered, accepted = self._counts.tolist()
            self._on_its_way = json.dumps(
                {"offered_by_node": offered, "accepted_by_node": accepted}
            )

    def chosen(self, requests: int) -> int:
        """Nodes that were found best, whatever is being tried."""
        table = self.dynamic_sd_lookup if self._after_probe is None else self._after_probe[1]
        assert table is not None
        return table[requests]


def follow(requests: int, order: tuple[tuple[str, float], ...], most: int) -> list[dict[str, Any]]:
    """What an engine does with texts one after another."""
    clock, found = _Clock(), []
    with mock.patch.object(scheduler, "time", clock):
        engine = PaperEngine(clock, most)
        for text, seconds in order:
            accepted = acceptance(text)
            best = engine.best(requests, accepted)
            began, tokens, noticed = clock.now, 0.0, None
            while clock.now - began < seconds:
                tokens += engine.step(requests, accepted)
                nodes = engine.chosen(requests)
                if noticed is None and engine.rate(requests, nodes, accepted) >= _NOTICED * best:
                    noticed = clock.now - began
            found.append(
                {
                    "text": text,
                    "seconds": seconds,
                    "of_best": round(tokens / (1e3 * (clock.now - began)) / best, 4),
                    "over_plain": round(best / engine.rate(requests, 0, accepted), 3),
                    "noticed_after": None if noticed is None else round(noticed, 1),
                    "nodes": engine.chosen(requests),
                }
            )
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--requests", type=int, nargs="+", default=list(BATCHES))
    parser.add_argument("--most", type=int, default=64, help="max_num_seqs")
    given = parser.parse_args()
    record: dict[str, Any] = {"command": "python -m benchmarks.testbed.changes", "batches": {}}
    for requests in given.requests:
        parts = [follow(requests, order, given.most) for order in ORDERS]
        record["batches"][requests] = parts
        for part in parts:
            for text in part:
                print(requests, json.dumps(text), flush=True)
    if given.out:
        given.out.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
