# SPDX-License-Identifier: Apache-2.0
"""How long accepted paths get, and what bounds them, depth by depth, on held-out rows.

`evaluate` drafts at every position of a row's text and walks as an engine does: each pass moves
ahead by the length that acceptance gives there, the text standing for what the target samples. On
the target's own text that is exact, pass by pass. `diagnose` says what an adapter could win before
one is trained. Both are teacher-forced and need nothing but the files. Uses the package's own tree
builders and acceptance. Knows nothing of training.

Shapes: R blocks (one per position), D draft depth, P pool, V vocabulary, N continuations.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from vllm_weaver.adapter import WeaverAdapter
from vllm_weaver.ops import keyed_gumbel
from vllm_weaver.train.blocks import Blocks, at_once, make_blocks
from vllm_weaver.train.card import versions
from vllm_weaver.train.data import Document, HiddenStateData, Skipped
from vllm_weaver.train.drafter import FrozenDrafter
from vllm_weaver.train.errors import DataError, TrainError
from vllm_weaver.train.target import FrozenTarget
from vllm_weaver.tree import (
    MAX_BUDGET,
    DraftTree,
    ExpandFn,
    Sampling,
    SharedNoise,
    accept,
    build_ddtree,
    build_weaver_tree,
    noise_given_draw,
)

BUDGETS = (15, 31, 63, 127)
POOLS = (64, 128, 256, 512, 1024)
_DDTREE_POOL = 64
_NOISED_POOL = 256
_SHARED = " shared"
_RESAMPLES = 2000


@dataclass
class Measuring:
    """What is measured, and on what.

    Attributes:
        target, drafter, data: loaded and checked against each other.
        adapter: None measures the drafter alone.
        rows: rows to measure on.
        positions: positions per row at most, from its first answer on.
        children: an expanded node's candidates.
        temperature: at which the target sampled the text; 0 measures without shared noise.
        say: called with a line of progress.
    """

    target: FrozenTarget
    drafter: FrozenDrafter
    data: HiddenStateData
    adapter: WeaverAdapter | None
    rows: Sequence[int]
    positions: int = 128
    children: int = 8
    temperature: float = 0.0
    say: Callable[[str], None] = lambda line: None
    skipped: list[str] = field(default_factory=list)

    @property
    def depth(self) -> int:
        """D: the adapter's, or all of the drafter's."""
        depth = self.drafter.facts.depth
        return depth if self.adapter is None else self.adapter.config.depth

    @property
    def pool(self) -> int:
        """P: the adapter's, or the method's."""
        size = 512 if self.adapter is None else self.adapter.config.candidate_pool_size
        return min(size, self.target.vocab)

    def documents(self) -> Iterator[tuple[int, Document]]:
        """Readable rows with their numbers."""
        for number, row in enumerate(self.rows, start=1):
            document = self.data[row]
            if isinstance(document, Skipped):
                self.skipped.append(document.reason)
                continue
            yield number, document

    def parts(self, document: Document, anchors_A: Tensor) -> Iterator[tuple[Blocks, _Views]]:
        """Blocks of a row in parts whose logits fit, and the models' views of each."""
        blocks = make_blocks(self.target, self.drafter, [(document, anchors_A)], self.depth)
        if blocks is None:
            return
        for chosen in at_once(len(blocks), self.depth, self.target.vocab):
            part = blocks.part(chosen)
            yield part, self._views(part)

    def _views(self, blocks: Blocks) -> _Views:
        head_Vd = self.target.head_Vd
        logits_RDV = (blocks.h_draft_RDd.to(head_Vd.dtype) @ head_Vd.T).float()
        log_q_RDP = None
        pool_logits_RDP, pool_RDP = logits_RDV.topk(self.pool)
        if self.adapter is not None:
            queries_RDd = self.adapter(
                blocks.h_ver_Rd,
                blocks.h_draft_RDd,
                blocks.tokens_RN[:, :-1],
                self.target.embedding_Vd,
            )
            products_RDV = queries_RDd.to(head_Vd.dtype) @ head_Vd.T
            corrected_RDP = pool_logits_RDP + products_RDV.gather(-1, pool_RDP).float()
            log_q_RDP = corrected_RDP.log_softmax(-1)
        return _Views(
            marginal_RDV=logits_RDV.log_softmax(-1),
            p_RDV=(blocks.states_RDd.to(head_Vd.dtype) @ head_Vd.T).float().softmax(-1),
            pool_RDP=pool_RDP,
            pool_logits_RDP=pool_logits_RDP,
            log_q_RDP=log_q_RDP,
        )


