# SPDX-License-Identifier: Apache-2.0
"""How many nodes a tree should have: by measured times of a step, and by what trees have won.

A step with n requests and K nodes each takes ``t(n, K)`` and emits ``n E(K)`` tokens, where
``E(K) = 1 + sum over j <= K of p_j`` and ``p_j`` is how often node j was accepted. Nodes stand in
the order in which their builder ranked them, so that a smaller tree is the beginning of a larger
one and its ``p_j`` are the same. The best K has the highest ``E(K) / t(n, K)`` (the rule of
CaDDTree, arXiv 2606.01813, with observed frequencies in place of the drafter's probabilities).

Knows neither vLLM nor a device.
"""

from __future__ import annotations

import itertools
import json
import math
import statistics
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TypeVar

_T = TypeVar("_T")

#: Acceptance of a node that was never offered, before anything was observed: node j's share is
#: PRIOR / j, so that trees of 1, 15 and 63 nodes emit 1.9, 4.0 and 5.3 tokens. What was observed of
#: other nodes stretches it.
PRIOR = 0.9
#: Weight of the prior, in passes.
PRIOR_PASSES = 32.0
#: Share of earlier observations of a node that a refresh keeps once there are new ones; passes of
#: them that stay however old they are, since a probe of few requests is no more than a dozen; and
#: the most that stay, since a large batch makes thousands in a second and its text may change.
MEMORY = 0.9
LEAST_PASSES = 64.0
MOST_PASSES = 512.0
#: Trees must promise this much more than plain decoding.
MARGIN = 1.02
#: Share of the tokens that probes of the largest tree may cost, by what is known of it: the nearer
#: it is to the chosen one, the more often it is tried, so that it is known when it becomes better.
#: Smaller trees tell of larger ones; plain decoding tells of none.
PROBE_COST, PROBE_COST_OF_PLAIN = 0.001, 0.005
#: Seconds from one probe of a size to the next: at least, and at most of one that was never seen
#: (or so many times as long as its try, where steps are slow).
LEAST_EVERY, MOST_EVERY, MOST_EVERY_TRIES = 2.0, 32.0, 64.0
#: Steps of a size that must have been seen before their own time counts, and how many are kept.
LEAST_STEPS = 8
MOST_STEPS = 64
#: Steps of one size in a row before the next one is timed.
ALIKE = 3
#: Steps that a try of an unseen size has: those that are timed, those before several are alike, and
#: two that were scheduled before it.
TRIED_STEPS = LEAST_STEPS + ALIKE + 2
#: Seconds after the last step of a size after which its time is forgotten: requests may be longer
#: or shorter by then, and that of the sizes still seen is theirs.
SEEN_SECONDS = 240.0
#: Seconds of a probe of the largest tree, or one step where that is longer.
PROBE_SECONDS = 0.25


def every_second(things: Mapping[int, _T], measure: Callable[[_T], float]) -> dict[int, float]:
    """Measure the first, every second and the last of them by their sizes, and lines between."""
    sizes = sorted(things)
    found = {size: measure(things[size]) for size in {*sizes[::2], *sizes[-1:]}}
    for low, size, high in zip(sizes, sizes[1:], sizes[2:], strict=False):
        if size not in found:
            share = (size - low) / (high - low)
            found[size] = (1 - share) * found[low] + share * found[high]
    return found


