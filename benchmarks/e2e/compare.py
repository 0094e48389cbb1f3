# SPDX-License-Identifier: Apache-2.0
"""An arm's texts against AR's of the same run, each difference with AR's own doubt there."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from .statistics import first_difference, repetition

#: Distance up to which rounding may choose either token, where a step of the logits is smaller.
TIE = {"float32": 1e-4, "bfloat16": 0.1}
#: How far one engine's rounding moves two logits apart: in bfloat16 in 999 of 1,000 places of the
#: packaged target whose two best are less than 1 apart, and the most of 56,040 draws
#: (`rounding.py`, `results/rounding-drawn.json`).
ROUNDING = {"float32": 1e-4, "bfloat16": 0.17}
#: Bits of a number's fraction, and the exponent of the smallest normal number.
_FORMATS = {"float32": (23, -126), "bfloat16": (7, -126), "float16": (10, -14)}


@dataclass(frozen=True)
class Doubt:
    """What AR thinks of another text's token at a place of its own text.

    Attributes:
        gap: between its two best tokens; None if it does not know the second.
        distance: from its own token to the other one, of what it maximises: of logits, and where
            it samples of logit / T + noise.
        logit: of the two tokens' the one that is farther from zero, where roundings are coarser.
        temperature: T; 0 where it takes the best token.
    """

    gap: float | None
    distance: float
    logit: float
    temperature: float = 0.0


#: Asks AR: its doubt for each (request, place, token) of its own texts; None where it cannot tell.
Doubts = Callable[[list[tuple[int, int, int]]], list[Doubt | None]]

#: A doubt's distance for (request, place, token), of the target's function in float32; None where
#: that cannot be asked.
Exact = Callable[[int, int, int], float | None]


@dataclass(frozen=True)
class Difference:
    """Where a text first differs from AR's.

    Attributes:
        request, place: of the token.
        kind: "tie", "beyond a tie" or "not classified".
        gap, distance, logit: of AR's doubt there; None if it has none.
        step: between neighbouring numbers of the logits' dtype at `logit`, see :func:`step_at`.
        exact: the distance in float32, where AR's was too large; below 0 the other token is ahead.
            Of `lossless.py` the larger one of the distances to AR's token and to the other.
    """

    request: int
    place: int
    kind: str
    gap: float | None = None
    distance: float | None = None
    logit: float | None = None
    step: float | None = None
    exact: float | None = None


def spacing(dtype: str, value: float) -> float:
    """From the size of `value`, which is finite, to the next larger number of `dtype`.

    `dtype` is one of float32, bfloat16 and float16.
    """
    bits, least = _FORMATS[dtype]
    exponent = math.frexp(value)[1] - 1 if value else least
    return math.ldexp(1.0, max(exponent, least) - bits)


def step_at(dtype: str, logit: float) -> float | None:
    """One rounding step of a logit, if it was rounded to `dtype`.

    None if it was not: a model whose head has a finer dtype, or log-probabilities in the place of
    logits, have no step that would excuse a difference.
    """
    if not math.isfinite(logit):
        return None
    step = spacing(dtype, logit)
    return None if math.fmod(logit, step) else step


def compare(
    got: Sequence[Sequence[int]],
    want: Sequence[Sequence[int]],
    *,
    dtype: str,
    doubts: Doubts | None,
    tie: float | None = None,
    exact: Exact | None = None,
) -> dict[str, Any]:
    """Compare texts, each within the shorter of the two.

    A difference is a tie up to a distance of `tie`, by default the dtype's, or of one step of the
    logits' dtype, over T where AR samples: two tokens that are not equal are at least a step apart,
    and rounding moves by whole steps. `ties_of_one_step` counts the ties beyond `tie`.

    What is further apart is a tie all the same if `exact`, where it can be asked, has no more
    between the tokens than one engine's rounding moves them (`ROUNDING`, over T where AR samples,
    or `tie` where that is given), or the other one ahead: then AR's rounding has put them so far
    apart, or the other engine's has brought them together. `ties_in_float32` counts those.

    Without `doubts`, differences are not classified: of sampled texts of vLLM's own speculation,
    which are another draw from the same distribution.
    """
    limit = TIE[dtype] if tie is None else tie
    places = [first_difference(a, b) for a, b in zip(got, want, strict=True)]
    where = [(i, place) for i, place in enumerate(places) if place is not None]
    known: Sequence[Doubt | None] = [None] * len(where)
    if where and doubts is not None:
        known = doubts([(i, place, got[i][place]) for i, place in where])
    differences = []
    beyond_limit = in_float32 = 0
    for (i, place), doubt in zip(where, known, strict=True):
        if doubt is None:
            differences.append(Difference(i, place, kind="not classified"))
            continue
        step = step_at(dtype, doubt.logit)
        most = max(limit, (step or 0.0) / (doubt.temperature or 1.0))
        kind, true = "tie", None
        if not doubt.distance <= most:
            true = exact(i, place, got[i][place]) if exact is not None else None
            rounding = ROUNDING[dtype] / (doubt.temperature or 1.0) if tie is None else tie
            if true is not None and true <= rounding:
                in_float32 += 1
            else:
                kind = "beyond a tie"
        beyond_limit += limit < doubt.distance <= most
        differences.append(
            Difference(i, place, kind, doubt.gap, doubt.distance, doubt.logit, step, true)
        )
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
        "ties_of_one_step": beyond_limit,
        "ties_in_float32": in_float32,
        "beyond_a_tie": kinds.count("beyond a tie"),
        "not_classified": kinds.count("not classified"),
        "tie_limit": limit,
        "differences": [asdict(difference) for difference in differences],
        "repetition": repetition(got),
        "repetition_ar": repetition(want),
    }


def compare_again(
    before: Mapping[int, tuple[str, Sequence[int]]],
    own: Sequence[Sequence[int]],
    *,
    dtype: str,
    doubts: Doubts,
    exact: Exact | None = None,
) -> dict[str, Any]:
    """AR's texts of other cells against its own of this one: how often rounding changes a text.

    Args:
        before: by request of this cell, the other cell's name and the text there.
        own: texts of this cell.
        dtype, doubts, exact: see :func:`compare`; AR's doubts in this cell.

    Returns:
        As of :func:`compare`; `cells`: the others' names; `largest_distance` of the differences
        that are classified, None without one.
    """
    numbers = sorted(before)
    found = compare(
        [before[number][1] for number in numbers],
        [own[number] for number in numbers],
        dtype=dtype,
        doubts=lambda places: doubts([(numbers[i], place, token) for i, place, token in places]),
        exact=None if exact is None else lambda i, place, token: exact(numbers[i], place, token),
    )
    distances = []
    for difference in found["differences"]:
        difference["request"] = numbers[difference["request"]]
        if difference["distance"] is not None:
            distances.append(difference["distance"])
    del found["repetition"], found["repetition_ar"]
    cells = sorted({cell for cell, _ in before.values()})
    return {"cells": cells, **found, "largest_distance": max(distances, default=None)}


def in_words(texts: Mapping[str, Any], beyond: str = "{} beyond a tie") -> str:
    """How many texts are equal, and what the others' differences are; also of older results."""
    words = [f"{texts['equal_requests']} of {texts['requests']}"]
    if texts["ties"]:
        steps, exact = texts.get("ties_of_one_step", 0), texts.get("ties_in_float32", 0)
        notes = [f"{steps} of one step"] if steps else []
        notes += [f"{exact} in float32"] if exact else []
        words.append(f"{texts['ties']} at a tie" + (f" ({', '.join(notes)})" if notes else ""))
    if texts["beyond_a_tie"]:
        words.append(beyond.format(texts["beyond_a_tie"]))
    if texts["not_classified"]:
        words.append(f"{texts['not_classified']} not classified")
    return ", ".join(words)
