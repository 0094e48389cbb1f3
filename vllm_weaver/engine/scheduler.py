# SPDX-License-Identifier: Apache-2.0
"""vLLM's schedulers, with trees as large as measured times and acceptance recommend.

vLLM's scheduler looks the number of drafts up by batch size. Ours writes that table anew twice a
second, from the step times that rank 0 measured at start-up and from the counters that it
publishes. Nothing of a step waits for either.
"""

from __future__ import annotations

import itertools
import json
import time
from typing import Any

from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler

from vllm_weaver.engine import compat
from vllm_weaver.engine.config import options_of, tree_sizes, with_all_widths
from vllm_weaver.engine.sizes import (
    ALIKE,
    MARGIN,
    Acceptance,
    Probes,
    SeenSteps,
    StepTimes,
    best_nodes,
)
from vllm_weaver.engine.stats import PUBLISH_SECONDS, stats_file, times_file

# Base of the mixin, whose methods come from the class that it is mixed into.
_Scheduler: Any = object


def decode_size(output: Any) -> tuple[int, int] | None:
    """Requests of a step and drafts of each; None if a prompt is among them, or they differ.

    Args:
        output: vLLM's `SchedulerOutput`.
    """
    scheduled, drafts = output.num_scheduled_tokens, output.scheduled_spec_decode_tokens
    if not scheduled or output.scheduled_new_reqs:
        return None
    nodes = len(next(iter(drafts.values()))) if drafts else 0
    if nodes and len(drafts) < len(scheduled):
        return None
    alike = all(tokens == nodes + 1 for tokens in scheduled.values())
    return (len(scheduled), nodes) if alike else None


class AdaptiveSizesMixin(_Scheduler):
    """Chooses the size of trees by batch size, again and again."""

    dynamic_sd_lookup: list[int] | None

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        instance = self.vllm_config.instance_id
        self._files = times_file(instance), stats_file(instance)
        self._times: StepTimes | None = None
        self._steps = SeenSteps()
        self._last: tuple[float, tuple[int, int] | None, int] = (0.0, None, 0)
        self._seen: list[list[float]] | None = None
        self._acceptance = Acceptance(self.num_spec_tokens)
        self._refreshed = self._called = time.monotonic()
        #: Seconds for which requests were running: a pause is no time to pay probes from.
        self._active = 0.0
        self._probes = Probes()
        self._after_probe: tuple[float, list[int]] | None = None
        # Requests of the last step without prompts.
        self._decoding = 0
        widths = compat.decode_widths(self.vllm_config)
        self._choices = sorted(rows - 1 for rows in widths)
        self._most = max(rows * requests for rows, requests in widths.items())
        if self.dynamic_sd_lookup is None:
            self.dynamic_sd_lookup = [self.num_spec_tokens] * (self.max_num_running_reqs + 1)
        rows = options_of(self.vllm_config).rows_per_step
        sizes = tree_sizes(self.num_spec_tokens, self.max_num_running_reqs, rows)
        schedule = self.vllm_config.speculative_config.num_speculative_tokens_per_batch_size
        if [tuple(part) for part in schedule or ()] == with_all_widths(sizes):
            # Not the user's own: it names widths to capture, and this is the rule.
            by_batch = [[k] * (last + 1 - first) for first, last, k in sizes]
            self.dynamic_sd_lookup = [0, *itertools.chain.from_iterable(by_batch)]
        self._fixed = list(self.dynamic_sd_lookup)

    def schedule(self, *args: Any, **kwargs: Any) -> Any:
        """vLLM's schedule, from a table that is half a second old at most."""
        now = time.monotonic()
        if self.running:
            self._active += now - self._called
        self._called = now
        if now - self._refreshed >= PUBLISH_SECONDS:
            self._refreshed = now
            self.refresh_sizes()
        elif self._after_probe is not None and now - self._refreshed >= self._after_probe[0]:
            self.dynamic_sd_lookup, self._after_probe = self._after_probe[1], None
        output = super().schedule(*args, **kwargs)
        self._see(now, output)
        return output

    def _see(self, now: float, output: Any) -> None:
        """Time the step before this one, if the steps around it were like it.

        A scheduler that works ahead is held up by the step before the last, so what lies between
        two calls is the time of a step where several in a row are alike.
        """
        before, size, alike = self._last
        own = decode_size(output)
        if own is not None:
            self._decoding = own[0]
        if own is None or own != size:
            self._last = now, own, 0
            return
        self._last = now, own, alike + 1
        graph = None if self._times is None else self._times.graph_of(*own)
        if graph is not None and alike >= ALIKE:
            self._steps.add(graph, own[1], 1e3 * (now - before), now)

    def refresh_sizes(self) -> None:
        """Read what has been published, and choose anew for every batch size."""
        times, stats = self._files
        self._times = self._times or StepTimes.load(times)
        try:
            counts = json.loads(stats.read_text())
        except (OSError, ValueError):
            counts = None
        if counts is not None:
            self._observe(counts["offered_by_node"][1:], counts["accepted_by_node"][1:])
        if self._times is None:
            return
        self._steps.forget(time.monotonic())
        table = list(self._fixed)
        for requests in range(1, len(table)):
            known = self._times, self._acceptance, MARGIN, self._steps
            best = best_nodes(requests, self._choices_of(requests), *known)
            if best is not None:
                table[requests] = best
        self.dynamic_sd_lookup, self._after_probe = table, None
        if 0 < self._decoding < len(table):
            self._probe(table)

    def _choices_of(self, requests: int) -> list[int]:
        """Sizes for which there are graphs; memory was reserved for the fixed table's rows."""
        return [k for k in self._choices if requests * (k + 1) <= self._most]

    def _probe(self, table: list[int]) -> None:
        """Another size than the chosen one for a short while, if the batch's are to be tried."""
        assert self._times is not None
        requests = self._decoding
        probe = self._probes.next(
            *(self._active, requests, table[requests], self._fixed[requests]),
            *(self._choices_of(requests), self._times, self._acceptance, self._steps),
        )
        if probe is None:
            return
        nodes, seconds = probe
        self._after_probe = seconds, table
        self.dynamic_sd_lookup = list(table)
        graph = self._times.graph_of(requests, nodes)
        for n in range(1, len(table)):
            if self._times.graph_of(n, nodes) == graph and nodes in self._choices_of(n):
                self.dynamic_sd_lookup[n] = nodes

    def _observe(self, offered: list[float], accepted: list[float]) -> None:
        seen = [offered, accepted]
        if self._seen is not None:
            since = [
                [new - old for new, old in zip(a, b, strict=True)]
                for a, b in zip(seen, self._seen, strict=True)
            ]
            # A counter that was reset starts again.
            if min(map(min, since)) >= 0:
                self._acceptance.add(*since)
        self._seen = seen


class AdaptiveScheduler(AdaptiveSizesMixin, Scheduler):
    """For engines that wait for each step."""


class AdaptiveAsyncScheduler(AdaptiveSizesMixin, AsyncScheduler):
    """For engines that schedule ahead, as on a GPU."""


def make_scheduler(vllm_config: Any, *args: Any, **kwargs: Any) -> Any:
    """The scheduler that vLLM would take, with adaptive sizes."""
    ahead = vllm_config.scheduler_config.async_scheduling
    kind = AdaptiveAsyncScheduler if ahead else AdaptiveScheduler
    return kind(vllm_config, *args, **kwargs)
