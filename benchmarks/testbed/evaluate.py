# SPDX-License-Identifier: Apache-2.0
"""Tokens per target pass on held-out source, and what bounds them, depth by depth.

Decodes windows of held-out files and given prompts, drafts at *every* generated position, and then
walks: from the first generated token on, each pass moves ahead by the length that acceptance gives
there. At temperature 0, and at temperature 1 with noise fixed by position, this is what an engine
does, pass by pass, since accepted tokens are the target's own. At temperature 1 trees are also
built with shared noise, which is drawn given the text. Uses the package's tree builders and
`accept`. Everything is computed in float32 from the exported (bfloat16) weights.

Shapes: B prompts, A positions per prompt, R = B * A blocks, D draft depth, P pool.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from vllm_weaver.adapter import WeaverAdapter
from vllm_weaver.ops import keyed_gumbel
from vllm_weaver.tree import (
    DraftTree,
    ExpandFn,
    Sampling,
    SharedNoise,
    accept,
    build_ddtree,
    build_weaver_tree,
    noise_given_draw,
)

from .config import Size
from .drafter import Drafter
from .target import Target

BUDGETS = (15, 31, 63)
_BLOCKS_AT_ONCE = {"cpu": 2048, "cuda": 4096}
_RESAMPLES = 2000
# Children of a node on the frontier: the method's 8, and more, which pays where the target's
# distribution is wide.
_CHILDREN, _WIDE_CHILDREN = 8, 32


@torch.no_grad()
def cross_entropy(target: Target, stream: Tensor, length: int, rows: int) -> float:
    """Nats per token of `target` on evenly spread windows of a token stream."""
    starts = torch.linspace(0, len(stream) - length - 2, rows, device=stream.device).long()
    ids = stream[starts[:, None] + torch.arange(length + 1, device=stream.device)].long()
    losses = []
    for part in ids.split(8):
        hidden, _, _ = target(part[:, :-1])
        logits = target.logits(hidden).float()
        losses.append(F.cross_entropy(logits.flatten(0, 1), part[:, 1:].flatten()))
    return float(torch.stack(losses).mean())


def prompts_of(stream: Tensor, size: Size) -> Tensor:
    """[B, context] evenly spread windows of the held-out stream."""
    last = len(stream) - size.eval_context - 1
    starts = torch.linspace(0, last, size.eval_prompts, device=stream.device).long()
    return stream[starts[:, None] + torch.arange(size.eval_context, device=stream.device)].long()


@dataclasses.dataclass
class Text:
    """What the target wrote after prompts of `context` tokens: `ids` [B, context + tokens + block],
    the last block only so that the last positions have D tokens to follow. `prompt` [B] numbers the
    prompts: texts of one prompt are resampled together."""

    ids: Tensor
    context: int
    tokens: int
    prompt: Tensor


def write(
    target: Target,
    prompts: Sequence[Tensor],
    tokens: int,
    block: int,
    temperature: int,
    generator: torch.Generator,
    samples: int,
) -> list[Text]:
    """Continue prompts, each [B, context], greedily or, `samples` times, at temperature 1."""
    texts, count = [], 0
    for prompt in prompts:
        repeats = samples if temperature else 1
        number = count + torch.arange(len(prompt), device=prompt.device).repeat_interleave(repeats)
        count += len(prompt)
        prefix = prompt.repeat_interleave(repeats, 0)
        sampled = torch.full((len(prefix),), temperature == 1, device=prompt.device)
        context = prompt.shape[1]
        ids = target.generate(prefix, context + tokens + block, sampled, generator)
        texts.append(Text(ids, context, tokens, number))
    return texts


@torch.no_grad()
def block_states(
    target: Target, drafter: Drafter, ids: Tensor, anchors: Tensor, size: Size
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(h_ver [R, d], h_draft [R, D, d], tokens [R, D + 1], target's states [R, D, d]).

    R = B * A. `tokens` are the anchor's and the D that follow; state k gives the distribution of
    token k + 1.
    """
    hidden, auxiliary, _ = target(ids, size.drafter.target_layers)
    assert auxiliary is not None
    h_draft = drafter(auxiliary, ids, anchors, target.embedding)
    window = anchors[..., None] + torch.arange(size.drafter.depth + 1, device=ids.device)
    rows = torch.arange(len(ids), device=ids.device)[:, None, None]
    states = (
        hidden[rows[..., 0], anchors - 1],
        h_draft,
        ids[rows, window],
        hidden[rows, window[..., :-1]],
    )
    return tuple(t.flatten(0, 1) for t in states)  # type: ignore[return-value]


