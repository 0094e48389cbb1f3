# SPDX-License-Identifier: Apache-2.0
"""Shapes of targets, drafters and adapters: read from a config, chosen by name, checked.

Plain numbers only; knows no tensors.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


class ShapeError(ValueError):
    """A small model does not fit into the large shape: one line with both values."""


@dataclass(frozen=True)
class Attention:
    """Heads of softmax attention. `rotary` of the `head_dim` channels turn with the position."""

    heads: int
    kv_heads: int
    head_dim: int
    rotary: int


@dataclass(frozen=True)
class Gdn:
    """Heads of a Gated DeltaNet layer: K per key head, Vh per value head, convolution width W."""

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    conv: int = 4

    @property
    def channels(self) -> int:
        """Channels that the convolution sees: q, k, v."""
        return 2 * self.key_heads * self.key_dim + self.value_heads * self.value_dim


@dataclass(frozen=True)
class TargetShape:
    """A Qwen3.5 text model."""

    width: int
    layer_types: tuple[str, ...]
    mlp: int
    vocab: int
    attention: Attention
    gdn: Gdn
    eps: float
    tied: bool
    max_positions: int

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> TargetShape:
        """From a `config.json` of `Qwen3_5ForCausalLM`."""
        head_dim = config["head_dim"]
        rope = config.get("rope_parameters") or {}
        factor = rope.get("partial_rotary_factor", config.get("partial_rotary_factor", 1.0))
        return cls(
            width=config["hidden_size"],
            layer_types=tuple(config["layer_types"]),
            mlp=config["intermediate_size"],
            vocab=config["vocab_size"],
            attention=Attention(
                heads=config["num_attention_heads"],
                kv_heads=config["num_key_value_heads"],
                head_dim=head_dim,
                rotary=int(head_dim * factor),
            ),
            gdn=Gdn(
                key_heads=config["linear_num_key_heads"],
                value_heads=config["linear_num_value_heads"],
                key_dim=config["linear_key_head_dim"],
                value_dim=config["linear_value_head_dim"],
                conv=config["linear_conv_kernel_dim"],
            ),
            eps=config["rms_norm_eps"],
            tied=bool(config.get("tie_word_embeddings")),
            max_positions=config["max_position_embeddings"],
        )


@dataclass(frozen=True)
class DrafterShape:
    """A DFlash drafter; `target_layers` are z-lab's numbers of the target layers it reads."""

    width: int
    layers: int
    mlp: int
    attention: Attention
    target_layers: tuple[int, ...]
    eps: float

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> DrafterShape:
        """From a `config.json` of `DFlashDraftModel`."""
        head_dim = config["head_dim"]
        return cls(
            width=config["hidden_size"],
            layers=config["num_hidden_layers"],
            mlp=config["intermediate_size"],
            attention=Attention(
                heads=config["num_attention_heads"],
                kv_heads=config["num_key_value_heads"],
                head_dim=head_dim,
                rotary=head_dim,
            ),
            target_layers=tuple(config["dflash_config"]["target_layer_ids"]),
            eps=config["rms_norm_eps"],
        )