@dataclass(frozen=True)
class StepTimes:
    """Milliseconds of the device's work in a step, where no prompt is in the batch.

    Attributes:
        verify: target pass by (requests, rows of each request).
        draft: drafter pass, weaving included, by requests.
    """

    verify: dict[tuple[int, int], float]
    draft: dict[int, float]

    def graph_of(self, requests: int, nodes: int) -> int | None:
        """Requests of the smallest graph that holds so many with trees of ``nodes``."""
        sizes = self._sizes.get(nodes + 1, [])
        place = bisect_left(sizes, requests)
        return sizes[place] if place < len(sizes) else None

    @cached_property
    def _sizes(self) -> dict[int, list[int]]:
        """Requests of the graphs of each width, ascending.

        A refresh looks them up hundreds of times, and the engine waits for it.
        """
        sizes: dict[int, list[int]] = {}
        for requests, rows in sorted(self.verify):
            sizes.setdefault(rows, []).append(requests)
        return sizes

    def graphs_ms(self, requests: int, nodes: int) -> float | None:
        """Time of the graphs of a step alone; None where it was not measured."""
        size = self.graph_of(requests, nodes)
        if size is None:
            return None
        total = self.verify[size, nodes + 1]
        if nodes:
            if not self.draft:
                return None
            # Beyond the largest graph in proportion.
            size = min((n for n in self.draft if n >= requests), default=max(self.draft))
            total += self.draft[size] * max(1.0, requests / size)
        return total

    def step_ms(self, requests: int, nodes: int, seen: SeenSteps | None = None) -> float | None:
        """Time of a step of ``requests`` trees of ``nodes``; None where it was not measured."""
        return self.steps_ms(requests, seen).get(nodes)

    def steps_ms(self, requests: int, seen: SeenSteps | None = None) -> dict[int, float]:
        """Times of steps of ``requests`` trees, by nodes, of all sizes that were measured.

        Those of the steps which were seen, once they are enough. Before that the graphs' time,
        which holds neither what requests add to it (states, keys) nor what follows the graph
        (sampling, acceptance, commit): it is stretched as those of other sizes are that were seen;
        that of trees as those of trees, where some were, since plain decoding lacks other shares.
        """
        found: dict[int, float] = {}
        known: dict[int, float] = {}
        for nodes in (rows - 1 for rows in self._sizes):
            graphs = self.graphs_ms(requests, nodes)
            if graphs is None:
                continue
            found[nodes] = graphs
            if seen is None:
                continue
            own = seen.milliseconds(self.graph_of(requests, nodes), nodes)
            if own is not None:
                known[nodes] = own
        stretches = {nodes: own / found[nodes] for nodes, own in known.items() if found[nodes]}
        trees = [stretch for nodes, stretch in stretches.items() if nodes]
        stretch = statistics.median(trees or stretches.values() or [1.0])
        return {nodes: known.get(nodes, stretch * graphs) for nodes, graphs in found.items()}

    def save(self, file: Path) -> None:
        """Write as JSON; a reader never sees half of it."""
        scratch = file.with_suffix(".part")
        verify = [[*key, ms] for key, ms in sorted(self.verify.items())]
        scratch.write_text(json.dumps({"verify": verify, "draft": sorted(self.draft.items())}))
        scratch.replace(file)

    @classmethod
    def load(cls, file: Path) -> StepTimes | None:
        """Read what :meth:`save` wrote; None if it is not there or damaged."""
        try:
            data = json.loads(file.read_text())
            found = cls(
                verify={(int(n), int(rows)): float(ms) for n, rows, ms in data["verify"]},
                draft={int(n): float(ms) for n, ms in data["draft"]},
            )
            return found if all(ms > 0 for ms in found.verify.values()) else None
        except (OSError, ValueError, KeyError, TypeError):
            return None


@dataclass
class SeenSteps:
    """Milliseconds of the last steps of each size, from one step to the next.

    Attributes:
        times: by requests of the graph and nodes; the newest `MOST_STEPS`.
    """

    times: dict[tuple[int, int], deque[float]] = field(default_factory=dict)
    _latest: dict[tuple[int, int], float] = field(default_factory=dict)

    def add(self, graph: int, nodes: int, milliseconds: float, now: float = 0.0) -> None:
        """A step between steps of the same size, that ended at the second `now`."""
        times = self.times.setdefault((graph, nodes), deque(maxlen=MOST_STEPS))
        times.append(milliseconds)
        self._latest[graph, nodes] = now

    def forget(self, now: float) -> None:
        """Drop sizes of which no step was seen for `SEEN_SECONDS`."""
        for size in [x for x, latest in self._latest.items() if now - latest > SEEN_SECONDS]:
            del self.times[size], self._latest[size]

    def milliseconds(self, graph: int | None, nodes: int) -> float | None:
        """The median, which pauses between requests do not move; None of too few steps."""
        times = self.times.get((graph or 0, nodes), ())
        return statistics.median(times) if len(times) >= LEAST_STEPS else None


