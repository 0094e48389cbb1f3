# SPDX-License-Identifier: Apache-2.0
"""Training of the Weaver adapter on a frozen target and a frozen drafter.

Teacher-forced along rows that the target mostly wrote itself. Loss: lambda * KL + (1 - lambda) *
TV over the drafter's pool, lambda falling from 1 to 1/2 (spec section 7); target mass outside the
pool counts as lost. The drafter's states are computed once for all blocks. Knows nothing of trees.

Shapes: R blocks of a step, N blocks in all, D draft depth, P pool, V vocabulary, d width.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import Tensor

from vllm_weaver.adapter import WeaverAdapter, WeaverConfig
from vllm_weaver.train.losses import length_weights, path_weights

from .config import Size, Stage
from .drafter import Drafter
from .optim import Optimiser, train
from .states import TextStates
from .target import Target, piece

# Deeper nodes are reached less often; slower than DFlash's own decay, since the adapter's trees
# reach deeper than chains do.
_DEPTH_DECAY = 10.0
_LAST_KL_SHARE = 0.5
_BLOCKS_AT_ONCE = 4096
_HALVINGS = 16
# Takes a candidate out of a softmax without the NaN that 0 * -inf would be.
_OUTSIDE = -1e4


@dataclasses.dataclass(frozen=True)
class Variant:
    """What an ablation changes of the adapter or of its training.

    `loss` is "anneal" (KL, falling to half KL and half TV) or one of `vllm_weaver.train.losses`;
    `weigh` is "decay" (the size's own weights by depth), "flat", "path" or "length".
    """

    version: Literal["v1", "v2"] = "v2"
    layers: int = 1
    rank: int | None = None
    mlp: int | None = None
    loss: str = "anneal"
    weigh: str = "decay"
    path_budget: int = 63


BASE = Variant()


def new_adapter(size: Size, device: str, variant: Variant = BASE) -> WeaverAdapter:
    config = WeaverConfig(
        d_model=size.target.width,
        d_embed=size.target.width,
        d_rank=variant.rank or size.adapter.rank,
        num_layers=variant.layers,
        num_heads=size.adapter.heads,
        mlp_dim=variant.mlp or size.adapter.mlp,
        depth=size.drafter.depth,
        candidate_pool_size=size.adapter.pool,
        variant=variant.version,
        vocab_size=size.target.vocab,
        target=f"{size.name}-target",
        drafter=f"{size.name}-drafter",
        drafter_block_size=size.drafter.block,
    )
    return WeaverAdapter(config, device=device)


def draw_anchors(start: Tensor, length: int, block: int, count: int) -> Tensor:
    """[B, count] anchor positions, evenly spread with a random offset, from `start` to the last
    position that leaves a whole block."""
    room = (length - block - start).clamp(min=1)[:, None].float()
    steps = torch.arange(count, device=start.device) + torch.rand(
        len(start), count, device=start.device
    )
    return start[:, None] + (steps * room / count).long().clamp(max=length)


def pool_floor(logits: Tensor, pool: int) -> Tensor:
    """[..., V] -> [...]: a logit that about `pool` of the V reach, and no fewer.

    By halving: a top-k over the vocabulary would cost more than all the rest of a step.
    """
    low, high = logits.amin(-1), logits.amax(-1)
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        enough = (logits >= middle[..., None]).sum(-1) >= pool
        low, high = torch.where(enough, middle, low), torch.where(enough, high, middle)
    return low


@dataclasses.dataclass
class Blocks:
    """All blocks of the training: what a step reads, each [N, ...] or, of every token, flat."""

    anchors: Tensor  # [N] places in the flat order
    h_draft: Tensor  # [N, D, d]
    floor: Tensor  # [N, D]: drafted logits of the pool are at least this
    ids: Tensor  # flat
    hidden: Tensor  # flat, [..., d], after the final norm

    def take(self, pick: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """h_ver [R, d], h_draft [R, D, d], floor [R, D], the anchors' tokens and the D after
        them [R, D + 1], and the target's states at all but the last [R, D, d]."""
        anchors, depth = self.anchors[pick], self.h_draft.shape[1]
        window = anchors[:, None] + torch.arange(-1, depth + 1, device=anchors.device)
        place = self.hidden.device
        hidden = self.hidden[window[:, :-1].to(place)].to(anchors.device)
        tokens = self.ids[window[:, 1:]].long()
        return hidden[:, 0], self.h_draft[pick], self.floor[pick], tokens, hidden[:, 1:]


@torch.no_grad()
def draft_blocks(size: Size, target: Target, drafter: Drafter, states: TextStates) -> Blocks:
    """Draft at random anchors of every row. Takes the layer outputs out of `states`."""
    block, dtype = size.drafter.block, states.last.dtype
    head = target.head.to(dtype)
    total = sum(len(g.ids) * s.blocks for g, s in zip(states.groups, size.groups, strict=True))
    device = states.device
    anchors = torch.empty(total, dtype=torch.long, device=device)
    h_draft = torch.empty(total, size.drafter.depth, size.target.width, dtype=dtype, device=device)
    floor = torch.empty(total, size.drafter.depth, device=device)
    done = 0
    for i, (group, shape) in enumerate(zip(states.groups, size.groups, strict=True)):
        rows = max(1, _BLOCKS_AT_ONCE // shape.blocks)
        for first in range(0, len(group.ids), rows):
            ids, start, auxiliary, begin = states.rows(i, first, rows)
            local = draw_anchors(start, ids.shape[1], block, shape.blocks)
            offsets = begin + torch.arange(len(ids), device=device) * ids.shape[1]
            part = slice(done, done + local.numel())
            anchors[part] = (offsets[:, None] + local).flatten()
            h_draft[part] = drafter(auxiliary, ids, local, target.embedding).flatten(0, 1)
            floor[part] = pool_floor((h_draft[part] @ head.T).float(), size.adapter.pool)
            done = part.stop
    states.auxiliary = states.auxiliary.new_empty(0)
    for part_of_last in states.last.split(_BLOCKS_AT_ONCE * block):
        part_of_last.copy_(target.final_norm(part_of_last.to(device)))
    return Blocks(anchors, h_draft, floor, states.ids, states.last)


@piece
def adapter_loss(
    adapter: WeaverAdapter,
    inputs: tuple[Tensor, Tensor, Tensor, Tensor, Tensor],
    head: Tensor,
    embedding: Tensor,
    weight_D: Tensor,
    kl_share: Tensor,
    variant: Variant,
) -> tuple[Tensor, Tensor]:
    """The loss, and the share of the target's mass that q covers at each depth [D].

    `inputs` as from `Blocks.take`; the products with `head` [V, d] are in its dtype. The pool is
    dense here: the vocabulary, with what is outside masked.
    """
    h_ver, h_draft, floor, tokens, states = inputs
    mixed = head.dtype != torch.float32
    with torch.autocast(h_ver.device.type, dtype=torch.bfloat16, enabled=mixed):
        queries = adapter(h_ver, h_draft, tokens[:, :-1], embedding)
    drafted = (h_draft @ head.T).float()
    corrected = drafted + (queries.to(head.dtype) @ head.T).float()
    outside = drafted < floor[..., None]
    log_q = corrected.masked_fill(outside, _OUTSIDE).log_softmax(-1)
    p = (states @ head.T).float().softmax(-1).masked_fill(outside, 0.0)
    overlap_RD = torch.minimum(p, log_q.exp()).sum(-1)
    following = tokens[:, 1:, None]
    text_RD = log_q.gather(-1, following)[..., 0]
    inside_RD = ~outside.gather(-1, following)[..., 0]
    kl_RD = (torch.special.xlogy(p, p) - p * log_q).sum(-1)
    weight_RD = weight_D.expand_as(overlap_RD)
    if variant.weigh == "path":
        text_or_none = text_RD.masked_fill(~inside_RD, -torch.inf)
        weight_RD = path_weights(text_or_none, variant.path_budget)
    elif variant.weigh == "length":
        weight_RD = length_weights(overlap_RD)
    elif variant.weigh == "flat":
        weight_RD = torch.ones_like(overlap_RD)
    if variant.loss == "anneal":
        loss_RD = kl_share * kl_RD + (1 - kl_share) * (1 - overlap_RD)
    elif variant.loss == "lk_mix":
        share_RD = torch.exp(-3.0 * overlap_RD.detach())
        loss_RD = share_RD * kl_RD + (1 - share_RD) * (1 - overlap_RD)
    elif variant.loss == "lk_log":
        loss_RD = -overlap_RD.clamp(min=1e-6).log()
    else:
        loss_RD = {"kl": kl_RD, "tv": 1 - overlap_RD, "ce": -text_RD * inside_RD}[variant.loss]
    return (loss_RD * weight_RD).sum() / weight_RD.sum(), overlap_RD.detach().mean(0)


def _step_of(
    size: Size, target: Target, adapter: WeaverAdapter, blocks: Blocks, variant: Variant = BASE
) -> Callable[[float], tuple[Tensor, dict[str, Tensor]]]:
    device = blocks.anchors.device
    dtype = blocks.h_draft.dtype
    weight_D = torch.exp(-torch.arange(size.drafter.depth, device=device) / _DEPTH_DECAY)
    head, embedding = target.head.detach().to(dtype), target.embedding.detach()

    def loss_of(progress: float) -> tuple[Tensor, dict[str, Tensor]]:
        pick = torch.randint(len(blocks.anchors), (size.train_adapter.rows,), device=device)
        with torch.no_grad():
            inputs = blocks.take(pick)
        # A tensor, since a compiled step takes numbers for constants.
        kl_share = torch.full((), max(_LAST_KL_SHARE, 1.0 - progress), device=device)
        loss, overlap_D = adapter_loss(
            adapter, inputs, head, embedding, weight_D, kl_share, variant
        )
        return loss, {"overlap": overlap_D}

    return loss_of


def try_step(size: Size, target: Target, device: str, dtype: torch.dtype) -> None:
    """Two steps on random blocks: compiles what training will run."""
    width, depth, count = size.target.width, size.drafter.depth, 64
    tokens = 4 * depth
    blocks = Blocks(
        torch.randint(1, tokens - depth, (count,), device=device),
        torch.randn(count, depth, width, device=device, dtype=dtype),
        torch.zeros(count, depth, device=device),
        torch.randint(2, size.target.vocab, (tokens,), device=device),
        torch.randn(tokens, width, device=device, dtype=dtype),
    )
    step = _step_of(size, target, new_adapter(size, device), blocks)
    for _ in range(2):
        loss, _ = step(0.0)
        loss.backward()
    float(loss.detach())


def train_adapter(
    size: Size,
    target: Target,
    blocks: Blocks,
    device: str,
    *,
    seconds: float | None,
    log: Callable[[str], None],
    variant: Variant = BASE,
    stage: Stage | None = None,
    name: str = "adapter",
) -> tuple[WeaverAdapter, dict[str, Any]]:
    """Train an adapter; `stage` is the size's own if not given."""
    adapter = new_adapter(size, device, variant)
    stage = stage or size.train_adapter
    optimiser = Optimiser(adapter.named_parameters(), stage, adam=("pos_emb",))
    step = _step_of(
        dataclasses.replace(size, train_adapter=stage), target, adapter, blocks, variant
    )
    record = train(name, stage, optimiser, step, seconds=seconds, log=log)
    record["parameters"] = sum(p.numel() for p in adapter.parameters())
    record["blocks"] = len(blocks.anchors)
    return adapter, record
