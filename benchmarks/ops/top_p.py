# SPDX-License-Identifier: Apache-2.0
"""vLLM's two top-p kernels on a GPU: do they agree with sorting, and what would chunks cost?

    python -m benchmarks.ops.top_p [--calls 100] [--out FILE]

vLLM takes one kernel for up to 64 rows, which splits a row over more programs the fewer rows there
are, and another for more. Plain decoding of a few requests takes the first, their trees the second.
Every batch is filtered whole, by the kernel that vLLM takes for it, and in chunks of 64 rows, by
the first one alone. A row is wrong if it keeps a token below the last one of the sorted top-p set,
or drops one above it. Of tokens that tie with the last one any number may stay: rows that differ
between whole and chunks without being wrong differ in those alone.
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


def flat_logits(rows: int, vocab_size: int, device: str, seed: int = 0) -> Tensor:
    """Logits [rows, vocab_size], float32 of bfloat16 values, many of them equal at the limit.

    They lie around 10, where bfloat16's numbers are 1/16 apart: 2 % of the tokens have the last
    kept value.
    """
    generator = torch.Generator(device).manual_seed(seed)
    logits = 10 + torch.randn(rows, vocab_size, generator=generator, device=device)
    return logits.bfloat16().float()


KINDS = {"peaked": peaked_logits, "flat": flat_logits}


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


def count_rows(
    filters: dict[str, Callable[[Tensor], Tensor]], logits: Tensor, calls: int
) -> dict[str, int]:
    """Rows in so many calls that each of two filters in place gets wrong, and that differ.

    Each call has the rows in another order: a program that kept something of the row before it, or
    of the last call, would do no harm with the same row's.

    Returns:
        `wrong, NAME` for each of the `filters`; `differ`: rows of which they keep different tokens.
    """
    last = last_kept(logits, _TOP_P)
    found = dict.fromkeys([*(f"wrong, {name}" for name in filters), "differ"], 0)
    for _ in range(calls):
        order = torch.randperm(len(logits), device=logits.device)
        given = logits[order]
        masked = {name: call(given.clone()) for name, call in filters.items()}
        for name, result in masked.items():
            found[f"wrong, {name}"] += int(wrong_rows(given, result, last[order]).sum())
        first, second = masked.values()
        found["differ"] += int((first != second).any(-1).sum())
    return found


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--calls", type=int, default=100)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("needs a GPU: vLLM has other code for top-p elsewhere")
    from vllm.v1.sample.ops.topk_topp_triton import _SPLIT_MAX_BATCH, apply_top_k_top_p_triton

    def whole(logits: Tensor) -> Tensor:
        top_p = torch.full((len(logits),), _TOP_P, device=logits.device)
        return apply_top_k_top_p_triton(logits, None, top_p)

    def in_chunks(logits: Tensor) -> Tensor:
        return torch.cat([whole(part) for part in logits.split(_SPLIT_MAX_BATCH)])

    filters: dict[str, Callable[[Tensor], Tensor]] = {"whole": whole, "in chunks": in_chunks}
    results, wrong = [], 0
    for kind, make in KINDS.items():
        for vocab_size in (8192, 248_320):
            for rows in (12, 32, 64, 192, 256):
                logits = make(rows, vocab_size, "cuda")
                counted = count_rows(filters, logits, arguments.calls)
                wrong += counted["wrong, whole"] + counted["wrong, in chunks"]
                row = {
                    "logits": kind,
                    "vocab_size": vocab_size,
                    "rows": rows,
                    "sampled": rows * arguments.calls,
                    **counted,
                }
                for name, call in filters.items():
                    # With a copy, which the kernels, working in place, need each time.
                    time = triton.testing.do_bench(
                        lambda c=call, x=logits: c(x.clone()), return_mode="median"
                    )
                    row[f"us, {name}"] = round(1e3 * time, 1)
                results.append(row)
                print(json.dumps(row), flush=True)
    if arguments.out is not None:
        record = {**machine(), "top_p": _TOP_P, "results": results}
        arguments.out.write_text(json.dumps(record, indent=1) + "\n")
    if wrong:
        raise SystemExit(f"{wrong} rows are not the sorted top-p set")


if __name__ == "__main__":
    main()
