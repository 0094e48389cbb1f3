# SPDX-License-Identifier: Apache-2.0
"""What AR itself thinks of the tokens at which texts differ from its own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from .compare import Doubts
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

    def of(self, own: Texts) -> Doubts:
        """AR's doubts at places of its texts `own`."""
        where = [(g, i) for g, prompts in enumerate(self.groups) for i in range(len(prompts))]

        def ask(
            places: list[tuple[int, int, int]],
        ) -> list[tuple[float | None, float] | None]:
            found: list[tuple[float | None, float] | None] = []
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


#: [token, log-probability] of some tokens, at each place of a text.
Scores = Sequence[Sequence[tuple[int, float]]]


def doubt_at(
    text: Sequence[int], scores: Scores, own: Sequence[int], place: int, token: int
) -> tuple[float, float] | None:
    """Gap of the two best tokens, and distance of `token`, at one place of AR's text `own`.

    None if AR, asked again, wrote something else before that place.
    """
    if text[:place] != own[:place]:
        return None
    known = dict(scores[place])
    best, second, *_ = sorted(known.values(), reverse=True)
    # A token that is not among the best is at least as far as the last of them.
    return best - second, best - known.get(token, min(known.values()))


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
) -> tuple[None, float] | None:
    """Distance of `token` from the one that AR drew, of what vLLM maximises: log p / T + noise.

    `prompt` is the prompt's length: noise is keyed by the position of the row that draws. None if
    AR, asked again, wrote something else up to that place.
    """
    import torch

    from vllm_weaver.ops import keyed_gumbel

    if text[: place + 1] != own[: place + 1]:
        return None
    known, drawn = dict(scores[place]), own[place]
    noise = keyed_gumbel(
        torch.tensor([seed]),
        torch.tensor([[prompt + place - 1]]),
        torch.tensor([[[drawn, token]]]),
        use_fp64=False,
        backend="reference",
    ).flatten()
    return None, float((known[drawn] - known[token]) / temperature + noise[0] - noise[1])
