# SPDX-License-Identifier: Apache-2.0
"""Times of the small kernels around a proposal on a GPU, each after its check.

    python -m benchmarks.ops.propose [--out FILE]
    python -m benchmarks.ops.propose --interpret

What a step launches beside its models and the weave, at the shapes of Qwen3.6-27B (B = 63, D = 15,
pools of 512, states of 5120): roots and parameters of the requests, their chains, the choice
between chains and trees, keeping of the trees, counters of paths, slots of states. Each stands
beside its definition in PyTorch. Times are as in `benchmarks.ops.step`. `--interpret` runs the
checks on a CPU and times nothing.
"""

from __future__ import annotations

import argparse
import json
import time
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.ops.machine import Checks, machine, start_again_interpreted
from benchmarks.ops.step import DEVICE, INTERPRET, Times, same, tensors
from vllm_weaver.ops import (
    PathCounts,
    PathRows,
    StoredTrees,
    choose_chain,
    count_paths,
    load_roots,
    state_slots,
    store_trees,
)
from vllm_weaver.ops.noise.drawn import drawn_best
from vllm_weaver.tree import DraftTree, Sampling, SharedNoise
from vllm_weaver.tree.shared_noise import MARGINAL_WEIGHT, OUTSIDE_PENALTY

DEPTH, BUDGET, POOL, HIDDEN, SLOTS = 15, 63, 512, 5120, 64
SAMPLINGS = {
    "greedy": (0.0, 250_000, 1.0, 0.0),
    "T=1": (1.0, 250_000, 1.0, 0.0),
    "T=0.6, top-k 20, top-p 0.95": (0.6, 20, 0.95, 0.0),
}


