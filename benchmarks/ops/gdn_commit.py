# SPDX-License-Identifier: Apache-2.0
"""Times of Gated DeltaNet's commits on a GPU: the exact one's tilings, and the delayed one.

    python -m benchmarks.ops.gdn_commit [--part exact|delayed] [--batches 1,16] [--rows 16,64]
        [--cuda]

Shapes and inputs are those of `benchmarks.ops.gdn`. What is timed is checked first: every tiling of
the exact commit has the bits of a decode per node, and a delayed commit the states of an eager one,
with outputs within the same error of the float64 recurrence. A part whose check fails is not timed,
and the run ends with status 1.

"exact" times the commit of all layers in one launch beside a device copy of the states' bytes.
"delayed" times, a layer, the verification alone, its share of an eager commit of all layers, and
the verification with the commit in it; with `--cuda` also the verification of `csrc/` alone (first
`python -m vllm_weaver.ops.cuda.build quick`).
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.ops import gdn as base
from benchmarks.ops.gdn import HK, HV, LAYERS, Bench, Case, K, V, Warm
from benchmarks.ops.machine import Checks, machine
from vllm_weaver.ops import cuda as kernels
from vllm_weaver.ops.conv.triton import tree_conv
from vllm_weaver.ops.gdn import GdnPending, gdn_decode
from vllm_weaver.ops.gdn.raw import GdnRawStash, tree_verify_raw
from vllm_weaver.ops.gdn.triton import GdnTritonStash, Tiling, choose_tiling, launch_verify
from vllm_weaver.ops.gdn.triton_replay import CommitTiling, commit_layers

NODES = (1, 4, 8, 16)
COMMITS = [
    CommitTiling(32, 32),
    CommitTiling(16, 32),
    CommitTiling(32, 64),
    CommitTiling(16, 128),
    CommitTiling(32, 128),
]
"""Whole rows, 128 columns, are the arrangement of decode."""
DELAYED = {
    16: [Tiling(16, 64, 32, 4, 4), Tiling(16, 64, 32, 2, 4), Tiling(16, 32, 32, 2, 4)],
    32: [Tiling(32, 32, 32, 2, 4), Tiling(32, 64, 32, 2, 4), Tiling(32, 64, 32, 4, 4)],
    64: [Tiling(64, 64, 128, 4, 1), Tiling(64, 128, 128, 4, 1)],
}
DELAYED[4] = DELAYED[16]
"""Tilings by rows."""


def paths_of(case: Case, lengths: list[int]) -> tuple[Tensor, Tensor]:
    """The deepest path of every tree, -1 past its length, and lengths cut to what there is."""
    R = len(lengths)
    path = torch.full((R, base.DEPTH + 1), -1, dtype=torch.int32)
    for r, n in enumerate(lengths):
        nodes = case.path(r)[:n]
        path[r, : len(nodes)] = torch.tensor(nodes, dtype=torch.int32)
    length = (path >= 0).sum(1).to(torch.int32)
    return path.to(base.DEVICE), length.to(base.DEVICE)


def delayed(
    case: Case,
    stash: GdnTritonStash,
    out: Tensor,
    tiling: Tiling | None,
    state: Tensor,
    slots: Tensor,
    pending: GdnPending,
) -> None:
    launch_verify(
        *(case.rows, state, slots, case.num_nodes, case.words, K**-0.5, True),
        stash_rows=(stash.k_RTHK, stash.v_RTHV),
        stash_gates=(stash.g_RTH, stash.beta_RTH),
        A_log=None,
        dt_bias=None,
        max_depth=base.DEPTH,
        out=out,
        tiling=tiling,
        pending=pending,
    )


def raw_stash(
    case: Case, state: Tensor, slots: Tensor, history: Tensor
) -> tuple[GdnRawStash, Tensor]:
    """A raw form's stash, and the rows that the convolution made on the way."""
    rows = torch.empty_like(case.x)
    _, stash = tree_verify_raw(
        *(case.x, history, case.weight, case.a, case.b, case.A_log, case.dt_bias, state, slots),
        *(case.num_nodes, case.words, case.table, HK),
        max_depth=base.DEPTH,
        rows=rows,
        tiling=choose_tiling(1, case.x.shape[1], HV, V, K, base.DTYPE),
    )
    return stash, rows


