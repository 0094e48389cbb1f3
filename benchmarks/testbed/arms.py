# SPDX-License-Identifier: Apache-2.0
"""Many ways to draft, measured on the same texts: all of it batched and on the device.

The models' views of every position are computed once (`prepare`); an arm is then a tree builder
with its settings, and costs one build for each block. Texts, walks and intervals are those of
`evaluate.py`. Knows no training.

Shapes: B prompts, A positions per prompt, R = B * A blocks, D draft depth, P pool.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from vllm_weaver.adapter import AdapterTables, TreeScorer, WeaverAdapter
from vllm_weaver.tree import DraftTree, accept, build_ddtree, build_grown_tree, build_weaver_tree

from .config import Size
from .drafter import Drafter
from .evaluate import Text, Walk, block_states, walk
from .evaluate import _by_prompt as by_prompt
from .target import Target

BUDGETS = (15, 31, 63, 127)
_POOL, _BEST = 512, 64
# An expansion reads nodes x pool rows of the adapter's table: gigabytes at the bench size.
_BLOCKS_AT_ONCE = {"cpu": 512, "cuda": 2048}


@dataclasses.dataclass(frozen=True)
class Arm:
    """One way to draft.

    `kind` is "chain", "ddtree", "weaver", "grown" (grow and prune) or "weaver_chain"; `width` is
    None for the builder's own; `pool` cuts the candidates; scores are divided by `heat` before
    they are normalised; `shared` adds the noise that the target draws with.
    """

    kind: str
    budget: int = 63
    children: int = 8
    width: int | None = None
    rounds: int | None = None
    pool: int | None = None
    heat: float = 1.0
    shared: bool = False


@dataclasses.dataclass
class Part:
    """Blocks of some texts. `pool` holds the drafter's best tokens, best first, `noise` the Gumbel
    noise of the target's draw at each of them; `best` is (log-probabilities, ids) for DDTree,
    `shared_best` the same with noise."""

    count: int
    h_ver: Tensor
    h_draft: Tensor
    tokens: Tensor  # [R, D + 1]
    pool: Tensor  # [R, D, P] int32
    pool_logits: Tensor
    p_pool: Tensor
    noise: Tensor | None
    best: tuple[Tensor, Tensor]
    shared_best: tuple[Tensor, Tensor] | None


@dataclasses.dataclass
class Case:
    """Prompts at one temperature: the texts, and the models' views of them."""

    texts: list[Text]
    parts: list[Part]
    per_depth: dict[str, list[float]]


@torch.no_grad()
def write(
    target: Target,
    prompts: Sequence[Tensor],
    tokens: int,
    block: int,
    temperature: int,
    seed: int,
) -> list[tuple[Text, Tensor | None]]:
    """Continue prompts, each [B, context], once; at temperature 1 with the noise of each draw,
    [B, tokens + block, V].

    Prompts of all lengths are continued together: a step of one token takes as long for a few rows
    as for all.
    """
    device, more = prompts[0].device, tokens + block
    contexts = [prompt.shape[1] for prompt in prompts]
    ends = torch.tensor([len(prompt) for prompt in prompts]).cumsum(0).tolist()
    places = [slice(end - len(p), end) for end, p in zip(ends, prompts, strict=True)]
    longest = max(contexts)
    prefix = torch.cat([F.pad(prompt, (0, longest - prompt.shape[1])) for prompt in prompts])
    known = torch.cat([torch.full((len(p),), p.shape[1], device=device) for p in prompts])
    sampled = torch.full((len(prefix),), temperature == 1, device=device)
    first, again = (torch.Generator(device).manual_seed(seed) for _ in range(2))
    ids = target.generate(prefix, longest + more, sampled, first, known=known)
    noises: list[Tensor | None] = [None for _ in prompts]
    if temperature:
        vocab = target.shape.vocab
        kept = [torch.empty(len(prompt), more, vocab, device=device) for prompt in prompts]
        # The same generator draws the same noise once more, a position at a time.
        for position in range(min(contexts), longest + more):
            drawn = torch.empty(len(prefix), vocab, device=device).exponential_(generator=again)
            for noise, context, place in zip(kept, contexts, places, strict=True):
                if 0 <= position - context < more:
                    noise[:, position - context] = -drawn[place].log()
        noises = [*kept]
    numbers = torch.arange(len(prefix), device=device)
    return [
        (Text(ids[place, : context + more], context, tokens, numbers[place]), noise)
        for context, place, noise in zip(contexts, places, noises, strict=True)
    ]


