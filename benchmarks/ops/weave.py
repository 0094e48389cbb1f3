# SPDX-License-Identifier: Apache-2.0
"""Times of a weave on a GPU, from marginal logits to finished trees, each after its check.

    python -m benchmarks.ops.weave [--quick] [--tune] [--out FILE]
    TRITON_INTERPRET=1 python -m benchmarks.ops.weave --interpret

Shapes are the published adapter's at Qwen3.6-27B's width and vocabulary, weights and states are
random bfloat16. A time is the median over replays of a CUDA graph. It is the time of one step whose
weights and tables were last read in the replay before; the logits are rotated among copies, so that
they come from memory. What fails its check is not timed, and the run ends with status 1 and without
a table.

Checks: pools against the definition, entry by entry, on hard rows; trees in float32 at a small size
against `build_weaver_tree`, row by row; trees at full size, by the sum of their path probabilities
under the definition, which must be within 5 % of the definition's own tree's; equal bits in every
repetition and with overlapping launches. `--interpret` runs those that fit, at toy sizes.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch
import triton
from torch import Tensor

from vllm_weaver.adapter import AdapterTables, WeaverAdapter, WeaverConfig
from vllm_weaver.adapter.triton import Tiling, choose_tiling, launch_linear, linear_scratch
from vllm_weaver.ops import top_pool
from vllm_weaver.tree import DraftTree, build_weaver_tree
from vllm_weaver.weave import TreeWeaver

WORTH_LIMIT = 0.05
"""Relative difference of the trees' sums of path probabilities that bfloat16 may make."""
COPIES = 4
TREE_FIELDS = tuple(field.name for field in fields(DraftTree))


@dataclass(frozen=True)
class Shape:
    """Sizes of an adapter, its target and a pool."""

    vocab: int = 248_320
    width: int = 5120
    rank: int = 2048
    heads: int = 16
    mlp: int = 2048
    depth: int = 15
    pool: int = 512


FULL = Shape()
TOY = Shape(vocab=300, width=32, rank=16, heads=2, mlp=20, depth=4, pool=6)


class Checks:
    """Named checks; `failed` lists those that did not hold."""

    def __init__(self) -> None:
        self.results: dict[str, Any] = {}
        self.failed: list[str] = []

    def note(self, name: str, value: Any, holds: bool, optional: bool = False) -> bool:
        self.results[name] = value
        print(f"check {name}: {value}{'' if holds else '  FAILED'}", flush=True)
        if not holds and not optional:
            self.failed.append(name)
        return holds


class Step:
    """A random adapter and one decode step's inputs for R requests."""

    def __init__(
        self, shape: Shape, R: int, device: str, dtype: torch.dtype, variant: str = "v1"
    ) -> None:
        torch.manual_seed(0)
        self.shape, self.R, self.device = shape, R, device
        config = WeaverConfig(
            d_model=shape.width,
            d_embed=shape.width,
            d_rank=shape.rank,
            num_heads=shape.heads,
            mlp_dim=shape.mlp,
            depth=shape.depth,
            candidate_pool_size=shape.pool,
            variant=variant,
        )
        self.adapter = WeaverAdapter(config, device=device, dtype=dtype)
        # A fresh adapter corrects nothing: give its query a size that changes the ranking.
        self.adapter.lm_head_query_in.weight.data.normal_(std=shape.rank**-0.5)
        made = {"device": device, "dtype": dtype}
        self.embed = torch.randn(shape.vocab, shape.width, **made)
        self.lm_head = torch.randn(shape.vocab, shape.width, **made) * shape.width**-0.5
        self.hidden = torch.randn(R, shape.depth, shape.width, **made)
        self.verified = torch.randn(R, shape.width, **made)
        self.roots = torch.arange(R, device=device)
        self.logits = [
            (torch.randn(R * shape.depth, shape.vocab, device=device) * 3).to(dtype)
            for _ in range(COPIES if device == "cuda" else 1)
        ]
        self.pools = self.make_pools(0)

    def make_pools(self, copy: int) -> tuple[Tensor, Tensor]:
        ids, logits, _ = top_pool(self.logits[copy], self.shape.pool)
        pools = (self.R, self.shape.depth, self.shape.pool)
        return ids.view(pools), logits.view(pools)

    def weaver(self, budget: int, tables: AdapterTables | None, **options: Any) -> TreeWeaver:
        return TreeWeaver(
            self.adapter,
            self.embed if tables is None else None,
            self.lm_head if tables is None else None,
            max_requests=self.R,
            budget=budget,
            pool=self.shape.pool,
            tables=tables,
            full_pools=True,
            graphs=False,
            **options,
        )

    def weave(self, weaver: TreeWeaver) -> DraftTree:
        return weaver.build(self.verified, self.hidden, *self.pools, self.roots)

    def define(self, budget: int, tables: AdapterTables | None = None) -> DraftTree:
        """The same trees by the plain path."""
        matrices = (self.embed, self.lm_head) if tables is None else (None, None)
        scorer = self.adapter.begin(
            *(self.verified, self.hidden, *self.pools, *matrices, budget + 1),
            tables=tables,
        )
        return build_weaver_tree(scorer, self.roots, budget, self.shape.depth, full_pools=True)

    def worth(self, tree: DraftTree) -> Tensor:
        """Sum of path probabilities of each tree's nodes under the definition."""
        scorer = self.adapter.begin(
            *(self.verified, self.hidden, *self.pools, self.embed, self.lm_head),
            tree.tokens.shape[1],
        )
        R, T = tree.tokens.shape
        request = torch.arange(R, device=self.device)
        score = torch.zeros(R, T, device=self.device)
        for row in range(T):
            depths = tree.depths[:, row]
            node = torch.full_like(request, row)
            node = node.masked_fill((depths >= self.shape.depth) | (row >= tree.num_nodes), -1)
            ids_RP, log_probs_RP = scorer(request, node, tree.tokens[:, row], depths, tree)
            mine_RT = tree.parents == row
            hit_RTP = ids_RP[:, None] == tree.tokens[:, :, None]
            gained_RT = torch.where(hit_RTP, log_probs_RP[:, None], 0.0).sum(2)
            score = torch.where(mine_RT, score[:, row, None] + gained_RT, score)
        live = tree.live_rows()
        live[:, 0] = False
        return torch.where(live, score.exp(), 0.0).sum(1)