def histories(R: int, layers: int) -> list[Tensor]:
    shape = R + 1, base.W - 1, base.C
    return [torch.randn(*shape, device=base.DEVICE).to(base.DTYPE) for _ in range(layers)]


def check_exact(checks: Checks, tilings: list[CommitTiling]) -> bool:
    """Every tiling against a decode per node, from rows and from raw rows."""
    case = base.make_case(2, 64, seed=7, dead=3)
    pools, slots = base.pool_of(2)
    start = pools[0]
    path, length = paths_of(case, [base.DEPTH + 1, 5])
    (history,) = histories(2, 1)
    y, _ = tree_conv(
        *(case.x, history, slots, case.weight, case.num_nodes, case.table, None, "silu")
    )
    raw, _ = raw_stash(case, start, slots, history)
    _, rows = base.run_verify(case, start, slots)
    C = HK * K
    q, k, v = y.split([C, C, HV * V], -1)
    parts = q.unflatten(-1, (HK, K)), k.unflatten(-1, (HK, K)), v.unflatten(-1, (HV, V))
    good = True
    for kind, stash, operands in (
        ("rows", rows, case.rows),
        ("raw rows", raw, (*parts, raw.g_RTH, raw.beta_RTH)),
    ):
        decoded = start.clone()
        for r in range(2):
            for node in path[r, : int(length[r])].tolist():
                one = (x[r : r + 1, node] for x in operands)
                gdn_decode(*one, decoded, slots[r : r + 1], backend="triton")
        for tiling in (None, *tilings):
            # Two layers, as the kernel that is timed finds them through a table.
            states = [start.clone() for _ in range(2)]
            commit_layers([stash] * 2, path, length, states, slots, slots, tiling=tiling)
            same = all(torch.equal(state, decoded) for state in states)
            name = f"commit of {kind} {'default' if tiling is None else tuple(tiling)}"
            good &= checks.note(f"{name} has decode's bits", same, same)
    return good


def check_delayed(checks: Checks, T: int, windows: int = 8) -> bool:
    """Windows of every variant: states equal eager ones, outputs near the float64 recurrence."""
    good = True
    for tiling in (None, *DELAYED[T]):
        name = f"delayed T={T} {'default' if tiling is None else tuple(tiling)}"
        pools, slots = base.pool_of(2)
        state, eager = pools[0], pools[0].clone()
        stashes = [base.stash_for(2, T) for _ in range(2)]
        pending, worst, same, dead = None, 0.0, True, min(5, T - 1)
        for window in range(windows):
            case = base.make_case(2, T, seed=10 * T + window, dead=dead)
            out = torch.full((2, T, HV, V), float("nan"), dtype=base.DTYPE, device=base.DEVICE)
            stash = stashes[window % 2]
            for x in (stash.k_RTHK, stash.v_RTHV, stash.g_RTH, stash.beta_RTH):
                x.fill_(float("nan"))
            if pending is None:
                base.run_verify(case, state, slots, out=out, stash=stash)
            else:
                delayed(case, stash, out, tiling, state, slots, pending)
            same &= torch.equal(state, eager) and bool((out[1, T - dead :] == 0).all())
            if window in (1, windows - 1):
                for r in range(2):
                    expected, _ = base.recurrence(case, eager[slots[r]], r)
                    worst = max(worst, base.rms_ratio(out[r, : len(expected)], expected))
            path, length = paths_of(case, [(3 * window) % 17, window % 5])
            commit_layers([stash] * 2, path, length, [eager, eager.clone()], slots, slots)
            path.masked_fill_(path < 0, 9999)
            pending = GdnPending(stash, path, length)
        holds = same and worst < base.ERROR_LIMIT
        good &= checks.note(name, {"states equal": same, "error": round(worst, 6)}, holds)
    return good


