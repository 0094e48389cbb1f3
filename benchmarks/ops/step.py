# SPDX-License-Identifier: Apache-2.0
"""Times of the small kernels around verification on a GPU, each after its checks.

    python -m benchmarks.ops.step [--quick] [--out FILE]
    python -m benchmarks.ops.step --interpret

Acceptance, compaction and the gather of hidden states at the shapes of Qwen3.6-27B (16 attention
layers of 4 key/value heads of 256, 6 sources of 5120 bfloat16), the layout of a step's trees, and
DDTree. A time is the median over replays of a CUDA graph. "cold" clears the L2 cache before every
call and subtracts what the clearing takes, since a forward pass lies between two steps; "warm"
repeats the calls. "host" is the time of the Python call alone. What fails its check is not timed,
and the run ends with status 1. `--interpret` runs the checks at toy size on a CPU and times
nothing.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.ops.gdn import time_calls
from benchmarks.ops.machine import Checks, machine, start_again_interpreted
from vllm_weaver.ops import (
    StepTensors,
    StoredTrees,
    accept_paths,
    ancestor_words,
    compact_kv,
    gather_rows,
    prepare_step,
)
from vllm_weaver.ops.compact import CacheTable
from vllm_weaver.tree import DraftTree, build_ddtree

INTERPRET = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cpu" if INTERPRET else "cuda"
DEPTH = 15
CONV_WIDTH = 4
AIM_US = {1: 60.0, 16: 120.0}
"""Acceptance, compaction and gather together, by batch."""
FLUSH_BYTES = 256 << 20
"""More than any L2 cache holds."""
REPEATS = 10


@dataclass(frozen=True)
class Shapes:
    rows: int
    layers: int
    heads: int
    head_dim: int
    block_size: int
    sources: int
    hidden: int


FULL = Shapes(64, 16, 4, 256, 784, 6, 5120)
TOY = Shapes(40, 2, 2, 32, 8, 3, 72)


class Step:
    """One step's tensors: trees whose samples follow `accepted` rows, caches, hidden states."""

    def __init__(self, R: int, accepted: int, shapes: Shapes, seed: int = 0) -> None:
        self.shapes = shapes
        rng, gen = random.Random(seed), torch.Generator().manual_seed(seed)
        T = shapes.rows
        spread = max(1, T // (DEPTH + 1))
        parents = torch.full((R, T), -1, dtype=torch.int32)
        sampled = torch.randint(0, 1000, (R, T), generator=gen) + 10**6
        tokens = torch.randint(0, 1000, (R, T), generator=gen, dtype=torch.int32)
        for r in range(R):
            depth = [0]
            for node in range(1, T):
                # The path to follow is every `spread`-th row; the others hang anywhere.
                if node % spread == 0 and node // spread < accepted:
                    parent = node - spread
                    sampled[r, parent] = tokens[r, node]
                else:
                    parent = rng.choice([j for j in range(node) if depth[j] < DEPTH])
                    tokens[r, node] += 2000
                parents[r, node] = parent
                depth.append(depth[parent] + 1)
        nodes = torch.full((R,), T, dtype=torch.int32)
        tree = DraftTree.from_parents(tokens, parents, nodes).to(DEVICE)
        self.tree = tree
        self.sampled = sampled.to(DEVICE)
        self.accept_inputs = (
            tree.tokens,
            tree.parents,
            tree.depths,
            tree.num_nodes,
            tree.ancestors,
            self.sampled,
            DEPTH,
        )
        self.out = accept_paths(*self.accept_inputs, backend="reference")
        blocks = -(-R * (T + 40) // shapes.block_size) + 1
        shape = (blocks, shapes.heads, shapes.block_size, 2 * shapes.head_dim)
        self.caches: list[Tensor] = []
        for _ in range(shapes.layers):
            # As vLLM has it: heads before slots, keys and values of a head side by side.
            joint = torch.randn(shape, generator=gen).to(DEVICE, torch.bfloat16).transpose(1, 2)
            self.caches += joint.split(shapes.head_dim, -1)
        self.table = CacheTable(self.caches)
        first = torch.arange(R)[:, None] * (T + 40) + 23
        self.slots = (first + torch.arange(T)).to(DEVICE)
        self.starts = torch.arange(0, R * T + 1, T, dtype=torch.int32, device=DEVICE)
        self.hidden = [
            torch.randn(R * T, shapes.hidden, generator=gen).to(DEVICE, torch.bfloat16)
            for _ in range(shapes.sources)
        ]
        self.trees = StoredTrees(tree.parents, tree.depths, tree.num_nodes, tree.ancestors)
        self.request_slots = torch.arange(R, dtype=torch.int32, device=DEVICE).flip(0)
        self.seq_lens = torch.full((R,), 1000 + T, dtype=torch.int32, device=DEVICE)
        self.input_ids = tree.tokens.flatten().contiguous()
        self.positions = torch.arange(R * T, device=DEVICE)
        self.buffers = StepTensors.empty(R, T, CONV_WIDTH, DEVICE)

    def accept(self, backend: str | None = None) -> None:
        accept_paths(*self.accept_inputs, out=self.out, backend=backend)

    def compact(self, backend: str | None = None) -> None:
        compact_kv(self.table, self.slots, self.out.path, self.out.length, backend=backend)

    def compact_list(self) -> None:
        compact_kv(self.caches, self.slots, self.out.path, self.out.length)

    def gather(self, backend: str | None = None) -> None:
        path, length = self.out.path, self.out.length
        gather_rows(self.hidden, self.starts[:-1], path, length, backend=backend)

    def gather_all_rows(self) -> None:
        """Every row in the order of `AcceptedPaths.order`, as plain indexing does it."""
        order = self.out.order.flatten()
        for source in self.hidden:
            source[order]

    def together(self, backend: str | None = None) -> None:
        self.accept(backend)
        self.compact(backend)
        self.gather(backend)

    def prepare(self, backend: str | None = None, positions: bool = True) -> None:
        prepare_step(
            self.trees,
            self.request_slots,
            self.starts,
            self.seq_lens,
            self.input_ids,
            self.positions if positions else None,
            self.buffers,
            backend=backend,
        )


def marginals(R: int, depth: int, pool: int, ties: bool = False) -> tuple[Tensor, Tensor, Tensor]:
    """Falling log-probabilities and distinct ids of a drafter that is sure of the first tokens."""
    gen = torch.Generator().manual_seed(R)
    logits = torch.randn(R, depth, 4 * pool, generator=gen) * 3
    log_probs, ids = logits.log_softmax(-1).topk(pool, dim=-1)
    if ties:
        log_probs = (log_probs * 2).round() / 2
    return log_probs.to(DEVICE), ids.to(DEVICE), torch.arange(R, device=DEVICE)


def same(a: Any, b: Any) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def tensors(tree: DraftTree) -> list[Tensor]:
    return [tree.tokens, tree.parents, tree.depths, tree.num_nodes, tree.ancestors]


def check_step(checks: Checks, R: int, accepted: int, shapes: Shapes) -> None:
    """Both backends on tensors of the same seed: every bit alike."""
    name = f"R={R} path of {accepted}"
    ours, plain = Step(R, accepted, shapes), Step(R, accepted, shapes)
    for buffer in (*ours.out, *ours.buffers):
        buffer.fill_(-77)
    ours.accept("triton")
    plain.accept("reference")
    checks.note(f"accept {name}", *[same(ours.out, plain.out)] * 2)
    lengths = bool((plain.out.length == accepted).all())
    checks.note(f"accept follows the whole path {name}", lengths, lengths)
    untouched = [c.clone() for c in plain.caches]
    ours.compact("triton")
    plain.compact("reference")
    checks.note(f"compact {name}", *[same(ours.caches, plain.caches)] * 2)
    if accepted > 1:
        moved = not same(untouched, plain.caches)
        checks.note(f"compact moves {name}", moved, moved)
    wanted = [x[plain.out.order.flatten()] for x in plain.hidden]
    ours.gather("triton")
    plain.gather("reference")
    T, leading = shapes.rows, torch.arange(accepted, device=DEVICE)
    rows = (torch.arange(R, device=DEVICE)[:, None] * T + leading).flatten()
    in_order = all(torch.equal(x[rows], y[rows]) for x, y in zip(ours.hidden, wanted, strict=True))
    checks.note(f"gather {name}", *[same(ours.hidden, plain.hidden) and in_order] * 2)
    ours.prepare("triton")
    plain.prepare("reference")
    alike = same(ours.buffers, plain.buffers) and torch.equal(ours.positions, plain.positions)
    checks.note(f"prepare {name}", alike, alike)
    words = torch.equal(
        ours.buffers.ancestors, ancestor_words(ours.buffers.parents, ours.buffers.num_nodes)
    )
    checks.note(f"prepare gives the trees' ancestors {name}", words, words)


def check_ddtree(checks: Checks, R: int, budget: int, depth: int, pool: int) -> None:
    for ties in (False, True):
        inputs = marginals(R, depth, pool, ties)
        ours = build_ddtree(*inputs, budget, backend="triton")
        plain = build_ddtree(*inputs, budget, backend="reference")
        alike = same(tensors(ours), tensors(plain))
        checks.note(f"ddtree R={R} B={budget} P={pool} ties={ties}", alike, alike)


def run_checks(checks: Checks, quick: bool) -> None:
    if INTERPRET:
        for R, accepted in ((1, 1), (3, 9)):
            check_step(checks, R, accepted, TOY)
        check_ddtree(checks, 2, 11, 6, 12)
        return
    for R, accepted in ((1, 16), (16, 8)) if quick else ((1, 1), (1, 16), (4, 2), (16, 8)):
        check_step(checks, R, accepted, FULL)
    for budget in (63,) if quick else (15, 63, 64, 255):
        check_ddtree(checks, 4, budget, DEPTH, 64)


class Times:
    """Collects times; each is printed as it comes."""

    def __init__(self) -> None:
        self.results: list[dict[str, Any]] = []
        self.flush = torch.empty(FLUSH_BYTES, dtype=torch.uint8, device=DEVICE)
        self.flush_us = time_calls([self.flush.zero_] * REPEATS)

    def cold(self, call: Callable[[], object]) -> float:
        return time_calls([self.flush.zero_, call] * REPEATS) * 2 - self.flush_us

    def host(self, call: Callable[[], object], calls: int = 100) -> float:
        call()
        torch.cuda.synchronize()
        started = time.perf_counter()
        for _ in range(calls):
            call()
        spent = time.perf_counter() - started
        torch.cuda.synchronize()
        return spent * 1e6 / calls

    def time(
        self, op: str, variant: str, R: int, call: Callable[[], object], aim: float | None = None
    ) -> float:
        result = {
            "op": op,
            "variant": variant,
            "batch": R,
            "cold_us": round(self.cold(call), 2),
            "warm_us": round(time_calls([call] * REPEATS), 2),
            "host_us": round(self.host(call), 1),
        }
        if aim is not None:
            result |= {"aim_us": aim, "within_aim": result["cold_us"] <= aim}
        self.results.append(result)
        print(
            f"{op:26s} {variant:22s} R={R:3d} cold {result['cold_us']:9.2f} us  "
            f"warm {result['warm_us']:9.2f}  host {result['host_us']:8.1f}"
            + ("" if aim is None else f"  aim {aim:.0f}"),
            flush=True,
        )
        return float(result["cold_us"])


def run_times(times: Times, quick: bool) -> None:
    for R in (1, 16) if quick else (1, 4, 16):
        for accepted in (16,) if quick else (8, 16):
            step = Step(R, accepted, FULL)
            path = f", path of {accepted}"
            times.time(f"accept{path}", "triton", R, step.accept)
            times.time(f"compact{path}", "triton", R, step.compact)
            times.time(f"gather{path}", "triton", R, step.gather)
            times.time(f"together{path}", "triton", R, step.together, AIM_US.get(R))
            if quick or accepted == 16:
                times.time(f"accept{path}", "torch", R, partial(step.accept, "reference"))
                times.time(f"compact{path}", "torch", R, partial(step.compact, "reference"))
                times.time(f"gather{path}", "torch", R, partial(step.gather, "reference"))
                times.time(f"gather{path}", "torch, all rows", R, step.gather_all_rows)
                times.time(f"compact{path}", "triton, list of caches", R, step.compact_list)
                # Without the positions, which every call would move on.
                times.time("prepare", "triton", R, partial(step.prepare, None, False))
                times.time("prepare", "torch", R, partial(step.prepare, "reference", False))
            del step
            torch.cuda.empty_cache()
        for budget in (63,) if quick else (15, 63, 255):
            inputs = marginals(R, DEPTH, 64)
            for name, backend in (("triton", "triton"), ("torch", "reference")):
                call = partial(build_ddtree, *inputs, budget, backend=backend)
                times.time(f"ddtree B={budget}", name, R, call)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--quick", action="store_true", help="batches 1 and 16, fewer variants")
    parser.add_argument("--interpret", action="store_true", help="checks alone, on a CPU")
    parser.add_argument("--out", help="where the JSON goes [benchmarks/results/ops-step.json]")
    args = parser.parse_args()
    if args.interpret:
        start_again_interpreted("benchmarks.ops.step")
    if not INTERPRET and not torch.cuda.is_available():
        raise SystemExit("benchmarks.ops.step needs a GPU, or --interpret for its checks alone")
    started = time.perf_counter()
    checks = Checks()
    run_checks(checks, args.quick)
    print(f"checked after {time.perf_counter() - started:.0f} s", flush=True)
    results: list[dict[str, Any]] = []
    if not INTERPRET and not checks.failed:
        times = Times()
        run_times(times, args.quick)
        results = times.results
    report = {
        **machine(),
        "shapes": vars(TOY if INTERPRET else FULL) | {"depth": DEPTH, "dtype": "torch.bfloat16"},
        "checks": checks.results,
        "failed": checks.failed,
        "seconds": round(time.perf_counter() - started, 1),
        "times_us": results,
    }
    if args.out or not INTERPRET:
        out = Path(args.out or "benchmarks/results/ops-step.json")
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(json.dumps(report, indent=1) + "\n")
    if checks.failed:
        raise SystemExit(f"no times, since these checks failed: {', '.join(checks.failed)}")
    print(f"{report['seconds']:.0f} s in all")


if __name__ == "__main__":
    main()
