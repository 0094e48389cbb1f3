# SPDX-License-Identifier: Apache-2.0
"""Times of a weave on a GPU, from marginal logits to finished trees, each after its check.

    python -m benchmarks.ops.weave [--quick] [--out FILE]
    python -m benchmarks.ops.weave --tune [--out FILE]      # see weave_tune.py
    python -m benchmarks.ops.weave --interpret

Shapes are the published adapter's at Qwen3.6-27B's width and vocabulary, weights and states are
random bfloat16. A time is the median over replays of a CUDA graph. It is the time of one step whose
weights and tables were last read in the replay before; the logits are rotated among copies, so that
they come from memory. What fails its check is not timed, and the run ends with status 1 and without
a table.

Checks: pools against the definition, entry by entry, on hard rows; trees in float32 at a small size
against `build_weaver_tree`, row by row; trees at full size, by the sum of their path probabilities
under the definition, which must be within 5 % of the definition's own tree's; equal bits in every
repetition. `--interpret` runs those that fit, at toy sizes, on a CPU.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.ops.machine import Checks, machine, start_again_interpreted
from vllm_weaver.adapter import AdapterTables, WeaverAdapter, WeaverConfig
from vllm_weaver.adapter.tiling import Tiling, choose_tiling, linear_scratch
from vllm_weaver.adapter.triton import INTERPRETED, launch_linear
from vllm_weaver.ops import top_pool
from vllm_weaver.tree import DraftTree, build_weaver_tree
from vllm_weaver.tree.rank_triton import rank_rows
from vllm_weaver.weave import TreeWeaver
from vllm_weaver.weave.arguments import ByDepth
from vllm_weaver.weave.weaver import can_overlap

WORTH_LIMIT = 0.05
"""Relative difference of the trees' sums of path probabilities that bfloat16 may make."""
COPIES = 4
SMALLER = (31, 15, 7, 3)
"""Nodes of use that a larger budget's weaver is timed with."""
DEVICE = "cuda"
TREE_FIELDS = tuple(part.name for part in fields(DraftTree))


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
SMALL = Shape(vocab=500, width=96, rank=64, heads=4, mlp=80, depth=6, pool=40)
TOY = Shape(vocab=300, width=32, rank=16, heads=2, mlp=20, depth=4, pool=6)


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

    def weave(self, weaver: TreeWeaver, nodes: int | None = None) -> DraftTree:
        return weaver.build(self.verified, self.hidden, *self.pools, self.roots, nodes=nodes)

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


@dataclass(frozen=True)
class Form:
    """One way to weave: with tables or without, and options of `TreeWeaver`.

    An `optional` one may fail its checks: the rest is still worth timing.
    """

    name: str
    tables: bool
    options: dict[str, Any] = field(default_factory=dict)
    optional: bool = False

    def weaver(self, step: Step, budget: int, tables: AdapterTables) -> TreeWeaver:
        return step.weaver(budget, tables if self.tables else None, **self.options)


def forms_of(overlap: bool) -> list[Form]:
    """The package's own, and without the overlap that it has by default."""
    forms = [Form("raw", False), Form("tables", True)]
    if overlap:
        forms.append(Form("tables, no overlap", True, {"overlap": False}, True))
    return forms


def check_full_trees(
    checks: Checks, step: Step, tables: AdapterTables, budget: int, forms: list[Form]
) -> list[Form]:
    """The forms that hold."""
    few = min(15, budget)
    expected, expected_few = (step.worth(step.define(nodes)) for nodes in (budget, few))
    good = []
    for form in forms:
        label = f"R={step.R}, B={budget}, {form.name}"
        try:
            weaver = form.weaver(step, budget, tables)
            trees = [kept(step.weave(weaver)) for _ in range(5)]
            trees[0].validate()
        except Exception as error:
            checks.note(f"builds, {label}", repr(error)[:200], False, form.optional)
            continue
        again = all(same_trees(tree, trees[0]) for tree in trees)
        holds = checks.note(f"equal bits in 5 builds, {label}", again, again, form.optional)
        difference = float((step.worth(trees[0]) / expected - 1).abs().max())
        part = kept(step.weave(weaver, few))
        rows = part.tokens[:, : few + 1], part.parents[:, : few + 1], part.num_nodes
        smaller = step.worth(DraftTree.from_parents(*rows))
        difference = max(difference, float((smaller / expected_few - 1).abs().max()))
        name, close = f"worth against the definition's, {label}", difference < WORTH_LIMIT
        if checks.note(name, round(difference, 5), close, form.optional) and holds:
            good.append(form)
    return good