def bench_exact(
    bench: Bench, R: int, pools: list[Tensor], slots: Tensor, tilings: list[CommitTiling]
) -> None:
    case = base.make_case(R, 64)
    tiling_of_stash = choose_tiling(1, 64, HV, V, K, base.DTYPE)
    stashes = [base.run_verify(case, pool, slots, tiling_of_stash)[1] for pool in pools]
    raws = [
        raw_stash(case, pool, slots, history)[0]
        for pool, history in zip(pools, histories(R, len(pools)), strict=True)
    ]
    source = torch.empty(len(pools) * R, HV * V * K, device=base.DEVICE)
    target = torch.empty_like(source)
    bench.time("commit", "device copy", R, 0, [partial(target.copy_, source)])
    del source, target
    for n in NODES:
        path, length = paths_of(case, [n] * R)
        for kind, layers in (("rows", stashes), ("raw rows", raws)):
            for tiling in tilings:
                call = partial(
                    commit_layers, layers, path, length, pools, slots, slots, tiling=tiling
                )
                bench.time("commit", f"{kind}, {n} nodes, {tuple(tiling)}", R, n, [call])


def bench_delayed(
    bench: Bench, R: int, T: int, pools: list[Tensor], slots: Tensor, cuda: bool = False
) -> Iterator[dict[str, Any]]:
    """Times, and for each length of path what a delayed commit saves."""
    earlier, case = base.make_case(R, T, seed=1), base.make_case(R, T, seed=2)
    read = [base.run_verify(earlier, pool, slots)[1] for pool in pools]
    written = [base.stash_for(R, T) for _ in pools]
    out = torch.empty(R, T, HV, V, dtype=base.DTYPE, device=base.DEVICE)

    def timed(variant: str, calls: Sequence[Callable[[], object]]) -> float:
        before = len(bench.results)
        bench.time("delayed", variant, R, T, calls)
        # What does not run is left out.
        return float(bench.results[-1]["us"]) if len(bench.results) > before else float("inf")

    def verify(pool: Tensor, stash: GdnTritonStash) -> None:
        base.run_verify(case, pool, slots, out=out, stash=stash)

    def compiled(pool: Tensor, stash: GdnTritonStash) -> None:
        base.run_cuda(case, pool, slots, base.FORMS[T][0], out=out, stash=stash)

    alone = timed("verify alone", base.each(verify, pools, written))
    other = timed("verify alone, cuda", base.each(compiled, pools, written)) if cuda else None
    for n in (0, 1, 4, 8, 16):
        path, length = paths_of(earlier, [n] * R)
        commit = 0.0
        if n:
            call = partial(commit_layers, read, path, length, pools, slots, slots)
            commit = timed(f"eager commit of all layers, {n} nodes", [call]) / len(pools)
        best: tuple[float, str] = (float("inf"), "")
        for tiling in DELAYED[T]:
            calls = [
                partial(
                    delayed,
                    *(case, stash, out, tiling, pool, slots),
                    GdnPending(before, path, length),
                )
                for pool, stash, before in zip(pools, written, read, strict=True)
            ]
            name = str(tuple(tiling))
            best = min(best, (timed(f"{name}, {n} nodes", calls), name))
        yield {
            "batch": R,
            "rows": T,
            "nodes": n,
            "verify_us": alone,
            "cuda_verify_us": other,
            "eager_commit_us_per_layer": round(commit, 2),
            "delayed_us": best[0],
            "variant": best[1],
            "saved_share_of_commit": round((alone + commit - best[0]) / commit, 2) if n else None,
        }


