# SPDX-License-Identifier: Apache-2.0
"""How to choose the size of trees: by observed frequencies, or by the trees' own probabilities?

    python -m benchmarks.testbed.sizing vllm_weaver/demo/models --out sizing.json

Every position of texts that the target wrote gets a tree, whose path probabilities and accepted
nodes are kept. Batches of texts are then decoded on paper: a policy chooses how many nodes of its
trees a step verifies, the same for all requests, and the step takes the milliseconds of
:func:`step_ms`. Smaller trees are beginnings of larger ones, so one build serves all sizes.

Replicas of the decoding draw their prompts with replacement; intervals are over replicas, each
compared with plain decoding or with another policy on the same queues of prompts.

Shapes: P prompts, A positions, B nodes of the largest tree, C sizes to choose from, S replicas,
n requests of a batch.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import platform
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from vllm_weaver.adapter import WeaverAdapter
from vllm_weaver.engine.sizes import (
    MARGIN,
    Acceptance,
    Probes,
    StepTimes,
    best_nodes,
)
from vllm_weaver.engine.stats import PUBLISH_SECONDS
from vllm_weaver.tree import DraftTree, ExpandFn, accept, build_weaver_tree

from . import noise
from .config import SIZES, Size
from .drafter import Drafter
from .evaluate import block_states, prompts_of, sampling_at, shared_noise, write
from .target import Target

NODES = 63
GRIDS = {
    "halving": (0, 1, 3, 7, 15, 31, 63),
    "fine": (0, 1, 2, 3, 5, 7, 11, 15, 23, 31, 47, 63),
}
BATCHES = (1, 4, 16, 64)
ROWS_PER_STEP = 256
_BINS, _TEXTS_AT_ONCE = 24, 8


def step_ms(requests: int, rows: int, drafts: bool) -> float:
    """A step of a 27B target on one H200, rounded from kernel times and the model's size.

    Weights, read once, take 15.5 ms and hide 140 rows; a row beyond costs 2 x 25.6e9 FLOP at 600
    TFLOP/s. A request reads and writes 151 MB of recurrent state. Drafter: 1.9 ms; weave: 0.7 ms
    at one request to 1.6 at 16, and no more, since larger batches have smaller trees.
    """
    verify = 15.5 + 0.065 * (requests - 1) + 0.0853 * max(0, rows - 140)
    return verify + drafts * (2.6 + 0.06 * (min(requests, 16) - 1))


@dataclass
class Trees:
    """Path probabilities and accepted nodes, roots left out, at every position: [P, A, B]."""

    own: Tensor
    hit: Tensor


class Recorded:
    """An `expand` that keeps the log-probabilities of what it scored, for one build."""

    def __init__(self, expand: ExpandFn, requests: int, rows: int, children: int = 8) -> None:
        self._expand, self._children = expand, children
        self._ids = torch.full((requests, rows, children), -1)
        self._log_q = torch.full((requests, rows, children), -torch.inf)

    def __call__(
        self, request_N: Tensor, node_N: Tensor, tokens_N: Tensor, depths_N: Tensor, tree: DraftTree
    ) -> tuple[Tensor, Tensor]:
        ids_NP, log_q_NP = self._expand(request_N, node_N, tokens_N, depths_N, tree)
        live = node_N >= 0
        best, order = log_q_NP[live].topk(self._children)
        at = request_N[live].long(), node_N[live].long()
        self._log_q[at], self._ids[at] = best.float(), ids_NP[live].long().gather(1, order)
        self._grown = tree.tokens.clone(), tree.parents.clone()
        return ids_NP, log_q_NP

    def path_probabilities(self, tree: DraftTree) -> Tensor:
        """[R, B]: of each node but the root; 0 where there is no node.

        Rows of the finished tree stand in another order than when they were expanded: a node is
        found again by its token among its parent's children.
        """
        scores, grown = torch.zeros(tree.tokens.shape), torch.zeros(tree.tokens.shape).long()
        everyone = torch.arange(tree.num_requests)
        tokens_RT, parents_RT = self._grown
        for row in range(1, tree.num_rows):
            parent, token = tree.parents[:, row].clamp(min=0).long(), tree.tokens[:, row, None]
            place = grown[everyone, parent]
            same = self._ids[everyone, place] == token
            own = self._log_q[everyone, place].masked_fill(~same, -torch.inf).amax(1)
            scores[:, row] = scores[everyone, parent] + own.clamp(max=0)
            itself = (parents_RT == place[:, None]) & (tokens_RT == token)
            grown[:, row] = itself.int().argmax(1)
        return scores[:, 1:].exp() * tree.live_rows()[:, 1:]


@torch.no_grad()
def trees_of(
    size: Size,
    target: Target,
    drafter: Drafter,
    adapter: WeaverAdapter,
    prompts: Tensor,
    tokens: int,
    temperature: int,
    seed: int = 0,
) -> Trees:
    """Trees at every position of texts that continue `prompts`; at temperature 1 with the
    sampler's noise, as an engine builds them."""
    depth, generator = size.drafter.depth, torch.Generator().manual_seed(seed)
    (text,) = write(target, [prompts], tokens, size.drafter.block, temperature, generator, 1)
    tables = adapter.precompute(target.embedding, target.head)
    count, own, hits = tokens - 1, [], []
    for number, ids in enumerate(text.ids.split(_TEXTS_AT_ONCE)):
        anchors = (text.context + torch.arange(count)).expand(len(ids), count)
        h_ver, h_draft, window, states = block_states(target, drafter, ids, anchors, size)
        root, following = window[:, 0].contiguous(), window[:, 1:]
        pool_logits, pool = target.logits(h_draft).float().topk(size.adapter.pool)
        expand: ExpandFn = adapter.begin(
            *(h_ver, h_draft, pool, pool_logits),
            embed=None,
            lm_head=None,
            max_nodes=NODES + 1,
            tables=tables,
        )
        if temperature:
            rows = ((number << 20) + torch.arange(len(ids))).repeat_interleave(count)
            log_p = target.logits(states).float().log_softmax(-1)
            sampling = sampling_at(len(root), ids.device, size.target.vocab)
            drawn = shared_noise(log_p, pool, following, rows, anchors.flatten(), sampling)
            expand = drawn.expanding(expand)
        recorded = Recorded(expand, len(root), NODES + 1)
        tree = build_weaver_tree(recorded, root, NODES, depth, full_pools=True)
        sampled = torch.cat([following, following[:, -1:]], 1).gather(1, tree.depths.long())
        path, _ = accept(tree, sampled.int(), max_depth=depth)
        hit = torch.zeros(len(root), NODES + 1).scatter_(1, path.clamp(min=0).long(), 1.0)
        own.append(recorded.path_probabilities(tree).view(len(ids), count, NODES))
        hits.append(hit[:, 1:].view(len(ids), count, NODES))
    return Trees(torch.cat(own), torch.cat(hits))


