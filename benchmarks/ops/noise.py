# SPDX-License-Identifier: Apache-2.0
"""Times of the keyed noise and of the scores made with it on a GPU, each after its check.

    python -m benchmarks.ops.noise [--out FILE]

Shapes are those of one step at B = 63: D = 15 depths, pools of 512, and 4 nodes of each request in
a round. A time is the median over replays of a CUDA graph. Beside each kernel stands the PyTorch
definition in a graph of its own, a dozen to fifty small launches.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path

import torch
import triton
from torch import Tensor

from benchmarks.ops.machine import machine
from vllm_weaver.ops import keyed_gumbel
from vllm_weaver.tree import Sampling, SharedNoise, drawn_log_probs

_DEPTH, _POOL, _NODES = 15, 512, 4
_SAMPLINGS = {
    "greedy": (0.0, 250_000, 1.0, 0.0),
    "T=1": (1.0, 250_000, 1.0, 0.0),
    "T=0.6, top-k 20, top-p 0.95": (0.6, 20, 0.95, 0.0),
}


def microseconds(call: Callable[[], object]) -> float:
    """Median time of one call, replayed from a CUDA graph."""
    return round(1e3 * triton.testing.do_bench_cudagraph(call, return_mode="median"), 2)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--quick", action="store_true", help="1 and 16 requests")
    arguments = parser.parse_args()
    torch.manual_seed(0)
    results = []
    for requests in (1, 16) if arguments.quick else (1, 4, 16):
        seeds = torch.randint(2**62, (requests,), device="cuda")
        positions = torch.randint(8192, (requests, _DEPTH), device="cuda")
        ids = torch.randint(248_320, (requests, _DEPTH, _POOL), device="cuda")
        noises = {
            backend: keyed_gumbel(seeds, positions, ids, backend=backend)
            for backend in ("triton", "reference")
        }
        torch.testing.assert_close(*noises.values(), rtol=1e-6, atol=3e-6)
        row: dict[str, object] = {"requests": requests}
        for backend in noises:
            row[f"noise, {backend}"] = microseconds(
                lambda b=backend, k=(seeds, positions, ids): keyed_gumbel(*k, backend=b)
            )
        request = torch.arange(requests, device="cuda", dtype=torch.int32)
        request = request.repeat_interleave(_NODES)
        depths = torch.randint(_DEPTH, request.shape, device="cuda", dtype=torch.int32)
        log_q = (3 * torch.randn(len(request), _POOL, device="cuda")).log_softmax(-1)
        for name, (temperature, top_k, top_p, min_p) in _SAMPLINGS.items():
            ones = torch.ones(requests, device="cuda")
            sampling = Sampling(
                ones * temperature, ones.int() * top_k, ones * top_p, ones * min_p, filtered=True
            )
            shared = SharedNoise(noises["triton"], sampling)

            nodes = (log_q, request, depths)

            def kernel(s: SharedNoise = shared, n: tuple[Tensor, Tensor, Tensor] = nodes) -> Tensor:
                return s.drawn(*n, 1.0)

            def definition(
                s: SharedNoise = shared, n: tuple[Tensor, Tensor, Tensor] = nodes
            ) -> Tensor:
                at = s.sampling.at(n[1].long())
                return drawn_log_probs(n[0], s.noise_RDP[n[1].long(), n[2].long()], at, 1.0)

            torch.testing.assert_close(kernel(), definition(), rtol=1e-4, atol=1e-4)
            row[f"scores, {name}, kernel"] = microseconds(kernel)
            row[f"scores, {name}, definition"] = microseconds(definition)
        results.append(row)
        print(json.dumps(row), flush=True)
    if arguments.out is not None:
        record = {
            **machine(),
            "microseconds": results,
        }
        arguments.out.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