@dataclass
class _Views:
    marginal_RDV: Tensor
    p_RDV: Tensor
    pool_RDP: Tensor
    pool_logits_RDP: Tensor
    log_q_RDP: Tensor | None


def text_anchors(trained_L: Tensor, depth: int, positions: int) -> Tensor:
    """Neighbouring anchors from the first token of the first answer on, [A]."""
    valid = trained_L.clone()
    valid[:1] = False
    valid[max(0, len(valid) - depth) :] = False
    places = valid.nonzero()[:, 0]
    if len(places) == 0:
        return places
    # One walk needs one stretch: it ends where the text is not the target's any more.
    together = (places - places[0]) == torch.arange(len(places))
    return places[together][:positions]


def walk(lengths_A: Sequence[int]) -> int:
    """Passes that cover A positions when one at position a emits `lengths[a]` tokens."""
    position = passes = 0
    while position < len(lengths_A):
        position += lengths_A[position]
        passes += 1
    return passes


@torch.no_grad()
def evaluate(measuring: Measuring, budgets: Sequence[int] = BUDGETS) -> dict[str, Any]:
    """Tokens per target pass of chain, DDTree and Weaver at each budget, and figures per depth.

    With a temperature, arms that end in "shared" are built with the sampler's noise. Returns plain
    data: `arms` (tokens per pass with a 95 % interval over rows, share of passes
    that reach each depth), `ratios` to chain and DDTree, `per_depth`, and what was measured.

    Raises:
        TrainError: a budget out of range, an adapter for another target, or no usable rows.
    """
    for budget in budgets:
        if not 1 <= budget <= MAX_BUDGET:
            raise TrainError(f"budget {budget}: choose from 1 to {MAX_BUDGET}")
    if not 0 <= measuring.temperature <= 10:
        raise TrainError(f"temperature {measuring.temperature}: choose from 0 to 10")
    started = time.perf_counter()
    adapter, target, depth = measuring.adapter, measuring.target, measuring.depth
    tables = None
    if adapter is not None:
        tables = adapter.precompute(target.embedding_Vd, target.head_Vd)
    counts: dict[str, list[tuple[int, int]]] = {}
    reached: dict[str, Tensor] = {}
    depths = _Depths()
    for number, document in measuring.documents():
        anchors_A = text_anchors(document.trained_L, depth, measuring.positions)
        lengths: dict[str, list[int]] = {}
        measured = 0
        for blocks, views in measuring.parts(document, anchors_A):
            depths.add(blocks, views)
            places_R = anchors_A[measured : measured + len(blocks)]
            measured += len(blocks)
            noise = _noise(measuring, document, places_R, blocks, views)
            for name, tree in _trees(measuring, blocks, views, tables, budgets, noise):
                lengths.setdefault(name, []).extend(_lengths(tree, blocks, depth))
        for name, values in lengths.items():
            counts.setdefault(name, []).append((len(values), walk(values)))
            steps_D = torch.arange(1, depth + 1)
            beyond_D = (torch.tensor(values)[:, None] > steps_D).double().sum(0)
            reached[name] = reached[name] + beyond_D if name in reached else beyond_D
        measuring.say(f"{number} of {len(measuring.rows)} rows")
    if not counts:
        raise _nothing(measuring)
    arms = {}
    for name, pairs in counts.items():
        value, low, high = _per_pass(pairs)
        positions = sum(tokens for tokens, _ in pairs)
        arms[name] = {
            "tokens_per_pass": value,
            "interval": [low, high],
            "reaches_depth": [round(float(x), 4) for x in reached[name] / positions],
        }
    return {
        "kind": "evaluation",
        **_about(measuring, depths, started),
        "budgets": list(budgets),
        "children": measuring.children,
        "temperature": measuring.temperature,
        "arms": arms,
        "ratios": _ratios(counts),
        "per_depth": depths.figures(),
    }