def calibrated(trees: Trees) -> Tensor:
    """Path probabilities [P, A, B] replaced by how often nodes of such a probability are accepted.

    The frequencies are those of the other half of the prompts.
    """
    result = torch.empty_like(trees.own)
    for half in (0, 1):
        own, hit = trees.own[1 - half :: 2].flatten(), trees.hit[1 - half :: 2].flatten()
        edges = own.sort().values[torch.linspace(0, len(own) - 1, _BINS + 1).long()[1:-1]]
        place = torch.bucketize(own, edges)
        zeros = torch.zeros(_BINS)
        rate = zeros.index_add(0, place, hit) / zeros.index_add(0, place, torch.ones_like(own))
        result[half::2] = rate.nan_to_num()[torch.bucketize(trees.own[half::2].contiguous(), edges)]
    return result


def emitted(value_PAB: Tensor) -> Tensor:
    """[P, A, B + 1] tokens of a pass by number of nodes: the bonus, and the sum over them."""
    return 1 + torch.nn.functional.pad(value_PAB.cumsum(-1), (1, 0))


@dataclass
class Batch:
    """What the policies of a batch share.

    Attributes:
        requests: n.
        sizes: C numbers of nodes to choose from, rising.
        ms: [C] milliseconds of a step.
        hit: [P, A, B] accepted nodes.
        tokens: [P, A, B + 1] emitted, by number of nodes.
        queues: [S, n, M] prompts of each place of the batch, one after the other.
    """

    requests: int
    sizes: Tensor
    ms: Tensor
    hit: Tensor
    tokens: Tensor
    queues: Tensor