@dataclass
class Acceptance:
    """How often the j-th node of a tree is accepted, over the last few refreshes.

    Attributes:
        nodes: nodes B of the largest tree.
        offered, accepted: passes that offered node j, and that accepted it; j from 1 on, [B].
    """

    nodes: int
    offered: list[float] = field(default_factory=list)
    accepted: list[float] = field(default_factory=list)
    _stretch: float = field(default=1.0, init=False, repr=False, compare=False)
    _ages: list[int] = field(default_factory=list, init=False, repr=False, compare=False)
    _emitted: list[float] = field(default_factory=list, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        self.offered = self.offered or [0.0] * self.nodes
        self.accepted = self.accepted or [0.0] * self.nodes
        self._ages = [0] * self.nodes
        self._compare()

    def _compare(self) -> None:
        """Observed acceptance over the prior's, which where nothing is observed is 1.

        Trees that were too small to offer a node say whether its text is an easy one.
        """
        expected = sum(x * PRIOR / j for j, x in enumerate(self.offered, 1))
        most = PRIOR_PASSES * PRIOR
        self._stretch = (sum(self.accepted) + most) / (expected + most)
        # A refresh asks hundreds of times.
        shares = (self.probability(node) for node in range(1, self.nodes + 1))
        self._emitted = list(itertools.accumulate(shares, initial=1.0))

    def add(self, offered: Sequence[float], accepted: Sequence[float]) -> None:
        """Add what was seen since the last call, node 1 first; what came before fades.

        Of a node that was not offered the earlier observations stay: else the prior would return,
        and with it trees that were given up for good reasons. Once it is offered again they have
        the age that they have.
        """
        for j, (passes, hits) in enumerate(zip(offered, accepted, strict=True)):
            self._ages[j] += 1
            if passes:
                known = min(MOST_PASSES, self.offered[j])
                least = min(known * MEMORY, LEAST_PASSES)
                kept = max(known * MEMORY ** self._ages[j], least)
                self.accepted[j] = kept * self.accepted[j] / max(1.0, self.offered[j]) + hits
                self.offered[j] = kept + passes
                self._ages[j] = 0
        self._compare()

    def probability(self, node: int) -> float:
        """Estimate of p_j, with the prior's weight."""
        prior = PRIOR_PASSES * min(1.0, self._stretch * PRIOR / node)
        return (self.accepted[node - 1] + prior) / (self.offered[node - 1] + PRIOR_PASSES)

    def emitted(self, nodes: int) -> float:
        """Expected tokens of a pass over a tree of ``nodes``, the bonus included."""
        return self._emitted[nodes]


def best_unseen(
    requests: int,
    chosen: int,
    choices: Sequence[int],
    times: StepTimes,
    acceptance: Acceptance,
    seen: SeenSteps,
) -> int | None:
    """The size of which no steps were seen that may be better than the chosen one.

    What requests add to its graph is not known. Of plain decoding it may be nothing; of trees it is
    taken for half of what the trees that were seen promise.

    Args:
        requests, choices, times, acceptance, seen: as of :func:`best_nodes`.
        chosen: nodes, best by what is known.

    Returns:
        The best of them; None if there is none, or the chosen one itself was not seen yet.
    """
    known = times.steps_ms(requests, seen)

    def unseen(nodes: int) -> bool:
        return seen.milliseconds(times.graph_of(requests, nodes), nodes) is None

    if chosen not in known or unseen(chosen):
        return None
    best, most = None, acceptance.emitted(chosen) / known[chosen]
    if not chosen:
        most *= MARGIN
    for nodes in choices:
        graphs = times.graphs_ms(requests, nodes)
        if graphs is None or not unseen(nodes):
            continue
        least = (graphs + known[nodes]) / 2 if nodes else graphs / MARGIN
        rate = acceptance.emitted(nodes) / least
        if rate > most:
            best, most = nodes, rate
    return best


@dataclass
class Probes:
    """When a batch has another size than the chosen one for a moment, to learn about it.

    Sizes whose steps were not seen are tried soon and more and more seldom until they are. The
    largest tree is tried again and again, at a cost of at most `PROBE_COST` (`PROBE_COST_OF_PLAIN`)
    by what is known: it tells whether text has become an easier one.
    """

    _largest: float = -math.inf
    #: Times that a size of a graph was tried, and the second of the last one.
    _tried: dict[tuple[int, int], tuple[int, float]] = field(default_factory=dict)
    #: What is being tried, and to which second.
    _trying: tuple[tuple[int, int], float] | None = None

    def next(
        self,
        now: float,
        requests: int,
        chosen: int,
        largest: int,
        choices: Sequence[int],
        times: StepTimes,
        acceptance: Acceptance,
        seen: SeenSteps | None = None,
    ) -> tuple[int, float] | None:
        """The size to try from now on.

        Args:
            now: seconds for which the engine has run.
            requests, choices, times, acceptance, seen: as of :func:`best_nodes`.
            chosen: nodes of the best trees.
            largest: nodes of the trees to probe. Where they have no graph, or are no larger than
                the chosen ones, it is the next smaller size that is, or else the next larger one.

        Returns:
            Nodes, and for how many seconds, at most to the next call; None for no probe.
        """
        known = times.steps_ms(requests, seen)
        if seen is not None:
            unseen = best_unseen(requests, chosen, choices, times, acceptance, seen)
            if unseen is not None:
                size = times.graph_of(requests, unseen) or 0, unseen
                if self._is_due(now, size, 1e-3 * TRIED_STEPS * known[unseen]):
                    return unseen, math.inf
        larger = [nodes for nodes in choices if nodes > chosen and nodes in known]
        if not larger or chosen not in known:
            return None
        largest = max((nodes for nodes in larger if nodes <= largest), default=min(larger))
        rates = [acceptance.emitted(nodes) / known[nodes] for nodes in (largest, chosen)]
        cost = PROBE_COST if chosen else PROBE_COST_OF_PLAIN
        seconds = max(PROBE_SECONDS, 1e-3 * known[largest])
        if now - self._largest < max(LEAST_EVERY, seconds * (1 - rates[0] / rates[1]) / cost):
            return None
        self._largest = now
        return largest, PROBE_SECONDS

    def _is_due(self, now: float, size: tuple[int, int], seconds: float) -> bool:
        """Whether a size is tried from now on, or still; a try has so many `seconds`."""
        if self._trying is not None and self._trying[0] == size and now < self._trying[1]:
            return True
        tries, last = self._tried.get(size, (0, 0.0))
        most = max(MOST_EVERY, MOST_EVERY_TRIES * seconds)
        if tries and now - last < min(LEAST_EVERY * 2 ** (tries - 1), most):
            return False
        self._tried[size], self._trying = (tries + 1, now), (size, now + seconds)
        return True


def best_nodes(
    requests: int,
    choices: Sequence[int],
    times: StepTimes,
    acceptance: Acceptance,
    margin: float,
    seen: SeenSteps | None = None,
) -> int | None:
    """Nodes per tree that emit most tokens a millisecond in a batch of ``requests``.

    Args:
        requests: decoding requests of the batch.
        choices: nodes for which graphs were captured; 0 is plain decoding.
        times: of the steps.
        acceptance: of the nodes.
        margin: trees must promise so much more than plain decoding, as a factor.
        seen: steps as they ran.

    Returns:
        One of ``choices``; None where no time is known.
    """
    best, most = None, 0.0
    known = times.steps_ms(requests, seen)
    for nodes in sorted(choices):
        milliseconds = known.get(nodes)
        if milliseconds is None:
            continue
        rate = acceptance.emitted(nodes) / milliseconds
        if nodes == 0:
            rate *= margin
        if rate > most:
            best, most = nodes, rate
    return best