@torch.no_grad()
def diagnose(measuring: Measuring) -> dict[str, Any]:
    """What bounds acceptance at each depth, with and without an adapter.

    Per depth: `drafter` is the overlap of the drafter's marginal with the target's conditional, 1 -
    E[TV]: what any adapter starts from. `pool_N` is the conditional's mass on the drafter's N best
    tokens: no adapter over that pool exceeds it. `marginal_ceiling` bounds every drafter that knows
    the text so far and nothing of its own drafts (the paper's analysis), from rows that continue
    one prompt (`vllm-weaver extract --continuations`): `from` is where leave-one-out estimates put
    the true marginal, `to` the best single distribution for the continuations at hand, which no
    marginal exceeds on them. `expected_length` turns each into a chain's tokens per pass.

    Raises:
        TrainError: no usable rows.
    """
    started = time.perf_counter()
    depth, depths = measuring.depth, _Depths(pools=POOLS)
    groups: dict[tuple[int, ...], list[tuple[Document, int]]] = {}
    for number, document in measuring.documents():
        anchors_A = text_anchors(document.trained_L, depth, measuring.positions)
        for blocks, views in measuring.parts(document, anchors_A):
            depths.add(blocks, views)
        answers = document.trained_L.nonzero()[:, 0]
        if len(answers) and int(answers[0]) >= 2:
            start = int(answers[0])
            # Of a member only what the group needs is kept: the states along its first D tokens.
            if start - 1 + depth < len(document.tokens_L):
                key = tuple(document.tokens_L[:start].tolist())
                groups.setdefault(key, []).append((_beginning(document, start + depth), start))
        measuring.say(f"{number} of {len(measuring.rows)} rows")
    if not depths.sums:
        raise _nothing(measuring)
    result = {
        "kind": "diagnosis",
        **_about(measuring, depths, started),
        "per_depth": depths.figures(),
        "expected_length": depths.expected_lengths(),
    }
    ceiling = _ceiling(measuring, [g for g in groups.values() if len(g) > 1])
    if ceiling is not None:
        result["marginal_ceiling"] = ceiling
    return result


def best_marginal(p_NV: Tensor) -> float:
    """max over q of the mean over N of sum_v min(q_v, p_v): no single q does better on all N.

    Raising q_v pays 1/N for each p that is still above it, so the best q fills the levels between
    the sorted p's of each token, those below most p's first, until its mass of 1 is spent.
    """
    count = p_NV.shape[0]
    levels_NV = p_NV.double().sort(dim=0, descending=True).values
    # Row j: mass between the (j + 1)-st and the next highest p, where j + 1 of them gain.
    room_N = (levels_NV - torch.cat([levels_NV[1:], torch.zeros_like(levels_NV[:1])])).sum(1)
    left, value = 1.0, 0.0
    for gaining in range(count, 0, -1):
        spent = min(left, float(room_N[gaining - 1]))
        value += gaining * spent
        left -= spent
    return value / count


def left_out_overlap(p_NV: Tensor) -> float:
    """Mean overlap of each p with the mean of the others."""
    count = p_NV.shape[0]
    others_NV = (p_NV.sum(0, keepdim=True) - p_NV) / (count - 1)
    return float(torch.minimum(p_NV, others_NV).sum(-1).mean())


def _noise(
    measuring: Measuring, document: Document, places_R: Tensor, blocks: Blocks, views: _Views
) -> SharedNoise | None:
    """The noise with which the target drew the text, for every candidate of the pools.

    It is keyed by row, place in the text and token, so that blocks that overlap agree.
    """
    if measuring.temperature == 0:
        return None
    following_RD1 = blocks.tokens_RN[:, 1:, None]
    device = following_RD1.device
    # No text is impossible: one that the target did not write would have infinite noise.
    log_p_RDV = views.p_RDV.clamp(min=1e-30).log() / measuring.temperature
    log_p_RDV = log_p_RDV - log_p_RDV.logsumexp(-1, keepdim=True)
    seeds_R = torch.full((len(blocks),), document.index, device=device)
    positions_RD = places_R.to(device)[:, None] + torch.arange(measuring.depth, device=device)
    noise_RDP = noise_given_draw(
        keyed_gumbel(seeds_R, positions_RD, views.pool_RDP),
        log_p_RDV.gather(-1, views.pool_RDP),
        views.pool_RDP,
        keyed_gumbel(seeds_R, positions_RD, following_RD1)[..., 0],
        log_p_RDV.gather(-1, following_RD1)[..., 0],
        following_RD1[..., 0],
    )
    ones_R = torch.ones(len(blocks), device=device)
    sampling = Sampling(
        temperature_R=ones_R * measuring.temperature,
        top_k_R=ones_R.long() * measuring.target.vocab,
        top_p_R=ones_R,
        min_p_R=ones_R * 0,
        filtered=False,
    )
    return SharedNoise(noise_RDP, sampling)