def walk(lengths_BA: Tensor) -> tuple[Tensor, Tensor]:
    """(tokens [B], passes [B]) when each pass at position a emits lengths[a] tokens.

    The last pass is cut at the end of the text, as an engine's is.
    """
    batch, count = lengths_BA.shape
    position = torch.zeros(batch, dtype=torch.long, device=lengths_BA.device)
    passes = torch.zeros_like(position)
    for _ in range(count):
        running = position < count
        ahead = lengths_BA.gather(1, position.clamp(max=count - 1)[:, None])[:, 0]
        position = torch.where(running, position + ahead, position)
        passes += running
    return torch.full_like(passes, count), passes


def shared_noise(
    log_p_RDV: Tensor,
    pool_RDP: Tensor,
    following_RD: Tensor,
    rows_R: Tensor,
    anchors_R: Tensor,
    sampling: Sampling,
) -> SharedNoise:
    """The noise with which a text was sampled from `log_p_RDV`, given the text.

    It is keyed by row of text, position and token, so that blocks that overlap agree.
    """
    depth = following_RD.shape[1]
    positions_RD = anchors_R[:, None] + torch.arange(depth, device=anchors_R.device)
    drawn_RD1 = following_RD[..., None]
    noise_RDP = noise_given_draw(
        keyed_gumbel(rows_R, positions_RD, pool_RDP),
        log_p_RDV.gather(-1, pool_RDP),
        pool_RDP,
        keyed_gumbel(rows_R, positions_RD, drawn_RD1)[..., 0],
        log_p_RDV.gather(-1, drawn_RD1)[..., 0],
        following_RD,
    )
    return SharedNoise(noise_RDP, sampling)


def sampling_at(
    count: int,
    device: torch.device,
    vocab: int,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
) -> Sampling:
    """The same sampling for `count` blocks."""
    ones = torch.ones(count, device=device)
    return Sampling(
        ones * temperature,
        ones.long() * (top_k or vocab),
        ones * top_p,
        ones * min_p,
        filtered=bool(top_k) or top_p < 1 or min_p > 0,
    )


Walk = tuple[Tensor, Tensor]


def _by_prompt(texts: Sequence[Text], walks: Sequence[Walk]) -> Walk:
    """(tokens, passes) summed over the texts of each prompt, on the CPU."""
    prompt = torch.cat([text.prompt for text in texts]).cpu()
    tokens, passes = (torch.cat([w[i] for w in walks]).cpu().double() for i in (0, 1))
    zeros = torch.zeros(int(prompt.max()) + 1, dtype=torch.float64)
    return zeros.index_add(0, prompt, tokens), zeros.index_add(0, prompt, passes)


def _interval(above: Tensor, below: Tensor) -> dict[str, float]:
    """sum(above) / sum(below) with a 95 % interval, prompts resampled."""
    generator = torch.Generator().manual_seed(0)
    pick = torch.randint(len(above), (_RESAMPLES, len(above)), generator=generator)
    samples = above[pick].sum(1) / below[pick].sum(1)
    low, high = samples.quantile(torch.tensor([0.025, 0.975]).double()).tolist()
    value = float(above.sum() / below.sum())
    return {"value": round(value, 4), "low": round(low, 4), "high": round(high, 4)}


def ratio(a: Walk, b: Walk) -> dict[str, float]:
    """Tokens per pass of `a` over those of `b`, with a 95 % interval resampled over prompts."""
    found = _interval(b[1], a[1])
    return {"ratio": found.pop("value"), **found}


