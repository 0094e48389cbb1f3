# SPDX-License-Identifier: Apache-2.0
"""Training of the Weaver adapter on a frozen target and a frozen drafter.

Teacher-forced along rows that the target mostly wrote itself. Loss: lambda * KL + (1 - lambda) *
TV over the drafter's pool, lambda falling from 1 to 1/2 (spec section 7); target mass outside the
pool counts as lost. The drafter's states of a store of blocks are computed before the training, and
those of fresh blocks in their places while it runs (`Draft`). Knows nothing of trees.

Shapes: R blocks of a step, N blocks in all, D draft depth, P pool, V vocabulary, d width.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Container, Iterator, Sequence
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from vllm_weaver.adapter import WeaverAdapter, WeaverConfig
from vllm_weaver.train.losses import length_weights, path_weights

from .config import Regular, Size, Stage
from .drafter import Drafter
from .optim import Optimiser, train
from .states import Rows, TextStates, compiled, part_rows
from .target import RUNTIME, Target, piece

# Deeper nodes are reached less often; slower than DFlash's own decay, since the adapter's trees
# reach deeper than chains do.
_DEPTH_DECAY = 10.0
_LAST_KL_SHARE = 0.5
_BLOCKS_AT_ONCE = 4096
_HALVINGS = 16
# Of a held-out row, so that blocks of it are no nearer to each other than in the training.
_HELD_OUT_BLOCKS = 32
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


@piece
def pool_floor(logits: Tensor, pool: int) -> Tensor:
    """[..., V] -> [...]: a logit that about `pool` of the V reach, and no fewer.

    By halving: a top-k over the vocabulary would cost more than all the rest of a step. Logits of
    16 bits are compared as they are: a float32 copy would be read 16 times at twice the bytes.
    """
    low, high = logits.amin(-1).float(), logits.amax(-1).float()
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


@contextlib.contextmanager
def _plain_target(dtype: torch.dtype) -> Iterator[None]:
    """Within this context the target runs in `dtype`."""
    before, RUNTIME.dtype = RUNTIME.dtype, dtype
    try:
        yield
    finally:
        RUNTIME.dtype = before


def _at_once(rows: int, count: int) -> int:
    """Of `rows` rows with `count` blocks each, how many are drafted at once."""
    return part_rows(rows, _BLOCKS_AT_ONCE // count)


def _states_of_blocks(
    drafter: Drafter,
    auxiliary: Tensor,
    ids: Tensor,
    anchors: Tensor,
    embedding: Tensor,
    head: Tensor,
    pool: int,
) -> tuple[Tensor, Tensor]:
    """h_draft [R, D, d] of the blocks at `anchors` [B, A], and the floor of their pools [R, D]."""
    h_draft = drafter(auxiliary, ids, anchors, embedding).flatten(0, 1).to(head.dtype)
    return h_draft, pool_floor(h_draft @ head.T, pool)


@torch.no_grad()
def try_draft(
    size: Size, target: Target, drafter: Drafter, group: int, device: str, dtype: torch.dtype
) -> None:
    """Draft a part of a group's rows, random ones: compiles what drafting them will run."""
    shape = size.groups[group]
    rows = _at_once(shape.rows + shape.text_rows, shape.blocks)
    read = len(size.drafter.target_layers) * size.target.width
    start = torch.full((rows,), size.drafter.block, device=device)
    _states_of_blocks(
        drafter,
        torch.randn(rows, shape.length, read, device=device, dtype=dtype),
        torch.randint(2, size.target.vocab, (rows, shape.length), device=device),
        draw_anchors(start, shape.length, size.drafter.block, shape.blocks),
        target.embedding.detach(),
        target.head.detach().to(dtype),
        size.adapter.pool,
    )