def _trees(
    measuring: Measuring,
    blocks: Blocks,
    views: _Views,
    tables: Any,
    budgets: Sequence[int],
    noise: SharedNoise | None,
) -> Iterator[tuple[str, DraftTree]]:
    root_R = blocks.tokens_RN[:, 0].contiguous()
    ranks = min(_DDTREE_POOL, measuring.target.vocab)
    marginals = [("", *views.marginal_RDV.topk(ranks))]
    if noise is not None:
        pool = slice(_NOISED_POOL)
        few = SharedNoise(noise.noise_RDP[..., pool], noise.sampling)
        ids_RDP = views.pool_RDP[..., pool]
        drawn_RDP, ids_RDP = few.marginals(views.marginal_RDV.gather(-1, ids_RDP), ids_RDP)
        marginals.append((_SHARED, drawn_RDP[..., :ranks], ids_RDP[..., :ranks]))
    for ending, log_probs_RDP, ids_RDP in marginals:
        yield f"chain{ending}", DraftTree.chain(root_R.int(), ids_RDP[..., 0].int())
        for budget in budgets:
            tree = build_ddtree(log_probs_RDP, ids_RDP, root_R, budget)
            yield f"ddtree B={budget}{ending}", tree
    adapter = measuring.adapter
    if adapter is None:
        return

    def grow(budget: int, children: int, noise: SharedNoise | None = None) -> DraftTree:
        scorer = adapter.begin(
            blocks.h_ver_Rd,
            blocks.h_draft_RDd,
            views.pool_RDP,
            views.pool_logits_RDP,
            embed=None,
            lm_head=None,
            max_nodes=budget + 1,
            tables=tables,
        )
        full = views.pool_RDP.shape[-1] >= children
        expand: ExpandFn = scorer if noise is None else noise.expanding(scorer)
        return build_weaver_tree(
            expand, root_R, budget, measuring.depth, children=children, full_pools=full
        )

    # With one child per node the adapter gives a chain: what it is worth without branches.
    yield "weaver chain", grow(measuring.depth, 1)
    for budget in budgets:
        yield f"weaver B={budget}", grow(budget, measuring.children)
        if noise is not None:
            yield f"weaver B={budget}{_SHARED}", grow(budget, measuring.children, noise)


def _lengths(tree: DraftTree, blocks: Blocks, depth: int) -> list[int]:
    """Tokens that each tree's pass emits when the target samples the text."""
    following_RD = blocks.tokens_RN[:, 1:]
    # A row of depth k samples token k + 1. Only rows on the path count, and that of a node at depth
    # D is never compared.
    samples_RN = torch.cat([following_RD, following_RD[:, -1:]], dim=1)
    sampled_RT = samples_RN.gather(1, tree.depths.long())
    _, lengths_R = accept(tree, sampled_RT.int(), max_depth=depth)
    lengths: list[int] = lengths_R.tolist()
    return lengths


class _Depths:
    """Sums per depth over all blocks."""

    def __init__(self, pools: Sequence[int] = ()) -> None:
        self._pools = pools
        self.sums: dict[str, Tensor] = {}
        self._lengths: dict[str, float] = {}
        self.blocks = 0
        self.best = 0.0

    def add(self, blocks: Blocks, views: _Views) -> None:
        following_RD = blocks.tokens_RN[:, 1:]
        p_RDV, q_RDV = views.p_RDV, views.marginal_RDV.exp()
        p_pool_RDP = p_RDV.gather(-1, views.pool_RDP)
        overlaps = {
            "drafter": torch.minimum(p_RDV, q_RDV).sum(-1),
            "pool": p_pool_RDP.sum(-1),
        }
        values = {
            "text_in_pool": (views.pool_RDP == following_RD[..., None]).any(-1),
            "drafter_first_guess": views.pool_RDP[..., 0] == following_RD,
            "target_entropy": torch.special.entr(p_RDV).sum(-1),
        }
        most = max(self._pools, default=0)
        if most:
            ids = views.marginal_RDV.topk(min(most, p_RDV.shape[-1])).indices
            masses = p_RDV.gather(-1, ids)
            for size in self._pools:
                if size <= masses.shape[-1]:
                    overlaps[f"pool_{size}"] = masses[..., :size].sum(-1)
        if views.log_q_RDP is not None:
            overlaps["adapter"] = torch.minimum(p_pool_RDP, views.log_q_RDP.exp()).sum(-1)
            guess = views.pool_RDP.gather(-1, views.log_q_RDP.argmax(-1, keepdim=True))[..., 0]
            values["adapter_first_guess"] = guess == following_RD
        for name, value_RD in {**overlaps, **values}.items():
            total = value_RD.double().sum(0).cpu()
            self.sums[name] = self.sums[name] + total if name in self.sums else total
        for name, value_RD in overlaps.items():
            length = float(value_RD.double().cumprod(-1).sum())
            self._lengths[name] = self._lengths.get(name, 0.0) + length
        self.best += float((p_RDV[:, 0].argmax(-1) == following_RD[:, 0]).sum())
        self.blocks += len(blocks)

    def figures(self) -> dict[str, list[float]]:
        return {
            name: [round(x, 4) for x in (total / self.blocks).tolist()]
            for name, total in self.sums.items()
        }

    def expected_lengths(self) -> dict[str, float]:
        return {name: round(1 + v / self.blocks, 4) for name, v in self._lengths.items()}