def same_trees(a: DraftTree, b: DraftTree) -> bool:
    return all(torch.equal(getattr(a, x).cpu(), getattr(b, x).cpu()) for x in TREE_FIELDS)


def kept(tree: DraftTree) -> DraftTree:
    return DraftTree(*(getattr(tree, name).clone() for name in TREE_FIELDS))


def check_pools(checks: Checks, shape: Shape, device: str) -> None:
    gen = torch.Generator().manual_seed(0)
    V, rows = shape.vocab, shape.depth if device == "cuda" else 2
    x = torch.randn(rows, V, generator=gen) * 3
    hard = {
        "normal": x,
        "rounded": x.round(),
        "equal": torch.ones_like(x),
        "few finite": torch.where(torch.arange(V) % 97 == 0, x, -torch.inf),
        "NaN": torch.where(x > 1, torch.nan, x),
        "falling": torch.arange(V, 0, -1).expand(rows, V) / V,
    }
    for name, values in hard.items():
        for dtype in (torch.float32, torch.bfloat16):
            logits = values.to(dtype)
            want = top_pool(logits, shape.pool, backend="reference")
            got = [y.cpu() for y in top_pool(logits.to(device), shape.pool, backend="triton")]
            same = torch.equal(got[0], want[0]) and torch.equal(got[1], want[1])
            close = torch.allclose(got[2], want[2], atol=1e-4, rtol=1e-5)
            checks.note(f"pool, {name}, {dtype}", same and close, same and close)


def check_small_trees(checks: Checks, device: str, small: Shape) -> None:
    """Float32 trees, row by row; the definition runs on the CPU."""
    cases = (("v1", 2, 63, False), ("v2", 3, 31, True)) if device == "cuda" else ()
    for variant, R, budget, tables in (*cases, ("v1", 1, 6, True)):
        step = Step(small, R, "cpu", torch.float32, variant)
        expected = step.define(budget)
        on_device = Step(small, R, device, torch.float32, variant)
        for name, value in vars(step).items():
            if isinstance(value, Tensor):
                setattr(on_device, name, value.to(device))
        on_device.adapter.load_state_dict(step.adapter.state_dict())
        on_device.pools = tuple(x.to(device) for x in step.pools)  # type: ignore[assignment]
        made = on_device.adapter.precompute(on_device.embed, on_device.lm_head)
        weaver = on_device.weaver(budget, made if tables else None)
        same = same_trees(on_device.weave(weaver), expected)
        checks.note(f"float32 trees, {variant}, R={R}, B={budget}, tables={tables}", same, same)