class Draft:
    """The blocks of all rows of `states`, drafted at random anchors: `blocks[g]` of each row of
    group g. They can be drafted anew in their places at other anchors, a part of the rows at once,
    and of other rows: `further` has rows of each group's length, which take turns with those there.
    Drafting of the groups `compiled` runs compiled.

    Attributes:
        blocks: what a training draws from.
        drafted: how many blocks were drafted in all.
    """

    def __init__(
        self,
        size: Size,
        target: Target,
        drafter: Drafter,
        states: TextStates,
        blocks: Sequence[int] | None = None,
        further: Sequence[Rows] = (),
        compiled: Container[int] = (),
    ) -> None:
        self._size, self._drafter, self._states = size, drafter, states
        self._target, self._compiled = target, compiled
        self.take_turns_with(further)
        self._counts = list(blocks or (group.blocks for group in size.groups))
        self._embedding = target.embedding.detach()
        self._head = target.head.detach().to(states.last.dtype)
        # (group, first row, rows, first block) of each part.
        self._parts: list[tuple[int, int, int, int]] = []
        total = 0
        for i, (group, count) in enumerate(zip(states.groups, self._counts, strict=True)):
            most = _at_once(len(group.ids), count)
            for first in range(0, len(group.ids), most):
                rows = min(most, len(group.ids) - first)
                self._parts.append((i, first, rows, total))
                total += rows * count
        self._waiting: list[int] = []
        self._owed, self._finished = 0.0, False
        self.drafted = 0
        depth, width, device = size.drafter.depth, size.target.width, states.device
        h_draft = torch.empty(total, depth, width, dtype=states.last.dtype, device=device)
        self.blocks = Blocks(
            torch.empty(total, dtype=torch.long, device=device),
            h_draft,
            torch.empty(total, depth, device=device),
            states.ids,
            states.last,
        )
        for part in range(len(self._parts)):
            self._draft(part)
        self._normalise(slice(None))

    def take_turns_with(self, further: Sequence[Rows]) -> None:
        """From now on `renew` exchanges rows with these, of each group's length."""
        self._further, self._next = list(further), [0] * len(further)

    @torch.no_grad()
    def _normalise(self, where: slice) -> None:
        """The final norm of the target's last outputs, in their places."""
        for rows in self._states.last[where].split(_BLOCKS_AT_ONCE * self._size.drafter.block):
            rows.copy_(self._target.final_norm(rows.to(self._states.device)))

    @torch.no_grad()
    def _exchange(self, part: int) -> bool:
        """Let the next rows of `further` take the places of a part's; False if there are none."""
        i, first, count, _ = self._parts[part]
        if not self._further or len(self._further[i].ids) < count:
            return False
        further, there = self._further[i], self._states.groups[i]
        size = len(further.ids)
        pick = (self._next[i] + torch.arange(count, device=further.ids.device)) % size
        self._next[i] = (self._next[i] + count) % size
        rows = Rows(further.ids[pick], further.start[pick])
        further.ids[pick] = there.ids[first : first + count].to(further.ids)
        further.start[pick] = there.start[first : first + count].to(further.start)
        with _plain_target(self._states.last.dtype):
            self._states.refill(self._target, i, first, rows)
        begin = self._states.offsets[i] + first * rows.ids.shape[1]
        self._normalise(slice(begin, begin + rows.ids.numel()))
        return True

    @torch.no_grad()
    def _draft(self, part: int) -> None:
        i, first, rows, place = self._parts[part]
        ids, start, auxiliary, begin = self._states.rows(i, first, rows)
        block, count = self._size.drafter.block, self._counts[i]
        local = draw_anchors(start, ids.shape[1], block, count)
        offsets = begin + torch.arange(rows, device=ids.device) * ids.shape[1]
        where = slice(place, place + local.numel())
        blocks = self.blocks
        blocks.anchors[where] = (offsets[:, None] + local).flatten()
        with compiled(i in self._compiled):
            blocks.h_draft[where], blocks.floor[where] = _states_of_blocks(
                self._drafter,
                auxiliary,
                ids,
                local,
                self._embedding,
                self._head,
                self._size.adapter.pool,
            )
        self.drafted += local.numel()

    def wait(self) -> None:
        """Wait until what was begun is drafted."""
        float(self.blocks.floor[-1, -1])

    def finish(self) -> Blocks:
        """The blocks, which are not drafted anew any more: lets the target's layer outputs go."""
        self._states.auxiliary = self._states.auxiliary.new_empty(0)
        self._finished = True
        return self.blocks

    def renew(self, blocks: float, other_rows: bool = False) -> None:
        """Draft about so many blocks anew, with `other_rows` of further rows if there are any.

        What is less than a part, or more, is made up for by the next calls; each part's turn comes
        once a round, in an order of its own.

        Raises RuntimeError after `finish`.
        """
        if self._finished:
            raise RuntimeError("blocks cannot be drafted anew: the target's outputs were let go")
        self._owed += blocks
        while True:
            if not self._waiting:
                self._waiting = torch.randperm(len(self._parts)).tolist()
            i, _, rows, _ = self._parts[self._waiting[-1]]
            if self._owed < rows * self._counts[i]:
                return
            self._owed -= rows * self._counts[i]
            part = self._waiting.pop()
            if other_rows:
                self._exchange(part)
            self._draft(part)