Where = tuple[Tensor, Tensor]
"""Prompt and position of the requests, [S, n] each."""


class Policy:
    """Chooses sizes before a step; this one always the same."""

    def __init__(self, choice: int = 0) -> None:
        self.choice = choice

    def choose(self, batch: Batch, at: Where, rate: Tensor) -> Tensor:
        """[S] places in `batch.sizes`; `rate` [S] is the tokens a millisecond so far."""
        return torch.full((len(rate),), self.choice)

    def won(self, batch: Batch, at: Where, chosen: Tensor) -> Tensor:
        """[S, n] tokens that the step emits."""
        return batch.tokens[at[0], at[1], batch.sizes[chosen][:, None]]

    def learn(self, batch: Batch, at: Where, chosen: Tensor, ms: Tensor) -> None:
        """What the step showed, and how long it took."""


class Frequencies(Policy):
    """The engine's: `Acceptance` and `best_nodes`, anew twice a second, with its probes."""

    def __init__(self, batch: Batch) -> None:
        n, replicas = batch.requests, len(batch.queues)
        self._sizes: list[int] = batch.sizes.tolist()
        # Drafting is part of the batch's times.
        verify = {(n, k + 1): ms for k, ms in zip(self._sizes, batch.ms.tolist(), strict=True)}
        self._times = StepTimes(verify, {n: 0.0})
        self._known = [Acceptance(NODES) for _ in range(replicas)]
        self._best = torch.full((replicas,), len(self._sizes) - 1)
        self._probes = [Probes() for _ in range(replicas)]
        # Sizes that are tried, and milliseconds after a refresh for which they are.
        self._tried, self._until = 0 * self._best, torch.zeros(replicas)
        self._counts = torch.zeros(2, replicas, NODES)
        self._since, self._clock = torch.zeros(replicas), torch.zeros(replicas)

    def choose(self, batch: Batch, at: Where, rate: Tensor) -> Tensor:
        for s in (self._since >= 1e3 * PUBLISH_SECONDS).nonzero()[:, 0].tolist():
            self._known[s].add(*self._counts[:, s].tolist())
            self._counts[:, s] = self._since[s] = 0
            known = self._times, self._known[s]
            best = best_nodes(batch.requests, self._sizes, *known, MARGIN)
            assert best is not None
            self._best[s], self._until[s] = self._sizes.index(best), 0
            probe = self._probes[s].next(
                *(1e-3 * float(self._clock[s]), batch.requests, best, self._sizes[-1], self._sizes),
                *known,
            )
            if probe is not None:
                self._tried[s], self._until[s] = self._sizes.index(probe[0]), 1e3 * probe[1]
        return torch.where(self._since < self._until, self._tried, self._best)

    def learn(self, batch: Batch, at: Where, chosen: Tensor, ms: Tensor) -> None:
        offered = torch.arange(NODES) < batch.sizes[chosen][:, None]
        self._counts[0] += offered * batch.requests
        self._counts[1] += offered * batch.hit[at].sum(1)
        self._since += ms
        self._clock += ms


class Own(Policy):
    """By the expected tokens of the batch's trees: of this step, of earlier ones, or an average.

    Args:
        expected: [P, A, B + 1].
        late: how many steps late they are known.
        keep: weight of earlier steps in the average; 0 for none.
        long_run: choose the largest tokens - rate x ms, the rate being that so far; else the
            largest tokens / ms of this step.
    """

    def __init__(
        self, expected: Tensor, late: int = 0, keep: float = 0.0, long_run: bool = True
    ) -> None:
        self._expected, self._late, self._keep = expected, late, keep
        self._long_run, self._seen = long_run, list[Tensor]()

    def choose(self, batch: Batch, at: Where, rate: Tensor) -> Tensor:
        prompt, position = (x[..., None] for x in at)
        now = self._expected[prompt, position, batch.sizes].sum(1)
        if self._seen:
            now = self._keep * self._seen[-1] + (1 - self._keep) * now
        self._seen = [*self._seen, now][-self._late - 1 :]
        return best_of(batch, self._seen[0], rate if self._long_run else None)