def check_full_trees(
    checks: Checks, step: Step, tables: AdapterTables, budget: int, overlap: bool
) -> bool:
    """Whether overlapping launches hold, too: without them the rest is still worth timing."""
    expected = step.worth(step.define(budget))
    first: DraftTree | None = None
    variants: list[tuple[str, AdapterTables | None, bool]] = [
        ("raw", None, False),
        ("tables", tables, False),
    ]
    if overlap:
        variants.append(("tables, overlap", tables, True))
    for name, made, overlapped in variants:
        label = f"R={step.R}, B={budget}, {name}"
        try:
            weaver = step.weaver(budget, made, overlap=overlapped)
            trees = [kept(step.weave(weaver)) for _ in range(5)]
            trees[0].validate()
        except Exception as error:
            return checks.note(f"builds, {label}", repr(error)[:200], False, overlapped)
        again = all(same_trees(tree, trees[0]) for tree in trees)
        good = checks.note(f"equal bits in 5 builds, {label}", again, again, overlapped)
        if made is not None:
            first = first or trees[0]
            alike = same_trees(trees[0], first)
            good &= checks.note(f"bits of the first form, {label}", alike, alike, overlapped)
        difference = float((step.worth(trees[0]) / expected - 1).abs().max())
        name = f"worth against the definition's, {label}"
        good &= checks.note(name, round(difference, 5), difference < WORTH_LIMIT, overlapped)
    return good and overlap


def time_graph(calls: list[Callable[[], object]], replays: int) -> float:
    """Microseconds per call: the median replay of one graph that holds all calls."""
    for call in calls:
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    for _ in range(3):
        graph.replay()
    times = []
    for _ in range(replays):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
    return statistics.median(times) * 1e3 / len(calls)


class Bench:
    """Collects times; each is printed as it comes."""

    def __init__(self, replays: int) -> None:
        self.replays = replays
        self.results: list[dict[str, Any]] = []

    def time(
        self, part: str, variant: str, R: int, B: int | None, calls: list[Callable[[], object]]
    ) -> None:
        try:
            us = round(time_graph(calls, self.replays), 2)
        except Exception as error:  # beside others' kernels, one that fails is left out
            print(f"{part} {variant} R={R} B={B}: {error!r}"[:300], flush=True)
            return
        self.results.append({"part": part, "variant": variant, "R": R, "B": B, "us": us})
        print(f"{part:12s} {variant:40s} R={R:3d} B={B or '':>4} {us:9.2f} us", flush=True)


def bench_pools(bench: Bench, step: Step) -> None:
    P = step.shape.pool
    for dtype in (torch.bfloat16, torch.float32):
        copies = [x.to(dtype) for x in step.logits]

        def plain(x: Tensor) -> None:
            wide = x.float()
            wide.topk(P, dim=-1)
            wide.logsumexp(-1)

        for name, function in (
            ("ours", lambda x: top_pool(x, P)),
            ("torch.topk alone", lambda x: x.topk(P, dim=-1)),
            ("torch: float, topk, logsumexp", plain),
        ):
            calls = [lambda f=function, x=x: f(x) for x in copies]
            bench.time("top_pool", f"{name}, {dtype}", step.R, None, calls)


def bench_weave(
    bench: Bench, step: Step, tables: AdapterTables, budget: int, overlap: bool, plain: bool
) -> None:
    hidden, pools = step.hidden, step.pools
    forms: list[tuple[str, AdapterTables | None, bool]] = [
        ("raw", None, False),
        ("tables", tables, False),
    ]
    if overlap:
        forms += [("raw, overlap", None, True), ("tables, overlap", tables, True)]
    for name, made, overlapped in forms:
        weaver = step.weaver(budget, made, overlap=overlapped)

        def prefix(weaver: TreeWeaver = weaver) -> None:
            weaver._start(step.R, hidden)
            weaver._run_prefix(step.R)

        def rounds(weaver: TreeWeaver = weaver) -> None:
            for index in range(weaver.rounds):
                query, squares = weaver._run_nodes(step.R)
                weaver._score_and_grow(step.R, index, query, squares, *pools)

        def node_steps(weaver: TreeWeaver = weaver) -> None:
            for _ in range(weaver.rounds):
                weaver._run_nodes(step.R)

        def build(weaver: TreeWeaver = weaver) -> None:
            step.weave(weaver)

        def whole(copy: int, weaver: TreeWeaver = weaver) -> None:
            weaver.build(step.verified, step.hidden, *step.make_pools(copy), step.roots)

        R = step.R
        copies = [lambda c=c: whole(c) for c in range(COPIES)]
        bench.time("whole", f"{name}, with top_pool", R, budget, copies)
        bench.time("build", f"{name}, {weaver.launches} launches", R, budget, [build])
        bench.time("prefix", name, R, budget, [prefix])
        # Rounds without a start find an empty frontier and would expand nothing: build once first.
        bench.time("node steps", f"{name}, {weaver.rounds} rounds", R, budget, [node_steps])
        start_and_rounds = [lambda: (prefix(), rounds())]
        bench.time("start+rounds", name, R, budget, start_and_rounds)
    if plain:
        bench.time("build", "torch, raw", step.R, budget, [lambda: step.define(budget)])
        bench.time("build", "torch, tables", step.R, budget, [lambda: step.define(budget, tables)])