class Proposal:
    """What R requests start from, their pools, and trees that are made already."""

    def __init__(self, R: int, sampling: tuple[float, int, float, float], chains: bool) -> None:
        gen = torch.Generator().manual_seed(R)
        T = BUDGET + 1

        def ints(high: int, *shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
            return torch.randint(0, high, shape, generator=gen, dtype=dtype).to(DEVICE)

        self.hidden = torch.randn(R * 16, HIDDEN, generator=gen).to(DEVICE, torch.bfloat16)
        self.lengths = 1 + ints(16, R, dtype=torch.int32)
        self.slots = torch.randperm(SLOTS, generator=gen)[:R].to(DEVICE, torch.int32)
        floats = [torch.rand(SLOTS, generator=gen).to(DEVICE) for _ in range(3)]
        self.sources = [
            *(ints(2**40, SLOTS), ints(2, SLOTS).bool(), ints(2**40, SLOTS), floats[0]),
            *(ints(99, SLOTS, dtype=torch.int32), floats[1], floats[2]),
        ]
        self.targets = [torch.zeros_like(x) for x in self.sources]
        self.states = torch.zeros(SLOTS, HIDDEN, dtype=torch.bfloat16, device=DEVICE)
        self.paths = PathRows(
            *(T, 16, torch.arange(R * T, device=DEVICE)),
            torch.zeros(R * 16, dtype=torch.int64, device=DEVICE),
            torch.zeros(R, dtype=torch.int32, device=DEVICE),
        )

        logits = 3 * torch.randn(R, DEPTH, POOL, generator=gen)
        self.log_q = logits.log_softmax(-1).sort(-1, descending=True)[0].to(DEVICE)
        self.ids = ints(248_320, R, DEPTH, POOL)
        ones = torch.ones(R, device=DEVICE)
        temperature, top_k, top_p, min_p = sampling
        parameters = (ones * temperature, ones.int() * top_k, ones * top_p, ones * min_p)
        noise = -torch.rand(R, DEPTH, POOL, generator=gen).log().neg().log().to(DEVICE)
        self.noise = SharedNoise(noise, Sampling(*parameters, filtered=True))
        self.chain_only = torch.full((R,), chains, device=DEVICE)

        parents = torch.full((R, T), -1, dtype=torch.int32)
        for row in range(1, T):
            parents[:, row] = torch.randint(max(0, row - 4), row, (R,), generator=gen)
        tokens = torch.randint(0, 248_320, (R, T), generator=gen)
        tree = DraftTree.from_parents(tokens, parents, torch.full((R,), T))
        self.tree = tensors(tree.to(DEVICE))
        self.roots = ints(248_320, R, dtype=torch.int32)
        self.out = [torch.zeros_like(x) for x in self.tree]
        self.stored = StoredTrees(
            *(x.new_zeros((SLOTS, *x.shape[1:])) for x in (*self.tree[1:3], *self.tree[3:]))
        )
        self.tokens = torch.zeros(R, BUDGET, dtype=torch.int64, device=DEVICE)
        sizes = (DEPTH + 2, T, T + 1)
        self.counts = PathCounts(*(torch.zeros(x, dtype=torch.int64, device=DEVICE) for x in sizes))
        columns = torch.arange(16, device=DEVICE, dtype=torch.int32)
        self.path = torch.where(columns < self.lengths[:, None], columns, -1)
        self.table = ints(9, R, 40, dtype=torch.int32)
        self.state_slots = torch.zeros(R, dtype=torch.int32, device=DEVICE)

    def load(self, backend: str = "triton") -> None:
        """Roots, parameters and positions of the batch."""
        load_roots(
            *(self.hidden, self.lengths, BUDGET + 1 - self.lengths, self.slots, self.sources),
            *(self.states, self.targets, self.paths),
            backend=backend,
        )

    def best(self, backend: str = "triton") -> Tensor:
        """The chain's tokens."""
        if backend == "reference":
            return self.noise.marginals(self.log_q, self.ids, count=1)[1][..., 0]
        return drawn_best(
            *(self.log_q, self.ids, self.noise.noise_RDP, self.chain_only),
            *self.noise.sampling.parameters(),
            weight=MARGINAL_WEIGHT,
            penalty=OUTSIDE_PENALTY,
        )

    def choose(self, backend: str = "triton") -> None:
        """Chains or trees."""
        best = self.ids[..., 0]
        choose_chain(best, self.roots, self.chain_only, self.tree, self.out, backend=backend)

    def chain(self) -> None:
        """The same by `DraftTree.chain`."""
        chain = DraftTree.chain(self.roots, self.ids[..., 0], num_rows=BUDGET + 1)
        for out, one, other in zip(self.out, tensors(chain), self.tree, strict=True):
            first = self.chain_only.view(-1, *[1] * (one.dim() - 1))
            out.copy_(torch.where(first, one, other))

    def store(self, backend: str = "triton") -> None:
        """Trees by slot."""
        store_trees(self.tree, self.slots, self.stored, self.tokens, backend=backend)

    def count(self, backend: str = "triton") -> None:
        """Totals of paths."""
        count_paths(self.path, self.lengths, self.tree[3], self.counts, backend=backend)

    def find(self, backend: str = "triton") -> None:
        """Slots of states."""
        lens = self.lengths
        state_slots(self.table, lens, self.tree[3], 0, self.state_slots, backend=backend)

    def results(self) -> list[Tensor]:
        """All that the ops write."""
        return [
            *(self.states, *self.targets, self.paths.out_positions, self.paths.out_rejected),
            *(*self.out, *self.stored, self.tokens, *self.counts, self.state_slots),
        ]


OPS = ("load", "choose", "store", "count", "find")


def run_checks(checks: Checks) -> None:
    """Both backends on tensors of the same seed: every bit alike."""
    for R in (1, 3) if INTERPRET else (1, 16):
        for name, sampling in SAMPLINGS.items():
            for chains in (False, True):
                ours, plain = (Proposal(R, sampling, chains) for _ in range(2))
                for op in OPS:
                    getattr(ours, op)("triton")
                    getattr(plain, op)("reference")
                label = f"R={R} {name} chains={chains}"
                checks.note(f"all {label}", *[same(ours.results(), plain.results())] * 2)
                if chains:
                    # Scores of two candidates may tie within rounding.
                    alike = (ours.best() == plain.best("reference")).float().mean().item()
                    checks.note(f"best {label}", alike, alike > 0.98)
                plain.chain()
                checks.note(f"chain {label}", *[same(ours.out, plain.out)] * 2)


def run_times(times: Times) -> None:
    """Each op beside its definition."""
    for R in (1, 16):
        for name, sampling in SAMPLINGS.items():
            for chains in (False, True):
                case = Proposal(R, sampling, chains)
                times.time(f"best, {name[:8]}, {chains}", "triton", R, case.best)
        case = Proposal(R, SAMPLINGS["T=1"], False)
        times.time("best", "torch", R, partial(case.best, "reference"))
        times.time("choose", "torch, from parents", R, case.chain)
        for op in OPS:
            times.time(op, "triton", R, getattr(case, op))
            times.time(op, "torch", R, partial(getattr(case, op), "reference"))


def main() -> None:
    """Check, then time."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--interpret", action="store_true", help="checks alone, on a CPU")
    parser.add_argument("--out", help="where the JSON goes [benchmarks/results/ops-propose.json]")
    args = parser.parse_args()
    if args.interpret:
        start_again_interpreted("benchmarks.ops.propose")
    if not INTERPRET and not torch.cuda.is_available():
        raise SystemExit("benchmarks.ops.propose needs a GPU, or --interpret for its checks alone")
    started = time.perf_counter()
    checks = Checks()
    run_checks(checks)
    print(f"checked after {time.perf_counter() - started:.0f} s: {checks.failed or 'all well'}")
    results: list[dict[str, Any]] = []
    if not INTERPRET and not checks.failed:
        times = Times()
        run_times(times)
        results = times.results
    report = {**machine(), "checks": checks.results, "times_us": results}
    if args.out or not INTERPRET:
        out = Path(args.out or "benchmarks/results/ops-propose.json")
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(json.dumps(report, indent=1) + "\n")
    if checks.failed:
        raise SystemExit(f"no times, since these checks failed: {', '.join(checks.failed)}")


if __name__ == "__main__":
    main()
