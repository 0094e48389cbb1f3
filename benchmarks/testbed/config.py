# SPDX-License-Identifier: Apache-2.0
"""The sizes of the self-trained models and how long each is trained.

Plain numbers only: this module knows neither the data nor how any of the models works.
"""

from __future__ import annotations

import dataclasses

EOS_ID = 0
MASK_ID = 1
SPECIAL_TOKENS = ("<|endoftext|>", "<|mask|>")


@dataclasses.dataclass(frozen=True)
class TargetShape:
    """A Qwen3.5 text model: three Gated DeltaNet layers, then one full-attention layer."""

    vocab: int
    width: int
    layers: int
    mlp: int
    heads: int
    kv_heads: int
    head_dim: int
    gdn_key_heads: int
    gdn_value_heads: int
    gdn_head_dim: int
    tied: bool
    conv: int = 4
    rope_theta: float = 10000.0
    rotary_factor: float = 0.25
    eps: float = 1e-6
    max_positions: int = 4096

    def is_attention(self, layer: int) -> bool:
        return layer % 4 == 3


@dataclasses.dataclass(frozen=True)
class DrafterShape:
    """A DFlash drafter; its vocabulary is the target's, and its attention unless given."""

    layers: int
    mlp: int
    target_layers: tuple[int, ...]  # z-lab numbering: outputs of these decoder layers
    block: int = 16
    attention: tuple[int, int, int] | None = None  # heads, key-value heads, head width

    @property
    def depth(self) -> int:
        return self.block - 1

    def heads(self, target: TargetShape) -> tuple[int, int, int]:
        """Heads, key-value heads and head width, over this target."""
        return self.attention or (target.heads, target.kv_heads, target.head_dim)


@dataclasses.dataclass(frozen=True)
class AdapterShape:
    rank: int
    heads: int
    mlp: int
    pool: int


@dataclasses.dataclass(frozen=True)
class Stage:
    """One training stage: `steps` optimiser steps at these peak learning rates."""

    steps: int
    rows: int  # per step: rows of text (target), blocks (drafter, adapter)
    muon_lr: float
    adam_lr: float
    warmup: float = 0.02
    decay: float = 0.45


@dataclasses.dataclass(frozen=True)
class Regular:
    """What keeps an adapter from learning its blocks by heart.

    `uses`: how often a block is drawn, on the average, before another takes its place; 0 keeps all
    blocks for the whole training. `sets`: how many further sets of rows, each as large as the
    drafter's own, are written for it; rows of these take the places of others in turn. With 0 they
    are other anchors of the same rows. `dropout`: of the states that the adapter reads. `average`:
    decay, a step, of averaged weights, which then are the result; 0 takes the last ones.
    `muon_decay`: of the matrices, in units of the learning rate.
    """

    uses: float = 0.0
    sets: int = 0
    dropout: float = 0.0
    average: float = 0.0
    muon_decay: float = 0.02


@dataclasses.dataclass(frozen=True)
class Shares:
    """How the seconds of a run (`--within`) are shared out.

    `target`: of the whole run, the most for the target's training; `bench.py` passes it on. The
    drafter gets the share `drafter` of what is left when it begins, less `drafting_s` (the
    drafter's states of the blocks, held-out ones, further rows that are still being written) and
    `ending_s` (files), but leaves the adapter `adapter` of the whole run as long as it has the
    share `drafter_least` itself. The adapter gets all that is left then.
    """

    target: float
    drafter: float
    adapter: float
    drafting_s: float
    ending_s: float = 7.0
    # A drafter that has learned too little makes blocks that an adapter cannot mend.
    drafter_least: float = 1 / 3


@dataclasses.dataclass(frozen=True)
class Group:
    """Rows of one length that drafter and adapter are trained on."""

    length: int
    rows: int  # of the target's own text, as many from each prefix
    prefixes: tuple[int, ...]  # source tokens that start such a row
    text_rows: int  # of source text
    step_rows: int  # in a step of the drafter's training
    blocks: int  # the adapter's blocks per row


@dataclasses.dataclass(frozen=True)
class Size:
    name: str
    target: TargetShape
    drafter: DrafterShape
    adapter: AdapterShape
    train_target: Stage
    train_drafter: Stage
    train_adapter: Stage
    shares: Shares
    sequence: int  # tokens in a row of the target's training
    groups: tuple[Group, ...]
    eval_prompts: int
    eval_context: int
    eval_tokens: int
    max_train_tokens: int  # for the target
    max_prompt_tokens: int  # where only drafter and adapter are trained
    max_files: int | None = None  # first files of the standard library only
    regular: Regular = Regular()  # of the adapter's training


_NANO_TARGET = TargetShape(
    vocab=4096,
    width=256,
    layers=8,
    mlp=448,
    heads=4,
    kv_heads=2,
    head_dim=64,
    gdn_key_heads=2,
    gdn_value_heads=4,
    gdn_head_dim=64,
    tied=True,
)