def tilings(rows: int, inputs: int, outputs: int) -> list[Tiling]:
    """The default, and others near it."""
    block_n = min(64, max(16, triton.next_power_of_2(rows)))
    others = [
        Tiling(block_o, block_n, block_k, splits, warps, stages)
        for block_o in (16, 32, 64, 128)
        for block_k, stages in ((128, 4), (256, 3), (64, 5))
        for splits in (1, 2, 4)
        for warps in (4, 8)
        if inputs % (block_k * splits) == 0
        and 64 <= outputs // block_o * splits <= 768
        and (block_o + 2 * block_n) * block_k * 2 * stages < 200_000
        and block_o * block_n // (warps * 32) <= 32
    ]
    return [choose_tiling(rows, inputs, outputs, torch.bfloat16), *others]


def layer_shapes(shape: Shape) -> dict[str, tuple[int, int]]:
    d, r, m = shape.width, shape.rank, shape.mlp
    return {
        "qkv": (r, 3 * r),
        "o": (r, r),
        "fc1": (r, m),
        "token_in": (d, r),
        "query": (r, d),
    }


def linear_call(rows: int, inputs: int, outputs: int, tiling: Tiling) -> Callable[[int], object]:
    """One normed layer at a time, over copies of its weights that no cache holds together."""
    device = "cuda"
    x = torch.randn(rows, inputs, device=device)
    squares = x.square().sum(1)
    copies = max(1, 200_000_000 // (inputs * outputs * 2))
    weights = torch.randn(copies, outputs, inputs, device=device, dtype=torch.bfloat16)
    norm = torch.ones(inputs, device=device), torch.zeros(inputs, device=device), 1e-6
    out = torch.empty(rows, outputs, device=device)
    parts, tickets = linear_scratch(tiling, rows, outputs, False)
    part = torch.empty(max(1, parts), device=device)
    ticket = torch.zeros(max(1, tickets), dtype=torch.int32, device=device)

    def run(index: int) -> object:
        return launch_linear(
            *(tiling, rows, x, weights[index % copies], out),
            part=part,
            ticket=ticket,
            norm=norm,
            squares_JN=(squares, 1),
        )

    return run


def bench_linears(bench: Bench, shape: Shape, rows: int, tune: bool) -> None:
    """Layers alone, weights from memory, beside the time of reading these at 4.3 TB/s."""
    for name, (inputs, outputs) in layer_shapes(shape).items():
        floor = inputs * outputs * 2 / 4.3e6
        for tiling in dict.fromkeys(tilings(rows, inputs, outputs)[: None if tune else 1]):
            run = linear_call(rows, inputs, outputs, tiling)
            label = f"{name} {tuple(tiling)}, weights alone {floor:.1f}"
            calls = [lambda i=i, run=run: run(i) for i in range(24)]
            bench.time("linear", label, rows, None, calls)


def compile_part(task: tuple[str, int, int]) -> None:
    """Compile what one number of requests and budget needs, in a process of its own."""
    part, R, budget = task
    overlap = torch.cuda.get_device_capability()[0] >= 9
    if part == "linear":
        index = budget
        name, (inputs, outputs) = list(layer_shapes(FULL).items())[index]
        for tiling in tilings(R, inputs, outputs):
            try:
                linear_call(R, inputs, outputs, tiling)(0)
            except Exception as error:
                print(f"linear {name} {tuple(tiling)}: {error!r}"[:200], flush=True)
        torch.cuda.synchronize()
        return
    # A small vocabulary: it enters no kernel but the pool's.
    step = Step(Shape(vocab=8192), R, "cuda", torch.bfloat16)
    if part == "pool":
        for dtype in (torch.bfloat16, torch.float32):
            top_pool(torch.zeros(1, FULL.vocab, device="cuda", dtype=dtype), FULL.pool)
    else:
        tables = step.adapter.precompute(step.embed, step.lm_head)
        for made in (None, tables):
            for overlapped in (False, True) if overlap else (False,):
                try:
                    step.weave(step.weaver(budget, made, overlap=overlapped))
                except Exception as error:  # the check will say so again
                    print(f"{task} overlap={overlapped}: {error!r}"[:300], flush=True)
    torch.cuda.synchronize()


def system() -> dict[str, Any]:
    def output(*command: str) -> str:
        return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()

    query = "--query-gpu=driver_version,clocks.sm,clocks.mem,clocks.max.sm"
    return {
        "command": " ".join(sys.argv),
        "commit": output("git", "rev-parse", "HEAD") or None,
        "device": torch.cuda.get_device_name(),
        "driver_and_clocks": output("nvidia-smi", query, "--format=csv,noheader"),
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "triton": triton.__version__,
            "cuda": torch.version.cuda,
        },
    }