def time_graph(calls: Sequence[Callable[[], object]], replays: int) -> float:
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
        self, part: str, variant: str, R: int, B: int | None, calls: Sequence[Callable[[], object]]
    ) -> float | None:
        """Microseconds; None for what fails, which beside others is left out."""
        try:
            us = round(time_graph(calls, self.replays), 2)
        except Exception as error:
            print(f"{part} {variant} R={R} B={B}: {error!r}"[:300], flush=True)
            return None
        self.results.append({"part": part, "variant": variant, "R": R, "B": B, "us": us})
        print(f"{part:12s} {variant:40s} R={R:3d} B={B or '':>4} {us:9.2f} us", flush=True)
        return us


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
    bench: Bench,
    step: Step,
    tables: AdapterTables,
    budget: int,
    forms: list[Form],
    plain: bool = False,
) -> None:
    hidden, pools, R = step.hidden, step.pools, step.R
    for form in forms:
        name = form.name
        weaver = form.weaver(step, budget, tables)

        def prefix(weaver: TreeWeaver = weaver) -> None:
            weaver._start(R, hidden, weaver.width)
            weaver._run_prefix(R)

        def node_steps(weaver: TreeWeaver = weaver) -> None:
            for _ in range(weaver.rounds):
                weaver._run_nodes(R, weaver.width)

        def build(weaver: TreeWeaver = weaver) -> None:
            step.weave(weaver)

        def whole(copy: int, weaver: TreeWeaver = weaver) -> None:
            weaver.build(step.verified, step.hidden, *step.make_pools(copy), step.roots)

        copies = [lambda c=c: whole(c) for c in range(COPIES)]
        bench.time("whole", f"{name}, with top_pool", R, budget, copies)
        bench.time("build", f"{name}, {weaver.launches} launches", R, budget, [build])
        for nodes in SMALLER:
            if nodes < budget:

                def few(weaver: TreeWeaver = weaver, nodes: int = nodes) -> None:
                    step.weave(weaver, nodes)

                bench.time("build", f"{name}, {nodes} nodes of use", R, budget, [few])
        bench.time("prefix", name, R, budget, [prefix])
        bench.time("node steps", f"{name}, {weaver.rounds} rounds", R, budget, [node_steps])
        bench_round(bench, step, weaver, name, pools)

        def rank(weaver: TreeWeaver = weaver) -> None:
            rank_rows(weaver._row_scores, weaver._tree, weaver._ranked, R)

        bench.time("rank rows", name, R, budget, [rank])
    if plain:
        bench.time("build", "torch, raw", R, budget, [lambda: step.define(budget)])
        bench.time("build", "torch, tables", R, budget, [lambda: step.define(budget, tables)])


def bench_round(
    bench: Bench, step: Step, weaver: TreeWeaver, name: str, pools: tuple[Tensor, Tensor]
) -> float | None:
    """The launches of one round: scores alone, growth alone, and both; returns the last.

    A ticket that never comes up keeps growth away; entries without a node have nothing to score.
    """
    R, B, G = step.R, weaver.budget, weaver.width
    query, squares = weaver._run_nodes(R, G)
    candidates = [ByDepth.of(x) for x in pools]
    nodes = torch.arange(R * G, device=step.device) % G

    def launch() -> None:
        weaver._score_and_grow(R, 0, query, squares, *candidates, None, width=G, nodes=B)

    def prepare(live: bool, ticket: int) -> None:
        weaver._entries.node.copy_(nodes if live else nodes - G)
        weaver._entries.depth.copy_(nodes * 3 % step.shape.depth)
        weaver._request_ticket.fill_(ticket)

    calls = [launch] * 16
    prepare(True, -(2**30))
    bench.time("scores", name, R, B, calls)
    prepare(False, 0)
    bench.time("growth", name, R, B, calls)

    def both() -> None:
        prepare(True, 0)
        launch()

    us = bench.time("round's end", f"{name}, with its 3 fills", R, B, [both] * 16)
    prepare(False, 0)
    return us


