# SPDX-License-Identifier: Apache-2.0
"""vLLM's two top-p kernels on a GPU: how many rows they get wrong, and what chunks of rows cost.

    python -m benchmarks.ops.top_p [--calls 100] [--out FILE]

vLLM takes one kernel for up to 64 rows and another for more. The second one gathers a row's likely
tokens in a buffer and reads them back with no barrier between, so that the first step of its search
may see what the row before left there. Rows here have few likely tokens and bfloat16's values. A
row is wrong if it keeps a token below the last one that belongs to the top-p set, or drops one
above it; of tokens that tie with the last one any number may stay. Trees are sampled in chunks that
get the first kernel (`TreeSampler`): their time stands beside the whole's.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch
import triton
from torch import Tensor

from benchmarks.ops.machine import machine

_TOP_P = 0.9
_TIE = 1e-3


def peaked_logits(rows: int, vocab_size: int, device: str, seed: int = 0) -> Tensor:
    """Logits [rows, vocab_size], float32 of bfloat16 values, a few tokens far above the rest."""
    generator = torch.Generator(device).manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, device=device)

    logits = 2 * normal(rows, vocab_size)
    likely = torch.randint(vocab_size, (rows, 12), generator=generator, device=device)
    logits.scatter_(1, likely, 18 + 2 * normal(rows, 12))
    return logits.bfloat16().float()


def wrong_rows(logits: Tensor, masked: Tensor, top_p: float) -> Tensor:
    """Rows, bool [R], whose kept tokens are not the top-p set, ties with its last token aside.

    Args:
        logits: [R, V], before.
        masked: [R, V], after; minus infinity where a token was dropped.
        top_p: share of the mass.
    """
    ordered = logits.double().sort(-1, descending=True).values
    better = ordered.softmax(-1).cumsum(-1).roll(1, -1)
    better[:, 0] = 0.0
    # Shares that rounding may move past the limit leave either token as the last one.
    last, latest = (
        ordered.gather(1, ((better < top_p + slack).sum(-1, keepdim=True) - 1))
        for slack in (-1e-5, 1e-5)
    )
    kept = masked.isfinite()
    below = kept & (logits < latest - _TIE)
    above = ~kept & (logits > last + _TIE)
    return (below | above).any(-1)


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--calls", type=int, default=100)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("needs a GPU: vLLM has other code for top-p elsewhere")
    from vllm.v1.sample.ops.topk_topp_triton import apply_top_k_top_p_triton

    from vllm_weaver.engine.compat import EXACT_TOP_P_ROWS

    def whole(logits: Tensor) -> Tensor:
        top_p = torch.full((len(logits),), _TOP_P, device=logits.device)
        return apply_top_k_top_p_triton(logits, None, top_p)

    def in_chunks(logits: Tensor) -> Tensor:
        return torch.cat([whole(part) for part in logits.split(EXACT_TOP_P_ROWS)])

    results, wrong_in_chunks = [], 0
    for vocab_size in (8192, 248_320):
        for rows in (64, 192, 256):
            logits = peaked_logits(rows, vocab_size, "cuda")
            found = {"whole": 0, "chunks": 0}
            for name, call in (("whole", whole), ("chunks", in_chunks)):
                for _ in range(arguments.calls):
                    found[name] += int(wrong_rows(logits, call(logits.clone()), _TOP_P).sum())
            wrong_in_chunks += found["chunks"]
            times = [
                # With a copy, which the kernels, working in place, need each time.
                1e3
                * triton.testing.do_bench(
                    lambda c=call, x=logits: c(x.clone()), return_mode="median"
                )
                for call in (whole, in_chunks)
            ]
            row = {
                "vocab_size": vocab_size,
                "rows": rows,
                "sampled": rows * arguments.calls,
                "wrong, whole": found["whole"],
                "wrong, in chunks": found["chunks"],
                "us, whole": round(times[0], 1),
                "us, in chunks": round(times[1], 1),
            }
            results.append(row)
            print(json.dumps(row), flush=True)
    if arguments.out is not None:
        record = {**machine(), "top_p": _TOP_P, "results": results}
        arguments.out.write_text(json.dumps(record, indent=1) + "\n")
    if wrong_in_chunks:
        raise SystemExit(f"{wrong_in_chunks} rows are wrong in chunks of {EXACT_TOP_P_ROWS} rows")


if __name__ == "__main__":
    main()