def _merged(parts: Sequence[Part], most: int) -> list[Part]:
    """Parts beside each other as one, while they have no more than `most` blocks: building trees
    takes as long for a few."""

    def cat(values: list[Any]) -> Any:
        if values[0] is None or isinstance(values[0], int):
            return values[0]
        if isinstance(values[0], tuple):
            return tuple(map(cat, map(list, zip(*values, strict=True))))
        return torch.cat(values)

    groups: list[list[Part]] = []
    for part in parts:
        together = groups[-1] if groups else []
        blocks = sum(len(p.tokens) for p in [*together, part])
        if together and together[-1].count == part.count and blocks <= most:
            together.append(part)
        else:
            groups.append([part])
    names = [field.name for field in dataclasses.fields(Part)]
    return [Part(**{n: cat([getattr(p, n) for p in group]) for n in names}) for group in groups]


@torch.no_grad()
def prepare(
    size: Size, target: Target, drafter: Drafter, texts: Sequence[tuple[Text, Tensor | None]]
) -> Case:
    """The models' views of every position of some texts."""
    parts, sums, blocks = [], {}, 0
    depth = size.drafter.depth
    kept = []
    for text, noise in texts:
        device = text.ids.device
        at_once = max(1, _BLOCKS_AT_ONCE[device.type] // text.tokens)
        count = text.tokens - 1
        for first in range(0, len(text.ids), at_once):
            ids = text.ids[first : first + at_once]
            kept.append(Text(ids, text.context, text.tokens, text.prompt[first : first + at_once]))
            anchors = text.context + torch.arange(count, device=device)
            anchors = anchors.expand(len(ids), count)
            h_ver, h_draft, tokens, states = block_states(target, drafter, ids, anchors, size)
            logits_RDV = target.logits(h_draft).float()
            pool_logits, pool = logits_RDV.topk(min(_POOL, size.target.vocab))
            p_RDV = target.logits(states).float().softmax(-1)
            p_pool = p_RDV.gather(-1, pool)
            marginal_RDV = logits_RDV.log_softmax(-1)
            best = marginal_RDV.topk(_BEST)
            following = tokens[:, 1:]
            figures = {
                "marginal_overlap": torch.minimum(p_RDV, marginal_RDV.exp()).sum(-1),
                "marginal_top1": pool[..., 0] == following,
                "target_entropy": torch.special.entr(p_RDV).sum(-1),
            }
            for most in (64, 128, 256, 512):
                if most <= pool.shape[-1]:
                    figures[f"recall_{most}"] = (pool[..., :most] == following[..., None]).any(-1)
                    figures[f"mass_{most}"] = p_pool[..., :most].sum(-1)
            for name, value in figures.items():
                total = value.double().sum(0)
                sums[name] = sums[name] + total if name in sums else total
            blocks += len(tokens)
            del p_RDV, marginal_RDV
            shared_best = noise_pool = None
            if noise is not None:
                # The token k after the anchor was drawn with the noise of its own position.
                places = torch.arange(count, device=device)[:, None] + torch.arange(
                    1, depth + 1, device=device
                )
                noise_RDV = noise[first : first + at_once, places].flatten(0, 1)
                noise_pool = noise_RDV.gather(-1, pool)
                shared = (logits_RDV + noise_RDV).log_softmax(-1).topk(_BEST)
                shared_best = (shared.values, shared.indices)
                del noise_RDV
            parts.append(
                Part(count, h_ver, h_draft, tokens, pool.int(), pool_logits, p_pool, noise_pool,
                     (best.values, best.indices), shared_best)
            )  # fmt: skip
    per_depth = {k: [round(x, 4) for x in (v / blocks).tolist()] for k, v in sums.items()}
    return Case(kept, _merged(parts, _BLOCKS_AT_ONCE[device.type]), per_depth)


class _Rescored:
    """A scorer with noise added to its log-probabilities, and divided by a heat."""

    def __init__(self, scorer: TreeScorer, noise: Tensor | None, heat: float) -> None:
        self._scorer, self._heat = scorer, heat
        self._noise_QP = None if noise is None else noise.flatten(0, 1)
        self._depth = 1 if noise is None else noise.shape[1]

    def __call__(
        self, request_N: Tensor, node_N: Tensor, tokens_N: Tensor, depths_N: Tensor, tree: Any
    ) -> tuple[Tensor, Tensor]:
        ids, scores = self._scorer(request_N, node_N, tokens_N, depths_N, tree)
        if self._noise_QP is not None:
            # Inert entries give scores of -inf whatever stands in their fields.
            where = request_N.long() * self._depth + depths_N.long()
            scores = scores + self._noise_QP[where.clamp(min=0)]
        return ids, (scores / self._heat).log_softmax(-1)


@torch.no_grad()
def build(
    part: Part, arm: Arm, depth: int, adapter: WeaverAdapter, tables: AdapterTables
) -> DraftTree:
    """The trees of an arm for all blocks of a part."""
    root = part.tokens[:, 0].contiguous()
    if arm.kind in ("chain", "ddtree"):
        best, ids = part.best
        if arm.shared:
            assert part.shared_best is not None
            best, ids = part.shared_best
        if arm.kind == "chain":
            return DraftTree.chain(root.int(), ids[..., 0].int())
        if arm.heat != 1.0:
            best = (best / arm.heat).log_softmax(-1)
        return build_ddtree(best, ids, root, arm.budget)
    own = adapter.config.candidate_pool_size
    pool = min(arm.pool or own, part.pool.shape[-1])
    budget = depth if arm.kind == "weaver_chain" else arm.budget
    children = 1 if arm.kind == "weaver_chain" else min(arm.children, pool)
    rows = budget + 1
    if arm.kind == "grown":
        width = arm.width or -(-budget // 8)
        rows = max(rows, 1 + ((arm.rounds or depth) - 1) * width)
    expand: Any = adapter.begin(
        part.h_ver,
        part.h_draft,
        part.pool[..., :pool],
        part.pool_logits[..., :pool],
        embed=None,
        lm_head=None,
        max_nodes=rows,
        tables=tables,
    )
    if arm.shared or arm.heat != 1.0:
        noise = part.noise[..., :pool] if arm.shared and part.noise is not None else None
        assert not arm.shared or noise is not None
        expand = _Rescored(expand, noise, arm.heat)
    if arm.kind == "grown":
        return build_grown_tree(
            expand, root, budget, depth, rounds=arm.rounds, width=arm.width, children=children
        )
    return build_weaver_tree(
        expand,
        root,
        budget,
        depth,
        expansion_width=arm.width,
        children=children,
        full_pools=True,
    )


@torch.no_grad()
def run(
    case: Case, arms: dict[str, Arm], depth: int, adapter: WeaverAdapter, tables: AdapterTables
) -> dict[str, Walk]:
    """(tokens, passes) of each prompt for each arm, on the CPU.

    The sample at a row of depth k is the text's token after it; only rows on the path matter, and
    a path ends at depth D at the latest, whose own sample is never compared.
    """
    walks: dict[str, list[Walk]] = {name: [] for name in arms}
    for part in case.parts:
        following = part.tokens[:, 1:]
        samples = torch.cat([following, following[:, -1:]], 1)
        for name, arm in arms.items():
            tree = build(part, arm, depth, adapter, tables)
            sampled = samples.gather(1, tree.depths.long())
            _, length = accept(tree, sampled.int(), max_depth=depth)
            walks[name].append(walk(length.view(-1, part.count).long()))
    return {name: by_prompt(case.texts, found) for name, found in walks.items()}


@torch.no_grad()
def overlaps(
    case: Case, target: Target, adapter: WeaverAdapter
) -> Iterator[tuple[str, list[float]]]:
    """By depth: the target's mass that the adapter's distribution covers, and its first guess."""
    sums: list[Tensor] = []
    blocks = 0
    for part in case.parts:
        pool = part.pool[..., : adapter.config.candidate_pool_size].long()
        width = pool.shape[-1]
        queries = adapter(part.h_ver, part.h_draft, part.tokens[:, :-1], target.embedding)
        corrected = part.pool_logits[..., :width] + target.logits(queries).gather(-1, pool)
        q = corrected.softmax(-1)
        guess = pool.gather(-1, q.argmax(-1, keepdim=True))[..., 0]
        right = guess == part.tokens[:, 1:]
        covered = torch.minimum(part.p_pool[..., :width], q).sum(-1)
        sums.append(torch.stack([covered.double().sum(0), right.double().sum(0)]))
        blocks += len(pool)
    covered_D, right_D = (torch.stack(sums).sum(0) / blocks).tolist()
    yield "overlap", [round(x, 4) for x in covered_D]
    yield "top1", [round(x, 4) for x in right_D]
