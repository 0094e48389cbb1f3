# SPDX-License-Identifier: Apache-2.0
"""Chains of 2 to 8 rows: our verification beside the CUDA kernel that vLLM takes for them.

    python -m benchmarks.ops.gdn_chain [--out FILE]

vLLM's `fused_gdn_decode_post_conv_mtp` also applies the gated norm, which our layer does in a
launch of its own, and writes a state for every row. Shapes, states and graphs are those of
`benchmarks.ops.gdn`. Its output, and the gated norm of ours in PyTorch, are compared first; where
they differ, nothing is timed.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from benchmarks.ops.gdn import (
    DEVICE,
    DTYPE,
    HV,
    LAYERS,
    Bench,
    Case,
    K,
    V,
    bench_chain,
    each,
    make_case,
    pool_of,
    rms_ratio,
    run_cuda,
    run_verify,
    stash_for,
)
from benchmarks.ops.machine import Checks, machine
from vllm_weaver.ops.cuda import NotBuilt, load
from vllm_weaver.ops.gdn.cuda import choose_form
from vllm_weaver.ops.gdn.triton import GdnTritonStash

ROWS = (2, 4, 8)
BATCHES = (1, 4, 16, 64)
EPS = 1e-6
COPIES = 8
"""Sets of states that vLLM's kernel goes through: one has a state per row."""
ERROR_LIMIT = 1e-2
"""Both outputs are rounded to bfloat16, ours before the norm and after it."""


class Chain:
    """A batch of chains as vLLM's kernel takes them."""

    def __init__(self, R: int, T: int) -> None:
        self.R, self.T = R, T
        self.case: Case = make_case(R, T, chain=True)
        self.x = self.case.x.flatten(0, 1)
        self.a, self.b = self.case.a.flatten(0, 1), self.case.b.flatten(0, 1)
        self.indices = torch.arange(1, R * T + 1, dtype=torch.int32, device=DEVICE).view(R, T)
        self.starts = torch.arange(0, R * T + 1, T, dtype=torch.int32, device=DEVICE)
        self.accepted = torch.ones(R, dtype=torch.int32, device=DEVICE)
        gen = torch.Generator(DEVICE).manual_seed(2)
        self.gate = torch.randn(R * T, HV, V, device=DEVICE, generator=gen).to(DTYPE)
        self.weight = (1 + 0.1 * torch.randn(V, device=DEVICE, generator=gen)).to(DTYPE)
        self.out = torch.empty_like(self.gate)

    def states(self) -> Tensor:
        """A state per row, as the kernel writes them; slot 0 belongs to nobody."""
        gen = torch.Generator(DEVICE).manual_seed(1)
        return torch.randn(self.R * self.T + 1, HV, V, K, device=DEVICE, generator=gen) * 0.1

    def run(self, kernel: Callable[..., object], state: Tensor) -> None:
        """vLLM's kernel, with the arguments of its layer."""
        kernel(
            mixed_qkv=self.x,
            a=self.a,
            b=self.b,
            A_log=self.case.A_log,
            dt_bias=self.case.dt_bias,
            state_indices=self.indices,
            cu_seqlens=self.starts,
            num_accepted_tokens=self.accepted,
            state=state,
            output_gate=self.gate,
            norm_weight=self.weight,
            out=self.out,
            scale=K**-0.5,
            norm_eps=EPS,
            output_gate_activation="silu",
        )

    def gated(self, out: Tensor) -> Tensor:
        """The gated norm of verified rows [R, T, HV, V]."""
        rows = out.flatten(0, 1).float()
        rows = rows * torch.rsqrt(rows.square().mean(-1, keepdim=True) + EPS)
        return rows * self.weight.float() * torch.nn.functional.silu(self.gate.float())


def vllm_kernel() -> Callable[..., object] | str:
    """vLLM's kernel, or why it is not there."""
    try:
        from vllm import _custom_ops
    except Exception as error:
        return f"vLLM is not there: {error!r}"[:200]
    if not hasattr(torch.ops._C, "fused_gdn_decode_post_conv_mtp"):
        return "this vLLM has no fused_gdn_decode_post_conv_mtp"
    kernel: Callable[..., object] = _custom_ops.fused_gdn_decode_post_conv_mtp
    return kernel


def check(checks: Checks, kernel: Callable[..., object]) -> None:
    """Outputs of both against each other."""
    for T in ROWS:
        chain = Chain(2, T)
        state = chain.states()
        ours, _ = run_verify(chain.case, state, chain.indices[:, 0].contiguous())
        expected = chain.gated(ours)
        chain.out.fill_(float("nan"))
        chain.run(kernel, state)
        error = rms_ratio(chain.out, expected)
        checks.note(f"vLLM's CUDA kernel against ours, T={T}", error, error < ERROR_LIMIT)


def run_compiled(case: Case, slots: Tensor, pool: Tensor, stash: GdnTritonStash) -> None:
    """The verification of `csrc/`."""
    run_cuda(case, pool, slots, choose_form(case.x.shape[1]), stash=stash)


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", default="benchmarks/results/ops-gdn-chain.json")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("benchmarks.ops.gdn_chain needs a GPU")
    started = time.perf_counter()
    kernel = vllm_kernel()
    if isinstance(kernel, str):
        raise SystemExit(kernel)
    checks, bench = Checks(), Bench()
    check(checks, kernel)
    if checks.failed:
        raise SystemExit(f"no times, since these checks failed: {', '.join(checks.failed)}")
    try:
        load()
        compiled = True
    except NotBuilt as error:
        print(error)
        compiled = False
    for R in BATCHES:
        pools, slots = pool_of(R, LAYERS)
        for T in ROWS:
            bench_chain(bench, R, T, pools, slots)
            chain = Chain(R, T)
            if compiled:
                ours = partial(run_compiled, chain.case, slots)
                calls = each(ours, pools, [stash_for(R, T) for _ in pools])
                bench.time("chain", "ours, CUDA", R, T, calls)
            states = [chain.states() for _ in range(COPIES)]
            calls = each(partial(chain.run, kernel), states)
            bench.time("chain", "vLLM CUDA, gated norm in it", R, T, calls)
        del pools
        torch.cuda.empty_cache()
    report = {
        **machine(),
        "checks": checks.results,
        "times_us": bench.results,
        "seconds": round(time.perf_counter() - started),
    }
    Path(args.out).parent.mkdir(parents=True, exist_ok=True)
    Path(args.out).write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
