# SPDX-License-Identifier: Apache-2.0
"""What AR itself thinks of the tokens at which texts differ from its own."""

from __future__ import annotations

import itertools
import math
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from .compare import Doubt, Doubts, Exact
from .exact import ExactTarget
from .statistics import first_difference

Texts = Sequence[Sequence[int]]


@dataclass
class Asked:
    """Questions to AR's engine about one cell, and its answers.

    AR answers a group at a time, in the batch in which it wrote the texts.

    Attributes:
        groups: prompts, by group and request.
        temperature: of the cell.
        seed: of a group's first request.
        answers: of `Server.doubts`, by group.
    """

    groups: Sequence[Sequence[Sequence[int]]]
    temperature: float
    seed: int
    answers: dict[int, dict[str, Any]] = field(default_factory=dict)

    def questions(self, texts: Sequence[Texts], own: Texts) -> dict[int, dict[str, Any]]:
        """Arguments of `Server.doubts` for each group in which one of the `texts` differs.

        Args:
            texts: of several arms; requests of all groups one after another.
            own: AR's.
        """
        found: dict[int, dict[str, Any]] = {}
        first = 0
        for number, prompts in enumerate(self.groups):
            tokens: list[set[int]] = [set() for _ in prompts]
            longest = 0
            for text in texts:
                for i in range(len(prompts)):
                    place = first_difference(text[first + i], own[first + i])
                    if place is not None:
                        tokens[i].add(text[first + i][place])
                        longest = max(longest, place + 1)
            if longest:
                found[number] = {"prompts": prompts, "tokens": longest}
                if self.temperature > 0:
                    found[number] |= {
                        "temperature": self.temperature,
                        "seed": self.seed,
                        # Of a request that no one asks about: its own first token.
                        "ask": [sorted(x) or [own[first + i][0]] for i, x in enumerate(tokens)],
                    }
            first += len(prompts)
        return found

    def _places(self) -> list[tuple[int, int]]:
        """Group and place in it of each request, groups one after another."""
        return [(g, i) for g, prompts in enumerate(self.groups) for i in range(len(prompts))]

    def of(self, own: Texts) -> Doubts:
        """AR's doubts at places of its texts `own`."""
        where = self._places()

        def ask(places: list[tuple[int, int, int]]) -> list[Doubt | None]:
            found: list[Doubt | None] = []
            for request, place, token in places:
                group, i = where[request]
                answer = self.answers.get(group)
                if answer is None:
                    found.append(None)
                    continue
                text, scores = answer["texts"][i], answer["scores"][i]
                if self.temperature > 0:
                    prompt = len(self.groups[group][i])
                    found.append(
                        sampled_doubt_at(
                            text, scores, own[request], place, token,
                            prompt=prompt, temperature=self.temperature, seed=self.seed + i,
                        )
                    )  # fmt: skip
                else:
                    found.append(doubt_at(text, scores, own[request], place, token))
            return found

        return ask

    def exactly(self, own: Texts, target: ExactTarget) -> Exact:
        """Distances of `target` at places of AR's texts `own`."""
        where = self._places()

        def distance(request: int, place: int, token: int) -> float:
            group, i = where[request]
            prompt, drawn = self.groups[group][i], own[request][place]
            found = target.distance([*prompt, *own[request][:place]], drawn, token)
            if not self.temperature:
                return found
            noise = noise_of(self.seed + i, len(prompt) + place - 1, [drawn, token])
            return found / self.temperature + noise[drawn] - noise[token]

        return distance


#: [token, logit] of some tokens, at each place of a text.
Scores = Sequence[Sequence[tuple[int, float]]]


def doubt_at(
    text: Sequence[int], scores: Scores, own: Sequence[int], place: int, token: int
) -> Doubt | None:
    """Doubt of the best token at one place of AR's text `own`, where the other is `token`.

    None if AR, asked again, wrote something else before that place.
    """
    if text[:place] != own[:place]:
        return None
    return greedy_doubt(scores[place], token)


def greedy_doubt(scores: Sequence[tuple[int, float]], token: int) -> Doubt:
    """Doubt of the best token, of the best tokens' logits; the other is `token`."""
    known = dict(scores)
    best, second, *_ = sorted(known.values(), reverse=True)
    # A token that is not among the best is at least as far as the last of them.
    other = known.get(token, min(known.values()))
    return Doubt(best - second, best - other, coarser(best, other))


def coarser(*logits: float) -> float:
    """The logit that is farthest from zero: a step between its neighbours is no smaller."""
    return max(logits, key=abs)