@dataclass(frozen=True)
class Large:
    """What a small trio is expanded to.

    Attributes:
        name: of the preset.
        width: hidden channels of target and drafter.
        layers: target layers, in the small target's pattern.
        mlp: of the target.
        vocab: rows of embedding and head.
        attention, gdn: of the target.
        max_positions: of target and drafter.
        drafter_layers, drafter_mlp, drafter_attention: of the drafter.
        drafter_inputs: target layers that the drafter reads.
        rank, rank_heads, rank_mlp: the adapter's width, heads and MLP.
    """

    name: str
    width: int
    layers: int
    mlp: int
    vocab: int
    attention: Attention
    gdn: Gdn
    max_positions: int
    drafter_layers: int
    drafter_mlp: int
    drafter_attention: Attention
    drafter_inputs: int
    rank: int
    rank_heads: int
    rank_mlp: int

    def to_dict(self) -> dict[str, Any]:
        """As JSON takes it; `from_dict` gives it back."""
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Large:
        """From `to_dict`'s result."""
        nested = {"attention": Attention, "gdn": Gdn, "drafter_attention": Attention}
        return cls(**{k: nested[k](**v) if k in nested else v for k, v in data.items()})

    def for_small(self, drafter: DrafterShape) -> Large:
        """With drafter heads at least as wide as the small drafter's, at equal total width."""
        mine = self.drafter_attention
        if drafter.attention.head_dim <= mine.head_dim:
            return self
        head_dim = drafter.attention.head_dim
        if mine.kv_heads * mine.head_dim % head_dim:
            raise ShapeError(
                f"{self.name}: drafter heads of {head_dim} do not divide its KV width "
                f"{mine.kv_heads * mine.head_dim}"
            )
        heads = Attention(
            heads=mine.heads * mine.head_dim // head_dim,
            kv_heads=mine.kv_heads * mine.head_dim // head_dim,
            head_dim=head_dim,
            rotary=head_dim,
        )
        return dataclasses.replace(self, drafter_attention=heads)


# Qwen3.6-27B, z-lab's 1.7 B DFlash drafter and the published 56.7 M adapter, whose MLP is not
# gated: a gated one (variant v2) of the same width has 4.2 M more.
QWEN36_27B = Large(
    name="27b",
    width=5120,
    layers=64,
    mlp=17408,
    vocab=248320,
    attention=Attention(heads=24, kv_heads=4, head_dim=256, rotary=64),
    gdn=Gdn(key_heads=16, value_heads=48, key_dim=128, value_dim=128),
    max_positions=40960,
    drafter_layers=5,
    drafter_mlp=17408,
    drafter_attention=Attention(heads=32, kv_heads=8, head_dim=128, rotary=128),
    drafter_inputs=5,
    rank=2048,
    rank_heads=16,
    rank_mlp=2048,
)

# Everything larger than in the nano models, and small enough for a CPU and float32.
TWICE_NANO = Large(
    name="twice-nano",
    width=512,
    layers=12,
    mlp=640,
    vocab=5056,
    attention=Attention(heads=6, kv_heads=2, head_dim=128, rotary=32),
    gdn=Gdn(key_heads=3, value_heads=9, key_dim=128, value_dim=128),
    max_positions=4096,
    drafter_layers=5,
    drafter_mlp=512,
    drafter_attention=Attention(heads=6, kv_heads=2, head_dim=128, rotary=128),
    drafter_inputs=5,
    rank=512,
    rank_heads=4,
    rank_mlp=1600,
)

SHAPES = {shape.name: shape for shape in (QWEN36_27B, TWICE_NANO)}


def named(name: str, layers: int | None = None) -> Large:
    """A preset, if asked for with another number of target layers.

    Raises:
        ShapeError: no such preset.
    """
    if name not in SHAPES:
        raise ShapeError(f"no shape {name!r}: choose from {', '.join(SHAPES)}")
    shape = SHAPES[name]
    return shape if layers is None else dataclasses.replace(shape, layers=layers)


def parameters(large: Large) -> dict[str, int]:
    """Parameters of the expanded target and drafter, norms left out; a target is untied."""
    d, a, g = large.width, large.attention, large.gdn
    attention = d * a.head_dim * (3 * a.heads + 2 * a.kv_heads)
    value = g.value_heads * g.value_dim
    gdn = d * (g.channels + 2 * value + 2 * g.value_heads) + g.channels * g.conv
    layers = large.layers * 3 * d * large.mlp
    layers += large.layers // 4 * attention + (large.layers - large.layers // 4) * gdn
    b = large.drafter_attention
    draft_attention = d * b.head_dim * 2 * (b.heads + b.kv_heads)
    drafter = large.drafter_layers * (draft_attention + 3 * d * large.drafter_mlp)
    return {
        "target": layers + 2 * large.vocab * d,
        "target_layers": layers,
        "drafter": drafter + large.drafter_inputs * d * d,
    }
