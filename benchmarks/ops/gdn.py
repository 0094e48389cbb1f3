# SPDX-License-Identifier: Apache-2.0
"""Times of the Gated DeltaNet ops on a GPU, each after a check against a float64 recurrence.

    python -m benchmarks.ops.gdn [--tune] [--cuda] [--only-verify] [--sketch gdn_tree_sketch.py]
        [--rows 4,16] [--batches 16,64] [--out FILE]

Shapes are those of Qwen3.6-27B. A time is the median over replays of a CUDA graph that holds one
call per layer, each on its own states and stash. What fails its check is not timed, and the run
ends with status 1 and without a table. vLLM's kernels are timed beside ours where vLLM can be
imported, and with `--cuda` the verification of `csrc/` (first `python -m
vllm_weaver.ops.cuda.build quick`).
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import multiprocessing
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.ops.machine import Checks, machine
from vllm_weaver.ops import ancestor_words, causal_conv1d_tree, conv_table, gdn_decode
from vllm_weaver.ops import cuda as kernels
from vllm_weaver.ops.conv import conv_commit_layers
from vllm_weaver.ops.conv.triton import tree_conv
from vllm_weaver.ops.gdn import cuda, gdn_commit, gdn_commit_layers, gdn_gate
from vllm_weaver.ops.gdn.raw import tree_verify_raw
from vllm_weaver.ops.gdn.triton import (
    GdnTritonStash,
    Tiling,
    choose_tiling,
    empty_stash,
    launch_verify,
    tree_verify,
)

LAYERS, HK, HV, K, V, W = 48, 16, 48, 128, 128, 4
C = 2 * HK * K + HV * V
DEPTH = 15
ROWS = (16, 32, 64, 128)
BATCHES = (1, 4, 16)
DTYPE = torch.bfloat16
DEVICE = "cuda"
ERROR_LIMIT = 2.1e-3
"""RMS error over RMS output; rounding an exact output to bfloat16 alone gives 1.7e-3."""

VARIANTS = {
    # Of large batches, whose trees are small: reading the states is nearly all there is to do.
    4: [
        Tiling(16, 16, 128, 1, 1),
        Tiling(16, 32, 128, 1, 1),
        Tiling(16, 32, 128, 2, 1),
        Tiling(16, 64, 128, 2, 1),
        Tiling(16, 64, 128, 4, 1),
        Tiling(16, 16, 32, 1, 4),
        Tiling(16, 32, 32, 1, 4),
        Tiling(16, 32, 64, 1, 3),
        Tiling(16, 32, 64, 2, 2),
        Tiling(16, 64, 64, 2, 2),
        Tiling(16, 64, 64, 4, 2),
        Tiling(16, 128, 32, 4, 4),
    ],
    16: [
        Tiling(16, 16, 32, 1, 4),
        Tiling(16, 32, 32, 1, 4),
        Tiling(16, 16, 32, 2, 4),
        Tiling(16, 32, 32, 2, 4),
        Tiling(16, 64, 32, 2, 4),
        Tiling(16, 32, 64, 2, 2),
        Tiling(16, 32, 32, 4, 4),
        Tiling(16, 64, 32, 4, 4),
    ],
    32: [
        Tiling(32, 16, 32, 2, 4),
        Tiling(32, 32, 32, 2, 4),
        Tiling(32, 64, 32, 2, 4),
        Tiling(32, 32, 64, 2, 2),
        Tiling(32, 32, 32, 4, 4),
        Tiling(32, 64, 32, 4, 4),
        Tiling(64, 64, 128, 4, 1),
    ],
    64: [
        Tiling(64, 64, 128, 4, 1),
        Tiling(64, 128, 128, 4, 1),
        Tiling(64, 64, 128, 4, 1, 168),
        Tiling(64, 128, 128, 4, 1, 168),
        Tiling(64, 64, 32, 4, 4),
        Tiling(64, 64, 64, 4, 2),
        Tiling(32, 32, 32, 2, 4),
        Tiling(32, 64, 32, 2, 4),
    ],
    128: [
        Tiling(64, 64, 128, 4, 1),
        Tiling(64, 128, 128, 4, 1),
        Tiling(64, 64, 128, 4, 1, 168),
        Tiling(64, 64, 32, 4, 4),
        Tiling(32, 32, 32, 2, 4),
    ],
}

FORMS = {
    4: [cuda.Form(1, 4), cuda.Form(1, 2)],
    16: [cuda.Form(1, 4), cuda.Form(1, 2)],
    32: [cuda.Form(2, 4), cuda.Form(2, 2), cuda.Form(2, 8)],
    64: [cuda.Form(4, 4), cuda.Form(4, 2), cuda.Form(4, 8)],
    128: [cuda.Form(8, 4), cuda.Form(8, 2), cuda.Form(4, 4)],
}
"""Forms of the CUDA backend, the default first."""


@dataclass
class Case:
    """One layer's inputs for R trees of T rows; past each tree's nodes they are NaN."""

    parents: Tensor
    num_nodes: Tensor
    words: Tensor
    table: Tensor
    x: Tensor
    a: Tensor
    b: Tensor
    A_log: Tensor
    dt_bias: Tensor
    weight: Tensor
    g: Tensor
    beta: Tensor

    @property
    def qkv(self) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = self.x.split([HK * K, HK * K, HV * V], -1)
        return q.unflatten(-1, (-1, K)), k.unflatten(-1, (-1, K)), v.unflatten(-1, (-1, V))

    @property
    def rows(self) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        return *self.qkv, self.g, self.beta

    def path(self, request: int) -> list[int]:
        """Nodes from the root to the deepest one."""
        parents = self.parents[request].tolist()
        best: list[int] = []
        for node in range(int(self.num_nodes[request])):
            path = [node]
            while parents[path[-1]] >= 0:
                path.append(parents[path[-1]])
            best = max(best, path[::-1], key=len)
        return best


def make_case(R: int, T: int, seed: int = 0, dead: int = 0, chain: bool = False) -> Case:
    """Random trees of depth 15 at most, the last `dead` rows of odd requests dead."""
    gen = torch.Generator().manual_seed(seed)
    parents = torch.full((R, T), -1, dtype=torch.int32)
    for r in range(R):
        depth = [0]
        for node in range(1, T):
            # Half of the nodes go on from the newest one, so that the full depth is reached.
            parent = node - 1
            if not chain and (torch.rand((), generator=gen) < 0.5 or depth[parent] == DEPTH):
                open_nodes = [j for j in range(node) if depth[j] < DEPTH]
                pick = torch.randint(len(open_nodes), (), generator=gen)
                parent = open_nodes[int(pick)]
            parents[r, node] = parent
            depth.append(depth[parent] + 1)
    num_nodes = torch.tensor([T - (dead if r % 2 else 0) for r in range(R)], dtype=torch.int32)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=gen)

    x = normal(R, T, C)
    x[..., : 2 * HK * K] += normal(2 * HK * K)
    a, b = normal(R, T, HV), normal(R, T, HV)
    for r in range(R):
        for tensor in (x, a, b):
            tensor[r, int(num_nodes[r]) :] = float("nan")
    a, b = a.to(DEVICE, DTYPE), b.to(DEVICE, DTYPE)
    A_log, dt_bias = normal(HV).to(DEVICE), normal(HV).to(DEVICE, DTYPE)
    parents, num_nodes = parents.to(DEVICE), num_nodes.to(DEVICE)
    return Case(
        *(parents, num_nodes, ancestor_words(parents, num_nodes)),
        conv_table(parents, num_nodes, W),
        *(x.to(DEVICE, DTYPE), a, b, A_log, dt_bias),
        normal(C, W).to(DEVICE, DTYPE),
        *gdn_gate(a, b, A_log, dt_bias),
    )


def recurrence(case: Case, states: Tensor, request: int) -> tuple[Tensor, Tensor]:
    """Outputs [n, HV, V] and states [n, HV, V, K] of one tree's nodes, float64, node by node."""
    q, k, v = (x[request].double() for x in case.qkv)
    q, k = (x * torch.rsqrt((x * x).sum(-1, keepdim=True) + 1e-6) for x in (q, k))
    q, k = (x.repeat_interleave(HV // HK, 1) for x in (q * K**-0.5, k))
    g, beta = case.g[request].double(), case.beta[request].double()
    n = int(case.num_nodes[request])
    after = torch.empty(n, HV, V, K, dtype=torch.float64, device=DEVICE)
    out = torch.empty(n, HV, V, dtype=torch.float64, device=DEVICE)
    for node, parent in enumerate(case.parents[request, :n].tolist()):
        state = (after[parent] if parent >= 0 else states.double()) * g[node].exp()[:, None, None]
        u = beta[node][:, None] * (v[node] - (state * k[node][:, None]).sum(-1))
        after[node] = state + u[..., None] * k[node][:, None]
        out[node] = (after[node] * q[node][:, None]).sum(-1)
    return out, after


def rms_ratio(actual: Tensor, expected: Tensor) -> float:
    error = (actual.double() - expected.double()).square().mean().sqrt()
    return float(error / expected.double().square().mean().sqrt())


def pool_of(R: int, layers: int = 1) -> tuple[list[Tensor], Tensor]:
    """States of each layer, and every request's slot in it; slot 0 belongs to nobody."""
    gen = torch.Generator(DEVICE).manual_seed(1)
    pools = [
        torch.randn(R + 1, HV, V, K, device=DEVICE, generator=gen).mul_(0.1) for _ in range(layers)
    ]
    return pools, torch.arange(R, 0, -1, dtype=torch.int32, device=DEVICE)


def stash_for(R: int, T: int) -> GdnTritonStash:
    return empty_stash(R, T, HK, HV, K, V, DTYPE, torch.device(DEVICE))


def run_verify(
    case: Case,
    state: Tensor,
    slots: Tensor,
    tiling: Tiling | None = None,
    max_depth: int | None = DEPTH,
    **buffers: Any,
) -> tuple[Tensor, GdnTritonStash]:
    return tree_verify(
        *(*case.rows, state, slots, case.num_nodes, case.words, K**-0.5, True),
        max_depth=max_depth,
        tiling=tiling,
        **buffers,
    )


def run_cuda(
    case: Case, state: Tensor, slots: Tensor, form: cuda.Form, **buffers: Any
) -> tuple[Tensor, GdnTritonStash]:
    return cuda.tree_verify(
        *(*case.rows, state, slots, case.num_nodes, case.words, K**-0.5, True),
        form=form,
        **buffers,
    )


Variant = Tiling | cuda.Form


def check_verify(
    checks: Checks, variants: dict[int, list[Tiling]], forms: dict[int, list[cuda.Form]]
) -> set[tuple[int, Variant]]:
    """Errors of every variant against the float64 recurrence, outputs poisoned; those that hold."""
    good = set()
    for T, tilings in variants.items():
        unused = min(5, T // 2)
        case = make_case(2, T, seed=T, dead=unused)
        pools, slots = pool_of(2)
        expected = [recurrence(case, pools[0][slots[r]], r)[0] for r in range(2)]
        every: list[Variant] = [*dict.fromkeys(tilings), *forms.get(T, ())]
        for variant in every:
            ours = isinstance(variant, cuda.Form)
            name = f"{'cuda ' if ours else ''}verify T={T} {tuple(variant)}"
            out = torch.full((2, T, HV, V), float("nan"), dtype=DTYPE, device=DEVICE)
            try:
                if isinstance(variant, cuda.Form):
                    run_cuda(case, pools[0], slots, variant, out=out)
                else:
                    run_verify(case, pools[0], slots, variant, out=out)
                torch.cuda.synchronize()
            except Exception as error:  # a variant that does not launch is a result, too
                checks.note(name, repr(error)[:200], False)
                continue
            worst = max(rms_ratio(out[r, : len(e)], e) for r, e in enumerate(expected))
            dead = bool((out[1, T - unused :] == 0).all())
            if checks.note(name, round(worst, 6), dead and worst < ERROR_LIMIT):
                good.add((T, variant))
    return good


def check_graph(checks: Checks) -> None:
    """A captured graph, replayed with other trees, lengths and states than it was captured with."""
    T = 64
    case, other = make_case(2, T, seed=1), make_case(2, T, seed=2, dead=30)
    pools, slots = pool_of(2)
    out, stash = run_verify(case, pools[0], slots)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run_verify(case, pools[0], slots, out=out, stash=stash)
    for name in ("num_nodes", "words", "x", "g", "beta"):
        getattr(case, name).copy_(getattr(other, name))
    slots.copy_(slots.flip(0))
    out.fill_(float("nan"))
    graph.replay()
    torch.cuda.synchronize()
    worst = 0.0
    for r in range(2):
        expected, _ = recurrence(other, pools[0][slots[r]], r)
        worst = max(worst, rms_ratio(out[r, : len(expected)], expected))
    dead = bool((out[1, T - 30 :] == 0).all())
    checks.note("graph replay with other lengths", round(worst, 6), dead and worst < ERROR_LIMIT)


def check_commit(checks: Checks, windows: int = 64) -> None:
    """Windows of verify and commit: bits of decode, distance from float64, form by form."""
    pools, slots = pool_of(1)
    start = pools[0]
    exact, product, decoded = start.clone(), start.clone(), start.clone()
    truth = start[slots[0]].double()
    same = True
    for window in range(windows):
        case = make_case(1, 24, seed=100 + window)
        path = case.path(0)[: window % 9]
        path_RL = torch.tensor([path + [-1] * (24 - len(path))], dtype=torch.int32, device=DEVICE)
        length = torch.tensor([len(path)], dtype=torch.int32, device=DEVICE)
        for state, is_exact in ((exact, True), (product, False)):
            _, stash = run_verify(case, state, slots)
            gdn_commit(stash, path_RL, length, state, slots, exact=is_exact)
        for node in path:
            q, k, v, g, beta = (x[:, node] for x in case.rows)
            gdn_decode(q, k, v, g, beta, decoded, slots)
        same = same and torch.equal(exact, decoded)
        if path:
            truth = recurrence(case, truth, 0)[1][path[-1]]
    checks.note(f"exact commit has decode's bits over {windows} windows", same, same)
    drift = {
        name: rms_ratio(state[slots[0]], truth)
        for name, state in (("exact", exact), ("product", product))
    }
    for name, error in drift.items():
        checks.note(f"drift of the {name} commit over {windows} windows", error, error < 3e-6)
    checks.note("product commit against exact", rms_ratio(product[slots[0]], exact[slots[0]]), True)


def check_layers_and_raw(checks: Checks) -> None:
    """All layers at once against one by one; the raw form against conv and verify."""
    case = make_case(2, 64, seed=5, dead=3)
    pools, slots = pool_of(2, 3)
    path = torch.tensor(
        [case.path(r)[:12] + [-1] * (12 - len(case.path(r)[:12])) for r in range(2)],
        dtype=torch.int32,
        device=DEVICE,
    )
    length = torch.tensor([9, 4], dtype=torch.int32, device=DEVICE)
    history = torch.randn(3, W - 1, C, device=DEVICE).to(DTYPE)
    y, conv = tree_conv(
        *(case.x, history, slots, case.weight, case.num_nodes, case.table, None, "silu")
    )
    out, _ = run_verify(replace(case, x=y), pools[0], slots)
    gates = case.A_log, case.dt_bias
    out_raw, raw = tree_verify_raw(
        *(case.x, history, case.weight, case.a, case.b, *gates, pools[0], slots),
        *(case.num_nodes, case.words, case.table, HK),
        max_depth=DEPTH,
    )
    # Its gates are made with other approximations of exp and log.
    error = rms_ratio(out_raw[0], out[0])
    checks.note("raw form against conv and verify", error, error < 1e-3)
    q, k, v = replace(case, x=y).qkv
    _, stash_raw_gates = tree_verify(
        *(q, k, v, case.a, case.b, pools[0], slots, case.num_nodes, case.words, K**-0.5, True),
        A_log=case.A_log,
        dt_bias=case.dt_bias,
        max_depth=DEPTH,
    )
    states = [pools[0].clone() for _ in range(3)]
    gdn_commit_layers([raw] * 2, path, length, states[:2], slots)
    gdn_commit(stash_raw_gates, path, length, states[2], slots)
    same = torch.equal(states[0], states[2]) and torch.equal(states[1], states[2])
    checks.note("raw commit of layers has the bits of the commit of rows", same, same)

    reference, _ = causal_conv1d_tree(
        *(case.x.double(), history.double(), slots, case.weight, case.parents, case.num_nodes),
        backend="reference",
    )
    live = slice(0, int(case.num_nodes[1]))
    error = max(rms_ratio(y[0], reference[0]), rms_ratio(y[1, live], reference[1, live]))
    checks.note("tree conv", round(error, 6), error < ERROR_LIMIT)
    before = history.clone()
    conv_commit_layers([conv] * 2, path, length, [history, before], slots)
    nodes = path[0, 6:9].long()
    same = torch.equal(history[slots[0]], case.x[0, nodes]) and torch.equal(history, before)
    checks.note("conv commit keeps the path's last rows", same, same)


@dataclass
class Vllm:
    """The kernels of vLLM that are timed beside ours."""

    packed_decode: Callable[..., object]
    chain: Callable[..., object]


def check_vllm(checks: Checks, vllm: Vllm) -> None:
    """Decode with raw gates against vLLM's packed kernel, bit for bit, over 32 tokens."""
    R = 3
    pools, slots = pool_of(R)
    ours, theirs = pools[0], pools[0].clone()
    same = True
    for step in range(32):
        case = make_case(R, 1, seed=step)
        q, k, v = (x[:, 0] for x in case.qkv)
        out = gdn_decode(
            *(q, k, v, case.a[:, 0], case.b[:, 0], ours, slots),
            A_log=case.A_log,
            dt_bias=case.dt_bias,
        )
        their_out = torch.empty(R, 1, HV, V, dtype=DTYPE, device=DEVICE)
        vllm_decode(vllm, case, theirs, slots, their_out)
        same = same and torch.equal(out, their_out[:, 0]) and torch.equal(ours, theirs)
    checks.note("decode has the bits of vLLM's packed kernel over 32 tokens", same, same)


def vllm_decode(vllm: Vllm, case: Case, state: Tensor, slots: Tensor, out: Tensor) -> None:
    vllm.packed_decode(
        mixed_qkv=case.x[:, 0],
        a=case.a[:, 0],
        b=case.b[:, 0],
        A_log=case.A_log,
        dt_bias=case.dt_bias,
        scale=K**-0.5,
        initial_state=state,
        out=out,
        ssm_state_indices=slots,
        use_qk_l2norm_in_kernel=True,
    )


def time_calls(calls: Sequence[Callable[[], object]], replays: int = 15) -> float:
    """Microseconds per call: the median replay of one graph that holds all calls."""
    for call in calls[:2]:
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

    def __init__(self) -> None:
        self.results: list[dict[str, Any]] = []

    def time(
        self, op: str, variant: str, R: int, T: int, calls: Sequence[Callable[[], object]]
    ) -> None:
        try:
            us = round(time_calls(calls), 2)
        except Exception as error:  # beside others' kernels, one that fails is left out
            print(f"{op} {variant} R={R} T={T}: {error!r}"[:300], flush=True)
            return
        self.results.append({"op": op, "variant": variant, "batch": R, "rows": T, "us": us})
        print(f"{op:24s} {variant:34s} R={R:3d} T={T:4d} {us:9.2f} us", flush=True)


def each(function: Callable[..., object], *layers: list[Any]) -> list[Callable[[], object]]:
    """One call of the function per layer, with that layer's tensors."""
    return [partial(function, *items) for items in zip(*layers, strict=True)]


def bench_verify(
    bench: Bench,
    R: int,
    T: int,
    pools: list[Tensor],
    slots: Tensor,
    tilings: list[Tiling],
    forms: Sequence[cuda.Form] = (),
) -> Case:
    """The default tiling, the others, and what the default costs in other settings; CUDA forms."""
    case = make_case(R, T, seed=T)
    out = torch.empty(R, T, HV, V, dtype=DTYPE, device=DEVICE)
    stashes = [stash_for(R, T) for _ in pools]
    gates = stashes[0].g_RTH, stashes[0].beta_RTH

    def tiled(tiling: Tiling, pool: Tensor, stash: GdnTritonStash) -> None:
        run_verify(case, pool, slots, tiling, out=out, stash=stash)

    def unbounded(pool: Tensor, stash: GdnTritonStash) -> None:
        run_verify(case, pool, slots, max_depth=None, out=out, stash=stash)

    def gates_alone(pool: Tensor) -> None:
        launch_verify(
            *((*case.qkv, case.a, case.b), pool, slots, case.num_nodes, case.words, K**-0.5, True),
            stash_rows=None,
            stash_gates=gates,
            A_log=case.A_log,
            dt_bias=case.dt_bias,
            max_depth=DEPTH,
            out=out,
            tiling=None,
        )

    def formed(form: cuda.Form, pool: Tensor, stash: GdnTritonStash) -> None:
        run_cuda(case, pool, slots, form, out=out, stash=stash)

    for form in forms:
        name = f"cuda {tuple(form)}"
        bench.time("verify", name, R, T, each(partial(formed, form), pools, stashes))
    default = choose_tiling(R, T, HV, V, K, DTYPE)
    for tiling in dict.fromkeys([default, *tilings]):
        name = f"{'default ' if tiling == default else ''}{tuple(tiling)}"
        bench.time("verify", name, R, T, each(partial(tiled, tiling), pools, stashes))
    bench.time("verify", "depth not bounded", R, T, each(unbounded, pools, stashes))
    bench.time("verify", "stash of gates alone", R, T, each(gates_alone, pools))
    return case


def bench_sketch(bench: Bench, sketch: Any, case: Case, pools: list[Tensor], slots: Tensor) -> None:
    """The sketch, and its kernel of the same reads and writes without arithmetic."""
    R, T = case.parents.shape
    node = torch.arange(T, device=DEVICE)
    within = ((case.words[..., node // 64] >> (node % 64)) & 1).bool()
    words = sketch.pack_ancestors(within)
    q, k, v = (x.contiguous() for x in case.qkv)
    out = torch.empty(R, T, HV, V, dtype=DTYPE, device=DEVICE)
    gates = case.a, case.b, case.A_log, case.dt_bias
    block_t = min(T, 64)

    def run(pool: Tensor) -> None:
        sketch.own_tree_verify(q, k, v, *gates, pool, slots, words, out=out, BT=block_t)

    def floor(BV: int, pool: Tensor) -> None:
        sketch._floor_io_kernel[(V // BV, R * HV)](
            *(q, k, v, pool, slots, out, T), H=HK, HV=HV, K=K, V=V, BV=BV, TP=T
        )

    bench.time("verify", "sketch", R, T, each(run, pools))
    for BV in (32, 64):
        calls = each(partial(floor, BV), pools)
        bench.time("verify", f"reads and writes alone, BV={BV}", R, T, calls)


def bench_chain(bench: Bench, R: int, T: int, pools: list[Tensor], slots: Tensor) -> None:
    """A plain chain through the tree verification."""
    case = make_case(R, T, chain=True)
    out = torch.empty(R, T, HV, V, dtype=DTYPE, device=DEVICE)

    def run(pool: Tensor, stash: GdnTritonStash) -> None:
        run_verify(case, pool, slots, max_depth=T - 1, out=out, stash=stash)

    calls = each(run, pools, [stash_for(R, T) for _ in pools])
    bench.time("chain", "ours, verify", R, T, calls)


def bench_decode(
    bench: Bench, R: int, pools: list[Tensor], slots: Tensor, vllm: Vllm | None
) -> None:
    """One token, with raw gates."""
    case = make_case(R, 1)
    q, k, v = (x[:, 0] for x in case.qkv)
    out = torch.empty(R, 1, HV, V, dtype=DTYPE, device=DEVICE)

    def run(pool: Tensor) -> None:
        gates = case.a[:, 0], case.b[:, 0]
        gdn_decode(q, k, v, *gates, pool, slots, A_log=case.A_log, dt_bias=case.dt_bias)

    def run_vllm(pool: Tensor) -> None:
        assert vllm is not None
        vllm_decode(vllm, case, pool, slots, out)

    bench.time("decode", "ours", R, 1, each(run, pools))
    if vllm is not None:
        bench.time("decode", "vLLM packed", R, 1, each(run_vllm, pools))


def bench_vllm_chain(bench: Bench, R: int, T: int, vllm: Vllm) -> None:
    """vLLM's Triton kernel for chains, which writes a state per row."""
    case = make_case(R, T, chain=True)
    pools = [torch.randn(R * T + 1, HV, V, K, device=DEVICE) for _ in range(8)]
    indices = torch.arange(1, R * T + 1, dtype=torch.int32, device=DEVICE).view(R, T)
    starts = torch.arange(0, R * T + 1, T, dtype=torch.int32, device=DEVICE)
    accepted = torch.ones(R, dtype=torch.int32, device=DEVICE)
    q, k, v = (x.flatten(0, 1)[None].contiguous() for x in case.qkv)
    a, b = case.a.flatten(0, 1), case.b.flatten(0, 1)

    def run(pool: Tensor) -> None:
        vllm.chain(
            *(case.A_log, a, b, case.dt_bias, q, k, v),
            initial_state=pool,
            cu_seqlens=starts,
            ssm_state_indices=indices,
            num_accepted_tokens=accepted,
            use_qk_l2norm_in_kernel=True,
        )

    bench.time("chain", "vLLM Triton", R, T, each(run, pools))


def bench_commit(bench: Bench, R: int, pools: list[Tensor], slots: Tensor) -> None:
    """All layers in one launch, beside a device copy of the same bytes; then the convolution."""
    T = 64
    case = make_case(R, T)
    histories = [torch.randn(R + 1, W - 1, C, device=DEVICE).to(DTYPE) for _ in pools]
    rows = torch.empty_like(case.x)
    out = torch.empty(R, T, HV, V, dtype=DTYPE, device=DEVICE)

    def raw(pool: Tensor, history: Tensor, stash: Any = None) -> Any:
        return tree_verify_raw(
            *(case.x, history, case.weight, case.a, case.b, case.A_log, case.dt_bias, pool, slots),
            *(case.num_nodes, case.words, case.table, HK),
            max_depth=DEPTH,
            rows=rows,
            out=out,
            stash=stash,
        )[1]

    def product(length: Tensor) -> None:
        for stash, pool in zip(stashes, pools, strict=True):
            gdn_commit(stash, path, length, pool, slots, exact=False)

    def exact(kind: list[Any], length: Tensor) -> None:
        gdn_commit_layers(kind, path, length, pools, slots)

    def conv_all(length: Tensor) -> None:
        conv_commit_layers(conv_stashes, path, length, histories, slots)

    def conv(part: Case, n: int, history: Tensor, stash: Any) -> None:
        tree_conv(
            *(part.x, history, slots, part.weight, part.num_nodes, part.table, None, "silu"),
            out=rows.view(-1)[: R * n * C].view(R, n, C),
            stash=replace(stash, x=stash.x.view(-1)[: R * n * C].view(R, n, C)),
        )

    stashes = [run_verify(case, pool, slots)[1] for pool in pools]
    raw_stashes = [raw(*layer) for layer in zip(pools, histories, strict=True)]
    conv_stashes = [stash.conv for stash in raw_stashes]
    path = torch.zeros(R, DEPTH + 1, dtype=torch.int32, device=DEVICE)
    for r in range(R):
        nodes = case.path(r)
        path[r, : len(nodes)] = torch.tensor(nodes, dtype=torch.int32)
    source = torch.randn(len(pools) * R, HV * V * K, device=DEVICE)
    target = torch.empty_like(source)
    name = f"device copy of {source.numel() * 4 / 1e6:.0f} MB"
    bench.time("commit", name, R, T, [lambda: target.copy_(source)])
    for n in (1, 4, 8, 16):
        length = torch.full((R,), n, dtype=torch.int32, device=DEVICE)
        for kind, layers in (("rows", stashes), ("raw rows", raw_stashes)):
            name = f"exact, {kind}, {n} nodes"
            bench.time("commit", name, R, T, [partial(exact, layers, length)])
        name = f"product, a launch per layer, {n} nodes"
        bench.time("commit", name, R, T, [partial(product, length)])
    bench.time("conv commit", "all layers", R, T, [partial(conv_all, length)])
    for n in (16, T):
        calls = each(partial(conv, make_case(R, n), n), histories, conv_stashes)
        bench.time("conv", "tree", R, n, calls)
    calls = each(raw, pools, histories, raw_stashes)
    bench.time("conv and verify", "raw, two launches", R, T, calls)


def load_vllm() -> Vllm | None:
    try:
        from vllm.third_party.flash_linear_attention.ops import (
            fused_recurrent,
            fused_sigmoid_gating,
        )
    except ImportError as error:
        print(f"vLLM's kernels are left out: {error}")
        return None
    return Vllm(
        fused_recurrent.fused_recurrent_gated_delta_rule_packed_decode,
        fused_sigmoid_gating.fused_sigmoid_gating_delta_rule_update,
    )


class Warm(Bench):
    """Runs what it is given once and times nothing: afterwards its kernels are compiled."""

    def time(
        self, op: str, variant: str, R: int, T: int, calls: Sequence[Callable[[], object]]
    ) -> None:
        try:
            calls[0]()
        except Exception as error:
            print(f"{op} {variant} T={T}: {error!r}"[:300], flush=True)


def compile_part(task: tuple[str, int, Tiling | None, str | None]) -> None:
    """Compile one part of the benchmark, in a process of its own, into Triton's cache."""
    part, T, tiling, sketch = task
    pools, slots = pool_of(1, 2)
    warm = Warm()
    if part == "verify":
        assert tiling is not None
        bench_verify(warm, 1, T, pools, slots, [tiling])
    elif part == "sketch":
        bench_sketch(warm, load_sketch(sketch), make_case(1, T), pools, slots)
    elif part == "chain":
        bench_chain(warm, 1, T, pools, slots)
    elif part == "commit":
        bench_commit(warm, 1, pools, slots)
    else:
        vllm = load_vllm()
        bench_decode(warm, 1, pools, slots, vllm)
        if vllm is not None:
            bench_vllm_chain(warm, 1, 16, vllm)
    torch.cuda.synchronize()


def load_sketch(path: str | None) -> Any:
    if path is None:
        return None
    spec = importlib.util.spec_from_file_location("gdn_tree_sketch", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def table(results: list[dict[str, Any]]) -> str:
    """Best of every op and kind of variant, a line per batch."""
    lines = []
    verified = [(x["batch"], x["rows"]) for x in results if x["op"] == "verify"]
    for R in sorted({R for R, _ in verified}):
        for T in sorted({T for _, T in verified}):
            rows = [x for x in results if (x["op"], x["batch"], x["rows"]) == ("verify", R, T)]
            ours = [x for x in rows if x["variant"].lstrip("default ").startswith("(")]
            if not ours:
                continue
            best = min(ours, key=lambda x: x["us"])
            default = next(x for x in ours if x["variant"].startswith("default"))
            rest = "  ".join(f"{x['variant']} {x['us']}" for x in rows if x not in ours)
            lines.append(
                f"verify R={R} T={T}: default {default['us']}, "
                f"best {best['us']} {best['variant']}  {rest}"
            )
    lines += [
        f"{x['op']} R={x['batch']} T={x['rows']} {x['variant']}: {x['us']}"
        for x in results
        if x["op"] != "verify"
    ]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", default="benchmarks/results/ops-gdn.json")
    parser.add_argument("--tune", action="store_true", help="time every tiling of VARIANTS")
    parser.add_argument("--sketch", help="path of the single-launch sketch, timed beside")
    parser.add_argument("--cuda", action="store_true", help="time the kernel of csrc/ beside")
    parser.add_argument(
        "--only-verify", action="store_true", help="leave out chains, decode, commit and conv"
    )
    parser.add_argument("--compile-workers", type=int, default=12)
    for name, default in (("--rows", ROWS), ("--batches", BATCHES)):
        parser.add_argument(name, default=",".join(map(str, default)), help="(%(default)s)")
    args = parser.parse_args()
    rows_of_trees, batches = (
        [int(x) for x in text.split(",")] for text in (args.rows, args.batches)
    )
    unknown = [T for T in rows_of_trees if T not in VARIANTS]
    if unknown:
        parser.error(f"--rows {args.rows}: choose of {', '.join(map(str, VARIANTS))}")
    if not torch.cuda.is_available():
        raise SystemExit("benchmarks.ops.gdn needs a GPU")
    started = time.perf_counter()
    if args.cuda:
        kernels.load()
    forms = {}
    if args.cuda:
        forms = {T: FORMS[T] if args.tune else FORMS[T][:1] for T in rows_of_trees}
    variants = {
        T: list(
            dict.fromkeys(
                [choose_tiling(R, T, HV, V, K, DTYPE) for R in batches]
                + (VARIANTS[T] if args.tune else [])
            )
        )
        for T in rows_of_trees
    }
    tasks: list[tuple[str, int, Tiling | None, str | None]] = [
        ("verify", T, tiling, None) for T in reversed(rows_of_trees) for tiling in variants[T]
    ]
    if not args.only_verify:
        tasks += [("commit", 64, None, None), ("decode", 1, None, None)]
        tasks += [("chain", T, None, None) for T in (2, 4, 8, 16)]
    if args.sketch is not None:
        tasks += [("sketch", T, None, args.sketch) for T in reversed(rows_of_trees)]
    with multiprocessing.get_context("spawn").Pool(args.compile_workers) as pool:
        pool.map(compile_part, tasks, chunksize=1)
    print(f"{len(tasks)} parts compiled in {time.perf_counter() - started:.0f} s", flush=True)

    vllm, sketch, checks, bench = load_vllm(), load_sketch(args.sketch), Checks(), Bench()
    good = check_verify(checks, variants, forms)
    check_graph(checks)
    check_commit(checks)
    check_layers_and_raw(checks)
    if vllm is not None:
        check_vllm(checks, vllm)
    print(f"checked after {time.perf_counter() - started:.0f} s", flush=True)
    for R in batches if not checks.failed else ():
        pools, slots = pool_of(R, LAYERS)
        for T in rows_of_trees:
            tilings = [t for t in VARIANTS[T] if args.tune and (T, t) in good]
            case = bench_verify(bench, R, T, pools, slots, tilings, forms.get(T, ()))
            if sketch is not None:
                bench_sketch(bench, sketch, case, pools, slots)
        if not args.only_verify:
            for T in (2, 4, 8, 16):
                bench_chain(bench, R, T, pools, slots)
            bench_decode(bench, R, pools, slots, vllm)
            if vllm is not None:
                bench_vllm_chain(bench, R, 16, vllm)
            if R in (1, 16):
                bench_commit(bench, R, pools, slots)
        del pools
        torch.cuda.empty_cache()
    report = {
        **machine(),
        "shapes": {"HK": HK, "HV": HV, "K": K, "V": V, "layers": LAYERS, "dtype": str(DTYPE)},
        "checks": checks.results,
        "failed": checks.failed,
        "times_us": bench.results,
    }
    out = Path(args.out)
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(report, indent=1) + "\n")
    if checks.failed:
        raise SystemExit(f"no times, since these checks failed: {', '.join(checks.failed)}")
    print(table(bench.results))
    print(f"{time.perf_counter() - started:.0f} s in all; {out}")


if __name__ == "__main__":
    main()