def sampled_doubt_at(
    text: Sequence[int],
    scores: Scores,
    own: Sequence[int],
    place: int,
    token: int,
    *,
    prompt: int,
    temperature: float,
    seed: int,
) -> Doubt | None:
    """Doubt of the token that AR drew, of what vLLM maximises: logit / T + noise.

    `prompt` is the prompt's length: noise is keyed by the position of the row that draws. None if
    AR, asked again, wrote something else up to that place.
    """
    if text[: place + 1] != own[: place + 1]:
        return None
    known, drawn = dict(scores[place]), own[place]
    noise = noise_of(seed, prompt + place - 1, [drawn, token])
    shift = (known[drawn] - known[token]) / temperature
    distance = shift + noise[drawn] - noise[token]
    return Doubt(None, distance, coarser(known[drawn], known[token]), temperature)


def noise_of(seed: int, position: int, tokens: Sequence[int]) -> dict[int, float]:
    """vLLM's noise of tokens that the row at a position may draw."""
    import torch

    from vllm_weaver.ops import keyed_gumbel

    noise = keyed_gumbel(
        torch.tensor([seed]),
        torch.tensor([[position]]),
        torch.tensor([[list(tokens)]]),
        use_fp64=False,
        backend="reference",
    )
    return dict(zip(tokens, noise.flatten().tolist(), strict=True))


#: Neutral values of the sampling options that :func:`shift_needed` knows.
NEUTRAL: dict[str, float] = {
    "temperature": 0.0,
    "top_k": 0,
    "top_p": 1.0,
    "min_p": 0.0,
    "repetition_penalty": 1.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
}


def shift_needed(
    logits: Mapping[int, float],
    prompt: Sequence[int],
    before: Sequence[int],
    sampling: Mapping[str, Any],
    token: int,
) -> float | None:
    """By how much two scores must move apart before AR takes `token` where it took another.

    Scores are what vLLM compares: logits after penalties, over the temperature, plus noise. The
    token must pass the filters, and every token that is better must fall behind it or out of a
    filter. Each of these is asked by itself, so that with filters it is at least so much. Greedy,
    it is the distance from the best token; sampled without filters, the distance of the token
    drawn.

    Args:
        logits: raw, of the best tokens; with `top_p` of so many that the rest has no weight.
        prompt, before: tokens of the request before the place.
        sampling: options of `SamplingParams`: those of `NEUTRAL`, and `seed`.
        token: that the other engine took.

    Returns:
        At least 0; None if `token` is not among `logits`.
    """
    options = {**NEUTRAL, **sampling}
    if token not in logits:
        return None
    temperature = options["temperature"]
    scaled = _penalised(logits, prompt, before, options)
    noise: Mapping[int, float] = dict.fromkeys(scaled, 0.0)
    filters = None
    if temperature > 0:
        scaled = {key: value / temperature for key, value in scaled.items()}
        noise = noise_of(options["seed"], len(prompt) + len(before) - 1, list(scaled))
        filters = _Filters(scaled, options)
    mine = scaled[token] + noise[token]
    needed = filters.joins(token) if filters else 0.0
    for other, value in scaled.items():
        ahead = value + noise[other] - mine
        if other != token and ahead > needed:
            needed = max(needed, min(ahead, filters.leaves(other)) if filters else ahead)
    return needed


def shifts_in_float32(
    target: ExactTarget,
    prompt: Sequence[int],
    before: Sequence[int],
    sampling: Mapping[str, Any],
    tokens: Sequence[int],
) -> list[float | None]:
    """:func:`shift_needed` of each of the `tokens`, by the small target's logits in float32."""
    logits = dict(enumerate(target.logits([*prompt, *before])))
    return [shift_needed(logits, prompt, before, sampling, token) for token in tokens]


def _penalised(
    logits: Mapping[int, float],
    prompt: Sequence[int],
    before: Sequence[int],
    options: Mapping[str, Any],
) -> dict[int, float]:
    counts, repeated = Counter(before), {*prompt, *before}
    found = {}
    for token, value in logits.items():
        if token in repeated:
            factor = options["repetition_penalty"]
            value = value / factor if value > 0 else value * factor
        value -= options["frequency_penalty"] * counts[token]
        found[token] = value - options["presence_penalty"] * (counts[token] > 0)
    return found


