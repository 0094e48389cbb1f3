# SPDX-License-Identifier: Apache-2.0
"""An arm's texts against AR's of the same run, each difference with AR's own doubt there."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from .statistics import first_difference, repetition

#: Gap of log-probabilities below which rounding may choose either token.
TIE = {"float32": 1e-4, "bfloat16": 0.1}
_MOST_CHECKS = 32

#: Asks AR: for each (request, place, token), the gap of its two best tokens at that place of its
#: own text, None if it does not know the second, and the distance from the best to `token`. Of
#: sampled texts both are of log p / T + noise. None where it cannot tell.
Doubts = Callable[[list[tuple[int, int, int]]], list[tuple[float | None, float] | None]]


@dataclass(frozen=True)
class Difference:
    """Where a text first differs from AR's.

    Attributes:
        request, place: of the token.
        gap: between AR's two best tokens there; None if it was not looked up.
        distance: from AR's best token to the arm's.
        kind: "tie", "beyond a tie" or "not classified".
    """

    request: int
    place: int
    gap: float | None
    distance: float | None
    kind: str


def compare(
    got: Sequence[Sequence[int]],
    want: Sequence[Sequence[int]],
    *,
    dtype: str,
    doubts: Doubts | None,
    tie: float | None = None,
    most_checks: int = _MOST_CHECKS,
) -> dict[str, Any]:
    """Compare texts, each within the shorter of the two.

    Without `doubts`, differences are not classified: of sampled texts of vLLM's own speculation,
    which are another draw from the same distribution. A difference is a tie up to a distance of
    `tie`, by default the dtype's; no more than `most_checks` are looked up.
    """
    limit = TIE[dtype] if tie is None else tie
    places = [first_difference(a, b) for a, b in zip(got, want, strict=True)]
    where = [(i, place) for i, place in enumerate(places) if place is not None]
    checked = [(i, place, got[i][place]) for i, place in where[:most_checks]]
    found = doubts(checked) if checked and doubts is not None else []
    differences = []
    for number, (i, place) in enumerate(where):
        gap = distance = None
        kind = "not classified"
        known = found[number] if number < len(found) else None
        if known is not None:
            gap, distance = known
            kind = "tie" if distance <= limit else "beyond a tie"
        differences.append(Difference(i, place, gap, distance, kind))
    compared = sum(min(len(a), len(b)) for a, b in zip(got, want, strict=True))
    equal = sum(
        min(len(a), len(b)) if place is None else place
        for a, b, place in zip(got, want, places, strict=True)
    )
    kinds = [difference.kind for difference in differences]
    return {
        "requests": len(got),
        "equal_requests": len(got) - len(where),
        "tokens_compared": compared,
        "tokens_before_first_difference": equal,
        "ties": kinds.count("tie"),
        "beyond_a_tie": kinds.count("beyond a tie"),
        "not_classified": kinds.count("not classified"),
        "tie_limit": limit,
        "differences": [asdict(difference) for difference in differences],
        "repetition": repetition(got),
        "repetition_ar": repetition(want),
    }
