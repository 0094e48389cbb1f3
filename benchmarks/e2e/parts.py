# SPDX-License-Identifier: Apache-2.0
"""What `lossless.py` lets both engines decode: parts, each a list of batches of requests.

Plain data. A part says what must have happened in every engine, so that a run in which it did not
cannot pass.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

#: Sizes of the batches that start together.
TOGETHER = (1, 2, 3, 5, 7, 8, 13, 16, 17, 24, 31, 32)
#: Sizes of batches of prompts of every length: small ones, whose trees are whole, come often.
_MIXED = (1, 2, 2, 4, 2, 8, 1, 3, 2, 16)
GREEDY: dict[str, Any] = {"temperature": 0.0}
#: Ways to sample.
SAMPLINGS: dict[str, dict[str, Any]] = {
    "T = 1": {"temperature": 1.0},
    "T = 0.6": {"temperature": 0.6},
    "top-k": {"temperature": 1.0, "top_k": 20},
    "top-p": {"temperature": 1.0, "top_p": 0.9},
    "top-k and top-p": {"temperature": 0.8, "top_k": 40, "top_p": 0.95},
    "min-p": {"temperature": 1.2, "min_p": 0.05},
    "repetition penalty": {"temperature": 1.0, "repetition_penalty": 1.2},
    "presence and frequency penalty": {
        "temperature": 1.0,
        "presence_penalty": 0.4,
        "frequency_penalty": 0.2,
    },
}

#: Cuts prompts: (how many, their length).
Cut = Callable[[int, int], list[list[int]]]


class PartError(ValueError):
    """A part that the options leave no room for: one line that says what to pass."""


@dataclass(frozen=True)
class Request:
    """One request.

    Attributes:
        prompt: token ids.
        tokens: to generate.
        sampling: options of `SamplingParams`.
        after: it joins once its batch has emitted so many tokens.
        hit: the prefix cache must hold a part of its prompt.
        label: for people.
    """

    prompt: list[int]
    tokens: int
    sampling: Mapping[str, Any] = field(default_factory=lambda: GREEDY)
    after: int = 0
    hit: bool = False
    label: str = ""

    def to_dict(self) -> dict[str, Any]:
        """As `Server.serve` takes it."""
        kept = asdict(self)
        return {key: kept[key] for key in ("prompt", "tokens", "sampling", "after")}


@dataclass(frozen=True)
class Part:
    """Batches that run one after another.

    Attributes:
        name, title: short, and for people.
        batches: the requests.
        happened: counts of `StepLog` that must not be zero.
        graphs: counts that must not be zero where engines have CUDA graphs: modes of
            `graphs`, or `padded`.
        follows: name of a part whose caches this one goes on from.
        ordered: a batch depends on those before it.
    """

    name: str
    title: str
    batches: list[list[Request]]
    happened: tuple[str, ...] = ()
    graphs: tuple[str, ...] = ("FULL",)
    follows: str | None = None
    ordered: bool = False

    @property
    def requests(self) -> list[Request]:
        """Of all batches."""
        return [request for batch in self.batches for request in batch]

    def regrouped(self, size: int) -> list[list[Request]]:
        """The same requests in other batches: the last first, each batch at once."""
        requests = [
            Request(r.prompt, r.tokens, r.sampling, label=r.label) for r in self.requests[::-1]
        ]
        return [requests[i : i + size] for i in range(0, len(requests), size)]


@dataclass(frozen=True)
class Sizes:
    """How large everything is.

    Attributes:
        budget: nodes of the largest tree.
        tokens: of a usual request.
        batch: most requests at once.
        context: most tokens of a prompt.
        block: tokens in the largest block of any engine's prefix cache.
        chunk: most prompt tokens of a request in a step beside others.
        seeds: requests for each way to sample.
    """

    budget: int
    tokens: int
    batch: int
    context: int
    block: int
    chunk: int
    seeds: int


def lengths(sizes: Sizes, cut: Cut) -> Part:
    """Prompts of every length from 1 to 2 B + 2; in every other batch they join one by one."""
    order = list(range(1, 2 * sizes.budget + 3))
    random.Random(0).shuffle(order)
    batches: list[list[Request]] = []
    while order:
        number = len(batches)
        size = min(_MIXED[number % len(_MIXED)], sizes.batch)
        chosen, order = order[:size], order[size:]
        gap = (number % 2) * (2 + sizes.tokens // 6)
        batches.append(
            [
                Request(cut(1, length)[0], sizes.tokens, after=i * gap, label=f"{length} tokens")
                for i, length in enumerate(chosen)
            ]
        )
    return Part("lengths", f"prompts of 1 to {2 * sizes.budget + 2} tokens", batches)


def batches(sizes: Sizes, cut: Cut) -> Part:
    """Batches that start together and end at different lengths."""
    chosen = [size for size in TOGETHER if size <= sizes.batch]
    found = []
    for size in chosen:
        # Some end early, some late, in no order.
        ends = [max(2, sizes.tokens * (1 + (5 * i + size) % 8) // 5) for i in range(size)]
        prompts = [cut(1, 5 + (11 * i + size) % 90)[0] for i in range(size)]
        found.append(
            [Request(p, n, label=f"batch {size}") for p, n in zip(prompts, ends, strict=True)]
        )
    title = f"batches of 1 to {chosen[-1]} that start together"
    return Part("batches", title, found, graphs=("FULL", "padded"))


def prefix(sizes: Sizes, cut: Cut) -> Part:
    """Long prompts, the same again, and others that share their first three blocks.

    Raises:
        PartError: the context is too short for that.
    """
    block, tail = sizes.block, 9
    whole = 3 * block + tail
    if whole + sizes.tokens > sizes.context:
        raise PartError(
            f"prefix: --context {sizes.context} is too short for three blocks of {block} tokens "
            f"and an answer: pass at least {whole + sizes.tokens}"
        )
    number = max(1, min(4, sizes.batch // 2))
    prompts = cut(number, whole)
    cold = [Request(p, sizes.tokens, label="cold") for p in prompts]
    again = [Request(p, sizes.tokens, hit=True, label="again") for p in prompts[::-1]]
    gap = 1 + sizes.tokens // 4
    shared = []
    for i, prompt in enumerate(prompts):
        for j, extra in enumerate((1, tail + i)):
            ids = prompt[: 3 * block] + cut(1, extra)[0]
            label = f"shared, {extra} more"
            shared.append(
                Request(ids, sizes.tokens, after=(2 * i + j) * gap, hit=True, label=label)
            )
    shared = shared[: sizes.batch]
    return Part("prefix", "the prefix cache", [cold, again, shared], ordered=True, graphs=())


def turns(sizes: Sizes, cut: Cut) -> Part:
    """The first half of :func:`next_turns`: answers that fill blocks of their own.

    Raises:
        PartError: the context is too short.
    """
    block = sizes.block
    tokens = block + 24
    if 6 * block + tokens > sizes.context:
        raise PartError(
            f"turns: --context {sizes.context} is too short for answers over blocks of {block} "
            f"tokens: pass at least {6 * block + tokens}"
        )
    number = min(3, sizes.batch)
    # Beside a drafter vLLM computes the last block that it finds again: one is too few to be found.
    found = [
        Request(cut(1, 4 * block - 8 - i)[0], tokens, label="first turn") for i in range(number)
    ]
    return Part("turns", "answers longer than a block", [found], ordered=True)


def next_turns(sizes: Sizes, cut: Cut, first: Part, answers: Sequence[Sequence[int]]) -> Part:
    """Prompts that go on from answers: what decoding left in the cache is read."""
    found = []
    for i, (request, answer) in enumerate(zip(first.requests, answers, strict=True)):
        ids = [*request.prompt, *answer, *cut(1, 5 + i)[0]]
        found.append(Request(ids, sizes.tokens, hit=True, label="next turn"))
    title = "prompts that go on from those answers"
    return Part("next turns", title, [found], follows="turns", ordered=True, graphs=())


def mixed(sizes: Sizes, cut: Cut) -> Part:
    """Long prompts that arrive, chunk by chunk, while others decode.

    Raises:
        PartError: the context is too short for prompts of several chunks.
    """
    # vLLM ends chunks at blocks.
    least = 3 * max(sizes.chunk, sizes.block)
    if least + sizes.tokens > sizes.context:
        raise PartError(
            f"mixed: --context {sizes.context} is too short for three chunks and an answer: pass "
            f"at least {least + sizes.tokens}"
        )
    found = []
    rounds = 1 if sizes.batch < 8 else 3
    for number in range(rounds):
        decoding = max(1, (sizes.batch // 2) >> number)
        arriving = max(1, sizes.batch // 8)
        batch = [
            Request(cut(1, 6 + 3 * i)[0], 2 * sizes.tokens, label="decoding")
            for i in range(decoding)
        ]
        gap = decoding * max(2, sizes.tokens // 8)
        for i in range(arriving):
            length = least + (37 * i + 11 * number) % max(1, sizes.tokens)
            batch.append(
                Request(cut(1, length)[0], sizes.tokens, after=(i + 1) * gap, label="arriving")
            )
        found.append(batch)
    title = "long prompts that arrive in chunks while others decode"
    happened = ("mixed", "chunks", "mixed_chunks")
    return Part("mixed", title, found, happened=happened, graphs=())


def seeded(sizes: Sizes, cut: Cut) -> Part:
    """Seeded sampling, each way to sample in batches of its own, and all beside greedy ones."""
    single: list[Request] = []
    for name, options in SAMPLINGS.items():
        for i in range(sizes.seeds):
            prompt = cut(1, 3 + (17 * i) % (2 * sizes.budget))[0]
            sampling = {**options, "seed": 1000 + len(single)}
            single.append(Request(prompt, sizes.tokens, sampling, label=name))
    # Of a few requests for each way, a batch holds several ways.
    size = min(sizes.batch, max(sizes.seeds, 4))
    found = [single[i : i + size] for i in range(0, len(single), size)]
    together = []
    for i, (name, options) in enumerate(SAMPLINGS.items()):
        prompt = cut(1, 12 + 5 * i)[0]
        together.append(Request(prompt, sizes.tokens, {**options, "seed": i}, label=name))
        together.append(Request(cut(1, 9 + i)[0], sizes.tokens, label="greedy beside"))
    found.append(together[: sizes.batch])
    return Part("seeded", "seeded sampling", found)


#: Parts by name, in the order in which they run; `turns` brings `next turns` with it.
PARTS: dict[str, Callable[[Sizes, Cut], Part]] = {
    "lengths": lengths,
    "batches": batches,
    "prefix": prefix,
    "turns": turns,
    "mixed": mixed,
    "seeded": seeded,
}