@torch.no_grad()
def evaluate(
    size: Size,
    target: Target,
    models: dict[str, tuple[Drafter, WeaverAdapter]],
    prompts: Sequence[Tensor],
    tokens: int,
    *,
    samples: int = 1,
    seed: int = 0,
    log: Callable[[str], None] = print,
) -> dict[str, dict[str, Any]]:
    """For each of `models`, on the same texts: `{"prompts": ..., "T0": {...}, "T1": {...}}`.

    The texts continue each of `prompts`, [B, length], by `tokens`; at temperature 1, `samples`
    times.
    """
    facts = {"prompts": sum(len(p) for p in prompts), "tokens": tokens, "samples": samples}
    results: dict[str, dict[str, Any]] = {name: {**facts} for name in models}
    for temperature in (0, 1):
        generator = torch.Generator(prompts[0].device).manual_seed(seed)
        texts = write(target, prompts, tokens, size.drafter.block, temperature, generator, samples)
        for name, (drafter, adapter) in models.items():
            figures = _figures(size, target, drafter, adapter, texts, bool(temperature))
            results[name][f"T{temperature}"] = figures
            means = {k: v["tokens_per_pass"] for k, v in figures["arms"].items()}
            log(f"evaluate {name} T={temperature}: {means}")
            log(f"evaluate {name} T={temperature}: {figures['ratios']}")
    return results