NANO = Size(
    name="nano",
    target=_NANO_TARGET,
    drafter=DrafterShape(layers=4, mlp=384, target_layers=(1, 3, 5, 6)),
    adapter=AdapterShape(rank=256, heads=4, mlp=1536, pool=256),
    train_target=Stage(steps=2600, rows=64, muon_lr=0.02, adam_lr=3e-3),
    train_drafter=Stage(steps=4000, rows=1536, muon_lr=0.012, adam_lr=2e-3),
    train_adapter=Stage(steps=9000, rows=3072, muon_lr=0.01, adam_lr=1e-3),
    # Its drafter takes twice an adapter's time (101 and 59 s), its 2.3 M blocks 27 s to draft.
    shares=Shares(target=0.38, drafter=0.6, adapter=0.1, drafting_s=20.0),
    sequence=1024,
    groups=(
        Group(384, rows=36864, prefixes=(128, 192, 256), text_rows=0, step_rows=32, blocks=32),
        Group(192, rows=36864, prefixes=(32, 64, 96), text_rows=0, step_rows=28, blocks=20),
        Group(1024, rows=0, prefixes=(), text_rows=3072, step_rows=2, blocks=128),
    ),
    eval_prompts=256,
    eval_context=192,
    eval_tokens=128,
    max_train_tokens=120_000_000,
    max_prompt_tokens=30_000_000,
)

BENCH = Size(
    name="bench",
    target=TargetShape(
        vocab=8192,
        width=768,
        layers=12,
        mlp=2048,
        heads=4,
        kv_heads=2,
        head_dim=256,
        gdn_key_heads=3,
        gdn_value_heads=6,
        gdn_head_dim=128,
        tied=False,
    ),
    # Heads of 128, as z-lab's drafters of Qwen3.6 have; the target's are 256 wide.
    drafter=DrafterShape(layers=4, mlp=2048, target_layers=(1, 4, 7, 10), attention=(8, 4, 128)),
    adapter=AdapterShape(rank=512, heads=4, mlp=1024, pool=256),
    train_target=Stage(steps=2000, rows=32, muon_lr=0.02, adam_lr=3e-3),
    train_drafter=Stage(steps=2500, rows=1536, muon_lr=0.012, adam_lr=2e-3),
    # As many as 100 s hold at 14 ms a step.
    train_adapter=Stage(steps=7000, rows=2048, muon_lr=0.01, adam_lr=1e-3),
    shares=Shares(
        # 135 s of 465: 1,500 steps of 88 ms. Its loss fell from 1.41 to 1.31 over the last quarter
        # of 176 s, and the measure is what adapters win on a target, not the target.
        target=0.29,
        # The further rows are written meanwhile on the same GPU, which takes half of its seconds.
        drafter=0.5,
        # 93 s of 465. With 21 s it was still learning fast.
        adapter=0.2,
        # 14 s for 0.46 M blocks at 30 us, and some for what comes from files.
        drafting_s=18.0,
    ),
    sequence=1024,
    # A block every 8 to 12 of a row's own tokens. It is rows that an adapter learns by heart: twice
    # as many blocks of the same rows cost as much as new rows, and gave nothing.
    groups=(
        Group(384, rows=12288, prefixes=(128, 192, 256), text_rows=0, step_rows=32, blocks=16),
        Group(192, rows=12288, prefixes=(32, 64, 96), text_rows=0, step_rows=28, blocks=16),
        Group(1024, rows=0, prefixes=(), text_rows=1024, step_rows=2, blocks=64),
    ),
    eval_prompts=128,
    eval_context=192,
    eval_tokens=128,
    max_train_tokens=120_000_000,
    max_prompt_tokens=30_000_000,
    # One round: 6,000 steps of 2,048 draws are 27 for each of 0.46 M blocks, so every further row
    # comes in once. A second round would bring the first rows back, at other anchors.
    regular=Regular(uses=24.0, sets=1),
)

TOY = Size(
    name="toy",
    target=dataclasses.replace(_NANO_TARGET, vocab=512, width=64, mlp=128),
    drafter=DrafterShape(layers=2, mlp=128, target_layers=(1, 3, 6)),
    adapter=AdapterShape(rank=64, heads=2, mlp=128, pool=64),
    train_target=Stage(steps=60, rows=8, muon_lr=0.02, adam_lr=3e-3),
    train_drafter=Stage(steps=20, rows=32, muon_lr=0.012, adam_lr=2e-3),
    train_adapter=Stage(steps=20, rows=48, muon_lr=0.01, adam_lr=1e-3),
    shares=Shares(target=0.38, drafter=0.5, adapter=0.2, drafting_s=2.0, ending_s=1.0),
    sequence=128,
    groups=(
        Group(64, rows=16, prefixes=(16, 32), text_rows=0, step_rows=4, blocks=4),
        Group(48, rows=16, prefixes=(8, 16), text_rows=0, step_rows=4, blocks=3),
        Group(96, rows=0, prefixes=(), text_rows=8, step_rows=1, blocks=4),
    ),
    eval_prompts=4,
    eval_context=32,
    eval_tokens=16,
    max_train_tokens=1_000_000,
    max_prompt_tokens=100_000,
    max_files=80,
    regular=Regular(uses=4.0, sets=1),
)

SIZES = {size.name: size for size in (NANO, BENCH, TOY)}
