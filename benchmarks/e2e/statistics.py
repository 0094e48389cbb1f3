# SPDX-License-Identifier: Apache-2.0
"""Figures from steps and texts: throughput, accepted length, intervals, repetition."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

_RESAMPLES = 2000
NGRAM = 4


def throughput(seconds: Sequence[float], tokens: Sequence[int]) -> dict[str, float]:
    """Tokens per second, and the step time's mean, median and 90th percentile in ms.

    Zeros if no step was counted.
    """
    if not seconds:
        return {"tokens_per_second": 0.0, "ms_per_step": 0.0, "ms_median": 0.0, "ms_p90": 0.0}
    times = np.asarray(seconds)
    return {
        "tokens_per_second": float(np.sum(tokens) / times.sum()),
        "ms_per_step": float(1e3 * times.mean()),
        "ms_median": float(1e3 * np.median(times)),
        "ms_p90": float(1e3 * np.percentile(times, 90)),
    }


def accepted_length(passes: Sequence[int], tokens: Sequence[int], seed: int = 0) -> dict[str, Any]:
    """Tokens per target pass, bonus included: over all passes, and as a mean over requests.

    The 95 % interval of the first is a bootstrap over requests; None for a single request.
    """
    counts, emitted = np.asarray(passes), np.asarray(tokens)
    used = counts > 0
    if not used.any():
        return {"token_weighted": 0.0, "interval_95": None, "per_request": 0.0}
    counts, emitted = counts[used], emitted[used]
    interval = None
    if len(counts) > 1:
        draws = np.random.default_rng(seed).integers(0, len(counts), (_RESAMPLES, len(counts)))
        means = emitted[draws].sum(1) / counts[draws].sum(1)
        interval = [float(x) for x in np.percentile(means, (2.5, 97.5))]
    return {
        "token_weighted": float(emitted.sum() / counts.sum()),
        "interval_95": interval,
        "per_request": float((emitted / counts).mean()),
    }


def rate_ratio(
    ours: Sequence[tuple[int, float]], theirs: Sequence[tuple[int, float]], seed: int = 0
) -> dict[str, float | int | None]:
    """Ratio of two rates, each all tokens over all seconds, of rounds that took turns.

    The 95 % interval is a bootstrap over rounds, those of a turn together. Not a mean of the
    rounds' ratios: a round whose text is easy would weigh as much as one that takes ten times as
    long.

    Args:
        ours, theirs: tokens and seconds of each round.
    """
    pairs = [(a, b) for a, b in zip(ours, theirs, strict=True) if a[1] and b[1]]
    if not pairs:
        return {"ratio": None, "low": None, "high": None, "rounds": 0}
    table = np.asarray(pairs, dtype=float)  # round, side, (tokens, seconds)

    def ratio(sums: np.ndarray) -> np.ndarray:
        rates = sums[..., 0] / sums[..., 1]
        return rates[..., 0] / rates[..., 1]

    low = high = None
    if len(pairs) > 1:
        draws = np.random.default_rng(seed).integers(0, len(pairs), (_RESAMPLES, len(pairs)))
        low, high = (float(x) for x in np.percentile(ratio(table[draws].sum(1)), (2.5, 97.5)))
    return {
        "ratio": float(ratio(table.sum(0))),
        "low": low,
        "high": high,
        "rounds": len(pairs),
    }


def repetition(texts: Sequence[Sequence[int]], n: int = NGRAM) -> float:
    """Share of n-grams that occurred before in the same text; looping text tends to 1."""
    repeated = total = 0
    for text in texts:
        grams = [tuple(text[i : i + n]) for i in range(len(text) - n + 1)]
        total += len(grams)
        repeated += len(grams) - len(set(grams))
    return repeated / total if total else 0.0


def first_difference(got: Sequence[int], want: Sequence[int]) -> int | None:
    """Place of the first token that differs, within the shorter text; None if there is none."""
    for place, (a, b) in enumerate(zip(got, want, strict=False)):
        if a != b:
            return place
    return None