def interpret() -> None:
    """The checks at toy sizes, in Triton's interpreter."""
    checks = Checks()
    check_pools(checks, TOY, "cpu")
    check_small_trees(checks, "cpu", TOY)
    step = Step(TOY, 1, "cpu", torch.float32)
    check_full_trees(checks, step, step.adapter.precompute(step.embed, step.lm_head), 4, False)
    print("failed: " + ", ".join(checks.failed) if checks.failed else "all checks hold")
    raise SystemExit(bool(checks.failed))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", default="benchmarks/results/ops-weave.json")
    parser.add_argument("--quick", action="store_true", help="R = 1 and 16, B = 63, fewer replays")
    parser.add_argument("--tune", action="store_true", help="time other tilings of the layers, too")
    parser.add_argument("--interpret", action="store_true", help="checks alone, without a GPU")
    parser.add_argument("--compile-workers", type=int, default=12)
    args = parser.parse_args()
    if args.interpret:
        interpret()
    if not torch.cuda.is_available():
        raise SystemExit("benchmarks.ops.weave needs a GPU, or --interpret with TRITON_INTERPRET=1")
    started = time.perf_counter()
    batches = (1, 16) if args.quick else (1, 4, 16)
    budgets = (63,) if args.quick else (15, 31, 63, 127)
    overlap = torch.cuda.get_device_capability()[0] >= 9
    tasks = [("pool", 1, 0)] + [("weave", R, B) for B in reversed(budgets) for R in batches]
    if args.tune:
        tasks += [("linear", rows, i) for rows in (4, 64) for i in range(len(layer_shapes(FULL)))]
    with multiprocessing.get_context("spawn").Pool(args.compile_workers) as pool:
        pool.map(compile_part, tasks, chunksize=1)
    print(f"{len(tasks)} parts compiled in {time.perf_counter() - started:.0f} s", flush=True)

    checks, bench = Checks(), Bench(15 if args.quick else 31)
    check_pools(checks, FULL, "cuda")
    check_small_trees(
        *(checks, "cuda"),
        Shape(vocab=500, width=96, rank=64, heads=4, mlp=80, depth=6, pool=40),
    )
    for R in batches:
        step = Step(FULL, R, "cuda", torch.bfloat16)
        tables = step.adapter.precompute(step.embed, step.lm_head)
        for budget in budgets:
            overlap &= check_full_trees(checks, step, tables, budget, overlap)
        if checks.failed:
            break
        bench_pools(bench, step)
        for budget in budgets:
            plain = (budget == 63 and not args.quick) or (R == 1 and budget == 63)
            bench_weave(bench, step, tables, budget, overlap, plain)
        del step, tables
        torch.cuda.empty_cache()
    if not checks.failed:
        for rows in (4, 64):
            bench_linears(bench, FULL, rows, args.tune)
    if checks.failed:
        raise SystemExit(f"no figures, since checks failed: {', '.join(checks.failed)}")
    report = {
        **system(),
        "shapes": vars(FULL),
        "seconds": round(time.perf_counter() - started),
        "checks": checks.results,
        "times_us": bench.results,
    }
    Path(args.out).parent.mkdir(parents=True, exist_ok=True)
    Path(args.out).write_text(json.dumps(report, indent=1) + "\n")
    print(f"written to {args.out} after {report['seconds']} s")


if __name__ == "__main__":
    main()