def layer_shapes(shape: Shape) -> dict[str, tuple[int, int]]:
    """Inputs and outputs; the layers of the MLP are as the output projection."""
    d, r = shape.width, shape.rank
    return {"qkv": (r, 3 * r), "o": (r, r), "token_in": (d, r), "query": (r, d)}


def prefix_shapes(shape: Shape) -> dict[str, tuple[int, int]]:
    """The same of the two layers of a prefix, which have 16 rows a request."""
    return {"proposal_in": (shape.width, shape.rank), "kv": (shape.rank, 2 * shape.rank)}


def layer_weights(inputs: int, outputs: int) -> Tensor:
    """Copies of a layer's weights that no cache holds together."""
    copies = max(1, 200_000_000 // (inputs * outputs * 2))
    return torch.randn(copies, outputs, inputs, device=DEVICE, dtype=torch.bfloat16)


def linear_call(rows: int, weights: Tensor, tiling: Tiling) -> Callable[[int], object]:
    """One normed layer at a time; with the residual and a norm to follow where it is square."""
    copies, outputs, inputs = weights.shape
    device, J = DEVICE, 256
    x = torch.randn(rows, inputs, device=device, dtype=torch.bfloat16)
    squares = torch.ones(J, rows, device=device)
    out, bias = torch.empty(rows, outputs, device=device), torch.zeros(outputs, device=device)
    parts, tickets = linear_scratch(tiling, rows, outputs, False)
    part = torch.empty(max(1, parts), device=device)
    ticket = torch.zeros(max(1, tickets), dtype=torch.int32, device=device)
    rest: dict[str, Any] = {}
    if inputs == outputs:
        rest["add"] = torch.zeros(rows, outputs, device=device)
        rest["scaled"] = torch.empty_like(x), torch.ones(outputs, device=device)
        rest["out_squares"] = torch.empty(outputs * rows, device=device)

    def run(index: int) -> object:
        return launch_linear(
            *(tiling, rows, x, weights[index % copies], out),
            part=part,
            ticket=ticket,
            bias_M=bias,
            squares_JN=(squares, J),
            **rest,
        )

    return run


def check_linear(rows: int, weights: Tensor, tiling: Tiling) -> bool:
    """Whether a tiling gives the product of x with weights, both random."""
    _, outputs, inputs = weights.shape
    x = torch.randn(rows, inputs, device=DEVICE, dtype=torch.bfloat16)
    out = torch.full((rows, outputs), torch.nan, device=DEVICE)
    parts, tickets = linear_scratch(tiling, rows, outputs, False)
    part = torch.empty(max(1, parts), device=DEVICE)
    ticket = torch.zeros(max(1, tickets), dtype=torch.int32, device=DEVICE)
    launch_linear(tiling, rows, x, weights[0], out, part=part, ticket=ticket)
    wanted = x.float() @ weights[0].float().T
    return torch.allclose(out, wanted, atol=0.01 * inputs**0.5, rtol=0.01)


def bench_linears(bench: Bench, shape: Shape, rows: int) -> None:
    """Layers alone, weights from memory, beside the time of reading these at 4.3 TB/s."""
    for name, (inputs, outputs) in layer_shapes(shape).items():
        floor = inputs * outputs * 2 / 4.3e6
        weights = layer_weights(inputs, outputs)
        tiling = choose_tiling(rows, inputs, outputs, torch.bfloat16)
        run = linear_call(rows, weights, tiling)
        label = f"{name} {tuple(tiling)}, weights alone {floor:.1f}"
        bench.time("linear", label, rows, None, [lambda i=i, run=run: run(i) for i in range(24)])


def compile_part(task: tuple[str, int, int, list[Form]]) -> None:
    """Compile what one number of requests and budget needs, in a process of its own."""
    part, R, budget, forms = task
    if part == "pool":
        for dtype in (torch.bfloat16, torch.float32):
            top_pool(torch.zeros(1, FULL.vocab, device=DEVICE, dtype=dtype), FULL.pool)
    else:
        # A small vocabulary: it enters no kernel but the pool's.
        step = Step(Shape(vocab=8192), R, DEVICE, torch.bfloat16)
        tables = step.adapter.precompute(step.embed, step.lm_head)
        for form in forms:
            try:
                step.weave(form.weaver(step, budget, tables))
            except Exception as error:  # the check will say so again
                print(f"R={R} B={budget} {form.name}: {error!r}"[:300], flush=True)
    torch.cuda.synchronize()


def interpret() -> None:
    """The checks at toy sizes, in Triton's interpreter."""
    checks = Checks()
    check_pools(checks, TOY, "cpu")
    check_small_trees(checks, "cpu", TOY)
    step = Step(TOY, 1, "cpu", torch.float32)
    tables = step.adapter.precompute(step.embed, step.lm_head)
    check_full_trees(checks, step, tables, 4, forms_of(False))
    print("failed: " + ", ".join(checks.failed) if checks.failed else "all checks hold")
    raise SystemExit(bool(checks.failed))


def write_report(path: str, started: float, checks: Checks, bench: Bench, **rest: Any) -> None:
    if checks.failed:
        raise SystemExit(f"no figures, since checks failed: {', '.join(checks.failed)}")
    report = {
        **machine(),
        "shapes": vars(FULL),
        "seconds": round(time.perf_counter() - started),
        "checks": checks.results,
        "times_us": bench.results,
        **rest,
    }
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    Path(path).write_text(json.dumps(report, indent=1) + "\n")
    print(f"written to {path} after {report['seconds']} s")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", default="benchmarks/results/ops-weave.json")
    parser.add_argument("--quick", action="store_true", help="R = 1 and 16, B = 63, fewer replays")
    parser.add_argument("--tune", action="store_true", help="time launch shapes, and no more")
    parser.add_argument("--interpret", action="store_true", help="checks alone, on a CPU")
    parser.add_argument("--compile-workers", type=int, default=14)
    args = parser.parse_args()
    if args.interpret:
        start_again_interpreted("benchmarks.ops.weave")
    if INTERPRETED:
        interpret()
    if not torch.cuda.is_available():
        raise SystemExit("benchmarks.ops.weave needs a GPU, or --interpret for its checks alone")
    started = time.perf_counter()
    overlap = can_overlap(torch.device(DEVICE))
    checks, bench = Checks(), Bench(15 if args.quick or args.tune else 31)
    with multiprocessing.get_context("spawn").Pool(args.compile_workers) as workers:
        if args.tune:
            from benchmarks.ops.weave_tune import tune

            found = tune(checks, bench, workers, overlap)
            write_report(args.out, started, checks, bench, found=found)
            return
        batches = (1, 16) if args.quick else (1, 4, 16)
        budgets = (63,) if args.quick else (15, 31, 63, 127)
        forms = forms_of(overlap)
        tasks: list[tuple[str, int, int, list[Form]]] = [("pool", 1, 0, [])]
        for budget in reversed(budgets):
            tasks += [("weave", R, budget, [form]) for R in batches for form in forms]
        workers.map(compile_part, tasks, chunksize=1)
    print(f"{len(tasks)} parts compiled in {time.perf_counter() - started:.0f} s", flush=True)

    check_pools(checks, FULL, "cuda")
    check_small_trees(checks, "cuda", SMALL)
    for R in batches:
        step = Step(FULL, R, "cuda", torch.bfloat16)
        tables = step.adapter.precompute(step.embed, step.lm_head)
        good = {b: check_full_trees(checks, step, tables, b, forms) for b in budgets}
        if checks.failed:
            break
        bench_pools(bench, step)
        for budget in budgets:
            plain = budget == 63 and (R == 1 or not args.quick)
            bench_weave(bench, step, tables, budget, good[budget], plain)
        del step, tables
        torch.cuda.empty_cache()
    if not checks.failed:
        for rows in (4, 64):
            bench_linears(bench, FULL, rows)
    write_report(args.out, started, checks, bench)


if __name__ == "__main__":
    # By its own name, which the workers and `weave_tune` import it by.
    from benchmarks.ops import weave

    weave.main()