def _beginning(document: Document, length: int) -> Document:
    return Document(
        index=document.index,
        tokens_L=document.tokens_L[:length],
        trained_L=document.trained_L[:length],
        states_Lkd=document.states_Lkd[:length, -1:].clone(),
    )


def _ceiling(
    measuring: Measuring, groups: Sequence[Sequence[tuple[Document, int]]]
) -> dict[str, Any] | None:
    if not groups:
        return None
    target, depth = measuring.target, measuring.depth
    head_Vd = target.head_Vd
    low, high = [0.0] * depth, [0.0] * depth
    for group in groups:
        for k in range(depth):
            # Depth k + 1's conditional is given by the state k tokens after the prompt's last.
            rows_Nd = torch.stack([d.last_Ld[start - 1 + k] for d, start in group])
            rows_Nd = target.final_norm(rows_Nd.to(head_Vd.device, head_Vd.dtype))
            p_NV = (rows_Nd @ head_Vd.T).float().softmax(-1)
            low[k] += left_out_overlap(p_NV) / len(groups)
            high[k] += best_marginal(p_NV) / len(groups)
    return {
        "prompts": len(groups),
        "continuations": round(sum(map(len, groups)) / len(groups), 2),
        "from": [round(x, 4) for x in low],
        "to": [round(x, 4) for x in high],
    }


def _per_pass(pairs: Sequence[tuple[int, int]]) -> tuple[float, float, float]:
    """Tokens per pass over all rows, and a 95 % interval from resampled rows."""
    counts = torch.tensor(pairs, dtype=torch.float64)
    generator = torch.Generator().manual_seed(0)
    pick = torch.randint(len(counts), (_RESAMPLES, len(counts)), generator=generator)
    sums = counts[pick].sum(1)
    low, high = (sums[:, 0] / sums[:, 1]).quantile(torch.tensor([0.025, 0.975]).double()).tolist()
    tokens, passes = counts.sum(0).tolist()
    return round(tokens / passes, 4), round(low, 4), round(high, 4)


def _ratios(counts: dict[str, list[tuple[int, int]]]) -> dict[str, dict[str, float]]:
    """Weaver's tokens per pass over the chain's and DDTree's, and what shared noise adds.

    With paired intervals.
    """
    ratios = {}
    for name, mine in counts.items():
        others: list[str] = []
        if name.startswith("weaver B="):
            chain = "chain" + _SHARED * name.endswith(_SHARED)
            others += [chain, name.replace("weaver", "ddtree")]
        if name.endswith(_SHARED):
            others.append(name.removesuffix(_SHARED))
        for other in others:
            pairs = [(b, a) for (_, a), (_, b) in zip(mine, counts[other], strict=True)]
            value, low, high = _per_pass(pairs)
            ratios[f"{name} / {other}"] = {"ratio": value, "low": low, "high": high}
    return ratios


def _about(measuring: Measuring, depths: _Depths, started: float) -> dict[str, Any]:
    config = None if measuring.adapter is None else measuring.adapter.config
    return {
        "target": measuring.target.name,
        "drafter": measuring.drafter.facts.name,
        "data": str(measuring.data.path),
        "depth": measuring.depth,
        "pool": measuring.pool,
        "adapter_variant": None if config is None else config.variant,
        "documents": len(measuring.rows) - len(measuring.skipped),
        "skipped": measuring.skipped,
        "positions": depths.blocks,
        "text_is_best": round(depths.best / depths.blocks, 4),
        "seconds": round(time.perf_counter() - started, 1),
        "versions": versions(),
    }


def _nothing(measuring: Measuring) -> DataError:
    return DataError(
        f"{measuring.data.path}: none of the {len(measuring.rows)} rows has an answer of "
        f"{measuring.depth + 1} tokens or more that can be read: measure on more or longer rows"
    )