@torch.no_grad()
def held_out_blocks(
    size: Size,
    target: Target,
    drafter: Drafter,
    rows: Rows,
    dtype: torch.dtype,
) -> dict[str, Blocks]:
    """Blocks of text that nothing was trained on (`rollouts.generate_held_out`), written greedily
    ("T=0", every other row) and at temperature 1 ("T=1")."""
    found = {}
    layers, block = size.drafter.target_layers, size.drafter.block
    for temperature in (0, 1):
        own = Rows(rows.ids[temperature::2], rows.start[temperature::2])
        states = TextStates(target, [own], layers, block, dtype)
        count = min(_HELD_OUT_BLOCKS, size.eval_tokens)
        found[f"T={temperature}"] = Draft(size, target, drafter, states, [count]).blocks
    return found


@piece
def adapter_loss(
    adapter: WeaverAdapter,
    inputs: tuple[Tensor, Tensor, Tensor, Tensor, Tensor],
    head: Tensor,
    embedding: Tensor,
    weight_D: Tensor,
    kl_share: Tensor,
    variant: Variant,
    dropout: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """The loss, and the share of the target's mass that q covers at each depth [D].

    `inputs` as from `Blocks.take`; the products with `head` [V, d] are in its dtype. The pool is
    dense here: the vocabulary, with what is outside masked. With `dropout`, parts of the states are
    hidden from the adapter alone.
    """
    h_ver, h_draft, floor, tokens, states = inputs
    mixed = head.dtype != torch.float32
    seen = (h_ver, h_draft)
    if dropout:
        seen = (F.dropout(h_ver, dropout), F.dropout(h_draft, dropout))
    with torch.autocast(h_ver.device.type, dtype=torch.bfloat16, enabled=mixed):
        queries = adapter(*seen, tokens[:, :-1], embedding)
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
    size: Size, target: Target, adapter: WeaverAdapter, variant: Variant = BASE
) -> Callable[[Blocks, Tensor, float, float], tuple[Tensor, dict[str, Tensor]]]:
    """The loss and overlap of chosen blocks, of (blocks, which [R], progress, dropout)."""
    weight_D = torch.exp(-torch.arange(size.drafter.depth) / _DEPTH_DECAY)
    embedding = target.embedding.detach()
    weight_D = weight_D.to(embedding.device)
    heads = {dtype: target.head.detach().to(dtype) for dtype in (torch.float32, torch.bfloat16)}

    def loss_of(
        blocks: Blocks, pick: Tensor, progress: float, dropout: float = 0.0
    ) -> tuple[Tensor, dict[str, Tensor]]:
        with torch.no_grad():
            inputs = blocks.take(pick)
        # A tensor, since a compiled step takes numbers for constants.
        kl_share = torch.full((), max(_LAST_KL_SHARE, 1.0 - progress), device=pick.device)
        head = heads[blocks.h_draft.dtype]
        loss, overlap_D = adapter_loss(
            adapter, inputs, head, embedding, weight_D, kl_share, variant, dropout
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
    adapter = new_adapter(size, device)
    step = _step_of(size, target, adapter)
    for _ in range(2):
        pick = torch.randint(count, (size.train_adapter.rows,), device=device)
        loss, _ = step(blocks, pick, 0.0, size.regular.dropout)
        loss.backward()
    float(loss.detach())


class _Average:
    """The running average of an adapter's weights, which follows them closely at first."""

    def __init__(self, adapter: WeaverAdapter, decay: float) -> None:
        self._weights = [p.detach() for p in adapter.parameters()]
        self._average = [w.clone() for w in self._weights]
        self._decay, self._steps = decay, 0

    @torch.no_grad()
    def update(self) -> None:
        self._steps += 1
        decay = min(self._decay, self._steps / (self._steps + 10))
        torch._foreach_lerp_(self._average, self._weights, 1 - decay)

    @torch.no_grad()
    def swap(self) -> None:
        """Put the average into the adapter, and what was there in its place."""
        for average, weight in zip(self._average, self._weights, strict=True):
            kept = weight.clone()
            weight.copy_(average)
            average.copy_(kept)


def train_adapter(
    size: Size,
    target: Target,
    draft: Draft,
    device: str,
    *,
    seconds: float | None,
    log: Callable[[str], None],
    variant: Variant = BASE,
    stage: Stage | None = None,
    regular: Regular | None = None,
    held_out: dict[str, Blocks] | None = None,
    name: str = "adapter",
) -> tuple[WeaverAdapter, dict[str, Any]]:
    """Train an adapter; `stage` and `regular` are the size's own if not given.

    The record has the overlap with the target by depth, of the step's blocks (`history`) and of
    `held_out` ones. Blocks of `draft` are drafted anew as `regular` says.
    """
    adapter = new_adapter(size, device, variant)
    stage, regular = stage or size.train_adapter, regular or size.regular
    optimiser = Optimiser(
        adapter.named_parameters(), stage, adam=("pos_emb",), muon_decay=regular.muon_decay
    )
    step = _step_of(size, target, adapter, variant)
    average = _Average(adapter, regular.average) if regular.average else None
    blocks, before = draft.blocks, draft.drafted

    def loss_of(progress: float) -> tuple[Tensor, dict[str, Tensor]]:
        pick = torch.randint(len(blocks.anchors), (stage.rows,), device=device)
        return step(blocks, pick, progress, regular.dropout)

    def after_step() -> None:
        if average is not None:
            average.update()
        if regular.uses:
            draft.renew(stage.rows / regular.uses, other_rows=regular.sets > 0)

    def measure() -> dict[str, Tensor]:
        # As large as a training step and with gradients, though none is used: a compiled step of
        # another kind would be compiled anew.
        found = {}
        if average is not None:
            average.swap()
        for key, apart in (held_out or {}).items():
            pick = torch.arange(stage.rows, device=device) * len(apart.anchors) // stage.rows
            found[key] = step(apart, pick, 0.0)[1]["overlap"]
        if average is not None:
            average.swap()
        return found

    record = train(
        name,
        stage,
        optimiser,
        loss_of,
        seconds=seconds,
        log=log,
        after_step=after_step,
        measure=measure if held_out else None,
    )
    if average is not None:
        average.swap()
    record["parameters"] = sum(p.numel() for p in adapter.parameters())
    record["blocks"] = len(blocks.anchors)
    record["drafted"] = len(blocks.anchors) + draft.drafted - before
    record["regular"] = dataclasses.asdict(regular)
    return adapter, record