def compile_part(task: tuple[str, Any]) -> None:
    """Compile one kernel, in a process of its own, into Triton's cache."""
    part, what = task
    warm = Warm()
    pools, slots = base.pool_of(1, 2)
    if part == "exact":
        bench_exact(warm, 1, pools, slots, [what])
    elif part == "verify":
        R, T = what
        pools, slots = base.pool_of(R, 2)
        case = base.make_case(R, T)
        stashes = [base.run_verify(case, pool, slots)[1] for pool in pools]
        commit_layers(stashes, *paths_of(case, [2] * R), pools, slots, slots)
    else:
        T, tiling = what
        case = base.make_case(1, T)
        _, stash = base.run_verify(case, pools[0], slots)
        out = torch.empty(1, T, HV, V, dtype=base.DTYPE, device=base.DEVICE)
        path, length = paths_of(case, [2])
        pending = GdnPending(stash, path, length)
        other = base.stash_for(1, T)
        delayed(case, other, out, tiling, pools[0], slots, pending)
    torch.cuda.synchronize()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--part", choices=("exact", "delayed"))
    parser.add_argument("--cuda", action="store_true", help="time the kernel of csrc/ beside")
    parser.add_argument("--batches", default="1,4,16", help="requests, with commas between")
    parser.add_argument(
        "--rows", default="16,32,64", help=f"of trees, delayed; of {', '.join(map(str, DELAYED))}"
    )
    parser.add_argument("--out", default="benchmarks/results/ops-gdn-commit.json")
    parser.add_argument("--compile-workers", type=int, default=14)
    parser.add_argument("--compile-only", action="store_true", help="fill Triton's cache, and end")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("benchmarks.ops.gdn_commit needs a GPU")
    started = time.perf_counter()
    if args.cuda:
        kernels.load()
    batches = [int(x) for x in args.batches.split(",")]
    chosen = {T: DELAYED[T] for T in map(int, args.rows.split(","))}
    exact, late = args.part in (None, "exact"), args.part in (None, "delayed")
    tasks: list[tuple[str, Any]] = []
    if late:
        tasks += [("delayed", (T, x)) for T, tilings in chosen.items() for x in tilings]
        tasks += [("verify", (R, T)) for T in chosen for R in (1, 16, 64) if R in batches]
    if exact:
        tasks += [("exact", tiling) for tiling in COMMITS]
    with multiprocessing.get_context("spawn").Pool(args.compile_workers) as pool:
        pool.map(compile_part, tasks, chunksize=1)
    print(f"compiled in {time.perf_counter() - started:.0f} s", flush=True)
    if args.compile_only:
        return

    checks, bench, summary = Checks(), Bench(), []
    exact = exact and check_exact(checks, COMMITS)
    rows = [T for T in chosen if late and check_delayed(checks, T)]
    print(f"checked after {time.perf_counter() - started:.0f} s", flush=True)
    for R in batches:
        pools, slots = base.pool_of(R, LAYERS)
        for T in rows:
            for line in bench_delayed(bench, R, T, pools, slots, args.cuda):
                summary.append(line)
                print(line, flush=True)
        if exact and R in (1, 16, 64):
            bench_exact(bench, R, pools, slots, COMMITS)
        del pools
        torch.cuda.empty_cache()
    report = {
        **machine(),
        "shapes": {"HK": HK, "HV": HV, "K": K, "V": V, "layers": LAYERS},
        "default_tilings": {
            f"R={R} T={T}": tuple(choose_tiling(R, T, HV, V, K, base.DTYPE))
            for R in batches
            for T in chosen
        },
        "checks": checks.results,
        "failed": checks.failed,
        "delayed": summary,
        "times_us": bench.results,
    }
    out = Path(args.out)
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(report, indent=1) + "\n")
    print(f"{time.perf_counter() - started:.0f} s in all; {out}")
    if checks.failed:
        raise SystemExit(f"these checks failed: {', '.join(checks.failed)}")


if __name__ == "__main__":
    main()