class Ragged(Policy):
    """A step's rows go to the most probable nodes of the batch, whosever they are; in the step."""

    def __init__(self, own: Tensor, probabilities: Tensor) -> None:
        self._own, self._probabilities = own, probabilities

    def choose(self, batch: Batch, at: Where, rate: Tensor) -> Tensor:
        # No node is above its parent, so that the best nodes are trees.
        self._order = self._own[at].flatten(1).argsort(dim=-1, descending=True, stable=True)
        value = self._probabilities[at].flatten(1).gather(1, self._order)
        sums = torch.nn.functional.pad(value.cumsum(-1), (1, 0))
        return best_of(batch, batch.requests + sums[:, batch.sizes * batch.requests], rate)

    def won(self, batch: Batch, at: Where, chosen: Tensor) -> Tensor:
        hit = batch.hit[at].flatten(1).gather(1, self._order)
        hit *= torch.arange(hit.shape[1]) < batch.sizes[chosen][:, None] * batch.requests
        won = torch.ones(len(chosen), batch.requests)
        return won.scatter_add_(1, self._order // batch.hit.shape[2], hit)


def best_of(batch: Batch, expected_SC: Tensor, rate: Tensor | None) -> Tensor:
    """[S] sizes with most tokens beyond `rate`, or without one with most tokens a millisecond."""
    if rate is None:
        return (expected_SC / batch.ms).argmax(1)
    return (expected_SC - rate[:, None] * batch.ms).argmax(1)


def simulate(batch: Batch, policy: Policy, steps: int, rate: float) -> Tensor:
    """[S] tokens a millisecond after a sixth of `steps`; `rate` is a first guess of it."""
    replicas, n, length = batch.queues.shape
    prompt, position = batch.queues[..., 0], torch.zeros(replicas, n, dtype=torch.long)
    turn = torch.zeros_like(position)
    # The guess has the weight of a second.
    tokens, clock = torch.full((replicas,), 1e3 * rate), torch.full((replicas,), 1e3)
    for step in range(steps):
        if step == steps // 6:
            start = tokens, clock
        at = prompt, position
        chosen = policy.choose(batch, at, tokens / clock)
        ms, won = batch.ms[chosen], policy.won(batch, at, chosen)
        policy.learn(batch, at, chosen, ms)
        tokens, clock = tokens + won.sum(1), clock + ms
        position = position + won.long()
        done = position >= batch.tokens.shape[1]
        turn, position = turn + done, position.masked_fill(done, 0)
        prompt = batch.queues.gather(2, (turn % length)[..., None])[..., 0]
    return (tokens - start[0]) / (clock - start[1])


def queues(prompts: int, requests: int, replicas: int, seed: int) -> Tensor:
    """[S, n, P]: each replica's prompts, drawn with replacement, in an order for each place."""
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.randint(prompts, (replicas, 1, prompts), generator=generator)
    order = torch.rand(replicas, requests, prompts, generator=generator).argsort(-1)
    return drawn.expand_as(order).gather(2, order)


def interval(value_S: Tensor) -> dict[str, float]:
    """Mean and middle 95 % over replicas."""
    low, high = value_S.quantile(torch.tensor([0.025, 0.975])).tolist()
    return {"ratio": round(float(value_S.mean()), 4), "low": round(low, 4), "high": round(high, 4)}


def policies(trees: Trees, probabilities: Tensor, batch: Batch) -> dict[str, Policy]:
    """All that choose, by name."""
    raw, fitted = emitted(trees.own), emitted(probabilities)
    return {
        "frequencies": Frequencies(batch),
        "own, this step": Own(raw),
        "own, this step, its own rate": Own(fitted, long_run=False),
        "own, calibrated, this step": Own(fitted),
        "own, calibrated, 1 late": Own(fitted, 1),
        "own, calibrated, 2 late": Own(fitted, 2),
        "own, average of 8, 2 late": Own(raw, 2, 7 / 8),
        "own, calibrated, average of 8, 2 late": Own(fitted, 2, 7 / 8),
        "own, calibrated, average of 100, 2 late": Own(fitted, 2, 0.99),
        "own, calibrated, this step, ragged": Ragged(trees.own, probabilities),
        "acceptance foreseen": Own(emitted(trees.hit)),
    }


def measure(
    trees: Trees,
    probabilities: Tensor,
    requests: int,
    grid: tuple[int, ...],
    replicas: int,
    steps: int,
    seed: int = 0,
) -> dict[str, Any]:
    """Ratios of tokens a second of every policy, for one batch size."""
    n, rows = requests, ROWS_PER_STEP
    sizes = [k for k in grid if n * (k + 1) <= max(rows, n)]
    ms = torch.tensor([step_ms(n, n * (k + 1), k > 0) for k in sizes])
    drawn = queues(len(trees.own), n, replicas, seed)
    batch = Batch(n, torch.tensor(sizes), ms, trees.hit, emitted(trees.hit), drawn)
    fixed = [simulate(batch, Policy(c), steps, 1 / 20) for c in range(len(sizes))]
    best = max(range(len(sizes)), key=lambda c: float(fixed[c].mean()))
    found = {"largest": fixed[-1], "best fixed": fixed[best]}
    guess = float(fixed[best].mean())
    for name, policy in policies(trees, probabilities, batch).items():
        found[name] = simulate(batch, policy, steps, guess)
    return {
        "sizes": sizes,
        "best_fixed": sizes[best],
        "tokens_per_second": {k: round(1e3 * float(v.mean()), 1) for k, v in found.items()},
        "over_plain": {k: interval(v / fixed[0]) for k, v in found.items()},
        "over_frequencies": {k: interval(v / found["frequencies"]) for k, v in found.items()},
    }


def calibration(trees: Trees, probabilities: Tensor) -> dict[str, Any]:
    """Sums of path probabilities beside accepted nodes, by size of tree, and how well they tell
    one tree from another: the share of the accepted nodes' variance that they explain."""
    result = {}
    for nodes in GRIDS["halving"][1:]:
        own, hit, better = (x[..., :nodes].sum(-1) for x in (trees.own, trees.hit, probabilities))
        result[str(nodes)] = {
            "sum_of_probabilities": round(float(own.mean()), 3),
            "calibrated": round(float(better.mean()), 3),
            "accepted": round(float(hit.mean()), 3),
            "variance_explained": round(1 - float(((hit - better) ** 2).mean() / hit.var()), 3),
        }
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("models", type=Path)
    parser.add_argument("--size", choices=sorted(SIZES), default="nano")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--prompts", type=int, default=96)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--replicas", type=int, default=60)
    parser.add_argument("--steps", type=int, default=800)
    arguments = parser.parse_args()
    size, started = SIZES[arguments.size], time.time()
    target, drafter, adapter, stream = noise.open_models(arguments.models, size, "cpu")
    prompts = prompts_of(stream, dataclasses.replace(size, eval_prompts=arguments.prompts))
    cases = {}
    for temperature in (0, 1):
        trees = trees_of(size, target, drafter, adapter, prompts, arguments.tokens, temperature)
        cases[f"T={temperature}"] = trees, calibrated(trees)
    built = time.time()
    # Half of the requests of each kind, on average; a host knows the temperature of each.
    (greedy, fitted_0), (sampled, fitted_1) = cases.values()
    both = torch.cat([greedy.own, sampled.own]), torch.cat([greedy.hit, sampled.hit])
    cases["mixed"] = Trees(*both), torch.cat([fitted_0, fitted_1])
    settings: dict[str, Any] = {}
    for name, case in cases.items():
        settings[name] = {"calibration": calibration(*case)}
        for grid, sizes in GRIDS.items():
            for requests in BATCHES:
                found = measure(*case, requests, sizes, arguments.replicas, arguments.steps)
                settings[name][f"{grid}, {requests} requests"] = found
                print(name, grid, requests, json.dumps(found["over_frequencies"]), flush=True)
    record = {
        "command": "python -m benchmarks.testbed.sizing "
        + " ".join(f"--{k} {v}" for k, v in vars(arguments).items() if k not in ("models", "out")),
        "device": platform.machine(),
        "torch": torch.__version__,
        "seconds": {"trees": round(built - started, 1), "decoding": round(time.time() - built, 1)},
        "settings": settings,
    }
    if arguments.out is not None:
        arguments.out.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