def _figures(
    size: Size,
    target: Target,
    drafter: Drafter,
    adapter: WeaverAdapter,
    texts: Sequence[Text],
    sampled: bool,
) -> dict[str, Any]:
    depth = size.drafter.depth
    lengths: dict[str, list[Tensor]] = {}
    walks: dict[str, list[Walk]] = {}
    per_depth: dict[str, list[Tensor]] = {}
    tables = adapter.precompute(target.embedding, target.head)
    parts = []
    for text in texts:
        at_once = max(1, _BLOCKS_AT_ONCE[text.ids.device.type] // text.tokens)
        parts += [(ids, text) for ids in text.ids.split(at_once)]
    for number, (ids, text) in enumerate(parts):
        count = text.tokens - 1
        anchors = text.context + torch.arange(count, device=ids.device)
        anchors = anchors.expand(len(ids), count)
        h_ver, h_draft, tokens, states = block_states(target, drafter, ids, anchors, size)
        following = tokens[:, 1:]  # the D tokens after the anchor
        root = tokens[:, 0].contiguous()
        # The sample at a row of depth k is the token after it; only rows on the path matter, and
        # a path ends at depth D at the latest, whose own sample is never compared.
        samples = torch.cat([following, following[:, -1:]], 1)
        logits_RDV = target.logits(h_draft).float()
        marginal_RDV = logits_RDV.log_softmax(-1)
        pool_logits, pool = logits_RDV.topk(size.adapter.pool)
        p_RDV = target.logits(states).float().softmax(-1)

        def score(
            name: str, tree: DraftTree, samples: Tensor = samples, count: int = count
        ) -> None:
            sampled = samples.gather(1, tree.depths.long())
            _, length = accept(tree, sampled.int(), max_depth=depth)
            lengths.setdefault(name, []).append(length.view(-1, count).long())
            walks.setdefault(name, []).append(walk(lengths[name][-1]))

        def depthwise(name: str, value_RD: Tensor) -> None:
            per_depth.setdefault(name, []).append(value_RD.float())

        def overlap(p: Tensor, q: Tensor) -> Tensor:
            return torch.minimum(p, q).sum(-1)

        depthwise("recall_in_pool", (pool == following[..., None]).any(-1))
        depthwise("mass_outside_pool", 1 - p_RDV.gather(-1, pool).sum(-1))
        depthwise("marginal_overlap", overlap(p_RDV, marginal_RDV.exp()))
        depthwise("marginal_top1", pool[..., 0] == following)
        depthwise("target_entropy", torch.special.entr(p_RDV).sum(-1))
        p_pool = p_RDV.gather(-1, pool)
        noise = None
        if sampled:
            rows = (number << 20) + torch.arange(len(ids), device=ids.device)
            sampling = sampling_at(len(root), ids.device, size.target.vocab)
            keys = rows.repeat_interleave(count), anchors.flatten()
            noise = shared_noise(p_RDV.log(), pool, following, *keys, sampling)
            drawn, drawn_ids = noise.marginals(marginal_RDV.gather(-1, pool), pool)
        del p_RDV, logits_RDV
        best, best_ids = marginal_RDV.topk(64)
        del marginal_RDV
        score("chain", DraftTree.chain(root.int(), pool[..., 0].int()))
        for budget in BUDGETS:
            score(f"ddtree{budget}", build_ddtree(best, best_ids, root, budget))
        if noise is not None:
            score("chain_shared", DraftTree.chain(root.int(), drawn_ids[..., 0].int()))
            drawn, drawn_ids = drawn[..., :64], drawn_ids[..., :64]
            for budget in BUDGETS:
                score(f"ddtree{budget}_shared", build_ddtree(drawn, drawn_ids, root, budget))
        corrected = pool_logits + target.logits(
            adapter(h_ver, h_draft, tokens[:, :-1], target.embedding)
        ).gather(-1, pool)
        log_q = corrected.log_softmax(-1)
        depthwise("weaver_overlap", overlap(p_pool, log_q.exp()))
        chosen = pool.gather(-1, log_q.argmax(-1, keepdim=True))[..., 0]
        depthwise("weaver_top1", chosen == following)

        def grow(
            budget: int,
            children: int,
            inputs: tuple[Tensor, Tensor, Tensor, Tensor] = (h_ver, h_draft, pool, pool_logits),
            root: Tensor = root,
            noise: SharedNoise | None = None,
        ) -> DraftTree:
            expand: ExpandFn = adapter.begin(
                *inputs, embed=None, lm_head=None, max_nodes=budget + 1, tables=tables
            )
            if noise is not None:
                expand = noise.expanding(expand)
            return build_weaver_tree(
                expand, root, budget, depth, children=children, full_pools=True
            )

        # One child per node is a chain: what the adapter alone gives without branches.
        score("weaver_chain", grow(depth, 1))
        for budget in BUDGETS:
            score(f"weaver{budget}", grow(budget, _CHILDREN))
            if noise is not None:
                score(f"weaver{budget}_shared", grow(budget, _CHILDREN, noise=noise))
        score(f"weaver{BUDGETS[-1]}_wide", grow(BUDGETS[-1], _WIDE_CHILDREN))

    arms: dict[str, Any] = {}
    sums = {name: _by_prompt(texts, walked) for name, walked in walks.items()}
    for name, found in lengths.items():
        every = torch.cat([length.flatten() for length in found])
        first = torch.cat([length[:, 0] for length in found])
        reach = [(every > k).float().mean() for k in range(1, depth + 1)]
        per_pass = _interval(*sums[name])
        arms[name] = {
            "tokens_per_pass": per_pass["value"],
            "interval": [per_pass["low"], per_pass["high"]],
            "mean_length_all_positions": round(float(every.float().mean()), 4),
            "mean_length_first_pass": round(float(first.float().mean()), 4),
            "reached_depth": [round(float(r), 4) for r in reach],
        }
    ratios = {}
    for budget in BUDGETS:
        names = [f"weaver{budget}"] + [f"weaver{budget}_wide"] * (budget == BUDGETS[-1])
        for name in names:
            ratios[f"{name}/ddtree{budget}"] = ratio(sums[name], sums[f"ddtree{budget}"])
            ratios[f"{name}/chain"] = ratio(sums[name], sums["chain"])
    for name in sums:
        if name.endswith("_shared"):
            plain = name.removesuffix("_shared")
            ratios[f"{name}/{plain}"] = ratio(sums[name], sums[plain])
    return {
        "arms": arms,
        "ratios": ratios,
        "per_depth": {
            name: [round(v, 4) for v in torch.cat(values).mean(0).tolist()]
            for name, values in per_depth.items()
        },
    }
