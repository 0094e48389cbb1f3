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
from collections.abc import Callable
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


def last_kept(logits: Tensor, top_p: float) -> Tensor:
    """Logits of the last token of each row's top-p set, float64 [R, 2].

    Shares that rounding may move past the limit leave either of two tokens as the last one: the
    earlier, then the later.
    """
    ordered = logits.double().sort(-1, descending=True).values
    better = ordered.softmax(-1).cumsum(-1).roll(1, -1)
    better[:, 0] = 0.0
    places = [(better < top_p + slack).sum(-1, keepdim=True) - 1 for slack in (-1e-5, 1e-5)]
    return ordered.gather(1, torch.cat(places, 1))


def wrong_rows(logits: Tensor, masked: Tensor, last: Tensor) -> Tensor:
    """Rows, bool [R], whose kept tokens are not the top-p set, ties with its last token aside.

    Args:
        logits: [R, V], before.
        masked: [R, V], after; minus infinity where a token was dropped.
        last: [R, 2], see :func:`last_kept`.
    """
    kept = masked.isfinite()
    earlier, later = last.float().split(1, -1)
    below = kept & (logits < later - _TIE)
    above = ~kept & (logits > earlier + _TIE)
    return (below | above).any(-1)


def count_wrong(call: Callable[[Tensor], Tensor], logits: Tensor, calls: int) -> int:
    """Rows that a filter in place gets wrong in so many calls.

    What a program finds in its buffer is from its row before, or from the last call: each call has
    the rows in another order, since the same row's tokens there would do no harm.
    """
    last, wrong = last_kept(logits, _TOP_P), 0
    for _ in range(calls):
        order = torch.randperm(len(logits), device=logits.device)
        given = logits[order]
        wrong += int(wrong_rows(given, call(given.clone()), last[order]).sum())
    return wrong


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
            found = [count_wrong(x, logits, arguments.calls) for x in (whole, in_chunks)]
            wrong_in_chunks += found[1]
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
                "wrong, whole": found[0],
                "wrong, in chunks": found[1],
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