class _Filters:
    """Shifts by which a token would pass all filters, or fail one: 0 if it does.

    Exact for a filter alone and for top-k with top-p. Of min-p with top-p the tokens whose mass
    min-p takes away stay the same.

    Args:
        scaled: scores without noise, by token.
        options: of `NEUTRAL`; filters follow each other as in vLLM.
    """

    def __init__(self, scaled: Mapping[int, float], options: Mapping[str, Any]):
        self._scaled = scaled
        self._joins = dict.fromkeys(scaled, 0.0)
        self._leaves = dict.fromkeys(scaled, math.inf)
        ranked = sorted(scaled, key=lambda token: -scaled[token])
        order = ranked
        if options["min_p"] > 0:
            below = -math.log(options["min_p"])
            threshold = scaled[ranked[0]] - below
            for token in ranked:
                self._joins[token] = max(0.0, threshold - scaled[token])
                self._leaves[token] = max(0.0, scaled[token] - threshold)
            # The best one leaves when the second has become so much better.
            lead = scaled[ranked[0]] - scaled[ranked[1]] if len(ranked) > 1 else math.inf
            self._leaves[ranked[0]] = lead + below
            order = [token for token in ranked if scaled[token] >= threshold]
        #: Whether a token that passes all the same drives the last one out.
        self._full = 0 < options["top_k"] <= len(order)
        if self._full:
            # Ranks decide: the last that passes, and the first that does not, may change places.
            order, out = ranked[: options["top_k"]], ranked[options["top_k"] :]
            for token in out:
                self._joins[token] = max(self._joins[token], scaled[order[-1]] - scaled[token])
                self._leaves[token] = 0.0
            for token in order if out else ():
                self._leaves[token] = min(self._leaves[token], scaled[token] - scaled[out[0]])
        self._limit = options["top_p"]
        self._order = order if self._limit < 1 else []
        self._places = {token: place for place, token in enumerate(self._order)}
        weights = [math.exp(scaled[token] - scaled[order[0]]) for token in self._order]
        self._total = math.fsum(weights)
        self._shares = [weight / self._total for weight in weights]
        #: Share of the mass of the tokens before each place, and of all.
        self._before = [0.0, *itertools.accumulate(self._shares)]

    def joins(self, token: int) -> float:
        """By mass: tokens that are ahead fall behind it, or the mass before it moves to the limit.

        Both may happen, and the least shift that does for both counts. Those that fall behind it
        have no more than its own mass then.
        """
        if not self._order:
            return self._joins[token]
        place = self._places.get(token, len(self._order))
        best = self._scaled[self._order[0]]
        share = math.exp(self._scaled[token] - best) / self._total
        behind = 1 - self._before[place]
        if token not in self._places:
            behind = 0.0 if self._full else share

        def gap(passed: int) -> float:
            if not passed:
                return 0.0
            return self._scaled[self._order[place - passed]] - self._scaled[token]

        def over(passed: int) -> float:
            ahead, rest = self._before[place - passed], behind + passed * share
            share_ahead = ahead / (ahead + rest) if ahead else 0.0
            return _logit(share_ahead) - _logit(self._limit)

        return max(self._joins[token], _least(place, gap, over))

    def leaves(self, token: int) -> float:
        """The other way round: tokens behind it come before it."""
        place = self._places.get(token)
        if place is None:
            return self._leaves[token]

        def gap(passed: int) -> float:
            return self._scaled[token] - self._scaled[self._order[place + passed]]

        def under(passed: int) -> float:
            ahead = self._before[place + passed + 1] - self._shares[place]
            return _logit(self._limit) - _logit(ahead)

        return min(self._leaves[token], _least(len(self._order) - 1 - place, gap, under))


def _least(most: int, rising: Callable[[int], float], falling: Callable[[int], float]) -> float:
    """The least of the larger of two, and of 0, over the arguments 0 to `most`."""
    first = bisect_left(range(most), True, key=lambda x: rising(x) >= falling(x))
    found = max(rising(first), falling(first))
    if first:
        found = min(found, max(rising(first - 1), falling(first - 1)))
    return max(found, 0.0)


def _logit(share: float) -> float:
    if share <= 0:
        return -math.inf
    return math.inf if share >= 1 else math.log(share / (1 - share))


@dataclass
class OwnTexts:
    """AR's texts of a run by what they depend on but for rounding.

    That is the prompt, the temperature and, where it samples, the request's seed; not the batch.
    """

    cells: set[str] = field(default_factory=set)
    texts: dict[tuple[Any, ...], tuple[str, Sequence[int]]] = field(default_factory=dict)

    def add(self, cell: str, asked: Asked, own: Texts) -> dict[int, tuple[str, Sequence[int]]]:
        """Keep a cell's texts.

        Args:
            cell: its name; only its first texts are kept.
            asked: has the prompts.
            own: AR's texts, requests of all groups one after another.

        Returns:
            By request, the first cell that had the same one, and the text there.
        """
        if cell in self.cells:
            return {}
        self.cells.add(cell)
        sampled = asked.temperature > 0
        keys = [
            (tuple(prompt), asked.temperature, asked.seed + i if sampled else None)
            for prompts in asked.groups
            for i, prompt in enumerate(prompts)
        ]
        found = {i: self.texts[key] for i, key in enumerate(keys) if key in self.texts}
        for key, text in zip(keys, own, strict=True):
            self.texts.setdefault(key, (cell, text))
        return found
